"""Local search at a fixed peak: leave out one recomputation, and make room for its result with others.

Greedy filling stops where nothing more fits. Here a run is left out although its result does not fit, `bring_down`
splits other values until it does, and `fill` uses up what that frees. The result is kept where it takes less time.
"""

from __future__ import annotations

import numpy as np

from memplan.solvers.numeric.jit import kernel
from memplan.solvers.orders.flat import Arrays, Ints
from memplan.solvers.orders.replay import fill, prune, removable, replay
from memplan.solvers.orders.rewrites import bring_down

_ROUNDS = 6  # splits that may make room for one result
_FILL_ROUNDS = 4  # as variables, for a literal argument would compile `bring_down` and `fill` a second time


@kernel
def exchange(a: Arrays, order: Ints, limit_bytes: int, tries: int, width: int) -> Ints:
    """An order that peaks within the limit and takes no longer; at most `tries` runs are tried, dear ones first."""
    peak, _at, time_s = replay(a, order, np.zeros(len(order), dtype=np.int64))
    if peak < 0 or peak > limit_bytes:
        return order
    rank = 0
    for _ in range(tries):
        ranked = removable(a, order)
        if rank >= len(ranked):
            break
        keep = np.ones(len(order), dtype=np.bool_)
        keep[ranked[rank]] = False
        rank += 1
        trial = bring_down(a, prune(a, order[keep]), limit_bytes, int(_ROUNDS), width)
        trial_peak, _at, trial_s = replay(a, trial, np.zeros(len(trial), dtype=np.int64))
        if trial_peak < 0 or trial_peak > limit_bytes:
            continue
        trial = fill(a, trial, limit_bytes, int(_FILL_ROUNDS))
        _peak, _at, trial_s = replay(a, trial, np.zeros(len(trial), dtype=np.int64))
        if trial_s < time_s * (1 - 1e-9):
            order = trial
            time_s = trial_s
            rank = 0
    return order
