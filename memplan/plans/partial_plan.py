"""A plan of parts: what the step will hold and cost, also as a page of text."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.plans.figures import Exactness
from memplan.units import format_bytes, format_seconds

_MOST_REASONS = 8


@dataclass(frozen=True, slots=True)
class UnitRow:
    """What one call of a unit does.

    - kind: "captured", "opaque", or "block" (units and what is between them).
    - way: "keep" (nothing of it runs again), "recompute" (all of it runs again in backward) or "planned".
    - saved_bytes: held for its backward, beyond what it saves at the least memory.
    - recompute_s: seconds more than where it runs as it is.
    - reason: why it can't be captured (an opaque unit, a block), or what is around it can't (a captured unit).
    """

    name: str
    kind: str
    way: str
    saved_bytes: int
    recompute_s: float
    reason: str


@dataclass(frozen=True, slots=True, repr=False)
class PartialPlan:
    """What a step of a model that is planned in parts will hold and cost.

    - peak_bytes: the larger of what was worked out and what a run on the sample held.
    - baseline_peak_bytes: worked out for the unplanned step.
    - floor_bytes: the smallest budget that could have been met.
    - time_s: measured on the sample.
    - exact: whose bits a step has: "eager" is plain PyTorch, "program" has fused groups in its captured parts.
    """

    peak_bytes: int
    baseline_peak_bytes: int
    budget_bytes: int
    resident_bytes: int
    floor_bytes: int
    time_s: float
    baseline_time_s: float
    units: tuple[UnitRow, ...]
    exact: Exactness = "eager"

    def __repr__(self) -> str:
        return f"<memplan.PartialPlan: {self.summary}>"

    @property
    def summary(self) -> str:
        """Peak, budget, what it costs and how it is done, in one line."""
        within = f"{format_bytes(self.budget_bytes)} (unplanned {format_bytes(self.baseline_peak_bytes)})"
        again = sum(unit.way != "keep" for unit in self.units)
        return (
            f"peak {format_bytes(self.peak_bytes)} of {within}, {self.overhead:+.1%} time: {again} of "
            f"{len(self.units)} parts recompute"
        )

    @property
    def activation_peak_bytes(self) -> int:
        """`peak_bytes` less parameters, buffers and inputs."""
        return self.peak_bytes - self.resident_bytes

    @property
    def overhead(self) -> float:
        """Extra time over the unplanned step: 0.1 is 10% more."""
        return self.time_s / self.baseline_time_s - 1 if self.baseline_time_s else 0.0

    def report(self) -> str:
        """The plan as a page of text."""
        return _report_text(self)


def _report_text(plan: PartialPlan) -> str:
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
