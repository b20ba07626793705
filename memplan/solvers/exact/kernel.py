"""Best-first branch and bound over a block, from its last backward op back to the boundary.

A node is (steps still to be crossed, forward values demanded just after them). There are two moves. One crosses the
step before, which adds what it reads. The other takes back a repeated run of an op that makes a demanded value, which
replaces its outputs by its operands. The demanded values are what stands in memory there, so each move is checked
against the limit alone and nothing is ever evicted. A node of no steps whose demand fits the boundary is a solution,
and its path read backwards is the order.

The bound of a node is the larger of two. One is the ticks spent, plus the best price's bound of one moment ahead, plus
what has to run again before that moment in every schedule. The other is the ticks spent plus what the table says
of its demand, which takes a hundredth of the time. Moments say more near the root, the table of nodes deep down: a
hundred nodes have both.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from memplan.jit import kernel
from memplan.solvers.exact.moment_bound import asked_bytes, best_line, cut_at, least_after, price_bound
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
    Cell,
    Space,
    rests,
    sum_of,
)
from memplan.solvers.orders.flat import Ints

_PLUNGE_EVERY = 16  # nodes taken in order of their bounds between two dives for a solution
_NODES_EACH = 12  # nodes that may be made for each one that may be expanded
_SHELF = 512  # expanded nodes of a step that dominance looks through
# This one, and _LABELS, are passed on as int(...): numba compiles a kernel anew for each literal argument.
_ROOT = 0  # the first node of the tree
_LABELS = 96  # of the sweep that settles a node's most telling moment in whole values
_OPEN, _APPRAISED, _EXPANDED, _DROPPED = 0, 1, 2, 3

Queue = list[tuple[int, int, int]]  # (bound, step, -node): of equal bounds the least step first, then the latest node

# Columns of a tree: step, words of the demand, ticks spent, bound, node before, move from there (op or -1 - step),
# moment of its bound, state, next on the shelf.
_STEP, _LOW, _HIGH, _SPENT, _BOUND, _BEFORE, _MOVE, _MOMENT, _STATE, _NEXT = range(10)
_COLUMNS = 10


class SearchResult(NamedTuple):
    """What a search found.

    - ticks: of repeated runs, NEVER where there is no solution.
    - bound_ticks: nothing takes less.
    - path: op, or -1 - step, in order.
    - nodes: expanded.
    """

    ticks: int
    bound_ticks: int
    path: Ints
    nodes: int


@kernel
def _cross(parcels: Ints, steps: Ints, step: int, low: int, high: int, limit_bytes: int) -> tuple[bool, int, int]:
    """Take back step `step`: whether that fits, and what is demanded before it."""
    if (low & steps[step, STEP_TAKEN]) | (high & steps[step, STEP_TAKEN + 1]) != 0:
        return False, 0, 0
    low |= steps[step, STEP_READ]
    high |= steps[step, STEP_READ + 1]
    return steps[step, STEP_BYTES] + sum_of(parcels, low, high) <= limit_bytes, low, high


@kernel
def _take_back(space: Space, op: int, between_bytes: int, low: int, high: int,
               limit_bytes: int) -> tuple[bool, int, int]:  # fmt: skip
    """Take back a repeated run of `op`: whether that fits, and what is demanded before it.

    between_bytes: what other things take there.
    """
    ops, stages = space.ops, space.stages
    if ops[op, TICKS] >= NEVER:
        return False, 0, 0
    low &= ~ops[op, MADE]
    high &= ~ops[op, MADE + 1]
    if (low & ops[op, TAKEN]) | (high & ops[op, TAKEN + 1]) != 0:
        return False, 0, 0
    for stage in range(ops[op, STAGE], ops[op, STAGES]):
        held = sum_of(space.parcels, low | stages[stage, 0], high | stages[stage, 1])
        if between_bytes + held + stages[stage, 2] > limit_bytes:
            return False, 0, 0
    return True, low | ops[op, READ], high | ops[op, READ + 1]


@kernel
def _appraise(space: Space, cell: Cell, step: int, low: int, high: int, enough: int) -> tuple[int, int]:
    """(bound, moment) of what is still to be spent; stops at the first bound of `enough`."""
    best = cell.before[step - 1] if step > 0 else 0
    best_moment = -1
    edge, work = space.edge, space.work
    for back in range(len(space.after)):
        m = len(space.after) - 1 - back
        u = space.after[m]
        if u >= step:
            continue
        asked_low, asked_high = low | space.needed[u + 1, step, 0], high | space.needed[u + 1, step, 1]
        weight, room = space.weight[m], cell.room_bytes[m]
        if asked_bytes(weight, asked_low, asked_high) <= room:
            continue
        base = cell.before[u] if u >= 0 else 0
        flow, _bytes, _ticks = cut_at(edge, work, weight, asked_low, asked_high, cell.price[m])
        found = price_bound(flow, room, cell.price[m])
        if base + found > best * 0.95:
            found, price = best_line(edge, work, weight, asked_low, asked_high, room)
            if found > 0:
                cell.price[m] = price
        if base + found > best:
            best, best_moment = min(NEVER, base + found), m
            if best >= enough:
                break
    if best_moment >= 0 and best < enough:
        u = space.after[best_moment]
        asked_low, asked_high = low | space.needed[u + 1, step, 0], high | space.needed[u + 1, step, 1]
        base = cell.before[u] if u >= 0 else 0
        weight, room = space.weight[best_moment], cell.room_bytes[best_moment]
        found = least_after(space.ops, weight, asked_low, asked_high, room, enough - base, int(_LABELS))
        best = max(best, min(NEVER, found + base))
    return best, best_moment


@kernel
def _glance(space: Space, cell: Cell, bounded: bool, step: int, low: int, high: int, moment: int) -> int:
    """The bound at one moment and its price. bounded: by moments ahead."""
    u = space.after[moment] if moment >= 0 else step
    least = cell.before[step - 1] if step > 0 else 0
    if u >= step or not bounded:
        return least
    low |= space.needed[u + 1, step, 0]
    high |= space.needed[u + 1, step, 1]
    room = cell.room_bytes[moment]
    if asked_bytes(space.weight[moment], low, high) <= room:
        return least
    flow, _bytes, _ticks = cut_at(space.edge, space.work, space.weight[moment], low, high, cell.price[moment])
    found = price_bound(flow, room, cell.price[moment])
    if u >= 0:
        found += cell.before[u]
    return max(least, min(NEVER, found))


@kernel
def _push(tree: Ints, heap: Queue, node: int) -> None:
    heappush(heap, (tree[node, _BOUND], tree[node, _STEP], -node))


@kernel
def _pop(tree: Ints, heap: Queue) -> int:
    """The open node of the least bound; -1 where there is none. An entry of another bound than its node's is stale."""
    while len(heap) > 0:
        bound, _step, last = heappop(heap)
        if tree[-last, _STATE] <= _APPRAISED and tree[-last, _BOUND] == bound:
            return -last
    return -1


@kernel
def _dominated(tree: Ints, shelf: Ints, node: int) -> bool:
    other = shelf[tree[node, _STEP]] - 1
    low, high, spent = tree[node, _LOW], tree[node, _HIGH], tree[node, _SPENT]
    for _ in range(_SHELF):
        if other < 0:
            return False
        if tree[other, _SPENT] <= spent and other != node:
            if tree[other, _LOW] & ~low == 0 and tree[other, _HIGH] & ~high == 0:
                return True
        other = tree[other, _NEXT] - 2
    return False


@kernel
def _enter(tree: Ints, table: Ints, count: int, step: int, low: int, high: int, spent: int) -> int:
    """The node of a demand reached at this cost: a new one (number `count`), a known one that is now cheaper, or -1."""
    mask = len(table) - 1
    mixed = low * 0x2545F4914F6CDD1D + high * 0x5851F42D4C957F2D + step * 0x14057B7EF767814F
    mixed ^= (mixed >> 29) & 0x7FFFFFFFF
    slot = (mixed * 0x3C6EF372FE94F82B >> 20) & mask
    node = -1
    while table[slot] > 0:
        known = table[slot] - 1
        if tree[known, _LOW] == low and tree[known, _HIGH] == high and tree[known, _STEP] == step:
            node = known
            break
        slot = (slot + 1) & mask
    if node >= 0 and tree[node, _SPENT] <= spent:
        return -1
    if node < 0:
        node = count
        table[slot] = node + 1
        tree[node, _STEP], tree[node, _LOW], tree[node, _HIGH], tree[node, _NEXT] = step, low, high, 0
    tree[node, _SPENT] = spent
    tree[node, _STATE] = _OPEN
    return int(node)


@kernel
def _postponable(space: Space, tree: Ints, node: int, limit_bytes: int) -> bool:
    """Whether the run taken back last could be taken back before the next step instead."""
    step, op, before = tree[node, _STEP], tree[node, _MOVE], tree[node, _BEFORE]
    if op < 0 or before < 0:
        return False
    low, high = tree[before, _LOW], tree[before, _HIGH]
    fits, low, high = _cross(space.parcels, space.steps, step - 1, low, high, limit_bytes)
    if not fits:
        return False
    between = space.steps[step - 1, BETWEEN_BYTES]
    fits, low, high = _take_back(space, op, between, low, high, limit_bytes)
    return bool(fits)


@kernel
def _out_of_order(space: Space, tree: Ints, node: int, op: int, limit_bytes: int) -> bool:
    """Whether a run of `op` could have been taken back before the one that was taken back last, of an earlier op.

    What is then demanded is no more, for an op reads what earlier ops make.
    """
    last = tree[node, _MOVE]
    if last < 0 or op <= last:
        return False
    before = tree[node, _BEFORE]
    between = space.steps[tree[node, _STEP], BETWEEN_BYTES]
    low, high = tree[before, _LOW], tree[before, _HIGH]
    fits, low, high = _take_back(space, op, between, low, high, limit_bytes)
    if not fits:
        return False
    fits, low, high = _take_back(space, last, between, low, high, limit_bytes)
    return bool(fits)


@kernel
def _expand(
    space: Space, cell: Cell, bounded: bool, tree: Ints, heap: Queue, table: Ints, node: int, tally: Ints
) -> int:
    """Make the nodes one move further; returns the most promising. tally: nodes made, best solution, its ticks."""
    ops, limit_bytes = space.ops, cell.limits[2]
    step, low, high = tree[node, _STEP], tree[node, _LOW], tree[node, _HIGH]
    between = space.steps[step, BETWEEN_BYTES]
    best = -1
    for op in range(-1, len(ops)):
        if op < 0:
            if step == 0 or _postponable(space, tree, node, limit_bytes):
                continue
            fits, to_low, to_high = _cross(space.parcels, space.steps, step - 1, low, high, limit_bytes)
        else:
            if (ops[op, MADE] & low) | (ops[op, MADE + 1] & high) == 0:
                continue
            fits, to_low, to_high = _take_back(space, op, between, low, high, limit_bytes)
        if not fits or (op >= 0 and _out_of_order(space, tree, node, op, limit_bytes)):
            continue
        spent = tree[node, _SPENT] + (ops[op, TICKS] if op >= 0 else 0)
        to = step - 1 if op < 0 else step
        if max(tree[node, _BOUND], spent) >= tally[2]:
            continue
        ahead = 0  # a step that is crossed leaves what each moment is asked for as it was
        if op >= 0:
            ahead = _glance(space, cell, bounded, to, to_low, to_high, tree[node, _MOMENT])
        if len(cell.table) > 0:
            ahead = max(ahead, cell.table[to, sum_of(cell.places, to_low, to_high)])
        bound = max(tree[node, _BOUND], spent + ahead)
        if bound >= tally[2]:
            continue
        child = _enter(tree, table, tally[0], to, to_low, to_high, spent)
        if child < 0:
            continue
        tally[0] = max(tally[0], child + 1)
        tree[child, _BEFORE], tree[child, _MOVE] = node, -step if op < 0 else op
        tree[child, _BOUND], tree[child, _MOMENT] = bound, tree[node, _MOMENT]
        if to == 0 and rests(space, cell.limits, to_low, to_high):
            tally[1], tally[2] = child, spent
            tree[child, _STATE] = _EXPANDED
            continue
        _push(tree, heap, child)
        if best < 0 or bound < tree[best, _BOUND] or (bound == tree[best, _BOUND] and to < tree[best, _STEP]):
            best = child
    return best


@kernel
def search(
    space: Space, cell: Cell, upper_ticks: int, most_nodes: int, most_bounded: int
) -> tuple[int, int, Ints, int]:
    """Least ticks of repeated runs, if that is below `upper_ticks`, as the fields of `SearchResult`.

    - most_nodes: to expand at most.
    - most_bounded: so many of them are bounded by moments.
    """
    ops, steps = len(space.ops), len(space.steps) - 1
    room = 1024 + _NODES_EACH * most_nodes
    slots = 1
    while slots < 2 * room:
        slots *= 2
    tree = np.empty((room, _COLUMNS), dtype=np.int64)
    heap = [(0, 0, 0)]
    heap.pop()
    table = np.zeros(slots, dtype=np.int64)
    shelf = np.zeros(steps + 1, dtype=np.int64)
    tally = np.array([1, -1, upper_ticks])
    zero = int(_ROOT)
    _enter(tree, table, zero, steps, zero, zero, zero)
    tree[0, _BEFORE], tree[0, _MOVE], tree[0, _MOMENT] = -1, -1, -1
    tree[0, _BOUND] = cell.before[steps]
    if len(cell.table) > 0:
        tree[0, _BOUND] = max(tree[0, _BOUND], cell.table[steps, 0])
    _push(tree, heap, zero)
    nodes, dive, since, open_bound = 0, -1, 0, NEVER
    while True:
        plunging = dive >= 0
        node = dive if plunging else _pop(tree, heap)
        dive = -1
        if node < 0 or (not plunging and tree[node, _BOUND] >= tally[2]):
            break
        if tree[node, _BOUND] >= tally[2]:
            continue
        if tree[node, _STATE] == _OPEN:
            tree[node, _STATE] = _APPRAISED
            if _dominated(tree, shelf, node):
                tree[node, _STATE] = _DROPPED
                continue
            if nodes < most_bounded and (tree[node, _MOVE] >= 0 or node == 0):
                enough = tally[2] - tree[node, _SPENT]
                step, low, high = tree[node, _STEP], tree[node, _LOW], tree[node, _HIGH]
                ahead, tree[node, _MOMENT] = _appraise(space, cell, step, low, high, enough)
                if tree[node, _SPENT] + ahead > tree[node, _BOUND]:  # costlier than it seemed: back to the heap
                    tree[node, _BOUND] = tree[node, _SPENT] + ahead
                    if tree[node, _BOUND] < tally[2]:
                        _push(tree, heap, node)
                    continue
        if nodes >= most_nodes or tally[0] + ops + 1 >= room or len(heap) + ops + 3 >= 3 * room:
            open_bound = tree[node, _BOUND]
            if plunging:
                top = _pop(tree, heap)
                open_bound = min(open_bound, tree[top, _BOUND]) if top >= 0 else open_bound
            break
        nodes += 1
        tree[node, _STATE] = _EXPANDED
        if tree[node, _NEXT] == 0:
            tree[node, _NEXT] = shelf[tree[node, _STEP]] + 1
            shelf[tree[node, _STEP]] = node + 1
        child = _expand(space, cell, nodes < most_bounded, tree, heap, table, node, tally)
        since = 0 if plunging else since + 1
        if plunging or since % _PLUNGE_EVERY == 1:
            dive = child
    length = 0
    node = tally[1]
    while node > 0:
        length += 1
        node = tree[node, _BEFORE]
    path = np.empty(length, dtype=np.int64)
    node = tally[1]
    for i in range(length):
        path[i] = tree[node, _MOVE]
        node = tree[node, _BEFORE]
    return tally[2] if tally[1] >= 0 else NEVER, min(tally[2], open_bound), path, nodes
