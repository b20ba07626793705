"""Backward that starts from gradients which are parts of larger tensors, as `torch.cat` and `torch.stack` give them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from tests.support.zoo import assert_same_bits


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Unflatten(0, (2, -1)), nn.Conv1d(6, 8, 3, padding=1), nn.GELU(), nn.Conv1d(8, 6, 1))


class Cubed(torch.autograd.Function):
    """What no trace sees through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() ** 3)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(3 * x.detach().numpy() ** 2 * grad.numpy())


class EndsOpaquely(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Cubed.apply(super().forward(x))  # type: ignore[no-any-return, no-untyped-call]


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.stem(x))
        return torch.cat([self.left(h), self.right(h).square()])


class HandsOn(torch.autograd.Function):
    """What no trace sees through; gives gradients back as they come."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(t.detach().numpy() * 1) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads


class OpaquePair(TwoOutputs):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        h = torch.tanh(self.stem(x))
        return HandsOn.apply(self.left(h), self.right(h).square())  # type: ignore[no-any-return, no-untyped-call]


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def _attention() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


def two_calls(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([net(x), net(x.flip(0) * 2)])


def stacked(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([net(x), net(x.flip(0) * 2)])


def behind_a_prefix(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros_like(out := net(x)), out])


def along_the_last_dimension(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros_like(out := net(x)), out], -1)


@pytest.mark.parametrize("loss", [two_calls, stacked, behind_a_prefix, along_the_last_dimension])
@pytest.mark.parametrize("grads", ["surface", "edges"])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (_layers, (12, 16)),
        (_layers, (3, 5, 16)),
        (_attention, (3, 5, 16)),
        (Convolutions, (12, 10)),
        (TwoOutputs, (12, 16)),
        (EndsOpaquely, (12, 16)),
    ],
)
def test_parts_of_gradients_are_read_where_they_lie(
    kind: Callable[[], nn.Module], shape: tuple[int, ...], grads: str, loss: Callable[..., torch.Tensor]
) -> None:
    torch.manual_seed(0)
    plain, x = kind(), torch.randn(shape)
    planned = copy.deepcopy(plain)
    with torch.no_grad():
        weights = torch.randn(loss(plain, x).shape)
    memplan.apply(planned, x, 1 << 30, grads=grads, in_flight=2)
    for _ in range(2):
        for net in (plain, planned):
            net.zero_grad()
            (loss(net, x) * weights).sum().backward()
        assert_same_bits([p.grad for p in plain.parameters()], [p.grad for p in planned.parameters()])


def test_parts_of_gradients_are_read_where_they_lie_at_any_size() -> None:
    torch.manual_seed(0)
    plain = _attention()
    planned = copy.deepcopy(plain)
    memplan.apply(planned, torch.randn(3, 5, 16), 1 << 30, dynamic="all")
    for length in (5, 9, 7, 12):
        x = torch.randn(2, length, 16)
        for net in (plain, planned):
            behind_a_prefix(net, x).square().sum().backward()
        assert_same_bits([p.grad for p in plain.parameters()], [p.grad for p in planned.parameters()])


@pytest.mark.parametrize("budget", ["min", 1 << 30])
def test_parts_of_one_gradient_arrive_at_an_opaque_call(budget: int | str) -> None:
    torch.manual_seed(0)
    plain, x, weights = OpaquePair(), torch.randn(12, 16), torch.randn(24, 16)
    planned = copy.deepcopy(plain)
    memplan.apply(planned, x, budget)
    for net in (plain, planned):
        (torch.cat(net(x)) * weights).sum().backward()
    assert_same_bits([p.grad for p in plain.parameters()], [p.grad for p in planned.parameters()])


def test_gradients_of_a_cache_are_read_where_they_lie() -> None:
    torch.manual_seed(0)
    plain, chunks = _layers(), torch.randn(4, 6, 16)
    planned, gradients = copy.deepcopy(plain), torch.randn(4, 6, 16)
    memplan.apply(planned, chunks[0], "min")
    for net in (plain, planned):
        for chunk, gradient in zip(chunks, gradients, strict=True):
            net(chunk).backward(gradient)
    assert_same_bits([p.grad for p in plain.parameters()], [p.grad for p in planned.parameters()])
