"""The trace is the eager step: the same ops with the same shapes, dtypes and strides, in the same order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import memplan
from memplan.capture.analysis.traced import Traced
from memplan.capture.analysis.values import build_traced
from memplan.capture.trace.call import CallReader
from memplan.capture.trace.raw_trace import Autocast, RawTrace
from memplan.capture.trace.trace import TraceRequest, trace_step
from memplan.costs.measure import measure
from memplan.errors import UnsupportedModel
from memplan.installed.planned_forward import planned_forward
from memplan.runtime.program.check import TRACED
from memplan.torch_private import READ_SCALAR, run_in_mode
from tests.support.parameters import quickly
from tests.support.small import at_floor
from tests.support.zoo import MODELS, Sample, assert_same_bits, loss_of, run_steps

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
        out = run_in_mode(func, args, kwargs)
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
        raw = trace_step(TraceRequest(model, call, run, Autocast.ambient("cpu"), CPU))
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


@pytest.mark.parametrize("autocast", [pytest.param(False, marks=pytest.mark.slow), True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", quickly(MODELS, "gpt2", "llama", "t5", "vit", "resnet", "transformer", "handmade"))
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


Elementwise = Callable[[torch.Tensor], torch.Tensor]
LAID_OUT: dict[str, tuple[int, Elementwise]] = {  # number of dimensions, and an op whose layout fake kernels get wrong
    "layer norm": (3, lambda x: nn.functional.layer_norm(x, x.shape[-1:])),
    "batch norm": (4, lambda x: nn.functional.batch_norm(x, None, None, training=True)),
    "log softmax": (3, lambda x: nn.functional.log_softmax(x, 1)),
    "roll": (4, lambda x: torch.roll(x, (1, 1), (1, 2))),
    "reflected padding": (4, lambda x: nn.functional.pad(x, (1, 1, 1, 1), mode="reflect")),
    "replicated padding": (4, lambda x: nn.functional.pad(x, (1, 1, 1, 1), mode="replicate")),
    "elu": (3, nn.functional.elu),
    "softplus": (3, nn.functional.softplus),
    "hardswish": (3, nn.functional.hardswish),
    "hardsigmoid": (3, nn.functional.hardsigmoid),
    "gelu": (3, nn.functional.gelu),
    "silu": (3, nn.functional.silu),
    "mish": (3, nn.functional.mish),
    "tanh": (3, torch.tanh),
    "log sigmoid": (3, nn.functional.logsigmoid),
    "random leaky relu": (3, lambda x: nn.functional.rrelu(x, training=True)),
    "square distance": (3, lambda x: nn.functional.mse_loss(x, x * 2, reduction="none")),
    "smooth distance": (3, lambda x: nn.functional.smooth_l1_loss(x, x * 2, reduction="none")),
    "huber distance": (3, lambda x: nn.functional.huber_loss(x, x * 2, reduction="none")),
    "divergence": (3, lambda x: nn.functional.kl_div(x, x.softmax(-1), reduction="none")),
}


class Permuted(nn.Module):
    """An op between two permutations: what goes into it and its gradient lie in one order of dimensions or another."""

    def __init__(self, function: Elementwise, order: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.function, self.order, self.dtype = function, order, dtype
        self.inverse = tuple(order.index(i) for i in range(len(order)))
        self.scale = nn.Parameter(torch.ones(()))

    def laid(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(self.order).contiguous().permute(self.inverse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (x * self.scale).to(self.dtype)
        permuted_input, permuted_gradient = self.function(self.laid(hidden)), self.laid(self.function(hidden))
        expanded_gradient = self.function(self.laid(hidden)).sum()
        return (permuted_input.float() * 2).sum() + permuted_gradient.float().pow(2).sum() + expanded_gradient


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize(
    "name",
    quickly(
        LAID_OUT, "layer norm", "batch norm", "log softmax", "roll", "reflected padding", "gelu", "random leaky relu",
        "square distance", "divergence",
    ),
)  # fmt: skip
def test_layouts_of_fake_kernels_are_corrected(name: str, dtype: torch.dtype) -> None:
    dimensions, function = LAID_OUT[name]
    x = torch.randn((2, 4, 5, 6)[:dimensions])
    for order in permutations(range(dimensions)):
        model = Permuted(function, order, dtype)
        raw, _ = step_of(model, x, model.forward, False)
        logged, _ = plain_log(copy.deepcopy(model), x, copy.deepcopy(model).forward, False)
        assert [e for e in logged if e[0] not in COPIES] == [e for e in logged_trace(raw) if e[0] not in COPIES]


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "square distance": nn.functional.mse_loss,
    "smooth distance": nn.functional.smooth_l1_loss,
    "cross entropy of probabilities": lambda x, y: nn.functional.binary_cross_entropy(x.sigmoid(), y),
    "soft margin": nn.functional.soft_margin_loss,
    "sums of patches": lambda x, y: nn.functional.fold(nn.functional.unfold(x, 2), x.shape[-2:], 2).mean(),
}


class Loss(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.scale, y)


@pytest.mark.parametrize("name", list(LOSSES))
def test_results_that_kernels_shrink_count_with_all_of_their_memory(name: str, cost_cache: Path) -> None:
    model, sample = Loss(LOSSES[name]), (torch.randn(2, 4, 6, 6), torch.ones(2, 4, 6, 6))
    _, traced = step_of(model, sample, model.forward, False)
    tensors = dict(model.named_parameters())
    measure(traced, lambda kind, key, i: sample[i] if kind == "input" else tensors[key])


class Experts(nn.Module):
    """A grouped product, as mixtures of experts run them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16, 8).to(dtype))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        product = nn.functional.grouped_mm(x.to(self.weight.dtype), self.weight.mT, offs=ends)
        return product.relu().float().pow(2).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_grouped_products_of_any_dtype_are_captured(dtype: torch.dtype) -> None:
    model, sample = Experts(dtype), (torch.randn(10, 8), torch.tensor([2, 6, 10], dtype=torch.int32))
    raw, _ = step_of(model, sample, model.forward, False)
    twin = copy.deepcopy(model)
    logged, _ = plain_log(twin, sample, twin.forward, False)
    assert [e for e in logged if e[0] not in COPIES] == [e for e in logged_trace(raw) if e[0] not in COPIES]


def test_a_wrong_fake_kernel_is_refused_before_it_does_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no op was run at planning, the first planned step compares every result with the trace."""
    sample = torch.randn(4, 8)
    for part in ("forward", "backward"):
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        memplan.apply(net, sample, 1.0, costs="estimate", on_mismatch="raise")
        program = getattr(planned_forward(net).steps[0].runner.program, part)
        told = next(n for n in program.graph.nodes if n.op == "call_function" and "tanh" in str(n.target))
        traced = told.meta[TRACED]
        monkeypatch.setitem(traced.meta, "val", torch.empty(traced.meta["val"].shape).t().contiguous().t())
        with pytest.raises(memplan.UnsupportedModel, match=r"tanh.*fake kernel for it is wrong"):
            net(sample).pow(2).sum().backward()


class Tables(nn.Module):
    """Looks at tensors that are neither parameters nor buffers, at one of them several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.table, self.pair = torch.rand(64, 8), torch.rand(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, shift = self.pair.unbind(0)
        for layer in self.layers:
            x = torch.tanh(layer(x) * self.table[: len(x)].t().cos().t() + self.table[1 : 1 + len(x)] * scale + shift)
        return x.sum()


def test_looking_at_a_constant_takes_no_memory() -> None:
    net, sample = Tables(), torch.randn(4, 8)
    graph = memplan.plan(net, sample, 1.0, costs="estimate").problem.graph
    assert [v.size_bytes for v in graph.values if v.role == "constant"] == [2 * 8 * 4, 64 * 8 * 4]
    assert not [op.name for op in graph.ops if op.kind in ("aten.slice.Tensor", "aten.unbind.int", "aten.t.default")]


class AsksForAddress(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum() if x.data_ptr() else x.sum()


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")  # by default PyTorch only warns of it
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "parameters elsewhere"])
def test_code_that_asks_for_an_address_is_refused(elsewhere: bool) -> None:
    net = AsksForAddress()
    call = CallReader(net.forward).read_sample(torch.randn(4, 8))
    shapes = {"weight": torch.Size([8])} if elsewhere else {}
    with pytest.raises(UnsupportedModel, match="data pointer"):
        trace_step(TraceRequest(net, call, net.forward, Autocast.ambient("cpu"), CPU, shapes=shapes))


def test_values_say_what_is_stored_there() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(inplace=True), nn.Linear(6, 2, dtype=torch.float32))
    values = memplan.plan(net, torch.randn(4, 8), 1.0, costs="estimate").problem.graph.values
    tensors = {v.name: v.tensor for v in values}
    assert tensors["0.weight"] == tensors["gradient of parameter 0.weight"] == "float32[6, 8]"
    assert tensors["input"] == "float32[4, 8]"
    overwritten = [v for v in values if v.reuses is not None and v.role == "activation"]
    assert overwritten
    assert {v.tensor for v in overwritten} == {"float32[4, 6]"}
    for v in values:
        dtype, _, shape = v.tensor.rstrip("]").partition("[")
        assert (
            v.size_bytes
            == torch.Size(map(int, filter(None, shape.split(", ")))).numel() * getattr(torch, dtype).itemsize
        )


class BiasesOnly(nn.Module):
    """Convolutions that train nothing but their biases, after a batch norm of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh())
        for layer in (self.layers[1], self.layers[3]):
            layer.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).pow(2).mean()


@pytest.mark.parametrize("source", ["measure", "estimate"])
def test_kernels_give_less_or_more_gradients_than_fake_ones(source: Any) -> None:
    """That of batch norm's input is left out where nobody asks, that of a frozen weight comes with the bias's."""
    plain, sample = BiasesOnly(), torch.randn(2, 3, 9, 9)
    net = memplan.apply(copy.deepcopy(plain), sample, 1.0, costs=source)
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))


class Complex(nn.Module):
    """A view of a view in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(torch.tanh(x @ self.weight).view(6, 4, 2))
        return ((pairs * pairs).abs() + torch.exp(pairs.real)).mean()


def test_views_in_another_dtype() -> None:
    plain, sample = Complex(), torch.randn(6, 8)
    net = at_floor(copy.deepcopy(plain), sample)
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))
