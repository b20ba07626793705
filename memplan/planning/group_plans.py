"""Plans that ranks of a group share: one rank searches, and all of them run what it found."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from memplan.capture.capture import Capture
from memplan.costs.known_costs import device_name
from memplan.costs.optimizer import optimizer_memory
from memplan.errors import MemplanError, Refused, or_raise
from memplan.logs import log
from memplan.planning.choosing import WithoutSearch
from memplan.planning.plan_search import PlanSearch
from memplan.planning.problems import Problems
from memplan.plans.plan import Plan, plan_from_bytes, plan_to_bytes
from memplan.plans.uneven import kind_of, sizes_of, widest
from memplan.problem.data import Graph, Problem
from memplan.problem.simulate import simulate
from memplan.runtime.program.step import ServingStep
from memplan.runtime.ranks.agreement import Share


class GroupPlans:
    """Gets plans of one model's steps together with the other ranks that train it.

    Refusals are raised, because errors of one rank are raised on all.
    """

    def __init__(self, problems: Problems, plans: PlanSearch, without: WithoutSearch) -> None:
        self._settings, self._limits, self._placement = problems.settings, problems.limits, problems.placement
        self._plans, self._without_search = plans, without

    def shared(
        self, captured: Capture, provisional: bool, share: Share, make: Callable[[], tuple[Plan | Refused, bool]]
    ) -> tuple[Plan, bool]:
        """A plan, and whether it is provisional. One rank makes it for all with equal steps, devices and settings.

        - provisional: whether this rank would take a provisional plan.
        - share: exchanges plans with the other ranks.
        - make: makes the plan, on the rank that plans.
        """
        own: list[tuple[Plan, bool]] = []

        def packed(figures: Sequence[Any]) -> bytes:
            found, provisional = make()
            plan = or_raise(found)
            own.append((plan, provisional))
            return bytes([provisional]) + plan_to_bytes(plan)

        limit = self._limits.known_bytes
        homes = sorted(self._placement.host or ())
        facts = (*self._facts(captured), homes, self._limits.margin, provisional, limit or self._settings.budget)
        made, _ = share(_digest(facts), limit or 0, packed)
        plan, provisional = own[0] if own else (plan_from_bytes(made[1:]), bool(made[0]))
        self.take_over(plan)  # whoever made it, or later plans would depend on that
        return plan, provisional

    def for_all(
        self, captured: Capture, known: Sequence[ServingStep], share: Share, problem: Callable[[], Problem]
    ) -> Plan:
        """A plan with the schedule that all ranks run, because all must gather in one order.

        It fits the budget of each of the ranks whose steps differ by sizes alone. Where other ranks have steps of
        another structure, all take the schedule of those whose steps are the largest.

        - known: steps that there are.
        - share: exchanges plans with the other ranks.
        - problem: gives the problem of the captured step.
        """
        assert self._settings.shards is not None
        limits, uneven = self._limits, False
        known_limit = limits.known_bytes
        kept_limit = None if self._settings.on_infeasible == "min" else known_limit  # else the plan may raise it
        own = functools.cache(lambda host: problem())  # of the step with these parameters on the host
        host = self._placement.host

        def figures() -> Any:
            nonlocal uneven
            uneven = True
            return {**sizes_of(own(host)), "limit_bytes": kept_limit}

        def make(of_all: Sequence[Any]) -> bytes:
            if of_all:
                log.info("batches of %d ranks differ in size; one schedule serves them", len(of_all))
                return plan_to_bytes(self._for_uneven(captured, own(host), of_all, known))
            return plan_to_bytes(or_raise(self._in_order(captured, own(host), known)))

        host_budget = self._placement.host_budget
        kind = (
            kind_of(captured.traced.graph), limits.accumulate, self._settings.grads, self._settings.search, host_budget
        )  # fmt: skip
        exact = _digest((*self._facts(captured), self._settings.shards.resident_bytes))
        made, others = share(_digest(kind), known_limit or 0, make, exact, figures)
        plan = plan_from_bytes(made)
        largest = max(map(plan_from_bytes, others), key=_need, default=plan)
        if _need(largest) > _need(plan):
            limits.reset(known_limit)
            self.take_over(largest)
            found = self._without_search.with_schedule(own(self._placement.host), largest, limits.budget_bytes or 0)
            if found is not None:
                return found
            log.warning("this rank's batch takes other ops, and can't run in the order of other ranks'")
        limits.reset(limits.budget_bytes or kept_limit)
        self.take_over(plan)
        if not uneven:
            return plan
        found = self._without_search.with_schedule(own(self._placement.host), plan, limits.budget_bytes or 0)
        if found is None:  # no step peaks above the widest, but copies lie on the host in another way
            raise MemplanError("what the schedule for all ranks offloads does not fit the host budget. Raise it")
        if plan.floor_bytes >= found.floor_bytes:
            return found
        return dataclasses.replace(found, floor_bytes=plan.floor_bytes, floor_time_s=plan.floor_time_s)

    def _in_order(self, captured: Capture, problem: Problem, known: Sequence[ServingStep]) -> Plan | Refused:
        """A plan, with the schedule of a known step if that serves."""
        return self._without_search.in_known_order(problem, known) or self._plans.with_gathers(captured, problem)

    def _for_uneven(self, captured: Capture, own: Problem, of_all: Sequence[Any], known: Sequence[ServingStep]) -> Plan:
        """The plan that takes the least time on the slowest rank, of those that fit all ranks' budgets.

        One for the largest batch within the lowest budget fits them all. If no rank has both, those of the rank with
        the largest batch and of the rank with the lowest budget may fit too, and take less time.

        of_all: figures of each rank.
        """
        limits = [figures["limit_bytes"] for figures in of_all]
        before, plans = self._limits.budget_bytes, [self._in_order(captured, widest(own, of_all), known)]
        ranks = [] if None in limits else [(widest(own, [f]), limit) for f, limit in zip(of_all, limits, strict=True)]
        largest = max(ranks, key=lambda rank: rank[0].baseline_time_s, default=None)
        lowest = min(ranks, key=lambda rank: rank[1], default=None)
        if largest is not None and lowest is not None and largest[1] > lowest[1]:
            for problem, limit in (largest, lowest):
                self._limits.reset(limit)
                plan = self._plans.with_gathers(captured, problem)
                if not isinstance(plan, Plan) or all(self._serves(plan, *rank) for rank in ranks):
                    plans.append(plan)
            self._limits.reset(before)
        found = [plan for plan in plans if isinstance(plan, Plan)]
        if not found:
            return or_raise(plans[-1])
        if len(found) == 1:
            return found[0]
        return min(found, key=lambda plan: max(simulate(problem, plan.schedule).time_s for problem, _ in ranks))

    def _serves(self, plan: Plan, problem: Problem, limit: int) -> bool:
        """Whether a plan's schedule keeps a rank's budget."""
        return self._without_search.with_schedule(problem, plan, limit, self._limits.less_margin(limit)) is not None

    def take_over(self, plan: Plan) -> None:
        """Settle what a first plan decides for the later ones, from a plan that may come from elsewhere."""
        self._placement.take_over(plan)
        self._limits.reset(self._limits.budget_bytes or plan.problem.budget_bytes)

    def _facts(self, captured: Capture) -> tuple[object, ...]:
        """What a plan depends on, beside the budget."""
        settings, limits, placement, device = self._settings, self._limits, self._placement, captured.traced.device
        needs = None if settings.optimizer is None else optimizer_memory(settings.optimizer, device)[:2]
        return (
            _of_any_rank(captured.traced.graph), device_name(device), needs, limits.accumulate, limits.keeps_written,
            settings.grads, settings.costs, settings.search, placement.host_budget, placement.known_link,
            settings.update, settings.in_flight, settings.surroundings, settings.keep_frozen, settings.arena,
        )  # fmt: skip


def _need(plan: Plan) -> tuple[int, str]:
    """A key to sort steps by size, with something that tells equally large ones apart."""
    return plan.baseline_peak_bytes, _digest(kind_of(plan.problem.graph))


def _of_any_rank(graph: Graph) -> Graph:
    """The graph, with keys of collectives that do not name this rank's process groups, but count them."""
    counts = dict[str, str]()
    ops = (
        dataclasses.replace(op, key=counts.setdefault(op.key, f"{op.kind} {len(counts)}")) if op.is_collective else op
        for op in graph.ops
    )
    return dataclasses.replace(graph, ops=tuple(ops))


def _digest(facts: object) -> str:
    """One text for equal facts."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()
