"""Least recomputation where only the largest values take memory: a table over their sets, for every step.

With the smaller values free, what is demanded of the larger ones is all that a node has, and sets of `most_bits` values
can be counted through: taking back a run demands values of earlier ops instead of its own, so with bits in the order of
ops each set leads to lesser ones alone. What repeated runs need for a while is in this bound, unlike in those of
moments. A relaxation by projection: Culberson and Schaeffer's pattern databases (1998, doi:10.1111/0824-7935.00065).
"""

from __future__ import annotations

import numpy as np

from memplan.solvers.exact_block import Reversed
from memplan.solvers.exact_bound import (
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
)
from memplan.solvers.flat import Ints
from memplan.solvers.jit import kernel


@kernel
def least_of_sets(space: Space, limits: Ints, bits: int, rests: Ints) -> Ints:
    ops, steps, stages = space.ops, space.steps, space.stages
    count, sets = len(steps) - 1, 1 << bits
    mask = sets - 1
    table = np.full((count + 1, sets), NEVER, dtype=np.int64)
    size = np.zeros(sets, dtype=np.int64)
    for v in range(bits):
        size[1 << v : 2 << v] = size[: 1 << v] + space.size_bytes[v]
    beside = np.empty(len(stages), dtype=np.int64)
    for i in range(len(stages)):
        beside[i] = stages[i, 2]
        for v in range(bits, len(space.size_bytes)):
            word = stages[i, 0] if v < 63 else stages[i, 1]
            if (word >> (v if v < 63 else v - 63)) & 1:
                beside[i] += space.size_bytes[v]
    reach = np.zeros(count + 1, dtype=np.int64)
    reach_now = 0
    for s in range(count - 1, -1, -1):
        reach_now |= steps[s, STEP_READ] & mask
        for o in range(len(ops) - 1, -1, -1):
            if ops[o, MADE] & reach_now:
                reach_now |= ops[o, READ] & mask
        reach[s] = reach_now
    # ops through small values too
    limit = limits[2]
    for s in range(count + 1):
        between = steps[s, BETWEEN_BYTES]
        step_beside = 0
        step_read = 0
        step_taken = 0
        if s > 0:
            step_read = steps[s - 1, STEP_READ] & mask
            step_taken = steps[s - 1, STEP_TAKEN] & mask
            step_beside = steps[s - 1, STEP_BYTES]
            for v in range(bits, len(space.size_bytes)):
                word = steps[s - 1, STEP_READ] if v < 63 else steps[s - 1, STEP_READ + 1]
                if (word >> (v if v < 63 else v - 63)) & 1:
                    step_beside += space.size_bytes[v]
        for d in range(sets):
            best = NEVER
            if s == 0:
                if rests[d]:
                    best = 0
            elif d & step_taken == 0:
                to = d | step_read
                if step_beside + size[to] <= limit:
                    best = table[s - 1, to]
            for o in range(len(ops)):
                if d & ops[o, MADE] == 0 or ops[o, TICKS] >= NEVER:
                    continue
                left = d & ~ops[o, MADE]
                if left & ops[o, TAKEN]:
                    continue
                to = left | (ops[o, READ] & mask)
                if table[s, to] + ops[o, TICKS] >= best:
                    continue
                fits = True
                for i in range(ops[o, STAGE], ops[o, STAGES]):
                    if between + size[left | (stages[i, 0] & mask)] + beside[i] > limit:
                        fits = False
                        break
                if fits:
                    best = table[s, to] + ops[o, TICKS]
            table[s, d] = best
    return table
