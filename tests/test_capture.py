"""The trace is the eager step: the same ops with the same shapes, dtypes and strides, in the same order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import networkx as nx
import pytest
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memplan.graph import to_networkx
from memplan.graph.call import CallReader
from memplan.graph.private_api import READ_SCALAR
from memplan.graph.trace import Autocast, RawTrace, trace_step
from memplan.graph.traced import Traced
from memplan.graph.values import build_traced
from tests.zoo import MODELS, Sample, loss_of

aten = torch.ops.aten
CPU = torch.device("cpu")
IGNORED = {aten.detach.default, aten.lift_fresh.default, aten.lift_fresh_copy.default, READ_SCALAR}
COPIES = {aten.clone.default, aten.new_empty_strided.default, aten.copy_.default}

Logged = tuple[Any, list[Any], list[Any]]  # op, what went in, what came out


def facts(tree: Any) -> list[Any]:
    """(dtype, shape, strides) of each tensor, other leaves as they are, without None, which may be left out."""
    return [
        (t.dtype, tuple(t.shape), tuple(t.stride())) if isinstance(t, torch.Tensor) else t
        for t in tree_leaves(tree)
        if t is not None
    ]


def is_view(func: Any, inputs: Any, outputs: Any) -> bool:
    """Whether an op returned only looks at its arguments' memory, and wrote nothing."""
    if func._schema.is_mutable:
        return False
    given = {t.untyped_storage()._cdata for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)}
    made = [t.untyped_storage()._cdata for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)]
    return bool(made) and all(storage in given for storage in made)


class DispatchLog(TorchDispatchMode):
    """Every op of the plain step, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Logged] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = facts((args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func not in IGNORED and not is_view(func, (args, kwargs), out):
            self.ops.append((func, before, facts(out)))
        return out


def logged_trace(raw: RawTrace) -> list[Logged]:
    """The ops of a trace in the form of a dispatch log."""

    def real(thing: Any) -> Any:
        return fx.map_arg(thing, lambda n: n.meta["val"] if "val" in n.meta else getattr(raw.module, str(n.target)))

    found = []
    for node in raw.module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        inputs, outputs = real((node.args, node.kwargs)), node.meta.get("val")
        if node in raw.tangents.values() or node.target in IGNORED or is_view(node.target, inputs, outputs):
            continue
        found.append((node.target, facts(inputs), facts(outputs)))
    return found


def step_of(model: nn.Module, sample: Sample, run: Callable[..., Any], autocast: bool) -> tuple[RawTrace, Traced]:
    call = CallReader(run).read_sample(sample)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        raw = trace_step(model, call, run, Autocast.ambient("cpu"), CPU)
    return raw, build_traced(raw, call.names, CPU)


def plain_log(model: nn.Module, sample: Sample, run: Callable[..., Any], autocast: bool) -> tuple[list[Logged], int]:
    """The log of a plain step, and how many of its ops belong to the forward pass."""
    args, kwargs = (
        ((), sample) if isinstance(sample, dict) else (sample if isinstance(sample, tuple) else (sample,), {})
    )
    with DispatchLog() as log:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = run(*args, **kwargs)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        forward_ops = len(log.ops)
        loss.backward()
    assert log.ops[forward_ops][0] is aten.ones_like.default  # the gradient of the loss itself: the plan's tangent
    del log.ops[forward_ops]
    return log.ops, forward_ops


def with_loss(model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    return loss_of(model(*args, **kwargs))


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", list(MODELS))
def test_the_captured_ops_are_those_of_the_plain_step(name: str, autocast: bool) -> None:
    model, sample = MODELS[name](0)
    has_loss = isinstance(sample, dict) and "labels" in sample
    run = model.forward if has_loss else partial(with_loss, model)
    raw, traced = step_of(model, sample, run, autocast)
    twin = copy.deepcopy(model)
    logged, forward_ops = plain_log(twin, sample, twin.forward if has_loss else partial(with_loss, twin), autocast)
    captured = logged_trace(raw)
    copies = 0
    position = 0
    for index, entry in enumerate(logged):
        if position < len(captured) and entry == captured[position]:
            position += 1
        else:  # the only ops that a trace of autograd.grad lacks are AccumulateGrad's own copies
            assert index >= forward_ops, f"op {index}: {entry}, captured {captured[position]}"
            assert entry[0] in COPIES, f"op {index}: {entry}, captured {captured[position]}"
            copies += entry[0] is not aten.new_empty_strided.default
    assert position == len(captured)
    assert copies == sum(op.kind == "memplan.gradient_copy" for op in traced.graph.ops)


WIDTH = 8
NORMS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "layer norm": lambda x, w, b: nn.functional.layer_norm(x.flatten(2).mT, (WIDTH,), w, b),
    "layer norm without bias": lambda x, w, b: nn.functional.layer_norm(x.flatten(2).mT, (WIDTH,), w) + b,
    "batch norm": lambda x, w, b: nn.functional.batch_norm(x, None, None, w, b, training=True),
    "group norm": lambda x, w, b: nn.functional.group_norm(x, 2, w, b),
}


class Norm(nn.Module):
    def __init__(self, norm: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.norm = norm
        self.convolution = nn.Conv2d(3, WIDTH, 3)
        self.weight, self.bias = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.convolution(x).to(torch.bfloat16), self.weight, self.bias).float().pow(2).mean()


@pytest.mark.parametrize("kind", list(NORMS))
def test_fake_kernels_of_norms_are_corrected(kind: str) -> None:
    """Over a bfloat16 input with float32 weights the statistics are float32, which fake kernels get wrong."""
    model, x = Norm(NORMS[kind]), torch.randn(2, 3, 6, 6)
    raw, _ = step_of(model, x, model.forward, False)
    logged, _ = plain_log(copy.deepcopy(model), x, copy.deepcopy(model).forward, False)
    assert [entry for entry in logged if entry[0] not in COPIES] == [e for e in logged_trace(raw) if e[0] not in COPIES]


def test_the_networkx_view_is_a_dag_in_the_order_of_execution() -> None:
    model, sample = MODELS["handmade"](0)
    _, traced = step_of(model, sample, model.forward, False)
    view = to_networkx(traced.graph)
    assert nx.is_directed_acyclic_graph(view)
    assert view.number_of_nodes() == len(traced.graph.ops) + len(traced.graph.values)
    for (kind, index), (other_kind, other) in view.edges:
        if kind == "value" and other_kind == "op":
            assert index in traced.graph.ops[other].inputs
    assert any(data.get("reuses") for _, _, data in view.edges(data=True)), "the model writes in place"
