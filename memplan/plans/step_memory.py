"""What a step holds at each of its moments, tensor by tensor: the bytes of the accountant, with names and kinds.

    memory = planned_memory(plan)
    memory.by_kind()["kept"][memory.peak_moment]  # bytes of the peak that wait for backward

The steps of the schedule are the moments, and what comes after backward is one more. The sums at all moments are held
to those of `simulate`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from memplan.plans.figures import PlanFigures
from memplan.plans.labels import value_labels
from memplan.problem import schedule as steps
from memplan.problem.data import Problem
from memplan.problem.schedule import Schedule, Timeline
from memplan.problem.simulate import simulate, unplanned_step

MemoryKind = Literal[
    "weights", "optimizer", "inputs", "gradients", "kept", "recomputed", "fetched", "temporary", "scratch"
]  # fmt: skip
KINDS: dict[MemoryKind, str] = {
    "weights": "parameters, buffers and constants",
    "optimizer": "optimizer state, and what an engine holds",
    "inputs": "inputs",
    "gradients": "gradients of parameters and outputs",
    "kept": "activations kept for backward",
    "recomputed": "activations made again",
    "fetched": "copies from the host, and gathered parameters",
    "temporary": "results on their way, freed in the same pass",
    "scratch": "kernel scratch and generator states",
}


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Memory that holds one thing for a while.

    - value: the value that is there; None where it is none of the graph's.
    - tensor: its dtype and shape; "" where that is not known.
    - begin, end: the first and the last moment at which it is there.
    """

    value: int | None
    name: str
    kind: MemoryKind
    size_bytes: int
    begin: int
    end: int
    tensor: str = ""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """A step and all that it holds, in the order in which that comes.

    - labels: what its values are called.
    - boundary: the moment at which forward ends.
    """

    problem: Problem
    schedule: Schedule
    timeline: Timeline
    lifetimes: tuple[Lifetime, ...]
    labels: tuple[str, ...]
    boundary: int

    @property
    def peak_moment(self) -> int:
        """The moment at which most is held: the index of a step of the schedule, or their number: after backward."""
        timeline = self.timeline
        during = timeline.peak_bytes_at[timeline.peak_step] == timeline.peak_bytes
        return timeline.peak_step if during else len(self.schedule)

    def at(self, moment: int) -> tuple[Lifetime, ...]:
        """What is there at a moment, the largest first."""
        there = [life for life in self.lifetimes if life.begin <= moment <= life.end]
        return tuple(sorted(there, key=lambda life: -life.size_bytes))

    def by_kind(self) -> dict[MemoryKind, tuple[int, ...]]:
        """Bytes of each kind at each moment."""
        changes: dict[MemoryKind, list[int]] = {kind: [0] * (len(self.schedule) + 2) for kind in KINDS}
        for life in self.lifetimes:
            changes[life.kind][life.begin] += life.size_bytes
            changes[life.kind][life.end + 1] -= life.size_bytes
        return {kind: tuple(accumulate(change))[:-1] for kind, change in changes.items()}

    def peak_by_kind(self) -> dict[MemoryKind, int]:
        """What the peak is made of: bytes of each kind, which add up to it. Kinds that are not there are left out."""
        peak = self.peak_moment
        return {kind: size_bytes[peak] for kind, size_bytes in self.by_kind().items() if size_bytes[peak]}

    def moment_text(self, moment: int) -> str:
        """What happens at a moment, in words."""
        if moment == len(self.schedule):
            return "the optimizer steps, or the next batch arrives"
        match self.schedule[moment]:
            case steps.Compute(index):
                op = self.problem.graph.ops[index]
                late = op.phase == "forward" and moment > self.boundary
                how = "an op of forward, in backward" if late else op.phase
                return f"{op.kind} of {op.layer or 'the model itself'} runs ({how})"
            case steps.Boundary():
                return "forward ends"
            case steps.SurfaceGrads():
                return "gradients are handed over"
            case steps.Drop(value):
                return f"{self.labels[value]} is freed"
            case steps.Offload(value):
                return f"a copy of {self.labels[value]} to the host begins"
            case steps.Prefetch(value) | steps.Stay(value):
                return f"{self.labels[value]} comes to the device"
            case steps.Wait(value):
                return f"{self.labels[value]} is waited for"
            case steps.SaveRng() | steps.DropRng() | steps.DropHost():
                return "bookkeeping"


def planned_memory(plan: PlanFigures) -> StepMemory:
    """What the planned step holds."""
    return step_memory(plan.problem, plan.schedule, plan.timeline)


def unplanned_memory(plan: PlanFigures) -> StepMemory:
    """What the step holds when it runs without the plan."""
    problem, schedule = unplanned_step(plan.problem)
    return step_memory(problem, schedule, simulate(problem, schedule))


def step_memory(problem: Problem, schedule: Schedule, timeline: Timeline) -> StepMemory:
    """What a schedule holds. timeline: what `simulate` says of it."""
    replay = _Replay(problem, len(schedule))
    for moment, step in enumerate(schedule):
        replay.run(moment, step)
    replay.add_what_is_beside(timeline)
    boundary = schedule.index(steps.Boundary())
    lifetimes = tuple(  # what forward makes and is there in backward is kept
        replace(life, kind="kept") if life.kind == "temporary" and life.begin < boundary < life.end else life
        for life in replay.found
    )
    memory = StepMemory(problem, schedule, timeline, lifetimes, replay.labels, boundary)
    *during, later = (sum(kinds) for kinds in zip(*memory.by_kind().values(), strict=True))
    waiting_bytes = (problem.in_flight - 1) * timeline.waiting_bytes
    after_bytes = problem.bytes_after(any(isinstance(step, steps.Stay) for step in schedule))
    assert tuple(during) == timeline.peak_bytes_at, "other sums than the accountant's"
    assert later == timeline.live_bytes[-1] - waiting_bytes + after_bytes, "another sum than the accountant's"
    return memory


class _Replay:
    """Follows a legal schedule. What is there is in `_open`, by value. Copies out and most waits change nothing."""

    def __init__(self, problem: Problem, end: int) -> None:
        self._problem, self._graph, self._end = problem, problem.graph, end
        self.labels = value_labels(problem.graph)
        self.found: list[Lifetime] = []
        self._open: dict[int, int] = {}
        self._states: dict[int, int] = {}  # of generators, by op
        self._thrown: dict[int, int] = {}  # second copies that a collective still writes, by value
        self._ran: set[int] = set()
        for index, value in enumerate(self._graph.values):
            if value.resident and value.home == "device" and value.reuses is None:
                self._begin(index, "inputs" if value.role == "input" else "weights", 0)

    def _begin(self, value: int, kind: MemoryKind, moment: int) -> None:
        facts = self._graph.values[value]
        self._open[value] = len(self.found)
        self.found.append(Lifetime(value, self.labels[value], kind, facts.size_bytes, moment, self._end, facts.tensor))

    def _finish(self, index: int, moment: int) -> None:
        self.found[index] = replace(self.found[index], end=moment)

    def _add(self, name: str, kind: MemoryKind, size_bytes: int, begin: int, end: int) -> None:
        if size_bytes:
            self.found.append(Lifetime(None, name, kind, size_bytes, begin, end))

    def run(self, moment: int, step: steps.Step) -> None:
        match step:
            case steps.Compute(op):
                self._compute(op, moment)
            case steps.Drop(value):
                self._finish(self._open.pop(value), moment)
            case steps.Boundary():
                for value in self._graph.tangents:
                    self._begin(value, "gradients", moment)
            case steps.SurfaceGrads(values):
                self._surface(values, moment)
            case steps.Stay(value) | steps.Prefetch(value):
                self._begin(value, "fetched", moment)
            case steps.SaveRng(op):
                self._states[op] = len(self.found)
                name = f"generator state of {self._graph.ops[op].name}"
                self.found.append(Lifetime(None, name, "scratch", self._graph.rng_state_bytes, moment, self._end))
            case steps.DropRng(op):
                self._finish(self._states.pop(op), moment)
            case steps.Wait(value) if value in self._thrown:
                self._finish(self._thrown.pop(value), moment)

    def _compute(self, index: int, moment: int) -> None:
        op, values = self._graph.ops[index], self._graph.values
        first = index not in self._ran
        self._ran.add(index)
        for v in op.outputs:
            value = values[v]
            kind: MemoryKind = "gradients" if value.role == "gradient" else "temporary" if first else "recomputed"
            if value.reuses is None and v in self._open:  # made a second time, and thrown away
                self._add(f"a second {self.labels[v]}", kind, value.size_bytes, moment, moment)
                if op.is_asynchronous:
                    self._thrown[v] = len(self.found) - 1
            elif value.reuses is None:
                self._begin(v, kind, moment)
            elif not value.resident and v in self._open:
                self._finish(self._open.pop(value.reuses), moment)
            elif not value.resident:
                self._finish(self._open.pop(value.reuses), moment - 1)
                self._begin(v, kind, moment)
        self._add(f"scratch of {op.kind}", "scratch", self._problem.costs.scratch_bytes[index], moment, moment)
        if op.random and not first:
            self._add(f"generator state for {op.name}", "scratch", self._graph.rng_state_bytes, moment, moment)

    def _surface(self, values: tuple[int, ...], moment: int) -> None:
        """Gradients that are handed over may be freed. An update beside them has its moment when those before are."""
        freed_bytes = update_bytes = 0
        for v in values:
            value = self._graph.values[v]
            if value.updates:
                update_bytes = max(update_bytes, value.update_bytes - freed_bytes)
            if value.home != "host" and self._problem.frees_gradients:
                self._finish(self._open.pop(v), moment)
                freed_bytes += value.size_bytes
        self._add("update of parameters", "optimizer", update_bytes, moment, moment)

    def add_what_is_beside(self, timeline: Timeline) -> None:
        """Add what no step makes: what stays throughout, microbatches that wait, and what comes after backward."""
        problem, end = self._problem, self._end
        earlier_bytes = problem.resident_bytes - problem.graph.resident_bytes - problem.extra_resident_bytes
        self._add("optimizer state, and what an engine holds", "optimizer", problem.extra_resident_bytes, 0, end)
        self._add("gradients of earlier microbatches", "gradients", earlier_bytes, 0, end)
        others = problem.in_flight - 1
        self._add(f"{others} microbatches that wait", "kept", others * timeline.waiting_bytes, 0, end - 1)
        after_bytes = problem.bytes_after(any(life.kind == "fetched" and life.end == end for life in self.found))
        is_update = after_bytes == problem.update_bytes
        name, kind = ("the optimizer's step", "optimizer") if is_update else ("the next batch", "inputs")
        self._add(name, kind, after_bytes, end, end)  # type: ignore[arg-type]
