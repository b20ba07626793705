"""Blocks whose lifetimes are known, in one slab of memory: where each goes, so that the slab is small.

    offset ^   lifetimes are half-open: a block that ends at 3 and one that begins at 3 may share bytes
           |  bbbb
           |  aaaacccc
           +----------> time

That is two-dimensional packing, with time given. First fit comes first, in several orders: the largest blocks before
others, or those that live longest. It is mostly within a few parts in a thousand of the least. Where it is not, an
ejection search lowers it step by step: what is above a limit is taken out and goes where it evicts the least, and what
it evicts is placed again. Evicted blocks get heavier, as clauses do in breakout local search (Morris, AAAI 1993). No
slab is smaller than the most that lives at one time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_CLOSE = 0.008  # of the bound: what is not worth a search
_FEW = 3000  # a block is small if so many take no more than the bound, and it does not last
_SHORT = 10  # it does not last if so many in a row would
_LASTING = (0.8, 0.9, 0.96)  # first fit places the longest lives first: all beyond this quantile
_STARTS = 4  # results of first fit that are lowered
_LOWERED = 0.2  # of what is above the bound, at once
_FAILURES = 3  # in a row, until a start is given up
_STEPS = 1500  # placements of one search
_FIXED = 1e6  # the weight of blocks that stay
_NOTHING = 1e-6  # a weight that is only rounding
_EJECTED = 0.5  # how much heavier a block becomes, of its first weight
_NOISE = 0.3  # of the weights, so that a search does not go in circles

_Ints = NDArray[np.int64]


class LiveRange(NamedTuple):
    """A block that is there from `first` to before `last`."""

    size_bytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Packing:
    """Where blocks go.

    - offsets: of each block, in the order in which they were given.
    - size_bytes: of the slab.
    """

    offsets: tuple[int, ...] = ()
    size_bytes: int = 0


def pack_slab(blocks: Sequence[LiveRange], enough_bytes: int = 0, seed: int = 0) -> Packing:
    """Offsets in a slab that is as small as is found. The same for the same blocks and seed, always.

    enough_bytes: a slab of this size is as good as a smaller one.
    """
    if not blocks:
        return Packing()
    size, first, last = columns(blocks)
    bound_bytes = most_alive(blocks)
    lasting = last - first
    orders = [np.lexsort((-lasting, -size)), np.lexsort((first, -size * lasting))]
    longest = [lasting > np.quantile(lasting, share) for share in _LASTING]
    orders += [np.lexsort((-size, -lasting * is_long)) for is_long in longest]
    starts = {_height(at, size): at for at in (_first_fit(size, first, last, order) for order in orders)}
    best = starts[min(starts)]
    enough_bytes = max(enough_bytes, int(bound_bytes * (1 + _CLOSE)))
    matters = (size * _FEW >= bound_bytes) | (lasting * _SHORT >= last.max() - first.min())
    large, small = np.nonzero(matters)[0], orders[0][~matters[orders[0]]]  # small ones fall into gaps
    draws = np.random.default_rng(seed)
    for height in sorted(starts)[:_STARTS]:
        offsets, failures = starts[height], 0
        while height > enough_bytes and failures < _FAILURES and _height(best, size) > enough_bytes:
            limit_bytes = max(enough_bytes, height - math.ceil((height - bound_bytes) * _LOWERED))
            kept = np.where(offsets + size <= limit_bytes, offsets, -1)[large]
            found = eject(size[large], first[large], last[large], kept, kept < -1, limit_bytes, draws, _STEPS)
            failures += 1
            if found is not None:
                order = np.concatenate((large[np.argsort(found, kind="stable")], small))
                lower = _first_fit(size, first, last, order)
                if _height(lower, size) < height:
                    offsets, height, failures = lower, _height(lower, size), 0
        best = min(best, offsets, key=lambda at: _height(at, size))
    return Packing(tuple(best.tolist()), _height(best, size))


def columns(blocks: Iterable[LiveRange]) -> tuple[_Ints, _Ints, _Ints]:
    """Sizes of blocks, and from when to when they live."""
    size, first, last = (np.array(column, np.int64) for column in zip(*blocks, strict=True))
    return size, first, last


def _height(offsets: _Ints, size: _Ints) -> int:
    return int((offsets + size).max())


def most_alive(blocks: Iterable[LiveRange]) -> int:
    """The most bytes that live at one time: no slab is smaller."""
    events = sorted(event for b in blocks for event in ((b.last, 0, -b.size_bytes), (b.first, 1, b.size_bytes)))
    alive = most = 0
    for _, _, size_bytes in events:
        most = max(most, alive := alive + size_bytes)
    return most


def _first_fit(size: _Ints, first: _Ints, last: _Ints, order: _Ints) -> _Ints:
    """Each block, in this order, at the lowest offset where it fits between those that are placed."""
    offsets = np.zeros_like(size)
    for count, block in enumerate(order):
        placed = order[:count]
        beside = placed[(first[placed] < last[block]) & (last[placed] > first[block])]
        beside = beside[np.argsort(offsets[beside], kind="stable")]
        tops = np.maximum.accumulate(offsets[beside] + size[beside])
        starts = np.concatenate(([0], tops))
        room = np.append(offsets[beside], np.iinfo(np.int64).max) - starts
        offsets[block] = starts[np.argmax(room >= size[block])]
    return offsets


def eject(
    size: _Ints, first: _Ints, last: _Ints, offsets: _Ints, fixed: NDArray[np.bool_], limit_bytes: int,
    draws: np.random.Generator, steps: int,
) -> _Ints | None:  # fmt: skip
    """Offsets in a slab of this size, or None if the search ends before it finds some.

    - offsets: where blocks are when it begins; -1 of those that are to be placed.
    - fixed: blocks that stay where they are.
    - steps: placements until the search ends.
    """
    lasting = last - first
    born = np.sqrt(size.astype(np.float64) * lasting)
    born /= born.max()
    weight, offsets = np.where(fixed, _FIXED, born), offsets.copy()
    rank = np.empty_like(size)
    rank[np.lexsort((-lasting, -size))] = np.arange(len(size))
    waiting = [(int(rank[block]), int(block)) for block in np.nonzero(offsets < 0)[0]]
    heapq.heapify(waiting)
    meets: dict[int, _Ints] = {}  # by block, those that live at some time when it does
    for _ in range(steps):
        if not waiting:
            return offsets
        _, block = heapq.heappop(waiting)
        if block not in meets:
            meets[block] = np.nonzero((first < last[block]) & (last > first[block]))[0]
        starts = offsets[meets[block]]
        beside, starts = meets[block][starts >= 0], starts[starts >= 0]
        tops, length = starts + size[beside], size[block]
        places = np.concatenate(([0, limit_bytes - length], tops, starts - length))
        places = places[(places >= 0) & (places <= limit_bytes - length)]
        # In the way of a place are those that begin below its end, but for those that end below it.
        by_start, by_top = np.argsort(starts), np.argsort(tops)
        begun = np.concatenate(([0.0], np.cumsum(weight[beside[by_start]])))
        ended = np.concatenate(([0.0], np.cumsum(weight[beside[by_top]])))
        cost = begun[np.searchsorted(starts[by_start], places + length)]
        cost -= ended[np.searchsorted(tops[by_top], places, "right")]
        if not len(cost) or cost.min() > _FIXED / 2:
            return None
        if cost.min() > _NOTHING:
            offset = places[np.argmin(cost * (1 + _NOISE * draws.random(len(cost))))]
        else:
            offset = places[cost <= _NOTHING].min()
        for other in beside[(starts < offset + length) & (tops > offset)]:
            offsets[other] = -1
            weight[other] += _EJECTED * born[other]
            heapq.heappush(waiting, (int(rank[other]), int(other)))
        offsets[block] = offset
    return None
