"""Collectives that run beside the ops: schedules with starts and waits moved apart, against the accountant."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.problem.data import Problem
from memplan.problem.schedule import BOUNDARY, Compute, Schedule, schedule_of
from memplan.problem.simulate import simulate
from memplan.solvers.chain.baselines import baselines, keep_all
from memplan.solvers.offload.overlap import overlapped
from memplan.solvers.orders.flat import flatten
from tests.support.parameters import examples
from tests.support.random_graphs import random_problems

CALM = settings(max_examples=examples(150), deadline=None, derandomize=True,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])  # fmt: skip
KIND = "_c10d_functional.all_reduce.default"


def kept(problem: Problem) -> Schedule:
    graph = problem.graph
    return schedule_of(graph, [*range(graph.boundary), BOUNDARY, *range(graph.boundary, len(graph.ops))])


def starts(problem: Problem, schedule: Schedule) -> list[int]:
    return [s.op for s in schedule if isinstance(s, Compute) and problem.graph.ops[s.op].is_asynchronous]


@given(random_problems(), st.data())
@CALM
def test_schedules_stay_legal_and_within_budget(problem: Problem, data: st.DataObject) -> None:
    """Any op with one output may be a collective: each run is there once, and nothing is read before it is over."""
    ops = tuple(
        replace(op, kind=KIND, random=False) if data.draw(st.integers(0, 2)) == 0 and not op.effects else op
        for op in problem.graph.ops
    )
    problem = replace(problem, graph=replace(problem.graph, ops=ops))
    flat = flatten(problem)
    for order in [keep_all(flat), *(order for _, order in baselines(flat, 4))][:4]:
        schedule = schedule_of(problem.graph, order.tolist())
        before = simulate(problem, schedule)
        for room_bytes in (0, 16, 1000):
            moved = overlapped(problem, schedule, before.peak_bytes + room_bytes)
            after = simulate(problem, moved)
            assert after.peak_bytes <= before.peak_bytes + room_bytes
            assert after.time_s <= before.time_s
            assert sorted(map(repr, moved)) == sorted(map(repr, schedule))
