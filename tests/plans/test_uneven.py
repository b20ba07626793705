"""Steps that differ by sizes alone: a schedule for the largest of each size fits every one of them."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from memplan.plans.uneven import kind_of, sizes_of, widest
from memplan.problem.data import Problem
from memplan.problem.simulate import simulate
from memplan.solvers.offload.fit_copies import least_bytes
from memplan.solvers.orders.flat import flatten
from tests.ranks.test_shards import FAST, with_random_shards
from tests.solvers.test_solvers import CALM, some_orders
from tests.support.offloads import place_copies
from tests.support.random_graphs import llama_like, random_problems


def resized(problem: Problem, factors: list[int]) -> Problem:
    """The same step with another batch: memory that values share has one size."""
    values = list(problem.graph.values)
    for index, value in enumerate(values):
        size_bytes = value.size_bytes * factors[index % len(factors)]
        if value.role == "parameter":
            size_bytes = value.size_bytes
        if value.reuses is not None:
            size_bytes = values[value.reuses].size_bytes
        values[index] = replace(value, size_bytes=size_bytes)
    costs = replace(
        problem.costs,
        time_s=tuple(t * factors[i % len(factors)] for i, t in enumerate(problem.costs.time_s)),
        scratch_bytes=tuple(s * factors[-1] for s in problem.costs.scratch_bytes),
    )
    return replace(problem, graph=replace(problem.graph, values=tuple(values)), costs=costs)


@CALM
@given(random_problems(), st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), min_size=1, max_size=3))
def test_no_step_peaks_above_the_widest(problem: Problem, factors: list[list[int]]) -> None:
    problem = with_random_shards(problem, [True, False], FAST)
    steps = [problem, *(resized(problem, of_rank) for of_rank in factors)]
    assert all(kind_of(step.graph) == kind_of(problem.graph) for step in steps)
    figures = json.loads(json.dumps([sizes_of(step) for step in steps]))
    most = widest(steps[-1], figures)
    assert most == widest(steps[0], figures), "whichever rank plans"
    for order in [tuple(o.tolist()) for o in some_orders(flatten(most))[:4]]:
        schedule = place_copies(most, order, least_bytes(most, order))
        assert schedule is not None
        timeline = simulate(most, schedule)
        for step in steps:
            own = simulate(step, schedule)
            assert own.peak_bytes <= timeline.peak_bytes
            assert all(a <= b for a, b in zip(own.live_bytes, timeline.live_bytes, strict=True))


def test_the_widest_of_one_step_is_that_step() -> None:
    problem = llama_like(2)
    assert widest(problem, [sizes_of(problem)]) == problem
