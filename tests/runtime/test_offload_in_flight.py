"""Copies to host memory where several forwards are in flight: each has host memory of its own, and the bytes and
seconds of all are those that were predicted."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memplan
from memplan.installed.planned_forward import planned_forward
from memplan.problem.data import Link, Problem
from memplan.problem.packing import place_host_copies
from memplan.problem.schedule import Boundary, Drop, Offload, Wait
from memplan.problem.simulate import simulate
from memplan.runtime.host import transfers as engine
from memplan.runtime.host.streams import Direction, Streams
from memplan.solvers import solve_front
from memplan.solvers.bounds.offload_bound import offload_bound_s
from memplan.solvers.offload.copies import movables_of
from memplan.solvers.offload.fit_copies import least_bytes, solve_offload
from memplan.solvers.orders.flat import flatten
from tests.planning.test_in_flight import Stage
from tests.solvers.test_solvers import CALM, SMALL, some_orders
from tests.support.offloads import (
    FAST,
    PCIE,
    SLOW,
    CountingStreams,
    DeviceMeter,
    EarlyStreams,
    Interrupted,
    calls_of,
    host_resident_bytes,
    most_on_host,
    place_copies,
    recounted,
    settled,
    with_random_homes,
)
from tests.support.random_graphs import llama_like, random_problems
from tests.support.zoo import assert_same_bits, copied

FORWARD, BACKWARD = "F", "B"


def gpipe(in_flight: int, count: int) -> Iterator[tuple[str, int]]:
    """All forwards of a round, then all backwards, the first forward's first."""
    for begin in range(0, count, in_flight):
        for kind in (FORWARD, BACKWARD):
            yield from ((kind, k) for k in range(begin, min(begin + in_flight, count)))


def one_f_one_b(in_flight: int, count: int) -> Iterator[tuple[str, int]]:
    """One forward, one backward, after the first ones."""
    for k in range(count + in_flight - 1):
        if k < count:
            yield FORWARD, k
        if k + 1 >= in_flight:
            yield BACKWARD, k + 1 - in_flight


ORDERS = {"gpipe": gpipe, "1f1b": one_f_one_b}


# -- planning ---------------------------------------------------------------------------------------------------------


@CALM
@given(
    random_problems(),
    st.lists(st.booleans(), min_size=1, max_size=9),
    st.sampled_from([SLOW, FAST, Link(2.0, 2.0)]),
    st.integers(2, 4),
)
def test_orders_with_copies_keep_the_budget_of_all(
    problem: Problem, picks: list[bool], link: Link, in_flight: int
) -> None:
    """Kernels, `simulate` and a recount agree, and no schedule is faster than the bound."""
    problem = replace(with_random_homes(problem, picks), link=link, in_flight=in_flight, host_update_s_per_byte=0.01)
    flat, movables = flatten(problem), movables_of(problem)
    gradients = {i for i, v in enumerate(problem.graph.values) if v.role == "gradient" and v.home == "host"}
    for order in [tuple(o.tolist()) for o in some_orders(flat)[:6]]:
        low = least_bytes(problem, order)
        assert place_copies(problem, order, low - 1) is None
        for budget in (low, low + 24, low + 100, 1 << 60):
            places = settled(problem, order, budget, flat, movables)
            assert places is not None
            schedule = places.schedule()
            timeline = simulate(problem, schedule)
            assert timeline.peak_bytes <= budget
            most_on_device, most_host_bytes = most_of_all(problem, schedule)
            assert timeline.host_peak_bytes == most_host_bytes
            assert max(timeline.live_bytes) == most_on_device
            time_s, host_peak_bytes = places.lanes()
            assert time_s == pytest.approx(timeline.time_s, rel=1e-9)
            assert host_peak_bytes == most_on_host(problem.graph, schedule, gradients)
            ran = sum(problem.costs.time_s[op] for op in order if op >= 0)
            assert timeline.time_s == pytest.approx(ran + timeline.stall_s)
            assert offload_bound_s(problem, budget) <= timeline.time_s * (1 + 1e-9)


def most_of_all(problem: Problem, schedule: Any) -> tuple[int, int]:
    """The most bytes on the device and on the host after any step, one microbatch running and all others waiting."""
    on_device, on_host = recounted(problem, schedule)
    turn = schedule.index(Boundary())
    graph = problem.graph
    tangent_bytes = sum(graph.values[t].size_bytes for t in graph.tangents)
    saved = on_device[turn] - tangent_bytes - problem.resident_bytes + graph.input_bytes
    others = problem.in_flight - 1
    return max(on_device) + others * saved, max(on_host) + others * on_host[turn]


def test_what_waits_leaves_first() -> None:
    """With four in flight copies reach far below what recomputing alone does, and never make a step slower."""
    problem = replace(llama_like(4), in_flight=4, accumulate=True)
    front, linked = solve_front(problem, SMALL), replace(problem, link=PCIE, in_flight=4)
    low, high = front.floor.peak_bytes, front.keep_all.peak_bytes
    assert least_bytes(linked, *(point.order for point in front.points)) < low
    for share in (0.0, 0.2, 0.5, 1.0):
        budget = low + int(share * (high - low))
        alone, found = front.best(budget), solve_offload(linked, front.points, budget, 1 << 60)
        assert alone is not None and found is not None
        assert found.timeline.time_s <= alone.time_s * (1 + 1e-12)
        assert offload_bound_s(linked, budget) <= found.timeline.time_s * (1 + 1e-12)
        slab_bytes = place_host_copies(linked.graph, found.schedule).pinned_bytes
        if slab_bytes:
            tight = solve_offload(linked, front.points, budget, 4 * slab_bytes - 1)
            assert tight is not None
            assert place_host_copies(linked.graph, tight.schedule).pinned_bytes < slab_bytes


def test_the_host_budget_is_for_all_in_flight() -> None:
    for in_flight in (1, 3):
        plan = plan_below_the_floor(in_flight)
        slab = place_host_copies(plan.problem.graph, plan.schedule)
        assert plan.host_bytes == in_flight * slab.pinned_bytes > 0
        waiting = plan.timeline.host_bytes[plan.schedule.index(Boundary())] // in_flight
        assert plan.timeline.host_peak_bytes <= in_flight * slab.size_bytes
        assert plan.timeline.host_peak_bytes >= in_flight * waiting > 0
        assert f"to {memplan.format_bytes(plan.host_bytes)} of host memory" in plan.report()


# -- running ----------------------------------------------------------------------------------------------------------

SAMPLE = (256, 32)


def options_of(in_flight: int, parameters_too: bool = False) -> dict[str, Any]:
    around = memplan.Surroundings(keeps_parameters=not parameters_too)
    return {"costs": "estimate", "accumulate": True, "in_flight": in_flight, "surroundings": around}


def plain_stage() -> Stage:
    torch.manual_seed(0)
    return Stage().train()


@functools.cache
def plan_below_the_floor(in_flight: int, parameters_too: bool = False) -> memplan.Plan:
    """A plan of a stage for less than recomputing alone can do with."""
    stage = plain_stage()
    sample, options = torch.randn(SAMPLE).requires_grad_(), options_of(in_flight, parameters_too)
    floor_bytes = memplan.plan(stage, sample, 1.0, **options).floor_bytes
    options |= {"host_budget": "1GiB", "link": PCIE}
    least_bytes = memplan.plan(stage, sample, 1.0, **options).floor_bytes
    assert least_bytes < floor_bytes
    return memplan.plan(stage, sample, (least_bytes + floor_bytes) // 2, **options)


def planned(in_flight: int, seed: int | None, parameters_too: bool = False) -> tuple[Stage, memplan.Plan]:
    stage, plan = plain_stage(), plan_below_the_floor(in_flight, parameters_too)
    sample = torch.randn(SAMPLE).requires_grad_()
    memplan.apply(stage, sample, plan=plan, **options_of(in_flight, parameters_too))
    use(stage, EarlyStreams(seed))
    return stage, plan


def use(stage: torch.nn.Module, streams: Streams) -> engine.Transfers:
    """Let copies run on these streams."""
    runner = planned_forward(stage).steps[0].runner  # type: ignore[union-attr]
    runner.store.transfers = engine.Transfers(torch.device("cpu"), streams)
    return runner.store.transfers  # type: ignore[no-any-return]


def run(stage: torch.nn.Module, order: Iterable[tuple[str, int]]) -> list[Any]:
    """Outputs and input gradients of all microbatches, gradients, the generator."""
    torch.manual_seed(1)
    for p in stage.parameters():
        p.grad = None
    found, waiting = list[Any](), deque[tuple[torch.Tensor, torch.Tensor]]()
    for kind, _ in order:
        if kind == FORWARD:
            x = torch.randn(SAMPLE).requires_grad_()
            waiting.append((x, stage(x)))
        else:
            x, out = waiting.popleft()
            out.backward(torch.ones(SAMPLE))
            found += [copied(out), copied(x.grad)]
    return [*found, [copied(p.grad) for p in stage.parameters()], torch.get_rng_state()]


@pytest.mark.parametrize("parameters_too", [False, True], ids=["activations", "parameters too"])
@pytest.mark.parametrize("name", ORDERS)
def test_bits_are_those_of_the_plain_stage(name: str, parameters_too: bool) -> None:
    order = list(ORDERS[name](3, 7))
    expected = run(plain_stage(), order)
    stage, plan = planned(3, None, parameters_too)
    assert plan.offloaded_bytes and bool(host_resident_bytes(plan.problem.graph)) == parameters_too
    for seed in (None, 0, 1):
        transfers = use(stage, EarlyStreams(seed))
        for _ in range(2):
            assert_same_bits(expected, run(stage, order))
        assert transfers.allocations == len(transfers.slabs) == 3
        assert not transfers._kept


@pytest.mark.parametrize("in_flight", [2, 4])
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("seed", [None, 0])
def test_bytes_on_device_and_host_are_the_predicted_ones(name: str, in_flight: int, seed: int | None) -> None:
    stage, plan = planned(in_flight, seed)
    streams = CountingStreams(seed)
    assert measured(stage, streams, ORDERS[name](in_flight, 9)) == plan.live_peak_bytes
    assert streams.host_bytes == plan.host_bytes
    assert plan.host_bytes == in_flight * place_host_copies(plan.problem.graph, plan.schedule).pinned_bytes


def measured(stage: torch.nn.Module, streams: CountingStreams, order: Iterable[tuple[str, int]]) -> int:
    """The most bytes on the device, each input's gradient being held until the next one is there."""
    use(stage, streams)
    meter = DeviceMeter(streams, 0)
    for p in stage.parameters():
        p.grad = torch.zeros_like(p)
    waiting = deque[tuple[torch.Tensor, torch.Tensor]]()
    sent: torch.Tensor | None = torch.zeros(SAMPLE)
    meter.register([list(stage.parameters()), [p.grad for p in stage.parameters()], sent])
    with meter:
        for kind, _ in order:
            if kind == FORWARD:
                x = torch.randn(SAMPLE).requires_grad_()
                waiting.append((x, stage(x)))
                del x
            else:
                x, out = waiting.popleft()
                out.backward(torch.ones(SAMPLE))
                sent = x.grad
                del x, out
    return meter.device_peak_bytes


def waiting_late(plan: memplan.Plan) -> memplan.Plan:
    """The same with every wait for a copy out in the backward pass: it runs while other microbatches do."""
    turn = plan.schedule.index(Boundary())
    gone = {step.value for step in plan.schedule[:turn] if isinstance(step, Offload)}
    late = tuple(s for s in plan.schedule[:turn] if isinstance(s, (Wait, Drop)) and s.value in gone)
    early = tuple(s for s in plan.schedule[:turn] if s not in late)
    assert late
    schedule = (*early, Boundary(), *late, *plan.schedule[turn + 1 :])
    problem = replace(plan.problem, budget_bytes=None)
    return replace(plan, problem=problem, schedule=schedule, timeline=simulate(problem, schedule))


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("name", ORDERS)
def test_copies_may_be_under_way_while_other_microbatches_run(name: str, seed: int | None) -> None:
    """What they read stays on the device, and is counted as saved."""
    stage, plan = plain_stage(), waiting_late(plan_below_the_floor(3))
    assert plan.waiting_bytes > plan_below_the_floor(3).waiting_bytes
    memplan.apply(stage, torch.randn(SAMPLE).requires_grad_(), plan=plan, **options_of(3))
    order = list(ORDERS[name](3, 7))
    transfers = use(stage, EarlyStreams(seed))
    assert_same_bits(run(plain_stage(), order), run(stage, order))
    waiting = [stage(torch.randn(SAMPLE).requires_grad_()) for _ in range(3)]
    assert transfers._kept and len(transfers._kept) % 3 == 0
    for out in waiting:
        out.backward(torch.ones(SAMPLE))
    assert not transfers._kept
    del waiting, out
    streams = CountingStreams(seed)
    assert measured(stage, streams, order) == plan.live_peak_bytes
    assert streams.host_bytes == plan.host_bytes


@pytest.mark.parametrize("name", ORDERS)
def test_each_missing_wait_makes_wrong_numbers(name: str) -> None:
    order = list(ORDERS[name](3, 5))
    expected = run(plain_stage(), order)
    stage, _ = planned(3, None)
    waits = [(module, node) for module, node in calls_of(stage, engine.wait)
             if any(user.target is engine.viewed_as for user in node.users)]  # fmt: skip
    assert waits
    for module, node in waits:
        node.target = lambda slab, ticket: ticket.data
        module.recompile()
        with pytest.raises(AssertionError):
            assert_same_bits(expected, run(stage, order))
        node.target = engine.wait
        module.recompile()
    assert_same_bits(expected, run(stage, order))


def test_runs_that_shared_a_slab_would_make_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory of one microbatch is nobody else's as long as it waits."""
    order = list(gpipe(3, 3))
    expected = run(plain_stage(), order)
    stage, plan = planned(3, 0)
    slab = place_host_copies(plan.problem.graph, plan.schedule)
    shared = torch.empty(slab.pinned_bytes, dtype=torch.uint8)
    monkeypatch.setattr(engine.Transfers, "open", lambda self, size_bytes: engine.Slab(self, shared))
    with pytest.raises(AssertionError):
        assert_same_bits(expected, run(stage, order))
    monkeypatch.undo()
    assert_same_bits(expected, run(stage, order))


def test_a_microbatch_that_is_given_up_leaves_its_host_memory_to_others() -> None:
    order = list(one_f_one_b(3, 7))
    expected = run(plain_stage(), order)
    stage, _ = planned(3, 0)
    transfers = use(stage, EarlyStreams(0))
    forgotten = [stage(torch.randn(SAMPLE).requires_grad_()) for _ in range(3)]
    assert transfers.allocations == 3 and not transfers.slabs
    del forgotten
    for _ in range(3):
        assert_same_bits(expected, run(stage, order))
    assert transfers.allocations == len(transfers.slabs) == 3


class FailingStreams(EarlyStreams):
    """left: copies until one fails."""

    left = 1 << 30

    def copy(self, direction: Direction, source: torch.Tensor, target: torch.Tensor) -> Any:
        self.left -= 1
        if self.left < 0:
            raise Interrupted
        return super().copy(direction, source, target)


@pytest.mark.parametrize("seed", [None, 0])
def test_a_forward_that_fails_harms_none_that_wait(seed: int | None) -> None:
    stage, _ = planned(3, seed)
    streams = FailingStreams(seed)
    transfers = use(stage, streams)
    found = []
    for model in (plain_stage(), stage):
        torch.manual_seed(1)
        inputs = [torch.randn(SAMPLE).requires_grad_() for _ in range(2)]
        outputs = [model(x) for x in inputs]
        if model is stage:
            streams.left = 2
            with pytest.raises(Interrupted):
                model(torch.randn(SAMPLE).requires_grad_())
            streams.left = 1 << 30
        for out in outputs:
            out.backward(torch.ones(SAMPLE))
        found.append([copied(outputs), [copied(x.grad) for x in inputs], [copied(p.grad) for p in model.parameters()]])
    assert_same_bits(*found)
    del outputs, out
    assert transfers.allocations == len(transfers.slabs) == 3
    assert not transfers._kept


def test_a_plan_for_one_forward_runs_two_in_more_host_memory() -> None:
    """Losses that are added up before backward: bits hold; bytes on device and host are those of two."""
    plain = plain_stage()
    stage, plan = planned(1, 0)
    transfers = use(stage, EarlyStreams(0))
    found = []
    for model in (plain, stage):
        torch.manual_seed(1)
        x, y = (torch.randn(SAMPLE).requires_grad_() for _ in range(2))
        first, second = model(x), model(y)
        second.backward(torch.ones(SAMPLE))
        first.backward(torch.ones(SAMPLE))
        found.append([copied(first), copied(second), copied(x.grad), copied(y.grad)])
        found[-1].append([copied(p.grad) for p in model.parameters()])
    assert_same_bits(*found)
    assert transfers.allocations == 2
    assert sum(slab.numel() for slab in transfers.slabs) == 2 * plan.host_bytes


def test_the_curve_with_copies_is_one_of_all_in_flight() -> None:
    stage, sample = plain_stage(), torch.randn(SAMPLE).requires_grad_()
    alone = memplan.explore(stage, sample, **options_of(3))
    points = memplan.explore(stage, sample, host_budget="1GiB", link=PCIE, **options_of(3))
    assert points[0].peak_bytes < alone[0].peak_bytes and points[-1].time_s == alone[-1].time_s
    for point in points:
        assert point.lower_bound_s <= point.time_s and point.host_bytes <= 1 << 30
        assert point.time_s <= min((p.time_s for p in alone if p.peak_bytes <= point.peak_bytes), default=float("inf"))
    order = list(one_f_one_b(3, 5))
    expected = run(plain_stage(), order)
    memplan.apply(stage, sample, plan=points[0], **options_of(3))
    assert_same_bits(expected, run(copy.copy(stage), order))
