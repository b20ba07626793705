"""The arena of a model's planned steps on a CUDA device: memory in which each block has a place that was planned.

It is a pool of PyTorch's allocator that nobody else uses. A program calls `steer_arena` before ops whose blocks would
go elsewhere, as `Steering` says. A plug that lands in another place than it should shows that the arena holds something
that was not planned, a gradient that the caller keeps for instance: the rest of the step is then outside of it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from memplan import torch_private as private
from memplan.problem.caching_allocator import SMALL_BYTES
from memplan.problem.steering import GUARD_BYTES, Moves, Steering


class StepArena:
    """The arena of one model, which its steps share.

    - astray: how many steps were not led through it to their end.
    """

    def __init__(self, device: torch.device) -> None:
        self.astray = 0
        self._device = device
        self._pool: private.MemoryPool | None = None
        self._size = self._open_bytes = self._start = 0
        self._tail = 0  # the address of the guard, or of all that a smaller arena leaves
        self._plugs: dict[int, int] = {}  # addresses by offset
        self._moves: Moves | None = None
        self._inside = False
        self._forward: weakref.ref[Any] | None = None  # whose backward is led

    @contextlib.contextmanager
    def forward(self, steering: Steering | None, gradients: Sequence[torch.Tensor], in_flight: bool) -> Iterator[None]:
        """A context for a forward. Without steering it is outside of the arena.

        - gradients: those that are there.
        - in_flight: whether other forwards wait for their backward.
        """
        self._forward = None
        if steering is None:
            yield
            return
        opened = self._open(steering.arena_bytes, empty=not in_flight and not gradients)
        self._moves = self._moves_beside(steering, gradients) if opened and not in_flight else None
        self.astray += self._moves is None
        with self._within():
            yield

    def led(self, forward: Any) -> None:
        """Tell that a forward, which has ended, is the one whose backward goes on from here."""
        self._forward = weakref.ref(forward)

    @contextlib.contextmanager
    def backward(self, steering: Steering | None, forward: Any) -> Iterator[None]:
        """A context for the backward of a forward."""
        if steering is None:
            yield
            return
        if self._forward is None or self._forward() is not forward:
            self._lose()
        self._forward = None
        with self._within():
            yield
        self._unplug()

    def steer(self, index: int) -> None:
        """Set and take away plugs before a step of the schedule."""
        if self._moves is None or not self._inside:
            return
        assert self._pool is not None
        for size_bytes, offset in self._moves.get(index, ()):
            if not size_bytes:
                self._pool.free(self._plugs.pop(offset))
                continue
            address = self._plugs[offset] = self._pool.allocate(size_bytes)
            if address != self._start + offset:
                self._lose()
                return

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """A context within another, in which memory is not the arena's."""
        if not self._inside:
            yield
            return
        self.leave()
        try:
            yield
        finally:
            self.enter()

    def leave(self) -> None:
        """From now on this thread's memory is not the arena's."""
        if self._inside:
            assert self._pool is not None
            self._pool.leave()

    def enter(self) -> None:
        """From now on this thread's memory is the arena's again."""
        if self._inside:
            assert self._pool is not None
            self._pool.enter()

    @contextlib.contextmanager
    def _within(self) -> Iterator[None]:
        if self._moves is None:
            yield
            return
        self._inside = True
        self.enter()
        try:
            yield
        except BaseException:
            self._lose()
            raise
        finally:
            self.leave()
            self._inside = False

    def _open(self, size_bytes: int, empty: bool) -> bool:
        """Have an arena of this size, which can't be while the present one holds something. Gives whether it is so."""
        self._unplug()
        usable = self._pool is not None and self._pool.is_of_this_stream
        if usable and self._open_bytes == size_bytes:
            return True
        if not empty:
            return False
        if self._pool is not None and self._tail:
            self._pool.free(self._tail)
        if self._pool is None or not usable or self._size < size_bytes:
            self._pool = None  # its memory goes back first
            self._pool, self._size = private.MemoryPool(self._device), size_bytes
            try:
                self._start = self._pool.extend(size_bytes + GUARD_BYTES)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()  # which nobody does for a pool
                self._start = self._pool.extend(size_bytes + GUARD_BYTES)
        self._pool.enter()
        try:
            first = self._pool.allocate(size_bytes)
            self._tail = self._pool.allocate(self._size - size_bytes + GUARD_BYTES)
            self._pool.free(first)
        finally:
            self._pool.leave()
        self._open_bytes = size_bytes
        return first == self._start

    def _moves_beside(self, steering: Steering, gradients: Sequence[torch.Tensor]) -> Moves | None:
        """Moves of a microbatch, while these gradients are there; None where they were not planned for."""
        if not gradients:
            return steering.moves[0]
        ends = self._start, self._start + self._size
        ours = all(ends[0] <= g.data_ptr() < ends[1] for g in gradients if g.nbytes > SMALL_BYTES)
        return steering.moves[-1] if ours and len(steering.moves) > 1 else None

    def _lose(self) -> None:
        self.astray += self._moves is not None
        self._moves = None
        self._unplug()
        self.leave()
        self._inside = False

    def _unplug(self) -> None:
        for address in self._plugs.values():
            assert self._pool is not None
            self._pool.free(address)
        self._plugs.clear()


def steer_arena(store: Any, index: int) -> None:
    """Lead what a step of the schedule asks for to its places."""
    store.arena.steer(index)


def leave_arena(store: Any) -> None:
    """What comes is the caller's to hold."""
    store.arena.leave()


def enter_arena(store: Any) -> None:
    """What comes is the step's again."""
    store.arena.enter()
