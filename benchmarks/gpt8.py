"""memplan's solver on the costs that Rockmate's own profiler measured for a GPT, against Rockmate's own plans.

    python -m benchmarks.gpt8 [--output FILE]

The costs (`benchmarks/instances/gpt8_costs.json`) are of one training step of 8 layers of 256, 4 heads, vocabulary of
512, batch 8, length 256, float32 on a CPU. An entry of "comp" is an op (milliseconds in "time", scratch bytes in
"overhead", what it reads in "deps", what it writes in "out"), one of "alloc" a value ("phantoms" is what autograd saves
beside an output). Rockmate's plans cost 2.9, 6.9, 13 and 19% at 0.7, 0.5, 0.3 and 0.2 of the peak of keeping
everything, after 31 s of solving.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import environment
from memplan.problem.data import Costs, Graph, Op, Problem, Value
from memplan.solvers import solve_front

INSTANCE = Path(__file__).parent / "instances" / "gpt8_costs.json"
ROCKMATE = {0.7: 0.029, 0.5: 0.069, 0.3: 0.13, 0.2: 0.19}


def gpt8() -> Problem:
    """The profile as a problem. Several backward ops that write one gradient add to it in place."""
    profile = json.loads(INSTANCE.read_text())
    sizes = {entry["name"]: int(entry["mem"]) for entry in profile["alloc"]}
    values: list[Value] = []
    present: dict[str, int] = {}  # name -> its latest version

    def written(name: str) -> int:
        older = present.get(name)
        values.append(Value(name, sizes[name], reuses=older))
        present[name] = len(values) - 1
        return present[name]

    ops = []
    for entry in profile["comp"]:
        older = [present[name] for name in entry["out"] if name in present]
        inputs = tuple(dict.fromkeys([*(present[name] for name in entry["deps"]), *older]))
        name = entry["name"]
        kind = "".join(c for c in name if not c.isdigit())
        phase = "forward" if entry["fwd"] else "backward"
        ops.append(Op(name, kind, phase, inputs, tuple(written(n) for n in entry["out"])))
    boundary = sum(bool(entry["fwd"]) for entry in profile["comp"])
    costs = Costs(
        tuple(entry["time"] / 1e3 for entry in profile["comp"]), tuple(entry["overhead"] for entry in profile["comp"])
    )
    return Problem(Graph(tuple(values), tuple(ops), boundary), costs)


def table() -> dict[str, Any]:
    problem = gpt8()
    solve_front(problem)  # loads the compiled solvers
    start = time.perf_counter()
    front = solve_front(problem)
    solve_s = time.perf_counter() - start
    rows = {}
    for fraction, theirs in ROCKMATE.items():
        budget_bytes = int(fraction * front.keep_all.peak_bytes)
        chosen = front.best(budget_bytes)
        bound_s = front.bound.time_s(budget_bytes)
        rows[f"{fraction} of the keep-all peak"] = {
            "rockmate_overhead": theirs,
            "overhead": None if chosen is None else chosen.time_s / problem.baseline_time_s - 1,
            "gap": None if chosen is None else chosen.time_s / bound_s - 1,
        }
    return {
        "keep_all_bytes": front.keep_all.peak_bytes,
        "floor_bytes": front.floor.peak_bytes,
        "solve_s": solve_s,
    } | rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "gpt8.json")
    args = parser.parse_args()
    result = {"environment": environment(), **table()}
    print(json.dumps(result, indent=1))
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
