"""Plain DAGs: nodes with seconds and output bytes, any of which may run again, and no forward or backward pass.

Published instances come in this form (Checkmate's training graphs, Jain et al., arXiv 1910.02653; random layered
graphs, Bartan et al., arXiv 2304.14463). A DAG is a `Graph` without a backward pass: node i is op i and makes value i,
and the boundary stands behind the last op. So `simulate` accounts for it, and `flatten`, the minimum cuts and the front
serve it.

`solve_dag` orders the nodes so that as little as possible runs again: small DAGs exactly (`dag_exact`), larger ones by
search over retention intervals (`dag_search`), started from several orders and from `solve_front` on the DAG cut in two
where it peaks. Every plan comes with a lower bound (`dag_bound`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from memplan.config import Config
from memplan.errors import BudgetInfeasible
from memplan.problem import Costs, Graph, Op, Problem, Value
from memplan.schedule import BOUNDARY, Compute, Drop, Timeline, schedule_of
from memplan.simulate import simulate
from memplan.solvers import dag_search as search
from memplan.solvers.dag_bound import Relations, floor_bytes, lower_bound_s, relations_of
from memplan.solvers.dag_exact import best_order
from memplan.solvers.flat import Flat, Ints, flatten
from memplan.solvers.front import solve_front
from memplan.units import format_bytes

PROBLEM_FORMAT = "memplan.dag/1"
PLAN_FORMAT = "memplan.dag-plan/1"

DagStep = Compute | Drop  # of a node: run it, or free its output
_FRONT = Config(
    methods=("textbook", "cuts", "blocks"), coarse_blocks=64, fine_blocks=96, coarse_slots=300, fine_slots=200, cuts=10,
    block_cuts=6, options=12, sizes=16, grid=8, descents=2, descent_steps=8, rounds=60, width=4, exchanges=0, moments=1,
)  # fmt: skip
_THRESHOLD = 0.1  # of the large-neighbourhood search; halved for its first half
_CERTIFIED = 1e-9  # sums of floats in different orders differ by less, as a part of the whole
_MOST_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class DagNode:
    """One computation. inputs: indices of earlier nodes whose outputs it reads. time_s: seconds of one run.

    size_bytes: of its output. held: the output is a result, kept to the end once it is made.
    """

    name: str
    time_s: float
    size_bytes: int
    inputs: tuple[int, ...] = ()
    held: bool = False


@dataclass(frozen=True, slots=True)
class DagProblem:
    """Nodes in an order in which they can run. Raises ValueError, naming the node, for anything inconsistent."""

    nodes: tuple[DagNode, ...]
    name: str = ""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError("a DAG needs at least one node")
        for index, node in enumerate(self.nodes):
            _check_node(node, index)
        total = sum(node.size_bytes for node in self.nodes)
        if total > _MOST_BYTES:
            raise ValueError(f"all outputs together are {total} bytes, more than 2**62; use a larger unit than bytes")
        if not math.isfinite(sum(node.time_s for node in self.nodes)):
            raise ValueError("the seconds of all nodes together are not finite; use a larger unit than seconds")

    @property
    def baseline_s(self) -> float:
        """Seconds when every node runs once."""
        return sum(node.time_s for node in self.nodes)

    def to_json(self) -> str:
        """The problem as JSON text that `from_json` reads."""
        return json.dumps({"format": PROBLEM_FORMAT, "name": self.name, "nodes": [asdict(node) for node in self.nodes]})

    @classmethod
    def from_json(cls, text: str) -> DagProblem:
        """Read {"format": "memplan.dag/1", "name": ..., "nodes": [{"name", "time_s", "size_bytes", "inputs"}, ...]}.

        "inputs" are indices of earlier nodes. Optional: the problem's "name", a node's "name", "inputs" and "held".
        Raises ValueError where the text is not JSON or says anything else.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(data, dict) or data.get("format") != PROBLEM_FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f'expected an object with "format": "{PROBLEM_FORMAT}", got {found!r}')
        _check_keys(data, {"format", "nodes"}, {"name"}, "the problem")
        if not isinstance(data["nodes"], list):
            raise ValueError(f'"nodes" must be a list, got {type(data["nodes"]).__name__}')
        name = data.get("name", "")
        if not isinstance(name, str):
            raise ValueError(f'"name" of the problem must be text, got {name!r}')
        return cls(tuple(_node(item, index) for index, item in enumerate(data["nodes"])), name)


@dataclass(frozen=True, slots=True)
class DagPlan:
    """A sequence of runs and drops that keeps a budget.

    order: nodes in the order of their runs. steps: the same with a drop right after each output's last use.
    peak_bytes, time_s: what `simulate` says of it. lower_bound_s: no plan within the budget takes less.
    trials: orders that the search looked at. solver: what found the plan.
    """

    budget_bytes: int
    order: tuple[int, ...]
    steps: tuple[DagStep, ...]
    peak_bytes: int
    time_s: float
    baseline_s: float
    lower_bound_s: float
    trials: int
    solver: str

    @property
    def overhead(self) -> float:
        """Seconds of repeated runs, as a part of the seconds when every node runs once."""
        return max(0.0, self.time_s / self.baseline_s - 1) if self.baseline_s else 0.0

    @property
    def gap(self) -> float:
        """How much longer than the lower bound the plan takes, as a part of the bound."""
        return max(0.0, self.time_s / self.lower_bound_s - 1) if self.lower_bound_s else 0.0

    @property
    def certified(self) -> bool:
        """No plan within the budget is faster."""
        return self.gap <= _CERTIFIED

    def to_json(self) -> str:
        """The plan as JSON text: steps are ["compute", node] and ["drop", node]; `certified` and `gap` are stated."""
        steps = [["compute", s.op] if isinstance(s, Compute) else ["drop", s.value] for s in self.steps]
        rest = {key: value for key, value in asdict(self).items() if key not in ("order", "steps")}
        stated = {"overhead": self.overhead, "gap": self.gap, "certified": self.certified}
        return json.dumps({"format": PLAN_FORMAT, **rest, **stated, "steps": steps})


@dataclass(frozen=True, slots=True)
class DagLimits:
    """How hard to look; counts alone, so that a plan is the same on every machine.

    trials: orders evaluated in all; a step of a repair that has begun is finished. intervals: most runs of one node in
    the search. width: outputs that a repair tries at each step. rounds: stages of a descent to the budget. starts:
    descended orders that the search goes on from.
    exact_nodes, expansions: DAGs of at most so many nodes are first solved exactly, in at most so many states.
    moments, cuts: of the lower bound. front: start from `solve_front` as well.
    seed: of the search's random numbers.
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

    start: a plan of the same problem, say for a smaller budget; where it fits, the result is never slower.
    Raises BudgetInfeasible where no plan is known; its message says whether that is proven. Raises ValueError for a
    budget that is not positive, and IllegalSchedule for a `start` of another problem.
    """
    if budget_bytes <= 0:
        raise ValueError(f"a budget must be more than 0 bytes, got {budget_bytes}")
    task = _Task.of(problem, budget_bytes, limits or DagLimits())
    if task.floor_bytes > budget_bytes:
        raise _too_small(task)
    found: list[_Found] = [] if start is None else [_given(problem, start)]
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


def account(problem: DagProblem, order: Sequence[int]) -> Timeline:
    """What `simulate` says of an order of nodes. Raises IllegalSchedule where it can't run."""
    return simulate(dag_as_problem(problem), schedule_of(_graph(problem), (*order, BOUNDARY)))


def _check_keys(data: Mapping[str, Any], required: set[str], optional: set[str], what: str) -> None:
    missing, unknown = required - data.keys(), data.keys() - required - optional
    if missing:
        raise ValueError(f"{what} lacks {', '.join(sorted(missing))}")
    if unknown:
        raise ValueError(f"{what} has unknown fields: {', '.join(sorted(unknown))}")


def _node(item: object, index: int) -> DagNode:
    what = f"node {index}"
    if not isinstance(item, dict):
        raise ValueError(f"{what} must be an object, got {type(item).__name__}")
    _check_keys(item, {"time_s", "size_bytes"}, {"name", "inputs", "held"}, what)
    inputs = item.get("inputs", [])
    if not isinstance(inputs, list):
        raise ValueError(f'"inputs" of {what} must be a list, got {type(inputs).__name__}')
    name, held = item.get("name", f"n{index}"), item.get("held", False)
    return DagNode(name, item["time_s"], item["size_bytes"], tuple(inputs), held)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_node(node: DagNode, index: int) -> None:
    what = f"node {index} ({node.name!r})"
    if not isinstance(node.name, str):
        raise ValueError(f"the name of node {index} must be text, got {node.name!r}")
    seconds_legal = _is_int(node.time_s) or isinstance(node.time_s, float)
    if not seconds_legal or not math.isfinite(node.time_s) or node.time_s < 0:
        raise ValueError(f"time_s of {what} must be a finite number of seconds, 0 or more, got {node.time_s!r}")
    if not _is_int(node.size_bytes) or node.size_bytes < 0:
        raise ValueError(f"size_bytes of {what} must be a whole number of bytes, 0 or more, got {node.size_bytes!r}")
    if not isinstance(node.held, bool):
        raise ValueError(f"held of {what} must be true or false, got {node.held!r}")
    for u in node.inputs:
        if not _is_int(u) or not 0 <= u < index:
            raise ValueError(
                f"{what} reads {u!r}, but inputs are indices of earlier nodes, 0 to {index - 1}; "
                "list the nodes in an order in which they can run"
            )
    if len(set(node.inputs)) != len(node.inputs):
        raise ValueError(f"{what} lists an input twice: {list(node.inputs)}")


def _graph(problem: DagProblem, boundary: int | None = None) -> Graph:
    """The DAG as a graph; from `boundary` on its ops are the backward pass, and what they hold are gradients."""
    cut = len(problem.nodes) if boundary is None else boundary
    values, ops = [], []
    for index, node in enumerate(problem.nodes):
        later = index >= cut
        values.append(
            Value(node.name, node.size_bytes, "gradient" if later and node.held else "activation", held=node.held)
        )
        ops.append(Op(node.name, "node", "backward" if later else "forward", node.inputs, (index,), key=f"n{index}"))
    return Graph(tuple(values), tuple(ops), cut)


def dag_as_problem(problem: DagProblem, boundary: int | None = None) -> Problem:
    """The DAG for `simulate`: all of it a forward pass, or the nodes from `boundary` on a backward pass."""
    costs = Costs(tuple(float(node.time_s) for node in problem.nodes), (0,) * len(problem.nodes))
    return Problem(_graph(problem, boundary), costs)


@dataclass(frozen=True, slots=True)
class _Found:
    """An order and what `simulate` says of it."""

    solver: str
    order: tuple[int, ...]
    peak_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True)
class _Task:
    """One call of `solve_dag`: the problem in the forms that its parts want."""

    problem: DagProblem
    budget_bytes: int
    limits: DagLimits
    flat: Flat
    arrays: search.DagArrays
    relations: Relations
    floor_bytes: int
    state: search.State
    trials: Ints

    @classmethod
    def of(cls, problem: DagProblem, budget_bytes: int, limits: DagLimits) -> _Task:
        flat = flatten(dag_as_problem(problem))
        relations = relations_of(flat)
        arrays = search.dag_arrays(flat)
        state = np.array([2 * limits.seed + 88172645463325253], dtype=np.uint64)
        trials = np.array([0, limits.trials], dtype=np.int64)
        floor = floor_bytes(flat, relations)
        return cls(problem, budget_bytes, limits, flat, arrays, relations, floor, state, trials)

    def once(self) -> Ints:
        return np.arange(len(self.problem.nodes), dtype=np.int64)

    def found(self, solver: str, order: Ints) -> _Found:
        timeline = account(self.problem, order.tolist())
        return _Found(solver, tuple(order.tolist()), timeline.peak_bytes, timeline.time_s)

    def solved(self, found: Sequence[_Found], bound_s: float) -> bool:
        return any(f.peak_bytes <= self.budget_bytes and f.time_s <= bound_s * (1 + _CERTIFIED) for f in found)

    def spend(self, share: float) -> Ints:
        """A counter of trials that stops after a share of all of them; to be given back to `spent`."""
        now = int(self.trials[0])
        return np.array([now, min(self.limits.trials, now + int(share * self.limits.trials))], dtype=np.int64)

    def spent(self, counter: Ints) -> None:
        self.trials[0] = counter[0]


def _given(problem: DagProblem, start: DagPlan) -> _Found:
    timeline = account(problem, start.order)
    return _Found(start.solver, start.order, timeline.peak_bytes, timeline.time_s)


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


def _orders(task: _Task) -> list[tuple[str, Ints]]:
    """Orders to start from: every node once, in three ways, with moves towards the budget; and the front's."""
    a, flat = task.arrays, task.flat
    readers = np.bincount(a.read, minlength=flat.op_count).astype(np.int64)
    plain = [
        ("the given order", task.once()),
        ("a greedy order", search.greedy_order(a, readers)),
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


def _from_front(task: _Task) -> list[tuple[str, Ints]]:
    """Orders from `solve_front`, with all before the DAG's peak as its forward pass and the rest as its backward pass.

    Two that peak highest within the budget and two that peak lowest above it.
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
    usable = [search.needed_runs(task.arrays, order) for order in orders]
    most = task.limits.intervals
    return [("a split in two", order) for order in usable if np.bincount(order).max() <= most]


def _searched(task: _Task, known: Sequence[_Found], bound_s: float) -> list[_Found]:
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
            order = search.improve(a, np.array(f.order, dtype=np.int64), budget, bound_s, limits.width,
                                   limits.intervals, _THRESHOLD * share, task.state, counter)  # fmt: skip
            order = search.drop_repeats(a, order, budget, counter)
            task.spent(counter)
            fitting.append(task.found(f.solver, order))
    return fitting


def _steps(problem: DagProblem, order: Sequence[int]) -> tuple[DagStep, ...]:
    schedule = schedule_of(_graph(problem), (*order, BOUNDARY))
    return tuple(step for step in schedule if isinstance(step, Compute | Drop))


def _plan(task: _Task, found: Sequence[_Found], bound_s: float) -> DagPlan:
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


def _too_small(task: _Task) -> BudgetInfeasible:
    floor = task.floor_bytes
    return BudgetInfeasible(
        f"no order fits {format_bytes(task.budget_bytes)} ({task.budget_bytes} bytes): one node with its inputs and "
        f"what is held takes {format_bytes(floor)} ({floor} bytes). Raise the budget, or split that node."
    )


def _none_found(task: _Task, found: Sequence[_Found], proven: bool) -> BudgetInfeasible:
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
