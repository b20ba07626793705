"""Local search on flat schedules: from what the methods found to a front, and at a fixed peak.

`refine` pushes the lowest schedules lower (`bring_down`), and at each peak of a grid brings neighbours down or fills
them up to it (`fill`). `trade` exchanges dear recomputations for cheap ones at the peaks of a front, and leaves out
several at once. Both only add to what there is.

What is refined together competes: a schedule that is beaten is left aside, though it might have led further. So
families of methods are refined apart, and then traded together. Where the best that is known is within `_CLOSE` of the
lower bound, there is nothing left to look for.

Greedy filling stops where nothing more fits. `exchange` leaves out one run although its result does not fit,
`bring_down` splits other values until it does, and `fill` uses up what that frees. The result is kept where it takes
less time.

`search_neighbours` is a large-neighbourhood search (Shaw, 1998). It leaves out a few repeated runs that stand together,
in time or in the model. Then it brings the peak back under its limit with others, and fills up what that leaves. An
order that takes a little longer is gone on from, the less so the later (record-to-record travel, Dueck, 1993). The best
one is the answer, so it is never worse than the start.

First runs keep the order of the forward pass: other orders do not pay (docs/research.md).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from memplan.config import SearchFigures
from memplan.jit import kernel
from memplan.solvers.bounds.lower_bound import Bound
from memplan.solvers.orders.flat import Arrays, Flat, Floats, Ints
from memplan.solvers.orders.replay import Sketch, fill, pareto, prune, removable, replay, sketch_of, thin
from memplan.solvers.orders.rewrites import bring_down, events_of, excess_bytes, live_through, promise_of, split

_THRESHOLD = 0.03  # of the overhead: how much longer than the best an order may take at first
_MARGIN = 0.02  # of the overhead: what filling may still win back
_STEPS = 12  # splits that may bring the peak back under its limit
_POOL = 32  # values looked at for a split
_SPLITS = 3  # of these, how many are tried until one helps
_FEW, _MANY = 3, 24  # repeated runs left out
_ROUNDS = 6  # splits that may make room for one result of `exchange`
_FILL_ROUNDS = 4  # these two as variables, for a literal argument would compile `bring_down` and `fill` a second time

DrawState = NDArray[np.uint64]  # of `_below`


@kernel
def exchange(a: Arrays, order: Ints, limit_bytes: int, tries: int, width: int) -> Ints:
    """An order that peaks within the limit and takes no longer; at most `tries` runs are tried, dear ones first."""
    peak, _at, time_s = replay(a, order, np.zeros(len(order), dtype=np.int64))
    if peak < 0 or peak > limit_bytes:
        return order
    rank = 0
    for _ in range(tries):
        ranked = removable(a, order)
        if rank >= len(ranked):
            break
        keep = np.ones(len(order), dtype=np.bool_)
        keep[ranked[rank]] = False
        rank += 1
        trial = bring_down(a, prune(a, order[keep]), limit_bytes, int(_ROUNDS), width)
        trial_peak, _at, trial_s = replay(a, trial, np.zeros(len(trial), dtype=np.int64))
        if trial_peak < 0 or trial_peak > limit_bytes:
            continue
        trial = fill(a, trial, limit_bytes, int(_FILL_ROUNDS))
        _peak, _at, trial_s = replay(a, trial, np.zeros(len(trial), dtype=np.int64))
        if trial_s < time_s * (1 - 1e-9):
            order = trial
            time_s = trial_s
            rank = 0
    return order


@kernel
def search_neighbours(
    a: Arrays, order: Ints, limit_bytes: int, least_s: float, tries: int, patience: int, state: DrawState
) -> tuple[Ints, int]:
    """An order that peaks within the limit and takes no longer, and how many neighbours were tried for it.

    Stops at `least_s` seconds, after `tries`, or after `patience` of them in a row that found nothing better.
    """
    peak, _at, best_s = replay(a, order, np.zeros(len(order), dtype=np.int64))
    if peak < 0 or peak > limit_bytes:
        return order, 0
    by_size = np.nonzero(~a.held & (a.producer >= 0) & (a.producer < a.boundary) & (a.size_bytes > 0))[0]
    once_s = float(a.time_s.sum())
    best = order
    failed = 0
    tried = 0
    while tried < tries and failed < patience and best_s > least_s:
        overhead_s = best_s - once_s
        most_s = best_s + _THRESHOLD * (1.0 - tried / tries) * overhead_s
        tried += 1
        failed += 1
        trial = _without_some(a, order, state)
        if len(trial) == 0:
            break
        trial = _repair(a, trial, limit_bytes, most_s + _MARGIN * overhead_s, by_size, state)
        if len(trial) == 0:
            continue
        trial = fill(a, trial, limit_bytes, int(_FILL_ROUNDS))
        peak, _at, trial_s = replay(a, trial, np.zeros(len(trial), dtype=np.int64))
        if peak < 0 or peak > limit_bytes or trial_s > most_s:
            continue
        order = trial
        if trial_s < best_s * (1 - 1e-12):
            best, best_s = trial, trial_s
            failed = 0
    return best, tried


@kernel
def _below(state: DrawState, limit: int) -> int:
    """A pseudo-random integer from 0 to limit - 1 (xorshift64*, Marsaglia, 2003, and Vigna, 2016), equal everywhere."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return int((x * np.uint64(2685821657736338717)) >> np.uint64(33)) % limit


@kernel
def _without_some(a: Arrays, order: Ints, state: DrawState) -> Ints:
    """The order less a few repeated runs, rather dear ones than others; empty where there are none.

    Either runs that follow one another in time, or all runs of ops that follow one another in the model.
    """
    seen, repeated = np.zeros(len(a.time_s), dtype=np.bool_), np.zeros(len(order), dtype=np.bool_)
    for i in range(len(order)):
        if order[i] >= 0:
            repeated[i] = seen[order[i]]
            seen[order[i]] = True
    again = np.nonzero(repeated)[0]
    if len(again) == 0:
        return order[:0]
    start = _below(state, len(again))
    other = _below(state, len(again))
    if a.time_s[order[again[other]]] > a.time_s[order[again[start]]]:
        start = other
    kind = _below(state, 16)
    count = 1
    if kind < 3:
        count = _FEW + 1 + _below(state, _MANY - _FEW)
    elif kind < 8:
        count = 2 + _below(state, _FEW - 1)
    keep = np.ones(len(order), dtype=np.bool_)
    if _below(state, 2) == 0:
        keep[again[start : start + count]] = False
    else:
        first = order[again[start]]
        for p in again:
            if first <= order[p] < first + count:
                keep[p] = False
    return prune(a, order[keep])


@kernel
def _repair(a: Arrays, order: Ints, limit_bytes: int, most_s: float, by_size: Ints, state: DrawState) -> Ints:
    """The order with splits that bring its peak under the limit; empty where that fails or takes longer than `most_s`.

    `bring_down` looks at the largest values and takes the best split of all. Here it is the most promising one of
    values that are drawn, so that it is another one each time.
    """
    during = np.zeros(len(order), dtype=np.int64)
    peak, at, _time_s = replay(a, order, during)
    for _ in range(_STEPS):
        if peak <= limit_bytes:
            break
        over_bytes = excess_bytes(during, limit_bytes)
        events = events_of(a, order)
        values, reads = live_through(events, by_size, at, len(by_size))
        cost: Floats = np.empty(len(values), dtype=np.float64)
        for i in range(len(values)):  # those of few seconds per byte, more or less, are drawn
            cost[i] = a.time_s[a.producer[values[i]]] / a.size_bytes[values[i]] * (0.2 + _below(state, 1024) / 1024.0)
        first = np.argsort(cost, kind="mergesort")[:_POOL]
        values, reads = values[first], reads[first]
        promise = np.empty(len(values), dtype=np.float64)
        for i in range(len(values)):
            promise[i] = promise_of(a, events, during, limit_bytes, values[i], reads[i])
        helped = False
        for i in np.argsort(promise, kind="mergesort")[:_SPLITS]:
            if promise[i] == np.inf:
                break
            trial, _idle = split(a, order, events, values[i], reads[i])
            if len(trial) == 0:
                continue
            trial = prune(a, trial)
            trial_during = np.zeros(len(trial), dtype=np.int64)
            trial_peak, trial_at, trial_s = replay(a, trial, trial_during)
            if trial_peak >= 0 and trial_s <= most_s and excess_bytes(trial_during, limit_bytes) < over_bytes:
                order, during, peak, at = trial, trial_during, trial_peak, trial_at
                helped = True
                break
        if not helped:
            break
    return order if 0 <= peak <= limit_bytes else order[:0]


_CLOSE = 1e-3  # of the bound
_PATIENCE = 5.0  # of the neighbours: how many in a row may be no better, for a gap as large as the bound


def refine(
    flat: Flat, sketches: list[Sketch], known: Sequence[Sketch], bound: Bound, figures: SearchFigures
) -> Iterator[Sketch]:
    """Push the lowest candidates lower, then bring neighbours of every peak of a grid down or up to it.

    known: schedules of all families. Where one of them is close to the bound at a peak of the grid, that peak is left
    out.
    """
    a, floor_bytes, best = flat.arrays, bound.floor_bytes, pareto(known)
    rounds = min(figures.rounds, max(8, figures.lower_work // flat.op_count))  # fewer on long steps: each costs more
    start = pareto(sketches)
    found = list(start)
    for sketch in start[: figures.descents]:
        # Towards the floor in steps, smaller ones where a step fails: a target far out of reach misleads the search, as
        # every recomputation then adds to the excess somewhere.
        new: list[Sketch] = []
        lowest, part = sketch, 4
        for _ in range(figures.descent_steps):
            target = lowest.peak_bytes - (lowest.peak_bytes - floor_bytes) // part
            order = bring_down(a, lowest.order, target, rounds, figures.width)
            lowered = sketch_of(flat, _lowered(lowest.solver), order)
            if lowered.peak_bytes < lowest.peak_bytes:
                new.append(lowered)
                lowest = lowered
            if lowered.peak_bytes > target:
                part *= 2
                if part > 64:
                    break
        order = bring_down(a, sketch.order, floor_bytes, rounds, figures.width)
        new.append(sketch_of(flat, _lowered(sketch.solver), order))
        found += new
        yield from new
    found = pareto(found)
    count = max(figures.grid, min(3 * figures.grid, figures.grid_work // flat.op_count))
    low, high = found[0].peak_bytes, found[-1].peak_bytes
    targets = [high]
    if count > 1 and high > low:  # closer to one another at the low end, where seconds change the most
        targets = sorted({low + int((high - low) * (i / (count - 1)) ** 1.5) for i in range(count)}, reverse=True)
    for target in targets * figures.passes:
        if _close(best, bound, target):
            continue
        below = [s for s in found if s.peak_bytes <= target][-2:]
        above = [s for s in found if s.peak_bytes > target][:2] + [s for s in start if s.peak_bytes > target][:2]
        new = [sketch_of(flat, s.solver, fill(a, s.order, target, 8)) for s in below]
        for sketch in above:
            order = bring_down(a, sketch.order, target, rounds // 4, figures.width)
            new.append(sketch_of(flat, _lowered(sketch.solver), fill(a, order, target, 8)))
        found = pareto([*found, *new])
        yield from new


def trade(flat: Flat, sketches: list[Sketch], bound: Bound, figures: SearchFigures, points: int) -> Iterator[Sketch]:
    """Exchange recomputations at each point of a front; a faster plan of a lower peak is taken on upwards."""
    thinned = thin(pareto(sketches), points)
    left = figures.neighbour_work // flat.op_count
    last: Sketch | None = None
    for index, sketch in enumerate(thinned):
        peak_bytes = sketch.peak_bytes
        if last is not None:
            last = sketch_of(flat, last.solver, fill(flat.arrays, last.order, peak_bytes, 8))
            sketch = min(sketch, last, key=lambda s: s.time_s)
        tries = min(figures.exchanges, figures.exchange_work // (len(sketch.order) * len(thinned)))
        if tries and not _close([sketch], bound, peak_bytes):
            order = exchange(flat.arrays, sketch.order, peak_bytes, tries, figures.width)
            sketch = sketch_of(flat, sketch.solver, order)
        tries = min(figures.neighbours, left // (len(thinned) - index))
        if tries and not _close([sketch], bound, peak_bytes):
            patience = _PATIENCE * figures.neighbours * (sketch.time_s / bound.time_s(peak_bytes) - 1)
            least_s = (1 + _CLOSE) * bound.time_s(peak_bytes)
            state = np.array([index + 1], dtype=np.uint64)
            order, made = search_neighbours(flat.arrays, sketch.order, peak_bytes, least_s, tries, int(patience), state)
            sketch = sketch_of(flat, sketch.solver, order)
            left -= made
        last = sketch
        yield sketch


def _close(best: list[Sketch], bound: Bound, target_bytes: int) -> bool:
    """Whether the best of a front within this peak takes about as little as anything can."""
    fitting = bisect_right(best, target_bytes, key=lambda sketch: sketch.peak_bytes)
    return fitting > 0 and best[fitting - 1].time_s <= (1 + _CLOSE) * bound.time_s(target_bytes)


def _lowered(solver: str) -> str:
    return solver if solver.endswith("lowered") else solver + ", lowered"
