"""What can't be captured runs as islands or unplanned, with the plain bits, or is refused: never a third thing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memplan
from tests.capture.test_refusals import (
    AppendsToAList,
    Counter,
    CountOfNonzero,
    CountsInADict,
    DataBranch,
    DataShape,
    DrawsAndBranches,
    Foreign,
    KeepsATensor,
    KeepsATensorInADict,
    NoGrad,
    NumpyRandom,
    OwnGenerator,
    PythonRandom,
    RandomBranch,
    Resizes,
    SeedsItself,
    Selected,
    SparseEmbedding,
    UsesNumpy,
    WritesIntoAnEmptyTensor,
)
from tests.support.parameters import quickly
from tests.support.small import Net, net_and_sample
from tests.support.zoo import assert_same_bits, copied

KINDS = [
    AppendsToAList, CountOfNonzero, Counter, CountsInADict, DataBranch, DataShape, DrawsAndBranches,
    Foreign, KeepsATensor, KeepsATensorInADict, NoGrad, NumpyRandom, OwnGenerator, PythonRandom, RandomBranch,
    Resizes, SeedsItself, Selected, SparseEmbedding, UsesNumpy, WritesIntoAnEmptyTensor,
]  # fmt: skip
QUICK = (  # one of those that are alike
    AppendsToAList, DataBranch, DataShape, DrawsAndBranches, Foreign, KeepsATensor, NoGrad,
    NumpyRandom, OwnGenerator, SeedsItself, SparseEmbedding, WritesIntoAnEmptyTensor,
)  # fmt: skip


class Inside(nn.Module):
    """Such a model as one of three blocks."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.odd, self.last = Net(), kind(), Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.odd(x) * self.last(x)


def steps(net: nn.Module, sample: torch.Tensor) -> Any:
    """Everything that three steps leave, generators of Python and numpy included."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    losses, optimizer = [], torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(sample)
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return copied(
        [
            losses,
            [None if p.grad is None else p.grad.to_dense() for p in net.parameters()],
            dict(net.state_dict()),
            torch.get_rng_state(),
            random.random(),
            np.random.random(),
        ]
    )


@pytest.mark.parametrize(
    ("inside", "budget"),
    [(True, 0.5), *(pytest.param(*p, marks=pytest.mark.slow) for p in ((False, 0.5), (False, 1.0), (True, 1.0)))],
)
@pytest.mark.parametrize("kind", quickly(KINDS, *QUICK), ids=lambda kind: kind.__name__)
def test_plain_bits_or_a_refusal(kind: type[nn.Module], inside: bool, budget: float) -> None:
    (net, sample), (twin, _) = (net_and_sample((lambda: Inside(kind)) if inside else kind) for _ in range(2))
    before = copied(dict(net.state_dict()))
    try:
        memplan.apply(twin, sample, budget, costs="estimate")
    except memplan.MemplanError:
        assert_same_bits(before, copied(dict(twin.state_dict())), "a refused model")
        assert_same_bits(steps(net, sample), steps(twin, sample), "a refused model")
        return
    assert_same_bits(before, copied(dict(twin.state_dict())), "a planned model")
    assert_same_bits(steps(net, sample), steps(twin, sample))


@pytest.mark.parametrize(
    "kind",
    quickly((RandomBranch, PythonRandom, NumpyRandom, DrawsAndBranches), PythonRandom, DrawsAndBranches),
)
def test_planning_in_the_middle_of_a_step_draws_nothing(kind: type[nn.Module]) -> None:
    (net, sample), (twin, _) = (net_and_sample(lambda: Inside(kind)) for _ in range(2))
    memplan.apply(twin, None, 1 << 30, costs="estimate")
    assert_same_bits(steps(net, sample), steps(twin, sample))


class Critic(nn.Module):
    """Calls a module that it has in a list, and branches, so that it runs unplanned."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()
        self.others = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x * self.inner(x)
        return self.others[0](hidden * 2 if hidden.detach().mean().item() > 1e9 else hidden).square().mean()


def test_buffers_of_modules_that_are_not_registered_are_left_alone_by_planning() -> None:
    (net, sample), (twin, _) = (net_and_sample(Critic) for _ in range(2))
    memplan.apply(twin, sample, 1 << 30, costs="estimate")
    left = []
    for model in (net, twin):
        result = steps(model, sample)
        left.append([result, copied(dict(model.others[0].state_dict()))])
    assert_same_bits(*left)


class Scaled(nn.Module):
    """Takes a number from an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def forward(self, x: torch.Tensor, draw: Any) -> torch.Tensor:
        return self.inner(x) * (draw.random() if hasattr(draw, "random") else next(draw))


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def random(self) -> float:
        self.total += 1
        return self.total.item()


DRAWS: dict[str, Callable[[], Any]] = {
    "python": lambda: random.Random(3),
    "numpy": lambda: np.random.default_rng(3),
    "iterator": lambda: iter(range(1, 10)),
    "tensor": Counted,
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_step_that_runs_unplanned_leaves_its_arguments_alone_while_it_is_measured(name: str) -> None:
    (net, sample), (twin, _) = (net_and_sample(Scaled) for _ in range(2))
    memplan.apply(twin, None, 1 << 30, costs="estimate")
    left = []
    for model in (net, twin):
        torch.manual_seed(1)
        draw, losses = DRAWS[name](), []
        for _ in range(3):
            losses.append(model(sample, draw))
            losses[-1].backward()
        left.append(copied([losses, [p.grad for p in model.parameters()]]))
    assert_same_bits(*left)


def test_an_argument_that_can_not_be_copied_is_refused() -> None:
    net, sample = net_and_sample(Scaled)
    memplan.apply(net, None, 1 << 30, costs="estimate")
    with pytest.raises(memplan.UnsupportedModel, match="a trial may change arguments that can't be copied"):
        net(sample, (number for number in range(3)))


class Carried:
    """What one call hands to the next, as caches of keys and values do."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class Segments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, carried: Carried | None = None) -> tuple[torch.Tensor, Carried]:
        hidden = torch.tanh(self.inner(x) + (0 if carried is None else carried.hidden))
        return self.out(hidden), Carried(hidden)


def test_an_object_that_carries_tensors_of_the_graph_goes_on_to_the_next_call() -> None:
    torch.manual_seed(0)
    plain, x = Segments(), torch.randn(8, 16)
    planned = copy.deepcopy(plain)
    memplan.apply(planned, x, 1 << 30)
    for _ in range(3):
        for net in (plain, planned):
            net.zero_grad()
            first, carried = net(x)
            second, _ = net(x, carried)
            (first.pow(2).mean() + second.pow(3).mean()).backward()
        assert_same_bits([p.grad for p in plain.parameters()], [p.grad for p in planned.parameters()])
