"""The front of a problem: the best schedules known for every budget.

Candidates come from the methods of a configuration; where it asks for that, a local search refines them. Orders are
accounted for by `replay`; a candidate's schedule goes through `schedule_of` and `simulate` when it is asked for. More
budget never costs time, because a budget takes the fastest point that fits.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from memplan.config import Config
from memplan.jit import tell_of_compilation, watching_compilation
from memplan.problem.data import Problem
from memplan.problem.schedule import Schedule, Timeline, schedule_of
from memplan.problem.simulate import simulate
from memplan.solvers.bounds.lower_bound import Bound, bound_of
from memplan.solvers.chain.expand import baselines
from memplan.solvers.front.methods import FAMILIES, METHODS, MethodTask
from memplan.solvers.orders.flat import flatten
from memplan.solvers.orders.replay import Sketch, keep_all, pareto, sketch_of, thin
from memplan.solvers.search.refine import refine, trade


class Progress(NamedTuple):
    """Where a search stands.

    - stage: what is being done.
    - done: share of that stage.
    - gap: of the best schedule so far within the problem's budget; None without one, or where nothing fits yet.
    """

    stage: str
    done: float
    gap: float | None


Tell = Callable[[Progress], None]
_LONG_OPS = 2000
_LOOK_S = 0.1  # between looks at the clock
_LONGEST = ("exact", "hierarchy")  # methods that start early, so that no core waits for them in the end


@dataclass(frozen=True)
class Candidate:
    """A legal schedule, by its order of ops with the boundary among them. solver: what it started from."""

    problem: Problem
    solver: str
    order: tuple[int, ...]
    peak_bytes: int
    time_s: float

    @cached_property
    def schedule(self) -> Schedule:
        return schedule_of(self.problem.graph, self.order)

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.problem, self.schedule)


@dataclass(frozen=True, slots=True)
class Front:
    """The best schedules found for every budget.

    - points: no point has both a lower peak and less time than another; peaks rise, times fall.
    - truncated: the search was stopped, by the clock or by the user, before it was done.
    """

    points: tuple[Candidate, ...]
    keep_all: Candidate
    bound: Bound
    truncated: bool

    @property
    def floor(self) -> Candidate:
        """The candidate with the smallest peak."""
        return self.points[0]

    def joined(self, further: Candidate) -> Front:
        return dataclasses.replace(self, points=tuple(pareto([*self.points, further])))

    def best(self, budget_bytes: int | None) -> Candidate | None:
        """The fastest candidate that peaks within the budget; None where none does."""
        within = (c for c in reversed(self.points) if budget_bytes is None or c.peak_bytes <= budget_bytes)
        return next(within, None)

    def spread(self, count: int) -> tuple[Candidate, ...]:
        """At most `count` of the points (two at least), those that matter most."""
        return tuple(thin(self.points, count))


def solve_front(problem: Problem, config: Config | None = None, tell: Tell | None = None) -> Front:
    """The front of a problem for every budget. `tell` is called with the progress.

    Ctrl-C, and `config.timeout_s`, end the search early with what it has. The problem's own budget steers nothing; it
    says for which peak the progress states a gap.
    """
    with watching_compilation(tell_of_compilation):
        return _FrontSearch(problem, config or Config(), tell or (lambda progress: None)).run()


def front_of_orders(
    problem: Problem, config: Config, orders: Sequence[tuple[str, Sequence[int]]], bound: Bound
) -> Front:
    """The front that a search found, from the orders of its points and its bound. Each order is accounted for anew.

    orders: what each started from, and its ops with the boundary among them. Raises ValueError for one that can't be.
    """
    flat, found = flatten(problem), list[Sketch]()
    everything, boundary = keep_all(flat), flat.arrays.boundary
    for solver, given in orders:
        order = np.array(given, dtype=np.int64)
        backward = order[(order < 0) | (order >= boundary)]  # in its own order
        missing = np.setdiff1d(np.arange(flat.op_count), order)
        late = np.setdiff1d(np.flatnonzero(~flat.arrays.deferrable[:boundary]), order[: np.argmax(order < 0)])
        if order.ndim != 1 or len(missing) or len(late) or not np.array_equal(backward, everything[boundary:]):
            raise ValueError("the order is that of another step")
        found.append(sketch_of(flat, solver, order))
    if not found or any(sketch.peak_bytes < 0 for sketch in found):
        raise ValueError("an order reads what is not there")
    return _front(problem, config, found, sketch_of(flat, "keep all", everything), bound, truncated=False)


def textbook(problem: Problem) -> tuple[Candidate, ...]:
    """The textbook schedules, those first that peak lower: what can be had without a search.

    Keep all is among them.
    """
    flat = flatten(problem)
    sketches = [sketch_of(flat, name, order) for name, order in baselines(flat, Config().figures.coarse_blocks)]
    legal = [_candidate(problem, sketch) for sketch in sketches if sketch.peak_bytes >= 0]
    return tuple(sorted(legal, key=lambda c: c.peak_bytes))


def candidate(problem: Problem, solver: str, order: tuple[int, ...]) -> Candidate:
    """An order as a candidate for a problem that it was not found for. Raises IllegalSchedule."""
    timeline = simulate(problem, schedule_of(problem.graph, order))
    return Candidate(problem, solver, order, timeline.peak_bytes, timeline.time_s)


class _FrontSearch:
    """One run: what was found so far."""

    def __init__(self, problem: Problem, config: Config, tell: Tell) -> None:
        self.problem, self.config, self.tell = problem, config, tell
        self.flat = flatten(problem)
        self.updates = any(v.updates for v in problem.graph.values)
        self.deadline_s = time.monotonic() + config.timeout_s
        self.everything = sketch_of(self.flat, "keep all", keep_all(self.flat))
        self.found: dict[str, list[Sketch]] = {"keep all": [self.everything]}
        self.task = MethodTask.of(problem, self.flat, config)
        self.truncated = False

    def run(self) -> Front:
        try:
            self._search()
            if self.config.polish:
                self._polish()
        except (KeyboardInterrupt, TimeoutError):
            self.truncated = True
        return _front(self.problem, self.config, self._all(), self.everything, self.task.bound, self.truncated)

    def _search(self) -> None:
        """Run the methods, and look for the lower bound, of which moments are made."""
        self._report("bounds", 0.0)
        first = "moments" if "moments" in self.config.methods else "bounds"
        methods = sorted(self.config.methods, key=lambda method: method not in _LONGEST)
        searches = {method: METHODS[method](self.task) for method in methods if method != first}
        self._side_by_side({first: self._bounds(), **searches}, self._report)
        if self.problem.in_flight > 1:  # what is found for one microbatch by itself is a little better now and then
            front = solve_front(dataclasses.replace(self.problem, in_flight=1), self.config)
            orders = [(point.solver, np.array(point.order, dtype=np.int64)) for point in front.points]
            self.found["alone"] = [sketch_of(self.flat, solver, order) for solver, order in orders]
            if front.truncated:
                raise TimeoutError

    def _bounds(self) -> Iterator[Sketch]:
        """The lower bound, and schedules that suit it."""
        figures = self.config.figures
        moments = min(figures.moments, max(2, figures.moment_work // self.flat.op_count))
        relaxed = flatten(self.problem, updates=False) if self.updates else self.flat
        bound = bound_of(relaxed, self.problem.baseline_time_s, moments, figures.cuts)
        self.task = dataclasses.replace(self.task, bound=bound)
        if "moments" in self.config.methods:
            yield from METHODS["moments"](self.task)

    def _polish(self) -> None:
        """Refine families of methods side by side, then trade between them."""
        self._report("polishing", 0.0)
        families = [[s for method in family for s in self.found.get(method, [])] for family in FAMILIES]
        families = [sketches for sketches in families if sketches]
        if self.flat.op_count > _LONG_OPS:  # where a family costs a second, and repeats leave little to be lost
            families = [list(chain(*families))] if families else []
        bound, known = self.task.bound, self._all()
        starts = [[self.everything, *sketches] for sketches in families]
        self._side_by_side(
            {f"refined {i}": refine(self.flat, s, known, bound, self.config.figures) for i, s in enumerate(starts)},
            lambda name, done: self._report("polishing", 0.8 * done),
        )
        self._side_by_side(
            {"traded": trade(self.flat, self._all(), bound, self.config.figures, self.config.points)},
            lambda name, done: self._report("polishing", done),
        )

    def _side_by_side(self, searches: dict[str, Iterator[Sketch]], tell: Callable[[str, float], None]) -> None:
        names = list(searches)
        left = set(names)
        self.found |= {name: [] for name in names}

        def ended(position: int) -> None:
            left.discard(names[position])
            tell(names[position], 1 - len(left) / len(names))

        side_by_side(list(searches.values()), [self.found[name] for name in names], self.deadline_s, ended)

    def _all(self) -> list[Sketch]:
        return list(chain(*self.found.values()))

    def _report(self, stage: str, done: float) -> None:
        budget = self.problem.budget_bytes
        times = [s.time_s for s in self._all() if s.peak_bytes >= 0 and (budget is None or s.peak_bytes <= budget)]
        bound_s = self.task.bound.time_s(budget)
        gap = min(times) / bound_s - 1 if times and 0 < bound_s < float("inf") else None
        self.tell(Progress(stage, done, gap))


def side_by_side(
    searches: Sequence[Iterator[Sketch]], found: Sequence[list[Sketch]], deadline_s: float, ended: Callable[[int], None]
) -> None:
    """Exhaust all searches, at most as many at once as there are cores; items go to the list at the same position.

    Kernels run without the interpreter lock.

    ended: called with the position of each search that is exhausted. What is found does not depend on the number of
    cores. Raises TimeoutError at `deadline_s` of the monotonic clock, and what `ended`, a search or Ctrl-C raises;
    then every search has stopped after an item, and what was found until then is there.
    """
    stop = threading.Event()

    def exhaust(search: Iterator[Sketch], into: list[Sketch]) -> None:
        while not stop.is_set():
            try:
                into.append(next(search))
            except StopIteration:
                return

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(max(1, min(len(searches), cores)), "memplan") as pool:
        running = {pool.submit(exhaust, search, into): i for i, (search, into) in enumerate(zip(searches, found))}
        try:
            while running:
                done, _ = wait(running, _LOOK_S, FIRST_COMPLETED)
                for future in sorted(done, key=running.__getitem__):
                    future.result()
                    ended(running.pop(future))
                if time.monotonic() > deadline_s:
                    raise TimeoutError
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _front(
    problem: Problem, config: Config, found: Sequence[Sketch], everything: Sketch, bound: Bound, truncated: bool
) -> Front:
    """The front of what was found. everything: the sketch of keep all."""
    points, all_kept = [_candidate(problem, sketch) for sketch in pareto(found)], _candidate(problem, everything)
    updates = any(v.updates for v in problem.graph.values)
    fetches = any(v.fetched for v in problem.graph.values)  # then orders are no schedules by themselves
    if updates and not fetches:  # sketches know only about when they happen
        points = pareto([_accounted(point) for point in thin(points, 2 * config.points)])
        all_kept = _accounted(all_kept)
    return Front(tuple(points), all_kept, bound, truncated)


def _accounted(point: Candidate) -> Candidate:
    return dataclasses.replace(point, peak_bytes=point.timeline.peak_bytes)


def _candidate(problem: Problem, sketch: Sketch) -> Candidate:
    return Candidate(problem, sketch.solver, tuple(sketch.order.tolist()), sketch.peak_bytes, sketch.time_s)
