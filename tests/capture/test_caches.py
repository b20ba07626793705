"""Models whose first forward leaves something that later ones find: grids, masks, tables of positions."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from tests.support.parameters import quickly
from tests.support.zoo import assert_same_bits, run_steps


class Cached(nn.Module):
    """Adds a table that the first forward makes, and that lives where `how` says."""

    def __init__(self, how: str = "attribute") -> None:
        super().__init__()
        self.how = how
        self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
        self.end = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
        self.register_buffer("slopes", torch.linspace(0.1, 0.9, 8))
        self.register_buffer("in_buffer", None, persistent=False)
        self.table: Any = None
        self.tables: dict[str, Any] = {}

    def made(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(x.shape[0], dtype=torch.float32)[:, None] * self.slopes

    def found(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "attribute":
            if self.table is None or len(self.table) != len(x):
                self.table = self.made(x)
            table = self.table
        elif self.how == "list":
            if self.table is None or len(self.table[0]) != len(x):
                self.table = [self.made(x), len(x)]
            table = self.table[0]
        elif self.how == "dict":
            table = self.tables.setdefault(f"{len(x)}", {"rows": self.made(x)})["rows"]
        elif self.how == "buffer":
            if self.in_buffer is None or len(self.in_buffer) != len(x):
                self.register_buffer("in_buffer", self.made(x), persistent=False)
            table = self.in_buffer
        else:
            if getattr(self, "late", None) is None or len(self.late) != len(x):
                self.register_buffer("late", self.made(x), persistent=False)
            table = self.late
        assert isinstance(table, torch.Tensor)
        return table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.body(x) + self.found(x)).pow(2).mean()  # type: ignore[no-any-return]


WHERE = ["attribute", "list", "dict", "buffer", "new buffer"]


def state_of(net: nn.Module) -> dict[str, Any]:
    """All that a forward may leave in a model, tensors by identity."""
    found = {}
    for name, module in net.named_modules():
        for key, value in {**vars(module), **module._buffers}.items():
            if not key.startswith("_") and key != "forward":
                inner = list(value.items()) if isinstance(value, dict) else value
                found[f"{name}.{key}"] = (id(inner), repr(inner)) if isinstance(inner, torch.Tensor) else repr(inner)
    return found


@pytest.mark.usefixtures("cost_cache")
@pytest.mark.parametrize("how", WHERE)
def test_what_the_first_forward_leaves_is_there_when_the_step_is_captured(how: str) -> None:
    net, sample = Cached(how), torch.randn(64, 8)
    plain = copy.deepcopy(net)
    memplan.apply(net, sample, 0.8)
    assert isinstance(memplan.plan_of(net), memplan.Plan)
    other = copy.deepcopy(net)
    wanted = run_steps(plain, sample)
    assert_same_bits(wanted, run_steps(net, sample))
    assert_same_bits(wanted, run_steps(other, sample))
    assert torch.equal(net.found(sample), plain.found(sample))


@pytest.mark.parametrize("how", quickly(WHERE, "attribute", "dict", "new buffer"))
def test_calls_of_other_shapes_find_and_leave_their_own(how: str) -> None:
    net = Cached(how)
    plain = copy.deepcopy(net)
    memplan.apply(net, torch.randn(64, 8), 0.8)
    for size in (64, 32, 64, 32):
        sample = torch.randn(size, 8)
        assert_same_bits(run_steps(plain, sample), run_steps(net, sample))


@pytest.mark.parametrize("how", WHERE)
def test_nothing_is_left_where_no_plan_is_found(how: str) -> None:
    net, sample = Cached(how), torch.randn(64, 8)
    before = state_of(net)
    with pytest.raises(memplan.BudgetInfeasible):
        memplan.apply(net, sample, 1)
    assert state_of(net) == before


def test_a_cache_that_is_a_buffer_stays_that_buffer() -> None:
    class Aliased(Cached):
        def made(self, x: torch.Tensor) -> torch.Tensor:
            return self.slopes.expand(len(x), 8)

    net, sample = Aliased(), torch.randn(64, 8)
    plain = copy.deepcopy(net)
    memplan.apply(net, sample, 1.0)
    for model in (plain, net):
        model(sample)
        model.slopes.mul_(2)
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))


class OfInputs(Cached):
    def made(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach().abs()


class OfParameters(Cached):
    def made(self, x: torch.Tensor) -> torch.Tensor:
        return self.body[0].weight.detach().mean().expand(len(x), 8).clone()


class OfRandomNumbers(Cached):
    def made(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rand(len(x), 8)


class OfANumberThatWasRead(Cached):
    def made(self, x: torch.Tensor) -> torch.Tensor:
        return super().made(x) * float(x.detach().sum().item())


class EachTime(Cached):
    """Keeps what it was last called with, too."""

    def found(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x * 2
        return super().found(x)


@pytest.mark.parametrize(
    ("kind", "how"),
    quickly(
        itertools.product((OfInputs, OfParameters, OfRandomNumbers, OfANumberThatWasRead), WHERE),
        *((OfInputs, "attribute"), (OfParameters, "list"), (OfRandomNumbers, "dict"), (OfANumberThatWasRead, "buffer")),
        (OfInputs, "new buffer"),
    ),
)
def test_what_depends_on_data_is_left_to_the_first_step(kind: Callable[[str], Cached], how: str) -> None:
    """Planning must not make it of the sample's data, or with random numbers of its own."""
    net, sample = kind(how), torch.randn(64, 8)
    before = state_of(net)
    plain = copy.deepcopy(net)
    memplan.apply(net, sample, 1.0)
    assert memplan.plan_of(net) is None
    assert state_of(net) == before
    other = torch.randn(64, 8)
    assert_same_bits(run_steps(plain, other), run_steps(net, other))


@pytest.mark.parametrize("how", quickly(WHERE, "list", "buffer"))
def test_a_cache_may_be_beside_what_each_run_sets_anew(how: str) -> None:
    net, sample = EachTime(how), torch.randn(64, 8)
    plain = copy.deepcopy(net)
    memplan.apply(net, sample, 0.8)
    assert isinstance(memplan.plan_of(net), memplan.Plan) and not hasattr(net, "last")
    for size in (64, 32, 64):
        other = torch.randn(size, 8)
        assert_same_bits(run_steps(plain, other), run_steps(net, other))
        assert torch.equal(plain.last, net.last)


@pytest.mark.parametrize("how", WHERE)
def test_plans_that_are_only_looked_at_leave_nothing(how: str) -> None:
    net, sample = Cached(how), torch.randn(64, 8)
    before = state_of(net)
    alone = memplan.plan(net, sample, 0.8, costs="estimate")
    assert state_of(net) == before
    memplan.apply(net, sample, 0.8, costs="estimate")
    first = memplan.plan_of(net)
    assert first is not None and alone.schedule == first.schedule
