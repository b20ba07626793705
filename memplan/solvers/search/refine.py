"""Local search on flat schedules: from what the methods found to a front.

`refine` pushes the lowest schedules lower (`bring_down`), and at each peak of a grid brings neighbours down or fills
them up to it (`fill`). `trade` exchanges dear recomputations for cheap ones at the peaks of a front (`exchange`), and
leaves out several at once (`neighbourhood`). Both only add to what there is.

What is refined together competes: a schedule that is beaten is left aside, though it might have led further. So
families of methods are refined apart, and then traded together. Where the best that is known is within `_CLOSE` of the
lower bound, there is nothing left to look for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from memplan.config import SearchFigures
from memplan.solvers.bounds.lower_bound import Bound
from memplan.solvers.orders.flat import Flat
from memplan.solvers.orders.replay import Sketch, fill, pareto, sketch_of, thin
from memplan.solvers.orders.rewrites import bring_down
from memplan.solvers.search.neighbourhood import exchange, search_neighbours

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
