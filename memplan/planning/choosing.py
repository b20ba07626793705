"""From the fronts of a step to its plan, or the refusal where nothing fits; and plans that need no search."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memplan.capture.capture import Capture
from memplan.capture.trace.call import Call
from memplan.errors import BudgetInfeasible, IllegalSchedule
from memplan.planning.homes import Residency
from memplan.planning.problems import Problems
from memplan.plans.plan import Plan, structure
from memplan.plans.plan_text import peak_in_short
from memplan.plans.step_memory import step_memory
from memplan.plans.uneven import kind_of, translated
from memplan.problem.data import Graph, Problem
from memplan.problem.reserved import reserved_bytes, steering_of
from memplan.problem.schedule import order_of
from memplan.problem.simulate import simulate
from memplan.problem.steering import Steering
from memplan.runtime.program.step import PlannedStep, ServingStep
from memplan.solvers import Candidate, Front, candidate, textbook
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


class WithoutSearch:
    """Finds plans without a search. `known`, in its methods, are the steps of one model that there are."""

    def __init__(self, problems: Problems) -> None:
        self._problems, self._limits, self._placement = problems, problems.limits, problems.placement

    def of_equal_step(self, captured: Capture, known: Sequence[ServingStep]) -> tuple[Plan, bool] | None:
        """The plan of a known step with the captured one's ops, values and sizes, and whether it is provisional.

        Names of arguments may differ.
        """
        graph = captured.traced.graph
        for step in known:
            if isinstance(step, PlannedStep) and _unnamed(step.plan.problem.graph) == _unnamed(graph):
                problem = dataclasses.replace(step.plan.problem, graph=graph)
                return dataclasses.replace(step.plan, problem=problem), step.provisional
        return None

    def hurried(self, captured: Capture, known: Sequence[ServingStep]) -> Plan | None:
        """The fastest schedule in the budget among no plan at all, those of other calls, and the textbook methods'."""
        limit = self._limits.budget_bytes
        if limit is None or self._placement.host_budget is not None or self._placement.gathers is not None:
            return None
        problem = self._problems.problem(captured, quick=True)
        found = list(textbook(problem))
        for step in known:
            if isinstance(step, PlannedStep) and structure(step.plan.problem.graph) == structure(problem.graph):
                found.append(candidate(problem, step.plan.solver, order_of(step.plan.schedule)))
        fitting = [c for c in found if c.peak_bytes <= self._limits.less_margin(limit)]
        if not fitting:
            return None
        best, floor = min(fitting, key=lambda c: c.time_s), min(found, key=lambda c: c.peak_bytes)
        problem = dataclasses.replace(problem, budget_bytes=limit)
        return Plan(
            problem, best.schedule, best.timeline, best.solver, problem.baseline_time_s, floor.peak_bytes, floor.time_s
        )

    def in_known_order(self, problem: Problem, known: Sequence[ServingStep]) -> Plan | None:
        """The fastest schedule of known steps that serves this problem and fits the budget.

        With it, all ranks gather in the order of the steps that they have.
        """
        limit = self._limits.budget_bytes
        if limit is None:
            return None
        plans = {step.plan.schedule: step.plan for step in known if isinstance(step, PlannedStep)}
        most_bytes = self._limits.less_margin(limit)
        fitting = [self.with_schedule(problem, plan, limit, most_bytes) for plan in plans.values()]
        return min((plan for plan in fitting if plan is not None), key=lambda plan: plan.time_s, default=None)

    def with_schedule(self, problem: Problem, plan: Plan, limit: int, most_bytes: int | None = None) -> Plan | None:
        """A plan for this problem with the schedule of another step's plan.

        None where that schedule does not serve the problem, or peaks too high.

        - limit: the budget in bytes, which the plan is to name.
        - most_bytes: what the schedule may peak at; None is `limit`.
        """
        graph, planned = problem.graph, plan.problem.graph
        problem = dataclasses.replace(problem, budget_bytes=limit, link=plan.problem.link)
        schedule = plan.schedule if kind_of(graph) == kind_of(planned) else translated(plan.schedule, planned, graph)
        if schedule is None:
            return None
        try:
            timeline = simulate(problem, schedule)
        except IllegalSchedule:
            return None
        if timeline.peak_bytes > (limit if most_bytes is None else most_bytes):
            return None
        bound_s = min(gather_bound_s(problem), timeline.time_s)
        found = Plan(problem, schedule, timeline, plan.solver, bound_s, timeline.peak_bytes, timeline.time_s)
        host_budget = self._placement.host_budget
        return found if host_budget is None or found.host_bytes <= host_budget else None

    def at_other_sizes(self, captured: Capture, plan: Plan) -> tuple[Plan, ...]:
        """Plans for a step that differs from that of a plan by sizes alone: with its schedule, and with all kept.

        The first fits the budget; none where neither does.
        """
        limit, problem = self._limits.budget_bytes, self._problems.problem(captured)
        if limit is None or kind_of(problem.graph) != kind_of(plan.problem.graph):
            return ()
        fastest = min(textbook(problem), key=lambda c: c.time_s)
        problem = dataclasses.replace(problem, budget_bytes=limit, link=plan.problem.link)
        found = []
        for schedule, solver in {plan.schedule: plan.solver, fastest.schedule: fastest.solver}.items():
            line = simulate(problem, schedule)
            found.append(Plan(problem, schedule, line, solver, problem.baseline_time_s, line.peak_bytes, line.time_s))
        found.sort(key=lambda p: (p.peak_bytes > limit, p.time_s))
        return tuple(found) if found[0].peak_bytes <= limit else ()


def unplanned_bytes(call: Call, known: Sequence[ServingStep]) -> int | None:
    """Peak bytes of such a call without a plan, as far as the plan of an equal one tells."""
    for step in known:
        if isinstance(step, PlannedStep) and step.key.mismatch(call, hooks=False) is None:
            return int(step.plan_for(call).baseline_peak_bytes)
    return None


def _unnamed(graph: Graph) -> Graph:
    """The graph without the names of inputs, which are those of arguments."""
    values = (dataclasses.replace(v, name="") if v.role == "input" else v for v in graph.values)
    return dataclasses.replace(graph, values=tuple(values))
