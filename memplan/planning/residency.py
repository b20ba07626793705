"""Which parameters live on the host, and a plan for a step that may offload.

Every parameter that lives on the host has to be fetched for the forward and for the backward pass, and its gradient
sent back. In return, the memory of the parameter, its gradient and its optimizer state is free on the device all the
time. So a few shares of the parameters are tried, from none to all of them, then shares around the best one, and the
fastest step is taken. A share is spread evenly over the step, so that its copies can overlap with compute.

The best schedule without any copies is the first to beat, so a host budget never makes a step slower. Where copies of
frozen parameters may stay on the device between steps, the best schedule without that is the next to beat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memplan.planning.homes import Movable
from memplan.problem.data import Problem
from memplan.problem.packing import host_bytes_beside
from memplan.solvers import Front
from memplan.solvers.bounds.offload_bound import residency_bound_s
from memplan.solvers.offload.fit_copies import Offloaded, least_bytes, solve_offload

_UNUSED = 1e-9  # a share that has none of the parameters which the step uses
_SHARES = (0.0, _UNUSED, 0.125, 0.25, 0.5, 0.75, 1.0)
_ROUNDS = 5  # of shares halfway to the next ones, around the best
_ORDERS = 24
_WORTH = 1e-3  # of a step: for less, no further parameters move to the host

ProblemOf = Callable[[frozenset[str]], Problem]  # the step's problem where these parameters live on the host


@dataclass(frozen=True, slots=True)
class Residency:
    """A choice of the parameters that live on the host, with a schedule.

    - host: names of the parameters that live there.
    - problem: the step with those homes.
    - found: the schedule and its timeline.
    """

    host: frozenset[str]
    problem: Problem
    found: Offloaded

    @property
    def is_fastest(self) -> bool:
        """Whether no step can be faster: it takes no longer than without a plan."""
        return self.found.timeline.time_s <= self.problem.baseline_time_s


def spread_share(movables: Sequence[Movable], share: float) -> frozenset[str]:
    """Names of parameters with about this share of the bytes, spread evenly over the order of first use.

    Parameters that the step does not use come first, all of them, because fetching them costs the step nothing.
    """
    chosen = [name for movable in movables if share and not movable.used for name in movable.names]
    owed_bytes = 0.0
    for movable in movables:
        if not movable.used:
            continue
        owed_bytes += share * movable.size_bytes
        if owed_bytes >= movable.size_bytes * (1 - 1e-9):
            owed_bytes -= movable.size_bytes
            chosen += movable.names
    return frozenset(chosen)


def choose_homes(
    movables: Sequence[Movable],
    front: Front,
    alone: Front | None,
    problem_of: ProblemOf,
    host_budget_bytes: int,
    fixed: frozenset[str] | None,
    budget_bytes: int,
    *,
    stays: bool = False,
) -> Residency | None:
    """The fastest step that keeps both budgets; None where there is none.

    - movables: parameters that may live on the host.
    - front: of the step without its movable parameters.
    - alone: of the step with all of them on the device, as it is planned without a host budget; None where that is
      known to be too large.
    - problem_of: gives the step's problem where parameters of these names live on the host.
    - host_budget_bytes, budget_bytes: the budgets on the host and on the device.
    - fixed: parameters that live on the host because of another call; more go there only where nothing fits without.
    - stays: copies of lasting parameters may stay on the device between steps.
    """
    best: Residency | None = None
    seen = set[frozenset[str]]()
    if alone is not None and (kept := alone.best(budget_bytes)) is not None:  # the fastest step that only recomputes
        problem = dataclasses.replace(problem_of(frozenset()), budget_bytes=budget_bytes)
        best = Residency(frozenset(), problem, Offloaded(kept.solver, kept.schedule, kept.timeline))

    def is_faster(host: frozenset[str]) -> bool:
        """Look for a schedule with these parameters on the host. Whether it is the fastest so far."""
        nonlocal best
        before = best
        if host in seen or (best is not None and best.is_fastest):
            return False
        seen.add(host)
        problem = dataclasses.replace(problem_of(host), budget_bytes=budget_bytes)
        room_bytes = host_budget_bytes - host_bytes_beside(problem)
        under_s = float("inf") if best is None else best.found.timeline.time_s * (1 - _WORTH)
        if room_bytes < 0 or residency_bound_s(problem) >= under_s:
            return False
        for tried in (front,) if host or alone is None or alone is front else (alone, front):
            found = solve_offload(problem, tried.points, budget_bytes, room_bytes, under_s, stays)
            if found is not None:
                best = Residency(host, problem, found)
                under_s = found.timeline.time_s * (1 - _WORTH)
        return best is not before

    if fixed is not None:
        for share in _SHARES:  # first none but those
            if best is None or not share:
                is_faster(fixed | spread_share(movables, share))
        return best
    chosen = 0.0
    for share in _SHARES:
        chosen = share if is_faster(spread_share(movables, share)) else chosen
    known = set(_SHARES)
    for _ in range(_ROUNDS if chosen else 0):  # what lives there is slow to update, so a little less may be best
        below, above = max(s for s in known if s < chosen), min((s for s in known if s > chosen), default=chosen)
        for share in sorted({(below + chosen) / 2, (chosen + above) / 2} - known):
            known.add(share)
            chosen = share if is_faster(spread_share(movables, share)) else chosen
    return best


def least_resident_bytes(problem: Problem) -> int:
    """The bytes that any schedule without copies holds at its end: what is resident, and every gradient."""
    values = problem.graph.values
    held = sum(v.size_bytes for v in values if v.role == "gradient" and v.held and v.reuses is None)
    return problem.resident_bytes + (0 if problem.frees_gradients else held)


def least_peak_bytes(host: frozenset[str], front: Front, problem_of: ProblemOf) -> int:
    """The smallest budget on the device that copies can reach with these parameters on the host.

    front: has the orders of ops that are tried.
    """
    return least_bytes(problem_of(host), *(c.order for c in front.spread(_ORDERS)))
