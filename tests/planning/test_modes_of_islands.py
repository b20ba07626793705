"""Opaque calls under autocast, and in other grad modes, have the bits of the plain step."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memplan
from tests.support.zoo import assert_same_bits, run_steps

WIDTH, ROWS = 16, 32


def read(x: torch.Tensor) -> float:
    return max(0.1, float(x.detach().float().numpy().mean()))


class Reads(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * read(x)


class CastsBack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Reads(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.float())  # type: ignore[no-any-return]


class Twice(nn.Linear):
    """Uses its parameters twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x).relu()) * read(x)


class Within(Twice):
    """Has autocast in it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class ByFunction(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return projected_twice(x, self.weight)


def projected_twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(nn.functional.linear(x, weight), weight) * read(x)


class Recurrent(nn.Module):
    """Uses its parameters at each position."""

    def __init__(self, *_: int) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.view(4, -1, WIDTH))[0].reshape(x.shape) * read(x)  # type: ignore[no-any-return]


class ByGradMode(nn.Module):
    """Looks at grad mode, and is given nothing that requires grad."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * by_grad_mode(torch.arange(WIDTH, dtype=torch.float32, device=x.device))


def by_grad_mode(places: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(places.numpy() * 0.1) * (2.0 if torch.is_grad_enabled() else 1.0)


def around(middle: nn.Module) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A model with a module in its middle, a copy of it, and a sample."""
    torch.manual_seed(3)
    ends = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in "12"]
    net = nn.Sequential(ends[0], middle, ends[1])
    return net, copy.deepcopy(net), torch.randn(ROWS, WIDTH)


@pytest.mark.parametrize("budget", ["1GiB", "min"])
def test_one_model_with_autocast_and_without(budget: str) -> None:
    """The argument of the opaque call has the same dtype in both."""
    net, plain, x = around(CastsBack())
    memplan.apply(net, x, budget, costs="estimate")
    for autocast in (True, False, True):
        found = [run_steps(each, x, autocast=autocast) for each in (plain, net)]
        assert_same_bits(*found)
        plan = memplan.plan_of(net)
        assert plan is not None and plan.islands


@pytest.mark.parametrize("kind", [Twice, Within, ByFunction, Recurrent])
def test_a_parameter_that_autocast_casts_once_for_several_uses(kind: Callable[..., nn.Module]) -> None:
    net, plain, x = around(kind(WIDTH, WIDTH))
    with contextlib.nullcontext() if kind is Within else torch.autocast("cpu", torch.bfloat16):
        memplan.apply(net, x, "1GiB", costs="estimate")
    for autocast in (kind is not Within, False):
        assert_same_bits(*(run_steps(each, x, autocast=autocast) for each in (plain, net)))


@pytest.mark.parametrize("kind", [Twice, ByFunction])
def test_a_parameter_of_several_uses_without_autocast(kind: Callable[..., nn.Module]) -> None:
    net, plain, x = around(kind(WIDTH, WIDTH))
    memplan.apply(net, x, "min", costs="estimate")
    plan = memplan.plan_of(net)
    assert plan is not None and len(plan.islands) == 1
    assert_same_bits(*(run_steps(each, x) for each in (plain, net)))


def test_a_function_that_looks_at_grad_mode() -> None:
    net, plain, x = around(ByGradMode())
    memplan.apply(net, x, "min", costs="estimate")
    plan = memplan.plan_of(net)
    assert plan is not None and plan.islands[0].startswith("by_grad_mode at ")
    assert_same_bits(*(run_steps(each, x) for each in (plain, net)))
