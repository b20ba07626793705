"""A plan, and its forms: a page of text, pictures, a networkx graph, and JSON to save and load, never pickle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import networkx as nx

from memplan.errors import InvalidPlanFile, or_raise
from memplan.plans.choices import decisions
from memplan.plans.figures import PlanFigures
from memplan.plans.plan_html import html_text
from memplan.plans.plan_text import report_text, summary
from memplan.plans.step_memory import planned_memory
from memplan.problem import schedule as steps
from memplan.problem.data import Graph, Op
from memplan.problem.file import pack, problem_from_json, read_checked, read_fields, unpack
from memplan.problem.simulate import simulate

_FORMAT = "memplan.plan"
_VERSION = 4
_STEP_NAMES: dict[str, type[Any]] = {
    "compute": steps.Compute, "drop": steps.Drop, "save_rng": steps.SaveRng, "drop_rng": steps.DropRng,
    "boundary": steps.Boundary, "surface": steps.SurfaceGrads, "stay": steps.Stay, "offload": steps.Offload,
    "prefetch": steps.Prefetch, "wait": steps.Wait, "drop_host": steps.DropHost,
}  # fmt: skip
_NAMES_OF_STEPS = {kind: name for name, kind in _STEP_NAMES.items()}


@dataclass(frozen=True, repr=False)
class Plan(PlanFigures):
    """What one training step will do, hold and cost: `PlanFigures`, and what can be done with them."""

    def __repr__(self) -> str:
        return f"<memplan.Plan: {self.summary}>"

    @property
    def summary(self) -> str:
        """Peak, budget, what it costs and how it is done, in one line."""
        return summary(self)

    def report(self) -> str:
        """A page of text: budget, peaks, overhead, bound, what is recomputed and what the peak consists of."""
        return report_text(self)

    def to_html(self, path: str | Path, curve: Sequence[Plan] | None = None) -> None:
        """Write a page with pictures, as one HTML file that loads nothing.

            plan.to_html("report.html", curve=memplan.explore(model, sample))

        It shows memory over the step with a plan and without, what the peak is made of, peak against time, copies, and
        what is done with each tensor and why. curve: the points of peak against time; without it there are the
        smallest budget, this plan and the unplanned step. Raises OSError where the file can't be written.
        """
        Path(path).write_text(html_text(self, curve), encoding="utf-8")

    def graph(self) -> nx.DiGraph:
        """The step as a networkx graph with bytes, seconds and decisions on it, for looking at it.

            kept = [v for v, facts in plan.graph().nodes(data=True) if facts.get("decision") == "keep"]

        Nodes are ("op", i) and ("value", i). An op has name, kind, phase, layer, random, time_s, scratch_bytes and runs
        (how often a step runs it). A value has name, size_bytes, role, held and decision. The decision is "keep",
        "recompute" or "offload" where the value is there for backward, else None. Edges run from a value to the ops
        that read it and from an op to the values that it writes. An edge with reuses=True runs from a value to the one
        that takes over its memory.
        """
        costs, decided = self.problem.costs, decisions(planned_memory(self))
        runs = Counter(step.op for step in self.schedule if isinstance(step, steps.Compute))
        found = nx.DiGraph()
        for index, value in enumerate(self.problem.graph.values):
            found.add_node(
                ("value", index), name=value.name, size_bytes=value.size_bytes, role=value.role, held=value.held,
                decision=decided.get(index),
            )  # fmt: skip
            if value.reuses is not None:
                found.add_edge(("value", value.reuses), ("value", index), reuses=True)
        for index, op in enumerate(self.problem.graph.ops):
            found.add_node(
                ("op", index), name=op.name, kind=op.kind, phase=op.phase, layer=op.layer, random=op.random,
                time_s=costs.time_s[index], scratch_bytes=costs.scratch_bytes[index], runs=runs[index],
            )  # fmt: skip
            found.add_edges_from((("value", v), ("op", index)) for v in op.inputs)
            found.add_edges_from((("op", index), ("value", v)) for v in op.outputs)
            found.add_edges_from((("op", index), ("value", effect.new)) for effect in op.effects)
        return found

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
    names = ("solver", "lower_bound_s", "floor_bytes", "floor_time_s", "truncated")
    content = {"format": _FORMAT, "version": _VERSION} | {name: getattr(plan, name) for name in names}
    content["schedule"] = [[_NAMES_OF_STEPS[type(step)], *asdict(step).values()] for step in plan.schedule]
    return pack(content | asdict(plan.problem))


def plan_from_bytes(data: bytes) -> Plan:
    """A plan from the contents of a plan file. Raises InvalidPlanFile."""
    return or_raise(read_checked("plan", lambda: _from_json(unpack(data))))


def _from_json(content: Any) -> Plan:
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise InvalidPlanFile("this is not a memplan plan file")
    if content.get("version") != _VERSION:
        raise InvalidPlanFile(f"plan file version {content.get('version')!r}; this memplan reads version {_VERSION}")
    problem = problem_from_json(content)
    schedule = tuple(_read_step(*step) for step in content["schedule"])
    timeline = simulate(problem, schedule)
    if problem.budget_bytes is not None and timeline.peak_bytes > problem.budget_bytes:
        raise InvalidPlanFile(f"it peaks at {timeline.peak_bytes} bytes, over its budget of {problem.budget_bytes}")
    unsaid = {"unchecked": (), "islands": (), "margin": 0.0}
    plan = read_fields(Plan, content, problem=problem, schedule=schedule, timeline=timeline, **unsaid)
    if plan.lower_bound_s > plan.time_s or plan.floor_bytes > plan.peak_bytes:
        raise InvalidPlanFile("the plan beats its own lower bound or floor")
    _ = plan.baseline_peak_bytes  # replays the unplanned step, which must be legal too
    return plan


def _read_step(name: str, *arguments: Any) -> steps.Step:
    if name not in _STEP_NAMES:
        raise InvalidPlanFile(f"unknown step {name!r}")
    kind = _STEP_NAMES[name]
    return read_fields(kind, dict(zip(kind.__match_args__, arguments, strict=True)))  # type: ignore[no-any-return]


def structure(graph: Graph) -> tuple[object, ...]:
    """A key that is equal for graphs for which one schedule means the same: equal but for sizes and layouts."""
    ops = tuple((op.kind, op.phase, op.inputs, op.outputs, op.effects, op.random) for op in graph.ops)
    return ops, tuple((v.role, v.held, v.reuses) for v in graph.values)


def first_difference(planned: Graph, captured: Graph) -> str | None:
    """What differs between two graphs, in words; None where they are equal."""
    if planned == captured:
        return None
    for what in ("value", "op"):
        mine, theirs = (getattr(graph, f"{what}s") for graph in (planned, captured))
        for index, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            if a != b:
                names = [f.name for f in fields(a) if f.compare and getattr(a, f.name) != getattr(b, f.name)]
                if names == ["key"] and isinstance(b, Op) and b.fused:
                    return (
                        f"op {index} ({b.name}) is a group that is compiled otherwise here: with another version of "
                        "PyTorch, another number of threads, or for other sizes"
                    )
                shown = ", ".join(
                    f"{n}: {getattr(a, n)!r} in the plan, {getattr(b, n)!r} in the model" for n in names[:3]
                )
                return f"{what} {index} ({b.name}) differs: {shown}"
        if len(mine) != len(theirs):
            return f"the plan has {len(mine)} {what}s, the model's step has {len(theirs)}"
    return "the boundary between forward and backward, or the size of a generator state, differs"
