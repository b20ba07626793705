"""The exact sequence of steps of one training step, and what it comes to.

Solvers decide in which order ops run and which run again; `schedule_of` turns such an order into a schedule by
freeing each value right after its last use, saving generator states for random ops that will run again, and handing
over gradients as they become final.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from memplan.problem.data import Graph

BOUNDARY = -1  # stands in an order of ops where the forward pass ends
SURFACE_BATCH = 8  # gradients handed over together: handing over one costs about 10 microseconds


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an op: for the first time, or again with the generator state of its first run.

    An asynchronous collective only starts. It reads its inputs and writes its output until a `Wait` for that.
    """

    op: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Free a value."""

    value: int


@dataclass(frozen=True, slots=True)
class SaveRng:
    """Keep the generator's state for the op that comes next, which will run again."""

    op: int


@dataclass(frozen=True, slots=True)
class DropRng:
    """Free the generator state kept for an op."""

    op: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """The forward pass ends: the caller owns the outputs and hands in the tangents."""


@dataclass(frozen=True, slots=True)
class SurfaceGrads:
    """Hand final gradients to autograd, so that they land in `.grad` and hooks fire."""

    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stay:
    """Begin the step with a copy of a parameter that lives on the host.

    The copy is there from the step before, and stays for the next.
    """

    value: int


@dataclass(frozen=True, slots=True)
class Offload:
    """Begin to copy a value to host memory. It stays on the device until it is dropped there."""

    value: int


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Begin to copy a value from host memory into new memory on the device."""

    value: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Compute nothing further until the value's copy is done, or the collective that makes the value."""

    value: int


@dataclass(frozen=True, slots=True)
class DropHost:
    """Free a value's host memory."""

    value: int


Step = Compute | Drop | SaveRng | DropRng | Boundary | SurfaceGrads | Stay | Offload | Prefetch | Wait | DropHost
Schedule = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a schedule comes to, from `simulate`.

    Microbatches that wait (`Problem.in_flight`) are in all bytes. Seconds are those of one of them, on the average.

    - live_bytes[i]: bytes held after step i.
    - peak_bytes_at[i]: the most held while step i runs, scratch and saved generator states included.
    - peak_bytes: the most of `peak_bytes_at`, and of the bytes that are live after the last step.
    - live_peak_bytes: the most held, without scratch of kernels and generator states.
    - time_s: seconds of all steps. Those are included in which computing waits for copies, or for the CPU to update
      parameters that live on the host.
    - stall_s: seconds of such waiting alone.
    - host_bytes[i]: host memory held after step i, parameters that live there left out.
    - host_peak_bytes: the most of `host_bytes`.
    - waiting_bytes: what each microbatch that waits holds on the device, its inputs and outputs included.
    """

    live_bytes: tuple[int, ...]
    peak_bytes_at: tuple[int, ...]
    peak_bytes: int
    live_peak_bytes: int
    peak_step: int
    time_s: float
    host_bytes: tuple[int, ...] = ()
    host_peak_bytes: int = 0
    stall_s: float = 0.0
    waiting_bytes: int = 0


def schedule_of(graph: Graph, order: Sequence[int]) -> Schedule:
    """A schedule that runs ops in this order (op indices, and `BOUNDARY` once).

    A read is served by the latest run before it of the op that makes the value, so each such instance is freed right
    after its last read. Gradients are handed over when nothing reads their parameters any more: at once where it
    updates these, else several together, in the order in which they were made. Each collective is waited for at once;
    `overlapped` moves starts and waits apart. The order is not judged here; `simulate` does that.
    """
    drops = _last_uses(graph, order)
    final = _final_positions(graph, order)
    updates = update_positions(graph, order)
    runs, left = Counter(order), Counter(order)
    steps: list[Step] = []
    pending: list[int] = []  # gradients, of which the first `ready` can be handed over
    ready = 0
    for position, index in enumerate(order):
        if index == BOUNDARY:
            steps.append(Boundary())
            steps.extend(Drop(v) for v in drops[position])
            continue
        op = graph.ops[index]
        again = op.random and runs[index] > 1
        if again and left[index] == runs[index]:
            steps.append(SaveRng(index))
        left[index] -= 1
        steps.append(Compute(index))
        if op.is_asynchronous:
            steps.append(Wait(op.outputs[0]))
        if again and left[index] == 0:
            steps.append(DropRng(index))
        steps.extend(Drop(v) for v in drops[position])
        for v in updates.get(position, ()):
            steps.append(SurfaceGrads((v,)))
            if not graph.values[v].held:
                steps.append(Drop(v))
        pending.extend(v for v in op.outputs if graph.values[v].role == "gradient" and not graph.values[v].updates)
        while ready < len(pending) and final[pending[ready]] <= position:
            ready += 1
        if ready >= SURFACE_BATCH:
            steps.append(SurfaceGrads(tuple(pending[:ready])))
            pending, ready = pending[ready:], 0
    if pending:
        steps.append(SurfaceGrads(tuple(pending)))
    return tuple(steps)


def order_of(schedule: Schedule) -> tuple[int, ...]:
    """The order of ops in a schedule, `BOUNDARY` among them."""
    ran = (step for step in schedule if isinstance(step, (Compute, Boundary)))
    return tuple(step.op if isinstance(step, Compute) else BOUNDARY for step in ran)


def update_positions(graph: Graph, order: Sequence[int]) -> dict[int, list[int]]:
    """Gradients with which parameters are updated, by the position after which nothing reads the parameters."""
    gradients = [g for g in graph.gradients if graph.values[g].updates]
    final = _final_positions(graph, order) if gradients else {}
    found: dict[int, list[int]] = {}
    for g in gradients:
        found.setdefault(final[g], []).append(g)
    return found


def _final_positions(graph: Graph, order: Sequence[int]) -> dict[int, int]:
    """For each gradient, the position after which it is there and nothing reads its parameters."""
    gradients_of = graph.gradients_of
    final: dict[int, int] = {}
    for position, index in enumerate(order):
        if index == BOUNDARY:
            continue
        op = graph.ops[index]
        final.update((v, position) for v in op.outputs if graph.values[v].role == "gradient")
        final.update((g, position) for v in op.inputs for g in gradients_of.get(v, ()) if g in final)
    return final


def _last_uses(graph: Graph, order: Sequence[int]) -> list[list[int]]:
    """For each position of the order the values whose current instance is not read after it."""
    values = graph.values
    read_later = [False] * len(values)
    drops: list[list[int]] = [[] for _ in order]
    for position in range(len(order) - 1, -1, -1):
        index = order[position]
        if index == BOUNDARY:
            continue
        op = graph.ops[index]
        consumed = set()
        for v in op.outputs:
            value = values[v]
            if value.reuses is not None:
                consumed.add(value.reuses)
            if not (read_later[v] or value.held or value.resident or value.updates):
                drops[position].append(v)
            read_later[v] = False
        for v in op.inputs:
            value = values[v]
            if not (read_later[v] or value.held or value.resident or value.role == "tangent" or v in consumed):
                drops[position].append(v)
            read_later[v] = True
    return drops
