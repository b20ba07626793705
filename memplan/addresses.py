"""Where in the slab of pinned host memory each offloaded value goes, decided before the step runs.

Lifetimes are known, so this is two-dimensional packing: first fit, the largest areas (bytes times steps) first.
"""

from __future__ import annotations

from dataclasses import dataclass

from memplan.problem import Graph
from memplan.schedule import DropHost, Offload, Schedule

_ALIGNMENT_BYTES = 512


@dataclass(frozen=True, slots=True)
class HostMemory:
    """offsets: for the step of each `Offload`, by its index in the schedule. size_bytes: of the slab."""

    offsets: dict[int, int]
    size_bytes: int


def place_host_copies(graph: Graph, schedule: Schedule) -> HostMemory:
    """Addresses of everything that the schedule offloads; gradients have memory of their own."""
    lifetimes: list[tuple[int, int, int]] = []  # size in bytes, first and last index
    began: dict[int, int] = {}
    for index, step in enumerate(schedule):
        if isinstance(step, Offload) and graph.values[step.value].home == "device":
            began[step.value] = index
        elif isinstance(step, DropHost):
            size_bytes = -(-graph.values[step.value].size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            lifetimes.append((size_bytes, began.pop(step.value), index))
    placed: list[tuple[int, int, int, int]] = []  # offset, size, first, last
    for size_bytes, first, last in sorted(lifetimes, key=lambda x: (-x[0] * (x[2] - x[1]), x[1])):
        offset = 0
        for other, other_bytes in sorted((p[0], p[1]) for p in placed if p[2] < last and first < p[3]):
            if other - offset >= size_bytes:
                break
            offset = max(offset, other + other_bytes)
        placed.append((offset, size_bytes, first, last))
    return HostMemory({first: offset for offset, _, first, _ in placed}, max((p[0] + p[1] for p in placed), default=0))
