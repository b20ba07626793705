"""Fronts of earlier processes, on disk by all that a search depends on: the problem, its configuration, the solvers.

    front = kept_front(problem, config, lambda: solve_front(problem, config))

A problem has the graph, every size, the costs, and what else is on the device. Neither budgets nor the device's
allocator steer a search, so a front serves all of them. Each of its orders is accounted for anew when it is read, and
the one that is chosen goes through `simulate`, as after a search. What is damaged, or was made by other solvers, is
searched for again.

The schedule of the smallest peak is kept by graph and configuration alone, and joins every front of that graph. A
search with costs that were measured anew may end elsewhere, but a budget that was once named as enough stays enough.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import memplan
from memplan.cache import is_used, keep, keep_newest, kept
from memplan.config import Config
from memplan.errors import InvalidPlanFile
from memplan.problem.data import Problem
from memplan.problem.file import decoded, pack, read_checked, unpack
from memplan.solvers import Bound, Candidate, Front, front_of_orders
from memplan.solvers.bounds.dual import BoundLine

_T = TypeVar("_T")

_MOST_BYTES = 64 << 20  # on disk, for fronts and for floors; a front of a thousand ops takes 30 KB


def kept_front(problem: Problem, config: Config, search: Callable[[], Front]) -> Front:
    """The front that is on disk for a problem, else the one that a search finds, which is kept.

    In it is the schedule of the smallest peak that is known for the graph, if it is no larger here than what was found.
    """
    costs = dataclasses.replace(problem.costs, requests=())
    content = dataclasses.asdict(dataclasses.replace(problem, costs=costs, budget_bytes=None, requests=None))
    key = _digest(content, config, memplan.__version__, _digest_of_solvers())
    name = f"front-{key[:32]}.json.gz"

    def front_of(content: Any) -> Front:
        if content["key"] != key:
            raise InvalidPlanFile("the front is that of another problem")
        lines = tuple(BoundLine(float(at_zero_s), float(slope)) for at_zero_s, slope in content["lines"])
        bound = Bound(problem.baseline_time_s, decoded(int, content["floor_bytes"], "floor_bytes"), lines)
        points: Sequence[tuple[str, Sequence[int]]] = [(str(solver), order) for solver, order in content["points"]]
        return front_of_orders(problem, config, points, bound)

    front = _read(name, front_of)
    if front is not None:
        is_used(name)
    else:
        front = search()
        if not front.truncated:
            points = [[point.solver, point.order] for point in front.points]
            bound = {"floor_bytes": front.bound.floor_bytes, "lines": front.bound.lines}
            keep(name, pack({"key": key, "points": points} | bound, gzipped=True))
            keep_newest("front-*", _MOST_BYTES)
    floor, name = front.floor, f"least-{_digest(content['graph'], config)[:32]}.json.gz"

    def least_of(content: Any) -> Candidate:
        if content["order"] == list(floor.order):  # mostly, and to account for it takes a while
            return floor
        return front_of_orders(problem, config, [(str(content["solver"]), content["order"])], front.bound).floor

    least = _read(name, least_of)
    if least is not None and least.peak_bytes <= floor.peak_bytes:
        is_used(name)
        return front if least is floor else front.joined(least)
    keep(name, pack({"solver": floor.solver, "order": floor.order}, gzipped=True))
    keep_newest("least-*", _MOST_BYTES)
    return front


def _read(name: str, read: Callable[[Any], _T]) -> _T | None:
    """What is made of a file on disk; None if there is no such file, or it is damaged."""
    try:
        found = read_checked("front", lambda: read(unpack(kept(name))))
    except OSError:
        return None
    return None if isinstance(found, InvalidPlanFile) else found


def _digest(content: dict[str, Any], *others: Any) -> str:
    """Equal for equal problems, or graphs, and equal other things."""
    return hashlib.sha256(pack(content) + repr(others).encode()).hexdigest()


@functools.cache
def _digest_of_solvers() -> str:
    """Equal for equal solvers and accountants."""
    found, package = hashlib.sha256(), Path(memplan.__file__).parent
    for path in sorted(path for folder in ("problem", "solvers") for path in (package / folder).rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()
