"""Steps that are led through an arena: where the allocator puts their blocks, replayed by its own rules."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.config import Config
from memplan.plans.plan import Plan
from memplan.problem import reserved, steering
from memplan.problem.caching_allocator import SMALL_BYTES, CachingAllocator
from memplan.problem.data import Problem, Requests
from memplan.problem.packing import LiveRange, Packing, most_alive, pack_slab
from memplan.problem.reserved import reserved_bytes, steering_of
from memplan.problem.schedule import Compute, Schedule
from memplan.problem.simulate import simulate, unplanned_step
from memplan.problem.steering import Moment, Release, Request, _Holes, _Leader, _live_ranges, lead
from memplan.solvers import solve_front
from tests.problem.test_reserved import in_units
from tests.support.allocator_traces import new_segment
from tests.support.parameters import examples
from tests.support.random_graphs import llama_like, random_problems, resnet_like, unet_like
from tests.support.reserved_loops import FOLDER

MIB = 1 << 20
SMALL = Config(methods=("rotor",), points=8)
FUZZ = settings(max_examples=examples(60), deadline=None, derandomize=True, database=None)
PROBLEMS = {"llama": llama_like(4), "resnet": resnet_like((2, 2, 2, 2)), "unet": unet_like(4)}


def led_blocks(moments: list[Moment], expandable: bool) -> tuple[int, int]:
    """The most bytes that the allocator reserves for moments that are led, and that live at one time."""
    found = lead([moments], expandable, {})
    if found is None:  # some block has no place in any of those that were tried
        return 0, 1
    allocator = CachingAllocator(expandable)
    start = new_segment(allocator, found.arena_bytes)
    blocks: dict[int, int] = {}
    plugs: dict[int, int] = {}
    for index, events in moments:
        for size_bytes, offset in found.moves[0].get(index, ()):
            if size_bytes:
                plugs[offset] = allocator.allocate(size_bytes)
                assert plugs[offset] == start + offset
            else:
                allocator.free(plugs.pop(offset))
        for event in events:
            if isinstance(event, Request):
                blocks[event.name] = allocator.allocate(event.size_bytes)
            else:
                allocator.free(blocks.pop(event.name))
    return allocator.peak_reserved_bytes, most_alive(_live_ranges(moments).values())


def random_moments(seed: int) -> list[Moment]:
    draw = random.Random(seed)
    live: list[int] = []
    moments: list[Moment] = []
    for index in range(draw.randrange(1, 60)):
        events: list[Request | Release] = []
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            live.append(len(live) + 1000 * index)
            size_bytes = draw.choice((2, 3, 8, 12, 12, 48)) * MIB + draw.choice((0, 0, 512, 700 << 10))
            events.append(Request(live[-1], size_bytes))
        draw.shuffle(live)
        events += [Release(live.pop()) for _ in range(draw.randrange(len(live) + 1)) if len(live) > 2]
        moments.append((index, tuple(events)))
    return moments


@FUZZ
@given(st.integers(0, 10**6), st.booleans())
def test_plugs_land_where_they_should(seed: int, expandable: bool) -> None:
    moments = random_moments(seed)
    reserved_by_it, alive_bytes = led_blocks(moments, expandable)
    assert reserved_by_it >= alive_bytes or not reserved_by_it


def test_a_short_block_keeps_the_hole_that_alone_has_room_for_it() -> None:
    """An op asks for `out`, then for `indices`, which are gone a step later. Both fit both holes, but not in any order.

    MiB 200 |-------|
        168 |-------|
            |  out  |
        136 |-------|
            |       |  rest, once indices are gone
         72 |-------|
            | fixed |
         64 |-------|
            |indices|
          0 |-------|
    """
    fixed, out, indices, rest = 1, 2, 3, 4
    offsets = [64 * MIB, 136 * MIB, 0, 72 * MIB]
    moments: list[Moment] = [
        (0, (Request(fixed, 8 * MIB),)),
        (1, (Request(out, 32 * MIB), Request(indices, 64 * MIB))),
        (2, (Release(indices),)),
        (3, (Request(rest, 64 * MIB),)),
    ]
    leader = _Leader(200 * MIB, True, _live_ranges(moments), offsets)
    leader.run(moments)
    assert not leader.missed
    assert [leader.places[name] for name in (fixed, out, rest)] == [64 * MIB, 136 * MIB, 72 * MIB]


def test_a_block_that_is_missed_is_packed_with_more_room_than_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in cuDNN's attention: an op asks for three gradients, then for `scratch`. The first gradient goes to its hole.

    MiB 113 |-------|
            |   b   |
         95 |-------|
            |   y   |  then three gradients
         41 |-------|
            |   a   |
         37 |-------|
            |   x   |  then scratch
          0 |-------|
    """
    x, a, y, b, gradients, scratch = 1, 2, 3, 4, (5, 6, 7), 8
    moments: list[Moment] = [
        *((name, (Request(name, size * MIB),)) for name, size in ((x, 37), (a, 4), (y, 54), (b, 18))),
        (5, (Release(x), Release(y))),
        (6, (*(Request(name, 18 * MIB) for name in gradients), Request(scratch, 37 * MIB), Release(scratch))),
        (7, tuple(map(Release, (*gradients, a, b)))),
    ]
    tight, packed = Packing(tuple(at * MIB for at in (0, 37, 41, 95, 41, 59, 77, 0)), 113 * MIB), list[int]()

    def pack(blocks: Sequence[LiveRange], seed: int) -> Packing:
        packed.append(blocks[scratch - 1].size_bytes)
        return tight if len(packed) == 1 else pack_slab(blocks, seed=seed)

    monkeypatch.setattr(steering, "pack_slab", pack)
    found = lead([moments], True, {})
    assert packed[:2] == [37 * MIB, 55 * MIB]
    assert found is not None and found.arena_bytes < 1.05 * 113 * MIB


def test_random_moments_are_led_in_little_more_than_they_hold() -> None:
    led = [led_blocks(random_moments(seed), True) for seed in range(40)]
    assert all(reserved_by_it for reserved_by_it, _ in led)
    assert sum(reserved_by_it / alive for reserved_by_it, alive in led) / len(led) < 1.1


@FUZZ
@given(st.integers(0, 10**6), st.booleans())
def test_holes_are_those_of_the_allocator(seed: int, expandable: bool) -> None:
    draw = random.Random(seed)
    size_bytes = 256 * MIB
    allocator = CachingAllocator(expandable)
    start = new_segment(allocator, size_bytes)
    holes = _Holes(512 if expandable else SMALL_BYTES + 1, {0: size_bytes}, {size_bytes: 0})
    live: list[int] = []
    for _ in range(200):
        if live and draw.random() < 0.45:
            offset = live.pop(draw.randrange(len(live)))
            holes.free(offset)
            allocator.free(start + offset)
            continue
        asked = draw.randrange(SMALL_BYTES // 512 + 1, 20 * MIB // 512) * 512
        found = holes.allocate(asked)
        if found is None:
            continue
        assert allocator.allocate(asked) == start + found
        live.append(found)


def schedules(problem: Problem) -> list[Schedule]:
    return [point.schedule for point in solve_front(problem, SMALL).spread(4)]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("name", PROBLEMS)
def test_steps_that_are_led_reserve_less(name: str, expandable: bool, accumulate: bool) -> None:
    problem = replace(PROBLEMS[name], requests=Requests(expandable), accumulate=accumulate)
    led = [(s, found) for s in schedules(problem) if (found := steering_of(problem, s, expandable)) is not None]
    assert led
    for schedule, found in led:
        led_bytes = reserved_bytes(problem, schedule, expandable, found)
        assert simulate(problem, schedule).peak_bytes <= led_bytes < reserved_bytes(problem, schedule, expandable)
        assert len(found.moves) == 1 + accumulate


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.plan")), ids=lambda path: path.stem)
def test_recorded_loops_would_reserve_hardly_more_than_their_peaks(path: Path) -> None:
    plan = Plan.load(path)
    assert plan.problem.requests is not None
    alone_bytes = reserved_bytes(plan.problem, plan.schedule, plan.problem.requests.expandable)
    assert plan.reserved_bytes <= alone_bytes
    if plan.steering is not None:
        assert plan.reserved_bytes < 1.05 * plan.peak_bytes + 26 * MIB


@FUZZ
@given(random_problems())
def test_what_an_arena_is_asked_for_comes_to_the_peak(problem: Problem) -> None:
    problem = replace(in_units(problem, 4 * MIB), update_bytes=0, accumulate=False)
    problem = replace(problem, link=None, gather=None, in_flight=1)
    problem, schedule = unplanned_step(problem)
    (moments,) = reserved._microbatches(problem, schedule, {})
    peak_bytes = simulate(problem, schedule).peak_bytes - problem.resident_bytes
    alive_bytes = most_alive(_live_ranges(moments).values())
    elsewhere_bytes = sum(problem.graph.values[v].size_bytes for v in problem.graph.tangents)
    assert peak_bytes - elsewhere_bytes <= alive_bytes <= peak_bytes


def test_steps_that_ask_for_blocks_without_a_place_are_named() -> None:
    """10 MiB in an arena of 20, then 40 and 50 that fit nowhere."""
    moments: list[Moment] = [
        (0, (Request(0, 10 * MIB),)), (1, (Request(1, 40 * MIB),)), (2, (Request(2, 50 * MIB),)),
        (3, (Release(1), Release(2))), (4, (Release(0),)),
    ]  # fmt: skip
    leader = _Leader(20 * MIB, True, _live_ranges(moments), [0, 0, 0])
    leader.run(moments)
    assert leader.missed == {1, 2}


def test_what_the_caller_holds_is_outside() -> None:
    step = PROBLEMS["unet"]
    schedule = schedules(step)[0]
    assert not reserved._makers_of_outputs(step)  # a loss is in no place of an arena
    values = [replace(v, size_bytes=2 * MIB) if v.held else v for v in step.graph.values]
    problem = replace(step, graph=replace(step.graph, values=tuple(values)))
    outside = reserved._makers_of_outputs(problem)
    assert outside and all(Compute(op) in schedule for op in outside)
    (moments,) = reserved._microbatches(problem, schedule, outside)
    asking = {index for index, events in moments if any(isinstance(e, Request) for e in events)}
    runs = {index for index, step in enumerate(schedule) if isinstance(step, Compute) and step.op in outside}
    assert runs and not asking & runs


@pytest.mark.parametrize("change", [{"in_flight": 2}, {"takes_gradients": True}])
def test_steps_that_are_not_led(change: dict[str, object]) -> None:
    problem = replace(PROBLEMS["unet"], **change)  # type: ignore[arg-type]
    assert steering_of(problem, schedules(PROBLEMS["unet"])[0], True) is None
