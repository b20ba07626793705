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

    coarse_blocks, fine_blocks: most blocks of the chains. slots: memory sizes told apart. cuts, block_cuts: minimum cuts
    for the whole step and for a block. options: most options of a block. sizes: plans expanded for each chain.
    grid: peaks to which plans are filled. rounds, width: of the search that lowers peaks.
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
    rounds: int = 400
    width: int = 6


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
    bound = bound_of(flat, problem.baseline_time_s, 3, limits.cuts)
    tell("whole step")
    sketches = [_sketch(flat, name, order) for name, order in baselines(flat, limits.coarse_blocks)]
    sketches += _from_cuts(flat, limits)
    for name, chain, slots in _chains(flat, limits):
        tell(name)
        sketches += _from_chain(flat, problem, name, chain, slots, sketches[0].peak_bytes, limits)
    tell("refining")
    sketches = _refine(flat, sketches, bound, limits)
    tell("replaying")
    kept = _pareto(sketches)
    return _front(problem, flat, kept, bound)


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
    found = _pareto(sketches)
    for sketch in found[:3]:
        order = lower(a, sketch.order, bound.floor_bytes, limits.rounds, limits.width)
        found.append(_sketch(flat, sketch.solver + ", lowered", order))
    found = _pareto(found)
    low, high = found[0].peak_bytes, found[-1].peak_bytes
    for target in _grid(low, high, limits.grid):
        below = [s for s in found if s.peak_bytes <= target][-2:]
        above = [s for s in found if s.peak_bytes > target][:2]
        for sketch in below:
            order = fill(a, sketch.order, target, 8)
            found.append(_sketch(flat, sketch.solver + ", filled", order))
        for sketch in above:
            order = lower(a, sketch.order, target, limits.rounds // 4, limits.width)
            order = fill(a, order, target, 8)
            found.append(_sketch(flat, sketch.solver + ", lowered", order))
        found = _pareto(found)
    return found


def _grid(low: int, high: int, count: int) -> list[int]:
    """Peaks from low to high, closer to one another at the low end, where seconds change the most."""
    if count < 2 or high <= low:
        return [high]
    return sorted({low + int((high - low) * (i / (count - 1)) ** 1.5) for i in range(count)}, reverse=True)


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
