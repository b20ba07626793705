"""A plan: a problem, the schedule chosen for it, and what the accountant says of it. JSON in and out, never pickle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from memplan.addresses import host_bytes_beside, place_host_copies
from memplan.errors import IllegalSchedule, InvalidPlanFile
from memplan.problem import Graph, Op, Problem, Value
from memplan.problem_file import Reader, pack, problem_from_json, problem_to_json, unpack, unsound
from memplan.report.text import report_text
from memplan.schedule import (
    Boundary,
    Compute,
    Drop,
    DropHost,
    DropRng,
    Offload,
    Prefetch,
    SaveRng,
    Schedule,
    Stay,
    Step,
    SurfaceGrads,
    Timeline,
    Wait,
)
from memplan.simulate import simulate, unplanned

_FORMAT = "memplan.plan"
_VERSION = 4
_STEP_NAMES: dict[str, type[Any]] = {
    "compute": Compute,
    "drop": Drop,
    "save_rng": SaveRng,
    "drop_rng": DropRng,
    "boundary": Boundary,
    "surface": SurfaceGrads,
    "stay": Stay,
    "offload": Offload,
    "prefetch": Prefetch,
    "wait": Wait,
    "drop_host": DropHost,
}
_NAMES_OF_STEPS = {kind: name for name, kind in _STEP_NAMES.items()}


@dataclass(frozen=True)
class Plan:
    """What one training step will do, hold and cost.

    problem: the captured step with its costs; its `budget_bytes` is the budget asked for.
    timeline: what `simulate` says of `schedule`. solver: where the schedule came from.
    lower_bound_s: no schedule within the budget takes less that runs backward ops in the traced order. floor_bytes: the
    smallest budget that could have been met.
    floor_time_s: the seconds of a step there. truncated: the search for the schedule was stopped before it was done.
    """

    problem: Problem
    schedule: Schedule
    timeline: Timeline
    solver: str
    lower_bound_s: float
    floor_bytes: int
    floor_time_s: float
    truncated: bool = False

    @property
    def peak_bytes(self) -> int:
        """Most bytes held at any moment of the step: everything that the budget counts, kernel scratch included."""
        return self.timeline.peak_bytes

    @property
    def live_peak_bytes(self) -> int:
        """The same without kernel scratch and saved generator states."""
        return self.timeline.live_peak_bytes

    @property
    def activation_peak_bytes(self) -> int:
        """`peak_bytes` less parameters, buffers, inputs and declared optimizer state."""
        return self.peak_bytes - self.problem.resident_bytes

    @cached_property
    def _baseline(self) -> Timeline:
        return unplanned(self.problem)

    @property
    def baseline_peak_bytes(self) -> int:
        """Peak of the unplanned step."""
        return self._baseline.peak_bytes

    @property
    def waiting_bytes(self) -> int:
        """What each forward that waits for its backward holds on the device: saved values, inputs and outputs."""
        return self.timeline.waiting_bytes

    @property
    def time_s(self) -> float:
        """Predicted seconds of a step."""
        return self.timeline.time_s

    @property
    def baseline_time_s(self) -> float:
        """Predicted seconds of the unplanned step."""
        return self.problem.baseline_time_s

    @property
    def overhead(self) -> float:
        """Predicted extra time over a step that recomputes and moves nothing: 0.1 is 10% more."""
        return self.time_s / self.baseline_time_s - 1 if self.baseline_time_s else 0.0

    @property
    def gap(self) -> float:
        """How far the plan may be from the fastest schedule in the budget: time / lower bound - 1."""
        return self.time_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0

    @property
    def overhead_gap(self) -> float | None:
        """The same of the extra time alone: extra time / least extra time - 1, which is (time - lower bound) / (lower
        bound - baseline time). None where the lower bound knows of no extra time."""
        least_s = self.lower_bound_s - self.baseline_time_s
        return (self.time_s - self.lower_bound_s) / least_s if least_s > 0 else None

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that the step copies to host memory, gradients of parameters that live there included."""
        values = self.problem.graph.values
        return sum(values[step.value].size_bytes for step in self.schedule if isinstance(step, Offload))

    @property
    def staying_bytes(self) -> int:
        """Bytes of copies of frozen parameters that stay on the device from one step to the next."""
        values = self.problem.graph.values
        return sum(values[step.value].size_bytes for step in self.schedule if isinstance(step, Stay))

    @property
    def host_bytes(self) -> int:
        """Host memory that the step needs: the slab for offloaded values, and parameters that live there with their
        gradients and the declared optimizer's state. Pinned blocks count as the powers of two that they take."""
        slab = place_host_copies(self.problem.graph, self.schedule)
        return slab.pinned_bytes * self.problem.in_flight + host_bytes_beside(self.problem)

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Ops that run more than once, each as often as it runs again."""
        seen: set[int] = set()
        again = []
        for step in self.schedule:
            if isinstance(step, Compute):
                if step.op in seen:
                    again.append(step.op)
                seen.add(step.op)
        return tuple(again)

    def report(self) -> str:
        """A page of text: budget, peaks, overhead, bound, what is recomputed and what the peak consists of."""
        return report_text(self)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, gzipped where it is large."""
        Path(path).write_bytes(plan_to_bytes(self))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan, check every index in it, and simulate it again.

        Raises InvalidPlanFile for anything but a sound plan, OSError where the file can't be read.
        """
        return plan_from_bytes(Path(path).read_bytes())


def plan_to_bytes(plan: Plan) -> bytes:
    """The contents of a plan file."""
    return pack(_to_json(plan))


def plan_from_bytes(data: bytes) -> Plan:
    """A plan from the contents of a plan file. Raises InvalidPlanFile."""
    with unsound("plan"):
        try:
            return _from_json(unpack(data))
        except IllegalSchedule as error:
            raise InvalidPlanFile(f"the plan file's schedule is not legal: {error}") from error


def _to_json(plan: Plan) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "solver": plan.solver,
        "lower_bound_s": plan.lower_bound_s,
        "floor_bytes": plan.floor_bytes,
        "floor_time_s": plan.floor_time_s,
        "truncated": plan.truncated,
        "schedule": [_step_to_json(s) for s in plan.schedule],
    } | problem_to_json(plan.problem)


def _step_to_json(step: Step) -> list[Any]:
    return [_NAMES_OF_STEPS[type(step)], *asdict(step).values()]


def _from_json(content: Any) -> Plan:
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise InvalidPlanFile("this is not a memplan plan file")
    if content.get("version") != _VERSION:
        raise InvalidPlanFile(f"plan file version {content.get('version')!r}; this memplan reads version {_VERSION}")
    problem = problem_from_json(content)
    schedule = tuple(_read_step(s, problem.graph) for s in Reader.typed(content, "schedule", list))
    timeline = simulate(problem, schedule)
    if problem.budget_bytes is not None and timeline.peak_bytes > problem.budget_bytes:
        raise InvalidPlanFile(
            f"the plan peaks at {timeline.peak_bytes} bytes, over its budget of {problem.budget_bytes}"
        )
    plan = Plan(
        problem,
        schedule,
        timeline,
        Reader.typed(content, "solver", str),
        Reader.typed(content, "lower_bound_s", float),
        Reader.typed(content, "floor_bytes", int),
        Reader.typed(content, "floor_time_s", float),
        Reader.typed(content, "truncated", bool),
    )
    if plan.lower_bound_s > plan.time_s or plan.floor_bytes > plan.peak_bytes:
        raise InvalidPlanFile("the plan beats its own lower bound or floor")
    _ = plan.baseline_peak_bytes  # replays the unplanned step, which must be legal too
    return plan


def _read_step(content: Any, graph: Graph) -> Step:
    name, *arguments = content
    if name == "boundary" and not arguments:
        return Boundary()
    if name == "surface" and len(arguments) == 1:
        return SurfaceGrads(Reader.indices(arguments[0], len(graph.values), "surface"))
    if name not in _STEP_NAMES or len(arguments) != 1:
        raise InvalidPlanFile(f"unknown step {content!r}")
    limit = len(graph.ops) if name in ("compute", "save_rng", "drop_rng") else len(graph.values)
    (index,) = Reader.indices(arguments, limit, name)
    return _STEP_NAMES[name](index)  # type: ignore[no-any-return]


def structure(graph: Graph) -> tuple[object, ...]:
    """Equal for graphs for which one schedule means the same: which are equal but for sizes and layouts."""
    ops = tuple((op.kind, op.phase, op.inputs, op.outputs, op.effects, op.random) for op in graph.ops)
    return ops, tuple((v.role, v.held, v.reuses) for v in graph.values)


def same_structure(a: Graph, b: Graph) -> bool:
    """Whether one schedule means the same for both."""
    return structure(a) == structure(b)


def first_difference(planned: Graph, captured: Graph) -> str | None:
    """What differs between two graphs, in words; None where they are equal."""
    if planned == captured:
        return None
    pairs: tuple[tuple[str, Sequence[Value | Op], Sequence[Value | Op]], ...] = (
        ("value", planned.values, captured.values),
        ("op", planned.ops, captured.ops),
    )
    for what, mine, theirs in pairs:
        for index, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            if a != b:
                fields = [k for k, v in asdict(a).items() if asdict(b)[k] != v]
                shown = ", ".join(
                    f"{k}: {asdict(a)[k]!r} in the plan, {asdict(b)[k]!r} in the model" for k in fields[:3]
                )
                return f"{what} {index} ({b.name}) differs: {shown}"
        if len(mine) != len(theirs):
            return f"the plan has {len(mine)} {what}s, the model's step has {len(theirs)}"
    return "the boundary between forward and backward, or the size of a generator state, differs"
