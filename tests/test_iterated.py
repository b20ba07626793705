"""The layouts that elementwise ops give their results, down to strides of dimensions of one element."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memplan
from memplan.graph import real_outputs, real_results
from memplan.graph.iterated import iterated_layout
from tests.test_capture import COPIES, logged_trace, plain_log, step_of, with_loss
from tests.zoo import assert_same_bits, run_steps

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


@settings(max_examples=1500, deadline=None)
@given(operands())
def test_the_layout_is_that_of_the_real_kernel(things: list[torch.Tensor | float]) -> None:
    for op in (torch.neg,) if len(things) == 1 else (torch.add, torch.sub, torch.mul, torch.div):
        real = op(*things)
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
    monkeypatch.setattr(real_outputs, "_LAYOUTS", {})
    net, sample = ChannelsOfOnePixel(), torch.randn(2, 3, 3, 3)
    plain = copy.deepcopy(net)
    memplan.apply(net, sample, 1.0, costs="estimate")
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))
    assert "in its first run native_layer_norm " in caplog.text
