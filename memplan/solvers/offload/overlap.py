"""Collectives that run beside the ops: starts and waits of a finished schedule, moved apart as far as memory allows.

A schedule of `schedule_of` waits for each collective at once:

    layer 1   pack   start   wait   unpack   layer 2
    pack   start   layer 1   wait   unpack   layer 2

In the second line, what only feeds the collective (its **head**) and its start run earlier. The wait stays where the
result is read first. Nobody needs the result of a reduction of gradients, so its wait comes later instead, with what
only follows from the result (its **tail**). What a collective reads and writes is held from its start to its wait.

As for copies to the device (`fit_copies`), a start comes as late as the network allows without keeping anybody
waiting, and as early as memory allows where that is not enough. Other ops keep their order, and none is added.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from memplan.problem import schedule as schedules
from memplan.problem.data import Graph, Op, Problem
from memplan.problem.schedule import Boundary, Compute, Drop, Prefetch, Schedule, Step, SurfaceGrads, Timeline, Wait
from memplan.problem.simulate import simulate
from memplan.solvers.orders.flat import Flat, Floats, Ints
from memplan.solvers.orders.replay import prune

_AHEAD = (64, 4)  # gathers that may have started and are not waited for
_LONGEST = 64  # ops of a head or a tail
_ROUNDS = 4  # of rooms that are tried
_REPEATED = 1.5  # gathers of parameters run again in backward


def hides(problem: Problem) -> bool:
    """Whether collectives are expected to hide behind ops, so that running one again costs a schedule no time.

    Otherwise seconds of the network count like those of ops.
    """
    return _REPEATED * problem.network_s <= problem.without_network.baseline_time_s


def overlapped(problem: Problem, schedule: Schedule, budget_bytes: int) -> tuple[Schedule, Timeline]:
    """The schedule with starts and waits of its collectives moved apart, within the budget.

    It is returned as it is where that does not make it faster. schedule: a legal one that peaks within the budget, and
    waits for each collective at once.

    Gathers that start as early as they can may leave no room for gradients that wait to be reduced. So fewer of them
    under way at once are tried, too.
    """
    before = simulate(problem, schedule)
    if not problem.network_s:
        return schedule, before
    overlap, best, line = _Overlap(problem, schedule, before), schedule, before
    for ahead in _AHEAD:
        room_bytes = budget_bytes
        for _ in range(_ROUNDS):  # gradients that are handed over later may be held longer, which is not counted
            moved = overlap.moved(room_bytes, ahead)
            after = simulate(problem, moved)
            if after.peak_bytes <= budget_bytes:
                best, line = (moved, after) if after.time_s < line.time_s else (best, line)
                break
            room_bytes -= after.peak_bytes - budget_bytes
    return best, line


@dataclass(slots=True)
class _Flight:
    """One run of a collective. All positions are those of steps in the schedule that is given.

    - start: of the step that starts it. The wait comes next, then `drops` of what it reads.
    - use: the first step that can't come before the wait.
    - limit: the same where the tail moves with the wait; None where there are other readers.
    - head, tail: steps, in order. The start is in the head, or else in the tail of another (`parent`): where replicas
      have parts of gradients (HSDP), these are reduced twice.
    - earliest: where the head can run at the earliest.
    - at, until: the step before which the head runs, and that before which wait and tail run.
    """

    op: Op
    start: int
    drops: list[int]
    use: int
    limit: int | None = None
    head: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    parent: _Flight | None = None
    earliest: int = 0
    at: int = 0
    until: int = 0


class _Overlap:
    """Moves the collectives of one schedule.

    - clock: when each step begins, and when the last ends. At first the network takes no time; stalls are added.
    - held, live: bytes while each step runs, and before it. What is moved is added.
    - ran: the op that each step runs.
    - touching: by value, steps that read, write, overwrite or free it. making: those after which it is there.
    - lane: (position, number, seconds) of starts, in order.
    """

    def __init__(self, problem: Problem, schedule: Schedule, timeline: Timeline) -> None:
        self.problem, self.graph, self.steps = problem, problem.graph, schedule
        self.turn, self.end = schedule.index(Boundary()), len(schedule)
        self.held_before: Ints = np.array(timeline.peak_bytes_at, dtype=np.int64)
        self.live_before: Ints = np.array((0, *timeline.live_bytes), dtype=np.int64)
        runs = {position: step.op for position, step in enumerate(schedule) if isinstance(step, Compute)}
        self.ran = {position: self.graph.ops[op] for position, op in runs.items()}
        self.time_s = {position: problem.costs.time_s[op] for position, op in runs.items()}
        self.scratch_bytes = {position: problem.costs.scratch_bytes[op] for position, op in runs.items()}
        self.computing = [p for p, op in self.ran.items() if not op.is_asynchronous]
        seconds = np.zeros(self.end)
        seconds[self.computing] = [self.time_s[p] for p in self.computing]
        self.begin_s: Floats = np.concatenate([[0.0], np.cumsum(seconds)])
        self.touching: dict[int, list[int]] = defaultdict(list)
        self.making: dict[int, list[int]] = defaultdict(list)
        self.surfacing: dict[int, int] = {}
        for position, step in enumerate(schedule):
            for value in dict.fromkeys(self._touched(step)):
                self.touching[value].append(position)
            made: Iterable[int] = (step.value,) if isinstance(step, (Prefetch, Wait)) else ()
            if (ran := self.ran.get(position)) is not None:
                made = (*ran.outputs, *(effect.new for effect in ran.effects))
            for value in made:
                self.making[value].append(position)
            if isinstance(step, SurfaceGrads):
                self.surfacing |= dict.fromkeys(step.values, position)

    def moved(self, budget_bytes: int, ahead: int) -> Schedule:
        """The schedule with its collectives moved. ahead: gathers that may have started and are not waited for."""
        self.budget_bytes, flights = budget_bytes, self._flights()
        self.held, self.live, self.clock = self.held_before.copy(), self.live_before.copy(), self.begin_s.copy()
        self.lane = [(f.start, number, self.time_s[f.start]) for number, f in enumerate(flights)]
        latest_s, ends_s = np.inf, list[float]()  # of collectives, for nobody to wait for one or for later ones
        for flight in reversed(flights):
            if flight.limit is None:
                latest_s = min(latest_s, self.begin_s[flight.use])
            ends_s.insert(0, float(latest_s))
            latest_s -= self.time_s[flight.start]
        first, waits = 0, [0] * ahead
        for number, (flight, end_s) in enumerate(zip(flights, ends_s, strict=True)):
            if flight.limit is None:
                size_bytes, begin = self._read_bytes(flight), flight.until
                while flight.until < flight.use and self.held[flight.until] + size_bytes <= self.budget_bytes:
                    flight.until += 1  # the wait comes as late as there is room for what the collective reads
                self._add(begin, flight.until, size_bytes)
                late_s = self.clock[flight.until] - self.begin_s[flight.until]
                self._place_start(flight, number, max(first, waits[-ahead], flight.earliest), end_s + late_s)
                first = max(first, flight.at)
                waits.append(flight.until)
        for number, flight in enumerate(flights):
            if flight.limit is not None:
                if flight.parent is not None and flight.parent.until > flight.until:
                    self.lane.remove((flight.start, number, self.time_s[flight.start]))
                    flight.at = flight.until = flight.parent.until
                    insort(self.lane, (flight.at, number, self.time_s[flight.start]))
                self._sink(flight, number)
        return self._written(flights)

    def _touched(self, step: Step) -> Iterable[int]:
        match step:
            case Compute(index):
                op = self.graph.ops[index]
                yield from (*op.inputs, *op.outputs, *self.graph.overwritten(op))
                yield from (effect.new for effect in op.effects)
            case SurfaceGrads(gradients):
                yield from gradients
                yield from (parameter for g in gradients for parameter in self.graph.values[g].parameters)
            case Boundary():
                yield from self.graph.outputs
            case _ if (value := getattr(step, "value", None)) is not None:
                yield value

    def _flights(self) -> list[_Flight]:
        found = []
        for start, op in self.ran.items():
            if not op.is_asynchronous:
                continue
            after = start + 2
            while after < self.end and isinstance(drop := self.steps[after], Drop) and drop.value in op.inputs:
                after += 1
            drops = list(range(start + 2, after))
            ends = [self.turn if start < self.turn else self.end]
            for value in op.inputs:
                ends += [p for p in self.touching[value] if p >= after and not self._only_reads(p, value)][:1]
            limit = min(ends)
            use = min([limit, *[p for p in self.touching[op.outputs[0]] if p >= after][:1]])
            found.append(_Flight(op, start, drops, use, limit, at=start, until=after))
        by_start = {flight.start: flight for flight in found}
        for flight in reversed(found):
            children = self._find_tail(flight) if flight.start > self.turn else None
            within = [by_start[position] for position in children or ()]
            held = {p for child in within for p in child.drops}  # by children, until they are over
            flight.tail = [p for p in flight.tail if p not in held]
            read = [Drop(v) for child in within for v in child.op.inputs]
            if children is None or any(self.steps[p] in read for p in flight.tail) or not all(c.limit for c in within):
                flight.limit, flight.tail = None, []
                self._find_head(flight)
                continue
            for child in within:
                child.parent, flight.limit = flight, min(flight.limit or 0, child.limit or 0)
        return found

    def _only_reads(self, position: int, value: int) -> bool:
        op = self.ran.get(position)
        return op is not None and value in op.inputs and value not in self.graph.overwritten(op)

    def _is_plain(self, op: Op) -> bool:
        """Whether an op makes new values alone, and the same ones wherever it runs."""
        return not (op.is_collective or op.random or op.stays or self.graph.overwritten(op))

    def _find_head(self, flight: _Flight) -> None:
        """Find what only feeds the collective, from its start backwards."""
        first = self.turn + 1 if flight.start > self.turn else 0
        members, looked_at = {flight.start}, [flight.start]
        feeding = set[int]()  # steps after which an input of a member is there
        flight.earliest = first
        while looked_at:
            position = looked_at.pop()
            for value in self.ran[position].inputs:
                feeding.update([p for p in self.making[value] if p < position][-1:])
            op = self.ran[position]
            for value in (*op.outputs, *self.graph.overwritten(op)):  # an earlier run's are gone, unread
                earlier = [p for p in self.touching[value] if p < position]
                flight.earliest = max([flight.earliest, *(p + 1 for p in earlier[-1:])])
            while feeding and not looked_at:
                position = max(feeding)
                feeding.remove(position)
                if position >= first and len(members) < _LONGEST and self._only_feeds(position, members, flight):
                    members.add(position)
                    looked_at.append(position)
                elif isinstance(self.steps[position], Wait) and position - 1 in self.ran:
                    flight.earliest = flight.start  # that collective is waited for later
                else:
                    flight.earliest = max(flight.earliest, position + 1)
        made = {v for p in members - {flight.start} for v in self.ran[p].outputs}
        drops = {p for v in made for p in self.touching[v] if min(members) < p < flight.start} - self.ran.keys()
        flight.head = sorted(members | drops)

    def _only_feeds(self, position: int, members: set[int], flight: _Flight) -> bool:
        op = self.ran.get(position)
        if op is None or not self._is_plain(op):
            return False
        for value in op.outputs:
            again = next((p for p in self.making[value] if p > position), self.end)
            later = [p for p in self.touching[value] if position < p < again]
            freed = [p for p in later if isinstance(self.steps[p], Drop) and (p < flight.start or p in flight.drops)]
            if len(freed) != 1 or not set(later) <= members | set(freed):
                return False
        return True

    def _find_tail(self, flight: _Flight) -> list[int] | None:
        """Find what only follows from the collective. None where something else reads what comes of it.

        Gives the collectives that it starts, where their tails begin.
        """
        made, tail, children = {flight.op.outputs[0]}, set[int](), list[int]()
        reading = [p for p in self.touching[flight.op.outputs[0]] if p >= flight.until]
        while reading:
            position = min(reading)
            reading = [p for p in reading if p != position]
            op, step = self.ran.get(position), self.steps[position]
            if op is not None:
                plain = self._is_plain(op) or (op.is_asynchronous and not self.graph.overwritten(op))
                if len(tail) > _LONGEST or not plain or not made.issuperset(op.inputs):
                    return None
                tail.add(position)
                if op.is_asynchronous:
                    children.append(position)
                    continue
                made.update(op.outputs)
                reading += [p for v in op.outputs for p in self.touching[v] if p > position]
            elif isinstance(step, Drop):
                tail.add(position)
            elif not isinstance(step, SurfaceGrads):
                return None
        for value in made & self.surfacing.keys():
            together = self.steps[self.surfacing[value]]
            assert isinstance(together, SurfaceGrads)
            if len(together.values) > 1 and any(isinstance(self.steps[p], Drop) for p in self.touching[value]):
                return None
        flight.tail = sorted(tail)
        return children

    def _size_bytes(self, values: Iterable[int]) -> int:
        return sum(self.graph.values[v].size_bytes for v in values if self.graph.values[v].reuses is None)

    def _read_bytes(self, flight: _Flight) -> int:
        """What the collective reads and nobody after it."""
        freed = [step.value for p in flight.drops if isinstance(step := self.steps[p], Drop)]
        return sum(self.graph.values[v].size_bytes for v in freed)

    def _add(self, begin: int, end: int, size_bytes: int) -> None:
        self.held[begin:end] += size_bytes
        self.live[begin:end] += size_bytes

    def _end_s(self, at: int, number: int) -> float:
        """When the collective is over that is started before a step, after the others in the lane."""
        free_s = 0.0
        for position, other, time_s in self.lane:
            if (position, other) >= (at, number):
                break
            free_s = max(free_s, float(self.clock[position])) + time_s
        return max(free_s, float(self.clock[at]))

    def _stall(self, position: int, end_s: float) -> None:
        self.clock[position:] += max(0.0, end_s - float(self.clock[position]))

    def _place_start(self, flight: _Flight, number: int, first: int, latest_s: float) -> None:
        """Let the head run early enough, if there is room."""
        own = {v for p in flight.head if p in self.ran for v in self.ran[p].outputs}
        freed = {self.steps[p].value for p in flight.head if p not in self.ran}  # type: ignore[union-attr]
        size_bytes, at_once_bytes = self._size_bytes(own - freed), self._at_once_bytes(flight.head)
        time_s, head, place = self.time_s[flight.start], set(flight.head), flight.start
        self.lane.remove((flight.start, number, time_s))
        end_s = self._end_s(flight.start, number) + time_s
        for position in self.computing[bisect_left(self.computing, first) : bisect_left(self.computing, place)][::-1]:
            between = [p for p in range(position, place) if p not in head]
            if end_s <= latest_s or any(self.held[p] + size_bytes > self.budget_bytes for p in between):
                break
            place = position
            earlier_s = self._end_s(place, number) + time_s
            if place < flight.head[0] and earlier_s < end_s and self.live[place] + at_once_bytes <= self.budget_bytes:
                flight.at, end_s = place, earlier_s
        self._add(flight.at, flight.start, size_bytes)
        insort(self.lane, (flight.at, number, time_s))
        self._stall(flight.until, end_s)

    def _at_once_bytes(self, positions: list[int]) -> int:
        """The most that these steps take where they run together, beside what is there before."""
        if positions[-1] - positions[0] == len(positions) - 1:
            return int(self.held_before[positions[0] : positions[-1] + 1].max() - self.live_before[positions[0]])
        ran = [p for p in positions if p in self.ran]
        return self._size_bytes(v for p in ran for v in self.ran[p].outputs) + max(self.scratch_bytes[p] for p in ran)

    def _sink(self, flight: _Flight, number: int) -> None:
        """Let wait and tail come when the collective is over, if there is room."""
        assert flight.limit is not None
        ran = [p for p in flight.tail if p in self.ran]
        kept = self._size_bytes(v for p in ran for v in self.ran[p].outputs if v in self.surfacing)
        size_bytes = self._read_bytes(flight)
        if ran:
            size_bytes = max(0, size_bytes + self._size_bytes(flight.op.outputs) - kept)
        at_once_bytes = self._at_once_bytes(ran) if ran else 0
        end_s = self._end_s(flight.start, number) + self.time_s[flight.start]
        begin = place = flight.until
        later = self.computing[bisect_left(self.computing, begin) :]
        for position in [p for p in (*later, self.end) if p not in flight.tail and p <= flight.limit]:
            between = [p for p in range(place, position) if p not in flight.tail]
            if self.clock[flight.until] >= end_s or any(self.held[p] + size_bytes > self.budget_bytes for p in between):
                break
            place = position
            if self.live[place] + at_once_bytes <= self.budget_bytes:
                flight.until = place
        self._add(begin, flight.until, size_bytes)
        self._stall(flight.until, end_s)

    def _written(self, flights: list[_Flight]) -> Schedule:
        """The schedule with what was moved in its new place."""
        before: dict[int, list[Step]] = defaultdict(list)
        surfaced: dict[int, int] = {}  # by step that comes after tails: the flight with the last of them
        groups: list[list[int]] = []
        for number, flight in enumerate(flights):
            groups.append([flight.start + 1, *flight.drops, *(p for p in flight.tail if p < flight.until)])
            made = {v for p in flight.tail if p in self.ran for v in self.ran[p].outputs} | set(flight.op.outputs)
            for place in {self.surfacing[v] for v in made if flight.limit is not None and v in self.surfacing}:
                if max(place, flights[surfaced.get(place, number)].until) <= flight.until and place < flight.until:
                    surfaced[place] = number
        for position, number in surfaced.items():
            groups[number].append(position)
        for flight, group in zip(flights, groups, strict=True):
            before[flight.until] += [self.steps[p] for p in sorted(group)]
        gone = {p for group in groups for p in group}
        for flight in flights:
            if flight.at < flight.start:
                before[flight.at] += [self.steps[p] for p in flight.head]
                gone.update(flight.head)
        steps: list[Step] = []
        for position, step in enumerate(self.steps):
            steps += before[position]
            if position not in gone:
                steps.append(step)
        return (*steps, *before[self.end])


def unit_order(graph: Graph, flat: Flat) -> Ints:
    """The order in which units of sharded parameters run again before their backward, as FSDP2 does with checkpoints.

        gather 1, layer 1, gather 2, layer 2, head | head', gather 2, layer 2, layer 2', gather 1, layer 1, layer 1'

    Ops marked ' are those of backward. Other searches add up the seconds of ops and of the network. Where both run at
    the same time this order, and those with fewer repeated runs, may take less. A unit around others, as the root is,
    runs once. The order may not be legal: where a unit writes to buffers, what it reads is gone.
    """
    order = [*range(graph.boundary), schedules.BOUNDARY]
    again = _again(graph)
    for index in range(graph.boundary, len(graph.ops)):
        order += [i for i in again[index] if flat.arrays.rerunnable[i]]
        order.append(index)
    return prune(flat.arrays, np.array(order, dtype=np.int64))


def _again(graph: Graph) -> dict[int, list[int]]:
    """Forward ops of units, by the op of backward before which they run again."""
    forward, backward = range(graph.boundary), range(graph.boundary, len(graph.ops))
    paths = {graph.ops[i].layer for i in forward if graph.ops[i].is_asynchronous}  # of modules that are units
    units: dict[str, list[int]] = defaultdict(list)
    for index in forward:
        around = [path for path in paths if not path or f"{graph.ops[index].layer}.".startswith(f"{path}.")]
        if around:
            units[max(around, key=len)].append(index)
    again: dict[int, list[int]] = defaultdict(list)
    for unit in units.values():
        members = set(unit)
        read_outside = {v for i in forward if i not in members for v in graph.ops[i].inputs}
        inner = {v for i in unit for v in graph.ops[i].outputs} - read_outside
        first = next((i for i in backward if not inner.isdisjoint(graph.ops[i].inputs)), None)
        if first is not None and not any(unit[0] < other[0] < unit[-1] for other in units.values()):
            again[first] += unit
    return again
