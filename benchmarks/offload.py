"""Overheads with copies to host memory against recomputation alone, and how far they are from the bound. No device.

    python -m benchmarks.offload [--layers 32] [--gbs 25 50] [--shares 0.5 0.25] [--in-flight 4] [--methods hierarchy]

The step of a Llama of so many layers (about 25 forward ops each), seconds and bytes from a roofline; shares are those
of the activation memory, of all microbatches in flight together. Prints overheads over the unplanned step, the gap to
the lower bound, and the CPU seconds that the search took: of recomputations, which all budgets share, and of copies.
methods: those of a `memplan.Config` instead of all, without the local search; with the one named here a plan of 96
layers takes seconds, and is nearly as good.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from memplan.config import METHODS, Config
from memplan.problem.data import Link, Problem
from memplan.solvers import solve_front
from memplan.solvers.bounds.offload_bound import offload_bound_s
from memplan.solvers.offload.fit_copies import solve_offload
from tests.support.random_graphs import llama_like


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--gbs", type=float, nargs="+", default=[25.0, 50.0], help="10^9 bytes per second each way")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--in-flight", type=int, default=1, help="microbatches of a pipeline's stage")
    parser.add_argument("--methods", nargs="+", choices=METHODS)
    args = parser.parse_args()
    problem = replace(step_of(args.layers), in_flight=args.in_flight)
    start = time.process_time()
    front = solve_front(problem, Config(tuple(args.methods), polish=False) if args.methods else None)
    base_s, resident_bytes = problem.baseline_time_s, problem.resident_bytes
    print(f"{args.layers} layers, {len(problem.graph.ops)} ops: front in {time.process_time() - start:.1f} s")
    for gbs in args.gbs:
        linked = replace(problem, link=Link(gbs * 1e9, gbs * 1e9))
        for share in args.shares:
            budget = resident_bytes + int(share * (front.keep_all.peak_bytes - resident_bytes))
            alone = front.best(budget)
            start = time.process_time()
            found = solve_offload(linked, front.points, budget, 1 << 60)
            seconds = time.process_time() - start
            bound_s = offload_bound_s(linked, budget)
            forward_s = args.in_flight * sum(problem.costs.time_s[: problem.graph.boundary])
            carried = budget + int(gbs * 1e9 * forward_s)
            more = front.best(carried)
            assert more is not None
            told = "can't be met" if alone is None else f"{alone.time_s / base_s - 1:.2%}"
            assert found is not None
            time_s = found.timeline.time_s
            print(
                f"{gbs:.0f} GB/s, share {share}: recomputation alone {told}, with copies {time_s / base_s - 1:.2%}, "
                f"of which waits {found.timeline.stall_s / base_s:.2%}; bound {bound_s / base_s - 1:.2%}, "
                f"gap {time_s / bound_s - 1:.2%}; recomputation alone with what the link carries in forward as more "
                f"memory {more.time_s / base_s - 1:.2%}; {seconds:.2f} s",
                flush=True,
            )


def step_of(layers: int) -> Problem:
    """A step of which gradients are not offloaded. The gradient of the loss, a one, takes no time to speak of."""
    problem = replace(llama_like(layers), accumulate=True)
    time_s = list(problem.costs.time_s)
    time_s[problem.graph.boundary] = 1e-6
    return replace(problem, costs=replace(problem.costs, time_s=tuple(time_s)))


if __name__ == "__main__":
    main()
