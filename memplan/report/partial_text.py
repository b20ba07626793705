"""A plan of parts as a page of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from memplan.partial import PartialPlan

_MOST_REASONS = 8


def partial_report(plan: PartialPlan) -> str:
    """Budget, peaks, overhead; how each part runs; why the model could not be planned whole."""
    lines = [
        f"budget            {format_bytes(plan.budget_bytes)}",
        f"peak              {format_bytes(plan.peak_bytes)}  (unplanned {format_bytes(plan.baseline_peak_bytes)})",
        f"  resident        {format_bytes(plan.resident_bytes)}  parameters, buffers, inputs",
        f"  activations     {format_bytes(plan.activation_peak_bytes)}  with gradients",
        f"time a step       {format_seconds(plan.time_s)}  ({plan.overhead:+.1%} over unplanned)",
        f"smallest budget   {format_bytes(plan.floor_bytes)}",
        "",
        f"planned in {len(plan.units)} parts; what is between them runs as it is:",
        f"  {'part':40s} {'how':24s} {'saves':>10s} {'recomputes':>10s}",
    ]
    for unit in plan.units:
        how = f"{unit.way} ({unit.kind})"
        saved, again = format_bytes(unit.saved_bytes), format_seconds(unit.recompute_s)
        lines.append(f"  {unit.name:40s} {how:24s} {saved:>10s} {again:>10s}")
    reasons = dict.fromkeys(unit.reason.splitlines()[0] for unit in plan.units if unit.reason)
    lines += ["", "why not as a whole:", *(f"  {reason}" for reason in list(reasons)[:_MOST_REASONS])]
    return "\n".join(lines) + "\n"
