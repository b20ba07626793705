"""Host memory in one slab: where in it each offloaded value goes, and what all of it takes.

Lifetimes are known before the step runs, so `pack_slab` finds the places.

PyTorch's allocator of pinned memory rounds each block up to a power of two. So it does with the slab, and with each
parameter that lives on the host and its gradient; a host budget counts what is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from memplan.problem.data import Graph, Problem
from memplan.problem.packing import LiveRange, most_alive, pack_slab
from memplan.problem.schedule import DropHost, Offload, Schedule

_ALIGNMENT_BYTES = 512


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Where in the slab each offloaded value goes.

    - offsets: for the step of each `Offload`, by its index in the schedule.
    - size_bytes: of the slab.
    """

    offsets: dict[int, int]
    size_bytes: int

    @property
    def pinned_bytes(self) -> int:
        """What the slab takes."""
        return pinned_bytes(self.size_bytes)


def pinned_bytes(size_bytes: int) -> int:
    """What a block of pinned host memory of this size takes."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes > 0 else 0


def host_bytes_beside(problem: Problem) -> int:
    """Host memory that the step needs beside the slab.

    It is for parameters that live there, their gradients and the declared optimizer's state, which is not pinned.
    """
    values = problem.graph.values
    parameters = sum(pinned_bytes(v.size_bytes) for v in values if v.resident and v.home == "host" and v.reuses is None)
    gradients = sum(pinned_bytes(v.size_bytes) for v in values if v.role == "gradient" and v.home == "host")
    gradients *= 2 if problem.accumulate else 1  # the earlier ones are still there when the new ones arrive
    return parameters + gradients + problem.extra_host_bytes


def place_host_copies(graph: Graph, schedule: Schedule) -> HostMemory:
    """Addresses of everything that the schedule offloads; gradients have memory of their own."""
    blocks: list[LiveRange] = []
    began: dict[int, int] = {}
    for index, step in enumerate(schedule):
        if isinstance(step, Offload) and graph.values[step.value].home == "device":
            began[step.value] = index
        elif isinstance(step, DropHost):
            size_bytes = -(-graph.values[step.value].size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            blocks.append(LiveRange(size_bytes, began.pop(step.value), index))
    packing = pack_slab(blocks, pinned_bytes(most_alive(blocks)))  # the slab is rounded up to a power of two
    return HostMemory({b.first: at for b, at in zip(blocks, packing.offsets, strict=True)}, packing.size_bytes)
