"""The fastest known schedule within the budget, and fronts that later processes read.

Fronts of earlier processes are on disk, by all that a search depends on: the problem, its configuration, the solvers.

    front = kept_front(problem, config, lambda: solve_front(problem, config))

A problem has the graph, every size, the costs, and what else is on the device. Neither budgets nor the device's
allocator steer a search, so a front serves all of them. Each of its orders is accounted for anew when it is read, and
the one that is chosen goes through `simulate`, as after a search. What is damaged, or was made by other solvers, is
searched for again.

The schedule of the smallest peak is kept by graph and configuration alone, and joins every front of that graph. A
search with costs that were measured anew may end elsewhere, but a budget that was once named as enough stays enough.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

import memplan
from memplan.cache import is_used, keep, keep_newest, kept
from memplan.capture.capture import Capture
from memplan.config import Config
from memplan.errors import BudgetInfeasible, InvalidPlanFile, Refused, UnsupportedModel
from memplan.logs import log
from memplan.planning.choosing import fastest_reserved, infeasible, no_room, plan_of_front, plan_of_residency
from memplan.planning.homes import (
    Movable,
    ProblemOf,
    Residency,
    all_names,
    choose_homes,
    least_peak_bytes,
    least_resident_bytes,
)
from memplan.planning.problems import Problems
from memplan.plans.plan import Plan
from memplan.problem.data import Problem
from memplan.problem.file import decoded, pack, read_checked, unpack
from memplan.problem.reserved import reserved_bytes
from memplan.problem.simulate import unplanned
from memplan.solvers import Bound, Candidate, Front, Progress, front_of_orders, solve_front
from memplan.solvers.bounds.dual import BoundLine
from memplan.solvers.offload.overlap import hides
from memplan.units import format_bytes

_MUCH = 0.05  # of a step
_RUNGS = 6  # schedules for calls of other sizes
_MOST_LOWERED = 4  # searches for a plan with copies that reserves less
_HOST_POINTS = 12  # budgets of a curve with copies, each a search of its own
_QUIET_S = 2.0  # a search that takes less shows no progress
_EVERY_S = 0.2


class PlanSearch:
    """Searches for plans of one model's steps. Each method returns plans, or why there is none."""

    def __init__(self, problems: Problems) -> None:
        self._problems, self._settings = problems, problems.settings
        self._limits, self._placement = problems.limits, problems.placement

    def plan(self, captured: Capture) -> Plan | Refused:
        """The fastest known schedule within the budget.

        With a host budget it may offload values, and may have parameters live on the host.
        """
        if self._settings.shards is not None:
            plan = self.with_gathers(captured, self._problems.with_shards(captured))
            if isinstance(plan, Plan):
                self._placement.take_over(plan)
            return plan
        problem, placement = self._problems.problem(captured), self._placement
        if placement.host_budget is None:
            return self._within(problem, self._front(problem))
        by_homes = self._problems.by_homes(captured, problem)
        if isinstance(by_homes, UnsupportedModel):
            return by_homes
        parts, problem_of = by_homes
        plain = problem_of(frozenset())
        limit = self._limits.fix_budget(unplanned(plain).peak_bytes, plain.all_on_device.resident_bytes, 0)
        within = self._limits.less_margin(limit)
        on_device = None if placement.host or least_resident_bytes(plain) > limit else self._front(plain)
        free = on_device is not None and on_device.keep_all.peak_bytes <= within
        front = on_device if on_device and (free or not parts) else self._front(problem_of(all_names(parts)))
        least = least_peak_bytes(all_names(parts), front, problem_of)
        host = placement.host_budget, placement.host
        search = functools.partial(choose_homes, parts, front, on_device, problem_of, *host)
        chosen = search(within) or search(limit)
        if chosen is None and self._limits.raised_to(least) > limit:
            limit = within = least
            chosen = search(limit)
        if chosen is None:
            return no_room(plain, least, limit, placement.host_budget)
        chosen = self._reserving(within, chosen, search)
        if self._settings.keep_frozen:
            staying = search(max(within, chosen.found.timeline.peak_bytes), stays=True)
            if staying is not None:
                staying = self._reserving(within, staying, functools.partial(search, stays=True))
            if staying is not None and staying.found.timeline.time_s < chosen.found.timeline.time_s:
                chosen = staying
        update_s, time_s = chosen.problem.host_update_s, chosen.found.timeline.time_s
        groups = [] if self._settings.optimizer is None else self._settings.optimizer.param_groups
        if placement.host is None and update_s > _MUCH * time_s and not all(g.get("fused", True) for g in groups):
            more = "that live on the host; with fused=True, optimizers of PyTorch take much less"
            log.warning("of a step of %.3g s the CPU takes %.3g s to update parameters %s", time_s, update_s, more)
        placement.decide(chosen.host)
        plan = plan_of_residency(chosen, (front,) if on_device is None else (front, on_device), limit, least)
        return self._telling_of_reserved(plan, within)

    def ladder(self, captured: Capture) -> tuple[Plan, ...] | Refused:
        """Plans for a step of any size. The first is for the captured call, the others suit longer and shorter ones."""
        if self._placement.host_budget is not None:
            plan = self.plan(captured)
            return (plan,) if isinstance(plan, Plan) else plan
        problem = self._problems.problem(captured)
        front = self._front(problem)
        chosen = self._within(problem, front)
        if not isinstance(chosen, Plan):
            return chosen
        others = (
            plan_of_front(problem, front, point, max(point.peak_bytes, chosen.problem.budget_bytes or 0))
            for point in front.spread(_RUNGS)
        )
        return (chosen, *(plan for plan in others if plan.schedule != chosen.schedule))

    def _within(self, problem: Problem, front: Front) -> Plan | BudgetInfeasible:
        """The fastest plan of a front within the budget."""
        limit = self._limits.fix_budget(unplanned(problem).peak_bytes, problem.resident_bytes, front.floor.peak_bytes)
        within = self._limits.less_margin(limit)  # a wish, where the limit itself has to be kept
        chosen = front.best(within) or front.floor
        if chosen.peak_bytes > limit:
            return infeasible(problem, front.floor, limit)
        if problem.requests is None or not self._limits.is_in_bytes:
            return plan_of_front(problem, front, chosen, limit)
        reserved = fastest_reserved(problem, front, within)
        plan = plan_of_front(problem, front, reserved or chosen, limit)
        return self._telling_of_reserved(plan, within) if reserved is None else plan

    def curve(self, captured: Capture) -> tuple[Plan, ...] | UnsupportedModel:
        """Plans along the curve of peak against time, from the smallest peak to the unplanned step."""
        problem, placement = self._problems.problem(captured), self._placement
        if placement.host_budget is None:
            front = self._front(problem)
            points = front.spread(self._settings.search.points)
            return tuple(plan_of_front(problem, front, point, point.peak_bytes) for point in points)
        by_homes = self._problems.by_homes(captured, problem)  # from the smallest peak that copies reach
        if isinstance(by_homes, UnsupportedModel):
            return by_homes
        parts, problem_of = by_homes
        on_device = self._front(problem_of(frozenset()))
        front = self._front(problem_of(all_names(parts))) if parts else on_device
        least, most = least_peak_bytes(all_names(parts), front, problem_of), on_device.keep_all.peak_bytes
        host = placement.host_budget, placement.host
        search = functools.partial(choose_homes, parts, front, on_device, problem_of, *host)
        found: list[Plan] = []
        count = min(self._settings.search.points, _HOST_POINTS)
        for limit in sorted({least + (most - least) * step // count for step in range(count + 1)}):
            chosen = search(limit)
            if chosen is not None and (not found or chosen.found.timeline.time_s < found[-1].time_s):
                peak_bytes = chosen.found.timeline.peak_bytes
                found = [plan for plan in found if plan.peak_bytes < peak_bytes]
                found.append(plan_of_residency(chosen, (front, on_device), peak_bytes, least))
        return tuple(found)

    def with_gathers(self, captured: Capture, problem: Problem) -> Plan | Refused:
        """A plan for a step with sharded parameters, which gathers them to be read.

        With a host budget it may offload values. The parts that ranks have of parameters of `fully_shard` may live on
        the host.

        problem: of the step, or of one that differs from it in sizes alone.
        """
        parts: tuple[Movable, ...] = ()
        problem_of: ProblemOf = lambda _: problem  # noqa: E731
        if self._placement.is_to_be_decided:
            by_homes = self._problems.by_homes(captured, problem)
            if isinstance(by_homes, UnsupportedModel):
                return by_homes
            parts, problem_of = by_homes
        host_budget, everything, host = self._placement.host_budget, all_names(parts), self._placement.host
        ungathered = self._without_gathered(problem)
        front = self._without_gathered(problem_of(everything)) if parts else ungathered
        gathered_bytes = problem.all_on_device.resident_bytes - problem.resident_bytes
        least = least_peak_bytes(everything, front, problem_of)
        limit = self._limits.fix_budget(ungathered.keep_all.peak_bytes + gathered_bytes, problem.resident_bytes, least)

        def search(limit_bytes: int) -> Residency | None:
            """The fastest step within the limit. No parts move where that makes no step faster."""
            found = choose_homes((), ungathered, None, problem_of, host_budget or 0, host or frozenset(), limit_bytes)
            if not parts or (found is not None and (host or found.is_fastest)):
                return found
            moving = choose_homes(parts, front, None, problem_of, host_budget or 0, host or None, limit_bytes)
            both = [choice for choice in (found, moving) if choice is not None]
            return min(both, key=lambda choice: choice.found.timeline.time_s, default=None)

        within = self._limits.less_margin(limit)
        chosen = search(within) or search(limit)
        if chosen is None:
            return no_room(problem, least, limit, host_budget)
        chosen = self._reserving(within, chosen, search)
        plan = plan_of_residency(chosen, tuple(dict.fromkeys((front, ungathered))), limit, least)
        return self._telling_of_reserved(plan, within)

    def _without_gathered(self, problem: Problem) -> Front:
        """The best schedules of a step that gathers parameters, without what it gathers."""
        return self._front(problem.without_network if hides(problem) else problem)

    def _reserving(self, limit_bytes: int, chosen: Residency, search: Callable[[int], Residency | None]) -> Residency:
        """A choice for which PyTorch's CUDA allocator reserves no more than the limit.

        Each search is for a peak that is lower by what the one before reserved too much. The first choice stays where
        no search of a few finds one.
        """
        requests, found, peak_bytes, searches = chosen.problem.requests, chosen, limit_bytes, 0
        if requests is None or not self._limits.is_in_bytes:
            return chosen
        while (reserved := reserved_bytes(found.problem, found.found.schedule, requests.expandable)) > limit_bytes:
            peak_bytes -= reserved - limit_bytes
            lower = search(peak_bytes) if searches < _MOST_LOWERED else None
            if lower is None:
                return chosen
            found, searches = lower, searches + 1
        return found

    def _telling_of_reserved(self, plan: Plan, limit_bytes: int) -> Plan:
        """The plan, with a warning where more is reserved for it than the limit."""
        if plan.problem.requests is not None and self._limits.is_in_bytes and plan.reserved_bytes > limit_bytes:
            budget_bytes = plan.problem.budget_bytes or 0
            log.warning(
                "a step holds at most %s, but PyTorch's allocator reserves %s for it, and may run out of memory on a "
                "device with %s: lower the budget, or set PYTORCH_ALLOC_CONF=expandable_segments:True if it is not set",
                format_bytes(plan.peak_bytes), format_bytes(plan.reserved_bytes), format_bytes(budget_bytes),
            )  # fmt: skip
        return plan

    def _front(self, problem: Problem) -> Front:
        """The best schedules that the configured search finds, now or in an earlier process.

        A terminal shows progress where that takes long, with the gap at the budget.
        """
        problem, config = dataclasses.replace(problem, budget_bytes=self._limits.known_bytes), self._settings.search
        with progress_line(sys.stderr) as show:
            front = kept_front(problem, config, lambda: solve_front(problem, config, show))
        if front.truncated:
            log.warning("the search was stopped before it was done; the best schedule so far is taken")
        return front


@contextlib.contextmanager
def progress_line(stream: TextIO) -> Iterator[Callable[[Progress], None]]:
    """A context with a function that shows progress in place. At the end the line is cleared.

    The function is silent where the stream is no terminal. It shows the stage, how much of it is done and the gap.
    """
    due_s, width = time.monotonic() + _QUIET_S, 0

    def write(text: str) -> None:
        nonlocal width
        stream.write("\r" + text.ljust(width) + ("" if text else "\r"))
        stream.flush()
        width = len(text)

    def show(progress: Progress) -> None:
        nonlocal due_s
        if stream.isatty() and time.monotonic() >= due_s:
            due_s = time.monotonic() + _EVERY_S
            gap = "" if progress.gap is None else f", at most {progress.gap:.1%} over the best possible"
            write(f"memplan: {progress.stage} {progress.done:.0%}{gap}; Ctrl-C takes the best plan so far")

    try:
        yield show
    finally:
        if width:
            write("")


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
