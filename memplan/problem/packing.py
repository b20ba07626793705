"""Blocks whose lifetimes are known, in one slab, of a device or the host: where each goes, so that it is small.

    offset ^   lifetimes are half-open: a block that ends at 3 and one that begins at 3 may share bytes
           |  bbbb
           |  aaaacccc
           +----------> time

That is two-dimensional packing, with time given. First fit comes first, in several orders: the largest blocks before
others, or those that live longest. It is mostly within a few parts in a thousand of the least. Where it is not, an
ejection search lowers it step by step: what is above a limit is taken out and goes where it evicts the fewest, and what
it evicts is placed again. Evicted blocks get heavier, as clauses do in breakout local search (Morris, AAAI 1993). Where
that stays too high, the search places all blocks from nothing: those that stay to the end, as gradients do, lie at the
bottom in the order in which they come, and time is cut where nothing else lives. No slab is smaller than the most that
lives at one time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memplan.jit import kernel
from memplan.problem.data import Graph, Problem
from memplan.problem.schedule import DropHost, Offload, Schedule

_ALIGNMENT_BYTES = 512  # of host memory
_CLOSE = 0.008  # of the bound: what is not worth a search
_LASTING = (0.8, 0.9, 0.96)  # first fit places the longest lives first: all beyond this quantile
_FULL = 0.9  # of the bound: blocks that come when the slab is never so full again may lie anywhere
_TRIES = 100  # searches from nothing
_LOWERED = (0.3, 0.3, 0.2, 0.2, 0.1, 0.1)  # of what is above the bound, by one search: less after each failure
_STEPS = 5000  # placements of one search
_FIXED = 1e6  # the weight of blocks that stay
_EJECTED = 0.5  # how much heavier a block becomes; all begin with 1
_NOISE = 0.3  # of the weights, so that a search does not go in circles
_FACTOR = 6364136223846793005  # of Knuth's linear congruential generator
_DRAWN = (1 << 30) - 1  # the largest number that is drawn

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
    bound_bytes, lasting = most_alive(blocks), last - first
    longest = [lasting > np.quantile(lasting, share) for share in _LASTING]
    keys = [(-lasting, -size), (first, -size * lasting), *((-size, -lasting * is_long) for is_long in longest)]
    best = min((_first_fit(size, first, last, np.lexsort(k)) for k in keys), key=lambda at: _height(at, size))
    height, failures = _height(best, size), 0
    enough_bytes = max(enough_bytes, int(bound_bytes * (1 + _CLOSE)))
    while height > enough_bytes and failures <= len(_LOWERED):
        seed += 1000  # more than there are seeds of callers
        if failures < len(_LOWERED):
            limit_bytes = max(enough_bytes, height - math.ceil((height - bound_bytes) * _LOWERED[failures]))
            kept = np.where(best + size <= limit_bytes, best, -1)
            found = eject(size, first, last, kept, kept < -1, limit_bytes, seed, _STEPS)
        else:
            found = _from_nothing(size, first, last, enough_bytes, seed)
        failures += 1
        if found.min() >= 0:
            lower = _first_fit(size, first, last, np.argsort(found, kind="stable"))
            if _height(lower, size) < height:
                best, height, failures = lower, _height(lower, size), 0
    return Packing(tuple(best.tolist()), height)


def _from_nothing(size: _Ints, first: _Ints, last: _Ints, limit_bytes: int, seed: int) -> _Ints:
    """Offsets below a limit, with what stays to the end at the bottom as it comes; some are -1 where none are found."""
    order, alive = np.argsort(first, kind="stable"), _alive(size, first, last)
    stays = (last == last.max()) & (first <= np.flatnonzero(alive > _FULL * alive.max())[-1])
    bottom, rest = order[stays[order]], order[~stays[order]]
    offsets = np.full_like(size, -1)
    offsets[bottom] = np.cumsum(size[bottom]) - size[bottom]
    apart = 1 + np.flatnonzero(first[rest[1:]] >= np.maximum.accumulate(last[rest])[:-1])
    for part in np.split(rest, apart):
        here = np.append(part, bottom)
        for _ in range(_TRIES):
            seed += 1000
            found = eject(size[here], first[here], last[here], offsets[here], stays[here], limit_bytes, seed, _STEPS)
            if found.min() >= 0:
                offsets[here] = found
                break
        else:
            return offsets
    return offsets


def columns(blocks: Iterable[LiveRange]) -> tuple[_Ints, _Ints, _Ints]:
    """Sizes of blocks, and from when to when they live."""
    size, first, last = (np.array(column, np.int64) for column in zip(*blocks, strict=True))
    return size, first, last


def _height(offsets: _Ints, size: _Ints) -> int:
    return int((offsets + size).max())


def _alive(size: _Ints, first: _Ints, last: _Ints) -> _Ints:
    """The bytes that live at each time."""
    changes = np.zeros(last.max() + 1, np.int64)
    np.add.at(changes, first, size)
    np.subtract.at(changes, last, size)
    return changes.cumsum()


def most_alive(blocks: Collection[LiveRange]) -> int:
    """The most bytes that live at one time: no slab is smaller."""
    return int(_alive(*columns(blocks)).max()) if blocks else 0


@kernel
def _first_fit(size: _Ints, first: _Ints, last: _Ints, order: _Ints) -> _Ints:
    """Each block, in this order, at the lowest offset where it fits between those that are placed."""
    offsets, by_start = np.zeros_like(size), np.empty_like(order)
    for count in range(len(order)):
        block, place = order[count], 0
        for other in by_start[:count]:
            if first[other] < last[block] and first[block] < last[other]:
                if offsets[other] - place >= size[block]:
                    break
                place = max(place, offsets[other] + size[other])
        offsets[block] = place
        _insert(by_start, count, offsets, block)
    return offsets


@kernel
def _insert(order: _Ints, count: int, keys: _Ints, block: int) -> None:
    """Put a block into an order of so many, which is sorted by their keys."""
    at = count
    while at > 0 and keys[order[at - 1]] > keys[block]:
        order[at] = order[at - 1]
        at -= 1
    order[at] = block


@kernel
def _remove(order: _Ints, count: int, block: int) -> None:
    """Take a block out of an order of so many."""
    at = 0
    while order[at] != block:
        at += 1
    for later in range(at + 1, count):
        order[later - 1] = order[later]


@kernel
def eject(
    size: _Ints, first: _Ints, last: _Ints, offsets: _Ints, fixed: NDArray[np.bool_], limit_bytes: int, seed: int,
    steps: int,
) -> _Ints:  # fmt: skip
    """Offsets in a slab of this size; -1 of blocks that have no place when the search ends.

    - offsets: where blocks are when it begins; -1 of those that are to be placed.
    - fixed: blocks that stay where they are.
    - steps: placements until the search ends.
    """
    count, lasting, offsets = len(size), last - first, offsets.copy()
    tops, weight = offsets + size, np.where(fixed, _FIXED, 1.0)
    by_turn = np.argsort(-size * (lasting.max() + 1) - lasting, kind="mergesort")  # large blocks first
    by_start, by_top, placed = np.empty(count, np.int64), np.empty(count, np.int64), 0
    for block in range(count):
        if offsets[block] >= 0:
            _insert(by_start, placed, offsets, block)
            _insert(by_top, placed, tops, block)
            placed += 1
    drawn = seed
    for _ in range(steps):
        turn = 0
        while turn < count and offsets[by_turn[turn]] >= 0:
            turn += 1
        if turn == count:
            return offsets
        block = by_turn[turn]
        length, highest = size[block], limit_bytes - size[block]
        meets = (first < last[block]) & (last > first[block])
        starts, ends = by_start[:placed], by_top[:placed]
        starts, ends = starts[meets[starts]], ends[meets[ends]]
        near = len(starts)
        # In the way of a place are blocks that begin below its end, but for those that end below it.
        place = chosen = i = j = k = 0
        begun, ended, best = 0.0, 0.0, np.inf
        while place <= highest:
            while i < near and offsets[starts[i]] < place + length:
                begun += weight[starts[i]]
                i += 1
            while j < near and tops[ends[j]] <= place:
                ended += weight[ends[j]]
                j += 1
            cost = begun - ended
            drawn = drawn * _FACTOR + 1  # modulo 2**64
            noisy = cost * (1 + _NOISE * (drawn >> 33 & _DRAWN) / _DRAWN)
            if cost == 0.0 or noisy < best:
                best, chosen = noisy, place
            if cost == 0.0 or place == highest:
                break
            while k < near and offsets[starts[k]] - length <= place:
                k += 1
            place = highest  # or at the next block's end, or before the next block
            if j < near:
                place = min(place, tops[ends[j]])
            if k < near:
                place = min(place, offsets[starts[k]] - length)
        if best > _FIXED / 2:
            return offsets
        for other in starts:
            if offsets[other] < chosen + length and tops[other] > chosen:
                _remove(by_start, placed, other)
                _remove(by_top, placed, other)
                placed -= 1
                offsets[other] = -1
                weight[other] += _EJECTED
        offsets[block], tops[block] = chosen, chosen + length
        _insert(by_start, placed, offsets, block)
        _insert(by_top, placed, tops, block)
        placed += 1
    return offsets


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Where in the slab each offloaded value goes.

    - offsets: for the step of each `Offload`, by its index in the schedule.
    - size_bytes: of the slab.
    """

    offsets: dict[int, int]
    size_bytes: int

    @property
    def pinned_bytes(self) -> int:
        """What the slab takes."""
        return pinned_bytes(self.size_bytes)


def pinned_bytes(size_bytes: int) -> int:
    """What a block of pinned host memory of this size takes."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes > 0 else 0


def host_bytes_beside(problem: Problem) -> int:
    """Host memory that the step needs beside the slab.

    It is for parameters that live there, their gradients and the declared optimizer's state, which is not pinned.
    """
    values = problem.graph.values
    parameters = sum(pinned_bytes(v.size_bytes) for v in values if v.resident and v.home == "host" and v.reuses is None)
    gradients = sum(pinned_bytes(v.size_bytes) for v in values if v.role == "gradient" and v.home == "host")
    gradients *= 2 if problem.accumulate else 1  # the earlier ones are still there when the new ones arrive
    return parameters + gradients + problem.extra_host_bytes


def place_host_copies(graph: Graph, schedule: Schedule) -> HostMemory:
    """Addresses of everything that the schedule offloads; gradients have memory of their own.

    PyTorch's allocator of pinned memory rounds each block up to a power of two. So it does with the slab, and with each
    parameter that lives on the host and its gradient; a host budget counts what is taken.
    """
    blocks: list[LiveRange] = []
    began: dict[int, int] = {}
    for index, step in enumerate(schedule):
        if isinstance(step, Offload) and graph.values[step.value].home == "device":
            began[step.value] = index
        elif isinstance(step, DropHost):
            size_bytes = -(-graph.values[step.value].size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            blocks.append(LiveRange(size_bytes, began.pop(step.value), index))
    packing = pack_slab(blocks, pinned_bytes(most_alive(blocks)))  # the slab is rounded up to a power of two
    return HostMemory({b.first: at for b, at in zip(blocks, packing.offsets, strict=True)}, packing.size_bytes)
