"""A plan as one HTML file with pictures: nothing is loaded from elsewhere, and what it shows is JSON inside it.

Pictures have a few hundred columns. Each stands for some moments and shows the one at which most is held, so that no
peak is lost.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from memplan.plans.choices import layer_tables
from memplan.plans.figures import PlanFigures
from memplan.plans.plan_text import report_text, summary
from memplan.plans.step_memory import (
    KINDS,
    StepMemory,
    in_groups,
    joined,
    named,
    op_label,
    planned_memory,
    unplanned_memory,
)
from memplan.problem.lanes import spans_of
from memplan.units import format_bytes, format_seconds

_COLUMNS = 480  # of a picture of memory
_MARKS = 900  # in each lane
_MOST_NAMED = 6  # tensors, at each moment
_MOST_ROWS = 28  # of a table of layers
_AFTER = 0.02  # how wide what comes after backward is drawn, as a share of the step


class _Strings(dict[str, int]):
    """Texts that are written once, and named by their index."""

    def __call__(self, text: str) -> int:
        return self.setdefault(text, len(self))


def html_text(plan: PlanFigures, curve: Sequence[PlanFigures] | None = None) -> str:
    """The contents of the file. curve: the points of peak against time, if there are any beside the plan."""
    data = json.dumps(page_data(plan, curve), separators=(",", ":"), allow_nan=False)
    parts = {
        "SUMMARY": escape(summary(plan)),
        "REPORT": escape(report_text(plan)),
        "DATA": data.replace("<", "\\u003c"),  # a name in it must not end the script
        "STYLE": _read("report.css"),
        "SCRIPT": _read("drawing.js") + _read("report.js"),
    }
    head, *pieces = _read("report.html").split("@@")
    names, texts = pieces[::2], pieces[1::2]
    return head + "".join(parts[name] + text for name, text in zip(names, texts, strict=True))


def _read(name: str) -> str:
    return (files("memplan.plans") / "page" / name).read_text(encoding="utf-8")


def page_data(plan: PlanFigures, curve: Sequence[PlanFigures] | None) -> dict[str, Any]:
    """All that the page shows, as plain lists, dicts, strings and numbers.

    curve: the points of peak against time; None is floor, plan and unplanned step.
    """
    planned, unplanned, strings = planned_memory(plan), unplanned_memory(plan), _Strings()
    problem, again = plan.problem, f"{len(plan.recomputed)} of {len(plan.problem.graph.ops)} ops"
    budget = "no limit" if problem.budget_bytes is None else format_bytes(problem.budget_bytes)
    return {
        "figures": [
            ["peak", format_bytes(plan.peak_bytes), f"unplanned {format_bytes(plan.baseline_peak_bytes)}"],
            ["budget", budget, f"the smallest is {format_bytes(plan.floor_bytes)}"],
            ["time a step", format_seconds(plan.time_s), f"{plan.overhead:+.1%}; costs {problem.costs.source}"],
            ["lower bound", format_seconds(plan.lower_bound_s), f"the plan is within {plan.gap:.1%}"],
            ["recomputed", again, f"found by {plan.solver}"],
            ["copied out", format_bytes(plan.offloaded_bytes), f"waits {format_seconds(plan.timeline.stall_s)} a step"],
        ],
        "budget_bytes": problem.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "unplanned_peak_bytes": plan.baseline_peak_bytes,
        "kinds": [[kind, text] for kind, text in KINDS.items()],
        "peak": {"where": planned.moment_text(planned.peak_moment), "bytes": planned.peak_by_kind()},
        "memory": {"unplanned": _memory(unplanned, strings), "planned": _memory(planned, strings)},
        "curve": {  # points [peak_bytes, time_s, name], of which those of the line are joined
            "line": [[p.peak_bytes, p.time_s, f"found by {p.solver}"] for p in curve or ()],
            "marks": [
                *([[plan.floor_bytes, plan.floor_time_s, "smallest budget"]] if plan.knows_floor_time else []),
                [plan.baseline_peak_bytes, plan.baseline_time_s, "unplanned"],
                [plan.peak_bytes, plan.time_s, "this plan"],
            ],
            "unplanned_s": plan.baseline_time_s,
        },
        "tables": _tables(planned, strings),
        "lanes": _lanes(planned, strings),
        "in_flight": problem.in_flight,
        "strings": list(strings),
    }


def _memory(memory: StepMemory, strings: _Strings) -> dict[str, Any]:
    """Columns of bytes over the step: [begin_s, end_s, bytes of each kind, what happens, [[name, bytes], ...]]."""
    begins_s, _ = spans_of(memory.problem, memory.schedule)
    end_s = begins_s[-1]
    kinds = list(zip(*memory.by_kind().values(), strict=True))
    buckets: dict[int, list[int]] = {}
    for moment in range(len(memory.schedule)):
        place = int(begins_s[moment] / end_s * _COLUMNS) if end_s else 0
        buckets.setdefault(min(place, _COLUMNS - 1), []).append(moment)
    highest = {place: max(moments, key=lambda m: sum(kinds[m])) for place, moments in buckets.items()}
    edges_s = [*(place * end_s / _COLUMNS for place in buckets), end_s, end_s * (1 + _AFTER)]
    shown = [*highest.values(), len(memory.schedule)]
    names = [joined(life.name) for life in memory.lifetimes]
    place = next(i for i, m in enumerate(shown) if sum(kinds[m]) == memory.timeline.peak_bytes)
    return {
        "end_s": end_s,
        "turn_s": begins_s[memory.boundary],
        "peak": {"column": place, "bytes": memory.timeline.peak_bytes, "where": memory.moment_text(memory.peak_moment)},
        "columns": [
            [
                begin_s, later_s, list(kinds[moment]), strings(memory.moment_text(moment)),
                _largest(memory, names, moment, strings),
            ]
            for begin_s, later_s, moment in zip(edges_s, edges_s[1:], shown)
        ],
    }  # fmt: skip


def _largest(memory: StepMemory, names: list[str], moment: int, strings: _Strings) -> list[list[int]]:
    there = [(i, life) for i, life in enumerate(memory.lifetimes) if life.begin <= moment <= life.end]
    groups = in_groups(there, lambda pair: (pair[1].kind, names[pair[0]], pair[1].tensor))
    rows = sorted(((sum(life.size_bytes for _, life in group), group) for group in groups), key=lambda row: -row[0])
    return [
        [strings(f"{named([life.name for _, life in group])} {group[0][1].tensor}".rstrip()), size_bytes]
        for size_bytes, group in rows[:_MOST_NAMED]
    ]


def _tables(memory: StepMemory, strings: _Strings) -> list[dict[str, Any]]:
    found = []
    for table in layer_tables(memory):
        largest = sorted(table.rows, key=lambda row: -row.size_bytes)[:_MOST_ROWS]
        rest = [row.size_bytes for row in table.rows if row not in largest]
        rows = [
            [
                strings(row.label), strings(row.tensor),
                [[column, decision, size_bytes, strings(why)] for column, decision, size_bytes, why in row.cells],
            ]
            for row in table.rows
            if row in largest
        ]  # fmt: skip
        found.append({"title": table.title, "columns": table.columns, "rows": rows, "left_out": [len(rest), sum(rest)]})
    return found


def _lanes(memory: StepMemory, strings: _Strings) -> dict[str, Any] | None:
    """Marks [begin_s, end_s, what, how many] by lane; None where nothing runs beside the ops."""
    begins_s, spans = spans_of(memory.problem, memory.schedule)
    if all(span.lane == "compute" for span in spans):
        return None
    end_s, graph = max(begins_s[-1], *(span.end_s for span in spans)), memory.problem.graph
    least_s, lanes = end_s / _MARKS, dict[str, list[list[Any]]]()
    for span in itertools.chain(*in_groups(spans, lambda span: span.lane)):
        marks = lanes.setdefault(span.lane, [])
        if marks and marks[-1][1] - marks[-1][0] < least_s and span.begin_s - marks[-1][1] < least_s:
            marks[-1][1], marks[-1][3] = span.end_s, marks[-1][3] + 1  # too short to be seen: one with what comes next
        else:
            match span.lane:
                case "compute":
                    text = op_label(graph.ops[span.index])
                case "stall":
                    text = "waits"
                case _:
                    value = graph.values[span.index]
                    text = f"{value.name} {value.tensor} ({format_bytes(value.size_bytes)})"
            marks.append([span.begin_s, span.end_s, strings(text), 1])
    return {"end_s": end_s, "lanes": lanes}
