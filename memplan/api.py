"""The public functions. Each reads as the list of stages that it goes through."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from memplan.errors import BudgetInfeasible, PlanMismatch
from memplan.graph import Capture, capture, estimate, measure
from memplan.graph.call import Sample
from memplan.graph.optimizer import optimizer_needs
from memplan.plans import Plan, first_difference, same_structure
from memplan.problem import Budget, Costs, Problem
from memplan.runtime import PlannedForward, Program, lower, planned_forward
from memplan.simulate import simulate
from memplan.solvers import Candidate, Front, solve_front
from memplan.units import format_bytes, parse_bytes

BudgetLike = int | float | str | Budget
LossFunction = Callable[..., Any]
CostSource = Literal["measure", "estimate"]


def apply(
    model: nn.Module,
    sample: Sample,
    budget: BudgetLike | None = None,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    costs: CostSource = "measure",
    accumulate: bool = False,
    plan: Plan | None = None,
) -> nn.Module:
    """Make the model's training step fit a budget, in place; outputs and gradients stay the same bits.

    sample: a batch like those to come: a tensor, a tuple of arguments, or a dict of keyword arguments of forward.
    budget: the most bytes that the step may hold on the device, everything included: an int, "8GiB", "8GB", a fraction
        of the unplanned peak (0.5), or a `Budget`.
    loss_fn: `loss_fn(model, *args, **kwargs)` runs in place of `model(*args, **kwargs)`, so that the loss is part of
        the step; the planned model is then called with those arguments and returns the loss.
    optimizer: counts its state and its `step()` into the budget.
    device: plan for a sample that is on another device than the model.
    costs: "measure" times each distinct op on the model's device; "estimate" runs nothing, and knows nothing of kernel
        scratch, by which a step may then exceed the budget.
    accumulate: gradients of earlier micro-batches are held while the step runs.
    plan: run this plan (from `plan`, `explore` or a file) instead of making one.

    Returns the same model. Raises BudgetInfeasible (with the smallest budget that can be met), UnsupportedModel,
    PlanMismatch (`plan` belongs to another step), ValueError or TypeError (bad arguments); then nothing has changed.
    """
    with _unplanned(model) as original:
        captured = capture(model, original, sample, loss_fn, _device(device))
        if plan is None:
            if budget is None:
                raise TypeError("apply needs a budget, or a plan= to run")
            problem = _problem(model, captured, budget, optimizer, costs, accumulate)
            plan = _choose(problem, solve_front(problem), budget)
        else:
            _refuse_other_step(plan, captured)
            if budget is not None:
                raise TypeError("give a budget or a plan, not both: a plan has its budget in it")
        programs = _programs(captured, plan)
        planned = PlannedForward(model, original, captured, programs, plan)
    previous = planned_forward(model)
    if previous is not None:
        previous.uninstall()
    planned.install()
    return model


def plan(
    model: nn.Module,
    sample: Sample,
    budget: BudgetLike,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    costs: CostSource = "measure",
    accumulate: bool = False,
) -> Plan:
    """The plan that `apply` would run, without touching the model. Arguments and errors as for `apply`."""
    with _unplanned(model) as original:
        captured = capture(model, original, sample, loss_fn, _device(device))
        problem = _problem(model, captured, budget, optimizer, costs, accumulate)
        return _choose(problem, solve_front(problem), budget)


def explore(
    model: nn.Module,
    sample: Sample,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    costs: CostSource = "measure",
    accumulate: bool = False,
) -> tuple[Plan, ...]:
    """The curve of peak against time: plans from the smallest budget to the unplanned step, peaks up and times down.

    Each is runnable: `apply(model, sample, plan=point)`. Arguments and errors as for `apply`.
    """
    with _unplanned(model) as original:
        captured = capture(model, original, sample, loss_fn, _device(device))
        problem = _problem(model, captured, None, optimizer, costs, accumulate)
        front = solve_front(problem)
        return tuple(_plan(problem, front, point, point.peak_bytes) for point in front.points)


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that the model runs; None where it runs none."""
    planned = planned_forward(model)
    return None if planned is None else planned.plan


def remove(model: nn.Module) -> nn.Module:
    """Take the plan off the model and give the original forward back. Does nothing to a model without a plan."""
    planned = planned_forward(model)
    if planned is not None:
        planned.uninstall()
    return model


@contextlib.contextmanager
def _unplanned(model: nn.Module) -> Iterator[Callable[..., Any]]:
    """The model's own forward; a plan that is installed steps aside for as long."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    planned = planned_forward(model)
    if planned is not None:
        planned.uninstall()
    try:
        yield model.forward
    finally:
        if planned is not None:
            planned.install()


def _programs(captured: Capture, plan: Plan) -> tuple[Program, ...]:
    """The plan as a program, and once more for `out.sum().backward()` where the same schedule serves it."""
    program = lower(plan.schedule, captured.traced)
    if captured.expanded is None or not same_structure(captured.expanded.graph, captured.traced.graph):
        return (program,)
    problem = dataclasses.replace(plan.problem, graph=captured.expanded.graph)
    other = lower(plan.schedule, captured.expanded)
    fits = simulate(problem, plan.schedule).peak_bytes <= max(plan.peak_bytes, problem.budget_bytes or 0)
    return (program, other) if fits and other.forward.code == program.forward.code else (program,)


def _device(device: torch.device | str | None) -> torch.device | None:
    return None if device is None else torch.device(device)


def _problem(
    model: nn.Module,
    captured: Capture,
    budget: BudgetLike | None,
    optimizer: torch.optim.Optimizer | None,
    source: CostSource,
    accumulate: bool,
) -> Problem:
    """The captured step with its costs. The budget, where it is given in bytes, is kept while ops are timed."""
    limit = None if budget is None else _device_bytes(budget)
    traced = captured.traced
    state_bytes, update_bytes = (0, 0) if optimizer is None else optimizer_needs(optimizer, traced.device)
    return Problem(traced.graph, _costs(model, captured, limit, source), None, state_bytes, accumulate, update_bytes)


def _costs(model: nn.Module, captured: Capture, limit: int | None, source: CostSource) -> Costs:
    if source == "estimate":
        return estimate(captured.traced)
    if source != "measure":
        raise ValueError(f"costs must be 'measure' or 'estimate', got {source!r}")
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    inputs = captured.call.tensors

    def resident(kind: str, name: str, position: int) -> torch.Tensor:
        return inputs[position] if kind == "input" else tensors[name]

    return measure(captured.traced, resident, limit, progress=sys.stderr.isatty())


def _choose(problem: Problem, front: Front, budget: BudgetLike) -> Plan:
    """The fastest known schedule within the budget."""
    budget_bytes = _resolve(budget, front.keep_all.peak_bytes, problem.resident_bytes)
    chosen = front.best(budget_bytes)
    if chosen is None:
        floor = front.floor
        overhead = floor.time_s / problem.baseline_time_s - 1 if problem.baseline_time_s else 0.0
        raise BudgetInfeasible(
            f"no schedule fits {format_bytes(budget_bytes)}; {format_bytes(floor.peak_bytes)} "
            f"({floor.peak_bytes} bytes) is the least (at {overhead:+.0%} time), of which "
            f"{format_bytes(problem.resident_bytes)} are resident. Raise the budget, or use a smaller batch",
            floor.peak_bytes,
            overhead,
        )
    return _plan(problem, front, chosen, budget_bytes)


def _plan(problem: Problem, front: Front, chosen: Candidate, budget_bytes: int) -> Plan:
    problem = dataclasses.replace(problem, budget_bytes=budget_bytes)
    timeline = simulate(problem, chosen.schedule)
    assert timeline.peak_bytes <= budget_bytes
    bound_s = min(front.bound.time_s(budget_bytes), timeline.time_s)
    return Plan(problem, chosen.schedule, timeline, chosen.solver, bound_s, front.floor.peak_bytes, front.floor.time_s)


def _resolve(budget: BudgetLike, unplanned_bytes: int, resident_bytes: int) -> int:
    """Bytes of a budget, rounded down."""
    if not isinstance(budget, Budget):
        return _limit(budget, unplanned_bytes)
    limits = []
    if budget.device is not None:
        limits.append(_limit(budget.device, unplanned_bytes))
    if budget.activations is not None:
        limits.append(resident_bytes + _limit(budget.activations, unplanned_bytes - resident_bytes))
    if not limits:
        raise ValueError("the Budget sets no limit; give device= or activations=")
    return min(limits)


def _limit(budget: int | float | str, whole_bytes: int) -> int:
    if isinstance(budget, str):
        return parse_bytes(budget)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(f"a budget is an int, a str such as '8GiB', a float in (0, 1] or a Budget, got {budget!r}")
    if isinstance(budget, float):
        if not 0 < budget <= 1:
            raise ValueError(f"a budget given as a float is a fraction of the unplanned peak in (0, 1], got {budget}")
        return int(budget * whole_bytes)
    if budget <= 0:
        raise ValueError(f"a budget must be more than 0 bytes, got {budget}")
    return budget


def _device_bytes(budget: BudgetLike) -> int | None:
    """The limit on the device where it is given in bytes; checks the rest of the budget too."""
    _resolve(budget, 1 << 62, 0)
    device = budget.device if isinstance(budget, Budget) else budget
    return None if device is None or isinstance(device, float) else _limit(device, 0)


def _refuse_other_step(plan: Plan, captured: Capture) -> None:
    difference = first_difference(plan.problem.graph, captured.traced.graph)
    if difference is not None:
        raise PlanMismatch(f"the plan was made for another training step: {difference}. Make a plan for this one")
