"""Incumbents for the exact search: the local search of whole steps, on a block under its limits.

That search knows one limit, so three limits become one. The stand-in for what follows the block, and the forward ops,
are given so much more (or less) scratch that they reach the limit of the backward peak exactly where they reach their
own.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from memplan.problem.schedule import BOUNDARY
from memplan.solvers.chain.options import LocalBlock, Option
from memplan.solvers.orders.flat import Arrays, Ints
from memplan.solvers.orders.replay import fill, outcome
from memplan.solvers.orders.rewrites import bring_down
from memplan.solvers.search.neighbourhood import exchange

NO_LIMIT = 1 << 60
_FREE = 1 << 50  # stands for no limit where bytes are added up
_ROUNDS, _FILLS, _EXCHANGES, _WIDTH = 100, 8, 30, 6  # effort of each start


class BlockBudget(NamedTuple):
    """Bytes saved between the two parts and the peaks of both, as in `Option`."""

    saved_bytes: int = NO_LIMIT
    forward_peak_bytes: int = NO_LIMIT
    backward_peak_bytes: int = NO_LIMIT

    def admits(self, option: Option) -> bool:
        return all(map(operator.le, option.figures[:3], self))

    def within(self, other: BlockBudget) -> bool:
        """Whether every option within these limits is within the other's."""
        return all(map(operator.le, self, other))


def limited(block: LocalBlock, budget: BlockBudget) -> tuple[Arrays, int]:
    """Arrays whose orders peak within the returned limit just where they keep the budget."""
    a = block.flat.arrays
    limit = min(budget.backward_peak_bytes, _FREE)
    scratch = a.scratch_bytes.copy()
    scratch[: a.boundary] += limit - min(budget.forward_peak_bytes, 2 * _FREE)
    scratch[a.boundary] = limit - min(budget.saved_bytes, 2 * _FREE) - block.incoming_bytes
    return a._replace(scratch_bytes=scratch), limit


def improved(block: LocalBlock, budget: BlockBudget, known: Mapping[tuple[int, ...], Option], tries: int) -> list[Ints]:
    """Orders that keep the budget, from the most promising `tries` of those known; the best of them comes last.

    known: orders and what they come to.
    """
    a, limit = limited(block, budget)
    total_s = float(a.time_s.sum())

    def score(option: Option) -> float:
        over = max(
            0,
            option.saved_bytes - budget.saved_bytes,
            option.forward_peak_bytes - budget.forward_peak_bytes,
            option.backward_peak_bytes - limit,
        )
        return option.recompute_s + 3 * over / max(1, abs(limit)) * total_s

    found: list[tuple[float, Ints]] = []
    for start in sorted(known, key=lambda start: score(known[start]))[:tries]:
        order = np.array(start, dtype=np.int64)
        trial = fill(a, bring_down(a, order, limit, _ROUNDS, _WIDTH), limit, _FILLS)
        peak, time_s = outcome(a, trial)
        if peak <= limit and _forward_once(a, trial):
            found.append((time_s, trial))
    if not found:
        return []
    best = min(found, key=lambda entry: entry[0])[1]
    better = exchange(a, best, limit, _EXCHANGES, _WIDTH)
    return [best, better] if _forward_once(a, better) else [best]


def _forward_once(a: Arrays, order: Ints) -> bool:
    """Whether the forward part runs every op once, in order: a block's options have nothing else."""
    n = a.boundary
    return len(order) > n + 1 and order[n] == BOUNDARY and order[n + 1] == n and bool((order[:n] == np.arange(n)).all())
