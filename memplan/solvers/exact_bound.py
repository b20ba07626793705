"""Least recomputation after a moment that only so many bytes cross: Lagrange multipliers and minimum cuts.

A **moment** is a backward step, the boundary, or a forward op; a capacity limits the bytes of forward values that
cross it. What is demanded after a moment crosses it or is made by an op that runs after it, which needs its operands
after the moment too. For a price of bytes that is a minimum cut (Picard and Ratliff, 1975), and cut less price times
capacity is a lower bound for every price (Everett, 1963, doi:10.1287/opre.11.3.399). The best price is found by
intersecting lines. Every moment by itself is a relaxation of the search.

Where prices leave a gap, `least_after` solves the same question in whole values by a label-setting sweep: in reverse
topological order each demanded op has its outputs cross or runs again, and labels (bytes, ticks, demand) that another
one of the same demand beats are dropped.

Kernels take few arrays of many columns: numba's time of compilation grows with the number of arrays that are passed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memplan.solvers.exact_block import WORD, Reversed, Rows
from memplan.solvers.flat import Flags, Floats, Ints
from memplan.solvers.jit import kernel

NEVER = 1 << 57  # more ticks than any schedule takes
_BARRED = -1
_ROUNDS = 12  # prices tried for one moment

# Columns of `Space.ops`, `Space.steps` and rows of `Space.work`.
MADE, READ, TAKEN, STAGE, STAGES, TICKS = 0, 2, 4, 6, 7, 8
STEP_READ, STEP_TAKEN, STEP_BYTES, BETWEEN_BYTES = 0, 2, 4, 5
_HEAD, _LEVEL, _QUEUE, _PATH, _CURSOR = 0, 1, 2, 3, 4
_SOURCE, _TARGET, _AFTER, _ROOM, _LEFT = 0, 1, 2, 3, 4


class Space(NamedTuple):
    """A block with what its bounds need; sets of values are two words of bits.

    size_bytes[v]. ops[i]: words of what it makes, reads and takes over, its first stage and the one after its last,
    ticks (NEVER where it can't run again). stages: words of what stands in a moment of a repeated run beside what is
    demanded otherwise, and bytes on top. steps[t]: words of what it reads and takes over, bytes while it runs and before it; one row more,
    for the end. ahead[i]: bytes held while op i runs for the first time, words of what would be held on top if saved.
    rest: words of what is held at the boundary in any case and of what is gone there, and bytes of the former.
    after[m]: the step that moment m is, -1 before the first. weight[m, v]: bytes of v that count against the moment's
    room; -1 if v can't cross it. needed[first, stop]: words of what steps first..stop-1 read.
    edge: the graph of all minimum cuts of the block, node 0 the source, 1 the sink, then values, then ops; columns are
    ends, the next edge of the same end, and room; edges e and e ^ 1 are opposite. The first edges lead to the values,
    then from values to ops, then from ops to the sink. work: what a maximum flow scribbles on.
    """

    size_bytes: Ints
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


def space_of(b: Reversed, with_forward: bool) -> Space:
    """with_forward: there is a limit on the forward peak, so forward ops are moments too."""
    ops, steps = len(b.ticks), len(b.step_bytes)
    ticks = np.where(b.again, b.ticks, NEVER)
    step_rows = np.zeros((steps + 1, 6), dtype=np.int64)
    step_rows[:steps, STEP_READ : STEP_READ + 2] = _words(b.step_reads)
    step_rows[:steps, STEP_TAKEN : STEP_TAKEN + 2] = _words(b.step_takes)
    step_rows[:steps, STEP_BYTES] = b.step_bytes
    step_rows[:, BETWEEN_BYTES] = b.between_bytes
    spans = np.stack([b.stage_start[:-1], b.stage_start[1:], ticks], axis=1)
    columns = (_words(b.makes), _words(b.reads), _words(b.takes), spans)
    stages = np.concatenate([_words(b.stage_reads), b.stage_bytes[:, None]], axis=1)
    moments = range(len(b.forward_bytes))
    ahead = np.array([[b.forward_bytes[i], *_word_pair(b.forward_extra[i])] for i in moments], dtype=np.int64)
    after, weight, needed = _moments(b, step_rows, with_forward)
    edge, work = _network(b, ticks)
    rest = np.array([*_word_pair(b.cut), *_word_pair(b.barred), b.cut_bytes], dtype=np.int64)
    rows = np.ascontiguousarray(np.concatenate(columns, axis=1))
    return Space(b.size_bytes, rows, stages, step_rows, ahead.reshape(len(moments), 3), rest, after, weight, needed, edge, work)


def barring(space: Space, room_bytes: Ints) -> Space:
    """The space for these rooms: what is too large for one of the limits on what is saved is not saved at all."""
    saving = space.after < 0
    alone = (space.weight[saving] > room_bytes[saving, None]).any(axis=0)
    weight = space.weight.copy()
    weight[np.ix_(saving, alone)] = _BARRED
    return space._replace(weight=weight)


def _word_pair(flags: Flags) -> tuple[int, int]:
    chosen = np.flatnonzero(flags).tolist()
    return sum(1 << v for v in chosen if v < WORD), sum(1 << (v - WORD) for v in chosen if v >= WORD)


def _words(rows: Rows) -> Ints:
    words = np.zeros((len(rows.start) - 1, 2), dtype=np.int64)
    for i in range(len(words)):
        for v in rows.item[rows.start[i] : rows.start[i + 1]].tolist():
            words[i, v // WORD] |= 1 << (v % WORD)
    return words


def _moments(b: Reversed, step_rows: Ints, with_forward: bool) -> tuple[Ints, Ints, Ints]:
    """Every step, then the boundary, then, where a forward peak is a limit, every forward op."""
    steps = len(b.step_bytes)
    after = [*range(steps), -1]
    weight = np.tile(b.size_bytes, (steps + 1, 1))
    for t in range(steps):
        weight[t, b.step_reads.item[b.step_reads.start[t] : b.step_reads.start[t + 1]]] = 0
        weight[t, b.step_takes.item[b.step_takes.start[t] : b.step_takes.start[t + 1]]] = _BARRED
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
    for op in range(ops):
        ends += [(2 + values + op, 2 + int(v), NEVER) for v in b.reads.item[b.reads.start[op] : b.reads.start[op + 1]]]
    nodes = 2 + values + ops
    edge = np.zeros((2 * len(ends), 5), dtype=np.int64)
    work = np.zeros((5, nodes + 1), dtype=np.int64)
    work[_HEAD] = -1
    for k, (tail, head, room) in enumerate(ends):
        for e, source, target, limit in ((2 * k, tail, head, room), (2 * k + 1, head, tail, 0)):
            edge[e, :4] = source, target, work[_HEAD, source], limit
            work[_HEAD, source] = e
    return edge, work


@kernel
def has(low: int, high: int, v: int) -> bool:
    """Whether v is in a set of two words."""
    return ((low >> v) & 1) != 0 if v < WORD else ((high >> (v - WORD)) & 1) != 0


@kernel
def cut_at(edge: Ints, work: Ints, weight: Ints, low: int, high: int, price: float) -> tuple[int, int, int]:
    """(cut, bytes that cross, ticks of what runs after) at a price in ticks a byte; at a price below zero time is free
    and a byte costs one. The cut is NEVER where the demand can't be met.

    Dinic's algorithm, all in one function: numba optimises whatever a kernel calls again for each of its callers.
    """
    values = len(weight)
    ops = work.shape[1] - 3 - values
    edge[:, _LEFT] = edge[:, _ROOM]
    for v in range(values):
        edge[2 * v, _LEFT] = NEVER if has(low, high, v) else 0
        crossing = 2 * (values + v)
        if weight[v] < 0:
            edge[crossing, _LEFT] = NEVER
        elif price >= 0.0:
            edge[crossing, _LEFT] = int(min(np.floor(price * weight[v]), float(NEVER >> 9)))
        else:
            edge[crossing, _LEFT] = weight[v]
    for op in range(ops):
        if price < 0.0 and edge[2 * (2 * values + op), _ROOM] < NEVER:
            edge[2 * (2 * values + op), _LEFT] = 0
    level, queue, path, cursor = work[_LEVEL], work[_QUEUE], work[_PATH], work[_CURSOR]
    flow = 0
    while True:
        level[:] = -1
        level[0] = 0
        queue[0] = 0
        first, last = 0, 1
        while first < last:
            node = queue[first]
            first += 1
            e = work[_HEAD, node]
            while e >= 0:
                target = edge[e, _TARGET]
                if edge[e, _LEFT] > 0 and level[target] < 0:
                    level[target] = level[node] + 1
                    queue[last] = target
                    last += 1
                e = edge[e, _AFTER]
        if level[1] < 0:  # afterwards level >= 0 marks the source's side
            break
        cursor[:] = work[_HEAD]
        depth = 0
        node = 0
        while True:
            if node == 1:
                push = edge[path[0], _LEFT]
                for i in range(1, depth):
                    push = min(push, edge[path[i], _LEFT])
                flow += push
                if flow >= NEVER:
                    return NEVER, 0, 0
                back = depth
                for i in range(depth - 1, -1, -1):
                    edge[path[i], _LEFT] -= push
                    edge[path[i] ^ 1, _LEFT] += push
                    if edge[path[i], _LEFT] == 0:
                        back = i
                depth = back
                node = edge[path[depth], _SOURCE]
                continue
            e = cursor[node]
            while e >= 0 and not (edge[e, _LEFT] > 0 and level[edge[e, _TARGET]] == level[node] + 1):
                e = edge[e, _AFTER]
            cursor[node] = e
            if e >= 0:
                path[depth] = e
                depth += 1
                node = edge[e, _TARGET]
            elif depth > 0:
                level[node] = -1
                depth -= 1
                node = edge[path[depth], _SOURCE]
            else:
                break
    crossing_bytes = 0
    ticks = 0
    for v in range(values):
        if level[2 + v] >= 0 and level[edge[2 * (values + v), _TARGET]] < 0:
            crossing_bytes += weight[v]
    for op in range(ops):
        if level[2 + values + op] >= 0:
            ticks += edge[2 * (2 * values + op), _ROOM]
    return flow, crossing_bytes, ticks


@kernel
def bound_of(flow: int, room_bytes: int, price: float) -> int:
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
    """Moves labels that no other of the same demand beats to `kept`; how many there are, -1 for too many.

    Labels of one demand are a list, from the table on by the last column. A label that another replaces is `NEVER`.
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

    NEVER where nothing fits, -1 if it takes more labels.
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
    """before[t]: ticks that have to run again before step t has run; the last entry, before the end. And a telling
    price of each moment. labels: of whole-valued sweeps, 0 for none."""
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
        if labels > 0 and best_moment >= 0 and least < NEVER:
            u = space.after[best_moment]
            base = before[u] if u >= 0 else 0
            low, high = space.needed[u + 1, t + 1, 0], space.needed[u + 1, t + 1, 1]
            room = room_bytes[best_moment]
            found = least_after(space.ops, space.weight[best_moment], low, high, room, upper, labels)
            least = max(least, min(NEVER, found + base))
        before[t] = least
    before[steps] = before[steps - 1] if steps else 0
    return before, prices
