"""Schedules from a hierarchy: the step is a chain of blocks, each block a chain of smaller ones, down to single ops.

Between two cuts a block is a step of its own (`options.localise`): its forward part, one op that stands for everything
after it, its backward part. So one method serves every level: cut, find the options of each child, solve the chain of
children for every memory size (`rotor`), expand to orders of ops. The orders of a block are its options one level up,
beside those from minimum cuts and from a local search (`searched`). Figures are always those of flat orders:
nothing is added up over levels, so no level's rounding or pessimism reaches the next.

A parent asks a child for its cheapest way to save at most so many bytes and to peak at no more than so many. So the
options that are kept are the cheapest ones over a grid of both limits (the two budgets of HiRemate, Gusak et al.,
2024), rather than a stretch of the Pareto set (`best_options`).

A block with branches inside needs no rule of its own: several values cross its cuts.

What nests (a U-Net) is a chain of three, whose middle is a chain of its own. What repeats is solved once: options
are remembered by a block's signature, across places, levels and granularities.

Which granularity pays depends on the step: narrow cuts alone leave good whole-layer options to the children, and pairs
of layers as one block can drop the value between them. Several are tried at the top; all of them share children.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from memplan.config import SearchFigures
from memplan.jit import kernel
from memplan.problem.schedule import BOUNDARY
from memplan.solvers.chain.expand import SolvedChain, expanded, solved_with
from memplan.solvers.chain.options import (
    BlockOptions,
    LocalBlock,
    cut_flags,
    cut_orders,
    leaf_figures,
    option_figures,
    option_of_figures,
)
from memplan.solvers.chain.partition import coarse_cuts, fine_cuts, layer_cuts, make_chain
from memplan.solvers.orders.flat import Arrays, Flags, Flat, Floats, Ints
from memplan.solvers.orders.replay import Sketch, fill, keep_all, outcome, pareto, sketch_of
from memplan.solvers.orders.rewrites import bring_down

_SAVED, _FORWARD, _BACKWARD, _RECOMPUTE, _AGAIN = range(5)
_LEVELS = 12  # limits told apart in each direction of the grid
_INNER_ROUNDS, _WIDTH = 60, 6  # of the search inside a block
_LEAST_OPS = 3  # forward ops from which a block is taken apart
_FINE, _COARSE = 40, 12  # most children of a block, as single ops and as smaller blocks
_COARSE_OPS = 24  # forward ops from which a block is also a chain of smaller blocks
_INNER_SLOTS = 300  # memory sizes told apart inside a block
_OPTIONS = 64  # most options of a block
_TARGETS = 6  # peaks that the search inside a block aims at
_PEAKS, _TOPPED = 128, 2  # peaks that the orders found are filled up to, and how many for each
_FILL_WORK = 160_000  # cap on these peaks for long steps, times ops
_LONG_OPS, _STRIDE = 2_000, 4  # ops from which a step is tried at fewer granularities, each so many times coarser
_LOWERED, _PARTS = 6, (64, 16, 4)  # lowest orders that are brought down, and by which parts
_LOWER_ROUNDS = 100
_FILL_ROUNDS = 8

Cuts = tuple[int, ...]
Keys = tuple[str, ...]
Partition = tuple[Cuts, bool]


def hierarchy_orders(flat: Flat, keys: Keys, most_bytes: int, figures: SearchFigures) -> Iterator[Ints]:
    """Legal orders of ops, from the hierarchy of the step; the first keeps everything.

    - keys: of the ops, equal for equal kernels.
    - most_bytes: the peak of keeping everything, with no microbatch waiting; more is never needed.
    - figures: how far to search.
    """
    a, blocks, is_long = flat.arrays, figures.coarse_blocks, flat.op_count > _LONG_OPS
    # Cuts at the top, and whether what is between them is left whole: all cuts, then ever fewer narrow ones.
    several = [] if is_long else [(fine_cuts(flat, figures.fine_blocks), True)]
    several.append((coarse_cuts(flat, blocks), True))
    while blocks > 0:
        cuts = coarse_cuts(flat, max(2, blocks))
        several += [(layer_cuts(flat, cuts), False), (cuts, False)]
        blocks //= _STRIDE if is_long else 2
    found: list[Sketch] = []
    trees = Hierarchy(figures).orders(flat, keys, most_bytes, list(dict.fromkeys(several)))
    for order in itertools.chain([keep_all(flat)], trees):
        found.append(sketch_of(flat, "", order))
        yield order
    # The root is a node, too: its lowest orders are brought down, as inside a block.
    rounds = min(_LOWER_ROUNDS, figures.lower_work // flat.op_count)
    for sketch in pareto(found)[:_LOWERED]:
        for part in _PARTS:
            target = sketch.peak_bytes - (sketch.peak_bytes - a.base_bytes) // part
            order = bring_down(a, sketch.order, target, rounds, figures.width)
            found.append(sketch_of(flat, "", order))
            yield order
    # Memory sizes are rounded to slots, and a plan seldom uses all that it was given.
    front = pareto(found)
    low, high = front[0].peak_bytes, found[0].peak_bytes
    count = min(_PEAKS, max(2, _FILL_WORK // flat.op_count))
    for step in range(1, count):
        target = low + (high - low) * step // count
        for sketch in [s for s in front if s.peak_bytes <= target][-_TOPPED:]:
            yield fill(a, sketch.order, target, _FILL_ROUNDS)


class Hierarchy:
    """Options of the blocks that are solved already, and how blocks are solved."""

    def __init__(self, figures: SearchFigures) -> None:
        self.figures = figures
        self._known: dict[tuple[object, ...], BlockOptions] = {}

    def orders(self, flat: Flat, keys: Keys, most_bytes: int, several: Sequence[Partition]) -> Iterator[Ints]:
        """Legal orders of a whole step, from chains between these cuts."""
        beyond = max(1, most_bytes - flat.arrays.base_bytes)
        figures, known = self.figures, set[bytes]()
        for cuts, leaves in several:
            slots = figures.coarse_slots if len(cuts) < figures.coarse_blocks else figures.fine_slots
            solved = self._chain(flat, keys, cuts, beyond + beyond // 8, slots, leaves, 0)
            for order in expanded(flat, solved, 3 * figures.sizes):
                found = _filled(flat.arrays, order) if order.tobytes() not in known else None
                known.add(order.tobytes())
                if found is not None:
                    yield found

    def options(self, block: LocalBlock, keys: Keys, leaf: bool) -> BlockOptions:
        """The options of a block, found once for all that are equal. leaf: it is not to be taken apart."""
        name, flat = (block.signature, leaf), block.flat
        if name in self._known:
            return self._known[name]
        orders, limit = cut_orders(block, self.figures.block_cuts), 2 * self.figures.options
        if not leaf and flat.arrays.boundary >= _LEAST_OPS:
            limit = _OPTIONS
            most_bytes, _time_s = outcome(flat.arrays, keep_all(flat))
            partitions: list[Partition] = [(fine_cuts(flat, _FINE), True)]
            if flat.arrays.boundary >= _COARSE_OPS:
                partitions.append((coarse_cuts(flat, _COARSE), False))
            for cuts, leaves in partitions:
                if not cuts:
                    continue
                solved = self._chain(flat, keys, cuts, most_bytes + most_bytes // 8, _INNER_SLOTS, leaves,
                                     flat.arrays.boundary)  # fmt: skip
                for order in expanded(flat, solved, max(2, self.figures.sizes // 2)):
                    found = _filled(flat.arrays, order)
                    orders += [order] if found is None else [order, found]
            orders += searched(flat.arrays, orders, _TARGETS)
        self._known[name] = best_options(block, orders, limit)
        return self._known[name]

    def _chain(self, flat: Flat, keys: Keys, cuts: Cuts, most_bytes: int, slots: int, leaves: bool,
               within: int) -> SolvedChain:  # fmt: skip
        """The chain between these cuts for every memory size.

        - leaves: no child is taken apart.
        - within: forward ops of the block that this is. A child nearly as large is not taken apart either, so that
          levels stay few.
        """

        def options_of(block: LocalBlock) -> BlockOptions:
            leaf = leaves or (within > 0 and 4 * block.flat.arrays.boundary > 3 * within)
            return self.options(block, tuple("" if op < 0 else keys[op] for op in block.ops), leaf)

        return solved_with(flat, keys, make_chain(flat, cuts), most_bytes, slots, options_of)


def _filled(a: Arrays, order: Ints) -> Ints | None:
    """The order with what fits under its own peak kept; None for an order that is not legal."""
    peak, _time_s = outcome(a, order)
    return None if peak < 0 else fill(a, order, peak, _FILL_ROUNDS)


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
    """At most about `limit` options of those that these orders come to.

    They are the cheapest ones under pairs of limits on saved bytes and on the peak.
    """
    a = block.flat.arrays
    plain = list({order.tobytes(): order for order in [plain_forward(a, order) for order in orders]}.values())
    ends = np.cumsum([len(order) for order in plain])
    figures, which = _measured(a, cut_flags(block), block.incoming_bytes, np.concatenate(plain), ends)
    which = which[np.lexsort(figures[which].T[::-1])]
    if len(which) > limit:
        columns = figures[which]
        peak = np.maximum(columns[:, _FORWARD], columns[:, _BACKWARD])
        found = {int(np.lexsort((columns[:, _RECOMPUTE], columns[:, column]))[0]) for column in range(5)}
        levels = _LEVELS
        for cost in (_RECOMPUTE, _AGAIN):
            ranked = np.lexsort((peak, columns[:, _SAVED], columns[:, cost]))
            for most_saved in _quantiles(columns[:, _SAVED], levels):
                for most_peak in _quantiles(peak, levels):
                    fits = (columns[ranked, _SAVED] <= most_saved) & (peak[ranked] <= most_peak)
                    if fits.any():
                        found.add(int(ranked[np.argmax(fits)]))
            levels //= 2
        which = which[sorted(found)]
        if len(which) > limit:
            which = which[np.unique(np.linspace(0, len(which) - 1, limit).astype(int))]
    options = tuple(option_of_figures(figures[i], plain[i][a.boundary + 2 :]) for i in which)
    return BlockOptions(options, *leaf_figures(block))


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
    found = [bring_down(a, front[0][2], 0, _INNER_ROUNDS, _WIDTH)]
    for step in range(targets):
        target = low + (high - low) * step // targets if step else low - low // 16
        below = [order for peak, _time_s, order in front if peak <= target][-1:]
        above = [order for peak, _time_s, order in front if peak > target][:1]
        above = [bring_down(a, order, target, _INNER_ROUNDS, _WIDTH) for order in above]
        found += [fill(a, order, target, _FILL_ROUNDS) for order in (*below, *above)]
    return found
