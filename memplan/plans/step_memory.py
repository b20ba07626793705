"""What a step holds at each of its moments, tensor by tensor: the bytes of the accountant, with names and kinds.

    memory = planned_memory(plan)
    memory.by_kind()["kept"][memory.peak_moment]  # bytes of the peak that wait for backward

The steps of the schedule are the moments, and what comes after backward is one more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, TypeVar

from memplan.plans.figures import PlanFigures
from memplan.problem import schedule as steps
from memplan.problem.data import FUSED, Graph, Op, Problem
from memplan.problem.schedule import Schedule, Timeline
from memplan.problem.simulate import Change, replayed, unplanned_step

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
    return step_memory(plan.problem, plan.schedule)


def unplanned_memory(plan: PlanFigures) -> StepMemory:
    """What the step holds when it runs without the plan."""
    return step_memory(*unplanned_step(plan.problem))


def step_memory(problem: Problem, schedule: Schedule) -> StepMemory:
    """What a schedule holds: the blocks that come and go in the accountant's replay, and what no step makes."""
    timeline, changes = replayed(problem, schedule)
    found = _Lifetimes(problem, len(schedule))
    for moment, (step, of_step) in enumerate(zip(schedule, changes, strict=True)):
        found.run(moment, of_step, isinstance(step, (steps.Stay, steps.Prefetch)))
    found.add_what_no_step_makes(timeline)
    boundary = schedule.index(steps.Boundary())
    lifetimes = tuple(  # what forward makes and is there in backward is kept
        replace(life, kind="kept") if life.kind == "temporary" and life.begin < boundary < life.end else life
        for life in found.all
    )
    return StepMemory(problem, schedule, timeline, lifetimes, found.labels, boundary)


class _Lifetimes:
    """What is there, from when to when. Of what has not ended, `_open` has the indices in `all`, by what it is."""

    def __init__(self, problem: Problem, end: int) -> None:
        self._problem, self._graph, self._end = problem, problem.graph, end
        self.labels = value_labels(problem.graph)
        self.all: list[Lifetime] = []
        self._open: dict[tuple[str, int], list[int]] = {}
        self._made: set[int] = set()
        for index, value in enumerate(self._graph.values):
            if value.resident and value.home == "device" and value.reuses is None:
                self._begin("value", index, 0, value.size_bytes, "inputs" if value.role == "input" else "weights")

    def run(self, moment: int, changes: Sequence[Change], fetches: bool) -> None:
        """Note what a step changes. An update has its moment when the gradients before it have gone."""
        freed_bytes = update_bytes = 0
        for what, index, size_bytes in changes:
            if what == "update":
                update_bytes = max(update_bytes, size_bytes - freed_bytes)
            elif what == "passed":
                value = self._graph.values[index]
                assert value.reuses is not None
                self._finish("value", value.reuses, moment - 1)
                self._begin("value", index, moment, value.size_bytes, self._kind(index))
            elif size_bytes < 0 or (what == "value" and self._open.get((what, index))):
                self._finish(what, index, moment)
                freed_bytes -= size_bytes
            elif what == "value":
                self._begin(what, index, moment, size_bytes, "fetched" if fetches else self._kind(index))
            elif size_bytes:
                self._begin(what, index, moment, size_bytes, self._kind(index) if what == "second" else "scratch")
        self._add("update of parameters", "optimizer", update_bytes, moment, moment)

    def _kind(self, value: int) -> MemoryKind:
        if self._graph.values[value].role in ("gradient", "tangent"):
            return "gradients"
        made_before = value in self._made
        self._made.add(value)
        return "recomputed" if made_before else "temporary"

    def _begin(self, what: str, index: int, moment: int, size_bytes: int, kind: MemoryKind) -> None:
        self._open.setdefault((what, index), []).append(len(self.all))
        if what in ("value", "second"):
            name = f"{'a second ' * (what == 'second')}{self.labels[index]}"
            value, tensor = (index, self._graph.values[index].tensor) if what == "value" else (None, "")
        else:
            op, value, tensor = self._graph.ops[index], None, ""
            name = f"scratch of {op.kind}" if what == "scratch" else f"generator state of {op.name}"
        self.all.append(Lifetime(value, name, kind, size_bytes, moment, self._end, tensor))

    def _finish(self, what: str, index: int, moment: int) -> None:
        life = self._open[what, index].pop()
        self.all[life] = replace(self.all[life], end=moment)

    def _add(self, name: str, kind: MemoryKind, size_bytes: int, begin: int, end: int) -> None:
        if size_bytes:
            self.all.append(Lifetime(None, name, kind, size_bytes, begin, end))

    def add_what_no_step_makes(self, timeline: Timeline) -> None:
        """Add what no step makes: what stays throughout, microbatches that wait, and what comes after backward."""
        problem, end = self._problem, self._end
        earlier_bytes = problem.resident_bytes - problem.graph.resident_bytes - problem.extra_resident_bytes
        self._add("optimizer state, and what an engine holds", "optimizer", problem.extra_resident_bytes, 0, end)
        self._add("gradients of earlier microbatches", "gradients", earlier_bytes, 0, end)
        others = problem.in_flight - 1
        self._add(f"{others} microbatches that wait", "kept", others * timeline.waiting_bytes, 0, end - 1)
        after_bytes = problem.bytes_after(any(life.kind == "fetched" and life.end == end for life in self.all))
        is_update = after_bytes == problem.update_bytes
        name, kind = ("the optimizer's step", "optimizer") if is_update else ("the next batch", "inputs")
        self._add(name, kind, after_bytes, end, end)  # type: ignore[arg-type]


THE_MODEL = "(the model itself)"
_MOST_LETTERS = 48
_NUMBER = re.compile(r"(?<![^. ])\d+(?![^. :])")
_T = TypeVar("_T")


def op_label(op: Op) -> str:
    """An op by where it stands in the model and by its kind: "layers.3.mlp: silu"."""
    return f"{op.layer or THE_MODEL}: {short_kind(op)}"


def short_kind(op: Op) -> str:
    """Its kind without namespace and overload: "silu", "fused add+mul"."""
    if op.fused:
        kinds = op.kind.removeprefix(FUSED).strip("()")
        return f"fused {kinds if len(kinds) < _MOST_LETTERS else kinds[:_MOST_LETTERS] + '…'}"
    parts = op.kind.split(".")
    return parts[1] if len(parts) > 1 else op.kind


def value_labels(graph: Graph) -> tuple[str, ...]:
    """Each value by its own name where it has one from the model, else by the op that makes it."""
    return tuple(
        value.name
        if maker is None or value.resident or value.role != "activation" or value.held
        else op_label(graph.ops[maker]) + (" (backward)" if graph.ops[maker].phase == "backward" else "")
        for value, maker in zip(graph.values, graph.producers(), strict=True)
    )


def joined(name: str) -> str:
    """A name with a star for each number in it, so that repeated layers have one: "layers.*.mlp: silu"."""
    return _NUMBER.sub("*", name)


def named(names: Sequence[str]) -> str:
    """Names that are joined, with their number: "layers.*.mlp: silu x32"."""
    return names[0] if len(names) == 1 else f"{joined(names[0])} x{len(names)}"


def in_groups(things: Iterable[_T], key: Callable[[_T], object]) -> list[list[_T]]:
    """Those of equal key together, in the order in which keys come first."""
    groups: dict[object, list[_T]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return list(groups.values())
