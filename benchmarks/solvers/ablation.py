"""What each method of "auto" earns: the curves of the committed instances without it.

    python -m benchmarks.solvers.ablation [--instances NAME ...] [--without NAME ...] [--output FILE]

For each instance and each method left out ("polish" is the local search): the extra time of plans at 0.7, 0.5 and 0.35
of the unplanned activation peak beyond those of all methods, in points of a step's time; the smallest peak beyond
theirs, in percent; and the seconds that the search takes less. The file is written after each row, and a run that was
stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import environment
from benchmarks.gpt8 import gpt8
from benchmarks.solvers.__main__ import SHARES, budget_of, instances
from memplan.config import METHODS, Config
from memplan.problem.data import Problem
from memplan.solvers import Front, solve_front

OUTPUT = Path(__file__).parent.parent / "results" / "ablation.json"
EVERYTHING = "nothing"  # left out


def config_without(left_out: str) -> Config:
    """ "auto" without one of its methods, or its local search."""
    return Config(tuple(m for m in METHODS if m != left_out), polish=left_out != "polish")


def timed(problem: Problem, left_out: str) -> tuple[Front, float]:
    start = time.perf_counter()
    return solve_front(problem, config_without(left_out)), time.perf_counter() - start


def figures(problem: Problem, front: Front, solve_s: float) -> dict[str, Any]:
    chosen = {share: front.best(budget_of(problem, front, share)) for share in SHARES}
    return {
        "solve_s": solve_s,
        "floor_bytes": front.floor.peak_bytes,
        "overheads": {str(s): c and c.time_s / problem.baseline_time_s - 1 for s, c in chosen.items()},
    }


def row(full: dict[str, Any], less: dict[str, Any]) -> str:
    pairs = [(less["overheads"][share], full["overheads"][share]) for share in full["overheads"]]
    lost = [f"{100 * (a - b):+8.2f}" if a is not None and b is not None else f"{'-':>8}" for a, b in pairs]
    floor = 100 * (less["floor_bytes"] / full["floor_bytes"] - 1)
    return f"{' '.join(lost)} {floor:+8.2f} {less['solve_s'] - full['solve_s']:+8.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instances", nargs="+", default=list(instances()))
    parser.add_argument("--without", nargs="+", default=[*METHODS, "polish"], choices=[*METHODS, "polish"])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    found: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {}
    found["environment"] = environment()
    print(f"{'instance':16} {'without':10} " + " ".join(f"{s:>8}" for s in SHARES) + f" {'floor %':>8} {'s':>8}")
    problems = instances()
    solve_front(gpt8())  # loads the compiled solvers
    for name in args.instances:
        rows = found.setdefault(name, {})
        for left_out in (EVERYTHING, *args.without):
            if left_out not in rows:
                rows[left_out] = figures(problems[name], *timed(problems[name], left_out))
                args.output.write_text(json.dumps(found, indent=1) + "\n")
            if left_out != EVERYTHING:
                print(f"{name:16} {left_out:10} {row(rows[EVERYTHING], rows[left_out])}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
