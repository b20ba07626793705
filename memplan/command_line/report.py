"""`memplan report`: what a saved plan says of itself."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memplan.command_line.outcomes import Mistake, Outcome

if TYPE_CHECKING:
    from memplan.plans.figures import PlanFigures

_FIGURES = (
    "peak_bytes", "baseline_peak_bytes", "activation_peak_bytes", "floor_bytes", "time_s", "baseline_time_s",
    "floor_time_s", "lower_bound_s", "overhead", "gap", "offloaded_bytes", "host_bytes", "solver", "exact", "truncated",
)  # fmt: skip


def add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    command = commands.add_parser("report", help="what a saved plan promises, recomputes and holds")
    command.add_argument("file", type=Path, help="a plan, from `memplan plan --out` or Plan.save")
    command.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures as well")
    command.set_defaults(run=_report)
    return command


def _report(given: argparse.Namespace) -> Outcome:
    from memplan.plans.plan import Plan

    try:
        plan = Plan.load(given.file)
    except OSError as error:
        next_step = "make one with: memplan plan MODEL --out FILE"
        raise Mistake(f"there is no plan in {str(given.file)!r}", str(error), next_step) from None
    facts = figures_as_json(plan)
    if given.html is None:
        return Outcome(plan.report().rstrip("\n"), facts)
    try:
        plan.to_html(given.html)
    except OSError as error:
        raise Mistake(f"{str(given.html)!r} can't be written", str(error), "give a place to write to") from None
    return Outcome(f"{plan.report()}\nwritten: {given.html}", facts | {"html": str(given.html)})


def figures_as_json(plan: PlanFigures) -> dict[str, Any]:
    """Figures that `PlanFigures` documents, with the budget, the number of ops and of those that run again.

    They have the names that `Plan` has for them, and are as JSON can hold them.
    """
    problem = plan.problem
    return {name: getattr(plan, name) for name in _FIGURES} | {
        "budget_bytes": problem.budget_bytes,
        "resident_bytes": problem.resident_bytes,
        "ops": len(problem.graph.ops),
        "recomputed_ops": len(plan.recomputed),
        "costs": problem.costs.source,
    }
