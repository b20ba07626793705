"""Copies for one order of ops by themselves, and what a graph has on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memplan.problem.data import Graph, Problem
from memplan.problem.schedule import Schedule
from memplan.solvers.offload.copies import Movables, movables_of
from memplan.solvers.offload.fit_copies import placements
from memplan.solvers.orders.flat import Flat, flatten


def place_copies(problem: Problem, order: Sequence[int], budget_bytes: int) -> Schedule | None:
    """A schedule of this order that peaks within the budget on the device; None where copies can't bring it there."""
    places = settled(problem, order, budget_bytes, flatten(problem), movables_of(problem))
    return None if places is None else places.schedule()


def settled(problem: Problem, order: Sequence[int], budget_bytes: int, flat: Flat, movables: Movables) -> Any:
    """The fastest placement of copies for an order that peaks within the budget. flat, movables: of the problem."""
    found = placements(problem, order, budget_bytes, flat, movables)
    return min(found, key=lambda places: places.lanes()[0], default=None)


def host_resident_bytes(graph: Graph) -> int:
    """Bytes of parameters whose home is the host."""
    return sum(v.size_bytes for v in graph.values if v.resident and v.home == "host")
