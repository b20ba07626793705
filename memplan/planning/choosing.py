"""From the fronts of a step to its plan: what is taken within the limits, or the refusal where nothing fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memplan.errors import BudgetInfeasible
from memplan.planning.homes import Residency
from memplan.plans.plan import Plan
from memplan.plans.plan_text import peak_in_short
from memplan.plans.step_memory import step_memory
from memplan.problem.data import Problem
from memplan.problem.reserved import reserved_bytes, steering_of
from memplan.problem.simulate import simulate
from memplan.problem.steering import Steering
from memplan.solvers import Candidate, Front
from memplan.solvers.bounds.offload_bound import gather_bound_s, offload_bound_s
from memplan.units import format_bytes

_MOST_LED = 4  # candidates, through an arena
_MOST_REPLAYED = 32  # candidates; each is replayed over up to ten steps


def fastest_reserved(problem: Problem, front: Front, limit_bytes: int) -> Candidate | None:
    """The fastest candidate for which CUDA's allocator reserves no more than the limit. Of many, a part is tried."""
    requests = problem.requests
    assert requests is not None
    fitting = [point for point in reversed(front.points) if point.peak_bytes <= limit_bytes]
    tried = fitting[:: -(-len(fitting) // _MOST_REPLAYED) or 1]

    def over_bytes(point: Candidate, steering: Steering | None = None) -> int:
        return reserved_bytes(problem, point.schedule, requests.expandable, steering) - limit_bytes

    first, trial, fits = 0, 0, len(tried)  # those before the first do not fit, those from `fits` on do
    for _ in range(_MOST_LED):
        if trial >= fits:
            break
        excess_bytes = over_bytes(tried[trial])
        if excess_bytes > 0 and requests.arena:
            excess_bytes = over_bytes(tried[trial], steering_of(problem, tried[trial].schedule, requests.expandable))
        if excess_bytes <= 0:
            fits, trial = trial, (first + trial) // 2
        else:  # the next one peaks so much lower
            first, most_bytes = trial + 1, tried[trial].peak_bytes - excess_bytes
            trial = next((i for i in range(first, fits) if tried[i].peak_bytes <= most_bytes), (first + fits) // 2)
    fits = next((i for i in range(fits) if over_bytes(tried[i]) <= 0), fits)
    return tried[fits] if fits < len(tried) else None


def plan_of_front(problem: Problem, front: Front, chosen: Candidate, budget_bytes: int) -> Plan:
    """A plan without copies. chosen: one of the front's schedules, within the budget."""
    problem = dataclasses.replace(problem, budget_bytes=budget_bytes)
    timeline = simulate(problem, chosen.schedule)
    assert timeline.peak_bytes <= budget_bytes
    bound_s = min(front.bound.time_s(budget_bytes), timeline.time_s)
    floor = front.floor
    return Plan(
        problem, chosen.schedule, timeline, chosen.solver, bound_s, floor.peak_bytes, floor.time_s, front.truncated
    )


def plan_of_residency(chosen: Residency, fronts: Sequence[Front], budget_bytes: int, least_bytes: int) -> Plan:
    """A plan that may offload, and gathers parameters that are sharded.

    - fronts: the fronts that it was made from. With gathers it is that of the step without its sharded parameters.
    - least_bytes: the smallest peak that gathers and copies reach.
    """
    problem, found, solver = chosen.problem, chosen.found, chosen.found.solver
    if problem.gather is None:
        bound_s = offload_bound_s(problem, budget_bytes)
    else:
        ungathered, solver = problem.without_network, f"{solver}, with gathers"
        bound_s = max(gather_bound_s(problem), ungathered.baseline_time_s)
        if problem.link is not None:
            bound_s = max(bound_s, offload_bound_s(ungathered, budget_bytes))
        elif fronts[0].keep_all.problem.costs == ungathered.costs:
            bound_s = max(bound_s, fronts[0].bound.time_s(budget_bytes))
    return Plan(
        dataclasses.replace(problem, budget_bytes=budget_bytes), found.schedule, found.timeline,
        solver, min(bound_s, found.timeline.time_s), min(least_bytes, found.timeline.peak_bytes),
        found.timeline.time_s, any(front.truncated for front in fronts),
    )  # fmt: skip


def infeasible(problem: Problem, floor: Candidate, limit: int) -> BudgetInfeasible:
    """The refusal where no schedule without copies fits. floor: the schedule with the smallest peak that was found."""
    overhead = floor.time_s / problem.baseline_time_s - 1 if problem.baseline_time_s else 0.0
    made_of = peak_in_short(step_memory(problem, floor.schedule))
    graph = problem.graph
    largest_bytes, index = max((graph.op_bytes(i), i) for i in range(len(graph.ops)))
    needed_bytes, where = largest_bytes + problem.resident_bytes, graph.ops[index].layer or "the model"
    too_large = (
        f"; {graph.ops[index].kind} in {where} needs {format_bytes(needed_bytes)} with its operands and what is "
        "resident, even alone"
    )
    return BudgetInfeasible(
        f"no schedule fits {format_bytes(limit)}, so the step would run out of memory. "
        f"{format_bytes(floor.peak_bytes)} ({floor.peak_bytes} bytes) is the least (at {overhead:+.0%} time)"
        f"{too_large if needed_bytes > limit else ''}. It is made of:\n" + "\n".join(made_of) + "\nRaise the budget, "
        f"or make the step smaller{_fewer_outputs(problem)}",
        floor.peak_bytes,
        overhead,
        problem.baseline_time_s,
    )


def _fewer_outputs(problem: Problem) -> str:
    """A sentence that a plan for the loss alone may take less, where backward starts from several outputs."""
    count = len(problem.graph.tangents)
    if count < 2:
        return ""
    return f". This is for gradients of {count} outputs; with loss_fn= the plan is for those that the loss uses alone"


def no_room(problem: Problem, floor_bytes: int, limit: int, host_limit: int | None) -> BudgetInfeasible:
    """The refusal where parameters are gathered, or live on the host. host_limit: None where nothing is offloaded."""
    within, least = format_bytes(limit), f"{format_bytes(floor_bytes)} ({floor_bytes} bytes)"
    remedy = "Raise the budget"
    if host_limit is not None:
        within = f"{within} on the device and {format_bytes(host_limit)} on the host"
        least = f"With enough host memory, {least} on the device"
        remedy = "Raise one of the budgets"
    return BudgetInfeasible(
        f"no schedule fits {within}, so the step would run out of memory. {least} is the least. {remedy}, or make the "
        f"step smaller{_fewer_outputs(problem)}",
        floor_bytes,
        baseline_time_s=problem.baseline_time_s,
    )
