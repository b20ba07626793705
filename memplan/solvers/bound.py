"""Lower bounds that hold for every schedule of a problem that runs the backward pass in the given order.

**Seconds.** Take the moment at which a backward op runs. What the rest of the backward pass reads from the forward pass
is live at that moment or is computed later, with all that this takes. Live values weigh at most what the budget leaves
beside residents, held values, live gradients and what the op itself makes. So a step takes at least its baseline plus
the least recomputation over saved sets of that weight, and Lagrange multipliers bound the latter: each minimum cut of
`mincut` is one line under it. Lines do not depend on the budget, so they are computed once.

**Bytes.** An op needs its operands, its outputs and its scratch beside what nothing can free.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.problem import Problem
from memplan.solvers.flat import Flat, Ints, flatten
from memplan.solvers.mincut import SavedSet, saved_sets


@dataclass(frozen=True, slots=True)
class Moment:
    """fixed_bytes: held at a moment whatever the schedule. sets: corners of (saved bytes, recompute seconds) there."""

    fixed_bytes: int
    sets: tuple[SavedSet, ...]


@dataclass(frozen=True, slots=True)
class Bound:
    """baseline_s: every op once. floor_bytes: no schedule peaks below it."""

    baseline_s: float
    floor_bytes: int
    moments: tuple[Moment, ...]

    def time_s(self, budget_bytes: int | None) -> float:
        """No schedule that peaks within the budget takes less; infinite below `floor_bytes`."""
        if budget_bytes is None:
            return self.baseline_s
        if budget_bytes < self.floor_bytes:
            return float("inf")
        lines = [
            s.line_s - s.line_s_per_byte * (budget_bytes - moment.fixed_bytes)
            for moment in self.moments
            for s in moment.sets
        ]
        return self.baseline_s + max([0.0, *lines])


def lower_bound(problem: Problem, moments: int = 3, cuts: int = 24) -> Bound:
    """Bounds of a problem. moments: moments to look at, the boundary first; cuts: minimum cuts to spend at each."""
    flat = flatten(problem)
    return bound_of(flat, problem.baseline_time_s, moments, cuts)


def bound_of(flat: Flat, baseline_s: float, moments: int, cuts: int) -> Bound:
    """`lower_bound` of a problem that is flattened already."""
    a = flat.arrays
    fixed = backward_bytes(flat)
    found = []
    for first in _moments(flat, fixed, moments):
        beyond = int(fixed[0]) if first == a.boundary else int(fixed[1 + first - a.boundary])
        found.append(Moment(beyond, saved_sets(flat, needed_after(flat, first), cuts)))
    return Bound(baseline_s, _floor(flat, fixed), tuple(found))


def needed_after(flat: Flat, first: int) -> frozenset[int]:
    """Forward values, held ones left out, that backward ops from `first` on read.

    What `first` itself overwrites is left out too: its memory counts as that of the op's output.
    """
    a = flat.arrays
    taken = {int(a.taken[v]) for v in flat.makes[first]} if first < flat.op_count else set()
    return frozenset(
        v for op in range(first, flat.op_count) for v in flat.reads[op]
        if 0 <= a.producer[v] < a.boundary and not a.held[v] and v not in taken
    )  # fmt: skip


def _moments(flat: Flat, fixed: Ints, count: int) -> list[int]:
    """The boundary, then the backward ops at which the most stands that nothing can free, apart from one another."""
    a = flat.arrays
    span = flat.op_count - a.boundary
    chosen = [a.boundary]
    for part in range(count - 1):
        low, high = 1 + span * part // (2 * count), 1 + span * (part + 1) // (2 * count)
        if high > low:
            chosen.append(a.boundary + low - 1 + int(np.argmax(fixed[low:high])))
    return list(dict.fromkeys(chosen))


def backward_bytes(flat: Flat) -> Ints:
    """Bytes that nothing can free: at the boundary, then while each backward op runs.

    Residents, held values, tangents, backward values still to be read, and the op's own outputs and scratch. Forward
    values do not count, but the memory of one that is overwritten does from then on.
    """
    a = flat.arrays
    last_read = np.full(len(a.size_bytes), -1, dtype=np.int64)
    for op in range(a.boundary, flat.op_count):
        for v in flat.reads[op]:
            last_read[v] = op
    live = a.base_bytes + a.tangent_bytes
    live += sum(int(a.size_bytes[v]) for op in range(a.boundary) for v in flat.makes[op] if a.held[v])
    fixed = [live]
    for op in range(a.boundary, flat.op_count):
        # An output takes over the memory of a value: of a gradient it is counted already, of a forward value not yet.
        live += sum(int(a.size_bytes[v]) for v in flat.makes[op] if not _counted(flat, v))
        fixed.append(live + int(a.scratch_bytes[op]))
        taken = {int(a.taken[v]) for v in flat.makes[op]}
        gone = [v for v in flat.reads[op] if a.producer[v] >= a.boundary and last_read[v] == op and v not in taken]
        gone += [v for v in flat.makes[op] if last_read[v] < 0]
        live -= sum(int(a.size_bytes[v]) for v in gone if not a.held[v])
        if a.accumulate:
            live -= sum(int(a.size_bytes[v]) for v in flat.makes[op] if a.gradient[v])
    return np.array(fixed, dtype=np.int64)


def _counted(flat: Flat, value: int) -> bool:
    a = flat.arrays
    taken = int(a.taken[value])
    return bool(a.in_place[value]) and not (taken >= 0 and a.producer[taken] < a.boundary)


def _floor(flat: Flat, fixed: Ints) -> int:
    a = flat.arrays
    worst = int(fixed.max())
    if a.update_bytes > 0:
        held = [v for row in flat.makes for v in row if a.held[v] and not (a.gradient[v] and a.accumulate)]
        new = sum(int(a.size_bytes[v]) for v in held if not a.in_place[v])
        worst = max(worst, a.base_bytes + new + a.update_bytes)
    for op in range(flat.op_count):
        forward = {v for v in flat.reads[op] if 0 <= a.producer[v] < a.boundary and not a.held[v]}
        if op < a.boundary:
            new = sum(int(a.size_bytes[v]) for v in flat.makes[op] if not a.in_place[v])
            read = sum(int(a.size_bytes[v]) for v in forward)
            worst = max(worst, a.base_bytes + new + int(a.scratch_bytes[op]) + read)
        else:
            taken = {int(a.taken[v]) for v in flat.makes[op]}
            read = sum(int(a.size_bytes[v]) for v in forward - taken)
            worst = max(worst, int(fixed[1 + op - a.boundary]) + read)
    return worst
