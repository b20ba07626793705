"""Least recomputation where only the largest values take memory: a table over sets of those, for each step.

Where the smaller values are free, a node is no more than what is demanded of the larger ones. Taking back a run demands
values of earlier ops instead of its own. So with bits in the order of ops every set leads to lesser ones, and one sweep
over all of them has the least time from each. Unlike bounds of moments this one sees what repeated runs need for a
while. It is a pattern database (Culberson and Schaeffer, 1998, doi:10.1111/0824-7935.00065).
"""

from __future__ import annotations

import numpy as np

from memplan.jit import kernel
from memplan.solvers.exact.block import WORD, Reversed
from memplan.solvers.exact.space import (
    BETWEEN_BYTES,
    MADE,
    NEVER,
    READ,
    STAGE,
    STAGES,
    STEP_BYTES,
    STEP_READ,
    STEP_TAKEN,
    TAKEN,
    TICKS,
    Space,
    parcels_of,
    rests,
    sum_of,
)
from memplan.solvers.orders.flat import Ints

_MOST_BITS = 17
_SETS_A_NODE = 256  # of all steps together, for each node that may be expanded
NO_TABLE = np.zeros((0, 1), dtype=np.int64), np.zeros((0, 1), dtype=np.int64)


def table_of(b: Reversed, space: Space, limits: Ints, most_nodes: int) -> tuple[Ints, Ints]:
    """(least ticks by step and set, parcels that say which set a demand is).

    most_nodes: that may be expanded; the table has so many sets at most, of all steps together, for each of these.
    """
    steps, values = len(b.step_bytes), len(b.size_bytes)
    bits = min(_MOST_BITS, values, (most_nodes * _SETS_A_NODE // (steps + 1)).bit_length() - 1)
    if bits < 1:
        return NO_TABLE
    largest = np.lexsort((np.arange(values), -b.size_bytes))[:bits]
    chosen = sorted(largest.tolist(), key=lambda v: (int(b.maker[v]), v))
    index = np.zeros(values, dtype=np.int64)
    index[chosen] = 1 << np.arange(bits)
    parcels = parcels_of(index)
    return least_of_sets(space, limits, parcels, np.array(chosen, dtype=np.int64)), parcels


@kernel
def _spread(amounts: Ints) -> Ints:
    """Sums of these amounts over every set of them, by the set's bits."""
    sums = np.zeros(1 << len(amounts), dtype=np.int64)
    for k in range(len(amounts)):
        sums[1 << k : 2 << k] = sums[: 1 << k] + amounts[k]
    return sums


@kernel
def _within_reach(space: Space, parcels: Ints) -> Ints:
    """Of the chosen values, which can be demanded before each step and after the last."""
    steps, ops = space.steps, space.ops
    reach = np.zeros(len(steps), dtype=np.int64)
    low = high = 0
    for step in range(len(steps) - 2, -1, -1):
        low |= steps[step, STEP_READ]
        high |= steps[step, STEP_READ + 1]
        for op in range(len(ops) - 1, -1, -1):
            if ops[op, TICKS] < NEVER and (ops[op, MADE] & low) | (ops[op, MADE + 1] & high) != 0:
                low |= ops[op, READ]
                high |= ops[op, READ + 1]
        reach[step] = sum_of(parcels, low, high)
    return reach


@kernel
def least_of_sets(space: Space, limits: Ints, parcels: Ints, chosen: Ints) -> Ints:
    """Least ticks before each step and after the last, by the set of chosen values that is demanded there.

    Sets out of reach are left undefined. Smaller values count where an op or step reads them.
    """
    ops, stages, steps = space.ops, space.stages, space.steps
    held = _spread(space.size_bytes[chosen])
    low_bits = np.zeros(len(chosen), dtype=np.int64)
    high_bits = np.zeros(len(chosen), dtype=np.int64)
    for k in range(len(chosen)):
        if chosen[k] < WORD:
            low_bits[k] = 1 << chosen[k]
        else:
            high_bits[k] = 1 << (chosen[k] - WORD)
    low, high = _spread(low_bits), _spread(high_bits)
    made, read, taken = np.zeros((3, len(ops)), dtype=np.int64)
    for op in range(len(ops)):
        made[op] = sum_of(parcels, ops[op, MADE], ops[op, MADE + 1])
        read[op] = sum_of(parcels, ops[op, READ], ops[op, READ + 1])
        taken[op] = sum_of(parcels, ops[op, TAKEN], ops[op, TAKEN + 1])
    stood, beside = np.zeros((2, len(stages)), dtype=np.int64)
    for i in range(len(stages)):
        stood[i] = sum_of(parcels, stages[i, 0], stages[i, 1])
        beside[i] = stages[i, 2] + sum_of(space.parcels, stages[i, 0], stages[i, 1]) - held[stood[i]]
    reach = _within_reach(space, parcels)
    table = np.empty((len(steps), len(held)), dtype=np.int64)
    for step in range(len(steps)):
        step_read = step_taken = step_bytes = 0
        if step > 0:
            row = steps[step - 1]
            step_read = sum_of(parcels, row[STEP_READ], row[STEP_READ + 1])
            step_taken = sum_of(parcels, row[STEP_TAKEN], row[STEP_TAKEN + 1])
            step_bytes = row[STEP_BYTES] + sum_of(space.parcels, row[STEP_READ], row[STEP_READ + 1]) - held[step_read]
        room_bytes = limits[2] - steps[step, BETWEEN_BYTES]
        demand = 0
        while True:
            least = NEVER
            if step == 0:
                if rests(space, limits, low[demand], high[demand]):
                    least = 0
            elif demand & step_taken == 0 and step_bytes + held[demand | step_read] <= limits[2]:
                least = table[step - 1, demand | step_read]
            for op in range(len(ops)):
                left = demand & ~made[op]
                if ops[op, TICKS] >= NEVER or left == demand or left & taken[op] != 0:
                    continue
                ticks = table[step, left | read[op]] + ops[op, TICKS]
                if ticks < least:
                    fits = True
                    for i in range(ops[op, STAGE], ops[op, STAGES]):
                        fits = fits and held[left | stood[i]] + beside[i] <= room_bytes
                    if fits:
                        least = ticks
            table[step, demand] = least
            if demand == reach[step]:
                break
            demand = ((demand | ~reach[step]) + 1) & reach[step]
    return table
