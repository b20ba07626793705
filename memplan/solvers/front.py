"""The front of a problem: the best schedules known for every budget.

Candidates come from the methods of a configuration; where it asks for that, a local search refines them. Orders are
accounted for by `replay`; a candidate's schedule goes through `schedule_of` and `simulate` when it is asked for. More
budget never costs time, because a budget takes the fastest point that fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from memplan.config import Config
from memplan.problem import Problem
from memplan.schedule import Schedule, Timeline, schedule_of
from memplan.simulate import simulate
from memplan.solvers.baselines import keep_all
from memplan.solvers.bound import Bound, bound_of
from memplan.solvers.flat import flatten
from memplan.solvers.methods import FAMILIES, METHODS, Task
from memplan.solvers.refine import refine, trade
from memplan.solvers.sketch import Sketch, pareto, sketch_of, thin


class Progress(NamedTuple):
    """Where a search stands. stage: what is being done. done: share of that stage. gap: of the best schedule so far
    within the problem's budget; None without one, or where nothing fits yet."""

    stage: str
    done: float
    gap: float | None


Tell = Callable[[Progress], None]
_LONG_OPS = 2000


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
    """points: no point has both a lower peak and less time than another; peaks rise, times fall.

    truncated: the search was stopped, by the clock or by the user, before it was done.
    """

    points: tuple[Candidate, ...]
    keep_all: Candidate
    bound: Bound
    truncated: bool

    @property
    def floor(self) -> Candidate:
        """The candidate with the smallest peak."""
        return self.points[0]

    def best(self, budget_bytes: int | None) -> Candidate | None:
        """The fastest candidate that peaks within the budget; None where none does."""
        fitting = [c for c in self.points if budget_bytes is None or c.peak_bytes <= budget_bytes]
        return fitting[-1] if fitting else None

    def spread(self, count: int) -> tuple[Candidate, ...]:
        """At most `count` of the points (two at least), those that matter most."""
        return tuple(thin(self.points, count))


def solve_front(problem: Problem, config: Config | None = None, tell: Tell | None = None) -> Front:
    """The front of a problem for every budget. tell is called with the progress.

    Ctrl-C, and `config.timeout_s`, end the search early with what it has. The problem's own budget steers nothing; it
    says for which peak the progress states a gap.
    """
    search = _Search(problem, config or Config(), tell or (lambda progress: None))
    return search.run()


def textbook(problem: Problem) -> tuple[Candidate, ...]:
    """The textbook schedules, those first that peak lower: what can be had without a search. Keep all is among them."""
    flat = flatten(problem)
    sketches = [sketch_of(flat, "keep all", keep_all(flat)), *METHODS["textbook"](Task.of(problem, flat, Config()))]
    legal = [_candidate(problem, sketch) for sketch in sketches if sketch.peak_bytes >= 0]
    return tuple(sorted(legal, key=lambda c: c.peak_bytes))


def candidate(problem: Problem, solver: str, order: tuple[int, ...]) -> Candidate:
    """An order as a candidate for a problem that it was not found for. Raises IllegalSchedule."""
    timeline = simulate(problem, schedule_of(problem.graph, order))
    return Candidate(problem, solver, order, timeline.peak_bytes, timeline.time_s)


class _Search:
    """One run: what was found so far."""

    def __init__(self, problem: Problem, config: Config, tell: Tell) -> None:
        self.problem, self.config, self.tell = problem, config, tell
        self.flat = flatten(problem)
        self.start_s = time.monotonic()
        self.everything = sketch_of(self.flat, "keep all", keep_all(self.flat))
        self.found = [self.everything]
        self.bound = Bound(problem.baseline_time_s, 0, ())
        self.truncated = False

    def run(self) -> Front:
        try:
            self._search()
        except (KeyboardInterrupt, _TimeOut):
            self.truncated = True
        points = [_candidate(self.problem, sketch) for sketch in pareto(self.found)]
        return Front(tuple(points), _candidate(self.problem, self.everything), self.bound, self.truncated)

    def _search(self) -> None:
        config, flat = self.config, self.flat
        self._report("bounds", 0.0)
        moments = min(config.moments, max(2, config.moment_work // flat.op_count))
        self.bound = bound_of(flat, self.problem.baseline_time_s, moments, config.cuts)
        task = Task.of(self.problem, flat, config, self.bound)
        families = {method: [self.everything] for family in FAMILIES for method in family}
        for method in config.methods:
            self._report(method, 0.0)
            for sketch in METHODS[method](task):
                self._add([sketch])
                families[method].append(sketch)
        if config.polish:
            self._polish([[s for m in family for s in families[m]] for family in FAMILIES])

    def _polish(self, families: list[list[Sketch]]) -> None:
        families = [sketches for sketches in families if any(s is not self.everything for s in sketches)]
        if self.flat.op_count > _LONG_OPS:  # where a family costs a second, and repeats leave little to be lost
            families = [[sketch for sketches in families for sketch in sketches]] if families else []
        for index, sketches in enumerate(families):
            for done, new in refine(self.flat, sketches, self.bound.floor_bytes, self.config):
                self._add(new)
                self._report("polishing", (index + done) / (len(families) + 1))
        for done, new in trade(self.flat, self.found, self.config):
            self._add(new)
            self._report("polishing", (len(families) + done) / (len(families) + 1))

    def _add(self, new: list[Sketch]) -> None:
        self.found += new
        if time.monotonic() - self.start_s > self.config.timeout_s:
            raise _TimeOut

    def _report(self, stage: str, done: float) -> None:
        self.tell(Progress(stage, done, self._gap()))

    def _gap(self) -> float | None:
        budget = self.problem.budget_bytes
        times = [s.time_s for s in self.found if s.peak_bytes >= 0 and (budget is None or s.peak_bytes <= budget)]
        bound_s = self.bound.time_s(budget)
        return min(times) / bound_s - 1 if times and 0 < bound_s < float("inf") else None


class _TimeOut(Exception):
    pass


def _candidate(problem: Problem, sketch: Sketch) -> Candidate:
    return Candidate(problem, sketch.solver, tuple(sketch.order.tolist()), sketch.peak_bytes, sketch.time_s)
