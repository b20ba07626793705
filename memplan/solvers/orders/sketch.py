"""Orders of ops beside what the fast accountant says of them, and the best of many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from memplan.problem.schedule import BOUNDARY
from memplan.solvers.orders.flat import Flat, Ints
from memplan.solvers.orders.replay import outcome


@dataclass(frozen=True, slots=True)
class Sketch:
    """An order of ops beside what it comes to.

    - peak_bytes: -1 for an order that is not legal.
    - solver: what the order started from.
    """

    peak_bytes: int
    time_s: float
    solver: str
    order: Ints


def sketch_of(flat: Flat, solver: str, order: Ints) -> Sketch:
    """What an order comes to."""
    return Sketch(*outcome(flat.arrays, order), solver, order)


def keep_all(flat: Flat) -> Ints:
    """The order that runs every op once, in eager order."""
    boundary = flat.arrays.boundary
    return np.array([*range(boundary), BOUNDARY, *range(boundary, flat.op_count)], dtype=np.int64)


class Point(Protocol):
    @property
    def peak_bytes(self) -> int: ...
    @property
    def time_s(self) -> float: ...
    @property
    def order(self) -> Sized: ...


_Point = TypeVar("_Point", bound=Point)


def pareto(sketches: Iterable[_Point]) -> list[_Point]:
    """The legal ones that no other beats in both peak and time: peaks rise, times fall."""
    kept: list[_Point] = []
    for sketch in sorted(sketches, key=lambda s: (s.peak_bytes, s.time_s, len(s.order))):
        if sketch.peak_bytes >= 0 and (not kept or sketch.time_s < kept[-1].time_s):
            kept.append(sketch)
    return kept


def thin(points: Sequence[_Point], limit: int) -> list[_Point]:
    """At most `limit` points of a front: those whose loss costs the most stay.

    A lost point costs a budget just above it.
    """
    kept = list(points)
    while len(kept) > max(limit, 2):
        loss = [(kept[i - 1].time_s - kept[i].time_s) * (kept[i + 1].peak_bytes - kept[i].peak_bytes)
                for i in range(1, len(kept) - 1)]  # fmt: skip
        del kept[1 + loss.index(min(loss))]
    return kept
