"""Seconds of a schedule: ops one after the other, and beside them copies, collectives and updates by the CPU.

Each kind of work has a lane of its own. Gathers of sharded parameters (ZeRO 3) and collectives share the network.

Where several microbatches are in flight they share the lanes. In which order they run is a pipeline's own affair. What
is counted is that all go forward and then all go backward, as in GPipe: copies out have the forward passes to hide
behind, copies back the backward passes, and what one leaves running the next one has to wait for. Schedules that take
turns (1F1B) give copies more room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memplan.problem.data import Problem, total_s
from memplan.problem.schedule import Boundary, Compute, Drop, Offload, Prefetch, Schedule, SurfaceGrads, Wait

CopyDirection = Literal["out", "in", "network"]
Lane = CopyDirection | Literal["compute", "stall", "update"]


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """Something that takes a while.

    - lane: "compute" runs an op, "stall" is waiting; "out" copies to the host, "in" to the device; "network" runs
      collectives; "update" is the CPU's.
    - index: the op that runs, or the value that is copied, or whose parameter is updated, or the output of a
      collective; -1 of waiting.
    """

    lane: Lane
    index: int
    begin_s: float
    end_s: float


class _Lanes:
    """Where the clock stands, and how long each lane is taken.

    - time_s: now.
    - stall_s: of that, what was spent waiting.
    - spans: where what takes a while is noted, if anywhere.
    """

    def __init__(self, problem: Problem, spans: list[LaneSpan] | None = None) -> None:
        self.problem, self.spans = problem, spans
        self.time_s = self.stall_s = 0.0
        self._free_s: dict[CopyDirection, float] = {"out": 0.0, "in": 0.0, "network": 0.0}
        self._updated_s = 0.0  # when the CPU is done with updates

    def run(self, steps: Schedule, arriving: dict[int, float]) -> None:
        """Run steps of one microbatch. arriving: when its copies will be done."""
        values, ops, time_s = self.problem.graph.values, self.problem.graph.ops, self.problem.costs.time_s
        for step in steps:
            if type(step) is Drop:  # as most are
                continue
            match step:
                case Compute(op) if ops[op].is_asynchronous:
                    value = ops[op].outputs[0]
                    arriving[value] = self._occupy("network", value, 0.0, time_s[op])
                case Compute(op):
                    if self.spans is not None:
                        self._note("compute", op, self.time_s, self.time_s + time_s[op])
                    self.time_s += time_s[op]
                case Offload(value):
                    arriving[value] = self._copy(value, "out")
                case Prefetch(value):
                    arriving[value] = self._copy(value, direction_of(self.problem, value))
                case Wait(value):
                    self._wait(arriving.pop(value))
                case SurfaceGrads(gradients):
                    for gradient in gradients:
                        if values[gradient].updates and values[gradient].home == "host":
                            self._update(gradient)

    def _copy(self, value: int, direction: CopyDirection) -> float:
        """Begin to copy a value, or to gather a sharded parameter. Gives when that will be done."""
        link, gather = self.problem.link, self.problem.gather
        if direction == "network":
            assert gather is not None
            latency_s, speed = gather.latency_s, gather.bytes_per_s
        else:
            assert link is not None
            latency_s = link.latency_s
            speed = link.to_host_bytes_per_s if direction == "out" else link.to_device_bytes_per_s
        return self._occupy(direction, value, latency_s, self.problem.graph.values[value].size_bytes / speed)

    def _occupy(self, lane: CopyDirection, value: int, latency_s: float, length_s: float) -> float:
        """Take a lane from when it is free. Gives when that ends. value: which `LaneSpan.index` names."""
        begin_s = max(self.time_s, self._free_s[lane])
        self._free_s[lane] = end_s = begin_s + latency_s + length_s
        self._note(lane, value, begin_s, end_s)
        return end_s

    def _wait(self, end_s: float) -> None:
        """Compute nothing before `end_s`."""
        if end_s > self.time_s:
            self.stall_s += end_s - self.time_s
            self._note("stall", -1, self.time_s, end_s)
            self.time_s = end_s

    def _update(self, gradient: int) -> None:
        """Let the CPU update the parameter of a gradient on the host, once it is done with the updates before."""
        begin_s = max(self.time_s, self._updated_s)
        size_bytes = self.problem.graph.values[gradient].size_bytes
        self._updated_s = begin_s + size_bytes * self.problem.host_update_s_per_byte
        self._note("update", gradient, begin_s, self._updated_s)

    def finish(self) -> None:
        """End the step when the CPU is done, with what it updates after the step as well."""
        self._wait(self._updated_s)
        for index, value in enumerate(self.problem.graph.values):
            if value.role == "gradient" and value.home == "host" and not value.updates:
                self._update(index)
        self._wait(self._updated_s)

    def _note(self, lane: Lane, index: int, begin_s: float, end_s: float) -> None:
        if self.spans is not None:
            self.spans.append(LaneSpan(lane, index, begin_s, end_s))


def direction_of(problem: Problem, value: int) -> CopyDirection:
    """In which lane a value comes to the device."""
    return "network" if problem.graph.values[value].home == "sharded" else "in"


def seconds_in_flight(problem: Problem, schedule: Schedule) -> tuple[float, float]:
    """Seconds that each of the microbatches in flight takes on the average, and of those what it waits.

    schedule: a legal one, which all of them run.
    """
    lanes, turn = _Lanes(problem), schedule.index(Boundary())
    arriving: list[dict[int, float]] = [{} for _ in range(problem.in_flight)]
    for steps in (schedule[:turn], schedule[turn:]):
        for own in arriving:
            lanes.run(steps, own)
    for _ in arriving:
        lanes.finish()
    if problem.in_flight == 1:
        return lanes.time_s, lanes.stall_s
    ops = problem.graph.ops
    ran = [step.op for step in schedule if isinstance(step, Compute) and not ops[step.op].is_asynchronous]
    ran_s = total_s(problem.costs.time_s[op] for op in ran)
    stall_s = lanes.stall_s / problem.in_flight
    return ran_s + stall_s, stall_s


def spans_of(problem: Problem, schedule: Schedule) -> tuple[tuple[float, ...], tuple[LaneSpan, ...]]:
    """(when each step of a legal schedule begins, and when the last ends; what takes how long) of one microbatch.

    Where several are in flight, this is one of them by itself.
    """
    spans: list[LaneSpan] = []
    lanes, arriving, begins = _Lanes(problem, spans), dict[int, float](), []
    for step in schedule:
        begins.append(lanes.time_s)
        lanes.run((step,), arriving)
    begins.append(lanes.time_s)
    lanes.finish()
    return tuple(begins), tuple(spans)
