"""A digest of every plan over many models and instances: two commits that write equal files make equal plans.

    python -m benchmarks.plan_digests FILE [--quick] [--only NAME ...]
    python -m benchmarks.plan_digests --compare BEFORE AFTER

Planned are the models of `tests.support.zoo`, those of `tests.support.architectures`, and the committed instances of
the chain solver, each with several presets: the whole curve of peaks and times without copies, and plans with a host
budget at shares of the activation peak. Costs are estimated, or those of the instance, and hashes of strings have
one seed (some models go through sets of them), so nothing depends on the machine or the run but models with islands
(wav2vec2, DETR), whose costs are those of a run. A model that is refused is
entered with the words of the refusal. `--quick` takes one preset and the smaller half of everything. The file is
written after each case; a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import memplan
from benchmarks.environment import own_cache
from benchmarks.solvers.__main__ import instances
from memplan.solvers import solve_front
from tests.support.architectures import ARCHITECTURES
from tests.support.zoo import MODELS

PRESETS = ("auto", "noremat", "rotor", "checkmate", "rockmate", "hiremate")
SHARES = (0.9, 0.7, 0.5)
LINK = memplan.Link(1e10, 1e10)

Case = Callable[[], Any]  # gives what plans are made of, as what `repr` tells apart


def digest(facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def facts_of(plan: memplan.Plan) -> tuple[Any, ...]:
    """All that a plan decides and promises."""
    figures = (plan.peak_bytes, plan.time_s, plan.lower_bound_s, plan.floor_bytes, plan.baseline_peak_bytes)
    return plan.schedule, figures, plan.solver, plan.host_bytes


def curve(build: Callable[[int], tuple[Any, Any]], preset: str) -> Any:
    net, sample = build(0)
    try:
        points = memplan.explore(net, sample, costs="estimate", config=preset)
    except memplan.MemplanError as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return digest(points[0].problem.graph), [facts_of(point) for point in points]


def offloaded(build: Callable[[int], tuple[Any, Any]], share: float) -> Any:
    net, sample = build(0)
    budget = memplan.Budget(activations=share)
    try:
        plan = memplan.plan(net, sample, budget, costs="estimate", host_budget="64GiB", link=LINK, config="offmate")
    except memplan.MemplanError as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return facts_of(plan)


def front(problem: Any, preset: str) -> Any:
    found = solve_front(problem, memplan.generate_config(preset))
    top = found.keep_all.peak_bytes
    bounds = [found.bound.time_s(problem.resident_bytes + int(s * (top - problem.resident_bytes))) for s in SHARES]
    return [(c.schedule, c.peak_bytes, c.time_s, c.solver) for c in found.points], bounds


def cases(quick: bool) -> Iterator[tuple[str, Case]]:
    presets = PRESETS[:1] if quick else PRESETS
    builds = {f"zoo {name}": build for name, build in MODELS.items()}
    builds |= {f"architecture {name}": row.build for name, row in ARCHITECTURES.items()}
    for number, (name, build) in enumerate(builds.items()):
        if quick and number % 2:
            continue
        for preset in presets:
            yield f"{name}, {preset}", lambda build=build, preset=preset: curve(build, preset)
        for share in SHARES[-1:] if quick else SHARES:
            yield f"{name}, host budget at {share}", lambda build=build, share=share: offloaded(build, share)
    for name, problem in instances().items():
        if quick and len(problem.graph.ops) > 300:
            continue
        for preset in presets:
            yield f"instance {name}, {preset}", lambda problem=problem, preset=preset: front(problem, preset)


@own_cache()
def write(path: Path, quick: bool, only: Sequence[str]) -> None:
    found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    for name, case in cases(quick):
        if name in found or (only and not any(word in name for word in only)):
            continue
        start = time.perf_counter()
        found[name] = digest(case())
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: {found[name]} in {time.perf_counter() - start:.1f} s", flush=True)


def compare(before: Path, after: Path) -> int:
    one, other = (json.loads(path.read_text()) for path in (before, after))
    differ = [name for name in one if name in other and one[name] != other[name]]
    absent = [name for name in {**one, **other} if name not in one or name not in other]
    for name in differ:
        print(f"differs: {name}")
    for name in absent:
        print(f"in one file only: {name}")
    print(f"{len(one.keys() & other.keys()) - len(differ)} equal, {len(differ)} differ, {len(absent)} in one file only")
    return bool(differ or absent)


def with_fixed_hashes() -> None:
    """Start this program again with a fixed seed of hashes, where it has none."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        command = [sys.executable, "-m", "benchmarks.plan_digests", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})


def main() -> int:
    with_fixed_hashes()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    given = parser.parse_args()
    if given.compare:
        return compare(*given.compare)
    if given.file is None:
        parser.error("name the file to write")
    write(given.file, given.quick, given.only)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
