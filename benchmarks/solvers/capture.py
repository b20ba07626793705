"""Makes the instances: captures each model's training step, times its ops on this machine, writes the problem.

    python -m benchmarks.solvers.capture [NAME ...]

Times belong to the machine, so an instance that is made again is another instance: its rows in the table change.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from benchmarks.solvers.models import MODELS
from memplan.errors import InvalidPlanFile, or_raise
from memplan.planning.planner import Planner
from memplan.planning.settings import Settings
from memplan.problem.data import Problem
from memplan.problem.file import pack, problem_from_json, read_checked, unpack

INSTANCES = Path(__file__).parent / "instances"
_FORMAT, _VERSION = "memplan.problem", 4


def save_problem(problem: Problem, path: str | Path) -> None:
    """Write a problem as JSON, gzipped where it is large or the name ends in `.gz`."""
    content = {"format": _FORMAT, "version": _VERSION} | dataclasses.asdict(problem)
    Path(path).write_bytes(pack(content, gzipped=str(path).endswith(".gz")))


def load_problem(path: str | Path) -> Problem:
    """Read a problem and check every index in it. Raises InvalidPlanFile, OSError where the file can't be read."""
    data = Path(path).read_bytes()

    def read() -> Problem:
        content = unpack(data)
        if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("version") != _VERSION:
            raise InvalidPlanFile(f"this is not a memplan problem file of version {_VERSION}")
        return problem_from_json(content)

    return or_raise(read_checked("problem", read))


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
