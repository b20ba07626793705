"""Looks through the record of a step for accesses to memory that nothing orders, with vector clocks.

    with twin.recorded() as calls:
        step()
    assert races(calls) == []

Two accesses to the same bytes, one of them a write, on two streams, or by a copy and the host, are a race if the later
one was given out without a wait for the earlier one. Waits are: of a stream for an event, of the host for an event, a
stream or the device, and a query that found work to have ended. A block that the allocator gives out again counts as
written to on its own stream. What kernels access are the tensors of the PyTorch op that launched them; kernels outside
of any op are not looked at. Ops on tensors of the CPU alone are accesses of the host, as they begin.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tests.cuda_twin.twin import Call

HOST = -1  # as the number of a stream
Clock = Counter[int]  # by stream: how much of its work is meant


class Access(NamedTuple):
    """What touched the bytes from start to end. at: its place in the record. count: its place on its stream."""

    at: int
    kind: str
    stream: int
    count: int
    start: int
    end: int
    writes: bool


class Race(NamedTuple):
    earlier: Access
    later: Access


class _Blocks:
    """Accesses to memory, by the block of the allocator that it is in. The host's memory is one block, None."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        self.accesses: defaultdict[int | None, list[Access]] = defaultdict(list)
        self.freed: list[Access] = []

    def add(self, start: int, end: int) -> None:
        if start not in self._ends:
            insort(self._starts, start)
        self._ends[start] = end

    def free(self, start: int) -> None:
        if self._ends.pop(start, None) is not None:
            self._starts.remove(start)
            self.freed += self.accesses.pop(start, [])

    def of(self, address: int) -> int | None:
        at = bisect_right(self._starts, address) - 1
        return self._starts[at] if at >= 0 and address < self._ends[self._starts[at]] else None


def races(calls: Sequence[Call]) -> list[Race]:
    """Every pair of accesses that is not ordered."""
    found: list[Race] = []
    blocks, clocks, events = _Blocks(), defaultdict[int, Clock](Clock), dict[int, Clock]()
    touched = _memory_of_ops(calls)

    def is_ordered(earlier: Access, later: Access) -> bool:
        return earlier.stream in (later.stream, HOST) or clocks[later.stream][earlier.stream] >= earlier.count

    def check(later: Access, before: Iterable[Access]) -> None:
        for earlier in before:
            overlap = earlier.start < later.end and later.start < earlier.end
            if overlap and (earlier.writes or later.writes) and not is_ordered(earlier, later):
                found.append(Race(earlier, later))

    def access(later: Access, block: int | None) -> None:
        before = blocks.accesses[block]
        check(later, before)
        covers = lambda a: later.start <= a.start and a.end <= later.end and later.writes >= a.writes  # noqa: E731
        before[:] = [a for a in before if not (covers(a) and is_ordered(a, later))]
        before.append(later)

    for at, call in enumerate(calls):
        kind, s = call.kind, call.stream
        clock = clocks[s]
        if kind in ("kernel", "copy", "set", "record"):
            clock |= clocks[HOST]  # what the host has waited for is done before it gives out more
            clock[s] += 1
        for start, end, writes in _device_memory(call, touched):
            block = blocks.of(start)
            if block is not None or kind == "copy":
                access(Access(at, kind, s, clock[s], start, end, writes), block)
        if kind in ("read", "write") and call.op in touched and not touched[call.op]:
            access(Access(at, kind, HOST, 0, call.a, call.a + call.n, kind == "write"), None)
        elif kind == "alloc":
            clock |= clocks[HOST]
            later = Access(at, kind, s, clock[s], call.a, call.a + call.n, True)
            check(later, blocks.freed)
            blocks.freed = [a for a in blocks.freed if not is_ordered(a, later)]
            blocks.add(call.a, call.a + call.n)
        elif kind == "free_completed":
            blocks.free(call.a)
        elif kind == "record":
            events[call.a] = clock.copy()
        elif kind == "wait":
            clock |= events.get(call.a, Clock())
        elif kind == "event_sync" or (kind == "event_query" and call.b):
            clocks[HOST] |= events.get(call.a, Clock())
        elif kind == "stream_sync" or (kind == "stream_query" and call.b):
            clocks[HOST] |= clock
        elif kind in ("device_sync", "free"):
            for each in tuple(clocks.values()):
                clocks[HOST] |= each
    return found


def _memory_of_ops(calls: Iterable[Call]) -> dict[int, list[tuple[int, int, bool]]]:
    """(start, end, whether it writes) of what each op touches on the device. Ops that are on the CPU have nothing."""
    found: defaultdict[int, list[tuple[int, int, bool]]] = defaultdict(list)
    for call in calls:
        if call.kind in ("read", "write"):
            found[call.op] += [(call.a, call.a + call.n, call.kind == "write")] * call.b
    return dict(found)


def _device_memory(call: Call, touched: dict[int, list[tuple[int, int, bool]]]) -> Iterator[tuple[int, int, bool]]:
    """What a piece of the device's work touches."""
    if call.kind == "kernel":
        yield from touched.get(call.op, ())
    elif call.kind in ("copy", "set"):
        yield call.a, call.a + call.n, True
        if call.kind == "copy":
            yield call.b, call.b + call.n, False
