"""`memplan plan` and `explore`: what a step takes on a card, without card and weights; `report` and `audit`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memplan
from memplan.command_line.outcomes import DONE, NO_FIT, Commands, Mistake, Outcome
from memplan.command_line.step_options import AskedStep, add_step_options, asked_step, count, device_budget_bytes
from memplan.errors import BudgetInfeasible, MemplanError
from memplan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from memplan.batch_size import SizedChoice
    from memplan.plans.figures import PlanFigures
    from memplan.plans.plan import Plan

_BAR = 40  # characters of the highest peak
_FIGURES = (
    "peak_bytes", "baseline_peak_bytes", "activation_peak_bytes", "floor_bytes", "time_s", "baseline_time_s",
    "floor_time_s", "lower_bound_s", "overhead", "gap", "offloaded_bytes", "host_bytes", "solver", "exact", "truncated",
)  # fmt: skip


def add_plan(commands: Commands) -> None:
    command = commands.add_parser("plan", help="whether a step fits a budget, at which peak and in which time")
    add_step_options(command)
    command.add_argument("--update", choices=("step", "backward"), default="step", help="see docs/offload.md (step)")
    command.add_argument(
        "--largest-batch", type=count, nargs="?", const=0, metavar="ROWS",
        help="look for the fastest micro-batch, with so many rows to each step of the optimizer (any number)",
    )  # fmt: skip
    command.add_argument("--out", type=Path, metavar="FILE", help="save the plan: for apply(plan=) and report")
    command.set_defaults(run=_plan)


def add_explore(commands: Commands) -> None:
    command = commands.add_parser("explore", help="the curve of peak against time, from the floor to no plan at all")
    add_step_options(command)
    command.set_defaults(run=_explore)


def add_report(commands: Commands) -> None:
    command = commands.add_parser("report", help="what a saved plan promises, recomputes and holds")
    command.add_argument("file", type=Path, help="a plan, from `memplan plan --out` or Plan.save")
    command.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures as well")
    command.set_defaults(run=_report)


def _plan(given: argparse.Namespace) -> Outcome:
    asked = asked_step(given)
    lines, facts, items = [_heading(asked), ""], _told(asked), float(asked.step.items)
    try:
        if given.largest_batch is None:
            with errors_of_the_model():
                plan = memplan.plan(asked.step.model, asked.step.sample, update=given.update, **asked.settings)
        else:
            choice, rows = _largest_batch(given, asked), given.batch or 1
            plan, items = choice.plan, items * choice.size / rows
            lines += [f"batch    {choice}", ""]
            facts |= {"batch": choice.size, "accumulation": choice.accumulation}
    except BudgetInfeasible as error:
        remedies = [dataclasses.asdict(remedy) for remedy in error.remedies]
        facts |= {"fits": False, "floor_bytes": error.floor_bytes, "message": str(error), "remedies": remedies}
        return Outcome(f"{_heading(asked)}\n\ndoes not fit: {error}", facts, NO_FIT)
    rate = items / plan.time_s
    facts |= {"fits": True, "reserved_bytes": plan.reserved_bytes, f"{asked.step.unit}_per_s": rate}
    facts |= figures_as_json(plan)
    lines += _figures(plan, rate, asked.step.unit)
    if given.out is not None:
        try:
            plan.save(given.out)
        except OSError as error:
            what = f"the plan can't be saved as {str(given.out)!r}"
            raise Mistake(what, str(error), "give a place to write to") from None
        facts["file"] = str(given.out)
        lines.append(f"saved    {given.out}")
    return Outcome("\n".join(lines), facts)


@contextlib.contextmanager
def errors_of_the_model() -> Iterator[None]:
    """A context in which errors that the model's own forward raises are mistakes of the user."""
    try:
        yield
    except Exception as error:
        if isinstance(error, MemplanError):
            raise
        said = f"{type(error).__name__}: {error}"
        raise Mistake("the step fails", said, "run the model on the sample without memplan, and mend it") from error


def _largest_batch(given: argparse.Namespace, asked: AskedStep) -> SizedChoice:
    """The micro-batch that is fastest. Samples of other sizes repeat the first row. Raises Mistake."""
    import torch

    from memplan.torch_private import pytree

    rows = given.batch or 1

    def make_sample(size: int) -> Any:
        def resized(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != rows:
                return leaf
            return leaf[:1].expand(size, *leaf.shape[1:]).contiguous()

        return pytree.tree_map(resized, asked.step.sample)

    settings = dict(asked.settings)
    try:
        return memplan.largest_batch(
            asked.step.model, make_sample, settings.pop("budget"), given.largest_batch or None, update=given.update,
            **settings,
        )  # fmt: skip
    except ValueError as error:
        raise Mistake("--largest-batch can't be looked for", str(error), "change what is named there") from None


def _figures(plan: Plan, rate: float, unit: str) -> list[str]:
    offload = f"; {format_bytes(plan.offloaded_bytes)} go to the host" if plan.offloaded_bytes else ""
    host = [f"host     {format_bytes(plan.host_bytes)} of its memory"] if plan.host_bytes else []
    rounded = f"{rate:.3g}" if rate < 100 else f"{rate:,.0f}"
    floor_time = f", at {format_seconds(plan.floor_time_s)} a step" if plan.knows_floor_time else ""
    return [
        f"fits     peak {format_bytes(plan.peak_bytes)} of {format_bytes(plan.problem.budget_bytes or 0)} "
        f"(unplanned {format_bytes(plan.baseline_peak_bytes)})",
        *([f"reserved {plan.reserved_text}"] if plan.problem.requests is not None else []),
        f"time     {format_seconds(plan.time_s)} a step, {plan.overhead:+.1%} over no plan; {rounded} {unit} a second",
        f"best     at most {plan.gap:.1%} faster is possible in this budget",
        f"how      {len(plan.recomputed)} of {len(plan.problem.graph.ops)} ops run again{offload}",
        *host,
        f"floor    {format_bytes(plan.floor_bytes)} is the least{floor_time}",
    ]


def _explore(given: argparse.Namespace) -> Outcome:
    asked = asked_step(given)
    budget = asked.settings.pop("budget")
    with errors_of_the_model():
        points = memplan.explore(asked.step.model, asked.step.sample, **asked.settings)
    budget_bytes = device_budget_bytes(budget, points[0])
    taken = [point for point in points if point.peak_bytes <= budget_bytes]
    facts = _told(asked) | {
        "fits": bool(taken), "budget_bytes": budget_bytes, "points": [figures_as_json(point) for point in points]
    }  # fmt: skip
    lines = [_heading(asked), "", f"  {'peak':>10}  {'time a step':>11}  {'overhead':>8}"]
    for point in points:
        bar = "#" * max(1, round(_BAR * point.peak_bytes / points[-1].peak_bytes))
        lines.append(
            f"{'*' if taken and point is taken[-1] else ' '} {format_bytes(point.peak_bytes):>10}  "
            f"{format_seconds(point.time_s):>11}  {point.overhead:>+8.1%}  {bar}"
        )
    words = "takes the point marked with *" if taken else "is below the floor"
    lines += ["", f"a budget of {format_bytes(budget_bytes)} {words}"]
    return Outcome("\n".join(lines), facts, DONE if taken else NO_FIT)


def _heading(asked: AskedStep) -> str:
    remark = f"\nnote: {asked.step.remark}" if asked.step.remark else ""
    return f"{asked.step.title}\n{asked.device}{remark}"


def _told(asked: AskedStep) -> dict[str, Any]:
    return {"model": asked.step.title, "device": asked.device, "remark": asked.step.remark}


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


def add_audit(commands: Commands) -> None:
    command = commands.add_parser("audit", help="whether your own checkpointing, compilation or offload is exact")
    command.add_argument(
        "model",
        help="a function that gives (model, sample) or (model, sample, loss_fn): package.module:build or "
        "path/file.py:build",
    )
    command.add_argument("--batch", type=count, help="for the function, if it has such a parameter")
    command.add_argument("--length", type=count, help="for the function, if it has such a parameter")
    command.set_defaults(run=_audit)


def _audit(given: argparse.Namespace) -> Outcome:
    from memplan.command_line.described import Wanted
    from memplan.command_line.model_source import built_step

    if ":" not in given.model:
        cause = "an audit runs the step, which takes weights and a batch"
        raise Mistake(f"{given.model!r} is no function", cause, "give path/file.py:build, which makes model and sample")
    step = built_step(Wanted(given.model, {}, given.batch, given.length, None))
    with errors_of_the_model():
        audit = memplan.audit(step.model, step.sample, step.loss_fn)
    facts: dict[str, Any] = {"model": step.title, "exact": audit.exact} | dataclasses.asdict(audit)
    for found in [*facts["findings"], *facts["nondeterministic"]]:
        found |= {name: None for name, value in found.items() if value == math.inf}  # which JSON has not
    return Outcome(f"{step.title}\n\n{audit}", facts, NO_FIT if audit.findings else DONE)
