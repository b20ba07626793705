"""Ops written to a trace from memory are those that PyTorch writes, and their results lie alike in the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from memplan.capture.ops import op_facts
from memplan.capture.trace.call import CallReader
from memplan.capture.trace.memo import Memo
from memplan.capture.trace.raw_trace import Autocast
from memplan.capture.trace.trace import TraceRequest, trace_step
from tests.support.parameters import quickly
from tests.support.zoo import MODELS, Sample

Described = list[tuple[Any, ...]]


def described(graph: fx.Graph) -> Described:
    """Every node: what it runs on, and the layouts of its results; nodes and memory are numbered as they appear.

    PyTorch 2.15 writes some `detach` as an `alias`, which is the same view.
    """
    storages: dict[int, int] = {}

    def of_value(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value), [of_value(v) for v in value]
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        where = storages.setdefault(storage._cdata, len(storages)), storage.nbytes(), value.storage_offset()
        return type(value), tuple(value.shape), value.stride(), where, value.dtype, value.device, value.requires_grad

    def of_name(node: fx.Node) -> tuple[str, Any]:
        known = node.target is not torch.ops.aten.alias.default
        name, target = (node.name, node.target) if known else ("detach", torch.ops.aten.detach.default)
        return name.rstrip("_0123456789") if name.startswith("detach") else name, target

    numbers = {node: f"%{number}" for number, node in enumerate(graph.nodes)}
    return [
        (
            n.op, *of_name(n), repr(fx.map_arg(n.args, numbers.__getitem__)),
            repr(fx.map_arg(n.kwargs, numbers.__getitem__)), of_value(n.meta.get("val")),
        )
        for n in graph.nodes
    ]  # fmt: skip


def nodes_of(model: nn.Module, sample: Sample) -> Described:
    call = CallReader(model.forward).read_sample(sample)
    raw = trace_step(TraceRequest(model, call, model.forward, Autocast.ambient("cpu"), torch.device("cpu")))
    return described(raw.module.graph)


def from_memory(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ops that were not traced, once traces have run."""
    run, spared = Memo.run, list[Any]()

    def counted(self: Memo, recording: Any, func: Any, args: Any, kwargs: Any, trace: Callable[[], Any]) -> Any:
        asked = list[bool]()

        def traced() -> Any:
            asked.append(True)
            return trace()

        outputs = run(self, recording, func, args, kwargs, traced)
        if not asked:
            spared.append(func)
        return outputs

    monkeypatch.setattr(Memo, "run", counted)
    return spared


def nodes_by_pytorch(monkeypatch: pytest.MonkeyPatch, model: nn.Module, sample: Sample) -> Described:
    with monkeypatch.context() as patch:
        patch.setattr(Memo, "run", lambda self, recording, func, args, kwargs, trace: trace())
        return nodes_of(model, sample)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", quickly(("gpt2", "llama", "vit", "handmade"), "vit", "handmade"))
def test_a_trace_is_the_same_with_and_without(name: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = MODELS[name](0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = nodes_by_pytorch(monkeypatch, model, sample)
        spared = from_memory(monkeypatch)
        found = nodes_of(model, sample)
    assert found == expected
    assert len(spared) > len(expected) / 3


class Awkward(nn.Module):
    """Calls that look alike and are not: shared memory, arguments that are results, views in place, known data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.scale = torch.tensor(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.weight
        for _ in range(3):
            a, b, c = x * 2, x * 3, x * 4
            a.add_(a)
            b.add_(a).sub_(c)
            torch.add(a.detach(), b.detach(), out=c.detach())
            pair = torch.cat([a, a]) + torch.cat([a, b])
            left, right = pair.chunk(2)
            left, right = left.t(), right.t().contiguous()
            flipped = torch.ones(6, 6).t_().mul(torch.tensor(1.5)) * self.scale
            ends = torch.stack(right.unbind(0)[1:5:2]).as_strided((3, 2), (1, 3))
            small = x.half().float() + x.to(torch.float64).float()
            x = x + left + right + c + flipped + small + ends.sum() + torch.squeeze(x[None], 0)
            x = x + torch.max(x, dim=1, keepdim=True).values + x.transpose(0, 1)[..., :1] + x.expand(2, 6, 6)[1]
        return x.square().mean()


def test_calls_that_only_look_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = Awkward(), torch.randn(6, 6)
    expected = nodes_by_pytorch(monkeypatch, model, sample)
    spared = from_memory(monkeypatch)
    assert nodes_of(model, sample) == expected
    assert {torch.ops.aten.sub_.Tensor, torch.ops.aten.t.default, torch.ops.aten.max.dim} <= set(spared)


LOOKS: dict[Any, tuple[Any, ...]] = {
    torch.ops.aten._unsafe_view.default: ([2, -1, 1, 6],),
    torch.ops.aten.alias.default: (),
    torch.ops.aten.as_strided.default: ([2, 3], [1, 2], 3),
    torch.ops.aten.detach.default: (),
    torch.ops.aten.diagonal.default: (1, 0, 2),
    torch.ops.aten.expand.default: ([3, 4, 1, 6],),
    torch.ops.aten.permute.default: ([2, 0, 1],),
    torch.ops.aten.select.int: (2, -1),
    torch.ops.aten.slice.Tensor: (2, 1, 100, 2),
    torch.ops.aten.split.Tensor: (2, 0),
    torch.ops.aten.split_with_sizes.default: ([1, 3], 0),
    torch.ops.aten.squeeze.default: (),
    torch.ops.aten.squeeze.dim: (1,),
    torch.ops.aten.squeeze.dims: ([0, 1],),
    torch.ops.aten.t.default: (),
    torch.ops.aten.transpose.int: (0, -1),
    torch.ops.aten.unbind.int: (2,),
    torch.ops.aten.unfold.default: (2, 3, 2),
    torch.ops.aten.unsqueeze.default: (-2,),
    torch.ops.aten.view.default: ([2, -1, 1, 6],),
}


@pytest.mark.parametrize("made", [(4, 1, 6), (8, 2, 6)], ids=["contiguous", "strided"])
def test_views_lie_as_those_of_real_tensors(made: tuple[int, ...]) -> None:
    assert LOOKS.keys() == op_facts.VIEWS
    for func, args in LOOKS.items():
        results = []
        for device in ("cpu", "meta"):
            tensor = torch.empty(made, device=device)[: made[0] // (1 if made[1] == 1 else 2), :1]
            looked = func(tensor[0] if func is torch.ops.aten.t.default else tensor, *args)
            several = looked if isinstance(looked, (list, tuple)) else [looked]
            results.append([(type(looked) is list, t.shape, t.stride(), t.storage_offset()) for t in several])
        assert results[0] == results[1], func
