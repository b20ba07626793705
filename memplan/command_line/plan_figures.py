"""The figures of a plan as JSON can hold them, under the names that `Plan` has for them."""

from __future__ import annotations

from typing import Any

from memplan.plans.figures import PlanFigures

_FIGURES = (
    "peak_bytes", "baseline_peak_bytes", "activation_peak_bytes", "floor_bytes", "time_s", "baseline_time_s",
    "floor_time_s", "lower_bound_s", "overhead", "gap", "offloaded_bytes", "host_bytes", "solver", "exact", "truncated",
)  # fmt: skip


def figures_as_json(plan: PlanFigures) -> dict[str, Any]:
    """Figures that `PlanFigures` documents, with the budget, the number of ops and of those that run again."""
    problem = plan.problem
    return {name: getattr(plan, name) for name in _FIGURES} | {
        "budget_bytes": problem.budget_bytes,
        "resident_bytes": problem.resident_bytes,
        "ops": len(problem.graph.ops),
        "recomputed_ops": len(plan.recomputed),
        "costs": problem.costs.source,
    }
