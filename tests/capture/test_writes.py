"""Forwards that write to tensors which are no buffers: planning leaves them alone, and planned steps write once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from tests.support.zoo import assert_same_bits, bits_of, run_steps


class Writes(nn.Module):
    """Writes before it computes; `branches` on a result, so that only parts of it can be captured."""

    def __init__(self, write: Callable[[Any, torch.Tensor], None], branches: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.last = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.scale, self.statistics = nn.Parameter(torch.rand(16)), torch.rand(16)
        self.several, self.write, self.branches = [torch.rand(16)], write, branches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self, x)
        hidden = self.first(x * self.scale * self.statistics * self.several[0])
        if self.branches and hidden.abs().mean() > 1e9:
            hidden = hidden * 2
        return self.last(hidden).pow(2).mean()


def to_a_parameter(net: Writes, x: torch.Tensor) -> None:
    net.scale.mul_(0.9)


def to_an_attribute(net: Writes, x: torch.Tensor) -> None:
    net.statistics.mul_(0.9)


def to_a_list(net: Writes, x: torch.Tensor) -> None:
    net.several[0].mul_(0.9)


def to_the_argument(net: Writes, x: torch.Tensor) -> None:
    x.mul_(0.9)


def another_storage(net: Writes, x: torch.Tensor) -> None:
    net.scale.data = net.scale.data * 0.9


def to_the_data_of_an_attribute(net: Writes, x: torch.Tensor) -> None:
    net.statistics.data.mul_(0.9)


WAYS = [to_a_parameter, to_an_attribute, to_a_list, to_the_argument, another_storage, to_the_data_of_an_attribute]


@pytest.mark.parametrize("write", WAYS)
@pytest.mark.parametrize("branches", [False, True], ids=["whole", "in-parts"])
def test_planning_leaves_them_alone_and_steps_write_once(write: Any, branches: bool) -> None:
    torch.manual_seed(0)
    net, sample = Writes(write, branches), torch.randn(64, 16)
    plain = copy.deepcopy(net)
    written = (net.scale, net.statistics, net.several[0], sample)
    before = [bits_of(t).clone() for t in written]
    memplan.apply(net, sample, 10**7, costs="estimate")
    assert_same_bits(before, [bits_of(t) for t in written])
    assert_same_bits(run_steps(plain, sample.clone()), run_steps(net, sample.clone()))
    assert_same_bits([plain.statistics, *plain.several], [net.statistics, *net.several])


class Table:
    """Positions that are made when they are first asked for: an object that is called, and no module."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] | None = None

    def __call__(self, length: int) -> torch.Tensor:
        if self.made is None:
            self.made = [torch.arange(length).float().cos()]
        return self.made[0]


def test_what_forward_sets_on_an_object_that_is_called_is_put_back() -> None:
    torch.manual_seed(0)
    net, sample = Writes(lambda net, x: x.mul_(net.table(16)), False), torch.randn(64, 16)
    net.table = Table()
    plain = copy.deepcopy(net)
    with pytest.raises(memplan.BudgetInfeasible):
        memplan.apply(net, sample, 1, costs="estimate")
    assert net.table.made is None
    memplan.apply(net, sample, 10**7, costs="estimate")
    assert_same_bits(run_steps(plain, sample.clone()), run_steps(net, sample.clone()))


class Remembers(nn.Module):
    """Tables that are kept by functions, with a bound to how many and without."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.angles = nn.Linear(16, 16), torch.rand(16)

    @functools.cache  # noqa: B019
    def table(self, length: int) -> torch.Tensor:
        return self.angles[:length].cos()

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def tables(self, length: int) -> dict[str, list[torch.Tensor]]:
        return {"sines": [self.angles[:length].sin()]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x) * self.table(16) + self.tables(16)["sines"][0]).sum()


class RandomFeatures(Remembers):
    @functools.cache  # noqa: B019
    def drawn(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(self.layer(x) @ self.drawn(16)).sum()


def test_random_numbers_that_a_function_remembers_are_drawn_once() -> None:
    net, sample = RandomFeatures(), torch.randn(4, 16)
    with pytest.raises(memplan.UnsupportedModel, match=r"call the function once before memplan\.apply"):
        memplan.apply(net, sample, 10**7, costs="estimate")
    assert RandomFeatures.drawn.cache_info().currsize == 0
    net(sample)
    weights = copy.deepcopy(net.state_dict())
    memplan.apply(net, sample, 10**7, costs="estimate")
    planned = run_steps(net, sample)
    net.load_state_dict(weights)
    assert_same_bits(run_steps(memplan.remove(net), sample), planned)


def test_what_functions_remember_is_nothing_of_a_trace() -> None:
    torch.manual_seed(0)
    net, sample = Remembers(), torch.randn(4, 16)
    memplan.plan(net, sample, 1.0, costs="estimate")
    assert_same_bits([net.angles.cos(), net.angles.sin()], [net.table(16), *net.tables(16)["sines"]])
    plain = copy.deepcopy(net)
    memplan.apply(net, sample, 1.0, costs="estimate")
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))
