"""Plans that can be had without a search: of an equal step, of other calls, of the textbook methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memplan.capture.capture import Capture
from memplan.capture.trace.call import Call
from memplan.errors import IllegalSchedule
from memplan.planning.problems import Problems
from memplan.plans.plan import Plan, structure
from memplan.plans.uneven import kind_of, translated
from memplan.problem.data import Graph, Problem
from memplan.problem.schedule import order_of
from memplan.problem.simulate import simulate
from memplan.runtime.program.step import PlannedStep, ServingStep
from memplan.solvers import candidate, textbook
from memplan.solvers.bounds.offload_bound import gather_bound_s


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
