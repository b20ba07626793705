"""A plan as a page of text."""

from __future__ import annotations

from collections import defaultdict

from memplan.plans.figures import PlanFigures
from memplan.problem.schedule import (
    Boundary,
    Compute,
    Drop,
    DropHost,
    DropRng,
    Offload,
    Prefetch,
    SaveRng,
    Stay,
    SurfaceGrads,
    Wait,
)
from memplan.units import format_bytes, format_seconds

_MOST_ROWS = 12


def report_text(plan: PlanFigures) -> str:
    """Budget, peaks, overhead and bound; which layers are recomputed; what is held at the peak."""
    return "\n".join([*_headline(plan), "", *_recomputed(plan), "", *_peak(plan), *_remarks(plan)]) + "\n"


def summary(plan: PlanFigures) -> str:
    """Peak, budget, what it costs and how it is done, in one line."""
    budget_bytes, most = plan.problem.budget_bytes, format_bytes(plan.baseline_peak_bytes)
    within = "" if budget_bytes is None else f" of {format_bytes(budget_bytes)}"
    how = [f"{len(plan.recomputed)} of {len(plan.problem.graph.ops)} ops run again"] if plan.recomputed else []
    if plan.offloaded_bytes:
        how.append(f"{format_bytes(plan.offloaded_bytes)} go to the host")
    text = ", ".join(how) or "nothing is recomputed"
    return f"peak {format_bytes(plan.peak_bytes)}{within} (unplanned {most}), {plan.overhead:+.1%} time: {text}"


def _headline(plan: PlanFigures) -> list[str]:
    problem = plan.problem
    budget = "no limit" if problem.budget_bytes is None else format_bytes(problem.budget_bytes)
    baseline = f"{plan.overhead:+.1%} over {format_seconds(plan.baseline_time_s)}"
    copied = f"{format_bytes(plan.offloaded_bytes)} a step, to {format_bytes(plan.host_bytes)} of host memory"
    beside = any(v.home == "host" and v.updates for v in problem.graph.values)
    updated = f"{format_seconds(problem.host_update_s)} of the CPU, {'beside' if beside else 'after'} the step"
    stays = f"{format_bytes(plan.staying_bytes)} of frozen parameters, on the device from one step to the next"
    groups = sum(op.fused for op in problem.graph.ops)
    dry = "; a dry run takes them to write over all that they may" if problem.costs.source == "estimated" else ""
    fused = f"fused: {groups} of {len(problem.graph.ops)} ops are compiled groups, with the bits of this program{dry}"
    extra = "" if plan.overhead_gap is None else f"; the extra time is at most {plan.overhead_gap:.1%} over the least"
    return [
        f"budget            {budget}",
        f"peak              {format_bytes(plan.peak_bytes)}  (unplanned {format_bytes(plan.baseline_peak_bytes)})",
        f"  resident        {format_bytes(problem.resident_bytes)}"
        "  parameters, buffers, inputs, declared optimizer state",
        f"  activations     {format_bytes(plan.activation_peak_bytes)}  with gradients and kernel scratch",
        f"time a step       {format_seconds(plan.time_s)}  ({baseline}; costs {problem.costs.source})",
        f"lower bound       {format_seconds(plan.lower_bound_s)}"
        f"  (at most {plan.gap:.1%} faster is possible in this budget{extra})",
        f"smallest budget   {format_bytes(plan.floor_bytes)}  (at {format_seconds(plan.floor_time_s)} a step)",
        f"found by          {plan.solver}",
        *([f"kernels           {fused}"] if groups else []),
        *([f"in flight         {problem.in_flight} microbatches, all in the peak"] if problem.in_flight > 1 else []),
        *([f"copied out        {copied}"] if plan.host_bytes else []),
        *([f"updated there     {updated}"] if problem.host_update_s else []),
        *([f"stays             {stays}"] if plan.staying_bytes else []),
    ]


def _recomputed(plan: PlanFigures) -> list[str]:
    ops, times = plan.problem.graph.ops, plan.problem.costs.time_s
    by_layer: dict[str, list[int]] = defaultdict(list)
    for index in plan.recomputed:
        by_layer[ops[index].layer or "(the model itself)"].append(index)
    if not by_layer:
        return ["nothing is recomputed"]
    rows = sorted(by_layer.items(), key=lambda row: -sum(times[i] for i in row[1]))
    lines = [f"recomputed: {len(plan.recomputed)} runs of ops in {len(rows)} modules, the dearest first"]
    for layer, indices in rows[:_MOST_ROWS]:
        kinds = ", ".join(
            dict.fromkeys(ops[i].kind.split(".")[1] if "." in ops[i].kind else ops[i].kind for i in indices)
        )
        lines.append(f"  {layer:40s} {format_seconds(sum(times[i] for i in indices)):>8s}  {kinds}")
    if len(rows) > _MOST_ROWS:
        lines.append(f"  and {len(rows) - _MOST_ROWS} more")
    return lines


def _peak(plan: PlanFigures) -> list[str]:
    values = plan.problem.graph.values
    held = sorted(_live_at_peak(plan), key=lambda v: (-values[v].size_bytes, v))
    step = plan.schedule[plan.timeline.peak_step]
    where = plan.problem.graph.ops[step.op] if isinstance(step, Compute) else None
    name = f"{where.kind} of {where.layer or 'the model'} ({where.phase})" if where else "the loss boundary"
    lines = [f"at the peak, while {name} runs, beside what is resident:"]
    for index in held[:_MOST_ROWS]:
        lines.append(f"  {format_bytes(values[index].size_bytes):>10s}  {values[index].role:10s}  {values[index].name}")
    if len(held) > _MOST_ROWS:
        rest = sum(values[v].size_bytes for v in held[_MOST_ROWS:])
        lines.append(f"  {format_bytes(rest):>10s}  in {len(held) - _MOST_ROWS} more")
    return lines


def _live_at_peak(plan: PlanFigures) -> set[int]:
    graph = plan.problem.graph
    live: set[int] = set()
    for step in plan.schedule[: plan.timeline.peak_step + 1]:
        match step:
            case Compute(op):
                live.update(graph.ops[op].outputs)
                live.difference_update(r for v in graph.ops[op].outputs if (r := graph.values[v].reuses) is not None)
            case Drop(value):
                live.discard(value)
            case Boundary():
                live.update(graph.tangents)
            case Prefetch(value) | Stay(value):
                live.add(value)
            case SaveRng() | DropRng() | SurfaceGrads() | Offload() | Wait() | DropHost():
                pass
    return {v for v in live if not graph.values[v].resident}


def _remarks(plan: PlanFigures) -> list[str]:
    if plan.problem.knows_optimizer or plan.problem.extra_resident_bytes:
        return []
    weights = sum(v.size_bytes for v in plan.problem.graph.values if v.role == "gradient")
    return [
        "",
        f"no optimizer was given: AdamW would hold {format_bytes(2 * weights)} more. Pass optimizer= to plan for it",
    ]
