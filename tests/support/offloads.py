"""Copies for one order of ops by themselves, what a graph has on the host, and streams that copy early at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from memplan.problem.data import Graph, Problem
from memplan.problem.schedule import Schedule
from memplan.runtime.host.streams import Direction, FakeStreams
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


class EarlyStreams(FakeStreams):
    """Streams on a CPU some of whose copies happen early, at random. seed: None never copies early."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self._random = None if seed is None else random.Random(seed)

    def copy(self, direction: Direction, source: torch.Tensor, target: torch.Tensor) -> Any:
        copy = super().copy(direction, source, target)
        self._run_some()
        return copy

    def wait(self, event: Any) -> None:
        super().wait(event)
        self._run_some()

    def _run_some(self) -> None:
        if self._random is None:
            return
        with self._lock:
            early = [copy for copy in self._pending if self._random.random() < 0.3]
            self._pending = [copy for copy in self._pending if copy not in early]
            for copy in early:
                copy.run()
