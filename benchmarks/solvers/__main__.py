"""Every preset on every instance: seconds of solving, overhead, and gap to the lower bound.

    python -m benchmarks.solvers [--instances NAME ...] [--presets NAME ...] [--highs SECONDS] [--output FILE]

Budgets are 0.7, 0.5 and 0.35 of the unplanned activation peak (what is held beyond parameters, buffers and inputs).
`gap` is time / bound - 1; `share` is (time - bound) / (bound - baseline), the same as a share of what has to be
recomputed in any case. A cell without figures: nothing found fits. `--highs` gives HiGHS so long for each cell of the
steps that are small enough for it, in Checkmate's formulation (Jain et al., arXiv 1910.02653): "joint", where a forward
op may run again at any time, and "reduced", where the forward pass runs once. Instances are problems captured from real
models and timed on one machine (`benchmarks.solvers.capture`); solving runs no model.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import environment
from benchmarks.gpt8 import gpt8
from benchmarks.solvers.capture import INSTANCES, load_problem
from benchmarks.solvers.highs import FORMS, milp_row, shown
from memplan import config as configs
from memplan.plans.plan import Plan
from memplan.problem.data import Problem
from memplan.solvers import Front, solve_front

SHARES = (0.7, 0.5, 0.35)
OUTPUT = Path(__file__).parent.parent / "results" / "solvers.json"


def instances() -> dict[str, Problem]:
    found = {path.name.removesuffix(".json.gz"): load_problem(path) for path in sorted(INSTANCES.glob("*.json.gz"))}
    return found | {"rockmate_gpt8": gpt8()}


def budget_of(problem: Problem, front: Front, share: float) -> int:
    """Peak bytes that this share of the unplanned activation peak leaves."""
    resident = problem.resident_bytes
    return resident + int(share * (front.keep_all.peak_bytes - resident))


def row(problem: Problem, front: Front, share: float) -> dict[str, Any]:
    budget_bytes = budget_of(problem, front, share)
    chosen, floor = front.best(budget_bytes), front.floor
    if chosen is None:
        return {"overhead": None, "gap": None, "share": None}
    plan = Plan(
        problem, chosen.schedule, chosen.timeline, chosen.solver, front.bound.time_s(budget_bytes), floor.peak_bytes,
        floor.time_s,
    )  # fmt: skip
    return {"overhead": plan.overhead, "gap": plan.gap, "share": plan.overhead_gap}


def table(names: list[str], presets: list[str], highs_s: float) -> dict[str, Any]:
    solve_front(gpt8())  # loads the compiled solvers
    result: dict[str, Any] = {}
    print(f"{'instance':16} {'preset':10} {'ops':>5} {'s':>7}  " + "  ".join(f"{s:>4}: overhead, gap" for s in SHARES))
    for name, problem in instances().items():
        if name not in names:
            continue
        result[name] = {"ops": len(problem.graph.ops), "presets": {}}
        for preset in presets:
            start = time.perf_counter()
            front = solve_front(problem, configs.generate_config(preset))
            solve_s = time.perf_counter() - start
            rows = {str(share): row(problem, front, share) for share in SHARES}
            result[name]["presets"][preset] = {"solve_s": solve_s, "floor_bytes": front.floor.peak_bytes} | rows
            cells = [
                f"{r['overhead']:>12.2%} {r['gap']:>7.2%}" if r["gap"] is not None else f"{'-':>12} {'-':>7}"
                for r in rows.values()
            ]
            print(f"{name:16} {preset:10} {len(problem.graph.ops):5} {solve_s:7.2f}  " + "  ".join(cells), flush=True)
        for form in FORMS if highs_s else ():
            budgets = {str(share): budget_of(problem, front, share) for share in SHARES}
            milp = milp_row(problem, form, budgets, highs_s)
            solve_s = sum(cell["solve_s"] for cell in milp.values() if isinstance(cell, dict))
            result[name].setdefault("highs", {})[form] = milp
            print(f"{name:16} {form:10} {len(problem.graph.ops):5} {solve_s:7.2f}  {shown(milp)}", flush=True)
    result["most_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instances", nargs="+", default=list(instances()))
    parser.add_argument("--presets", nargs="+", default=list(configs.PRESETS), choices=list(configs.PRESETS))
    parser.add_argument("--highs", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    result = {"environment": environment()} | table(args.instances, args.presets, args.highs)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
