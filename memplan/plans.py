"""A plan: a problem, the schedule chosen for it, and what the accountant says of it. JSON in and out, never pickle."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from memplan.errors import IllegalSchedule, InvalidPlanFile
from memplan.problem import RESIDENT_ROLES, Costs, Effect, Graph, Op, Problem, Value
from memplan.report.text import report_text
from memplan.schedule import (
    BOUNDARY,
    Boundary,
    Compute,
    Drop,
    DropRng,
    SaveRng,
    Schedule,
    Step,
    SurfaceGrads,
    Timeline,
    schedule_of,
)
from memplan.simulate import simulate

_FORMAT = "memplan.plan"
_VERSION = 1
_GZIP_OVER_BYTES = 4 << 20
_STEP_NAMES: dict[str, type[Any]] = {
    "compute": Compute,
    "drop": Drop,
    "save_rng": SaveRng,
    "drop_rng": DropRng,
    "boundary": Boundary,
    "surface": SurfaceGrads,
}
_NAMES_OF_STEPS = {kind: name for name, kind in _STEP_NAMES.items()}
_T = TypeVar("_T")


@dataclass(frozen=True)
class Plan:
    """What one training step will do, hold and cost.

    problem: the captured step with its costs; its `budget_bytes` is the budget asked for.
    timeline: what `simulate` says of `schedule`. solver: where the schedule came from.
    lower_bound_s: no schedule within the budget takes less. floor_bytes: the smallest budget that could have been met.
    floor_time_s: the seconds of a step there.
    """

    problem: Problem
    schedule: Schedule
    timeline: Timeline
    solver: str
    lower_bound_s: float
    floor_bytes: int
    floor_time_s: float

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
        graph = self.problem.graph
        order = [*range(graph.boundary), BOUNDARY, *range(graph.boundary, len(graph.ops))]
        return simulate(self.problem, schedule_of(graph, order))

    @property
    def baseline_peak_bytes(self) -> int:
        """Peak of the unplanned step."""
        return self._baseline.peak_bytes

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
        """Extra time over the unplanned step: 0.1 is 10% more."""
        return self.time_s / self.baseline_time_s - 1 if self.baseline_time_s else 0.0

    @property
    def gap(self) -> float:
        """How far the plan may be from the fastest schedule in the budget: time / lower bound - 1."""
        return self.time_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0

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
        data = json.dumps(_to_json(self), separators=(",", ":"), allow_nan=False).encode()
        Path(path).write_bytes(gzip.compress(data, mtime=0) if len(data) > _GZIP_OVER_BYTES else data)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan, check every index in it, and simulate it again.

        Raises InvalidPlanFile for anything but a sound plan, OSError where the file can't be read.
        """
        return plan_from_bytes(Path(path).read_bytes())


def plan_from_bytes(data: bytes) -> Plan:
    """A plan from the contents of a plan file. Raises InvalidPlanFile."""
    try:
        if data[:2] == b"\x1f\x8b":
            data = _gunzip(data)
        content = json.loads(data)
        return _from_json(content)
    except InvalidPlanFile:
        raise
    except IllegalSchedule as error:
        raise InvalidPlanFile(f"the plan file's schedule is not legal: {error}") from error
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        OverflowError,
        RecursionError,
        OSError,
        EOFError,
    ) as error:
        raise InvalidPlanFile(f"not a sound plan file: {type(error).__name__}: {error}. Make the plan again") from error


_MOST_BYTES = 1 << 30  # a plan of a million steps is far smaller


def _gunzip(data: bytes) -> bytes:
    import io
    import zlib

    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            content = file.read(_MOST_BYTES + 1)
    except zlib.error as error:
        raise InvalidPlanFile(f"the plan file is damaged: {error}") from error
    if len(content) > _MOST_BYTES:
        raise InvalidPlanFile("the plan file unpacks to more than 1 GiB")
    return content


def _to_json(plan: Plan) -> dict[str, Any]:
    problem = plan.problem
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "solver": plan.solver,
        "lower_bound_s": plan.lower_bound_s,
        "floor_bytes": plan.floor_bytes,
        "floor_time_s": plan.floor_time_s,
        "budget_bytes": problem.budget_bytes,
        "extra_resident_bytes": problem.extra_resident_bytes,
        "accumulate": problem.accumulate,
        "update_bytes": problem.update_bytes,
        "costs": asdict(problem.costs),
        "graph": {
            "boundary": problem.graph.boundary,
            "rng_state_bytes": problem.graph.rng_state_bytes,
            "values": [asdict(v) for v in problem.graph.values],
            "ops": [asdict(op) for op in problem.graph.ops],
        },
        "schedule": [_step_to_json(s) for s in plan.schedule],
    }


def _step_to_json(step: Step) -> list[Any]:
    return [_NAMES_OF_STEPS[type(step)], *asdict(step).values()]


class _Reader:
    """Reads JSON of exactly the expected types."""

    @staticmethod
    def typed(content: dict[str, Any], key: str, kind: type[_T]) -> _T:
        value = content[key]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise InvalidPlanFile(f"{key!r} is {type(value).__name__}, expected {kind.__name__}")
        if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
            raise InvalidPlanFile(f"{key!r} is {value}, expected a number of 0 or more")
        if isinstance(value, int) and value < 0:
            raise InvalidPlanFile(f"{key!r} is {value}, expected 0 or more")
        return value

    @classmethod
    def optional(cls, content: dict[str, Any], key: str, kind: type[_T]) -> _T | None:
        return None if content[key] is None else cls.typed(content, key, kind)

    @staticmethod
    def indices(values: Any, limit: int, what: str) -> tuple[int, ...]:
        if not isinstance(values, list) or any(type(v) is not int or not 0 <= v < limit for v in values):
            raise InvalidPlanFile(f"{what} must be a list of indices below {limit}")
        return tuple(values)


def _from_json(content: Any) -> Plan:
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise InvalidPlanFile("this is not a memplan plan file")
    if content.get("version") != _VERSION:
        raise InvalidPlanFile(f"plan file version {content.get('version')!r}; this memplan reads version {_VERSION}")
    graph = _read_graph(_Reader.typed(content, "graph", dict))
    problem = Problem(
        graph,
        _read_costs(_Reader.typed(content, "costs", dict), len(graph.ops)),
        _Reader.optional(content, "budget_bytes", int),
        _Reader.typed(content, "extra_resident_bytes", int),
        _Reader.typed(content, "accumulate", bool),
        _Reader.typed(content, "update_bytes", int),
    )
    schedule = tuple(_read_step(s, graph) for s in _Reader.typed(content, "schedule", list))
    timeline = simulate(problem, schedule)
    if problem.budget_bytes is not None and timeline.peak_bytes > problem.budget_bytes:
        raise InvalidPlanFile(
            f"the plan peaks at {timeline.peak_bytes} bytes, over its budget of {problem.budget_bytes}"
        )
    plan = Plan(
        problem,
        schedule,
        timeline,
        _Reader.typed(content, "solver", str),
        _Reader.typed(content, "lower_bound_s", float),
        _Reader.typed(content, "floor_bytes", int),
        _Reader.typed(content, "floor_time_s", float),
    )
    if plan.lower_bound_s > plan.time_s or plan.floor_bytes > plan.peak_bytes:
        raise InvalidPlanFile("the plan beats its own lower bound or floor")
    _ = plan.baseline_peak_bytes  # replays the unplanned step, which must be legal too
    return plan


def _read_costs(content: dict[str, Any], op_count: int) -> Costs:
    times, scratch = _Reader.typed(content, "time_s", list), _Reader.typed(content, "scratch_bytes", list)
    if len(times) != op_count or len(scratch) != op_count:
        raise InvalidPlanFile(f"costs of {len(times)} and {len(scratch)} ops for {op_count} ops")
    return Costs(
        tuple(_Reader.typed({"time_s": t}, "time_s", float) for t in times),
        tuple(_Reader.typed({"scratch_bytes": s}, "scratch_bytes", int) for s in scratch),
        _Reader.typed(content, "source", str),
    )


def _read_graph(content: dict[str, Any]) -> Graph:
    values, ops = _Reader.typed(content, "values", list), _Reader.typed(content, "ops", list)
    boundary = _Reader.typed(content, "boundary", int)
    graph = Graph(
        tuple(_read_value(v, i) for i, v in enumerate(values)),
        tuple(_read_op(op, len(values)) for op in ops),
        boundary,
        _Reader.typed(content, "rng_state_bytes", int),
    )
    phases = [op.phase for op in graph.ops]
    if boundary > len(ops) or phases != ["forward"] * boundary + ["backward"] * (len(ops) - boundary):
        raise InvalidPlanFile("the boundary does not stand between forward and backward ops")
    written = [v for op in graph.ops for v in (*op.outputs, *(e.new for e in op.effects))]
    if len(set(written)) != len(written):
        raise InvalidPlanFile("a value is written by two ops")
    taken = [v.reuses for v in graph.values if v.reuses is not None]
    if len(set(taken)) != len(taken):
        raise InvalidPlanFile("two values take over the memory of one")
    return graph


def _read_value(content: Any, index: int) -> Value:
    role = _Reader.typed(content, "role", str)
    if role not in RESIDENT_ROLES | {"tangent", "activation", "gradient"}:
        raise InvalidPlanFile(f"value {index} has role {role!r}")
    reuses = _Reader.optional(content, "reuses", int)
    if reuses is not None and reuses >= index:
        raise InvalidPlanFile(f"value {index} reuses the memory of value {reuses}, which comes later")
    return Value(
        _Reader.typed(content, "name", str),
        _Reader.typed(content, "size_bytes", int),
        role,  # type: ignore[arg-type]
        _Reader.typed(content, "held", bool),
        reuses,
    )


def _read_op(content: Any, value_count: int) -> Op:
    phase = _Reader.typed(content, "phase", str)
    if phase not in ("forward", "backward"):
        raise InvalidPlanFile(f"an op has phase {phase!r}")
    effects = [_Reader.indices(e, value_count, "an effect") for e in _Reader.typed(content, "effects", list)]
    if any(len(e) != 2 for e in effects):
        raise InvalidPlanFile("an effect has two values")
    return Op(
        name=_Reader.typed(content, "name", str),
        kind=_Reader.typed(content, "kind", str),
        phase=phase,  # type: ignore[arg-type]
        inputs=_Reader.indices(content["inputs"], value_count, "inputs"),
        outputs=_Reader.indices(content["outputs"], value_count, "outputs"),
        effects=tuple(Effect(old, new) for old, new in effects),
        random=_Reader.typed(content, "random", bool),
        recomputable=_Reader.typed(content, "recomputable", bool),
        layer=_Reader.typed(content, "layer", str),
        key=_Reader.typed(content, "key", str),
    )


def _read_step(content: Any, graph: Graph) -> Step:
    name, *arguments = content
    if name == "boundary" and not arguments:
        return Boundary()
    if name == "surface" and len(arguments) == 1:
        return SurfaceGrads(_Reader.indices(arguments[0], len(graph.values), "surface"))
    if name not in ("compute", "drop", "save_rng", "drop_rng") or len(arguments) != 1:
        raise InvalidPlanFile(f"unknown step {content!r}")
    limit = len(graph.values) if name == "drop" else len(graph.ops)
    (index,) = _Reader.indices(arguments, limit, name)
    return _STEP_NAMES[name](index)  # type: ignore[no-any-return]


def same_structure(a: Graph, b: Graph) -> bool:
    """Whether one schedule means the same for both: equal but for sizes and layouts."""

    def shape(graph: Graph) -> tuple[object, ...]:
        ops = tuple((op.kind, op.phase, op.inputs, op.outputs, op.effects, op.random) for op in graph.ops)
        return ops, tuple((v.role, v.held, v.reuses) for v in graph.values)

    return shape(a) == shape(b)


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
