"""A fast accountant for orders of ops, and two rewritings of orders that never change what is computed.

`Sketch` is an order beside what it comes to; `pareto` and `thin` pick the best of many.

`replay` says of an order what `simulate` says of `schedule_of(order)`: tests hold the two equal.

`prune` takes out runs that nobody reads.

`fill` takes out runs whose earlier result can be kept under a limit. A block's or a whole step's sparse order becomes a
good one for any limit this way. `fill` is greedy, by seconds saved per byte; `exchange` repairs part of what that
loses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from memplan.jit import kernel
from memplan.problem.schedule import BOUNDARY, SURFACE_BATCH
from memplan.solvers.orders.flat import Arrays, Flat, Floats, Ints


@kernel
def replay(a: Arrays, order: Ints, during: Ints) -> tuple[int, int, float]:
    """(peak bytes, position of it, seconds) of an order; fills `during` with the peak at each position.

    Returns position -1 and a peak of -1 for an order that reads what is not there.
    """
    n = len(order)
    values = len(a.size_bytes)
    later = np.zeros(values, dtype=np.bool_)
    consumed = np.full(values, -1, dtype=np.int64)
    freed = np.zeros(n, dtype=np.int64)
    runs = np.zeros(len(a.time_s), dtype=np.int64)
    for p in range(n - 1, -1, -1):
        op = order[p]
        if op < 0:
            continue
        runs[op] += 1
        for e in range(a.made_start[op], a.made_start[op + 1]):
            v = a.made[e]
            if a.taken[v] >= 0:
                consumed[a.taken[v]] = p
            if not later[v] and not a.held[v]:
                freed[p] += a.size_bytes[v]
            later[v] = False
        for e in range(a.read_start[op], a.read_start[op + 1]):
            v = a.read[e]
            if not later[v] and not a.held[v] and consumed[v] != p:
                freed[p] += a.size_bytes[v]
            later[v] = True
    alive = np.zeros(values, dtype=np.bool_)
    done = np.zeros(len(a.time_s), dtype=np.int64)
    live = a.base_bytes
    rng = 0
    final = np.full(values, -1, dtype=np.int64)  # for each gradient: where nothing reads its parameters any more
    for p in range(n):
        op = order[p]
        if op < 0:
            continue
        for e in range(a.made_start[op], a.made_start[op + 1]):
            if a.gradient[a.made[e]]:
                final[a.made[e]] = p
        for e in range(a.awaiting_start[op], a.awaiting_start[op + 1]):
            if final[a.awaiting[e]] >= 0:
                final[a.awaiting[e]] = p
    gradients = np.empty(values, dtype=np.int64)  # as they are made: handed over, ready for that, and not ready
    over = 0
    ready = 0
    made = 0
    ready_bytes = 0
    peak = live
    where = 0
    time_s = 0.0
    waiting = 0
    for p in range(n):
        op = order[p]
        if op < 0:
            waiting = a.others * (live + rng - a.base_bytes + a.input_bytes)
            live += a.tangent_bytes
            during[p] = live + rng
            if during[p] > peak:
                peak = during[p]
                where = p
            continue
        again = a.random[op] and runs[op] > 1
        if again and done[op] == 0:
            rng += a.rng_state_bytes
        for e in range(a.read_start[op], a.read_start[op + 1]):
            if not alive[a.read[e]]:
                return -1, -1, 0.0
        gone = 0
        for e in range(a.made_start[op], a.made_start[op + 1]):
            v = a.made[e]
            if a.taken[v] >= 0:
                alive[a.taken[v]] = False
            if not a.in_place[v]:
                live += a.size_bytes[v]
            if a.held[v] and alive[v]:
                gone += a.size_bytes[v]
            alive[v] = True
            if a.gradient[v]:
                gradients[made] = v
                made += 1
        now = live + rng + a.scratch_bytes[op]
        if a.random[op] and done[op] > 0:
            now += a.rng_state_bytes
        done[op] += 1
        time_s += a.time_s[op]
        during[p] = now
        if now > peak:
            peak = now
            where = p
        live -= gone + freed[p]
        if again and done[op] == runs[op]:
            rng -= a.rng_state_bytes
        while ready < made and final[gradients[ready]] <= p:
            ready_bytes += a.size_bytes[gradients[ready]]
            ready += 1
        if ready - over >= SURFACE_BATCH:
            if a.accumulate:
                live -= ready_bytes
            over = ready
            ready_bytes = 0
    if a.accumulate:
        live -= ready_bytes
    if waiting != 0:
        for p in range(n):
            during[p] += waiting
        peak = max(a.base_bytes, peak + waiting)
    if a.update_bytes > 0 and live + a.update_bytes > peak:
        peak = live + a.update_bytes
        where = n - 1
    return peak, where, time_s


def outcome(a: Arrays, order: Ints) -> tuple[int, float]:
    """(peak bytes, seconds) of an order; a peak of -1 for one that is not legal."""
    peak, _position, time_s = replay(a, order, np.zeros(len(order), dtype=np.int64))
    return int(peak), float(time_s)


@kernel
def prune(a: Arrays, order: Ints) -> Ints:
    """The order without runs that nobody reads. Each op runs once at least, and in the forward pass where it has to."""
    n = len(order)
    keep = np.ones(n, dtype=np.bool_)
    seen = np.zeros(len(a.time_s), dtype=np.bool_)
    first = np.zeros(n, dtype=np.bool_)
    for p in range(n):
        if order[p] >= 0 and not seen[order[p]]:
            seen[order[p]] = True
            first[p] = True
    later = np.zeros(len(a.size_bytes), dtype=np.bool_)
    runs = np.zeros(len(a.time_s), dtype=np.bool_)
    for p in range(n - 1, -1, -1):
        op = order[p]
        if op < 0:
            continue
        useful = first[p] and (not runs[op] or a.random[op] or not a.deferrable[op])
        for e in range(a.made_start[op], a.made_start[op + 1]):
            v = a.made[e]
            useful = useful or (later[v] and not a.held[v])
        if not useful:
            keep[p] = False
            continue
        runs[op] = True
        for e in range(a.made_start[op], a.made_start[op + 1]):
            later[a.made[e]] = False
        for e in range(a.read_start[op], a.read_start[op + 1]):
            later[a.read[e]] = True
    return order[keep]


@kernel
def _instances(a: Arrays, order: Ints) -> tuple[Ints, Ints, Ints, Ints, Floats]:
    """For each repeated run that could be left out: where its results were last touched, and what that would save.

    - touched[p]: the earliest position from which the earlier results would have to be kept; -1: must stay.
    - kept_bytes[p]: their bytes.
    - first[p]: 1 at first runs.
    - saved_s[p]: seconds of the run and of what runs for it alone.
    - tied[p]: the run before, of an op with several outputs, else -1. One of the two has to stay, for the earlier may
      free at once an output that the later makes for use.
    """
    n = len(order)
    values = len(a.size_bytes)
    last = np.full(values, -1, dtype=np.int64)
    made_at = np.full(values, -1, dtype=np.int64)
    alive = np.zeros(values, dtype=np.bool_)
    seen = np.zeros(len(a.time_s), dtype=np.bool_)
    touched = np.full(n, -1, dtype=np.int64)
    kept_bytes = np.zeros(n, dtype=np.int64)
    first = np.zeros(n, dtype=np.int64)
    readers = np.zeros(n, dtype=np.int64)
    tied = np.full(n, -1, dtype=np.int64)
    ran_at = np.full(len(a.time_s), -1, dtype=np.int64)
    # Which outputs of a run are read before the op runs again: one flag a (position, output), found backwards.
    offset = np.zeros(n + 1, dtype=np.int64)
    for p in range(n):
        width = 0 if order[p] < 0 else a.made_start[order[p] + 1] - a.made_start[order[p]]
        offset[p + 1] = offset[p] + width
    wanted = np.zeros(offset[n], dtype=np.bool_)
    later = np.zeros(values, dtype=np.bool_)
    for p in range(n - 1, -1, -1):
        op = order[p]
        if op < 0:
            continue
        for e in range(a.made_start[op], a.made_start[op + 1]):
            v = a.made[e]
            wanted[offset[p] + e - a.made_start[op]] = later[v] and not a.held[v]
            later[v] = False
        for e in range(a.read_start[op], a.read_start[op + 1]):
            later[a.read[e]] = True
    for p in range(n):
        op = order[p]
        if op < 0:
            continue
        for e in range(a.read_start[op], a.read_start[op + 1]):
            v = a.read[e]
            last[v] = p
            if made_at[v] >= 0:
                readers[made_at[v]] += 1
        if a.made_start[op + 1] - a.made_start[op] > 1:
            tied[p] = ran_at[op]
        ran_at[op] = p
        if not seen[op]:
            first[p] = 1
            seen[op] = True
        else:
            start = p
            possible = True
            for e in range(a.made_start[op], a.made_start[op + 1]):
                v = a.made[e]
                if wanted[offset[p] + e - a.made_start[op]]:
                    possible = possible and alive[v]
                    start = min(start, last[v])
                    kept_bytes[p] += a.size_bytes[v]
            if possible:
                touched[p] = start
        for e in range(a.made_start[op], a.made_start[op + 1]):
            v = a.made[e]
            if a.taken[v] >= 0:
                alive[a.taken[v]] = False
            alive[v] = True
            last[v] = p
            made_at[v] = p
    saved_s = np.zeros(n, dtype=np.float64)
    made_at[:] = -1
    for p in range(n):
        op = order[p]
        if op < 0:
            continue
        saved_s[p] = a.time_s[op]
        for e in range(a.read_start[op], a.read_start[op + 1]):
            source = made_at[a.read[e]]
            if source >= 0 and first[source] == 0 and readers[source] == 1:
                saved_s[p] += saved_s[source]
        for e in range(a.made_start[op], a.made_start[op + 1]):
            made_at[a.made[e]] = p
    return touched, kept_bytes, first, tied, saved_s


@kernel
def fill(a: Arrays, order: Ints, limit_bytes: int, rounds: int) -> Ints:
    """The order with repeated runs left out, best seconds per byte first, as long as its peak stays under the limit.

    What is kept across the boundary is kept by each microbatch that waits too, beside every position.
    """
    for _ in range(rounds):
        n = len(order)
        turn = 0
        while a.others > 0 and order[turn] >= 0:
            turn += 1
        during = np.zeros(n, dtype=np.int64)
        replay(a, order, during)
        touched, kept_bytes, first, tied, saved_s = _instances(a, order)
        positions = np.nonzero((first == 0) & (touched >= 0) & (order >= 0))[0]
        if len(positions) == 0:
            break
        value = np.empty(len(positions), dtype=np.float64)
        for i in range(len(positions)):
            value[i] = -saved_s[positions[i]] / (kept_bytes[positions[i]] + 1.0)
        ranked = positions[np.argsort(value, kind="mergesort")]
        keep = np.ones(n, dtype=np.bool_)
        leaned_on = np.zeros(n, dtype=np.bool_)
        for p in ranked:
            fits = not leaned_on[p] and (tied[p] < 0 or keep[tied[p]])
            waiting = a.others * kept_bytes[p] if touched[p] < turn < p else 0
            if waiting > 0:
                for q in range(n):
                    if during[q] + waiting > limit_bytes:
                        fits = False
                        break
            for q in range(p - 1, touched[p], -1):  # what runs again stands where memory is short
                if during[q] + kept_bytes[p] + waiting > limit_bytes:
                    fits = False
                    break
            if fits:
                for q in range(touched[p] + 1, p):
                    during[q] += kept_bytes[p]
                if waiting > 0:
                    during += waiting
                keep[p] = False
                if tied[p] >= 0:
                    leaned_on[tied[p]] = True
        if keep.all():
            break
        order = prune(a, order[keep])
    return order


@kernel
def removable(a: Arrays, order: Ints) -> Ints:
    """Positions of repeated runs whose earlier results could be kept, the ones that save the most seconds first."""
    touched, _kept_bytes, first, _tied, saved_s = _instances(a, order)
    positions = np.nonzero((first == 0) & (touched >= 0) & (order >= 0))[0]
    return positions[np.argsort(-saved_s[positions], kind="mergesort")]


@dataclass(frozen=True, slots=True)
class Sketch:
    """An order of ops beside what it comes to.

    - peak_bytes: -1 for an order that is not legal.
    - solver: what the order started from.
    """

    peak_bytes: int
    time_s: float
    solver: str
    order: Ints


def sketch_of(flat: Flat, solver: str, order: Ints) -> Sketch:
    """What an order comes to."""
    return Sketch(*outcome(flat.arrays, order), solver, order)


def keep_all(flat: Flat) -> Ints:
    """The order that runs every op once, in eager order."""
    boundary = flat.arrays.boundary
    return np.array([*range(boundary), BOUNDARY, *range(boundary, flat.op_count)], dtype=np.int64)


class Point(Protocol):
    @property
    def peak_bytes(self) -> int: ...
    @property
    def time_s(self) -> float: ...
    @property
    def order(self) -> Sized: ...


_Point = TypeVar("_Point", bound=Point)


def pareto(sketches: Iterable[_Point]) -> list[_Point]:
    """The legal ones that no other beats in both peak and time: peaks rise, times fall."""
    kept: list[_Point] = []
    for sketch in sorted(sketches, key=lambda s: (s.peak_bytes, s.time_s, len(s.order))):
        if sketch.peak_bytes >= 0 and (not kept or sketch.time_s < kept[-1].time_s):
            kept.append(sketch)
    return kept


def thin(points: Sequence[_Point], limit: int) -> list[_Point]:
    """At most `limit` points of a front: those whose loss costs the most stay.

    A lost point costs a budget just above it.
    """
    kept = list(points)
    while len(kept) > max(limit, 2):
        loss = [(kept[i - 1].time_s - kept[i].time_s) * (kept[i + 1].peak_bytes - kept[i].peak_bytes)
                for i in range(1, len(kept) - 1)]  # fmt: skip
        del kept[1 + loss.index(min(loss))]
    return kept
