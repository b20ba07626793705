"""How long the chain recurrence takes, and a whole front on a step that looks like 32 Llama layers.

python -m benchmarks.solve_chain
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

import numba
import numpy as np

from memplan.solvers import solve_front
from memplan.solvers.chain.rotor import ChainTable, solve_chain
from tests.support.random_graphs import llama_like

REPEATS = 5


def random_chain(blocks: int, slots: int, options: int, seed: int = 0) -> ChainTable:
    """A chain of unlike blocks whose options trade bytes for seconds."""
    rng = np.random.default_rng(seed)
    whole = 2 * slots // blocks
    saved = np.sort(rng.integers(1, whole + 2, (blocks, options)), axis=1)
    extra = np.sort(rng.random((blocks, options)), axis=1)[:, ::-1]
    return ChainTable(
        option_count=np.full(blocks, options, dtype=np.int64),
        saved=saved,
        forward_peak=saved + 2,
        backward_peak=saved + 2 * whole,
        cost_first=np.ascontiguousarray(extra),
        cost_again=np.ascontiguousarray(extra + 1.0),
        width=np.ones((blocks, blocks), dtype=np.int64),
        leaf_peak=np.full(blocks, whole, dtype=np.int64),
        leaf_again=np.ones(blocks),
        outside_first=np.zeros(blocks, dtype=np.int64),
        outside_again=np.ones(blocks, dtype=np.int64),
    )


def equal_blocks(blocks: int, slots: int, options: int) -> ChainTable:
    """A chain of one block again and again."""
    table = random_chain(blocks, slots, options)
    rows = {name: np.repeat(getattr(table, name)[:1], blocks, axis=0) for name in table._fields if name != "width"}
    return ChainTable(width=np.ones((blocks, blocks), dtype=np.int64), **rows)


def report(what: str, run: Callable[[], object]) -> None:
    start = time.perf_counter()
    run()
    cold_s = time.perf_counter() - start
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    print(
        f"{what}: median {np.median(seconds):.3f} s, {min(seconds):.3f} to {max(seconds):.3f} s; first {cold_s:.3f} s"
    )


def main() -> None:
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numba {numba.__version__}"
    )
    for blocks, slots, options in ((96, 1000, 28), (200, 1000, 60)):
        chain = random_chain(blocks, slots, options)
        report(f"recurrence, L={blocks} M={slots} K={options}", lambda c=chain, m=slots: solve_chain(c, m))  # type: ignore[misc]
    equal = equal_blocks(96, 1000, 28)
    report("recurrence, L=96 M=1000 K=28, equal blocks", lambda: solve_chain(equal, 1000))
    step = llama_like(32)
    report(f"front, 32 layers, {len(step.graph.ops)} ops", lambda: solve_front(step))
    front = solve_front(step)
    for share in (0.9, 0.7, 0.5, 0.3, 0.1, 0.0):
        low, high = front.floor.peak_bytes, front.keep_all.peak_bytes
        budget = low + int(share * (high - low))
        best = front.best(budget)
        assert best is not None
        time_s, bound_s = best.time_s / step.baseline_time_s - 1, front.bound.time_s(budget) / step.baseline_time_s - 1
        print(f"  {budget / 1e9:6.2f} GB: +{time_s:.2%}, bound +{bound_s:.2%}, {best.solver}")


if __name__ == "__main__":
    main()
