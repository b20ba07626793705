"""Partition of a training step into a chain of blocks with wide cuts.

A cut stands at a position of the forward order. What crosses it: values made before it and read after it, by the
forward pass or by the backward ops that go with later blocks; residents and held values are free. Several values may
cross; cuts are nested, so between two cuts only what the earlier one does not hold is charged. A value that is
overwritten never crosses, for it could not be kept.

Positions come from local minima of the crossing bytes. Immediate dominators of the value graph are not used: where a
skip or an encoder's output spans the middle of a step, no single value dominates anything there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memplan.solvers.flat import Flat, Ints


@dataclass(frozen=True, slots=True)
class Block:
    """forward, backward: ranges of ops. cut: values that cross right after the block, in the forward order."""

    forward: range
    backward: range
    cut: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    blocks: tuple[Block, ...]


def crossing_bytes(flat: Flat) -> Ints:
    """For positions 0..boundary the bytes that the rest of the forward pass reads; -1 where a cut can't stand."""
    a = flat.arrays
    n = a.boundary
    weight = np.zeros(n + 2, dtype=np.int64)
    barred = np.zeros(n + 2, dtype=np.int64)
    last_read: dict[int, int] = {}
    for op in range(n):
        for v in flat.reads[op]:
            last_read[v] = op
    for v, read in last_read.items():
        made = int(a.producer[v])
        if a.held[v] or made < 0:
            continue
        pinned = not a.rerunnable[made] and not a.overwritten[v]
        if not pinned:
            weight[made + 1] += a.size_bytes[v]
            weight[read + 1] -= a.size_bytes[v]
        if a.overwritten[v]:
            barred[made + 1] += 1
            barred[read + 1] -= 1
    crossing = np.cumsum(weight)[: n + 1]
    crossing[np.cumsum(barred)[: n + 1] > 0] = -1
    return crossing


def fine_cuts(flat: Flat, limit: int) -> tuple[int, ...]:
    """Positions that make at most `limit` blocks: all legal ones, the widest of close neighbours left out."""
    crossing = crossing_bytes(flat)
    positions = [p for p in range(1, flat.arrays.boundary) if crossing[p] >= 0]
    if len(positions) < limit:
        return tuple(positions)
    # Leave out the positions that cost the most against the narrower of their neighbours.
    edges = np.linspace(0, len(positions), limit).astype(int)
    groups = [positions[i:j] for i, j in pairwise(edges) if j > i]
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
    if len(minima) < limit:
        return tuple(minima)
    edges = np.linspace(0, len(minima), limit).astype(int)
    groups = [minima[i:j] for i, j in pairwise(edges) if j > i]
    return tuple(min(group, key=lambda p: (crossing[p], p)) for group in groups)


def layer_cuts(flat: Flat, cuts: tuple[int, ...]) -> tuple[int, ...]:
    """Of these cuts the narrow ones: no wider than twice the median width."""
    if len(cuts) < 2:
        return cuts
    crossing = crossing_bytes(flat)
    median = float(np.median([crossing[p] for p in cuts]))
    return tuple(p for p in cuts if crossing[p] <= 2 * median)


def make_chain(flat: Flat, cuts: tuple[int, ...]) -> Chain:
    """Blocks between these positions, and the backward ops that go with each."""
    a = flat.arrays
    bounds = (0, *cuts, a.boundary)
    count = len(bounds) - 1
    block_of_op = np.zeros(a.boundary, dtype=np.int64)
    for index in range(count):
        block_of_op[bounds[index] : bounds[index + 1]] = index
    ends = _backward_ends(flat, block_of_op, count)
    last_block = _last_readers(flat, block_of_op, ends)
    cut_values: list[list[int]] = [[] for _ in range(count)]
    for v in sorted(last_block):
        for index in range(int(block_of_op[a.producer[v]]), last_block[v]):
            cut_values[index].append(v)
    blocks = []
    for index in range(count):
        start = a.boundary if index == count - 1 else ends[index + 1]
        blocks.append(
            Block(range(bounds[index], bounds[index + 1]), range(start, ends[index]), tuple(cut_values[index]))
        )
    return Chain(tuple(blocks))


def _backward_ends(flat: Flat, block_of_op: Ints, count: int) -> list[int]:
    """ends[b]: one past the last backward op that reads a forward value made in block b or later."""
    a = flat.arrays
    ends = [a.boundary] * count
    for op in range(a.boundary, flat.op_count):
        for v in flat.reads[op]:
            if 0 <= a.producer[v] < a.boundary and not a.held[v]:
                block = block_of_op[a.producer[v]]
                ends[block] = op + 1
    for index in range(count - 2, -1, -1):
        ends[index] = max(ends[index], ends[index + 1])
    ends[0] = flat.op_count
    return ends


def _last_readers(flat: Flat, block_of_op: Ints, ends: list[int]) -> dict[int, int]:
    """For each forward value that can cross: the last block in which it is read."""
    a = flat.arrays
    found: dict[int, int] = {}
    # The backward segment of block b is [ends[b + 1], ends[b]).
    positions = np.arange(a.boundary, flat.op_count)
    in_backward = len(ends) - 1 - np.searchsorted(np.array(ends[::-1]), positions, side="right")
    block_of = [*block_of_op.tolist(), *in_backward.tolist()]
    for op in range(flat.op_count):
        for v in flat.reads[op]:
            made = int(a.producer[v])
            if not 0 <= made < a.boundary or a.held[v] or (not a.rerunnable[made] and not a.overwritten[v]):
                continue
            found[v] = max(found.get(v, 0), block_of[op])
    return found
