"""Partition of a training step into a chain of blocks with wide cuts.

A cut stands at a position of the forward order. What crosses it: values made before it and read after it, by the
forward pass or by the backward ops that go with later blocks; residents and held values are free. Several values may
cross. Cuts are nested, so between two cuts only what the earlier one does not hold is charged. A value that is
overwritten never crosses, for it could not be kept.

Positions come from local minima of the crossing bytes, because a skip connection may leave no single value that
everything passes through.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memplan.solvers.orders.flat import Flat, Ints, readings


@dataclass(frozen=True, slots=True)
class Block:
    """Ops of the forward pass that follow one another, with the backward ops that go with them.

    - forward, backward: ranges of ops.
    - cut: values that cross right after the block, in the forward order.
    """

    forward: range
    backward: range
    cut: tuple[int, ...]


def crossing_bytes(flat: Flat) -> Ints:
    """For positions 0..boundary the bytes made before and read by the rest of the forward pass.

    It is -1 where a cut can't stand.
    """
    if "crossing" in flat.blocks:
        known: Ints = flat.blocks["crossing"]
        return known
    a = flat.arrays
    n = a.boundary
    last_read = np.full(len(a.size_bytes), -1, dtype=np.int64)
    reader, read = readings(flat)
    early = reader < n
    last_read[read[early]] = reader[early]  # the last one stands
    chosen = np.nonzero((last_read >= 0) & ~a.held & (a.producer >= 0))[0]
    made = a.producer[chosen]
    weight, barred = (np.zeros(n + 2, dtype=np.int64) for _ in range(2))
    free = chosen[a.rerunnable[made] | a.overwritten[chosen]]
    for values, amount, total in (
        (free, a.size_bytes[free], weight),
        (chosen, a.overwritten[chosen].astype(np.int64), barred),
    ):
        np.add.at(total, a.producer[values] + 1, amount)
        np.subtract.at(total, last_read[values] + 1, amount)
    crossing = np.cumsum(weight)[: n + 1]
    crossing[np.cumsum(barred)[: n + 1] > 0] = -1
    flat.blocks["crossing"] = crossing
    return crossing


def fine_cuts(flat: Flat, limit: int) -> tuple[int, ...]:
    """Positions that make at most `limit` blocks: all legal ones, or of each group of neighbours the narrowest."""
    crossing = crossing_bytes(flat)
    return _narrowest(crossing, [p for p in range(1, flat.arrays.boundary) if crossing[p] >= 0], limit)


def _narrowest(crossing: Ints, positions: list[int], limit: int) -> tuple[int, ...]:
    """All positions, if they are fewer than `limit`, or else of each group of neighbours the narrowest."""
    if len(positions) < limit:
        return tuple(positions)
    groups = [positions[i:j] for i, j in pairwise(np.linspace(0, len(positions), limit).astype(int)) if j > i]
    return tuple(min(group, key=lambda p: (crossing[p], p)) for group in groups)


def coarse_cuts(flat: Flat, limit: int) -> tuple[int, ...]:
    """Positions of local minima of the crossing bytes, the narrowest `limit - 1` of them.

    A plateau (a run of equal width, as between small ops) counts once, at its first position.
    """
    crossing = crossing_bytes(flat)
    legal = [p for p in range(1, flat.arrays.boundary) if crossing[p] >= 0]
    minima = []
    for index, p in enumerate(legal):
        before = crossing[legal[index - 1]] if index else crossing.max() + 1
        rest = next((crossing[q] for q in legal[index + 1 :] if crossing[q] != crossing[p]), -1)
        if before > crossing[p] and rest > crossing[p]:
            minima.append(p)
    return _narrowest(crossing, minima, limit)


def layer_cuts(flat: Flat, cuts: tuple[int, ...]) -> tuple[int, ...]:
    """Of these cuts the narrow ones: no wider than twice the median width."""
    if len(cuts) < 2:
        return cuts
    crossing = crossing_bytes(flat)
    median = float(np.median([crossing[p] for p in cuts]))
    return tuple(p for p in cuts if crossing[p] <= 2 * median)


def make_chain(flat: Flat, cuts: tuple[int, ...]) -> tuple[Block, ...]:
    """Blocks between these positions, and the backward ops that go with each."""
    a = flat.arrays
    bounds = (0, *cuts, a.boundary)
    count = len(bounds) - 1
    block_of_op = np.repeat(np.arange(count), np.diff(bounds))
    reader, read = readings(flat)
    made = a.producer[read]
    chosen = (made >= 0) & (made < a.boundary) & ~a.held[read]
    # ends[b]: one past the last backward op that reads a forward value made in block b or later. So the backward
    # segment of block b is [ends[b + 1], ends[b]).
    late = chosen & (reader >= a.boundary)
    ends = np.full(count, a.boundary, dtype=np.int64)
    np.maximum.at(ends, block_of_op[made[late]], reader[late] + 1)
    ends = np.maximum.accumulate(ends[::-1])[::-1]
    ends[0] = flat.op_count
    in_backward = count - 1 - np.searchsorted(ends[::-1], np.arange(a.boundary, flat.op_count), side="right")
    block_of = np.concatenate((block_of_op, in_backward))
    # last[v]: the last block in which a forward value that can cross is read.
    chosen[chosen] &= a.rerunnable[made[chosen]] | a.overwritten[read[chosen]]
    last = np.full(len(a.size_bytes), -1, dtype=np.int64)
    np.maximum.at(last, read[chosen], np.maximum(block_of[reader[chosen]], 0))
    cut_values: list[list[int]] = [[] for _ in range(count)]
    for v in np.nonzero(last >= 0)[0].tolist():
        for index in range(int(block_of_op[a.producer[v]]), int(last[v])):
            cut_values[index].append(v)
    starts, stops = [*ends[1:].tolist(), a.boundary], ends.tolist()
    return tuple(
        Block(range(bounds[i], bounds[i + 1]), range(starts[i], stops[i]), tuple(cut_values[i])) for i in range(count)
    )
