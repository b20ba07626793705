"""Least recomputation after a moment that only so many bytes cross: Lagrange multipliers and minimum cuts.

A **moment** is a backward step, the boundary, or a forward op; a capacity limits the bytes of forward values that
cross it. What is demanded after a moment crosses it or is made by an op that runs after it, which needs its operands
after the moment too. For a price of bytes that is a minimum cut (Picard and Ratliff, 1975), and cut less price times
capacity is a lower bound for every price (Everett, 1963, doi:10.1287/opre.11.3.399). The best price is found by
intersecting lines. Every moment by itself is a relaxation of the search.

Where prices leave a gap, `least_after` solves the same question in whole values by a label-setting sweep: in reverse
topological order each demanded op has its outputs cross or runs again, and labels (bytes, ticks, demand) that another
one beats are dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memplan.solvers.exact_block import WORD, Reversed, Rows
from memplan.solvers.flat import Flags, Ints
from memplan.solvers.jit import kernel

NEVER = 1 << 57  # more ticks than any schedule takes
_BARRED = -1
_ROUNDS = 12  # prices tried for one moment
_LABELS = 192  # labels of one sweep; beyond that the prices' bound has to do


class Network(NamedTuple):
    """The graph of all minimum cuts of a block: node 0 is the source, 1 the sink, then values, then ops.

    Edge e and e ^ 1 are opposite. of_value[v], to_op[v], to_sink[op]: edges whose room depends on the question.
    room: of the others. work arrays: left, level, queue, path, cursor. made, read: what an op makes and reads as two
    words of bits each.
    """

    values: int
    nodes: int
    source: Ints
    target: Ints
    head: Ints
    after: Ints
    of_value: Ints
    to_op: Ints
    to_sink: Ints
    room: Ints
    left: Ints
    level: Ints
    queue: Ints
    path: Ints
    cursor: Ints
    made: Ints
    read: Ints


class Moments(NamedTuple):
    """after[m]: the step that moment m is, -1 before the first. weight[m, v]: bytes of v that count against
    room_bytes[m]; -1 if v can't cross it. needed[first, stop, v]: steps first..stop-1 read v."""

    after: Ints
    weight: Ints
    needed: Flags


def network_of(b: Reversed) -> Network:
    values, ops = len(b.size_bytes), len(b.ticks)
    source: list[int] = []
    target: list[int] = []
    room: list[int] = []

    def edge(tail: int, head: int, ticks: int) -> int:
        source.extend((tail, head))
        target.extend((head, tail))
        room.extend((ticks, 0))
        return len(source) - 2

    of_value = [edge(0, 2 + v, 0) for v in range(values)]
    to_op = [edge(2 + v, 2 + values + int(b.maker[v]) if b.maker[v] >= 0 else 1, 0) for v in range(values)]
    to_sink = [edge(2 + values + op, 1, int(b.ticks[op]) if b.again[op] else NEVER) for op in range(ops)]
    for op in range(ops):
        for v in b.reads.item[b.reads.start[op] : b.reads.start[op + 1]]:
            edge(2 + values + op, 2 + int(v), NEVER)
    nodes = 2 + values + ops
    head = np.full(nodes, -1, dtype=np.int64)
    after = np.full(len(source), -1, dtype=np.int64)
    for e, tail in enumerate(source):
        after[e] = head[tail]
        head[tail] = e
    lists = (np.array(x, dtype=np.int64) for x in (of_value, to_op, to_sink, room, room))
    of_value_, to_op_, to_sink_, room_, left = lists
    level, queue, path, cursor = np.zeros((4, nodes + 1), dtype=np.int64)
    ends = (np.array(source, dtype=np.int64), np.array(target, dtype=np.int64))
    made, read = _words(b.makes), _words(b.reads)
    asked = (of_value_, to_op_, to_sink_)
    return Network(values, nodes, *ends, head, after, *asked, room_, left, level, queue, path, cursor, made, read)


def _words(rows: Rows) -> Ints:
    words = np.zeros((len(rows.start) - 1, 2), dtype=np.int64)
    for i in range(len(words)):
        for v in rows.item[rows.start[i] : rows.start[i + 1]].tolist():
            words[i, v // WORD] |= 1 << (v % WORD)
    return words


def moments_of(b: Reversed, with_forward: bool) -> Moments:
    """Every step, then the boundary, then, where a forward peak is a limit, every forward op."""
    steps, values = len(b.step_bytes), len(b.size_bytes)
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
    needed = np.zeros((steps + 1, steps + 1, values), dtype=np.bool_)
    for first in range(steps):
        for stop in range(first + 1, steps + 1):
            needed[first, stop] = needed[first, stop - 1]
            read = b.step_reads.item[b.step_reads.start[stop - 1] : b.step_reads.start[stop]]
            needed[first, stop, read] = True
    return Moments(np.array(after, dtype=np.int64), np.ascontiguousarray(weight), needed)


@kernel
def _reach(net: Network) -> bool:
    net.level[:] = -1
    net.level[0] = 0
    net.queue[0] = 0
    first, last = 0, 1
    while first < last:
        node = net.queue[first]
        first += 1
        edge = net.head[node]
        while edge >= 0:
            if net.left[edge] > 0 and net.level[net.target[edge]] < 0:
                net.level[net.target[edge]] = net.level[node] + 1
                net.queue[last] = net.target[edge]
                last += 1
            edge = net.after[edge]
    return bool(net.level[1] >= 0)


@kernel
def _flow(net: Network) -> int:
    """Dinic's algorithm; afterwards level >= 0 marks the source's side."""
    flow = 0
    while _reach(net):
        net.cursor[: net.nodes] = net.head
        depth = 0
        node = 0
        while True:
            if node == 1:
                push = net.left[net.path[0]]
                for i in range(1, depth):
                    push = min(push, net.left[net.path[i]])
                flow += push
                if flow >= NEVER:
                    return NEVER
                back = depth
                for i in range(depth - 1, -1, -1):
                    net.left[net.path[i]] -= push
                    net.left[net.path[i] ^ 1] += push
                    if net.left[net.path[i]] == 0:
                        back = i
                depth = back
                node = net.source[net.path[depth]]
                continue
            edge = net.cursor[node]
            while edge >= 0 and not (net.left[edge] > 0 and net.level[net.target[edge]] == net.level[node] + 1):
                edge = net.after[edge]
            net.cursor[node] = edge
            if edge >= 0:
                net.path[depth] = edge
                depth += 1
                node = net.target[edge]
            elif depth > 0:
                net.level[node] = -1
                depth -= 1
                node = net.source[net.path[depth]]
            else:
                break
    return flow


@kernel
def least_at(net: Network, weight: Ints, demand: Flags, price: float, timed: bool) -> tuple[int, int, int]:
    """(cut, bytes that cross, ticks of what runs after) at a price in ticks a byte; without `timed`, time is free and
    a byte costs one. The cut is NEVER where the demand can't be met."""
    net.left[:] = net.room
    for v in range(net.values):
        net.left[net.of_value[v]] = NEVER if demand[v] else 0
        if weight[v] < 0:
            net.left[net.to_op[v]] = NEVER
        elif timed:
            net.left[net.to_op[v]] = int(min(np.floor(price * weight[v]), float(NEVER >> 9)))
        else:
            net.left[net.to_op[v]] = weight[v]
    if not timed:
        for op in range(len(net.to_sink)):
            if net.room[net.to_sink[op]] < NEVER:
                net.left[net.to_sink[op]] = 0
    flow = _flow(net)
    if flow >= NEVER:
        return NEVER, 0, 0
    crossing_bytes = 0
    ticks = 0
    for v in range(net.values):
        if net.level[2 + v] >= 0 and net.level[net.target[net.to_op[v]]] < 0:
            crossing_bytes += weight[v]
    for op in range(len(net.to_sink)):
        if net.level[2 + net.values + op] >= 0:
            ticks += net.room[net.to_sink[op]]
    return flow, crossing_bytes, ticks


@kernel
def line_at(net: Network, weight: Ints, demand: Flags, room_bytes: int, price: float) -> int:
    """The bound of one price."""
    flow, _bytes, _ticks = least_at(net, weight, demand, price, True)
    if flow >= NEVER:
        return NEVER
    return max(0, flow - int(np.ceil(price * room_bytes)))


@kernel
def best_line(net: Network, weight: Ints, demand: Flags, room_bytes: int) -> tuple[int, float]:
    """(bound, price): the best price's bound, NEVER where the demand can't be met within the room."""
    asked = 0
    barred = False
    for v in range(net.values):
        if demand[v]:
            asked += max(weight[v], 0)
            barred = barred or weight[v] < 0
    if room_bytes >= asked and not barred:
        return 0, 0.0
    flow, least_bytes, most_ticks = least_at(net, weight, demand, 1.0, False)
    if flow >= NEVER or least_bytes > room_bytes:
        return NEVER, 0.0
    flow, most_bytes, least_ticks = least_at(net, weight, demand, 0.0, True)
    best = least_ticks
    best_price = 0.0
    if most_bytes <= room_bytes:
        return best, 0.0
    for _ in range(_ROUNDS):
        price = (most_ticks - least_ticks) / (most_bytes - least_bytes)
        flow, crossing_bytes, ticks = least_at(net, weight, demand, price, True)
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
def _crossing_bytes(weight: Ints, low: int, high: int) -> int:
    """Bytes of these values; -1 where one can't cross."""
    total = 0
    for v in range(len(weight)):
        if ((low >> v) & 1 if v < WORD else (high >> (v - WORD)) & 1) != 0:
            if weight[v] < 0:
                return -1
            total += weight[v]
    return total


@kernel
def _beaten(low: Ints, high: Ints, held: Ints, ticks: Ints, count: int, i: int) -> bool:
    """Whether another of the first `count` labels is no worse than label i; of equal ones the first stays."""
    for k in range(count):
        if k != i and held[k] <= held[i] and ticks[k] <= ticks[i] and not low[k] & ~low[i] and not high[k] & ~high[i]:
            if k < i or held[k] < held[i] or ticks[k] < ticks[i] or low[k] != low[i] or high[k] != high[i]:
                return True
    return False


@kernel
def least_after(net: Network, weight: Ints, demand: Flags, room_bytes: int) -> int:
    """Least ticks of what runs after a moment: exact for that moment, NEVER where nothing fits, -1 if it is too much
    work."""
    low, high, held, ticks = np.zeros((4, 2 * _LABELS + 2), dtype=np.int64)
    stays = np.zeros(2 * _LABELS + 2, dtype=np.bool_)
    for v in range(net.values):
        if demand[v]:
            if v < WORD:
                low[0] |= 1 << v
            else:
                high[0] |= 1 << (v - WORD)
    count = 1
    for op in range(len(net.to_sink) - 1, -1, -1):
        fresh = count
        rerun_ticks = net.room[net.to_sink[op]]
        for i in range(count):
            asked_low, asked_high = low[i] & net.made[op, 0], high[i] & net.made[op, 1]
            if asked_low == 0 and asked_high == 0:
                continue
            low[i] &= ~net.made[op, 0]
            high[i] &= ~net.made[op, 1]
            if rerun_ticks < NEVER:
                low[fresh], high[fresh] = low[i] | net.read[op, 0], high[i] | net.read[op, 1]
                held[fresh], ticks[fresh] = held[i], ticks[i] + rerun_ticks
                fresh += 1
            size = _crossing_bytes(weight, asked_low, asked_high)
            held[i] = held[i] + size if size >= 0 else NEVER
        kept = 0
        for i in range(fresh):
            stays[i] = held[i] <= room_bytes and not _beaten(low, high, held, ticks, fresh, i)
        for i in range(fresh):
            if stays[i]:
                low[kept], high[kept], held[kept], ticks[kept] = low[i], high[i], held[i], ticks[i]
                kept += 1
        if kept > _LABELS:
            return -1
        count = kept
    best = NEVER
    for i in range(count):
        size = _crossing_bytes(weight, low[i], high[i])
        if size >= 0 and held[i] + size <= room_bytes:
            best = min(best, ticks[i])
    return best
