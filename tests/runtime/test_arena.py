"""The arena at run time, over a replay of PyTorch's allocator in place of a CUDA device's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from memplan import torch_private as private
from memplan.problem.caching_allocator import CachingAllocator
from memplan.problem.steering import GUARD_BYTES, Steering
from memplan.runtime.host.arena import StepArena, enter_arena, leave_arena
from tests.support.allocator_traces import new_segment

MIB, GIB = 1 << 20, 1 << 30


class _Pool:
    """Stands in for a pool of a CUDA device's memory."""

    made: ClassVar[list[_Pool]] = []

    def __init__(self, device: torch.device) -> None:
        self.allocator = CachingAllocator(True)
        self.inside, self.is_full = 0, False
        self.outside: dict[int, int] = {}  # bytes by name
        self.is_of_this_stream = True
        _Pool.made.append(self)

    def extend(self, size_bytes: int) -> int:
        return new_segment(self.allocator, size_bytes)

    def enter(self) -> None:
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1

    def allocate(self, size_bytes: int) -> int:
        assert self.inside == 1
        return self.allocator.allocate(size_bytes)

    def allocate_outside(self, size_bytes: int) -> int:
        assert self.inside == 0
        if self.is_full:
            return self.allocator.allocate(min(size_bytes, 6 * MIB))
        if size_bytes > GIB:
            raise torch.OutOfMemoryError
        address = -1 - len(self.outside)
        self.outside[address] = size_bytes
        return address

    def free(self, address: int) -> None:
        if address < 0:
            del self.outside[address]
        else:
            self.allocator.free(address)

    @property
    def held_bytes(self) -> int:
        return self.allocator.allocated_bytes


class _Forward:
    """A forward that waits for its backward."""

    spent = False


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> StepArena:
    _Pool.made.clear()
    monkeypatch.setattr(private, "MemoryPool", _Pool)
    return StepArena(torch.device("cuda"))


# A plug at the start before step 0, one after it before step 1; both are there when backward begins with step 5.
STEERING = Steering(64 * MIB, ({0: ((8 * MIB, 0),), 1: ((16 * MIB, 8 * MIB),), 5: ((0, 8 * MIB), (0, 0))},), {})


def step(arena: StepArena, steering: Steering = STEERING, during: Callable[[], None] = lambda: None) -> None:
    forward = _Forward()
    with arena.forward(steering, []):
        for index in range(3):
            arena.steer(index)
        during()
    arena.led(forward)
    with arena.backward(forward):
        arena.steer(5)
    forward.spent = True


def test_plugs_are_set_and_taken_away(arena: StepArena) -> None:
    held: list[int] = []
    for _ in range(3):
        step(arena, during=lambda: held.append(_Pool.made[0].held_bytes))
        assert _Pool.made[0].held_bytes == GUARD_BYTES
    assert held == [GUARD_BYTES + 24 * MIB] * 3
    assert len(_Pool.made) == 1 and _Pool.made[0].inside == 0
    assert arena.astray == 0


def test_what_was_not_planned_ends_it(arena: StepArena) -> None:
    step(arena)
    pool = _Pool.made[0]
    pool.enter()
    kept = pool.allocate(2 * MIB)  # of a step that went otherwise
    pool.leave()
    step(arena, during=lambda: setattr(pool, "seen", pool.inside))
    assert arena.astray == 1 and pool.seen == pool.inside == 0  # type: ignore[attr-defined]
    assert pool.held_bytes == GUARD_BYTES + 2 * MIB
    pool.free(kept)
    step(arena)
    assert arena.astray == 1


def test_a_step_that_fails_leaves_nothing(arena: StepArena) -> None:
    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        step(arena, during=fail)
    assert _Pool.made[0].held_bytes == GUARD_BYTES and _Pool.made[0].inside == 0
    step(arena)
    assert arena.astray == 1


def test_places_of_outputs_are_held_until_they_are_made(arena: StepArena) -> None:
    steering, store = replace(STEERING, outside={7: (6 * MIB,), 9: (3 * MIB, 2 * MIB)}), SimpleNamespace(arena=arena)
    seen = []

    def outputs() -> None:
        for op in (7, 9, 9):  # the last is a run in backward
            seen.append(sorted(_Pool.made[0].outside.values()))
            leave_arena(store, op)
            enter_arena(store)

    step(arena, steering, outputs)
    assert seen == [[2 * MIB, 3 * MIB, 6 * MIB], [2 * MIB, 3 * MIB], []]

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        step(arena, steering, fail)
    assert not _Pool.made[0].outside


@pytest.mark.parametrize("in_arena", [False, True])
def test_a_full_device_has_no_places_for_outputs(in_arena: bool, arena: StepArena) -> None:
    """Where it has memory in the arena alone, PyTorch gives that."""
    steering, store = replace(STEERING, outside={7: (6 * MIB, 2 * GIB)}), SimpleNamespace(arena=arena)
    step(arena)
    _Pool.made[0].is_full = in_arena
    step(arena, steering, lambda: leave_arena(store, 7))
    assert arena.astray == 0 and not _Pool.made[0].outside and _Pool.made[0].held_bytes == GUARD_BYTES


def test_smaller_and_larger_plans_share_it(arena: StepArena) -> None:
    smaller, larger = (Steering(n * MIB, STEERING.moves, {}) for n in (32, 128))
    for steering in (STEERING, smaller, STEERING, smaller):
        step(arena, steering)
    assert len(_Pool.made) == 1
    step(arena, larger)
    step(arena, smaller)
    assert len(_Pool.made) == 2 and arena.astray == 0


def test_backward_of_another_forward_is_not_led(arena: StepArena) -> None:
    first, second = _Forward(), _Forward()
    with arena.forward(STEERING, []):
        arena.steer(0)
    arena.led(first)
    with arena.forward(STEERING, []):
        arena.steer(0)
    arena.led(second)
    for forward in (second, first):
        with arena.backward(forward):
            arena.steer(5)
            assert _Pool.made[0].inside == 0
    assert _Pool.made[0].held_bytes == GUARD_BYTES
    assert arena.astray == 1


def test_gradients_of_others_are_not_planned_for(arena: StepArena) -> None:
    step(arena)
    with arena.forward(STEERING, [torch.empty(2 * MIB)]):
        arena.steer(0)
        assert _Pool.made[0].inside == 0
    assert arena.astray == 1


def gradient_at(address: int, size_bytes: int) -> Any:
    """A gradient whose memory is a block at this address."""
    storage = SimpleNamespace(data_ptr=lambda: address, nbytes=lambda: size_bytes)
    return SimpleNamespace(layout=torch.strided, untyped_storage=lambda: storage)


def test_a_further_microbatch_is_led_beside_gradients_that_were_planned_for(arena: StepArena) -> None:
    steering = replace(STEERING, moves=(*STEERING.moves, {0: ((4 * MIB, 3 * MIB),)}), kept_bytes=3 * MIB)
    step(arena, steering)
    pool = _Pool.made[0]
    pool.enter()
    address = pool.allocate(3 * MIB)
    pool.leave()
    inside, outside = gradient_at(address, 3 * MIB), gradient_at(-1, 3 * MIB)
    with arena.forward(steering, [inside, outside, gradient_at(address, 3 * MIB)]):  # two are parts of one block
        arena.steer(0)
        assert pool.inside == 1
    assert arena.astray == 0
    with arena.forward(steering, [outside]):
        assert pool.inside == 0
    assert arena.astray == 1


def test_other_sizes_and_other_streams_are_outside(arena: StepArena) -> None:
    step(arena)
    pool, forward = _Pool.made[0], _Forward()
    with arena.forward(None, []):  # its own program calls for plugs as well
        arena.steer(0)
        assert pool.inside == 0
    arena.led(forward)
    with arena.backward(forward):
        arena.steer(5)
        assert pool.inside == 0
    pool.is_of_this_stream = False
    step(arena, during=lambda: setattr(pool, "seen", pool.inside))
    assert pool.seen == 0 and len(_Pool.made) == 1 and pool.held_bytes == GUARD_BYTES  # type: ignore[attr-defined]


def test_a_failure_where_the_caller_holds_results_leaves_nothing(arena: StepArena) -> None:
    def fail() -> None:
        arena.leave()
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        step(arena, during=fail)
    assert _Pool.made[0].inside == 0 and _Pool.made[0].held_bytes == GUARD_BYTES
    step(arena)
    assert arena.astray == 1


def test_what_is_closed_opens_again_for_the_next_step(arena: StepArena) -> None:
    forward = _Forward()
    with arena.forward(STEERING, []):
        arena.steer(0)
    arena.led(forward)
    (pool,) = _Pool.made
    arena.close()
    assert pool.held_bytes == GUARD_BYTES  # no plug
    with arena.backward(forward):
        arena.steer(5)
        assert pool.inside == 0
    forward.spent = True
    step(arena)
    assert len(_Pool.made) == 2 and arena.astray == 0


def test_a_step_within_a_step_is_outside(arena: StepArena) -> None:
    inside: list[int] = []

    def nest() -> None:
        with arena.forward(STEERING, []):
            arena.steer(0)
            arena.leave()
            arena.enter()
            inside.append(_Pool.made[0].inside)
        inside.append(_Pool.made[0].inside)

    step(arena, during=nest)
    assert inside == [0, 1] and arena.astray == 0


def test_another_thread_is_outside(arena: StepArena) -> None:
    inside: list[int] = []

    def other() -> None:
        with arena.forward(STEERING, []):
            arena.steer(0)
            arena.enter()
            inside.append(_Pool.made[0].inside)

    def during() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    step(arena, during=during)
    assert inside == [1] and arena.astray == 0  # the first one's


def test_no_room_leaves_the_step_to_the_allocator(arena: StepArena, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: _Pool, size_bytes: int) -> int:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(_Pool, "extend", full)
        step(arena)
    assert arena.astray == 1
    step(arena)
    assert arena.astray == 1


def test_steps_that_always_ask_for_other_blocks_have_no_arena(arena: StepArena) -> None:
    other = Steering(64 * MIB, ({0: ((8 * MIB, 4 * MIB),)},), {})
    for _ in range(2):
        step(arena, other)
    assert arena.given_up and arena.astray == 2
    step(arena, during=lambda: setattr(_Pool.made[0], "seen", _Pool.made[0].inside))
    assert _Pool.made[0].seen == 0  # type: ignore[attr-defined]
    assert arena._pool is None


def test_callers_are_outside(arena: StepArena) -> None:
    seen: list[int] = []

    def call() -> None:
        with arena.outside():
            seen.append(_Pool.made[0].inside)
        arena.leave()
        seen.append(_Pool.made[0].inside)
        arena.enter()
        seen.append(_Pool.made[0].inside)

    step(arena, during=call)
    assert seen == [0, 0, 1]
    with arena.outside():
        pass
