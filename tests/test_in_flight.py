"""Several forwards in flight: what those that wait hold is in every figure, and the search sees it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.config import Config
from memplan.errors import IllegalSchedule
from memplan.problem import Problem
from memplan.schedule import schedule_of
from memplan.simulate import simulate
from memplan.solvers import lower_bound, solve_front
from memplan.solvers.baselines import baselines, keep_all
from memplan.solvers.flat import flatten
from memplan.solvers.orders import demand_order, lower
from memplan.solvers.replay import fill, replay
from tests.random_graphs import llama_like, random_problems, resnet_like
from tests.solver_oracle import all_orders, recount

CALM = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
SMALL = Config(coarse_blocks=8, fine_blocks=12, coarse_slots=60, fine_slots=60, cuts=6, block_cuts=4, options=8,
               sizes=6, grid=8, rounds=30, width=4)  # fmt: skip


def some_orders(problem: Problem) -> list[np.ndarray]:
    flat = flatten(problem)
    a = flat.arrays
    pinned = a.held.copy()
    for v, op in enumerate(a.producer):
        pinned[v] |= bool(0 <= op < a.boundary and not a.rerunnable[op] and not a.overwritten[v])
    found = [order for _name, order in baselines(flat, 4)]
    found += [order for window in (0, 99) if len(order := demand_order(a, pinned, window, 400))]
    return found + [lower(a, order, 0, 6, 3) for order in found]


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


@CALM
@given(random_problems(most_ops=4, most_size=4), st.integers(2, 4))
def test_the_front_is_near_the_best_of_all_short_orders(problem: Problem, in_flight: int) -> None:
    """Bounds hold for each order, and no order of few repeats that fits is much faster than the front's."""
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


@CALM
@given(random_problems())
def test_more_in_flight_never_peaks_lower(problem: Problem) -> None:
    problem = replace(problem, accumulate=True)
    for order in some_orders(problem):
        schedule = schedule_of(problem.graph, order.tolist())
        peaks = [simulate(replace(problem, in_flight=n), schedule).peak_bytes for n in (1, 2, 3, 8)]
        assert all(left <= right for left, right in itertools.pairwise(peaks))
