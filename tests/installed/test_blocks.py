"""Blocks planned each by itself so that the whole step fits, and schedules by what they save."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.capture.capture import capture
from memplan.costs.measure import estimate
from memplan.installed.planned_forward import planned_forward
from memplan.planning.parts.part import Part
from memplan.problem.data import Problem
from memplan.runtime.parts.part_step import PartStep
from memplan.solvers import Candidate, solve_front
from memplan.solvers.parts.passes import pass_of
from memplan.solvers.parts.saved import solve_saved
from tests.conftest import QUICK
from tests.support.meter import LiveMeter
from tests.support.parameters import quickly
from tests.support.zoo import MODELS, assert_same_bits, run_steps


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(x))))


class Net(nn.Module):
    """Blocks between which something happens that no graph has."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.blocks, self.seen, self.twice = nn.ModuleList(Block() for _ in range(4)), list[int](), twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            self.seen.append(len(x))
            x = block(x)
        return (self.blocks[0](x) if self.twice else x).pow(2).mean()


def net_and_sample(twice: bool = False) -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    return Net(twice).train(), torch.randn(64, 16)


def held_bytes(net: nn.Module, sample: torch.Tensor) -> int:
    net.zero_grad()
    meter = LiveMeter()
    meter.register([*net.parameters(), *net.buffers(), sample])
    with meter:
        net(sample).backward()
    return meter.peak_bytes


@pytest.mark.parametrize("share", quickly((0.0, 0.3, 0.7, 1.0), 0.0, 0.7))
def test_a_step_fits_its_budget_with_the_plain_bits(share: float) -> None:
    net, sample = net_and_sample()
    planned = copy.deepcopy(net)
    top = memplan.apply_blocks(planned, planned.blocks, sample, 1 << 40, costs="estimate")
    budget = int(top.floor_bytes + share * (top.baseline_peak_bytes - top.floor_bytes))
    plan = memplan.apply_blocks(planned, planned.blocks, sample, budget, costs="estimate")
    assert all(p.grad is None for p in planned.parameters())
    assert held_bytes(planned, sample) <= plan.peak_bytes <= budget
    assert (plan.overhead > 0) == (share < 1)
    planned.zero_grad()
    assert_same_bits(run_steps(net, sample, 3), run_steps(planned, sample, 3))


def test_less_fits_than_whole_plans_of_blocks_would_save() -> None:
    """What a block saves is what counts: its own peak may be no lower for it."""
    net, sample = net_and_sample()
    captured = capture(net.blocks[0], net.blocks[0].forward, (sample.clone().requires_grad_(),))
    problem = Problem(captured.traced.graph, estimate(captured.traced))
    least = [
        min(pass_of(problem, point.schedule).saved_bytes for point in solve(problem, QUICK).points)
        for solve in (solve_saved, solve_front)
    ]
    assert least[0] < least[1]


@pytest.mark.parametrize("name", quickly(("gpt2", "llama"), "llama"))
def test_saved_bytes_fall_as_seconds_rise(name: str) -> None:
    net, sample = MODELS[name](0)
    captured = capture(net, net.forward, sample)
    problem = Problem(captured.traced.graph, estimate(captured.traced))
    front = solve_saved(problem, QUICK)
    saved = [pass_of(problem, point.schedule).own_bytes for point in front.points]
    times = [point.time_s for point in front.points]
    assert saved == sorted(saved)
    assert times == sorted(times, reverse=True)
    assert times[-1] == problem.baseline_time_s


def test_another_batch_is_recomputed_and_evaluation_is_plain() -> None:
    net, sample = net_and_sample()
    planned = copy.deepcopy(net)
    plan = memplan.apply_blocks(planned, planned.blocks, sample, 0.8, costs="estimate")
    assert any(row.way == "planned" for row in plan.units)
    short = torch.randn(24, 16)
    assert_same_bits(run_steps(net, short, 2), run_steps(planned, short, 2))
    assert_same_bits(run_steps(net, sample, 2), run_steps(planned, sample, 2))
    with torch.no_grad():
        assert_same_bits(net.eval()(sample), planned.eval()(sample))


def test_plans_of_blocks_can_be_seen_copied_and_removed() -> None:
    net, sample = net_and_sample()
    plan = memplan.apply_blocks(net, net.blocks, sample, 0.8, costs="estimate")
    chosen = [block for block, row in zip(net.blocks, plan.units) if row.way == "planned"]
    assert "blocks.0" in plan.report()
    assert all("budget" in memplan.plan_of(block).report() for block in chosen)  # type: ignore[union-attr]
    twin = copy.deepcopy(net)
    torch.manual_seed(1)
    first = run_steps(net, sample, 1)
    torch.manual_seed(1)
    assert_same_bits(first, run_steps(twin, sample, 1))
    assert sum(planned_forward(block) is not None for block in twin.blocks) == len(chosen)
    for block in net.blocks:
        memplan.remove(block)
    assert not any("forward" in vars(block) for block in net.blocks)


@pytest.mark.parametrize(
    ("twice", "blocks", "budget", "error", "text"),
    [
        (True, None, 0.8, memplan.UnsupportedModel, "called 2 times"),
        (False, [Block()], 0.8, ValueError, "must be submodules"),
        (False, None, 1000, memplan.BudgetInfeasible, "is the least"),
    ],
)
def test_what_can_not_be_done_is_refused(twice: bool, blocks: Any, budget: Any, error: Any, text: str) -> None:
    net, sample = net_and_sample(twice)
    with pytest.raises(error, match=text):
        memplan.apply_blocks(net, blocks or net.blocks, sample, budget, costs="estimate")
    assert not any("forward" in vars(block) for block in net.blocks)
    assert net.seen == []


class Edits(Net):
    """Writes to what it has handed to a block, once that has run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        y = self.blocks[0](x)
        x.mul_(2)
        return y.pow(2).mean() + x.mean()


def test_a_block_whose_arguments_are_edited_later_is_refused() -> None:
    torch.manual_seed(0)
    net = Edits().train()
    with pytest.raises(memplan.UnsupportedModel, match=r"arguments of blocks\.0.*Leave it out"):
        memplan.apply_blocks(net, net.blocks[:1], torch.randn(64, 16), 0.8, costs="estimate", config=QUICK)


def test_no_blocks_are_no_plan() -> None:
    net, sample = net_and_sample()
    assert memplan.apply_blocks(net, [], sample, 1.0, costs="estimate", config=QUICK).units == ()


def test_earlier_plans_stay_where_new_ones_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    net, sample = net_and_sample()
    memplan.apply_blocks(net, net.blocks, sample, 0.8, costs="estimate", config=QUICK)
    before = [planned_forward(block) for block in net.blocks]
    assert any(before)
    with pytest.raises(memplan.BudgetInfeasible):
        memplan.apply_blocks(net, net.blocks, sample, 1000, costs="estimate", config=QUICK)
    assert [planned_forward(block) for block in net.blocks] == before
    original, made = Part.step, []

    def broken(part: Part, way: Candidate) -> PartStep:  # only once other blocks have their step
        made.append(part)
        if len(made) > 1:
            raise MemoryError("of all times")
        return original(part, way)

    monkeypatch.setattr(Part, "step", broken)
    with pytest.raises(MemoryError):
        memplan.apply_blocks(net, net.blocks, sample, 0.8, costs="estimate", config=QUICK)
    assert [planned_forward(block) for block in net.blocks] == before
