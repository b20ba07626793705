"""Plain DAGs under a budget: seconds, overhead and gap of `solve_dag`, beside no recomputation and sqrt(n) segments.

python -m benchmarks.solve_dag [--trials N] [--only NAME]: solves `benchmarks/dag_instances/*.json` at 90, 80, 60 and
    40% of the peak of the given order, and writes `benchmarks/results/solve_dag.json`.
python -m benchmarks.solve_dag --generate: writes the instances again, from fixed seeds.

The random layered DAGs are of the kind of Gagrani et al. (NeurIPS 2022), which Bartan et al. (arXiv 2304.14463) use;
theirs are not published, so these have their numbers of nodes, not their edges.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import environment
from memplan.errors import BudgetInfeasible
from memplan.solvers.dag.dag_problem import DagNode, DagProblem, account
from memplan.solvers.dag.solve_dag import DagLimits, solve_dag

HERE = Path(__file__).resolve().parent
INSTANCES = HERE / "dag_instances"
RESULTS = HERE / "results" / "solve_dag.json"
SHARES = (0.9, 0.8, 0.6, 0.4)


def layered(count: int, seed: int) -> DagProblem:
    """A random layered DAG: nodes read one to four nodes, of the layer before mostly, else of any earlier layer."""
    rng = np.random.default_rng(seed)
    width = max(2, round(math.sqrt(count) / 2))
    layers: list[list[int]] = [[]]
    nodes: list[DagNode] = []
    for index in range(count):
        if len(layers[-1]) >= rng.integers(1, 2 * width):
            layers.append([])
        inputs: set[int] = set()
        if len(layers) > 1:
            for _ in range(int(rng.integers(1, 5))):
                near = rng.random() < 0.8
                layer = layers[-2] if near else layers[int(rng.integers(0, len(layers) - 1))]
                inputs.add(layer[int(rng.integers(0, len(layer)))])
        layers[-1].append(index)
        nodes.append(_node(f"n{index}", rng, tuple(sorted(inputs))))
    return DagProblem(tuple(nodes), f"layered {count}")


def _node(name: str, rng: np.random.Generator, inputs: tuple[int, ...]) -> DagNode:
    return DagNode(name, int(rng.integers(1, 11)) / 1000, int(rng.integers(1, 65)) << 14, inputs)


def chain(blocks: int, seed: int) -> DagProblem:
    """A training step of a chain: backward i reads the gradient before it and the input and output of forward i."""
    rng = np.random.default_rng(seed)
    nodes = [_node(f"f{i}", rng, (i - 1,) if i else ()) for i in range(blocks)]
    for i in range(blocks - 1, -1, -1):
        reads = {len(nodes) - 1, i, i - 1 if i else i}
        nodes.append(DagNode(f"b{i}", 2 * nodes[i].time_s, nodes[i - 1 if i else i].size_bytes, tuple(sorted(reads))))
    return DagProblem(tuple(nodes), f"chain {blocks}")


def unet(depth: int, convolutions: int, size_bytes: int) -> DagProblem:
    """A training step of a U-Net: sizes halve at each level down, and the way up reads each level of the way down."""
    nodes: list[DagNode] = []

    def add(name: str, scale: int, *inputs: int) -> int:
        nodes.append(DagNode(name, 0.016 / scale, size_bytes // scale, tuple(sorted(set(inputs)))))
        return len(nodes) - 1

    last = add("image", 1)
    skips = []
    for level in range(depth):
        for k in range(convolutions):
            last = add(f"down{level}.{k}", 2**level, last)
        skips.append(last)
        last = add(f"pool{level}", 2 ** (level + 1), last)
    for level in range(depth - 1, -1, -1):
        last = add(f"join{level}", 2**level, last, skips[level])
        for k in range(convolutions):
            last = add(f"up{level}.{k}", 2**level, last)
    add("loss", size_bytes // 64, last)
    return DagProblem((*nodes, *_backward(nodes)), f"U-Net {depth} levels")


def _backward(nodes: list[DagNode]) -> list[DagNode]:
    """One node a gradient, which reads what the forward node reads and the gradients of its readers."""
    readers: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        for u in node.inputs:
            readers[u].append(index)
    made: list[DagNode] = []
    gradient: dict[int, int] = {}
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        reads = {index, *node.inputs, *(gradient[r] for r in readers[index])}
        gradient[index] = len(nodes) + len(made)
        made.append(DagNode("d " + node.name, 2 * node.time_s, node.size_bytes, tuple(sorted(reads))))
    return made


def instances() -> dict[str, DagProblem]:
    """Every committed instance by the name of its file."""
    return {
        "layered_50": layered(50, 1),
        "layered_200": layered(200, 2),
        "layered_1000": layered(1000, 3),
        "chain_100": chain(100, 4),
        "unet_5": unet(5, 3, 1 << 22),
    }


def sqrt_segments(problem: DagProblem) -> tuple[int, ...]:
    """The baseline: the order in sqrt(n) segments; of each segment, only what the next one reads is retained for good.

    What a later segment misses runs again, with all that it misses in turn, and is retained to the end of that segment.
    """
    count = len(problem.nodes)
    length = max(1, math.isqrt(count))
    segment = [index // length for index in range(count)]
    crosses = {u for v, node in enumerate(problem.nodes) for u in node.inputs if segment[v] == segment[u] + 1}
    kept = crosses | {v for v, node in enumerate(problem.nodes) if node.held}
    order: list[int] = []
    there: set[int] = set()

    def run(v: int) -> None:
        for u in problem.nodes[v].inputs:
            if u not in there:
                run(u)
        order.append(v)
        there.add(v)

    for v in range(count):
        if v and segment[v] != segment[v - 1]:
            there &= kept
        run(v)
    return tuple(order)


def rows(name: str, problem: DagProblem, limits: DagLimits) -> list[dict[str, Any]]:
    """One row for each budget."""
    once = account(problem, range(len(problem.nodes)))
    segments = account(problem, sqrt_segments(problem))
    found = []
    for share in SHARES:
        budget = int(share * once.peak_bytes)
        row: dict[str, Any] = {
            "instance": name,
            "nodes": len(problem.nodes),
            "edges": sum(len(node.inputs) for node in problem.nodes),
            "budget_bytes": budget,
            "share_of_plain_peak": share,
            "plain_fits": once.peak_bytes <= budget,
            "sqrt_peak_bytes": segments.peak_bytes,
            "sqrt_fits": segments.peak_bytes <= budget,
            "sqrt_overhead": round(segments.time_s / once.time_s - 1, 6),
        }
        start = time.perf_counter()
        try:
            plan = solve_dag(problem, budget, limits)
            row |= {
                "solver": plan.solver,
                "peak_bytes": plan.peak_bytes,
                "overhead": round(plan.overhead, 6),
                "bound_overhead": round(max(0.0, plan.lower_bound_s / plan.baseline_s - 1), 6),
                "gap": round(plan.gap, 6),
                "certified": plan.certified,
                "trials": plan.trials,
            }
        except BudgetInfeasible as error:
            row |= {"infeasible": str(error), "least_known_bytes": error.floor_bytes}
        row["seconds"] = round(time.perf_counter() - start, 2)
        print(line(row), flush=True)
        found.append(row)
    return found


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    told = f"{row['instance']:>13} {row['share_of_plain_peak']:4.0%} "
    if "overhead" in row:
        told += f"+{row['overhead']:7.2%}, bound +{row['bound_overhead']:7.2%}, gap {row['gap']:6.2%}"
    else:
        told += f"no plan known, least {row['least_known_bytes']}"
    told += f", {row['seconds']:5.1f} s; sqrt(n) {row['sqrt_overhead']:+.1%}"
    return told + ("" if row["sqrt_fits"] else " does not fit") + f"; {row.get('solver', '')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generate", action="store_true")
    parser.add_argument("--trials", type=int, default=DagLimits().trials)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    if arguments.generate:
        INSTANCES.mkdir(exist_ok=True)
        for name, problem in instances().items():
            (INSTANCES / f"{name}.json").write_text(problem.to_json() + "\n")
        return
    limits = DagLimits(trials=arguments.trials)
    solve_dag(chain(8, 0), account(chain(8, 0), range(16)).peak_bytes - 1, DagLimits(trials=500, exact_nodes=0))
    found = []
    for path in sorted(INSTANCES.glob("*.json")):
        if arguments.only in path.stem:
            found += rows(path.stem, DagProblem.from_json(path.read_text()), limits)
    if not arguments.only:
        RESULTS.write_text(json.dumps({"trials": limits.trials, **environment(), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
