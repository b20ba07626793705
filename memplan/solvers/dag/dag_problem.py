"""Plain DAGs as problems and plans, and their JSON: nodes with seconds and output bytes, any of which may run again.

Published instances come in this form (Checkmate's training graphs, Jain et al., arXiv 1910.02653; random layered
graphs, Bartan et al., arXiv 2304.14463). A DAG is a `Graph` without a backward pass: node i is op i and makes value i,
and the boundary stands behind the last op. So `simulate` accounts for it, and `flatten`, the minimum cuts and the front
serve it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from memplan.problem.data import Costs, Graph, Op, Problem, Value, total_s
from memplan.problem.schedule import BOUNDARY, Compute, Drop, Timeline, schedule_of
from memplan.problem.simulate import simulate

PROBLEM_FORMAT = "memplan.dag/1"
PLAN_FORMAT = "memplan.dag-plan/1"

DagStep = Compute | Drop  # of a node: run it, or free its output
CERTIFIED = 1e-9  # sums of floats in different orders differ by less, as a part of the whole
_MOST_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class DagNode:
    """One computation.

    - time_s: seconds of one run.
    - size_bytes: of its output.
    - inputs: indices of earlier nodes whose outputs it reads.
    - held: the output is a result, kept to the end once it is made.
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
        return total_s(node.time_s for node in self.nodes)

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

    - order: nodes in the order of their runs.
    - steps: those runs, with a drop right after each output's last use.
    - peak_bytes, time_s: what `simulate` says of it.
    - baseline_s: seconds when every node runs once.
    - lower_bound_s: no plan within the budget takes less.
    - trials: orders that the search looked at.
    - solver: what found the plan.
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
        """Whether it is proven that no plan within the budget is faster."""
        return self.gap <= CERTIFIED

    def to_json(self) -> str:
        """The plan as JSON text: steps are ["compute", node] and ["drop", node]; `certified` and `gap` are stated."""
        steps = [["compute", s.op] if isinstance(s, Compute) else ["drop", s.value] for s in self.steps]
        rest = {key: value for key, value in asdict(self).items() if key not in ("order", "steps")}
        stated = {"overhead": self.overhead, "gap": self.gap, "certified": self.certified}
        return json.dumps({"format": PLAN_FORMAT, **rest, **stated, "steps": steps})


def account(problem: DagProblem, order: Sequence[int]) -> Timeline:
    """What `simulate` says of an order of nodes. Raises IllegalSchedule where it can't run."""
    return simulate(dag_as_problem(problem), schedule_of(graph_of(problem), (*order, BOUNDARY)))


def dag_as_problem(problem: DagProblem, boundary: int | None = None) -> Problem:
    """The DAG for `simulate`: all of it a forward pass, or the nodes from `boundary` on a backward pass."""
    costs = Costs(tuple(float(node.time_s) for node in problem.nodes), (0,) * len(problem.nodes))
    return Problem(graph_of(problem, boundary), costs)


def graph_of(problem: DagProblem, boundary: int | None = None) -> Graph:
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
