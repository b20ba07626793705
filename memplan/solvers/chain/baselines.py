"""What everybody knows: keep everything, recompute every block, recompute sqrt(n) segments."""

from __future__ import annotations

import numpy as np

from memplan.problem.schedule import BOUNDARY
from memplan.solvers.chain.expand import recompute_blocks, recompute_segments
from memplan.solvers.chain.partition import coarse_cuts, layer_cuts, make_chain
from memplan.solvers.orders.flat import Flat, Ints


def keep_all(flat: Flat) -> Ints:
    """Every op once, in eager order."""
    a = flat.arrays
    return np.array([*range(a.boundary), BOUNDARY, *range(a.boundary, flat.op_count)], dtype=np.int64)


def baselines(flat: Flat, blocks_limit: int) -> tuple[tuple[str, Ints], ...]:
    """The textbook schedules by name. blocks_limit: most blocks of the chain that they work on."""
    chain = make_chain(flat, layer_cuts(flat, coarse_cuts(flat, blocks_limit)))
    return (
        ("keep all", keep_all(flat)),
        ("recompute every block", recompute_blocks(flat, chain)),
        ("recompute sqrt(n) segments", recompute_segments(flat, chain)),
    )
