"""Lower bounds: never above what any order takes, whatever the moments and the multipliers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import csr_array

from benchmarks.solvers.__main__ import instances
from memplan.config import Config
from memplan.errors import IllegalSchedule
from memplan.problem import Costs, Graph, Op, Problem, Value
from memplan.schedule import schedule_of
from memplan.simulate import simulate
from memplan.solvers import lower_bound, solve_front
from memplan.solvers.bound import backward_bytes, bound_of
from memplan.solvers.bound_dual import line_of
from memplan.solvers.bound_program import Program, program_of, step_of
from memplan.solvers.flat import Flat, flatten
from tests.random_graphs import llama_like, random_problems, resnet_like, unet_like
from tests.solver_oracle import all_orders


CALM = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
SMALL = Config(sizes=6, points=8, grid=10, descents=2, descent_steps=6, exchanges=10)


def optimum(program: Program, budget_bytes: int) -> float:
    """The programme's least seconds, by HiGHS; infinite where nothing fits."""
    rows, count = np.arange(len(program.left)), len(program.left)
    weighed = np.nonzero(program.moment >= 0)[0]
    entries = np.concatenate([-np.ones(2 * count), np.ones(count), program.size_bytes[weighed]])
    row = np.concatenate([rows, rows, rows, count + program.moment[weighed]])
    column = np.concatenate([program.left, program.right, program.needs, weighed])
    matrix = csr_array((entries, (row, column)), shape=(count + len(program.fixed_bytes), len(program.cost)))
    limits = np.concatenate([-program.least, budget_bytes - program.fixed_bytes])
    answer = linprog(program.cost, A_ub=matrix, b_ub=limits, bounds=np.stack([0 * program.most, program.most], axis=1))
    return float("inf") if answer.status == 2 else float(answer.fun)


def some_moments(flat: Flat, draw: st.DataObject) -> tuple[int, ...]:
    backward = st.integers(flat.arrays.boundary, flat.op_count - 1)
    return tuple(sorted(draw.draw(st.sets(backward, min_size=1, max_size=4))))


def program(problem: Problem, moments: tuple[int, ...]) -> Program:
    flat = flatten(problem)
    fixed = backward_bytes(flat)
    return program_of(step_of(flat), moments, fixed[[1 + m - flat.arrays.boundary for m in moments]])


@settings(CALM, max_examples=60)
@given(random_problems(most_ops=4, most_size=4), st.data())
def test_programme_and_multipliers_hold_for_every_short_order(problem: Problem, data: st.DataObject) -> None:
    flat = flatten(problem)
    moments = some_moments(flat, data)
    made = program(problem, moments)
    bound = bound_of(flat, problem.baseline_time_s, 3, 8)
    line = line_of(made, data.draw(st.integers(bound.floor_bytes, bound.floor_bytes + 20)), 200)
    least: dict[int, float] = {}
    for order in all_orders(problem, 2):
        try:
            timeline = simulate(problem, schedule_of(problem.graph, order))
        except IllegalSchedule:
            continue
        least[timeline.peak_bytes] = min(timeline.time_s, least.get(timeline.peak_bytes, float("inf")))
    for peak_bytes, time_s in least.items():
        assert bound.floor_bytes <= peak_bytes
        assert bound.time_s(peak_bytes) <= time_s * (1 + 1e-9)
        assert problem.baseline_time_s + line.at(peak_bytes) <= time_s * (1 + 1e-9)
        assert problem.baseline_time_s + optimum(made, peak_bytes) <= time_s * (1 + 1e-7)


@settings(CALM, max_examples=40)
@given(random_problems(), st.data())
def test_every_line_stays_under_its_programme(problem: Problem, data: st.DataObject) -> None:
    flat = flatten(problem)
    moments = some_moments(flat, data)
    made = program(problem, moments)
    floor_bytes = bound_of(flat, problem.baseline_time_s, 1, 2).floor_bytes
    line = line_of(made, floor_bytes + data.draw(st.integers(0, 30)), data.draw(st.integers(25, 400)))
    assert line.s_per_byte >= 0.0
    for budget_bytes in range(floor_bytes, floor_bytes + 40, 3):
        assert line.at(budget_bytes) <= optimum(made, budget_bytes) + 1e-7


@CALM
@given(random_problems())
def test_more_budget_never_lifts_the_bound(problem: Problem) -> None:
    bound = lower_bound(problem, 4, 8)
    times = [bound.time_s(b) for b in range(bound.floor_bytes - 2, bound.floor_bytes + 60)]
    assert all(left >= right for left, right in itertools.pairwise(times))
    assert times[0] == float("inf") and times[-1] >= problem.baseline_time_s
    assert bound.time_s(None) == problem.baseline_time_s


@pytest.mark.parametrize("name", sorted(instances()))
def test_bound_is_under_every_plan(name: str) -> None:
    """The plans of a real step; the bound alone is taken at full strength."""
    problem = instances()[name]
    bound = lower_bound(problem)
    front = solve_front(problem, replace(SMALL, methods=("textbook", "cuts", "blocks"), grid=8))
    assert len(front.points) > 2
    for point in front.points:
        assert bound.floor_bytes <= point.peak_bytes
        assert bound.time_s(point.peak_bytes) <= point.time_s * (1 + 1e-9)


@pytest.mark.parametrize("build", [lambda: llama_like(3), resnet_like, unet_like], ids=["llama", "resnet", "unet"])
def test_multipliers_come_near_the_optimum(build) -> None:  # type: ignore[no-untyped-def]
    problem = build()
    flat = flatten(problem)
    fixed = backward_bytes(flat)[1:]
    first = int(np.argmax(fixed))
    moments = tuple(sorted({flat.arrays.boundary + 1, flat.arrays.boundary + first, flat.op_count - 2}))
    made = program(problem, moments)
    bound = bound_of(flat, problem.baseline_time_s, 2, 8)
    whole = solve_front(problem, SMALL).keep_all.peak_bytes
    budget_bytes = bound.floor_bytes + (whole - bound.floor_bytes) // 3
    exact_s = optimum(made, budget_bytes)
    found_s = line_of(made, budget_bytes, 4000).at(budget_bytes)
    assert exact_s > 0.0
    assert exact_s - 0.01 * exact_s <= found_s <= exact_s * (1 + 1e-7)
