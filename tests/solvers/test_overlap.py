"""Collectives that run beside the ops: schedules with starts and waits moved apart, against the accountant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.errors import IllegalSchedule
from memplan.problem.data import Problem
from memplan.problem.schedule import BOUNDARY, Boundary, Compute, Drop, Schedule, Wait, schedule_of
from memplan.problem.simulate import simulate
from memplan.solvers import textbook
from memplan.solvers.chain.expand import baselines
from memplan.solvers.offload.fit_copies import solve_offload
from memplan.solvers.offload.overlap import overlapped, unit_order
from memplan.solvers.orders.flat import flatten
from memplan.solvers.orders.replay import keep_all, replay
from tests.support.parameters import examples
from tests.support.random_graphs import fsdp_like, random_problems

CALM = settings(max_examples=examples(150), deadline=None, derandomize=True,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])  # fmt: skip
KIND = "_c10d_functional.all_reduce.default"


def kept(problem: Problem) -> Schedule:
    graph = problem.graph
    return schedule_of(graph, [*range(graph.boundary), BOUNDARY, *range(graph.boundary, len(graph.ops))])


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
            moved = overlapped(problem, schedule, before.peak_bytes + room_bytes)[0]
            after = simulate(problem, moved)
            assert after.peak_bytes <= before.peak_bytes + room_bytes
            assert after.time_s <= before.time_s
            assert sorted(map(repr, moved)) == sorted(map(repr, schedule))


@given(random_problems(), st.data())
@CALM
def test_the_fast_accountant_knows_collectives_that_are_waited_for_at_once(
    problem: Problem, data: st.DataObject
) -> None:
    ops = tuple(
        replace(op, kind=KIND, random=False) if data.draw(st.integers(0, 2)) == 0 else op for op in problem.graph.ops
    )
    problem = replace(problem, graph=replace(problem.graph, ops=ops))
    flat = flatten(problem)
    for _, order in baselines(flat, 4):
        timeline = simulate(problem, schedule_of(problem.graph, order.tolist()))
        peak, _, time_s = replay(flat.arrays, order, np.zeros(len(order), dtype=np.int64))
        assert (timeline.peak_bytes, timeline.time_s) == (peak, time_s)


@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.parametrize("network_s", [0.5, 3.0, 12.0])
def test_little_is_waited_for_where_there_is_room(network_s: float, replicas: bool) -> None:
    """Longer than ops, or else the network, takes only the first gather and the last reduction, and one layer."""
    problem = fsdp_like(8, network_s=network_s, replicas=replicas)
    schedule = kept(problem)
    moved = overlapped(problem, schedule, simulate(problem, schedule).peak_bytes + 2000)[0]
    longest_s = max(problem.without_network.baseline_time_s, problem.network_s)
    assert longest_s < simulate(problem, moved).time_s <= longest_s + 3 * network_s + 3 * 4.0


@pytest.mark.parametrize("room_bytes", [0, 100, 400, 600, 1000])
def test_room_buys_time(room_bytes: int) -> None:
    """With each unit gathered twice, as FSDP2 does it, memory is short when a unit is gathered ahead."""
    problem = fsdp_like(8)
    schedule = schedule_of(problem.graph, gathered_twice(problem))
    before = simulate(problem, schedule)
    moved = [overlapped(problem, schedule, before.peak_bytes + size)[0] for size in (0, room_bytes)]
    after = [simulate(problem, one) for one in moved]
    assert after[1].peak_bytes <= before.peak_bytes + room_bytes
    assert after[1].time_s <= after[0].time_s <= before.time_s
    if room_bytes >= 600:  # a unit and its part
        assert after[1].stall_s < 0.2 * before.stall_s


def gathered_twice(problem: Problem) -> list[int]:
    """The order in which each unit of `fsdp_like` is gathered again right before its backward."""
    graph = problem.graph
    order, layers = [*range(graph.boundary), BOUNDARY], {}
    for op in range(graph.boundary):
        if graph.ops[op].kind in ("to", "cat", "unpack") or graph.ops[op].is_asynchronous:
            layers.setdefault(sum(graph.ops[i].kind == "down" for i in range(op)), []).append(op)
    for op in range(graph.boundary, len(graph.ops)):
        if graph.ops[op].kind == "down backward":
            order += layers.pop(max(layers))
        order.append(op)
    return order


def test_gathers_leave_room_for_gradients_that_wait_to_be_reduced() -> None:
    """Where the network is slower than ops, and room for many gathers ahead would hold up the reductions."""
    problem = in_units(fsdp_like(24, network_s=6.0, act_bytes=20))
    schedule = schedule_of(problem.graph, unit_order(problem.graph, flatten(problem)).tolist())
    peak_bytes = simulate(problem, schedule).peak_bytes
    times_s = [overlapped(problem, schedule, peak_bytes + size)[1].time_s for size in (0, 400, 800, 1600, 3200)]
    assert times_s == sorted(times_s, reverse=True)
    assert times_s[3] < 455


def in_units(problem: Problem) -> Problem:
    """The problem with names of layers, as a capture has them."""
    ops, layer = [], 0
    for op in problem.graph.ops:
        ops.append(replace(op, layer=f"layers.{layer}.mlp" if op.kind in ("up", "down") else f"layers.{layer}"))
        layer += op.kind == "down"
    return replace(problem, graph=replace(problem.graph, ops=tuple(ops)))


def test_units_run_again_before_their_backward() -> None:
    problem = in_units(fsdp_like(3))
    kinds = [problem.graph.ops[op].kind for op in unit_order(problem.graph, flatten(problem)).tolist() if op >= 0]
    again = kinds[problem.graph.boundary :]
    unit = ["to", "to", "cat", "_c10d_functional.all_gather_into_tensor.default", "unpack", "unpack", "up"]
    backward = ["down backward", "up backward", "chunk_cat", "_c10d_functional.reduce_scatter_tensor.default", "to"]
    assert again == ["loss backward", *(3 * [*unit, *backward])]


@pytest.mark.parametrize("network_s", [2.0, 6.0, 12.0])
@pytest.mark.parametrize("room_bytes", [0, 400, 1600])
def test_a_plan_takes_no_longer_than_checkpoints_of_units(room_bytes: int, network_s: float) -> None:
    problem = in_units(fsdp_like(12, network_s=network_s, act_bytes=40))
    units = unit_order(problem.graph, flatten(problem)).tolist()
    schedule = schedule_of(problem.graph, units)
    budget_bytes = simulate(problem, schedule).peak_bytes + room_bytes
    found = solve_offload(problem, textbook(problem)[-1:], budget_bytes, 0)  # keep all, which does not fit
    assert found is not None and found.timeline.peak_bytes <= budget_bytes
    assert found.timeline.time_s <= overlapped(problem, schedule, budget_bytes)[1].time_s


def refused(problem: Problem, schedule: list[object], said: str) -> None:
    with pytest.raises(IllegalSchedule, match=said):
        simulate(problem, tuple(schedule))  # type: ignore[arg-type]


def test_what_is_under_way_is_left_alone() -> None:
    """Until the wait nothing reads the result, or writes to, frees or updates what is sent; forward ends without it."""
    problem = fsdp_like(2)
    graph, schedule = problem.graph, kept(problem)
    start = next(i for i, s in enumerate(schedule) if isinstance(s, Compute) and graph.ops[s.op].is_asynchronous)
    op = graph.ops[schedule[start].op]  # type: ignore[union-attr]
    wait, turn = Wait(op.outputs[0]), schedule.index(Boundary())
    assert schedule[start + 1 : start + 3] == (wait, Drop(op.inputs[0]))
    others = [s for s in schedule if s != wait]
    refused(problem, others, "dropped while it is being copied")
    others.remove(Drop(op.inputs[0]))
    refused(problem, others, "still being fetched")
    refused(problem, [*schedule[: start + 1], Compute(schedule[start].op)], "makes .* anew")  # type: ignore[union-attr]
    reads = [i for i, s in enumerate(schedule) if isinstance(s, Compute) and op.outputs[0] in graph.ops[s.op].inputs]
    early = [s for i, s in enumerate(schedule[: turn + 1]) if i not in (start + 1, start + 2, *reads)]
    early = [s for s in early if not (isinstance(s, Compute) and graph.ops[s.op].kind in ("up", "down", "loss"))]
    early = [s for s in early if isinstance(s, (Compute, Boundary, Wait))]
    early = [s for s in early if not isinstance(s, Boundary)]
    refused(problem, [*early, Boundary()], "boundary")


def test_a_reduction_is_over_before_its_gradient_is_handed_over() -> None:
    problem = fsdp_like(2, casts=False)
    graph, schedule = problem.graph, kept(problem)
    last = max(i for i, s in enumerate(schedule) if isinstance(s, Wait))
    assert graph.values[schedule[last].value].role == "gradient"  # type: ignore[union-attr]
    later = [*schedule[:last], *schedule[last + 2 :]]
    refused(problem, [s for s in later if s != schedule[last]], "still being reduced")


@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.parametrize("options", [{}, {"accumulate": True}, {"takes_gradients": True}, {"in_flight": 2}])
def test_parameters_that_are_updated_in_backward(options: dict[str, Any], replicas: bool) -> None:
    """Gradients go with their update. Nothing is updated while a gather reads it, or taken before it is reduced."""
    problem = fsdp_like(5, replicas=replicas, network_s=5.0)
    values = list(problem.graph.values)
    parameters = [i for i, value in enumerate(values) if value.role == "parameter"]
    if "in_flight" not in options:
        for layer, gradient in enumerate(reversed(problem.graph.gradients)):
            owners = tuple(parameters[2 * layer : 2 * layer + 2])
            values[gradient] = replace(values[gradient], held=False, updates=True, parameters=owners, update_bytes=50)
    problem = replace(problem, graph=replace(problem.graph, values=tuple(values)), **options)
    for schedule in (kept(problem), schedule_of(problem.graph, gathered_twice(problem))):
        before = simulate(problem, schedule)
        for room_bytes in (0, 60, 500, 3000):
            after = simulate(problem, overlapped(problem, schedule, before.peak_bytes + room_bytes)[0])
            assert after.peak_bytes <= before.peak_bytes + room_bytes
        assert after.time_s < 0.8 * before.time_s
