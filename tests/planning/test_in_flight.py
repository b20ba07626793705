"""Several forwards in flight: what those that wait hold is in every figure, and the search sees it."""

from __future__ import annotations

import copy
import itertools
import json
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import memplan
from memplan.errors import IllegalSchedule
from memplan.problem.data import Problem
from memplan.problem.schedule import schedule_of
from memplan.problem.simulate import simulate
from memplan.solvers import solve_front
from memplan.solvers.chain.expand import baselines
from memplan.solvers.orders.flat import flatten
from memplan.solvers.orders.replay import fill, replay
from memplan.solvers.orders.rewrites import bring_down, demand_order
from tests.support.configs import lower_bound, with_figures
from tests.support.meter import LiveMeter
from tests.support.random_graphs import llama_like, random_problems, resnet_like
from tests.support.solver_oracle import all_orders, recount
from tests.support.zoo import assert_same_bits, copied

CALM = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
SMALL = with_figures(coarse_blocks=8, fine_blocks=12, coarse_slots=60, fine_slots=60, cuts=6, block_cuts=4, options=8,
               sizes=6, grid=8, rounds=30, width=4)  # fmt: skip


def some_orders(problem: Problem) -> list[np.ndarray]:
    flat = flatten(problem)
    a = flat.arrays
    pinned = a.held.copy()
    for v, op in enumerate(a.producer):
        pinned[v] |= bool(0 <= op < a.boundary and not a.rerunnable[op] and not a.overwritten[v])
    found = [order for _name, order in baselines(flat, 4)]
    found += [order for window in (0, 99) if len(order := demand_order(a, pinned, window, 400))]
    return found + [bring_down(a, order, 0, 6, 3) for order in found]


@CALM
@given(random_problems(), st.integers(2, 5))
def test_three_accountants_agree(problem: Problem, in_flight: int) -> None:
    problem = replace(problem, in_flight=in_flight)
    flat = flatten(problem)
    for order in some_orders(problem):
        during = np.zeros(len(order), dtype=np.int64)
        peak = replay(flat.arrays, order, during)[0]
        timeline = simulate(problem, schedule_of(problem.graph, order.tolist()))
        assert peak == timeline.peak_bytes == recount(problem, order.tolist())[0]
        assert max(during) <= peak


@CALM
@given(random_problems(), st.integers(2, 5))
def test_fill_keeps_the_limit(problem: Problem, in_flight: int) -> None:
    flat = flatten(replace(problem, in_flight=in_flight))
    for order in some_orders(replace(problem, in_flight=in_flight)):
        during = np.zeros(len(order), dtype=np.int64)
        peak, _at, time_s = replay(flat.arrays, order, during)
        for limit in (peak, peak + 16, 2 * peak):
            filled = fill(flat.arrays, order, limit, 4)
            new_peak, _at, new_s = replay(flat.arrays, filled, np.zeros(len(filled), dtype=np.int64))
            assert 0 < new_peak <= limit and new_s <= time_s + 1e-9


@pytest.mark.slow
@pytest.mark.full_search
@CALM
@given(random_problems(most_ops=4, most_size=4), st.integers(2, 4))
def test_the_front_is_near_the_best_of_all_short_orders(problem: Problem, in_flight: int) -> None:
    """Bounds hold for each order, and no order of few repeats is more than 5% faster than the front's at its peak."""
    problem = replace(problem, in_flight=in_flight)
    front, bound = solve_front(problem, SMALL), lower_bound(problem)
    for point in (*front.points, front.keep_all):
        assert simulate(problem, point.schedule).peak_bytes == point.peak_bytes
    for order in all_orders(problem, 2):
        try:
            timeline = simulate(problem, schedule_of(problem.graph, order))
        except IllegalSchedule:
            continue
        assert bound.floor_bytes <= timeline.peak_bytes
        assert bound.time_s(timeline.peak_bytes) <= timeline.time_s * (1 + 1e-9)
        assert front.bound.time_s(timeline.peak_bytes) <= timeline.time_s * (1 + 1e-9)
        best = front.best(timeline.peak_bytes)
        assert best is not None and best.time_s <= 1.05 * timeline.time_s


@CALM
@given(random_problems())
def test_more_in_flight_never_peaks_lower(problem: Problem) -> None:
    problem = replace(problem, accumulate=True)
    for order in some_orders(problem):
        schedule = schedule_of(problem.graph, order.tolist())
        peaks = [simulate(replace(problem, in_flight=n), schedule).peak_bytes for n in (1, 2, 3, 8)]
        assert all(left <= right for left, right in itertools.pairwise(peaks))


@pytest.mark.parametrize(
    "build",
    [lambda: llama_like(2), pytest.param(lambda: resnet_like((1, 1)), marks=pytest.mark.slow)],
    ids=["llama", "resnet"],
)
def test_half_of_what_all_hold_together_is_near_the_bound(build) -> None:  # type: ignore[no-untyped-def]
    problem = replace(build(), in_flight=4, accumulate=True)
    front = solve_front(problem, SMALL)
    middle = (front.floor.peak_bytes + front.keep_all.peak_bytes) // 2
    best = front.best(middle)
    assert best is not None and best.time_s < 1.05 * front.bound.time_s(middle)
    alone = solve_front(replace(problem, in_flight=1), SMALL)
    moved = [simulate(problem, point.schedule) for point in alone.points]
    fitting = [timeline.time_s for timeline in moved if timeline.peak_bytes <= middle]
    assert best.time_s <= min(fitting) * (1 + 1e-9)  # a search that sees what waits is not worse than one that does not


class Stage(nn.Module):
    """What stands between two others: dropout, whose generator states are kept, and nothing that is a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
        return x


def pipeline(stage: nn.Module, in_flight: int, with_input_gradient: bool, count: int = 7) -> LiveMeter:
    """One forward, one backward, after the first ones; an input's gradient is held until the next one is there."""
    parameters = list(stage.parameters())
    for p in parameters:
        p.grad = torch.zeros_like(p)
    waiting: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
    sent: torch.Tensor | None = torch.zeros(256, 32) if with_input_gradient else None
    with LiveMeter() as meter:
        meter.register([parameters, [p.grad for p in parameters], sent])
        for k in range(count + in_flight - 1):
            if k < count:
                x = torch.randn(256, 32).requires_grad_(with_input_gradient)
                waiting.append((x, stage(x)))
                del x
            if k + 1 >= in_flight:
                x, out = waiting.popleft()
                out.backward(torch.ones(256, 32))
                sent = x.grad
                del x, out
    return meter


@pytest.mark.parametrize("with_input_gradient", [False, True])
@pytest.mark.parametrize("in_flight", [1, 2, 4])
@pytest.mark.parametrize(
    "share", [pytest.param(1.0, marks=pytest.mark.slow), 0.4, pytest.param(0.0, marks=pytest.mark.slow)]
)
def test_the_peak_of_several_in_flight_is_predicted_to_the_byte(
    share: float, in_flight: int, with_input_gradient: bool
) -> None:
    torch.manual_seed(0)
    stage = Stage().train()
    sample = torch.randn(256, 32).requires_grad_(with_input_gradient)
    options: dict[str, Any] = {"costs": "estimate", "accumulate": True, "in_flight": in_flight}
    points = memplan.explore(stage, sample, **options)
    least, most = points[0].floor_bytes, points[-1].baseline_peak_bytes
    memplan.apply(stage, sample, int(least + share * (most - least)), **options)
    plan = memplan.plan_of(stage)
    assert plan is not None and plan.problem.in_flight == in_flight
    assert pipeline(stage, in_flight, with_input_gradient).peak_bytes == plan.live_peak_bytes


def test_bits_are_those_of_the_plain_stage() -> None:
    torch.manual_seed(0)
    plain = Stage().train()
    planned = copy.deepcopy(plain)
    sample = torch.randn(256, 32)
    floor_bytes = memplan.explore(planned, sample, costs="estimate", in_flight=3)[0].floor_bytes
    memplan.apply(planned, sample, floor_bytes, costs="estimate", in_flight=3)
    states = []
    for stage in (plain, planned):
        torch.manual_seed(1)
        pipeline(stage, 3, False)
        states.append([[p.grad for p in stage.parameters()], torch.get_rng_state()])
    assert_same_bits(*states)


def test_copies_that_an_engine_holds_are_resident() -> None:
    stage = Stage().train()
    sample = torch.randn(256, 32).requires_grad_()
    plain = memplan.plan(stage, sample, 1.0, costs="estimate", in_flight=2)
    one = 256 * 32 * 4
    for buffers, more in (
        (memplan.Buffers(inputs=5), 3),
        (memplan.Buffers(inputs=1, outputs=2), 0),
        (memplan.Buffers(outputs=4, output_gradients=3, input_gradients=2), 2 + 2 + 1),
        (memplan.Buffers(later_outputs=1), 0),  # less than what is in flight before
    ):
        plan = memplan.plan(
            stage, sample, 1.0, costs="estimate", in_flight=2, surroundings=memplan.Surroundings(buffers=buffers)
        )
        assert plan.peak_bytes - plain.peak_bytes == more * one


def test_a_plan_file_knows_how_many_are_in_flight(tmp_path: Path) -> None:
    stage, sample = Stage().train(), torch.randn(256, 32)
    plan = memplan.plan(stage, sample, 1.0, costs="estimate", in_flight=3)
    plan.save(tmp_path / "plan.json")
    again = memplan.Plan.load(tmp_path / "plan.json")
    assert (again.problem, again.peak_bytes) == (plan.problem, plan.peak_bytes)
    assert "3 microbatches" in again.report()
    content = json.loads((tmp_path / "plan.json").read_text())
    for wrong in (0, -1, 2.0, True, "3"):
        (tmp_path / "wrong.json").write_text(json.dumps(content | {"in_flight": wrong}))
        with pytest.raises(memplan.InvalidPlanFile, match="in_flight"):
            memplan.Plan.load(tmp_path / "wrong.json")


class Untraceable(Stage):
    """What it does depends on a number that it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if y.sum().item() > 0 else -y


def test_refusals() -> None:
    stage, sample = Stage().train(), torch.randn(256, 32)
    around = memplan.Surroundings(buffers=memplan.Buffers(inputs=3))
    for options in ({"in_flight": 2}, {"surroundings": around}):
        with pytest.raises(memplan.UnsupportedModel, match="in flight a step has to be planned"):
            memplan.apply(Untraceable().train(), sample, 1.0, costs="estimate", **options)  # type: ignore[arg-type]
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="in_flight is a count"):
            memplan.apply(stage, sample, 1.0, costs="estimate", in_flight=wrong)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(stage.parameters())
    with pytest.raises(ValueError, match="nothing can be accumulated"):
        memplan.apply(stage, sample, 1.0, costs="estimate", in_flight=2, optimizer=optimizer, update="backward")


class Averages(nn.Module):
    """Reads the average that it has added to; autograd saves a copy of that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("average", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        self.average.mul_(0.9).add_(x.detach().mean(0))
        return torch.tanh(x * self.average.expand(64, 16).clone()) * x


def test_what_a_forward_has_written_is_not_read_after_the_next_one() -> None:
    def trained(net: nn.Module) -> Any:
        torch.manual_seed(1)
        losses = [net(torch.randn(64, 16)).pow(2).mean() for _ in range(2)]
        for loss in losses:
            loss.backward()
        return copied([losses, [p.grad for p in net.parameters()], list(net.buffers())])

    torch.manual_seed(0)
    net = Averages()
    plain = copy.deepcopy(net)
    memplan.apply(net, torch.randn(64, 16), "min", costs="estimate", in_flight=2)
    assert_same_bits(trained(net), trained(plain))


def test_the_error_for_a_buffer_that_each_forward_writes_to_says_what_helps() -> None:
    def discriminator() -> nn.Module:
        torch.manual_seed(0)
        norm = nn.utils.parametrizations.spectral_norm
        return nn.Sequential(norm(nn.Linear(16, 64)), nn.LeakyReLU(0.2), norm(nn.Linear(64, 1)))

    real, made = torch.randn(2, 64, 16).unbind()
    net = discriminator()
    memplan.apply(net, real, "min")
    with pytest.raises(RuntimeError, match="say in_flight=2 where two run before a backward"):
        (net(real).relu().mean() - net(made).mean()).backward()
    net = discriminator()
    memplan.apply(net, real, "min", in_flight=2)
    (net(real).relu().mean() - net(made).mean()).backward()
    assert all(p.grad is not None for p in net.parameters())
