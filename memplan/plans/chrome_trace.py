"""A plan as a trace for Perfetto and chrome://tracing: what runs in which lane, and memory as counters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

from memplan.plans.figures import PlanFigures
from memplan.plans.labels import op_label
from memplan.plans.page_data import span_text
from memplan.plans.step_memory import StepMemory, planned_memory
from memplan.problem.lanes import CopyDirection, Lane, LaneSpan, spans_of
from memplan.problem.schedule import Compute, Offload, Prefetch

_PROCESS = 1
_LANES: dict[Lane, str] = {
    "compute": "compute",
    "stall": "waiting",
    "out": "copies to the host",
    "in": "copies to the device",
    "gather": "gathers",
    "update": "updates by the CPU",
}


def chrome_trace_text(plan: PlanFigures) -> str:
    """The contents of the file: JSON of trace events, with times in microseconds."""
    memory = planned_memory(plan)
    begins_s, spans = spans_of(plan.problem, plan.schedule)
    events = [*_names(spans), *_slices(memory, spans), *_counters(memory, begins_s), *_arrows(memory, spans)]
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"plan": repr(plan)}}
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def _event(phase: str, time_s: float, lane: Lane = "compute", **rest: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": _PROCESS, "tid": list(_LANES).index(lane), "ts": time_s * 1e6} | rest


def _names(spans: tuple[LaneSpan, ...]) -> Iterator[dict[str, Any]]:
    yield _event("M", 0.0, name="process_name", args={"name": "memplan: the planned step"})
    for place, (lane, name) in enumerate(_LANES.items()):
        if any(span.lane == lane for span in spans):
            yield _event("M", 0.0, lane, name="thread_name", args={"name": name})
            yield _event("M", 0.0, lane, name="thread_sort_index", args={"sort_index": place})


def _slices(memory: StepMemory, spans: tuple[LaneSpan, ...]) -> Iterator[dict[str, Any]]:
    """What takes a while, in its lane."""
    graph, ran = memory.problem.graph, set[int]()
    for span in spans:
        length = {"dur": (span.end_s - span.begin_s) * 1e6, "cat": span.lane}
        if span.lane == "compute":
            op = graph.ops[span.index]
            facts = {"kind": op.kind, "layer": op.layer, "phase": op.phase, "runs again": span.index in ran}
            ran.add(span.index)
            yield _event("X", span.begin_s, "compute", name=op_label(op), args=facts, **length)
        else:
            size_bytes = 0 if span.lane == "stall" else graph.values[span.index].size_bytes
            name = span_text(span, memory)
            yield _event("X", span.begin_s, span.lane, name=name, args={"size_bytes": size_bytes}, **length)


def _counters(memory: StepMemory, begins_s: tuple[float, ...]) -> Iterator[dict[str, Any]]:
    """Bytes by kind: of moments that begin together the one at which most is held."""
    kinds = memory.by_kind()
    sums = [sum(sizes) for sizes in zip(*kinds.values(), strict=True)]
    first = 0
    for moment in range(len(sums)):
        if moment + 1 == len(sums) or begins_s[moment + 1] != begins_s[moment]:
            highest = max(range(first, moment + 1), key=sums.__getitem__)
            args = {kind: size_bytes[highest] for kind, size_bytes in kinds.items()}
            yield _event("C", begins_s[moment], name="bytes on the device", args=args)
            first = moment + 1


def _arrows(memory: StepMemory, spans: tuple[LaneSpan, ...]) -> Iterator[dict[str, Any]]:
    """From each copy to the device to the first op that reads what comes."""
    ops = memory.problem.graph.ops
    computes = iter([span for span in spans if span.lane == "compute"])
    copies = iter([span for span in spans if span.lane in get_args(CopyDirection)])
    coming: dict[int, LaneSpan] = {}
    number = 0
    for step in memory.schedule:
        match step:
            case Offload():
                next(copies)
            case Prefetch(value):
                coming[value] = next(copies)
            case Compute(op):
                run = next(computes)
                for value in ops[op].inputs:
                    if value in coming:
                        copy, name = coming.pop(value), "is read"
                        number += 1
                        yield _event("s", copy.begin_s, copy.lane, name=name, cat="flow", id=number)
                        yield _event("f", run.begin_s, name=name, cat="flow", id=number, bp="e")
            case _:
                pass
