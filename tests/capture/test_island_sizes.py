"""Calls that can't be traced, at several sizes: one plan, with the bits of plain steps, within the predicted peak."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.installed.planned_forward import planned_forward
from memplan.runtime.program.step import PlannedStep
from memplan.runtime.watch.meter import LiveMeter
from tests.capture.test_islands import HABITS, SEEN, Net, dropout, two_steps
from tests.support.zoo import assert_same_bits

WIDTH = 32


class Pooled(torch.autograd.Function):
    """Gives half as many rows, is given how many that is, and saves a flat mask."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = x.detach().numpy()[:, : 2 * rows].reshape(len(x), rows, 2, WIDTH)
        mask = torch.from_numpy(pairs[:, :, 0] > pairs[:, :, 1])
        ctx.save_for_backward(mask.flatten())
        ctx.shape = x.shape
        ctx.mark_non_differentiable(mask)
        return torch.from_numpy(pairs.max(2)), mask

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor, None]:
        (mask,) = ctx.saved_tensors
        first = mask.view_as(grad) * grad
        padded = torch.zeros(ctx.shape)
        padded[:, : 2 * grad.shape[1]] = torch.stack([first, grad - first], 2).flatten(1, 2)
        return padded, None


class InBlocks(torch.autograd.Function):
    """Saves a buffer of whole blocks of 64 rows, and counts its calls."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(torch.tensor(float(x.numpy().shape[0])))
        blocks = torch.zeros(-(-len(x) // 64) * 64, *x.shape[1:])
        blocks[: len(x)] = x.cos()
        ctx.save_for_backward(blocks)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0][: len(grad)]


class Turned(torch.autograd.Function):
    """Gives gradients that lie otherwise for long inputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        doubled = 2 * grad
        return doubled if len(grad) < 150 else doubled.t().contiguous().t()


class InPieces(torch.autograd.Function):
    """Saves one tensor for every 50 rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.data_ptr()
        ctx.save_for_backward(*(piece.cos() for piece in x.split(50)))
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.cat(ctx.saved_tensors)


class Quadratic(torch.autograd.Function):
    """Needs memory that grows with the square of its length."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.data_ptr()
        scores = (x @ x.t()).softmax(-1)
        return scores @ x + x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def applied(function: Any) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def apply(block: Any, x: torch.Tensor) -> torch.Tensor:
        return function.apply(x)  # type: ignore[no-any-return]

    return apply


class Pools(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        pooled, mask = Pooled.apply(x, x.shape[1] // 2)  # type: ignore[no-untyped-call]
        x = self.middle(pooled * mask.logical_not()).tanh()
        return self.last(x).pow(2).mean()  # type: ignore[no-any-return]


class Lengths(nn.Module):
    """Keeps a length in Python, which a module that can't be traced reads."""

    class Scaled(nn.Module):
        def __init__(self, owner: list[nn.Module]) -> None:
            super().__init__()
            self.owner = owner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(x.detach().numpy() / self.owner[0].length) + x  # type: ignore[operator]

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.length = nn.Linear(WIDTH, WIDTH), 0
        self.scaled = self.Scaled([])
        self.scaled.owner.append(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.length = x.shape[0]
        return self.scaled(self.inner(x).tanh()).pow(2).mean()  # type: ignore[no-any-return]


def live_peak(net: nn.Module, x: torch.Tensor) -> int:
    SEEN.clear()
    meter = LiveMeter()
    meter.register([*net.parameters(), x])
    with meter:
        net(x).backward()
    net.zero_grad()
    return meter.peak_bytes - sum(t.nbytes for t in SEEN)


def sizes_of(net: nn.Module, samples: Sequence[torch.Tensor]) -> list[bool]:
    """Compare steps on samples of several sizes with plain ones. For each, whether its plan serves many sizes."""
    plain, found = copy.deepcopy(net), []
    memplan.apply(net, samples[0], "4MiB", costs="estimate")
    for sample in samples:
        assert_same_bits(two_steps(plain, sample), two_steps(net, sample))
        planned = planned_forward(net)
        assert planned is not None
        (step, *_) = planned.steps
        assert isinstance(step, PlannedStep)
        assert step.capture.islands
        plan = step.plan_for(planned.choice.reader.read_sample(sample))
        assert live_peak(net, sample) <= plan.live_peak_bytes
        found.append(step.capture.traced.sizes is not None)
    return found


def rows(*sizes: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, WIDTH) for size in sizes]


@pytest.mark.parametrize("habit", HABITS[:-1], ids=lambda habit: habit.__name__)
def test_one_plan_serves_all_sizes(habit: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    assert sizes_of(Net(habit, 1), rows(128, 96, 200)) == [False, True, True]


def test_two_sizes_that_vary_and_an_argument_that_is_one_of_them() -> None:
    samples = [torch.randn(size) for size in [(2, 16, WIDTH), (2, 24, WIDTH), (5, 16, WIDTH), (3, 31, WIDTH)]]
    assert sizes_of(Pools(), samples) == [False, True, True, True]


def test_a_smaller_budget_holds_at_every_size() -> None:
    net, samples = Net(dropout, 3), rows(128, 96, 112)
    plain = copy.deepcopy(net)
    memplan.apply(net, samples[0], "min", costs="estimate")
    for sample in samples:
        assert_same_bits(two_steps(plain, sample), two_steps(net, sample))
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan)
    assert live_peak(net, samples[0]) <= plan.peak_bytes < plan.baseline_peak_bytes


@pytest.mark.parametrize(("function", "long"), [(InBlocks, 100), (Turned, 170)])
def test_other_shapes_than_rules_tell_are_planned_for_each_size(
    function: Any, long: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "memplan"):
        assert sizes_of(Net(applied(function), 2), rows(64, 128, long, 200)) == [False, True, False, False]
    assert "planning again" in caplog.text


@pytest.mark.parametrize(
    ("function", "sizes"), [(InPieces, (128, 192)), (Quadratic, (128, 192)), (Quadratic, (16, 20))]
)
def test_what_follows_no_rule_is_planned_for_each_size(
    function: Any, sizes: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "memplan"):
        assert sizes_of(Net(applied(function), 1), rows(*sizes)) == [False, False]
    assert "each size gets a plan of its own" in caplog.text
    assert function.__name__ in caplog.text


def test_a_length_in_python_that_an_island_reads() -> None:
    net, samples = Lengths(), rows(64, 96, 80)
    plain = copy.deepcopy(net)
    memplan.apply(net, samples[0], "4MiB", costs="estimate")
    for sample in samples:
        assert_same_bits(two_steps(plain, sample), two_steps(net, sample))
