"""The layouts that elementwise ops give their results, down to strides of dimensions of one element."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memplan
from memplan.capture.ops import real_results
from memplan.capture.ops.layout import iterated_layout
from tests.capture.test_capture import COPIES, logged_trace, plain_log, step_of, with_loss
from tests.support.zoo import assert_same_bits, run_steps

aten = torch.ops.aten
ARITHMETIC = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}  # which broadcast, and take numbers
SIZES = st.lists(st.sampled_from([1, 1, 2, 3]), min_size=1, max_size=5)


@st.composite
def strided(draw: st.DrawFn, size: list[int]) -> torch.Tensor:
    """A tensor whose dimensions lie in any order, apart or close together; those of one element have any stride."""
    stride, step = [0] * len(size), 1
    for dimension in draw(st.permutations(range(len(size)))):
        stride[dimension] = step
        step *= size[dimension] * draw(st.sampled_from([1, 1, 1, 2]))
    odd = st.sampled_from([1, step, 2 * step, *stride])
    return torch.empty_strided(size, [draw(odd) if n == 1 else s for n, s in zip(size, stride, strict=True)])


@st.composite
def operands(draw: st.DrawFn) -> list[torch.Tensor | float]:
    size = draw(SIZES)
    first = draw(strided(size))
    kind = draw(st.sampled_from(["same size", "same strides", "broadcast", "fewer dimensions", "number", "none"]))
    if kind == "none":
        return [first]
    second: torch.Tensor | float = 2.0
    if kind == "same size":
        second = draw(strided(size))
    elif kind == "same strides":
        second = torch.empty_strided(first.shape, first.stride())
    elif kind == "broadcast":
        second = draw(strided([draw(st.sampled_from([1, n])) for n in size]))
    elif kind == "fewer dimensions":
        second = draw(strided(size[draw(st.integers(0, len(size) - 1)) :]))
    turned = isinstance(second, torch.Tensor) and draw(st.booleans())
    return [second, first] if turned else [first, second]


def called(op: Any, things: list[torch.Tensor | float]) -> torch.Tensor:
    """The result for operands in the order of their say."""
    order = real_results._ITERATED[op]
    arguments = [things[order.index(place)] for place in range(len(things))]
    extra = {aten.threshold_backward.default: (0.1,), aten.leaky_relu_backward.default: (0.1, False)}
    return op(*arguments, *extra.get(op, ()))  # type: ignore[no-any-return]


@settings(max_examples=1000, deadline=None)
@given(operands())
def test_the_layout_is_that_of_the_real_kernel(things: list[torch.Tensor | float]) -> None:
    same_size = all(isinstance(t, torch.Tensor) and t.shape == things[0].shape for t in things)  # type: ignore[union-attr]
    for op, order in real_results._ITERATED.items():
        if len(order) == len(things) and (same_size or op in ARITHMETIC):
            real = called(op, things)
            assert iterated_layout(things) == (tuple(real.shape), real.stride()), op


class ChannelsOfOnePixel(nn.Module):
    """Gradients of an (N, C, 1, 1) tensor come out of a permuted layer norm in strides of channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.mix = nn.Sequential(nn.Conv2d(16, 32, 1), nn.ReLU(), nn.Conv2d(32, 16, 1, bias=False), nn.BatchNorm2d(16))
        self.share = nn.Parameter(torch.full((16, 1, 1), 0.3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        x = x + self.share * (self.mix(x) - x)
        hidden: torch.Tensor = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(hidden.mean((2, 3)))  # type: ignore[no-any-return]


@pytest.fixture
def nothing_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_results, "_NOTED", {})


@pytest.mark.usefixtures("nothing_is_noted")
def test_captured_strides_are_those_of_the_plain_step() -> None:
    net, sample = ChannelsOfOnePixel(), torch.randn(2, 3, 3, 3)
    memplan.plan(net, sample, 1.0, loss_fn=with_loss)  # notes what kernels give that nobody knew of
    twin = copy.deepcopy(net)
    logged, _ = plain_log(twin, sample, partial(with_loss, twin), False)
    captured = logged_trace(step_of(net, sample, partial(with_loss, net), False)[0])
    assert [entry for entry in logged if entry[0] not in COPIES] == [e for e in captured if e[0] not in COPIES]


@pytest.mark.usefixtures("nothing_is_noted")
def test_the_first_step_tells_strides_of_dimensions_of_one_element_that_ops_read(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_results, "_LAYOUTS", {})
    net, sample = ChannelsOfOnePixel(), torch.randn(2, 3, 3, 3)
    plain = copy.deepcopy(net)
    memplan.apply(net, sample, 1.0, costs="estimate")
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))
    assert "in its first run native_layer_norm " in caplog.text


class Doubled(torch.autograd.Function):
    """Adds in its own backward, where nothing is in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 1.5 + torch.sigmoid(gradient)


class ChannelsLast(torch.autograd.Function):
    """Gives its gradient on in the strides of channels last."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.empty_strided((2, 8, 1, 1), (8, 1, 8, 8)).copy_(gradient)


class OwnSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * ChannelsLast.apply(Doubled.apply(self.weight))).pow(2).mean()  # type: ignore[no-any-return,no-untyped-call]


class SharedDepthwise(nn.Module):
    """A weight of shape (C, 1, 3, 3) whose two gradients lie as channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(8, 1, 3, 3))
        self.gate = nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.conv2d(self.stem(x), self.weight, padding=1, groups=8).tanh()
        x = nn.functional.conv2d(x, self.weight, padding=1, groups=8)
        gate = self.gate(x.mean((2, 3), keepdim=True))
        return (x * (gate.sigmoid() + gate.tanh())).pow(2).mean()  # type: ignore[no-any-return]


SUMS = {
    "engine": (SharedDepthwise, (2, 3, 8, 8), (9, 1, 3, 1)),
    "own function": (OwnSum, (2, 8, 4, 4), (8, 1, 1, 1)),
}


@pytest.mark.parametrize("costs", ["measure", "estimate"])
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_gradients_have_the_strides_of_eager(name: str, costs: Any) -> None:
    kind, size, stride = SUMS[name]
    net = kind().to(memory_format=torch.channels_last) if name == "engine" else kind()
    sample = torch.randn(size).contiguous(memory_format=torch.channels_last)
    plain = copy.deepcopy(net)
    memplan.apply(net, sample, 1.0, costs=costs)
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))
    for model in (net, plain):
        weight = model.get_parameter("weight")
        assert weight.grad is not None
        assert weight.grad.stride() == stride


def strides_in_backward(loss: torch.Tensor) -> dict[str, list[tuple[int, ...]]]:
    """Of all gradients that reach nodes of the autograd graph, as eager hands them on."""
    found: dict[str, list[tuple[int, ...]]] = {}
    pending, seen = [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [target for target, _ in node.next_functions]
        if not node.name().endswith("AccumulateGrad"):
            strides = found.setdefault(node.name(), [])
            node.register_prehook(
                lambda given, strides=strides: strides.extend(g.stride() for g in given if g is not None)
            )
    loss.backward()
    return found


def test_eager_sums_in_place_as_is_told_here() -> None:
    """A gradient that a kernel made stays as it lies; one that is a view, or that others hold, does not."""
    x = torch.randn(2, 8, 1, 1, requires_grad=True)

    def strides_of(first: Any) -> tuple[int, ...]:
        y = x.tanh()
        later = y.sigmoid()
        out = (first(y) * 2).sum() + (later * 3).sum()
        return strides_in_backward(out)["TanhBackward0"][0]

    norm = nn.LayerNorm(8)
    assert strides_of(ChannelsLast.apply) == (8, 1, 8, 8)
    assert strides_of(lambda y: norm(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)) == (8, 1, 1, 1)
