"""Makes the instances: captures each model's training step, times its ops on this machine, writes the problem.

    python -m benchmarks.solvers.capture [NAME ...]

Times belong to the machine, so an instance that is made again is another instance: its rows in the table change.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.solvers.models import MODELS
from memplan.planning.planner import Planner
from memplan.planning.settings import Settings
from memplan.problem.file import save_problem

INSTANCES = Path(__file__).parent / "instances"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(MODELS))
    for name in parser.parse_args().names:
        net, sample = MODELS[name]()
        planner = Planner(net, net.forward, Settings())
        problem = planner.problem(sample)
        save_problem(problem, INSTANCES / f"{name}.json.gz")
        print(f"{name}: {len(problem.graph.ops)} ops, {problem.baseline_time_s:.3f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
