"""Blocks whose lifetimes are known, in one slab of memory: where each goes, so that the slab is small.

    offset ^   lifetimes are half-open: a block that ends at 3 and one that begins at 3 may share bytes
           |  bbbb
           |  aaaacccc
           +----------> time

That is two-dimensional packing, with time given. First fit comes first, the largest blocks before others, and is mostly
within a few parts in a thousand of the least. Where it is not, an ejection search tries a smaller slab: a block that
fits nowhere goes where it evicts the least, and what it evicts is placed again. Evicted blocks get heavier, as clauses
do in breakout local search (Morris, AAAI 1993). Where that fails, the next search is for a slab with twice as much to
spare. No slab is smaller than the most that lives at one time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_CLOSE = 0.008  # of the bound: what is not worth a search
_FEW = 3000  # a block is small if so many take no more than the bound, and it does not last
_SHORT = 10  # it does not last if so many in a row would
_TRIES = 2  # searches for the smallest slab; one for each larger one
_STEPS = 10_000  # placements of one search
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


def pack_slab(blocks: Sequence[LiveRange], enough_bytes: int = 0) -> Packing:
    """Offsets in a slab that is as small as is found. The same for the same blocks, always.

    enough_bytes: a slab of this size is as good as a smaller one.
    """
    if not blocks:
        return Packing()
    size, first, last = (np.array(column, np.int64) for column in zip(*blocks, strict=True))
    bound_bytes = most_alive(blocks)
    lasting = last - first
    orders = (np.lexsort((-lasting, -size)), np.lexsort((first, -size * lasting)))
    best = min((_first_fit(size, first, last, order) for order in orders), key=lambda at: _height(at, size))
    limit_bytes = max(enough_bytes, int(bound_bytes * (1 + _CLOSE)))
    matters = (size * _FEW >= bound_bytes) | (lasting * _SHORT >= last.max() - first.min())
    large, small = np.nonzero(matters)[0], orders[0][~matters[orders[0]]]  # small ones fall into gaps
    draws = np.random.default_rng(0)
    tries = 0
    while _height(best, size) > limit_bytes:
        found = _eject(size[large], first[large], last[large], limit_bytes, draws)
        if found is not None:
            order = np.concatenate((large[np.argsort(found, kind="stable")], small))
            best = min(best, _first_fit(size, first, last, order), key=lambda at: _height(at, size))
        tries += 1
        if tries >= _TRIES:
            limit_bytes += max(1, limit_bytes - bound_bytes)
    return Packing(tuple(best.tolist()), _height(best, size))


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


def _eject(size: _Ints, first: _Ints, last: _Ints, limit_bytes: int, draws: np.random.Generator) -> _Ints | None:
    """Offsets in a slab of this size, or None if the search ends before it finds some."""
    lasting = last - first
    born = np.sqrt(size.astype(np.float64) * lasting)
    born /= born.max()
    weight, offsets = born.copy(), np.full_like(size, -1)
    rank = np.empty_like(size)
    rank[np.lexsort((-lasting, -size))] = np.arange(len(size))
    waiting = [(int(r), block) for block, r in enumerate(rank)]
    heapq.heapify(waiting)
    meets: dict[int, _Ints] = {}  # by block, those that live at some time when it does
    for _ in range(_STEPS):
        if not waiting:
            return offsets
        _, block = heapq.heappop(waiting)
        if block not in meets:
            meets[block] = np.nonzero((first < last[block]) & (last > first[block]))[0]
        beside = meets[block][offsets[meets[block]] >= 0]
        starts, tops = offsets[beside], offsets[beside] + size[beside]
        room = limit_bytes - size[block]
        places = np.unique(np.concatenate(([0, room], tops, starts - size[block])))
        places = places[(places >= 0) & (places <= room)]
        # A neighbour is in the way of the places between its start, less the block's size, and its top.
        change = np.zeros(len(places) + 1)
        np.add.at(change, np.searchsorted(places, starts - size[block], "right"), weight[beside])
        np.add.at(change, np.searchsorted(places, tops, "left"), -weight[beside])
        cost = np.cumsum(change[:-1])
        cost[cost < 1e-9] = 0.0
        if cost.min() > 0.0:
            cost *= 1 + _NOISE * draws.random(len(cost))
        offset = places[np.argmin(cost)]
        for other in beside[(starts < offset + size[block]) & (tops > offset)]:
            offsets[other] = -1
            weight[other] += _EJECTED * born[other]
            heapq.heappush(waiting, (int(rank[other]), int(other)))
        offsets[block] = offset
    return None
