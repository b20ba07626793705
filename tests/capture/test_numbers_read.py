"""Numbers that forward reads from its inputs: what they depend on, at no more cost than they have, and their guards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.capture.capture import Capture, capture
from memplan.capture.ops import dataflow
from memplan.capture.ops.dataflow import Dataflow, storage_of, written_nodes
from tests.support.parameters import examples


class Reads(nn.Module):
    """Reads many numbers of several dtypes, some of which derive from others and some from what it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        ends = lengths.clone()
        ends[1:] += 1
        total = sum(lengths.tolist()) + sum(ends.cumsum(0).tolist())
        if bool((lengths > 0).all()):
            total += float(lengths.double().mean())
        return self.inner(x).sum() / total


def captured(count: int) -> Capture:
    net = Reads()
    return capture(net, net.forward, (torch.randn(2, 4), torch.arange(1, count + 1)))


def test_looking_for_what_numbers_depend_on_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def counted(node: fx.Node) -> list[fx.Node]:
        nonlocal looks
        looks += 1
        return written_nodes(node)

    monkeypatch.setattr(dataflow, "written_nodes", counted)
    found = []
    for count in (32, 128):
        looks = 0
        assert len(captured(count).traced.guards) == 2 * count + 2
        found.append(looks)
    assert found[1] < 5 * found[0]


class Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch leaves it without annotations
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(str(func))
        return func(*args, **(kwargs or {}))


def test_guards_compute_each_result_once_and_read_numbers_together() -> None:
    step = captured(64)
    with Counts() as counts:
        assert step.key.mismatch(step.call) is None
    assert [counts.ran.count(f"aten.{name}") for name in ("cumsum.default", "unbind.int", "gt.Scalar")] == [1, 2, 1]
    assert "aten._local_scalar_dense.default" not in counts.ran


@pytest.mark.parametrize("position", [0, 17, 63])
def test_each_number_is_guarded(position: int) -> None:
    step = captured(64)
    lengths, x = step.call.tensors
    changed = lengths.clone()
    changed[position] += 5
    assert f"planned for {position + 1}" in str(step.key.mismatch(step.call.filled([changed, x])))
    assert step.key.mismatch(step.call.filled([lengths.clone(), x])) is None


def behind(node: fx.Node, nodes: list[fx.Node]) -> list[fx.Node]:
    """What `Dataflow.behind` gives, by a look at every earlier node."""
    needed, storages, found = {node}, {storage_of(node)}, []
    for candidate in reversed(nodes[: nodes.index(node) + 1]):
        writes = candidate.op == "call_function" and any(storage_of(w) in storages for w in written_nodes(candidate))
        if candidate in needed or writes:
            found.append(candidate)
            needed.update(candidate.all_input_nodes)
            storages.update(storage_of(n) for n in candidate.all_input_nodes)
    return found[::-1]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_what_a_node_depends_on_is_found_among_writes_and_views(program: list[tuple[int, int, int]]) -> None:
    def run(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        made = [a, b]
        for kind, i, j in program:
            x, y = made[i % len(made)], made[j % len(made)]
            if kind == 0:
                made.append(x + y[:1])
            elif kind == 1:
                made.append(x[:1])
            elif kind == 2:
                x.add_(y[:1])
            elif kind == 3:
                made.append(x.mul_(2))
            else:
                x[:1].copy_(y[:1])
        return made

    traced = make_fx(run, tracing_mode="fake")(torch.ones(3), torch.ones(3))
    nodes = [node for node in traced.graph.nodes if node.op != "output"]
    flow = Dataflow(traced.graph)
    for node in nodes:
        assert flow.behind(node) == behind(node, nodes)
