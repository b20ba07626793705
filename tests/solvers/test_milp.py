"""Plans of whole steps against Checkmate's programmes, solved by HiGHS."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, assume, given, settings

from benchmarks.solvers.__main__ import SHARES, instances
from memplan.errors import IllegalSchedule
from memplan.problem.data import Problem
from memplan.problem.schedule import BOUNDARY, schedule_of
from memplan.problem.simulate import simulate
from memplan.solvers import solve_front
from memplan.solvers.chain.options import LocalBlock
from memplan.solvers.exact.exact import BlockBudget
from memplan.solvers.exact.whole_step import solve_step, whole_step
from memplan.solvers.orders.flat import flatten
from tests.support.configs import lower_bound
from tests.support.milp_oracle import checkmate, joint, variables
from tests.support.parameters import examples
from tests.support.random_graphs import random_problems
from tests.support.solver_oracle import all_orders

CALM = settings(max_examples=examples(25), deadline=None, derandomize=True,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])  # fmt: skip
SMALL = ("perceptron", "convolutions")  # committed steps of which HiGHS closes every cell


def reduced(block: LocalBlock, limit_bytes: int) -> tuple[float, bool]:
    return checkmate(block, BlockBudget(limit_bytes - block.incoming_bytes, limit_bytes, limit_bytes))


def in_stages(problem: Problem, order: Sequence[int]) -> bool:
    """Whether first runs come in the step's order, and between two of them repeated ones in theirs."""
    first = list(dict.fromkeys(order))
    last, seen = -1, set[int]()
    for op in order:
        if op in seen and op <= last:
            return False
        last = op if op in seen else -1
        seen.add(op)
    n = problem.graph.boundary
    return first == [*range(n), BOUNDARY, *range(n, len(problem.graph.ops))]


@settings(CALM, max_examples=examples(8))
@given(random_problems(most_ops=3, most_size=4))
def test_the_joint_programme_is_as_good_as_every_order_in_stages(problem: Problem) -> None:
    assume(not problem.frees_gradients and not problem.update_bytes)
    block = whole_step(flatten(problem))
    least: dict[int, float] = {}
    for order in all_orders(problem, 2):
        try:
            timeline = simulate(problem, schedule_of(problem.graph, order))
        except IllegalSchedule:
            continue
        if in_stages(problem, order):
            extra_s = timeline.time_s - problem.baseline_time_s
            least[timeline.peak_bytes] = min(extra_s, least.get(timeline.peak_bytes, math.inf))
    for limit_bytes in least:
        seconds, closed = joint(block, limit_bytes)
        best_s = min(s for peak, s in least.items() if peak <= limit_bytes)
        assert closed and seconds <= best_s + 1e-6
        if best_s <= 3.0:  # beyond that an op may have to run a third time
            assert seconds == pytest.approx(best_s, abs=1e-6)


@CALM
@given(random_problems(most_ops=6))
def test_no_programme_beats_a_bound_or_a_certified_step(problem: Problem) -> None:
    flat = flatten(problem)
    block, bound = whole_step(flat), lower_bound(problem, 4, 8)
    for found in solve_step(flat, 3, 4, 2000):
        jointly, reducedly = joint(block, found.budget_bytes), reduced(block, found.budget_bytes)
        assert jointly[1] and reducedly[1] and jointly[0] <= reducedly[0] + 1e-6
        if not (problem.frees_gradients or problem.update_bytes):  # which the programmes leave out
            assert bound.time_s(found.budget_bytes) <= problem.baseline_time_s + jointly[0] + 1e-6
        if found.answer is not None:
            assert found.answer.bound_s <= reducedly[0] + 1e-6
            assert found.answer.recompute_s <= reducedly[0] + 1e-6 or not found.answer.certified


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_certified_steps_are_the_programmes(name: str) -> None:
    """Committed steps at many budgets: where both are certain they agree, and the front is as good."""
    problem = instances()[name]
    flat = flatten(problem)
    block, front = whole_step(flat), solve_front(problem)
    assert variables(block, True) < 30_000
    agreed = 0
    for found in solve_step(flat, 6, 8, 2000):
        assert found.answer is not None
        seconds, closed = reduced(block, found.budget_bytes)
        if closed and found.answer.certified:
            assert found.answer.recompute_s == pytest.approx(seconds, rel=1e-6, abs=1e-9)
            agreed += 1
            point = front.best(found.budget_bytes)
            assert (point is None) == math.isinf(seconds)
            assert point is None or point.time_s <= (problem.baseline_time_s + seconds) * (1 + 1e-9)
    assert agreed >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_no_joint_programme_beats_a_bound(name: str) -> None:
    problem = instances()[name]
    block, front = whole_step(flatten(problem)), solve_front(problem)
    resident = problem.resident_bytes
    for share in SHARES:
        limit_bytes = resident + int(share * (front.keep_all.peak_bytes - resident))
        seconds, closed = joint(block, limit_bytes)
        assert not closed or front.bound.time_s(limit_bytes) <= (problem.baseline_time_s + seconds) * (1 + 1e-9)
