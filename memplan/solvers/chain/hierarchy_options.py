"""The options of a block in a hierarchy: many candidate orders, measured by a kernel, the useful ones kept.

A parent asks a child for its cheapest way to save at most so many bytes and to peak at no more than so many. So the
options that are kept are the cheapest ones over a grid of both limits (the two budgets of HiRemate, Gusak et al.,
2024), rather than a stretch of the Pareto set. `searched` adds orders between those that cuts and chains have found,
and below them, with the kernels that do this for whole steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memplan.problem.schedule import BOUNDARY
from memplan.solvers.chain.options import (
    BlockOptions,
    LocalBlock,
    cut_flags,
    leaf_figures,
    option_figures,
    option_of_figures,
)
from memplan.solvers.numeric.jit import kernel
from memplan.solvers.orders.flat import Arrays, Flags, Floats, Ints
from memplan.solvers.orders.replay import fill, outcome
from memplan.solvers.orders.rewrites import bring_down

_SAVED, _FORWARD, _BACKWARD, _RECOMPUTE, _AGAIN = range(5)
_LEVELS = 12  # limits told apart in each direction of the grid
_LOWER_ROUNDS, _WIDTH, _FILL_ROUNDS = 60, 6, 8


def plain_forward(a: Arrays, order: Ints) -> Ints:
    """The order with every forward op once, in turn, before the stand-in: so a chain runs a block forward."""
    at = int(np.nonzero(order == a.boundary)[0][0])
    if at == a.boundary + 1:
        return order
    return np.concatenate([np.arange(a.boundary), [BOUNDARY], order[at:]])


@kernel
def _measured(a: Arrays, cut: Flags, incoming_bytes: int, orders: Ints, ends: Ints) -> tuple[Floats, Ints]:
    """Figures of orders that stand one behind the other, and which of them count.

    Those count that are legal, and that no other is at most equal to in every figure; of equal ones the first.
    """
    figures = np.empty((len(ends), 5))
    kept = np.empty(len(ends), dtype=np.int64)
    count = 0
    start = 0
    for i in range(len(ends)):
        legal = option_figures(a, cut, incoming_bytes, orders[start : ends[i]], figures[i])
        start = ends[i]
        left = 0
        for k in range(count):
            better = worse = False
            for column in range(5):
                better = better or figures[i, column] < figures[kept[k], column]
                worse = worse or figures[i, column] > figures[kept[k], column]
            if not better:
                legal = False
            if not legal or worse:
                kept[left] = kept[k]
                left += 1
        if legal:
            kept[left] = i
            left += 1
        count = left
    return figures, kept[:count]


def best_options(block: LocalBlock, orders: Sequence[Ints], limit: int) -> BlockOptions:
    """At most about `limit` options of those that these orders come to, the cheapest for many pairs of limits."""
    a = block.flat.arrays
    plain = list({order.tobytes(): order for order in [plain_forward(a, order) for order in orders]}.values())
    ends = np.cumsum([len(order) for order in plain])
    figures, which = _measured(a, cut_flags(block), block.incoming_bytes, np.concatenate(plain), ends)
    which = which[np.lexsort(figures[which].T[::-1])]
    chosen = which[_on_grid(figures[which], limit)]
    options = tuple(option_of_figures(figures[i], plain[i][a.boundary + 2 :]) for i in chosen)
    return BlockOptions(options, *leaf_figures(block))


def _on_grid(figures: Floats, limit: int) -> Ints:
    """Rows that are the cheapest under some pair of limits on saved bytes and on the peak."""
    count = len(figures)
    if count <= limit:
        return np.arange(count)
    peak = np.maximum(figures[:, _FORWARD], figures[:, _BACKWARD])
    found: dict[int, None] = {}
    for column in range(5):
        found[int(np.lexsort((figures[:, _RECOMPUTE], figures[:, column]))[0])] = None
    levels = _LEVELS
    for cost in (_RECOMPUTE, _AGAIN):
        ranked = np.lexsort((peak, figures[:, _SAVED], figures[:, cost]))
        for most_saved in _quantiles(figures[:, _SAVED], levels):
            for most_peak in _quantiles(peak, levels):
                fits = (figures[ranked, _SAVED] <= most_saved) & (peak[ranked] <= most_peak)
                if fits.any():
                    found[int(ranked[np.argmax(fits)])] = None
        levels //= 2
    chosen = np.array(sorted(found), dtype=np.int64)
    return chosen if len(chosen) <= limit else chosen[np.unique(np.linspace(0, len(chosen) - 1, limit).astype(int))]


def _quantiles(column: Floats, count: int) -> Floats:
    ranked = np.unique(column)
    return np.asarray(ranked[np.unique(np.linspace(0, len(ranked) - 1, count).astype(int))])


def searched(a: Arrays, orders: Sequence[Ints], targets: int) -> list[Ints]:
    """Orders near these at `targets` peaks from the lowest to the highest: brought down, or filled up."""
    front: list[tuple[int, float, Ints]] = []
    for peak, time_s, order in sorted(((*outcome(a, order), order) for order in orders), key=lambda row: row[:2]):
        if peak >= 0 and (not front or time_s < front[-1][1]):
            front.append((peak, time_s, order))
    if not front:
        return []
    low, high = front[0][0], front[-1][0]
    found = [bring_down(a, front[0][2], 0, _LOWER_ROUNDS, _WIDTH)]
    for step in range(targets):
        target = low + (high - low) * step // targets if step else low - low // 16
        below = [order for peak, _time_s, order in front if peak <= target][-1:]
        above = [order for peak, _time_s, order in front if peak > target][:1]
        above = [bring_down(a, order, target, _LOWER_ROUNDS, _WIDTH) for order in above]
        found += [fill(a, order, target, _FILL_ROUNDS) for order in (*below, *above)]
    return found
