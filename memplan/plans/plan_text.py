"""A plan as a page of text, of about sixty lines however large the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import get_args

from memplan.plans.choices import TensorDecision, choice_groups, choices_of, reason_of
from memplan.plans.figures import PlanFigures
from memplan.plans.step_memory import KINDS, THE_MODEL, StepMemory, in_groups, joined, named, planned_memory, short_kind
from memplan.units import format_bytes, format_seconds

_MOST_AT_PEAK, _MOST_CHOICES, _MOST_MODULES = 6, 8, 6
_MOST_IN_SHORT = 3
_MOST_LETTERS = 60


def report_text(plan: PlanFigures) -> str:
    """Budget, peaks, overhead and bound; what the peak is made of; what is done with tensors, and why."""
    memory = planned_memory(plan)
    parts = [_headline(plan), _peak(memory), _choices(memory), _recomputed(plan)]
    return "\n".join(line for part in parts for line in (*part, "")).rstrip() + "\n"


def loop_text(plan: PlanFigures, grown_bytes: int | None, passes_bytes: int) -> str:
    """What each part of a training loop holds, in a line, and the report of its step.

    - grown_bytes: the most that the first step was measured to hold beyond what was there before it.
    - passes_bytes: the most that calls without a plan were measured to hold; 0 where none was.
    """
    problem = plan.problem
    measured = "" if grown_bytes is None else f"; {format_bytes(problem.resident_bytes + grown_bytes)} as measured"
    update_bytes = plan.timeline.live_bytes[-1] + problem.update_bytes
    rows = [
        (problem.resident_bytes, "throughout: parameters, buffers, inputs, declared optimizer state"),
        (plan.peak_bytes, f"in the step, as planned{measured}"),
        *([(update_bytes, "in optimizer.step(), with gradients")] if problem.knows_optimizer else []),
        *([(passes_bytes, "without a plan (evaluation, generate, no_grad), as measured")] if passes_bytes else []),
    ]
    lines = [f"  {format_bytes(size_bytes):>10s}  {text}" for size_bytes, text in rows]
    return "\n".join(["the training loop holds", *lines, "", report_text(plan)])


def summary(plan: PlanFigures) -> str:
    """Peak, budget, what it costs and how it is done, in one line."""
    budget_bytes, most = plan.problem.budget_bytes, format_bytes(plan.baseline_peak_bytes)
    less = f" less a margin of {plan.margin:.1%}" if plan.margin else ""
    within = "" if budget_bytes is None else f" of {format_bytes(budget_bytes)}{less}"
    how = [f"{len(plan.recomputed)} of {len(plan.problem.graph.ops)} ops run again"] if plan.recomputed else []
    if plan.offloaded_bytes:
        how.append(f"{format_bytes(plan.offloaded_bytes)} go to the host")
    text = ", ".join(how) or "nothing is recomputed"
    if plan.better_setting:
        text += f"; PyTorch's allocator reserves {format_bytes(plan.reserved_bytes)}, {plan.better_setting}"
    return f"peak {format_bytes(plan.peak_bytes)}{within} (unplanned {most}), {plan.overhead:+.1%} time: {text}"


def _headline(plan: PlanFigures) -> list[str]:
    problem = plan.problem
    forgotten = not problem.knows_optimizer and not problem.extra_resident_bytes  # then the peak may lack its state
    adamw_bytes = 2 * sum(v.size_bytes for v in problem.graph.values if v.role == "gradient")
    adamw = f"AdamW would hold {format_bytes(adamw_bytes)} more. Pass optimizer= to plan for it"
    margin = f"{plan.margin:.1%} of the peak: such steps held more, or ran out of memory"
    budget = "no limit" if problem.budget_bytes is None else format_bytes(problem.budget_bytes)
    baseline = f"{plan.overhead:+.1%} over {format_seconds(plan.baseline_time_s)}"
    copied = f"{format_bytes(plan.offloaded_bytes)} a step, to {format_bytes(plan.host_bytes)} of host memory"
    beside = any(v.home == "host" and v.updates for v in problem.graph.values)
    updated = f"{format_seconds(problem.host_update_s)} of the CPU, {'beside' if beside else 'after'} the step"
    stays = f"{format_bytes(plan.staying_bytes)} of frozen parameters, on the device from one step to the next"
    groups = sum(op.fused for op in problem.graph.ops)
    dry = "; a dry run takes them to write over all that they may" if problem.costs.source == "estimated" else ""
    fused = f"fused: {groups} of {len(problem.graph.ops)} ops are compiled groups, with the bits of this program{dry}"
    floor_time = f"  (at {format_seconds(plan.floor_time_s)} a step)" if plan.knows_floor_time else ""
    extra = "" if plan.overhead_gap is None else f"; the extra time is at most {plan.overhead_gap:.1%} over the least"
    return [
        f"budget            {budget}",
        *([f"margin            {margin}"] if plan.margin else []),
        f"peak              {format_bytes(plan.peak_bytes)}  (unplanned {format_bytes(plan.baseline_peak_bytes)})",
        *([f"reserved          {plan.reserved_text}"] if problem.requests is not None else []),
        *([f"  no optimizer was given: {adamw}"] if forgotten else []),
        f"  resident        {format_bytes(problem.resident_bytes)}"
        "  parameters, buffers, inputs, declared optimizer state",
        f"  activations     {format_bytes(plan.activation_peak_bytes)}  with gradients and kernel scratch",
        f"time a step       {format_seconds(plan.time_s)}  ({baseline}; costs {problem.costs.source})",
        f"lower bound       {format_seconds(plan.lower_bound_s)}"
        f"  (at most {plan.gap:.1%} faster is possible in this budget{extra})",
        f"smallest budget   {format_bytes(plan.floor_bytes)}{floor_time}",
        *([f"not checked       {', '.join(plan.unchecked)}, before each call"] if plan.unchecked else []),
        *(f"runs as it is     {island}" for island in plan.islands),
        f"found by          {plan.solver}",
        *([f"kernels           {fused}"] if groups else []),
        *([f"in flight         {problem.in_flight} microbatches, all in the peak"] if problem.in_flight > 1 else []),
        *([f"copied out        {copied}"] if plan.host_bytes else []),
        *([f"updated there     {updated}"] if problem.host_update_s else []),
        *([f"stays             {stays}"] if plan.staying_bytes else []),
    ]


def _peak(memory: StepMemory) -> list[str]:
    """What the peak is made of, by kind, and the largest tensors that are there beside what stays throughout."""
    peak_bytes, peak = memory.timeline.peak_bytes, memory.peak_moment
    rows = sorted(memory.peak_by_kind().items(), key=lambda row: -row[1])
    lines = [f"the peak is where {memory.moment_text(peak)}; it is made of:"]
    lines += [f"  {format_bytes(n):>10s} {n / peak_bytes:4.0%}  {kind:11s} {KINDS[kind]}" for kind, n in rows]
    rows_of_tensors = list(_come_by_peak(memory, _MOST_AT_PEAK))
    if rows_of_tensors:
        lines += ["", "the largest that are there and were not when the step began:"]
    return [*lines, *rows_of_tensors]


def peak_in_short(memory: StepMemory) -> list[str]:
    """The peak in a few lines: what it is made of, by kind, where it is, and the largest tensors there."""
    rows = sorted(memory.peak_by_kind().items(), key=lambda row: -row[1])
    kinds = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in rows)
    return [f"  {kinds}, where {memory.moment_text(memory.peak_moment)}:", *_come_by_peak(memory, _MOST_IN_SHORT)]


def _come_by_peak(memory: StepMemory, most: int) -> Iterator[str]:
    """A row for each of the largest tensors that are there at the peak, and were not when the step began."""
    come = [life for life in memory.at(memory.peak_moment) if life.begin > 0]
    groups = in_groups(come, lambda life: (life.kind, joined(life.name), life.tensor))
    groups.sort(key=lambda group: -sum(life.size_bytes for life in group))
    for group in groups[:most]:
        one, name = group[0], named([life.name for life in group])
        yield _row(sum(life.size_bytes for life in group), one.kind, name, one.tensor)
    yield from _more(len(groups) - most, [life.size_bytes for group in groups[most:] for life in group])


def _choices(memory: StepMemory) -> list[str]:
    """What is done with the largest tensors that forward makes for backward, and why."""
    choices = choices_of(memory)
    counts = [(kind, [c.size_bytes for c in choices if c.decision == kind]) for kind in get_args(TensorDecision)]
    told = ", ".join(f"{kind} {len(sizes)} ({format_bytes(sum(sizes))})" for kind, sizes in counts if sizes)
    groups = choice_groups(choices)
    lines = [f"what forward makes for backward: {told or 'nothing'}"]
    barred = [c for c in choices if c.barred]
    if barred:
        why = "; ".join(dict.fromkeys(c.barred for c in barred))
        lines.append(
            f"of these {len(barred)} ({format_bytes(sum(c.size_bytes for c in barred))}) can't be made again: {why}"
        )
    if groups:
        lines.append("the largest, each by itself: other tensors may have to stay, or to be made again, with it")
    for group in groups[:_MOST_CHOICES]:
        one, label = group[0], named([c.label for c in group])
        lines.append(_row(sum(c.size_bytes for c in group), one.decision, label, one.tensor))
        lines.append(f"{'':14s}{reason_of(group)}")
    return [*lines, *_more(len(groups) - _MOST_CHOICES, [c.size_bytes for g in groups[_MOST_CHOICES:] for c in g])]


def _recomputed(plan: PlanFigures) -> list[str]:
    ops, times_s = plan.problem.graph.ops, plan.problem.costs.time_s
    if not plan.recomputed:
        return ["nothing is recomputed"]
    rows = in_groups(plan.recomputed, lambda index: joined(ops[index].layer or THE_MODEL))
    rows.sort(key=lambda row: -sum(times_s[i] for i in row))
    lines = [f"recomputed: {len(plan.recomputed)} runs of ops in {len(rows)} kinds of modules, the dearest first"]
    for row in rows[:_MOST_MODULES]:
        name = named(list(dict.fromkeys(ops[i].layer or THE_MODEL for i in row)))
        kinds = ", ".join(dict.fromkeys(short_kind(ops[i]) for i in row))
        kinds = kinds if len(kinds) <= _MOST_LETTERS else kinds[:_MOST_LETTERS] + " …"
        lines.append(f"  {format_seconds(sum(times_s[i] for i in row)):>10s}  {name}  {kinds}")
    return [*lines, *([f"  and {len(rows) - _MOST_MODULES} more"] if len(rows) > _MOST_MODULES else [])]


def _row(size_bytes: int, what: str, name: str, tensor: str) -> str:
    return f"  {format_bytes(size_bytes):>10s}  {what:10s}  {name}  {tensor}".rstrip()


def _more(count: int, sizes_bytes: Iterable[int]) -> list[str]:
    return [f"  {format_bytes(sum(sizes_bytes)):>10s}  in {count} more"] if count > 0 else []
