"""Least recomputation after a moment that only so many bytes cross: Lagrange multipliers and minimum cuts.

A **moment** is a backward step, the boundary, or a forward op. A capacity limits the bytes of forward values that cross
it. What is demanded after a moment crosses it, or is made by an op that runs after it. Such an op needs its operands
after the moment too. For a price of bytes that is a minimum cut (Picard and Ratliff, 1975), and cut less price times
capacity is a lower bound for every price (Everett, 1963, doi:10.1287/opre.11.3.399). The best price is found by
intersecting lines. Every moment by itself is a relaxation of the search.

Where prices leave a gap, `least_after` solves that question in whole values by a label-setting sweep. In reverse
topological order each demanded op has its outputs cross or runs again. Labels (bytes, ticks, demand) that another one
of the same demand beats are dropped.
"""

from __future__ import annotations

import numpy as np

from memplan.jit import kernel
from memplan.solvers.bounds.mincut import LEFT, LEVEL, ROOM, TARGET, max_flow
from memplan.solvers.exact.space import MADE, NEVER, READ, TICKS, Space, has
from memplan.solvers.orders.flat import Floats, Ints

_ROUNDS = 12  # prices tried for one moment


@kernel
def cut_at(edge: Ints, work: Ints, weight: Ints, low: int, high: int, price: float) -> tuple[int, int, int]:
    """(cut, bytes that cross, ticks of what runs after) at a price in ticks a byte.

    At a price below zero time is free and a byte costs one. The cut is NEVER where the demand can't be met.
    """
    values = len(weight)
    ops = work.shape[1] - 3 - values
    edge[:, LEFT] = edge[:, ROOM]
    for v in range(values):
        edge[2 * v, LEFT] = NEVER if has(low, high, v) else 0
        crossing = 2 * (values + v)
        if weight[v] < 0:
            edge[crossing, LEFT] = NEVER
        elif price >= 0.0:
            edge[crossing, LEFT] = int(min(np.floor(price * weight[v]), float(NEVER >> 9)))
        else:
            edge[crossing, LEFT] = weight[v]
    for op in range(ops):
        if price < 0.0 and edge[2 * (2 * values + op), ROOM] < NEVER:
            edge[2 * (2 * values + op), LEFT] = 0
    flow = max_flow(edge, work, int(NEVER))  # `int`, or numba compiles it for a literal argument
    if flow >= NEVER:
        return NEVER, 0, 0
    level = work[LEVEL]
    crossing_bytes = 0
    ticks = 0
    for v in range(values):
        if level[2 + v] >= 0 and level[edge[2 * (values + v), TARGET]] < 0:
            crossing_bytes += weight[v]
    for op in range(ops):
        if level[2 + values + op] >= 0:
            ticks += edge[2 * (2 * values + op), ROOM]
    return flow, crossing_bytes, ticks


@kernel
def price_bound(flow: int, room_bytes: int, price: float) -> int:
    """The bound of one price from its cut; NEVER where the demand can't be met."""
    return NEVER if flow >= NEVER else max(0, flow - int(np.ceil(price * room_bytes)))


@kernel
def asked_bytes(weight: Ints, low: int, high: int) -> int:
    """Bytes of all of these values; NEVER where one can't cross."""
    total = 0
    for v in range(len(weight)):
        if has(low, high, v):
            if weight[v] < 0:
                return NEVER
            total += weight[v]
    return total


@kernel
def best_line(edge: Ints, work: Ints, weight: Ints, low: int, high: int, room_bytes: int) -> tuple[int, float]:
    """(bound, price): the best price's bound, NEVER where the demand can't be met within the room."""
    flow, least_bytes, most_ticks = cut_at(edge, work, weight, low, high, -1.0)
    if flow >= NEVER or least_bytes > room_bytes:
        return NEVER, 0.0
    flow, most_bytes, least_ticks = cut_at(edge, work, weight, low, high, 0.0)
    best = least_ticks
    best_price = 0.0
    if most_bytes <= room_bytes:
        return best, 0.0
    for _ in range(_ROUNDS):
        price = (most_ticks - least_ticks) / (most_bytes - least_bytes)
        flow, crossing_bytes, ticks = cut_at(edge, work, weight, low, high, price)
        bound = flow - int(np.ceil(price * room_bytes))
        if bound > best:
            best = bound
            best_price = price
        if ticks + price * crossing_bytes >= (least_ticks + price * most_bytes) * (1 - 1e-12):
            break
        if crossing_bytes > room_bytes:
            if crossing_bytes >= most_bytes:
                break
            most_bytes, least_ticks = crossing_bytes, ticks
        else:
            if crossing_bytes <= least_bytes and ticks >= most_ticks:
                break
            least_bytes, most_ticks = crossing_bytes, ticks
        if most_bytes <= least_bytes:
            break
    return best, best_price


@kernel
def _sifted(label: Ints, count: int, table: Ints, kept: Ints) -> int:
    """Move labels that no other of the same demand beats to `kept`; returns how many there are, -1 for too many.

    Labels of one demand are a list: the table has its first, the last column the next one. A label that another
    replaces is `NEVER`.
    """
    table[:] = 0
    mask = len(table) - 1
    found = 0
    for i in range(count):
        low, high, held, ticks = label[i, 0], label[i, 1], label[i, 2], label[i, 3]
        if held >= NEVER:
            continue
        slot = (low * 0x2545F4914F6CDD1D + high * 0x5851F42D4C957F2D) >> 17 & mask
        while table[slot] > 0 and (kept[table[slot] - 1, 0] != low or kept[table[slot] - 1, 1] != high):
            slot = (slot + 1) & mask
        k = table[slot] - 1
        spot = -1
        beaten = False
        while k >= 0 and not beaten:
            beaten = kept[k, 2] <= held and kept[k, 3] <= ticks
            if not beaten and kept[k, 2] >= held and kept[k, 3] >= ticks:
                spot = k
                kept[k, 2] = kept[k, 3] = NEVER
            k = kept[k, 4] - 1
        if beaten:
            continue
        if spot < 0:
            if found >= len(kept):
                return -1
            spot = found
            found += 1
            kept[spot, 0], kept[spot, 1], kept[spot, 4] = low, high, table[slot]
            table[slot] = found
        kept[spot, 2], kept[spot, 3] = held, ticks
    return found


@kernel
def least_after(ops: Ints, weight: Ints, low: int, high: int, room_bytes: int, upper: int, most_labels: int) -> int:
    """Least ticks of what runs after a moment: exact for that moment if less than `upper`, else at least that.

    It is NEVER where nothing fits, and -1 where more than `most_labels` labels would be needed.
    """
    label = np.zeros((2 * most_labels, 4), dtype=np.int64)
    kept = np.zeros((most_labels, 5), dtype=np.int64)
    slots = 4
    while slots < 2 * most_labels:
        slots *= 2
    table = np.zeros(slots, dtype=np.int64)
    kept[0, 0], kept[0, 1] = low, high
    count = 1
    late = False  # whether a label was dropped for its ticks
    for op in range(len(ops) - 1, -1, -1):
        fresh = 0
        made_low, made_high = ops[op, MADE], ops[op, MADE + 1]
        touched = False
        for i in range(count):
            if kept[i, 2] >= NEVER:
                continue
            asked_low, asked_high = kept[i, 0] & made_low, kept[i, 1] & made_high
            if asked_low == 0 and asked_high == 0:
                for column in range(4):
                    label[fresh, column] = kept[i, column]
                fresh += 1
                continue
            touched = True
            held = kept[i, 2] + asked_bytes(weight, asked_low, asked_high)
            if held <= room_bytes:
                label[fresh, 0], label[fresh, 1] = kept[i, 0] & ~made_low, kept[i, 1] & ~made_high
                label[fresh, 2], label[fresh, 3] = held, kept[i, 3]
                fresh += 1
            if ops[op, TICKS] < NEVER:
                ticks = kept[i, 3] + ops[op, TICKS]
                if ticks >= upper:
                    late = True
                    continue
                label[fresh, 0] = kept[i, 0] & ~made_low | ops[op, READ]
                label[fresh, 1] = kept[i, 1] & ~made_high | ops[op, READ + 1]
                label[fresh, 2], label[fresh, 3] = kept[i, 2], ticks
                fresh += 1
        if touched:
            count = _sifted(label, int(fresh), table, kept)  # `int`, or numba compiles it for the literal 0, too
            if count < 0:
                return -1
    best = NEVER
    for i in range(count):
        if kept[i, 2] + asked_bytes(weight, kept[i, 0], kept[i, 1]) <= room_bytes:
            best = min(best, kept[i, 3])
    return min(best, upper) if late else best


@kernel
def windows(space: Space, room_bytes: Ints, labels: int, upper: int) -> tuple[Ints, Floats]:
    """(before, price): ticks that have to run again before each step, and a telling price of each moment.

    before[t] counts what has to run again before step t has run; the last entry, before the end. labels: of
    whole-valued sweeps, 0 for none.
    """
    steps = len(space.steps) - 1
    before = np.zeros(steps + 1, dtype=np.int64)
    prices = np.zeros(len(space.after), dtype=np.float64)
    edge, work = space.edge, space.work
    for t in range(steps):
        least = before[t - 1] if t > 0 else 0
        best_moment = -1
        for m in range(len(space.after)):
            u = space.after[m]
            if u < t and least < NEVER:
                base = before[u] if u >= 0 else 0
                low, high = space.needed[u + 1, t + 1, 0], space.needed[u + 1, t + 1, 1]
                if asked_bytes(space.weight[m], low, high) <= room_bytes[m]:
                    continue
                found, price = best_line(edge, work, space.weight[m], low, high, room_bytes[m])
                prices[m] = price
                if found > 0 and base + found > least:
                    least, best_moment = min(NEVER, base + found), m
        if best_moment >= 0 and least < NEVER:
            u = space.after[best_moment]
            base = before[u] if u >= 0 else 0
            low, high = space.needed[u + 1, t + 1, 0], space.needed[u + 1, t + 1, 1]
            room = room_bytes[best_moment]
            found = least_after(space.ops, space.weight[best_moment], low, high, room, upper, labels)
            least = max(least, min(NEVER, found + base))
        before[t] = least
    before[steps] = before[steps - 1] if steps else 0
    return before, prices
