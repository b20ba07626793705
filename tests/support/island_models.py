"""Models with modules that can't be captured, and what is compared of their steps."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import memplan
from tests.support.meter import live_peak
from tests.support.zoo import assert_same_bits, run_steps

Sample = Any
WIDTH = 16


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.back = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) * self.norm.weight  # x is read twice
        return self.drop(self.back(torch.nn.functional.gelu(self.wide(normed))))


class Inside(nn.Module):
    """A module among blocks, with a sum around it, whose gradients autograd adds one by one."""

    def __init__(self, middle: nn.Module, width: int = WIDTH, summed: bool = True) -> None:
        super().__init__()
        self.first, self.middle, self.last = Block(width), middle, Block(width)
        self.summed = summed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        x = x + self.middle(x) if self.summed else self.middle(x)
        return (x + self.last(x)).pow(2).mean()


def twins(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    nets = []
    for _ in range(2):
        torch.manual_seed(3)
        nets.append(build().train())
    return nets[0], nets[1]


def rows(count: int = 64, width: int = WIDTH, seed: int = 2) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def whole_plan(net: nn.Module) -> memplan.Plan:
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan)
    return plan


def steps(net: nn.Module, sample: Sample) -> Any:
    """What three steps leave, generators of Python and NumPy included, and which parameters got gradients."""
    random.seed(4)
    np.random.seed(4)
    found = [run_steps(net, sample, steps=1)]
    for seed in range(2):
        batch = sample * (1 + 0.2 * seed) if isinstance(sample, torch.Tensor) else sample
        found.append(run_steps(net, batch, steps=1))
        found.append({n: p.grad is None for n, p in net.named_parameters()})
    return [found, random.random(), np.random.rand()]


def assert_planned(
    build: Callable[[], nn.Module], sample: Sample, *islands: str, budget: Any = "min", exactly: bool = True
) -> tuple[nn.Module, memplan.Plan]:
    """Bits, peak and islands of a model at its least budget, and of a copy. Gives the model and its plan."""
    net, plain = twins(build)
    memplan.apply(net, sample, budget)
    plan = whole_plan(net)
    assert plan.peak_bytes < plan.baseline_peak_bytes
    assert sorted(line.partition(" at ")[0] for line in plan.islands) == sorted(islands)
    assert all(name in plan.report() for name in islands)
    other = copy.deepcopy(net)
    peak_bytes = live_peak(net, sample)
    assert peak_bytes <= plan.live_peak_bytes
    assert peak_bytes == plan.live_peak_bytes or not exactly
    expected = steps(copy.deepcopy(plain), sample)
    assert_same_bits(expected, steps(other, sample))
    return net, plan


class Branching(nn.Module):
    """Blocks with a branch on a computed number between them."""

    def __init__(self, width: int = 32, dropout: float = 0.0, tied: bool = False, again: bool = False) -> None:
        super().__init__()
        self.first, self.second = Block(width, dropout), Block(width, dropout)
        self.head = nn.Linear(width, width)
        self.again = again
        if tied:
            self.second.wide.weight = self.first.wide.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x + self.first(x)
        hidden = hidden * 2 if hidden.sum().item() > 0 else torch.tanh(hidden) + hidden
        if self.again:
            hidden = hidden + self.first(hidden)
        hidden = hidden + self.second(hidden)
        return self.head(hidden).pow(2).mean()


class Around(nn.Module):
    """A whole model as the first of two parts."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.scale = net, nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.scale  # type: ignore[no-any-return]


class Counts(nn.Module):
    """Counts its calls in Python, which a second run of its forward would show."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x).relu() * self.calls


class Normalises(Counts):
    """Writes to buffers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))
