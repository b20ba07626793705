"""A block as arrays for the kernels of the exact search: sets of values as words of bits, moments with what they weigh.

Kernels take few arrays of many columns: numba's time of compilation grows with the number of arrays that are passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from memplan.jit import kernel
from memplan.solvers.bounds.mincut import network_of
from memplan.solvers.exact.block import WORD, Reversed
from memplan.solvers.orders.flat import Floats, Ints

NEVER = 1 << 57  # more ticks than any schedule takes
PARCEL = 9  # values whose bytes are summed up in advance; WORD is a multiple of it
_BARRED = -1

# Columns of `Space.ops` and `Space.steps`.
MADE, READ, TAKEN, STAGE, STAGES, TICKS = 0, 2, 4, 6, 7, 8
STEP_READ, STEP_TAKEN, STEP_BYTES, BETWEEN_BYTES = 0, 2, 4, 5


class Space(NamedTuple):
    """A block with what its bounds need; sets of values are two words of bits.

    - size_bytes[v]: of a value.
    - parcels: sums of those, as of `parcels_of`.
    - ops[i]: words of what it makes, reads and takes over, its first stage and the one after its last, ticks (NEVER
      where it can't run again).
    - stages: words of what stands beside what else is demanded, and bytes on top.
    - steps[t]: words of what it reads and takes over, bytes while it runs and before it; one row more, for the end.
    - ahead[i]: bytes held while op i runs for the first time, words of what would be held on top if saved.
    - rest: words of values that are always live at the boundary, of those that are gone there, and bytes of the former.
    - after[m]: the step that moment m is, -1 before the first.
    - weight[m, v]: bytes of v that count against the moment's room; -1 if v can't cross it.
    - needed[first, stop]: words of what steps first..stop-1 read.
    - edge, work: the graph of all minimum cuts of the block, as of `network_of`. Node 0 is the source, 1 the sink, then
      come values, then ops. The first edges lead to the values, then from values to ops, then from ops to the sink.
    """

    size_bytes: Ints
    parcels: Ints
    ops: Ints
    stages: Ints
    steps: Ints
    ahead: Ints
    rest: Ints
    after: Ints
    weight: Ints
    needed: Ints
    edge: Ints
    work: Ints


class Cell(NamedTuple):
    """The limits of one search, and what was made for them.

    - limits: bytes saved, forward peak, backward peak.
    - room_bytes[m]: what moment m leaves.
    - before, price: of `windows`.
    - table, places: of `table_of`; a table of no rows is none.
    """

    limits: Ints
    room_bytes: Ints
    before: Ints
    price: Floats
    table: Ints
    places: Ints


def space_of(b: Reversed, with_forward: bool) -> Space:
    """The arrays of a block. with_forward: there is a limit on the forward peak, so forward ops are moments too."""
    steps = len(b.step_bytes)
    ticks = np.where(b.again, b.ticks, NEVER)
    step_rows = np.zeros((steps + 1, 6), dtype=np.int64)
    step_rows[:steps, STEP_READ : STEP_READ + 2] = _words(b.step_reads.lists())
    step_rows[:steps, STEP_TAKEN : STEP_TAKEN + 2] = _words(b.step_takes.lists())
    step_rows[:steps, STEP_BYTES] = b.step_bytes
    step_rows[:, BETWEEN_BYTES] = b.between_bytes
    spans = np.stack([b.stage_start[:-1], b.stage_start[1:], ticks], axis=1)
    columns = (*(_words(rows.lists()) for rows in (b.makes, b.reads, b.takes)), spans)
    stages = np.column_stack([_words(b.stage_reads.lists()), b.stage_bytes])
    ahead = np.column_stack([b.forward_bytes, _words([np.flatnonzero(extra) for extra in b.forward_extra])])
    parcels, moment_arrays, network = parcels_of(b.size_bytes), _moments(b, step_rows, with_forward), _network(b, ticks)
    rest = np.append(_words([np.flatnonzero(b.cut), np.flatnonzero(b.barred)]), b.cut_bytes)
    rows = np.ascontiguousarray(np.concatenate(columns, axis=1))
    return Space(b.size_bytes, parcels, rows, stages, step_rows, ahead, rest, *moment_arrays, *network)


def parcels_of(amounts: Ints) -> Ints:
    """Sums over every set of `PARCEL` values next to each other, a row for each such parcel."""
    sums = np.zeros((2 * WORD // PARCEL, 1 << PARCEL), dtype=np.int64)
    for v, amount in enumerate(amounts.tolist()):
        row, bit = sums[v // PARCEL], 1 << v % PARCEL
        row[bit : 2 * bit] = row[:bit] + amount
    return sums


def barring(space: Space, room_bytes: Ints) -> Space:
    """The space for these rooms, where values that are too large to be saved are barred.

    A value that alone is too large for one of the limits on what is saved is not saved, whichever of those limits a
    bound looks at.
    """
    saving = space.after < 0
    alone = (space.weight[saving] > room_bytes[saving, None]).any(axis=0)
    weight = space.weight.copy()
    weight[np.ix_(saving, alone)] = _BARRED
    return space._replace(weight=weight)


def _words(sets: Sequence[Iterable[int]]) -> Ints:
    words = np.zeros((len(sets), 2), dtype=np.int64)
    for i, values in enumerate(sets):
        for v in values:
            words[i, v // WORD] |= 1 << (v % WORD)
    return words


def _moments(b: Reversed, step_rows: Ints, with_forward: bool) -> tuple[Ints, Ints, Ints]:
    """Every step, then the boundary, then, where a forward peak is a limit, every forward op."""
    steps = len(b.step_bytes)
    after = [*range(steps), -1]
    weight = np.tile(b.size_bytes, (steps + 1, 1))
    for t in range(steps):
        weight[t, b.step_reads.row(t)] = 0
        weight[t, b.step_takes.row(t)] = _BARRED
    weight[steps, b.cut] = 0
    weight[steps, b.barred] = _BARRED
    if with_forward:
        after += [-1] * len(b.forward_bytes)
        ahead = np.where(b.forward_extra, b.size_bytes, 0)
        ahead[:, b.barred] = _BARRED
        weight = np.concatenate([weight, ahead])
    needed = np.zeros((steps + 1, steps + 1, 2), dtype=np.int64)
    for first in range(steps):
        for stop in range(first + 1, steps + 1):
            needed[first, stop] = needed[first, stop - 1] | step_rows[stop - 1, STEP_READ : STEP_READ + 2]
    return np.array(after, dtype=np.int64), np.ascontiguousarray(weight), needed


def _network(b: Reversed, ticks: Ints) -> tuple[Ints, Ints]:
    values, ops = len(b.size_bytes), len(b.ticks)
    ends: list[tuple[int, int, int]] = [(0, 2 + v, 0) for v in range(values)]
    ends += [(2 + v, 2 + values + int(b.maker[v]) if b.maker[v] >= 0 else 1, 0) for v in range(values)]
    ends += [(2 + values + op, 1, int(ticks[op])) for op in range(ops)]
    ends += [(2 + values + op, 2 + int(v), NEVER) for op in range(ops) for v in b.reads.row(op)]
    return network_of(2 + values + ops, np.array(ends, dtype=np.int64).reshape(-1, 3))


@kernel
def has(low: int, high: int, v: int) -> bool:
    """Whether v is in a set of two words."""
    return ((low >> v) & 1) != 0 if v < WORD else ((high >> (v - WORD)) & 1) != 0


@kernel
def sum_of(parcels: Ints, low: int, high: int) -> int:
    """The sum over the values in two words, of the amounts that `parcels_of` was given."""
    total = 0
    row = 0
    while low != 0:
        total += parcels[row, low & ((1 << PARCEL) - 1)]
        low >>= PARCEL
        row += 1
    row = WORD // PARCEL
    while high != 0:
        total += parcels[row, high & ((1 << PARCEL) - 1)]
        high >>= PARCEL
        row += 1
    return total


@kernel
def rests(space: Space, limits: Ints, low: int, high: int) -> bool:
    """Whether what is demanded can be what is saved at the boundary, within the limits."""
    rest, parcels = space.rest, space.parcels
    if (low & rest[2]) | (high & rest[3]) != 0:
        return False
    if rest[4] + sum_of(parcels, low & ~rest[0], high & ~rest[1]) > limits[0]:
        return False
    for i in range(len(space.ahead)):
        extra = sum_of(parcels, low & space.ahead[i, 1], high & space.ahead[i, 2])
        if space.ahead[i, 0] + extra > limits[1]:
            return False
    return True
