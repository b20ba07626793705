"""Streams that copy between device and host memory: the one place with streams, events and pinned memory.

Without a GPU the same program runs on `FakeStreams`. A copy then happens when it is waited for.
Until then its target holds NaN, so that a missing wait or a missing reference shows as wrong numbers.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from typing import Any, Literal

import torch

from memplan import torch_private as private
from memplan.problem.data import Link

Direction = Literal["out", "in"]
_POISON = 0xFF  # NaN in every floating dtype, -1 in signed integers


class CudaStreams:
    """A stream for each direction of one CUDA device. Copies run beside the compute stream, in order in each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = {"out": torch.cuda.Stream(device), "in": torch.cuda.Stream(device)}

    def copy(self, direction: Direction, source: torch.Tensor, target: torch.Tensor) -> Any:
        """Begin to copy bytes, once all work that was issued before is done. Gives what `wait` takes."""
        stream = self._streams[direction]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def wait(self, event: Any) -> None:
        """Let what is computed from here on wait for a copy."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def finish(self, event: Any) -> None:
        """Return when the copy is done."""
        event.synchronize()

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """New host memory that copies can use."""
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def computing(self) -> Any:
        """The compute stream, to be compared with others; None on a CPU."""
        return torch.cuda.current_stream(self.device)


class _FakeCopy:
    """A copy of bytes between storages, which may be freed meanwhile: their Python objects live exactly as long."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.source, self.target = weakref.ref(source.untyped_storage()), weakref.ref(target.untyped_storage())
        self._spans = [(int(t.storage_offset()), t.numel()) for t in (source, target)]

    def run(self) -> None:
        source, target = self.source(), self.target()
        if source is not None and target is not None:  # else the memory is somebody else's by now
            bytes_within(target, *self._spans[1]).copy_(bytes_within(source, *self._spans[0]))


class FakeStreams:
    """Streams on a CPU whose copies happen as late as possible. They keep nothing alive.

    They are stricter than real ones: copies are in no order, so each has to be waited for. Threads that update
    parameters may wait for copies too.
    """

    def __init__(self) -> None:
        self._pending: list[_FakeCopy] = []
        self._lock = threading.RLock()  # a copy that frees memory may end in here again

    def copy(self, direction: Direction, source: torch.Tensor, target: torch.Tensor) -> _FakeCopy:
        target.fill_(_POISON)
        copy = _FakeCopy(source, target)
        with self._lock:
            self._pending.append(copy)
        return copy

    def wait(self, event: _FakeCopy) -> None:
        with self._lock:
            if event in self._pending:
                self._pending.remove(event)
                event.run()

    def finish(self, event: _FakeCopy) -> None:
        self.wait(event)

    def pinned(self, size_bytes: int) -> torch.Tensor:
        with private.outside_of_tracing():  # no meter counts it, for it is not on the device
            return torch.full((size_bytes,), _POISON, dtype=torch.uint8, device="cpu")

    def computing(self) -> Any:
        return None


Streams = CudaStreams | FakeStreams


def streams_for(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else FakeStreams()


def bytes_within(storage: torch.UntypedStorage, start: int, size_bytes: int) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, start, (size_bytes,), (1,))


_SAMPLES_BYTES = (64 << 20, 16 << 20, 4 << 20, 1 << 20)
_PRETENDED = Link(25e9, 25e9)  # where there is no device: about what PCI Express 4.0 with 16 lanes gives


@functools.cache
def measure_link(device: torch.device) -> Link:
    """The speed of pinned copies to and from a device, with both directions busy: the best of three runs.

    Less is copied where the device has no room for more.
    """
    if device.type != "cuda":
        return _PRETENDED
    for size_bytes in _SAMPLES_BYTES[:-1]:
        with contextlib.suppress(torch.OutOfMemoryError):
            return _speed_of_copies(device, size_bytes)
    return _speed_of_copies(device, _SAMPLES_BYTES[-1])


def _speed_of_copies(device: torch.device, size_bytes: int) -> Link:
    out, back = torch.cuda.Stream(device), torch.cuda.Stream(device)
    there = [torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    host = [torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
    best = [0.0, 0.0]
    for _ in range(3):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(2)]
        for way, (stream, source, target) in enumerate(((out, there[0], host[0]), (back, host[1], there[1]))):
            with torch.cuda.stream(stream):
                events[way][0].record(stream)
                target.copy_(source, non_blocking=True)
                events[way][1].record(stream)
        torch.cuda.synchronize(device)
        best = [max(b, size_bytes / (1e-3 * e[0].elapsed_time(e[1]))) for b, e in zip(best, events)]
    return Link(best[0], best[1])
