"""The front of a problem: the best schedules known for every budget.

Candidates come from the textbook baselines, from minimum cuts over the whole step, and from the chain recurrence at two
granularities; then every candidate is brought down (`lower`) and filled up (`fill`) to the peaks of a grid. What is
kept has been through `schedule_of` and `simulate`. More budget never costs time, because a budget takes the fastest
point that fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from memplan.problem import Problem
from memplan.schedule import Schedule, Timeline, schedule_of
from memplan.simulate import simulate
from memplan.solvers.baselines import baselines, keep_all
from memplan.solvers.bound import Bound, bound_of, needed_after
from memplan.solvers.chain import Chain, coarse_cuts, fine_cuts, make_chain
from memplan.solvers.exchange import exchange
from memplan.solvers.expand import expand, solved_chain
from memplan.solvers.flat import Flat, Ints, flatten
from memplan.solvers.mincut import saved_sets
from memplan.solvers.orders import demand_order, lower
from memplan.solvers.replay import fill, prune, replay
from memplan.solvers.rotor import distinct_slots

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """How hard to look; counts alone, so that a front is the same on every machine.

    coarse_blocks, fine_blocks: most blocks of the two chains. coarse_slots, fine_slots: memory sizes told apart.
    cuts, block_cuts: minimum cuts for the whole step and for a block. options: most options of a block.
    sizes: plans expanded for each chain. points: most points that are kept.
    grid, passes: peaks to which plans are lowered and filled, and how often.
    descents, descent_steps: candidates taken down towards the floor, and in how many steps at most.
    rounds, width: of `lower`. exchanges: runs that `exchange` tries for each point. moments: moments of the bound.
    lower_work, exchange_work, moment_work: caps on the same for long steps, as ops times what is counted.
    """

    coarse_blocks: int = 96
    fine_blocks: int = 160
    coarse_slots: int = 600
    fine_slots: int = 300
    cuts: int = 20
    block_cuts: int = 8
    options: int = 24
    sizes: int = 16
    grid: int = 40
    descents: int = 6
    descent_steps: int = 20
    rounds: int = 400
    width: int = 6
    points: int = 32
    exchanges: int = 60
    exchange_work: int = 400_000
    moments: int = 10
    moment_work: int = 10_000
    lower_work: int = 1_500_000
    passes: int = 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A legal schedule. order: its ops with the boundary; solver: what it started from."""

    solver: str
    order: tuple[int, ...]
    schedule: Schedule
    timeline: Timeline

    @property
    def peak_bytes(self) -> int:
        return self.timeline.peak_bytes

    @property
    def time_s(self) -> float:
        return self.timeline.time_s


@dataclass(frozen=True, slots=True)
class Front:
    """points: no point has both a lower peak and less time than another; peaks rise, times fall."""

    points: tuple[Candidate, ...]
    keep_all: Candidate
    bound: Bound

    @property
    def floor(self) -> Candidate:
        """The candidate with the smallest peak."""
        return self.points[0]

    def best(self, budget_bytes: int | None) -> Candidate | None:
        """The fastest candidate that peaks within the budget; None where none does."""
        fitting = [c for c in self.points if budget_bytes is None or c.peak_bytes <= budget_bytes]
        return fitting[-1] if fitting else None


@dataclass(frozen=True, slots=True)
class _Sketch:
    """An order and what the fast accountant says of it."""

    peak_bytes: int
    time_s: float
    solver: str
    order: Ints


def solve_front(problem: Problem, progress: Progress | None = None, limits: Limits | None = None) -> Front:
    """The front of a problem, whatever its budget. progress is told what is being done."""
    limits = limits or Limits()
    tell = progress or (lambda text: None)
    flat = flatten(problem)
    tell("bounds")
    moments = min(limits.moments, max(2, limits.moment_work // flat.op_count))
    bound = bound_of(flat, problem.baseline_time_s, moments, limits.cuts)
    tell("whole step")
    sketches = [_sketch(flat, name, order) for name, order in baselines(flat, limits.coarse_blocks)]
    sketches += _from_cuts(flat, limits)
    for name, chain, slots in _chains(flat, limits):
        tell(name)
        sketches += _from_chain(flat, problem, name, chain, slots, sketches[0].peak_bytes, limits)
    tell("refining")
    sketches = _refine(flat, sketches, bound, limits)
    tell("replaying")
    kept = _exchange(flat, _thin(_pareto(sketches), limits.points), limits)
    return _front(problem, flat, _pareto(kept), bound)


def textbook(problem: Problem, limits: Limits | None = None) -> tuple[Candidate, ...]:
    """The textbook schedules, those first that peak lower: what can be had without a search. Keep all is among them."""
    flat = flatten(problem)
    orders = baselines(flat, (limits or Limits()).coarse_blocks)
    legal = [(name, order) for name, order in orders if _sketch(flat, name, order).peak_bytes >= 0]
    return tuple(sorted((_candidate(problem, name, order) for name, order in legal), key=lambda c: c.peak_bytes))


def _sketch(flat: Flat, solver: str, order: Ints) -> _Sketch:
    peak, _position, time_s = replay(flat.arrays, order, np.zeros(len(order), dtype=np.int64))
    return _Sketch(int(peak), float(time_s), solver, order)


def _from_cuts(flat: Flat, limits: Limits) -> list[_Sketch]:
    """Saved sets of the whole step, values recomputed once and kept, or kept for a while only."""
    a = flat.arrays
    pinned = a.held.copy()
    for v, op in enumerate(a.producer):
        if 0 <= op < a.boundary and not a.rerunnable[op] and not a.overwritten[v]:
            pinned[v] = True
    found = []
    for chosen in saved_sets(flat, needed_after(flat, a.boundary), limits.cuts):
        saved = pinned.copy()
        saved[list(chosen.saved)] = True
        for window in (0, 8, 64, flat.op_count):
            order = demand_order(a, saved, window, 4 * flat.op_count)
            if len(order):
                found.append(_sketch(flat, "minimum cut", prune(a, order)))
    return found


def _chains(flat: Flat, limits: Limits) -> list[tuple[str, Chain, int]]:
    coarse, fine = coarse_cuts(flat, limits.coarse_blocks), fine_cuts(flat, limits.fine_blocks)
    found = [("chain of coarse blocks", make_chain(flat, coarse), limits.coarse_slots)]
    if fine != coarse:
        found.append(("chain of fine blocks", make_chain(flat, fine), limits.fine_slots))
    return found


def _from_chain(flat: Flat, problem: Problem, name: str, chain: Chain, slots: int, most_bytes: int,
                limits: Limits) -> list[_Sketch]:  # fmt: skip
    keys = tuple(op.key or op.kind for op in problem.graph.ops)
    beyond = max(1, most_bytes - flat.arrays.base_bytes)
    solved = solved_chain(flat, keys, chain, beyond + beyond // 8, slots, limits.block_cuts, limits.options)
    return [_sketch(flat, name, expand(flat, solved, m)) for m in distinct_slots(solved.opt, limits.sizes)]


def _pareto(sketches: list[_Sketch]) -> list[_Sketch]:
    kept: list[_Sketch] = []
    for sketch in sorted(sketches, key=lambda s: (s.peak_bytes, s.time_s, len(s.order))):
        if sketch.peak_bytes >= 0 and (not kept or sketch.time_s < kept[-1].time_s):
            kept.append(sketch)
    return kept


def _refine(flat: Flat, sketches: list[_Sketch], bound: Bound, limits: Limits) -> list[_Sketch]:
    """Push the lowest candidates lower, then bring neighbours of every peak of a grid down or up to it."""
    a = flat.arrays
    rounds = _rounds(flat, limits)
    found = _pareto(sketches)
    start = list(found)
    for sketch in start[: limits.descents]:
        found += _descend(flat, sketch, bound.floor_bytes, limits)
        order = lower(a, sketch.order, bound.floor_bytes, rounds, limits.width)
        found.append(_sketch(flat, _lowered(sketch.solver), order))
    found = _pareto(found)
    low, high = found[0].peak_bytes, found[-1].peak_bytes
    for target in _grid(low, high, limits.grid) * limits.passes:
        below = [s for s in found if s.peak_bytes <= target][-2:]
        above = [s for s in found if s.peak_bytes > target][:2] + [s for s in start if s.peak_bytes > target][:2]
        for sketch in below:
            order = fill(a, sketch.order, target, 8)
            found.append(_sketch(flat, sketch.solver, order))
        for sketch in above:
            order = lower(a, sketch.order, target, rounds // 4, limits.width)
            order = fill(a, order, target, 8)
            found.append(_sketch(flat, _lowered(sketch.solver), order))
        found = _pareto(found)
    return found


def _exchange(flat: Flat, sketches: list[_Sketch], limits: Limits) -> list[_Sketch]:
    """Trade dear recomputations for cheap ones at the same peak; a faster plan of a lower peak is taken on upwards."""
    found: list[_Sketch] = []
    for sketch in sketches:
        tries = min(limits.exchanges, limits.exchange_work // (len(sketch.order) * len(sketches)))
        if found and found[-1].time_s < sketch.time_s:
            sketch = found[-1]
        if tries:
            limit = max(sketch.peak_bytes, 0)
            order = exchange(flat.arrays, sketch.order, limit, tries, limits.width)
            sketch = _sketch(flat, sketch.solver, order)
        found.append(sketch)
    return found


def _rounds(flat: Flat, limits: Limits) -> int:
    """Rounds of lowering; fewer on long steps, where each costs more."""
    return min(limits.rounds, max(8, limits.lower_work // flat.op_count))


def _lowered(solver: str) -> str:
    return solver if solver.endswith("lowered") else solver + ", lowered"


def _descend(flat: Flat, sketch: _Sketch, floor_bytes: int, limits: Limits) -> list[_Sketch]:
    """Lower a peak towards the floor in steps, smaller ones where a step fails.

    A target far out of reach misleads the search: every recomputation then adds to the excess somewhere.
    """
    found: list[_Sketch] = []
    rounds = _rounds(flat, limits)
    part = 4
    for _ in range(limits.descent_steps):
        target = sketch.peak_bytes - (sketch.peak_bytes - floor_bytes) // part
        order = lower(flat.arrays, sketch.order, target, rounds, limits.width)
        lowered = _sketch(flat, _lowered(sketch.solver), order)
        if lowered.peak_bytes < sketch.peak_bytes:
            found.append(lowered)
            sketch = lowered
        if lowered.peak_bytes > target:
            part *= 2
            if part > 64:
                break
    return found


def _grid(low: int, high: int, count: int) -> list[int]:
    """Peaks from low to high, closer to one another at the low end, where seconds change the most."""
    if count < 2 or high <= low:
        return [high]
    return sorted({low + int((high - low) * (i / (count - 1)) ** 1.5) for i in range(count)}, reverse=True)


def _thin(sketches: list[_Sketch], limit: int) -> list[_Sketch]:
    """At most `limit` points: those whose loss costs the most stay. A lost point costs a budget just above it."""
    kept = list(sketches)
    while len(kept) > max(limit, 2):
        loss = [(kept[i - 1].time_s - kept[i].time_s) * (kept[i + 1].peak_bytes - kept[i].peak_bytes)
                for i in range(1, len(kept) - 1)]  # fmt: skip
        del kept[1 + loss.index(min(loss))]
    return kept


def _front(problem: Problem, flat: Flat, sketches: list[_Sketch], bound: Bound) -> Front:
    points: list[Candidate] = []
    for sketch in sketches:
        candidate = _candidate(problem, sketch.solver, sketch.order)
        if not points or candidate.time_s < points[-1].time_s:
            points.append(candidate)
    everything = _candidate(problem, "keep all", keep_all(flat))
    return Front(tuple(points), everything, bound)


def _candidate(problem: Problem, solver: str, order: Ints) -> Candidate:
    ops = tuple(int(op) for op in order)
    schedule = schedule_of(problem.graph, ops)
    return Candidate(solver, ops, schedule, simulate(problem, schedule))
