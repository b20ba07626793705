"""Plans for plain DAGs (`dag_problem`): the nodes in an order in which as little as possible runs again.

Small DAGs are solved exactly (`dag_exact`), larger ones by search over retention intervals (`dag_search`), started from
several orders and from `solve_front` on the DAG cut in two where it peaks. Every plan comes with a lower bound
(`dag_bound`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from memplan.config import Config, SearchFigures
from memplan.errors import BudgetInfeasible
from memplan.problem.schedule import BOUNDARY, Compute, Drop, schedule_of
from memplan.solvers.dag import dag_search as search
from memplan.solvers.dag.dag_bound import Relations, floor_bytes, lower_bound_s, relations_of
from memplan.solvers.dag.dag_exact import best_order
from memplan.solvers.dag.dag_order import DagArrays, dag_arrays, greedy_order, needed_runs
from memplan.solvers.dag.dag_problem import CERTIFIED, DagPlan, DagProblem, DagStep, account, dag_as_problem, graph_of
from memplan.solvers.front.front import solve_front
from memplan.solvers.numeric.draws import DrawState
from memplan.solvers.orders.flat import Flat, Ints, flatten
from memplan.units import format_bytes

_FRONT = Config(
    ("cuts", "blocks"),
    _figures=SearchFigures(
        coarse_blocks=64, fine_blocks=96, coarse_slots=300, fine_slots=200, cuts=10, block_cuts=6, options=12, sizes=16,
        grid=8, descents=2, descent_steps=8, rounds=60, width=4, exchanges=0, neighbours=0, moments=1,
    ),
)  # fmt: skip
_THRESHOLD = 0.1  # of the large-neighbourhood search; halved for its first half


@dataclass(frozen=True, slots=True)
class DagLimits:
    """How hard to look. All are counts, so that a plan is the same on every machine.

    - trials: orders evaluated in all; a step of a repair that has begun is finished.
    - intervals: most runs of one node in the search.
    - width: outputs that a repair tries at each step.
    - rounds: stages of a descent to the budget.
    - starts: descended orders that the search goes on from.
    - exact_nodes, expansions: DAGs of at most so many nodes are first solved exactly, in at most so many states.
    - moments, cuts: of the lower bound.
    - front: start from `solve_front` as well.
    - seed: of the search's random numbers.
    """

    trials: int = 400_000
    intervals: int = 6
    width: int = 6
    rounds: int = 60
    starts: int = 3
    exact_nodes: int = 16
    expansions: int = 20_000
    moments: int = 16
    cuts: int = 16
    front: bool = True
    seed: int = 1

    def __post_init__(self) -> None:
        least = {"trials": 1, "intervals": 1, "width": 1, "rounds": 1, "starts": 1}
        for name, value in asdict(self).items():
            if name != "front" and value < least.get(name, 0):
                raise ValueError(f"{name} must be at least {least.get(name, 0)}, got {value}")


def solve_dag(
    problem: DagProblem, budget_bytes: int, limits: DagLimits | None = None, start: DagPlan | None = None
) -> DagPlan:
    """The fastest plan found whose outputs never hold more than `budget_bytes` at once.

    start: a plan of this problem, say for a smaller budget. Where it fits, the result is never slower.

    Raises BudgetInfeasible where no plan is known; its message says whether that is proven. Raises ValueError for a
    budget that is not positive, and IllegalSchedule for a `start` of another problem.
    """
    if budget_bytes <= 0:
        raise ValueError(f"a budget must be more than 0 bytes, got {budget_bytes}")
    task = _DagTask.of(problem, budget_bytes, limits or DagLimits())
    if task.floor_bytes > budget_bytes:
        raise _too_small(task, limits, start)
    found: list[_FoundOrder] = [] if start is None else [_given(problem, start)]
    found.append(task.found("every node once", task.once()))
    bound_s = problem.baseline_s
    if not task.solved(found, bound_s) and len(problem.nodes) <= task.limits.exact_nodes:
        exact = best_order(task.flat, task.relations, budget_bytes, task.limits.expansions)
        bound_s = max(bound_s, exact.bound_s)
        if exact.order is not None:
            found.append(task.found("exact", np.array(exact.order, dtype=np.int64)))
    if not task.solved(found, bound_s):
        moments, cuts = task.limits.moments, task.limits.cuts
        bound_s = max(bound_s, lower_bound_s(task.flat, task.relations, budget_bytes, moments, cuts))
        found += _searched(task, found, bound_s)
    return _plan(task, found, bound_s)


@dataclass(frozen=True, slots=True)
class _FoundOrder:
    """An order and what `simulate` says of it."""

    solver: str
    order: tuple[int, ...]
    peak_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True)
class _DagTask:
    """One call of `solve_dag`: the problem in the forms that its parts want."""

    problem: DagProblem
    budget_bytes: int
    limits: DagLimits
    flat: Flat
    arrays: DagArrays
    relations: Relations
    floor_bytes: int
    state: DrawState
    trials: Ints

    @classmethod
    def of(cls, problem: DagProblem, budget_bytes: int, limits: DagLimits) -> _DagTask:
        flat = flatten(dag_as_problem(problem))
        relations = relations_of(flat)
        arrays = dag_arrays(flat)
        state = np.array([2 * limits.seed + 88172645463325253], dtype=np.uint64)
        trials = np.array([0, limits.trials], dtype=np.int64)
        floor = floor_bytes(flat, relations)
        return cls(problem, budget_bytes, limits, flat, arrays, relations, floor, state, trials)

    def once(self) -> Ints:
        return np.arange(len(self.problem.nodes), dtype=np.int64)

    def found(self, solver: str, order: Ints) -> _FoundOrder:
        timeline = account(self.problem, order.tolist())
        return _FoundOrder(solver, tuple(order.tolist()), timeline.peak_bytes, timeline.time_s)

    def solved(self, found: Sequence[_FoundOrder], bound_s: float) -> bool:
        return any(f.peak_bytes <= self.budget_bytes and f.time_s <= bound_s * (1 + CERTIFIED) for f in found)

    def spend(self, share: float) -> Ints:
        """A counter of trials that stops after a share of all of them; to be given back to `spent`."""
        now = int(self.trials[0])
        return np.array([now, min(self.limits.trials, now + int(share * self.limits.trials))], dtype=np.int64)

    def spent(self, counter: Ints) -> None:
        self.trials[0] = counter[0]


def _given(problem: DagProblem, start: DagPlan) -> _FoundOrder:
    timeline = account(problem, start.order)
    return _FoundOrder(start.solver, start.order, timeline.peak_bytes, timeline.time_s)


def _depth_first(flat: Flat) -> Ints:
    """Every node once, each as late as its readers allow: inputs first, the largest of them earliest."""
    sizes = flat.arrays.size_bytes
    seen = [False] * flat.op_count
    order: list[int] = []
    read = {u for reads in flat.reads for u in reads}
    stack = [(v, False) for v in range(flat.op_count - 1, -1, -1) if v not in read]
    while stack:
        v, complete = stack.pop()
        if complete:
            order.append(v)
        elif not seen[v]:
            seen[v] = True
            stack.append((v, True))
            stack += [(u, False) for u in sorted(flat.reads[v], key=lambda u: int(sizes[u])) if not seen[u]]
    return np.array(order, dtype=np.int64)


def _orders(task: _DagTask) -> list[tuple[str, Ints]]:
    """Orders to start from: every node once, in three ways, with moves towards the budget; and the front's."""
    a, flat = task.arrays, task.flat
    readers = np.bincount(a.read, minlength=flat.op_count).astype(np.int64)
    plain = [
        ("the given order", task.once()),
        ("a greedy order", greedy_order(a, readers)),
        ("a depth-first order", _depth_first(flat)),
    ]
    found = []
    for name, order in plain:
        counter = task.spend(0.05)
        found.append((name, search.reorder(a, order, task.budget_bytes, task.state, counter)))
        task.spent(counter)
    if task.limits.front:
        found += _from_front(task)
    return found


def _from_front(task: _DagTask) -> list[tuple[str, Ints]]:
    """Orders from `solve_front`, with all before the DAG's peak as its forward pass and the rest as its backward pass.

    There are two that peak highest within the budget and two that peak lowest above it.
    """
    held_at = account(task.problem, task.once().tolist()).peak_bytes_at
    until_peak = _steps(task.problem, task.once().tolist())[: held_at.index(max(held_at)) + 1]
    boundary = sum(isinstance(step, Compute) for step in until_peak)
    if not 0 < boundary < len(task.problem.nodes):
        return []
    points = solve_front(dag_as_problem(task.problem, boundary), _FRONT).spread(_FRONT.points)
    below = [c for c in points if c.peak_bytes <= task.budget_bytes][-2:]
    above = [c for c in points if c.peak_bytes > task.budget_bytes][:2]
    orders = [np.array([op for op in c.order if op != BOUNDARY], dtype=np.int64) for c in (*below, *above)]
    usable = [needed_runs(task.arrays, order) for order in orders]
    most = task.limits.intervals
    return [("a split in two", order) for order in usable if np.bincount(order).max() <= most]


def _searched(task: _DagTask, known: Sequence[_FoundOrder], bound_s: float) -> list[_FoundOrder]:
    """Bring starting orders under the budget, go on from the best of them, and take the best of all."""
    a, limits, budget = task.arrays, task.limits, task.budget_bytes
    starts = [(f.solver, np.array(f.order, dtype=np.int64)) for f in known if f.peak_bytes <= budget]
    starts += _orders(task)
    lowered = []
    for name, order in starts:
        counter = task.spend(0.4 / len(starts))
        order = search.descend(a, order, budget, limits.rounds, limits.width, limits.intervals, task.state, counter)
        order = search.drop_repeats(a, order, budget, counter)
        task.spent(counter)
        lowered.append(task.found(name, order))
    fitting = sorted((f for f in lowered if f.peak_bytes <= budget), key=lambda f: f.time_s)
    if not fitting:
        lowest = min(lowered, key=lambda f: (f.peak_bytes, f.time_s))
        counter = task.spend(0.3)
        order = search.descend(a, np.array(lowest.order, dtype=np.int64), budget, 10 * limits.rounds, limits.width,
                               limits.intervals, task.state, counter)  # fmt: skip
        task.spent(counter)
        lowered.append(task.found(lowest.solver, order))
        fitting = [f for f in lowered[-1:] if f.peak_bytes <= budget]
        if not fitting:
            return lowered
    for share, best in ((0.5, fitting[: limits.starts]), (1.0, [])):
        best = best or [min(fitting, key=lambda f: f.time_s)]
        left = 1.0 - float(task.trials[0]) / limits.trials
        for f in best:
            counter = task.spend(share * left / len(best))
            order = search.improve_order(a, np.array(f.order, dtype=np.int64), budget, bound_s, limits.width,
                                   limits.intervals, _THRESHOLD * share, task.state, counter)  # fmt: skip
            order = search.drop_repeats(a, order, budget, counter)
            task.spent(counter)
            fitting.append(task.found(f.solver, order))
    return fitting


def _steps(problem: DagProblem, order: Sequence[int]) -> tuple[DagStep, ...]:
    schedule = schedule_of(graph_of(problem), (*order, BOUNDARY))
    return tuple(step for step in schedule if isinstance(step, Compute | Drop))


def _plan(task: _DagTask, found: Sequence[_FoundOrder], bound_s: float) -> DagPlan:
    fitting = [f for f in found if f.peak_bytes <= task.budget_bytes]
    if not fitting:
        raise _none_found(task, found, proven=math.isinf(bound_s))
    best = min(fitting, key=lambda f: (f.time_s, f.peak_bytes, len(f.order)))
    return DagPlan(
        budget_bytes=task.budget_bytes,
        order=best.order,
        steps=_steps(task.problem, best.order),
        peak_bytes=best.peak_bytes,
        time_s=best.time_s,
        baseline_s=task.problem.baseline_s,
        lower_bound_s=min(bound_s, best.time_s),  # they differ by rounding at most
        trials=int(task.trials[0]),
        solver=best.solver,
    )


def _too_small(task: _DagTask, limits: DagLimits | None, start: DagPlan | None) -> BudgetInfeasible:
    floor = task.floor_bytes
    try:
        plan = solve_dag(task.problem, floor, limits, start)
        lowest_bytes, overhead = plan.peak_bytes, plan.time_s / plan.baseline_s - 1 if plan.baseline_s else 0.0
    except BudgetInfeasible as error:
        lowest_bytes, overhead = error.floor_bytes, error.floor_overhead
    return BudgetInfeasible(
        f"no order fits {format_bytes(task.budget_bytes)} ({task.budget_bytes} bytes): one node with its inputs and "
        f"what is held takes {format_bytes(floor)} ({floor} bytes). Raise the budget, or split that node.",
        lowest_bytes,
        overhead,
    )


def _none_found(task: _DagTask, found: Sequence[_FoundOrder], proven: bool) -> BudgetInfeasible:
    lowest = min(found, key=lambda f: (f.peak_bytes, f.time_s))
    overhead = lowest.time_s / task.problem.baseline_s - 1 if task.problem.baseline_s else 0.0
    verdict = "no order fits" if proven else "no order was found that fits"
    return BudgetInfeasible(
        f"{verdict} {format_bytes(task.budget_bytes)} ({task.budget_bytes} bytes); the lowest peak known is "
        f"{format_bytes(lowest.peak_bytes)} ({lowest.peak_bytes} bytes, at {overhead:+.1%} time). Raise the budget"
        + ("." if proven else ", or `limits.trials`."),
        lowest.peak_bytes,
        overhead,
    )
