"""Copies to and from host memory, and gathers, added to an order of ops so that it fits a budget on the device.

An order of ops says what is recomputed; this says what of the rest leaves the device for a while. Between two uses of a
value lies a **gap** during which its memory can serve others. `place_copies` sweeps over the order and, wherever too
much is held, closes the gap whose next use is farthest away (Belady's rule, optimal for the number of copies of equal
size). A copy out begins right after the use before the gap; a copy in begins as late as its direction of the link
allows without keeping anybody waiting, and as early as memory allows where it doesn't. Parameters that live on the host
are values whose copy out costs nothing; their gradients leave once they are final. So are sharded parameters, which
are gathered from all ranks instead, in a lane of their own.

What is recomputed and what is copied is decided together by trying every order of a front: the less an order
recomputes, the more has to be copied. `simulate` says what each comes to.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from memplan.problem import Problem
from memplan.schedule import (
    BOUNDARY,
    Boundary,
    Compute,
    Drop,
    DropHost,
    Offload,
    Prefetch,
    Schedule,
    Step,
    SurfaceGrads,
    Timeline,
    Wait,
    schedule_of,
    update_positions,
)
from memplan.simulate import simulate
from memplan.solvers.bound import backward_bytes, needed_after, needed_bytes
from memplan.solvers.flat import Flat, Floats, Ints, flatten
from memplan.solvers.front import Candidate
from memplan.solvers.mincut import saved_sets
from memplan.solvers.replay import replay
from memplan.solvers.sketch import thin

_VAST = 1 << 60
_SPREAD = 12  # orders tried, spread over a front
_ROUNDS = 8  # of up to four orders around the best
_LEAST_SHARE = 1e-4  # of the budget: smaller values stay where they are


@dataclass(frozen=True, slots=True)
class Offloaded:
    """A schedule with copies, and what it comes to. solver: what its order started from."""

    solver: str
    schedule: Schedule
    timeline: Timeline


def solve_offload(
    problem: Problem, points: Sequence[Candidate], budget_bytes: int, host_bytes: int, under_s: float = float("inf")
) -> Offloaded | None:
    """The fastest of these orders with copies that keep both budgets; None where none takes less than `under_s`.

    points: of a front, peaks rising and times falling. Some that are spread over it are tried, and what fits without
    copies; then ever closer to the best: with less recomputed there is more to be copied, until ops wait for that.
    host_bytes: for values beside the parameters that live on the host.
    """
    search = _Search(problem, points, budget_bytes, host_bytes, under_s, flatten(problem))
    positions = {id(point): index for index, point in enumerate(points)}
    tried = {positions[id(point)] for point in thin(points, _SPREAD)}
    tried |= set([index for index, point in enumerate(points) if point.peak_bytes <= budget_bytes][-1:])
    search.tries(tried)
    for _ in range(_ROUNDS):
        if search.best_index is None:
            break
        before = max((i for i in tried if i < search.best_index), default=search.best_index)
        after = min((i for i in tried if i > search.best_index), default=search.best_index)
        near = {(3 * a + b) // 4 for a, b in ((before, search.best_index), (after, search.best_index))}
        near |= {(a + search.best_index) // 2 for a in (before, after)}
        if near <= tried:
            break
        search.tries(near - tried)
        tried |= near
    return search.best


@dataclass(slots=True)
class _Search:
    """The best so far."""

    problem: Problem
    points: Sequence[Candidate]
    budget_bytes: int
    host_bytes: int
    under_s: float
    flat: Flat
    best: Offloaded | None = None
    best_index: int | None = None

    def tries(self, indices: Collection[int]) -> None:
        """Try points, the fastest first, as long as one may be better."""
        for index in sorted(indices, key=lambda i: self.points[i].time_s):
            candidate = self.points[index]
            if candidate.time_s >= self.under_s:
                break
            schedule = place_copies(self.problem, candidate.order, self.budget_bytes, self.flat)
            if schedule is None:
                continue
            timeline = simulate(self.problem, schedule)
            assert timeline.peak_bytes <= self.budget_bytes
            if timeline.host_peak_bytes <= self.host_bytes and timeline.time_s < self.under_s:
                copies = any(isinstance(step, (Offload, Prefetch)) for step in schedule)
                solver = f"{candidate.solver}, with offload" if copies else candidate.solver
                self.best, self.best_index = Offloaded(solver, schedule, timeline), index
                self.under_s = timeline.time_s


def place_copies(
    problem: Problem, order: Sequence[int], budget_bytes: int, flat: Flat | None = None
) -> Schedule | None:
    """A schedule of this order that peaks within the budget on the device; None where copies can't bring it there.

    flat: the problem, where it was flattened before.
    """
    places = _Places(problem, order, budget_bytes, flat or flatten(problem))
    return places.schedule() if places.evict() else None


def least_bytes(problem: Problem, order: Sequence[int]) -> int:
    """The smallest budget that copies can bring this order to: everything is away that the op does not touch."""
    places = _Places(problem, order, 0, flatten(problem))
    for gap in places.gaps:
        places.close(gap, gap.start + 1)
    return max(problem.resident_bytes, places.update_peak_bytes, int(places.held.max()))


def gather_bound_s(problem: Problem) -> float:
    """No schedule takes less: every sharded parameter that an op reads is gathered once at least."""
    gather, values = problem.gather, problem.graph.values
    assert gather is not None
    read = {v for op in problem.graph.ops for v in op.inputs if values[v].home == "sharded"}
    return sum(gather.latency_s + values[v].size_bytes / gather.bytes_per_s for v in read)


def offload_bound_s(problem: Problem, budget_bytes: int, cuts: int = 16) -> float:
    """No schedule with copies takes less.

    At any moment of the backward pass, what the rest of it reads is on the device, is on the host, or is computed
    later. What is on the host by then was copied out before: so a step of T seconds has at most (T - seconds of what
    comes after) times the link's speed more room than the budget leaves beside what nothing can free, and each minimum
    cut is a line that limits T from below. The same holds for copying back. Every parameter that lives on the host is
    fetched once at least, every gradient of one sent back, and the CPU updates with each: beside the step, or after it.
    """
    link = problem.link
    assert link is not None
    graph, values, time_s = problem.graph, problem.graph.values, problem.costs.time_s
    read = {v for op in graph.ops for v in op.inputs}
    fetched = sum(values[v].size_bytes for v in read if values[v].resident and values[v].home == "host")
    sent = sum(v.size_bytes for v in values if v.role == "gradient" and v.home == "host")
    update_s = sent * problem.host_update_s_per_byte
    beside = any(v.updates for v in values if v.role == "gradient" and v.home == "host")
    baseline_s = problem.baseline_time_s
    found = [baseline_s, fetched / link.to_device_bytes_per_s, sent / link.to_host_bytes_per_s]
    flat = flatten(problem, updates=False)
    forward_s = sum(t for t, late in zip(time_s, flat.arrays.deferrable) if not late)
    forward_s -= sum(time_s[graph.boundary :])  # no op of the backward pass is deferrable
    for first, fixed_bytes in _moments(flat):
        after_s = sum(time_s[first:])
        before_s = forward_s + sum(time_s[graph.boundary : first])
        for cut in saved_sets(flat, needed_after(flat, first), cuts):
            slope = cut.line_s_per_byte
            beyond_s = cut.line_s - slope * (budget_bytes - fixed_bytes)
            for speed, other_s in ((link.to_host_bytes_per_s, after_s), (link.to_device_bytes_per_s, before_s)):
                found.append((baseline_s + beyond_s + slope * speed * other_s) / (1 + slope * speed))
    return max(*found, update_s) if beside else max(found) + update_s


def _moments(flat: Flat) -> list[tuple[int, int]]:
    """(backward op, bytes that nothing can free then): the boundary, and where most is held."""
    boundary = flat.arrays.boundary
    fixed = backward_bytes(flat)
    if boundary == flat.op_count:
        return [(boundary, int(fixed[0]))]
    fullest = int((fixed[1:] + needed_bytes(flat)).argmax())
    return [(boundary, int(fixed[0])), (boundary + fullest, int(fixed[1 + fullest]))]


@dataclass(slots=True)
class _Gap:
    """Positions between two uses of a value.

    start: position of the use before, -1 at the start of the step. stop: of the use after, one past the last position
    where there is none. gone: the first position at which the value need not be there any more. back: from which it
    is there again. copies: whether leaving takes a copy (it is not on the host yet).
    """

    value: int
    start: int
    stop: int
    copies: bool
    gone: int = -1
    back: int = -1


@dataclass(slots=True)
class _Places:
    """One order, the bytes held at each position, and the gaps that were closed."""

    problem: Problem
    order: Sequence[int]
    budget_bytes: int
    flat: Flat
    held: Ints = field(init=False)
    update_peak_bytes: int = field(init=False)  # while the optimizer steps
    begin_s: Floats = field(init=False)  # of each position, and the end of the last; without waiting
    gaps: list[_Gap] = field(init=False)
    closed: list[_Gap] = field(init=False)
    makers: dict[int, list[int]] = field(init=False)  # positions of the runs that make a value
    updated: dict[int, list[int]] = field(init=False)  # gradients by the position after which parameters are updated

    def __post_init__(self) -> None:
        order = np.array(self.order, dtype=np.int64)
        self.held = np.zeros(len(order), dtype=np.int64)
        peak, _position, _time_s = replay(self.flat.arrays._replace(update_bytes=_VAST), order, self.held)
        assert peak >= 0, "the order is not legal"
        updating = peak - _VAST + self.problem.update_bytes
        self.update_peak_bytes = updating if self.problem.update_bytes else 0
        seconds = [0.0 if op == BOUNDARY else self.problem.costs.time_s[op] for op in self.order]
        self.begin_s = np.concatenate([[0.0], np.cumsum(seconds)])
        self._count_late_updates()
        self.gaps, self.closed = [], []
        self.makers = defaultdict(list)
        for position, index in enumerate(self.order):
            for v in () if index == BOUNDARY else self.problem.graph.ops[index].outputs:
                self.makers[v].append(position)
        self._find_gaps()

    def _count_late_updates(self) -> None:
        """Gradients whose parameters are read once more after they are there: they stay, and their update is later."""
        values = self.problem.graph.values
        made = {v: p for p, op in enumerate(self.order) if op != BOUNDARY for v in self.problem.graph.ops[op].outputs}
        self.updated = update_positions(self.problem.graph, self.order)
        for position, gradients in self.updated.items():
            for g in gradients:
                if values[g].home == "device" and made[g] < position:
                    self.held[made[g] + 1 : position + 1] += 0 if values[g].held else values[g].size_bytes
                    self.held[position] += values[g].update_bytes

    # -- which gaps -------------------------------------------------------------------------------------------------

    def _find_gaps(self) -> None:
        values, end = self.problem.graph.values, len(self.order)
        least_bytes = int(_LEAST_SHARE * self.budget_bytes)
        for v, touched in self._instances():
            value = values[v]
            if value.fetched:
                self.held += value.size_bytes
                self.close(_Gap(v, -1, touched[0], False))
                self.close(_Gap(v, touched[-1], end, False))
            elif value.home == "host":  # a gradient: it stays until it is copied out
                self.held[touched[-1] + 1 :] += value.size_bytes
                self.gaps.append(_Gap(v, touched[-1], end, True))
            movable = value.fetched or self.problem.link is not None
            if movable and value.size_bytes > least_bytes and not value.held:
                pairs = pairwise(touched)
                self.gaps += [_Gap(v, a, b, not value.fetched) for a, b in pairs if b > a + 1]

    def _instances(self) -> list[tuple[int, list[int]]]:
        """(value, positions at which it is made or read) of everything that may leave the device."""
        graph = self.problem.graph
        present: dict[int, list[int]] = {}
        found: list[tuple[int, list[int]]] = []
        for position, index in enumerate(self.order):
            if index == BOUNDARY:
                for v in graph.outputs:
                    present[v].append(position)
                continue
            op = graph.ops[index]
            for v in dict.fromkeys(op.inputs):
                value = graph.values[v]
                if v in present:
                    present[v].append(position)
                elif value.fetched:
                    present[v] = [position]
                    found.append((v, present[v]))
            for v in op.outputs:
                value = graph.values[v]
                if value.reuses is not None and value.reuses in present:
                    touched = present[value.reuses]
                    if touched[-1] != position:
                        touched.append(position)
                if not value.resident:
                    present[v] = [position]
                    found.append((v, present[v]))
        return found

    def close(self, gap: _Gap, gone: int = 0) -> None:
        """Let a value be away from position `gone` to its next use; from the start of the gap where leaving is free."""
        if not gap.copies:
            gone = gap.start + 1
        gap.gone = gone
        gap.back = gap.stop
        self.held[gone : gap.stop] -= self.problem.graph.values[gap.value].size_bytes
        self.closed.append(gap)

    def evict(self) -> bool:
        """Close gaps until nothing is over the budget; those of next uses farthest away first."""
        if self.update_peak_bytes > self.budget_bytes:
            return False
        values = self.problem.graph.values
        waiting = sorted(self.gaps, key=lambda gap: gap.start, reverse=True)
        open_gaps: list[tuple[int, int, int, _Gap]] = []
        for position in range(len(self.order)):
            while waiting and waiting[-1].start < position:
                gap = waiting.pop()
                heapq.heappush(open_gaps, (-gap.stop, -values[gap.value].size_bytes, gap.value, gap))
            while self.held[position] > self.budget_bytes:
                if not open_gaps or open_gaps[0][3].stop <= position:
                    return False
                self.close(heapq.heappop(open_gaps)[3], position)
        leaving = [gap for gap in self.gaps if gap.stop == len(self.order) and gap.gone < 0]
        for gap in leaving:  # gradients that nobody had to make room for
            self.close(gap, len(self.order))
        return True

    # -- when copies run --------------------------------------------------------------------------------------------

    def _time_copies_out(self) -> None:
        """Let values go as soon as their copy is done, which may be before their room is needed."""
        link = self.problem.link
        free_s = 0.0
        for gap in sorted((g for g in self.closed if g.copies), key=lambda g: (g.start, g.value)):
            assert link is not None
            size_bytes = self.problem.graph.values[gap.value].size_bytes
            free_s = max(free_s, float(self.begin_s[gap.start + 1]))
            free_s += link.latency_s + size_bytes / link.to_host_bytes_per_s
            done = int(np.searchsorted(self.begin_s, free_s, side="left"))
            gone = max(gap.start + 1, min(done, gap.gone))
            self.held[gone : gap.gone] -= size_bytes
            gap.gone = gone

    def _time_copies_in(self) -> None:
        """Begin to fetch as late as keeps nobody waiting, or as early as there is room."""
        begin_s = self.begin_s.tolist()
        coming = sorted((g for g in self.closed if g.stop < len(self.order)), key=lambda g: (g.stop, g.value))
        wanted: dict[int, int] = {}
        lane_s = {"sharded": float("inf"), "host": float("inf")}
        for gap in reversed(coming):
            lane = self._lane(gap)
            lane_s[lane] = min(lane_s[lane], begin_s[gap.stop]) - self._coming_s(gap)
            wanted[id(gap)] = max(0, bisect_right(begin_s, lane_s[lane]) - 1)
        earliest = 0
        for gap in coming:
            size_bytes = self.problem.graph.values[gap.value].size_bytes
            start = max(wanted[id(gap)], gap.gone, earliest)
            crowded = np.nonzero(self.held[start : gap.stop] + size_bytes > self.budget_bytes)[0]
            gap.back = min(gap.stop, start + int(crowded[-1]) + 1 if len(crowded) else start)
            self.held[gap.back : gap.stop] += size_bytes
            earliest = gap.back

    def _lane(self, gap: _Gap) -> str:
        """Where a value comes from: all ranks or the host."""
        return "sharded" if self.problem.graph.values[gap.value].home == "sharded" else "host"

    def _coming_s(self, gap: _Gap) -> float:
        """Seconds that it takes to come."""
        link, gather = self.problem.link, self.problem.gather
        size_bytes = self.problem.graph.values[gap.value].size_bytes
        if self._lane(gap) == "sharded":
            assert gather is not None
            return gather.latency_s + size_bytes / gather.bytes_per_s
        assert link is not None
        return link.latency_s + size_bytes / link.to_device_bytes_per_s

    # -- the schedule -----------------------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Steps of the order with the copies among them."""
        if self.closed:
            self._keep_host_copies()
            self._time_copies_out()
            self._time_copies_in()
        before, after = self._events()
        values = self.problem.graph.values
        steps: list[Step] = []
        late: list[int] = []
        position = 0
        for step in schedule_of(self.problem.graph, tuple(self.order)):
            if isinstance(step, (Compute, Boundary)):
                steps += after[position - 1]
                steps += before[position]
                position += 1
            if isinstance(step, Drop) and values[step.value].home == "host":
                continue
            if isinstance(step, SurfaceGrads):
                late += [v for v in step.values if values[v].home == "host" and not values[v].updates]
                step = SurfaceGrads(tuple(v for v in step.values if values[v].home != "host"))
                if not step.values:
                    continue
            steps.append(step)
        steps += after[position - 1] + before[position]
        if late:
            steps.append(SurfaceGrads(tuple(late)))
        return tuple(steps)

    def _keep_host_copies(self) -> None:
        """A value that leaves a second time is on the host already."""
        seen: set[tuple[int, int]] = set()
        for gap in sorted((g for g in self.closed if g.copies), key=lambda g: g.start):
            instance = (gap.value, self._made_before(gap))
            if instance in seen:
                gap.copies = False
                self.held[gap.start + 1 : gap.gone] -= self.problem.graph.values[gap.value].size_bytes
                gap.gone = gap.start + 1
            seen.add(instance)

    def _made_before(self, gap: _Gap) -> int:
        """The position of the run that made what leaves in this gap."""
        makers = self.makers[gap.value]
        return makers[bisect_right(makers, gap.start) - 1] if makers else -1

    def _events(self) -> tuple[dict[int, list[Step]], dict[int, list[Step]]]:
        """Steps to insert before and after the op at each position."""
        values, end = self.problem.graph.values, len(self.order)
        leaves: dict[int, list[Step]] = defaultdict(list)
        fetches: dict[int, list[Step]] = defaultdict(list)
        waits: dict[int, list[Step]] = defaultdict(list)
        after: dict[int, list[Step]] = defaultdict(list)
        updates: dict[int, list[Step]] = defaultdict(list)
        read_to = {v: position for position, gradients in self.updated.items() for v in gradients}
        last: dict[tuple[int, int], _Gap] = {}
        for gap in sorted(self.closed, key=lambda g: (g.start, g.stop, g.value)):
            last[gap.value, self._made_before(gap)] = gap
        for gap in sorted(self.closed, key=lambda g: (g.stop, g.value)):
            v = gap.value
            if gap.copies:
                after[gap.start].append(Offload(v))
                leaves[gap.gone] += [Wait(v), Drop(v)]
                if values[v].updates:  # on the host, once the device has read the parameter for the last time
                    updates[max(gap.gone, read_to[v] + 1)].append(SurfaceGrads((v,)))
            elif gap.start >= 0:
                leaves[gap.gone].append(Drop(v))
            if gap.stop == end:
                continue
            fetches[gap.back].append(Prefetch(v))
            waits[gap.stop].append(Wait(v))
            if values[v].home == "device" and last[v, self._made_before(gap)] is gap:
                waits[gap.stop].append(DropHost(v))
        positions = range(end + 1)
        return defaultdict(list, {p: leaves[p] + updates[p] + fetches[p] + waits[p] for p in positions}), after
