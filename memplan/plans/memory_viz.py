"""A plan as a snapshot of memory, as `torch.cuda.memory._snapshot()` gives them: for pytorch.org/memory_viz.

Addresses are made up: each tensor goes to the lowest place that is free when it comes. What takes over the memory of
something else has its address, and the name of what was there first.
"""

from __future__ import annotations

import bisect
import pickle
from collections.abc import Iterator
from typing import Any

from memplan.plans.figures import PlanFigures
from memplan.plans.step_memory import Lifetime, StepMemory, planned_memory

_BASE = 0x7F0000000000
_PROTOCOL = 4  # the latest that the page reads


def memory_viz_bytes(plan: PlanFigures) -> bytes:
    """The contents of the file: a pickle of lists, dicts, strings and numbers."""
    return pickle.dumps(snapshot_of(planned_memory(plan)), protocol=_PROTOCOL)


def snapshot_of(memory: StepMemory) -> dict[str, Any]:
    """The snapshot: what is allocated and freed in the step, and what is there after it."""
    arena = _Arena()
    events: list[dict[str, Any]] = []
    for moment, coming, going in _turns(memory):
        for index, life in coming:
            address = arena.take(index, life.size_bytes)
            events.append(_event("alloc", moment, address, life, memory) | {"category": life.kind})
        for index, life in going:
            address = arena.give_back(index)
            events += [_event(action, moment, address, life, memory) for action in ("free_requested", "free_completed")]
    total_bytes = max(arena.end, 1)
    segment = {
        "device": 0, "address": _BASE, "total_size": total_bytes, "allocated_size": arena.held_bytes,
        "active_size": arena.held_bytes, "requested_size": arena.held_bytes, "stream": 0,
        "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
        "blocks": list(_blocks(memory, arena, total_bytes)),
    }  # fmt: skip
    # the page's script fails where there are categories and none of them is "unknown"
    whole = {"action": "segment_alloc", "addr": _BASE, "size": total_bytes, "stream": 0, "time_us": 0, "frames": []}
    return {
        "segments": [segment],
        "device_traces": [[whole | {"category": "unknown"}, *events]],
        "allocator_settings": {},
        "external_annotations": [],
    }


class _Arena:
    """Where everything lies: blocks (begin, end, index), in order of addresses."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, int, int]] = []
        self.end = 0  # how far it ever reached
        self._begins: dict[int, int] = {}

    @property
    def held_bytes(self) -> int:
        return sum(end - begin for begin, end, _ in self.blocks)

    def take(self, index: int, size_bytes: int) -> int:
        """The address of the lowest gap of this size."""
        begin = 0
        for other, other_end, _ in self.blocks:
            if other - begin >= size_bytes:
                break
            begin = max(begin, other_end)
        bisect.insort(self.blocks, (begin, begin + size_bytes, index))
        self.end = max(self.end, begin + size_bytes)
        self._begins[index] = begin
        return _BASE + begin

    def give_back(self, index: int) -> int:
        """The address of something, which is free from now on."""
        begin = self._begins.pop(index)
        del self.blocks[bisect.bisect_left(self.blocks, (begin,))]
        return _BASE + begin


_Indexed = list[tuple[int, Lifetime]]


def _turns(memory: StepMemory) -> Iterator[tuple[int, _Indexed, _Indexed]]:
    """At each moment what comes and what goes, by the first lifetime of its memory. What is there after it stays."""
    first: dict[int, int] = {}
    coming: dict[int, _Indexed] = {}
    going: dict[int, _Indexed] = {}
    taken = {life.over for life in memory.lifetimes}
    for index, life in enumerate(memory.lifetimes):
        first[index] = index if life.over is None else first[life.over]
        if life.size_bytes and life.over is None:
            coming.setdefault(life.begin, []).append((index, life))
        ends = life.end < len(memory.schedule) or life.begin == life.end
        if life.size_bytes and index not in taken and ends:
            going.setdefault(life.end, []).append((first[index], memory.lifetimes[first[index]]))
    for moment in sorted({*coming, *going}):
        yield moment, coming.get(moment, []), going.get(moment, [])


def _event(action: str, moment: int, address: int, life: Lifetime, memory: StepMemory) -> dict[str, Any]:
    return {
        "action": action, "addr": address, "size": life.size_bytes, "stream": 0, "time_us": moment,
        "frames": _frames(life, memory),
    }  # fmt: skip


def _frames(life: Lifetime, memory: StepMemory) -> list[dict[str, Any]]:
    """What it is, what kind of thing, and in which moment it comes, in the place of a stack."""
    names = (f"{life.name} {life.tensor}".rstrip(), life.kind, memory.moment_text(life.begin))
    return [{"filename": "plan", "line": life.begin, "name": name} for name in names]


def _blocks(memory: StepMemory, arena: _Arena, total_bytes: int) -> Iterator[dict[str, Any]]:
    """The segment after the step: what is there, and gaps."""
    place = 0
    for begin, end, index in arena.blocks:
        yield from _gap(place, begin)
        size_bytes, frames = end - begin, _frames(memory.lifetimes[index], memory)
        yield {
            "address": _BASE + begin, "size": size_bytes, "requested_size": size_bytes, "state": "active_allocated",
            "frames": frames,
        }  # fmt: skip
        place = end
    yield from _gap(place, total_bytes)


def _gap(begin: int, end: int) -> Iterator[dict[str, Any]]:
    if begin < end:
        address, size_bytes = _BASE + begin, end - begin
        yield {"address": address, "size": size_bytes, "requested_size": 0, "state": "inactive", "frames": []}
