"""A problem as arrays, for the kernels that search over orders of ops.

Only what can change from order to order is kept: residents and tangents that ops merely read are left out, and the
bytes of both stand in two scalars.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memplan.problem.data import Graph, Op, Problem

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Arrays(NamedTuple):
    """What kernels read of a problem.

    Compressed rows: op i reads `read[read_start[i]:read_start[i + 1]]`, and makes values likewise.

    - read: values read or taken over by an op, residents and tangents left out.
    - made: values written by an op, residents left out.
    - taken[v]: the value whose memory v takes over, -1 where there is none that is tracked here.
    - in_place[v]: v needs no new memory.
    - held[v]: v is never freed.
    - awaiting: gradients that can't be handed over before op i has run, which reads their parameters, are
      awaiting[awaiting_start[i]:awaiting_start[i + 1]].
    - producer[v]: the op that makes v, or -1.
    - overwritten[v]: an op of the forward pass writes over v, so that v can't be kept for the backward pass.
    - rerunnable[i]: op i belongs to the forward pass and can run again.
    - deferrable[i]: op i of the forward pass may run for the first time in the backward pass: nothing that has to
      happen in the forward pass needs it.
    - update_bytes: held beside what is left after the last op.
    - others: microbatches that wait beside the one that runs, each with what it holds at the boundary and
      `input_bytes`.
    """

    boundary: int
    read_start: Ints
    read: Ints
    made_start: Ints
    made: Ints
    size_bytes: Ints
    taken: Ints
    in_place: Flags
    held: Flags
    gradient: Flags
    awaiting_start: Ints
    awaiting: Ints
    producer: Ints
    overwritten: Flags
    rerunnable: Flags
    deferrable: Flags
    random: Flags
    time_s: Floats
    scratch_bytes: Ints
    rng_state_bytes: int
    base_bytes: int = 0
    tangent_bytes: int = 0
    accumulate: bool = False
    update_bytes: int = 0
    others: int = 0
    input_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Flat:
    """`Arrays` beside Python rows of their contents, for code that is not compiled.

    - lost_late: some ops count as not rerunnable only because the backward pass overwrites what they read. They could
      run again before that, so "never" is safe for a schedule and not for a bound.
    - blocks: what was cut out of this already (`options.localise`), for several methods look at the same chains.
    """

    arrays: Arrays
    reads: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    lost_late: bool = False
    blocks: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def op_count(self) -> int:
        return len(self.reads)

    @property
    def alone(self) -> Flat:
        """The step with no microbatch that waits beside it."""
        return replace(self, arrays=self.arrays._replace(others=0), blocks={})


def flatten(problem: Problem, updates: bool = True) -> Flat:
    """Lower a problem into arrays.

    updates: count what updating a parameter takes as scratch of the op that makes its gradient. Nearly always that is
    where the update happens, and never is too little counted there. False leaves it out, for a bound.
    """
    graph = problem.graph
    values = graph.values
    tracked = [not (v.resident or v.role == "tangent") for v in values]
    reads: list[tuple[int, ...]] = []
    for op in graph.ops:
        taken = tuple(t for v in op.outputs if (t := values[v].reuses) is not None)
        reads.append(tuple(dict.fromkeys(v for v in (*op.inputs, *taken) if tracked[v])))
    makes = [tuple(v for v in op.outputs if not values[v].resident) for op in graph.ops]
    overwritten = {v for op in graph.ops[: graph.boundary] for v in graph.overwritten(op)}
    gradients_of = graph.gradients_of
    producer = [-1] * len(values)
    for index, row in enumerate(makes):
        for v in row:
            producer[v] = index
    rerunnable = _rerunnable(graph, reads, producer, overwritten, graph.ops[graph.boundary :])
    scratch_bytes = list(problem.costs.scratch_bytes)
    if updates:
        rows = zip(scratch_bytes, graph.ops, strict=True)
        scratch_bytes = [max([size, 0, *(values[v].update_bytes for v in op.outputs)]) for size, op in rows]
    awaiting_start, awaiting = compressed([[g for v in op.inputs for g in gradients_of.get(v, ())] for op in graph.ops])
    arrays = Arrays(
        graph.boundary,
        *compressed(reads),
        *compressed(makes),
        size_bytes=_ints([v.size_bytes for v in values]),
        taken=_ints([v.reuses if v.reuses is not None and tracked[v.reuses] else -1 for v in values]),
        in_place=np.array([v.reuses is not None for v in values], dtype=np.bool_),
        held=np.array([v.held or v.resident or v.role == "tangent" for v in values], dtype=np.bool_),
        gradient=np.array([v.role == "gradient" and v.home != "host" and not v.updates for v in values], np.bool_),
        awaiting_start=awaiting_start,
        awaiting=awaiting,
        producer=_ints(producer),
        overwritten=np.array([v in overwritten for v in range(len(values))], dtype=np.bool_),
        rerunnable=np.array(rerunnable, dtype=np.bool_),
        deferrable=np.array(_deferrable(graph, reads), dtype=np.bool_),
        random=np.array([op.random for op in graph.ops], dtype=np.bool_),
        time_s=np.array(problem.costs.time_s, dtype=np.float64),
        scratch_bytes=_ints(scratch_bytes),
        rng_state_bytes=graph.rng_state_bytes,
        base_bytes=problem.resident_bytes,
        tangent_bytes=sum(values[t].size_bytes for t in graph.tangents),
        accumulate=problem.frees_gradients,
        update_bytes=problem.update_bytes,
        others=problem.in_flight - 1,
        input_bytes=graph.input_bytes,
    )
    lost_late = rerunnable != _rerunnable(graph, reads, producer, overwritten, ())
    return Flat(arrays, tuple(reads), tuple(makes), lost_late)


def _ints(items: Sequence[int]) -> Ints:
    return np.array(items, dtype=np.int64)


def compressed(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Rows of indices as (starts, concatenation)."""
    start = np.zeros(len(rows) + 1, dtype=np.int64)
    start[1:] = np.cumsum([len(row) for row in rows])
    return start, _ints([item for row in rows for item in row])


def readings(flat: Flat) -> tuple[Ints, Ints]:
    """Pairs of an op and a value that it reads, ops in turn."""
    return np.repeat(np.arange(flat.op_count), np.diff(flat.arrays.read_start)), flat.arrays.read


def last_reads(flat: Flat) -> Ints:
    """The last op that reads each value, -1 where none does."""
    found = np.full(len(flat.arrays.size_bytes), -1, dtype=np.int64)
    reader, read = readings(flat)
    found[read] = reader  # the last one stands
    return found


def _rerunnable(
    graph: Graph, reads: Sequence[Sequence[int]], producer: Sequence[int], overwritten: set[int], later: Sequence[Op]
) -> list[bool]:
    """Forward ops that can run again at any time: nothing that they read is lost for good, to `later` ops or before."""
    lost = overwritten | {v for op in later for v in graph.overwritten(op) if graph.values[v].resident}
    found = [False] * len(graph.ops)
    for index, op in enumerate(graph.ops[: graph.boundary]):
        resident_lost = any(v in lost and graph.values[v].resident for v in op.inputs)
        input_lost = any(v in lost and not found[producer[v]] for v in reads[index])
        found[index] = op.recomputable and not resident_lost and not input_lost
    return found


def _deferrable(graph: Graph, reads: Sequence[Sequence[int]]) -> list[bool]:
    wanted = [v.held or v.resident for v in graph.values]
    found = [False] * len(graph.ops)
    for index in range(graph.boundary - 1, -1, -1):
        op = graph.ops[index]
        found[index] = not op.stays and not any(wanted[v] for v in op.outputs)
        if not found[index]:
            for v in reads[index]:
                wanted[v] = True
    return found
