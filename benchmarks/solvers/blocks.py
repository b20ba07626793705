"""The exact search on every distinct block of every instance: cells, share certified, CPU seconds.

    python -m benchmarks.solvers.blocks [--instances NAME ...] [--parts N] [--nodes N] [--ops N ...] [--highs SECONDS]

A cell is a budget of saved bytes and peaks; `certified` is the share of cells whose answer is proven, with no
tolerance, `gap` the worst gap of the others in forward parts. `--nodes` is for each cell; what some leave is for
others. `--ops` makes blocks of at most so many forward ops. `--highs` gives HiGHS so long for the tightest open or
feasible cell of each block and prints its seconds over ours (needs SciPy and the tests).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator

from benchmarks.gpt8 import gpt8
from benchmarks.solvers.__main__ import instances
from memplan.problem.data import Problem
from memplan.solvers import solve_front
from memplan.solvers.chain.expand import outside_of
from memplan.solvers.chain.options import LocalBlock, cut_orders, localise
from memplan.solvers.chain.partition import coarse_cuts, make_chain
from memplan.solvers.exact.block import why_unsuited
from memplan.solvers.exact.exact import BlockSearch, Grid, solve_grid
from memplan.solvers.front.methods import merged_cuts
from memplan.solvers.orders.flat import flatten, last_reads


def distinct_blocks(problem: Problem, most_ops: int) -> Iterator[LocalBlock]:
    """Blocks between narrow cuts, of at most so many forward ops where cuts allow it; 0 for all cuts."""
    flat = flatten(problem)
    cuts = coarse_cuts(flat, 96)
    last_read = last_reads(flat)
    chain = make_chain(flat, merged_cuts(flat, cuts, most_ops) if most_ops else cuts)
    incoming = outside_of(flat, chain, last_read).incoming
    keys = tuple(op.key or op.kind for op in problem.graph.ops)
    seen = set()
    for index, part in enumerate(chain):
        block = localise(flat, part, incoming[index], last_read, keys)
        if block.signature not in seen and len(part.forward) > 3 and len(part.backward) > 1:
            seen.add(block.signature)
            yield block


def highs_ratio(block: LocalBlock, grid: Grid, limit_s: float) -> str:
    """HiGHS against the search on one cell: what it found over what we found, and whether it closed."""
    from tests.support.milp_oracle import checkmate

    pairs = [(b, a) for b, a in zip(grid.budgets, grid.answers, strict=True) if 0 < a.recompute_s < math.inf]
    if not pairs:
        return "-"
    budget, answer = max(pairs, key=lambda pair: pair[1].recompute_s)
    seconds, closed = checkmate(block, budget, limit_s)
    if closed and seconds < answer.bound_s * (1 - 1e-6):
        raise AssertionError("HiGHS beats a bound")
    return f"{seconds / answer.recompute_s:.4f}{'' if closed else ' open'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instances", nargs="+", default=list(instances()))
    parser.add_argument("--parts", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--ops", type=int, nargs="+", default=[0, 45])
    parser.add_argument("--highs", type=float, default=0.0)
    args = parser.parse_args()
    solve_front(gpt8())  # loads the compiled solvers
    print(
        f"{'instance':16} {'most ops':>8} {'ops':>4} {'cells':>5} {'certified':>9} {'gap':>7} {'nodes':>7} {'s':>6}  "
        "highs"
    )
    for name in args.instances:
        for most_ops in args.ops:
            for block in distinct_blocks(instances()[name], most_ops):
                forward = block.flat.arrays.boundary
                if (reason := why_unsuited(block)) is not None:
                    print(f"{name:16} {most_ops:8} {forward:4}  {reason}")
                    continue
                searched = BlockSearch(block, most_nodes=args.nodes, most_forwards=1.0)
                start = time.process_time()
                known = [tuple(order.tolist()) for order in cut_orders(block, 8)]
                grid = solve_grid(searched, known, args.parts, args.parts, args.parts // 2)
                seconds = time.process_time() - start
                forward_s = float(block.flat.arrays.time_s[:forward].sum()) or 1.0
                gaps_s = [0.0 if a.certified else a.recompute_s - a.bound_s for a in grid.answers]
                pairs = zip(grid.answers, gaps_s, strict=True)
                gap = max(min(gap_s / forward_s, 1.0 - a.bound_s / forward_s) for a, gap_s in pairs)
                nodes = sum(a.nodes for a in grid.answers)
                highs = highs_ratio(block, grid, args.highs) if args.highs else ""
                figures = f"{len(grid.answers):5} {grid.certified:9.1%} {max(0.0, gap):7.3f} {nodes:7} {seconds:6.2f}"
                print(f"{name:16} {most_ops:8} {forward:4} {figures}  {highs}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
