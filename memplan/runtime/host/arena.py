"""The arena of a model's planned steps on a CUDA device: memory in which each block has a place that was planned.

It is a pool of PyTorch's allocator that nobody else uses. A program calls `steer_arena` before ops whose blocks would
go elsewhere, as `Steering` says. A plug that lands in another place than it should shows that the arena holds something
that was not planned, a gradient that the caller keeps for instance: the rest of the step is then outside of it. Where
that happens again, the model has no arena any more.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from memplan import torch_private as private
from memplan.problem.caching_allocator import MIN_BLOCK_BYTES, SMALL_BYTES
from memplan.problem.steering import GUARD_BYTES, Moves, Steering

_MOST_MISPLACED = 2  # steps in which a block had another place than planned


class InFlightStep(Protocol):
    """A forward; it is spent once what it saved is gone."""

    spent: bool


class StepArena:
    """The arena of one model on one device, which its steps share.

    - astray: how many steps were not led through it to their end.
    """

    def __init__(self, device: torch.device) -> None:
        self.astray = self._misplaced = 0
        self.device = device
        self._pool: private.MemoryPool | None = None
        self._size = self._open_bytes = self._start = 0
        self._tail = 0  # the address of the guard, or of all that a smaller arena leaves
        self._plugs: dict[int, int] = {}  # addresses by offset
        self._places: dict[int, list[int]] = {}  # addresses of plugs where outputs of ops will be
        self._moves: Moves | None = None
        self._busy = threading.Lock()
        self._thread: int | None = None  # that is led
        self._entered = False  # its blocks come from the arena
        self._forward: weakref.ref[InFlightStep] | None = None  # whose backward is led
        self._forwards: weakref.WeakSet[InFlightStep] = weakref.WeakSet()  # that were led

    @property
    def given_up(self) -> bool:
        """Whether it is not used any more, because steps ask for other blocks than they were planned with."""
        return self._misplaced >= _MOST_MISPLACED

    @contextlib.contextmanager
    def forward(self, steering: Steering | None, gradients: Sequence[torch.Tensor]) -> Iterator[None]:
        """A context for a forward. Without steering it is outside of the arena. gradients: those that are there."""
        if not self._busy.acquire(blocking=False):
            with self.outside():
                yield
            return
        try:
            self._forward, self._moves = None, None
            if self.given_up:
                self.close()
            elif steering is not None:
                in_flight = any(not forward.spent for forward in self._forwards)
                if self._open(steering.arena_bytes, empty=not in_flight and not gradients) and not in_flight:
                    self._moves = self._moves_beside(steering, gradients)
                if self._moves is not None:
                    self._hold_places(steering)
                self.astray += self._moves is None
            with self._within():
                yield
        finally:
            self._busy.release()

    def led(self, forward: InFlightStep) -> None:
        """Tell which forward has ended."""
        if self._moves is not None and self._thread is None:
            self._forward = weakref.ref(forward)
            self._forwards.add(forward)

    @contextlib.contextmanager
    def backward(self, forward: InFlightStep) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            with self.outside():
                yield
            return
        try:
            if self._forward is None or self._forward() is not forward:
                self._lose()
            self._forward = None
            with self._within():
                yield
            self._moves = None
            self._unplug()
        finally:
            self._busy.release()

    def steer(self, index: int) -> None:
        """Set and take away plugs before a step of the schedule."""
        if self._moves is None or self._thread != threading.get_ident():
            return
        assert self._pool is not None
        for size_bytes, offset in self._moves.get(index, ()):
            if not size_bytes:
                self._pool.free(self._plugs.pop(offset))
                continue
            address = self._plugs[offset] = self._pool.allocate(size_bytes)
            if address != self._start + offset:
                self._misplaced += 1
                self._lose()
                return

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """A context within another, in which this thread is not led, if it is: memory is not the arena's."""
        if self._thread != threading.get_ident():
            yield
            return
        thread, was_entered = self._thread, self._entered
        self.leave()
        self._thread = None
        try:
            yield
        finally:
            self._thread = thread
            if was_entered:
                self.enter()

    def give_place(self, op: int) -> None:
        """Take the plugs away that are where outputs of an op will be, if this thread is led."""
        for address in self._places.pop(op, ()) if self._thread == threading.get_ident() else ():
            assert self._pool is not None
            self._pool.free(address)

    def leave(self) -> None:
        """From now on this thread's memory is not the arena's."""
        if self._entered and self._thread == threading.get_ident():
            assert self._pool is not None
            self._entered = False
            self._pool.leave()

    def enter(self) -> None:
        """From now on this thread's memory is the arena's again, if it is led."""
        if self._moves is not None and not self._entered and self._thread == threading.get_ident():
            assert self._pool is not None
            self._pool.enter()
            self._entered = True

    @contextlib.contextmanager
    def _within(self) -> Iterator[None]:
        if self._moves is None:
            yield
            return
        self._thread = threading.get_ident()
        try:
            self.enter()
            yield
        except BaseException:
            self._lose()
            raise
        finally:
            self.leave()
            self._thread = None

    def _open(self, size_bytes: int, empty: bool) -> bool:
        """Have an arena of this size. Gives False where that can't be: there is no room, or something is in it."""
        self._unplug()
        if private.is_captured(self.device):
            return False
        if self._pool is not None and (not self._pool.is_of_this_stream or self._open_bytes == size_bytes):
            return self._pool.is_of_this_stream
        if not empty:
            return False
        if self._pool is not None and self._size < size_bytes:
            self.close()  # its memory goes back first
        try:
            if self._pool is None:
                self._pool, self._size = private.MemoryPool(self.device), size_bytes
                try:
                    self._start = self._pool.extend(size_bytes + GUARD_BYTES)
                except torch.OutOfMemoryError:
                    torch.cuda.empty_cache()  # which nobody does for a pool
                    self._start = self._pool.extend(size_bytes + GUARD_BYTES)
            else:
                self._pool.free(self._tail)
            self._pool.enter()
            try:
                first = self._pool.allocate(size_bytes)
                self._tail = self._pool.allocate(self._size - size_bytes + GUARD_BYTES)
                self._pool.free(first)
            finally:
                self._pool.leave()
        except torch.OutOfMemoryError:
            self.close()
            return False
        self._open_bytes = size_bytes
        if first != self._start or self._tail != self._start + size_bytes:
            self.close()
            return False
        return True

    def close(self) -> None:
        """Give the arena's memory back, as far as nobody holds it. A backward that is still to come runs outside."""
        self._forward = self._moves = None
        self._unplug()
        self._pool = None
        self._size = self._open_bytes = self._start = self._tail = 0

    def _moves_beside(self, steering: Steering, gradients: Sequence[torch.Tensor]) -> Moves | None:
        """Moves of a microbatch, while these gradients are there; None where they were not planned for."""
        if not gradients:
            return steering.moves[0]
        dense = [g for g in map(private.part_here, gradients) if g.layout is torch.strided]
        blocks = {s.data_ptr(): s.nbytes() for s in (g.untyped_storage() for g in dense)}  # some share one
        ours = [n for at, n in blocks.items() if n > SMALL_BYTES and 0 <= at - self._start < self._size]
        kept_bytes = sum(-(-n // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES for n in ours)
        return steering.moves[-1] if kept_bytes == steering.kept_bytes and len(steering.moves) > 1 else None

    def _hold_places(self, steering: Steering) -> None:
        """Set plugs outside of the arena, where outputs will be. On a full device there would be places in it alone."""
        assert self._pool is not None
        with contextlib.suppress(torch.OutOfMemoryError):
            for op, size_bytes in steering.places:
                address = self._pool.allocate_outside(size_bytes)
                if 0 <= address - self._start < self._size:
                    self._pool.free(address)
                    break
                self._places.setdefault(op, []).append(address)

    def _lose(self) -> None:
        """Give up leading this step."""
        self.leave()
        self.astray += self._moves is not None
        self._moves = None
        self._unplug()

    def _unplug(self) -> None:
        for address in self._plugs.values():
            assert self._pool is not None
            self._pool.free(address)
        for address in itertools.chain(*self._places.values()):
            assert self._pool is not None
            self._pool.free(address)
        self._plugs.clear()
        self._places.clear()


def steer_arena(store: Any, index: int) -> None:
    """Lead what a step of the schedule asks for to its places."""
    store.arena.steer(index)


def leave_arena(store: Any, op: int) -> None:
    """What comes is the caller's to hold, and made by this op."""
    store.arena.leave()
    store.arena.give_place(op)


def enter_arena(store: Any) -> None:
    """What comes is the step's again."""
    store.arena.enter()
