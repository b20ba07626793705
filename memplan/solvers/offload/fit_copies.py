"""Copies to and from host memory, and gathers, added to an order of ops so that it fits a budget on the device.

An order of ops says what is recomputed; this says what of the rest leaves the device for a while. Between two uses of a
value lies a **gap** during which its memory can serve others. `evict` sweeps over the order and, wherever too much is
held, closes the gap whose next use is farthest away (Belady's rule, optimal for the number of copies of equal
size). A copy out begins right after the use before the gap. A copy in begins as late as its direction of the link
allows without keeping anybody waiting, and as early as memory allows where it doesn't.

Parameters that live on the host are values whose copy out costs nothing; their gradients leave once they are final. So
are sharded parameters, but they are gathered from all ranks, in a lane of their own.

Parameters that live on the host and that nobody writes to (`Value.lasting`) need not leave when a step ends: what the
next forward pass reads first is what this backward pass read last, and nothing else is on the device then. So for them
a step is periodic: some are there when it begins, and are again when it ends, fetched anew where they had to leave in
between. Those that are read first are taken, in a few amounts up to the room that there is between steps.

Microbatches that wait hold at every moment what each of them saves. So where several are in flight, a few amounts that
may be saved are tried: from what can't leave, to all that fits. Each amount sets a limit for the boundary. For the rest
of the pass the limit is the budget less what the others then hold.

What is recomputed and what is copied is decided together by trying every order of a front: the less an order
recomputes, the more has to be copied. Kernels (`copies`) say what each comes to; `simulate` has the last word on those
that are the fastest. Where ops are collectives, `overlapped` moves those of each order, and `simulate` says what that
comes to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from memplan.problem import schedule as steps
from memplan.problem.data import Problem
from memplan.problem.packing import pinned_bytes, place_host_copies
from memplan.problem.schedule import BOUNDARY, Schedule, Timeline, schedule_of, update_positions
from memplan.solvers.front.front import Candidate
from memplan.solvers.offload.copies import Gaps, Movables, close_all, evict, find_gaps, lanes, movables_of, settle
from memplan.solvers.offload.overlap import overlapped, unit_order
from memplan.solvers.orders.flat import Flat, Floats, Ints, flatten
from memplan.solvers.orders.replay import fill, replay, sketch_of, thin
from memplan.solvers.orders.rewrites import bring_down

_VAST = 1 << 60
_SPREAD = 24  # orders tried, spread over a front
_NEAR, _PARTS = 4, 3  # points from the best on between which others are looked for, and stretches between two
_LOWER_ROUNDS, _WIDTH, _FILL_ROUNDS = 12, 6, 8
_LEAST_SHARE = 1e-4  # of the budget: smaller values stay where they are as long as that fits
_SAVED = 24  # amounts that microbatches which wait may save, tried for each order
_STAYING = 4  # amounts that may stay on the device between steps, tried for each order


@dataclass(frozen=True, slots=True)
class Offloaded:
    """A schedule with copies, and what it comes to. solver: what its order started from."""

    solver: str
    schedule: Schedule
    timeline: Timeline


def solve_offload(
    problem: Problem,
    points: Sequence[Candidate],
    budget_bytes: int,
    host_bytes: int,
    under_s: float = float("inf"),
    stays: bool = True,
) -> Offloaded | None:
    """The fastest of these orders with copies that keep both budgets; None where none takes less than `under_s`.

    Some points that are spread over the front are tried, and what fits without copies. Then all that are near the best
    are tried, and orders between those: with less recomputed there is more to be copied, until ops wait for that.

    - points: of a front, peaks rising and times falling.
    - budget_bytes: on the device.
    - host_bytes: of pinned memory for values beside the parameters that live on the host.
    - stays: copies of lasting parameters may stay on the device between steps.
    """
    search = _CopySearch(problem, budget_bytes, host_bytes, under_s, stays)
    if search.overlaps:
        search.tries_units()
    spread = {id(point) for point in thin(points, _SPREAD)}
    tried = {index for index, point in enumerate(points) if id(point) in spread}
    tried |= set([index for index, point in enumerate(points) if point.peak_bytes <= budget_bytes][-1:])
    best = search.tries(points, tried)
    if best is not None:
        before = max((i for i in tried if i < best), default=best)
        after = min((i for i in tried if i > best), default=best)
        closer = search.tries(points, set(range(before + 1, after)) - tried)
        best = best if closer is None else closer
        search.tries_between(points[max(0, best - 1) : best + _NEAR])
    elif search.overlaps:  # an order between the lowest may peak below them
        search.tries_between(points[:_NEAR])
    return search.best()


@dataclass(frozen=True, slots=True)
class _Tried:
    """An order that keeps both budgets with copies, and beats what has to be beaten.

    - solver: what it started from.
    - saved_bytes: the most that microbatches which wait may save.
    - staying_bytes: the most that may stay between steps.
    """

    time_s: float
    solver: str
    order: Sequence[int]
    saved_bytes: int
    staying_bytes: int


class _CopySearch:
    """Orders that were tried. limit_s: seconds of the fastest, or what has to be beaten.

    least_s: of each op, what it takes in any schedule.
    """

    def __init__(self, problem: Problem, budget_bytes: int, host_bytes: int, under_s: float, stays: bool) -> None:
        self.problem, self.budget_bytes, self.host_bytes = problem, budget_bytes, host_bytes
        self.flat, self.movables = flatten(problem), movables_of(problem)
        if not stays:
            self.movables = self.movables._replace(lasting=np.zeros_like(self.movables.lasting))
        self.under_s = self.limit_s = under_s
        self.overlaps = problem.network_s > 0
        self.least_s = np.array((*problem.without_network.costs.time_s, 0.0))
        self.found: list[_Tried] = []

    def tries(self, points: Sequence[Candidate], indices: Collection[int]) -> int | None:
        """Try these points, those first that are the fastest without copies, as long as one may be better.

        Gives the index of the best; None where none is better than what was known.
        """
        best = None
        least_s = {i: points[i].time_s for i in indices}
        if self.overlaps:  # then without waiting
            least_s = {i: float(self.least_s[list(points[i].order)].sum()) for i in indices}
        for index in sorted(indices, key=least_s.__getitem__):
            if least_s[index] >= self.limit_s:
                break
            best = index if self._try(points[index].solver, points[index].order) else best
        return best

    def tries_units(self) -> None:
        """Try to run units of sharded parameters again, and less of that: what takes longest, or gathers, runs once."""
        order, arrays = unit_order(self.problem.graph, self.flat), self.flat.arrays
        if sketch_of(self.flat, "units", order).peak_bytes < 0:
            return
        self._try("units run again", order.tolist())
        for time_s in (arrays.time_s, arrays.time_s - self.least_s[:-1]):  # the latter is the network's
            filled = fill(arrays._replace(time_s=time_s), order, self.budget_bytes, _FILL_ROUNDS)
            self._try("units run again", filled.tolist())

    def tries_between(self, points: Sequence[Candidate]) -> None:
        """Try orders that peak between these points: the higher ones brought down, the lower ones filled up."""
        a = self.flat.arrays
        for below, above in pairwise(points):
            for part in range(1, _PARTS):
                target = below.peak_bytes + (above.peak_bytes - below.peak_bytes) * part // _PARTS
                lowered = bring_down(a, np.array(above.order, dtype=np.int64), target, _LOWER_ROUNDS, _WIDTH)
                for point, order in ((above, lowered), (below, np.array(below.order, dtype=np.int64))):
                    self._try(point.solver, fill(a, order, target, _FILL_ROUNDS).tolist())

    def best(self) -> Offloaded | None:
        """The fastest of which a schedule keeps what was promised."""
        for tried in sorted(self.found, key=lambda tried: tried.time_s):
            known = (self.problem, tried.order, self.budget_bytes, self.flat, self.movables)
            places = _Places(*known, tried.saved_bytes, tried.staying_bytes).settled()
            assert places is not None
            schedule, timeline = overlapped(self.problem, places.schedule(), self.budget_bytes)
            assert timeline.peak_bytes <= self.budget_bytes
            host = place_host_copies(self.problem.graph, schedule)
            if self._fits_host(host.size_bytes) and timeline.time_s < self.under_s:
                copies = any(isinstance(step, (steps.Offload, steps.Prefetch)) for step in schedule)
                return Offloaded(f"{tried.solver}, with offload" if copies else tried.solver, schedule, timeline)
        return None

    def _try(self, solver: str, order: Sequence[int]) -> bool:
        """Whether an order keeps both budgets and is the fastest so far."""
        faster = False
        for places in placements(self.problem, order, self.budget_bytes, self.flat, self.movables):
            time_s, host_peak_bytes = places.lanes()
            if self.overlaps:
                time_s = overlapped(self.problem, places.schedule(), self.budget_bytes)[1].time_s
            if time_s < self.under_s and self._fits_host(host_peak_bytes):
                self.found.append(_Tried(time_s, solver, order, places.saved_bytes, places.staying_bytes))
                faster |= time_s < self.limit_s
                self.limit_s = min(self.limit_s, time_s)
        return faster

    def _fits_host(self, slab_bytes: int) -> bool:
        """Whether there is host memory for a slab of this size for each microbatch in flight."""
        return pinned_bytes(slab_bytes) * self.problem.in_flight <= self.host_bytes


def placements(
    problem: Problem, order: Sequence[int], budget_bytes: int, flat: Flat, movables: Movables
) -> Iterator[_Places]:
    """Copies that bring an order within the budget, in one way or in several.

    There are several where microbatches wait, one for each amount that they save, or where parameters may stay on the
    device between steps, one for each amount of those.
    """
    amounts, known = [(0, 0)], (problem, order, budget_bytes, flat, movables)
    if problem.in_flight > 1:
        amounts = [(n, 0) for n in _Places(*known).amounts_saved()]
    elif movables.lasting.any():
        amounts = [(0, n) for n in _Places(*known).amounts_staying()]
    for saved_bytes, staying_bytes in amounts:
        places = _Places(*known, saved_bytes, staying_bytes).settled()
        if places is not None:
            yield places


def least_bytes(problem: Problem, *orders: Sequence[int]) -> int:
    """The smallest budget that copies can bring one of these orders to: all is away that the op does not touch."""
    flat, movables = flatten(problem), movables_of(problem)
    found = []
    for order in orders:
        places = _Places(problem, order, 0, flat, movables)
        close_all(movables, places.gaps, places.held)
        peak_bytes = int(places.held.max()) + (problem.in_flight - 1) * places.saved_now()
        found.append(max(problem.resident_bytes, places.later_bytes, peak_bytes))
    return min(found)


@dataclass(slots=True)
class _Places:
    """One order, the bytes held at each position, and the gaps, of which some are closed.

    - saved_bytes: the most that each microbatch may save that waits beside the one whose order this is.
    - staying_bytes: the most that may stay on the device between steps.
    - least_share: of the budget, below which values don't leave.
    """

    problem: Problem
    steps: Sequence[int]
    budget_bytes: int
    flat: Flat
    movables: Movables
    saved_bytes: int = 0
    staying_bytes: int = 0
    least_share: float = _LEAST_SHARE
    order: Ints = field(init=False)
    turn: int = field(init=False)  # position of the boundary
    held: Ints = field(init=False)  # by one microbatch
    limits: Ints = field(init=False)  # of the same
    end_bytes: int = field(init=False)  # when the step ends, what stays left out
    staying: Ints = field(init=False)  # on the device between steps
    begin_s: Floats = field(init=False)  # of each position, and the end of the last; without waiting
    gaps: Gaps = field(init=False)
    read_to: Ints = field(init=False)  # by gradient the position after which its parameters are updated, -1 elsewhere

    def __post_init__(self) -> None:
        self.order = np.array(self.steps, dtype=np.int64)
        self.turn = self.steps.index(BOUNDARY)
        self.held = np.zeros(len(self.order), dtype=np.int64)
        alone = self.flat.arrays._replace(update_bytes=_VAST, others=0)
        peak, _position, _time_s = replay(alone, self.order, self.held)
        assert peak >= 0, "the order is not legal"
        self.end_bytes = peak - _VAST
        seconds = np.where(self.order == BOUNDARY, 0.0, self.movables.time_s[self.order])
        self.begin_s = np.concatenate([[0.0], np.cumsum(seconds)])
        values, ops = self.problem.graph.values, self.problem.graph.ops
        self.read_to = np.full(len(values), -1, dtype=np.int64)
        updated = update_positions(self.problem.graph, self.steps)
        made = {v: p for p, op in enumerate(self.steps) if op != BOUNDARY for v in ops[op].outputs if updated}
        for position, gradients in updated.items():  # they stay until their parameters are read for the last time
            self.read_to[gradients] = position
            for g in gradients:
                if values[g].home == "device" and made[g] < position:
                    self.held[made[g] + 1 : position + 1] += 0 if values[g].held else values[g].size_bytes
                    self.held[position] += values[g].update_bytes
        least_bytes = int(self.least_share * self.budget_bytes)
        staying, room_bytes, sizes = list[int](), self.staying_bytes, self.movables.size_bytes
        for v in dict.fromkeys(v for op in self.steps if op >= 0 for v in ops[op].inputs) if room_bytes else ():
            if self.movables.lasting[v] and sizes[v] <= room_bytes:  # most often what is read first was read last, too
                staying.append(v)
                room_bytes -= int(sizes[v])
        self.staying = np.array(staying, dtype=np.int64)
        self.gaps = find_gaps(self.movables, self.order, least_bytes, self.held, self.staying)
        others = self.problem.in_flight - 1
        self.limits = np.full(len(self.order), self.budget_bytes - others * self.saved_bytes, dtype=np.int64)
        if others:
            at_turn = self.saved_bytes + int(self.held[self.turn]) - self.saved_now()
            self.limits[self.turn] = min(int(self.limits[self.turn]), at_turn)

    def amounts_staying(self) -> list[int]:
        """Bytes that may stay on the device between steps: none, and up to all that there is room for then."""
        room_bytes = self.budget_bytes - self.end_bytes - self.problem.bytes_after(stays=True)
        return [0, *(room_bytes * share // _STAYING for share in range(1, _STAYING + 1) if room_bytes > 0)]

    @property
    def later_bytes(self) -> int:
        """Bytes held after the step, while the optimizer steps and the next batch arrives; 0 where neither matters."""
        after_bytes = self.problem.bytes_after(stays=len(self.staying) > 0)
        return self.end_bytes + int(self.movables.size_bytes[self.staying].sum()) + after_bytes if after_bytes else 0

    def saved_now(self) -> int:
        """Bytes that one microbatch holds while it waits, inputs and outputs included."""
        a = self.flat.arrays
        return int(self.held[self.turn]) - a.tangent_bytes - a.base_bytes + a.input_bytes

    def amounts_saved(self) -> list[int]:
        """What microbatches that wait may save: all that fits, and less and less.

        It is less as values leave, those first that are read again last.
        """
        gaps, sizes = self.gaps, self.movables.size_bytes
        leaving = np.nonzero(~gaps.closed & (gaps.start < self.turn) & (self.turn < gaps.stop))[0]
        leaving = leaving[np.lexsort((-sizes[gaps.value[leaving]], -gaps.stop[leaving]))]
        saved = self.saved_now() - np.concatenate([[0], np.cumsum(sizes[gaps.value[leaving]])])
        beside_bytes = int(self.held[self.turn]) - self.saved_now()
        fitting = np.unique(saved[beside_bytes + self.problem.in_flight * saved <= self.budget_bytes])
        if not len(fitting):
            return []
        spread = np.linspace(fitting[0], fitting[-1], min(_SAVED, len(fitting)))
        return [int(amount) for amount in np.unique(fitting[np.searchsorted(fitting, spread)])[::-1]]

    def settled(self) -> _Places | None:
        """With gaps closed until nothing is over the budget, and copies timed; None where that fails.

        Small values leave only where nothing else helps: many of them take long to plan.
        """
        if self.later_bytes > self.budget_bytes:
            return None
        if not evict(self.movables, self.gaps, self.limits, self.held):
            return replace(self, least_share=0.0).settled() if self.least_share else None
        settle(self.movables, self.gaps, self.begin_s, self.limits, self.held)
        return self

    def lanes(self) -> tuple[float, int]:
        """Seconds, and the most host memory that one microbatch holds: what `simulate` says of the schedule."""
        rate = self.problem.host_update_s_per_byte
        return lanes(self.movables, self.order, self.gaps, self.read_to, rate, self.problem.in_flight)

    def schedule(self) -> Schedule:
        """Steps of the order with the copies among them."""
        values, end = self.problem.graph.values, len(self.steps)
        leaves, updates, fetches, waits, before, after = (defaultdict[int, list[steps.Step]](list) for _ in range(6))
        gaps, closed = self.gaps, np.nonzero(self.gaps.closed)[0]
        last = {}
        for g in closed[np.lexsort((gaps.stop[closed], gaps.start[closed]))].tolist():
            last[int(gaps.value[g]), int(gaps.made[g])] = g
        for g in closed[np.lexsort((gaps.value[closed], gaps.stop[closed]))].tolist():
            v, start, stop, gone = int(gaps.value[g]), int(gaps.start[g]), int(gaps.stop[g]), int(gaps.gone[g])
            if gaps.copies[g]:
                after[start].append(steps.Offload(v))
                leaves[gone] += [steps.Wait(v), steps.Drop(v)]
                if values[v].updates and values[v].home == "host":  # once the device has read the parameter last
                    updates[max(gone, int(self.read_to[v]) + 1)].append(steps.SurfaceGrads((v,)))
            elif start >= 0:
                leaves[gone].append(steps.Drop(v))
            if stop == end:
                continue
            fetches[int(gaps.back[g])].append(steps.Prefetch(v))
            waits[stop].append(steps.Wait(v))
            if values[v].home == "device" and last[v, int(gaps.made[g])] == g:
                waits[stop].append(steps.DropHost(v))
        for events in (leaves, updates, fetches, waits):
            for at, inserted in events.items():
                before[at] += inserted
        found: list[steps.Step] = [steps.Stay(v) for v in self.staying.tolist()]
        late: list[int] = []
        position = 0
        for step in schedule_of(self.problem.graph, tuple(self.steps)):
            if isinstance(step, (steps.Compute, steps.Boundary)):
                found += after.get(position - 1, ())
                found += before.get(position, ())
                position += 1
            if isinstance(step, steps.Drop) and values[step.value].home == "host":
                continue
            if isinstance(step, steps.SurfaceGrads):
                late += [v for v in step.values if values[v].home == "host" and not values[v].updates]
                step = steps.SurfaceGrads(tuple(v for v in step.values if values[v].home != "host"))
                if not step.values:
                    continue
            found.append(step)
        found += [*after.get(position - 1, ()), *before.get(position, ())]
        if late:
            found.append(steps.SurfaceGrads(tuple(late)))
        return tuple(found)
