"""Best-first branch and bound over a block, from its last backward op back to the boundary.

A node is (steps still to be crossed, forward values demanded just after them). Moves: cross the step before, which adds
what it reads; or take back a repeated run of an op that makes a demanded value, which replaces its outputs by its
operands. The demanded values are what stands in memory there, so each move is checked against the limit alone and
nothing is ever evicted. A node of no steps whose demand fits the boundary is a solution, and its path read backwards
is the order.

The bound of a node is the ticks spent, plus the best price's bound of one moment ahead, plus what has to run again
before that moment whatever comes after it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memplan.solvers.exact_block import WORD, Reversed, Rows
from memplan.solvers.exact_bound import NEVER, Moments, Network, best_line, least_after, line_at
from memplan.solvers.flat import Flags, Floats, Ints
from memplan.solvers.jit import kernel

_PLUNGE_EVERY = 16  # nodes taken in order of their bounds between two dives for a solution
_NODES_EACH = 12  # nodes that may be made for each one that may be expanded
_SHELF = 512  # expanded nodes of a step that dominance looks through
_OPEN, _APPRAISED, _EXPANDED, _DROPPED = 0, 1, 2, 3


class Rules(NamedTuple):
    """Switches. Any subset gives the same least time; they only differ in nodes.

    capacity: bound by moments ahead. whole: solve the most telling moment in whole values. windows: add what has to run
    before a moment. postpone: cross no step just after a run that could have been taken back on the other side of it.
    ordered: of two runs that could be taken back in either order, take back the later op first. dominance: drop nodes
    whose demand includes that of one no dearer. plunge: dive for solutions now and then.
    """

    capacity: bool = True
    whole: bool = True
    windows: bool = True
    postpone: bool = True
    ordered: bool = True
    dominance: bool = True
    plunge: bool = True


class Space(NamedTuple):
    """A block with what its bounds need."""

    block: Reversed
    moments: Moments
    net: Network


class Cell(NamedTuple):
    """Limits: bytes saved, forward peak, backward peak. room_bytes[m]: what moment m leaves. before: `windows`."""

    saved_bytes: int
    forward_bytes: int
    limit_bytes: int
    room_bytes: Ints
    before: Ints


class Found(NamedTuple):
    """ticks: of repeated runs, NEVER where there is no solution; bound_ticks: nothing takes less; path: op, or
    -1 - step, in order; nodes: expanded."""

    ticks: int
    bound_ticks: int
    path: Ints
    nodes: int


class Tree(NamedTuple):
    """Columns of nodes: step, low and high word of the demand, ticks spent, bound, node before, move from there (op or
    -1 - step), moment and price of its bound, state; `table` finds nodes by demand, `shelf` and `next` list expanded
    nodes of a step."""

    step: Ints
    low: Ints
    high: Ints
    spent: Ints
    bound: Ints
    before: Ints
    move: Ints
    moment: Ints
    price: Floats
    state: Ints
    next: Ints
    shelf: Ints
    table: Ints


class Heap(NamedTuple):
    """bound and node of each entry, and how many there are. An entry whose bound is no longer its node's is stale."""

    bound: Ints
    node: Ints
    size: Ints


@kernel
def windows(space: Space, room_bytes: Ints, whole: bool) -> Ints:
    """before[t]: ticks that have to run again before step t has run; the last entry, before the end."""
    b, moments = space.block, space.moments
    steps = len(b.step_bytes)
    before = np.zeros(steps + 1, dtype=np.int64)
    for t in range(steps):
        least = before[t - 1] if t > 0 else 0
        best_moment = -1
        for m in range(len(moments.after)):
            u = moments.after[m]
            if u < t and least < NEVER:
                base = before[u] if u >= 0 else 0
                asked = moments.needed[u + 1, t + 1]
                found, _price = best_line(space.net, moments.weight[m], asked, room_bytes[m])
                if found > 0 and base + found > least:
                    least, best_moment = min(NEVER, base + found), m
        if whole and best_moment >= 0 and least < NEVER:
            u = moments.after[best_moment]
            asked = moments.needed[u + 1, t + 1]
            found = least_after(space.net, moments.weight[best_moment], asked, room_bytes[best_moment])
            least = max(least, min(NEVER, found + (before[u] if u >= 0 else 0)))
        before[t] = least
    before[steps] = before[steps - 1] if steps else 0
    return before


@kernel
def _has(row: Rows, index: int, demand: Flags) -> bool:
    found = False
    for e in range(row.start[index], row.start[index + 1]):
        found = found or demand[row.item[e]]
    return found


@kernel
def _bytes(b: Reversed, demand: Flags) -> int:
    total = 0
    for v in range(len(demand)):
        if demand[v]:
            total += b.size_bytes[v]
    return total


@kernel
def cross(b: Reversed, step: int, demand: Flags, limit_bytes: int, after: Flags) -> bool:
    """Take back step `step`: fills `after` with what is demanded before it. False where it does not fit."""
    if _has(b.step_takes, step, demand):
        return False
    after[:] = demand
    for e in range(b.step_reads.start[step], b.step_reads.start[step + 1]):
        after[b.step_reads.item[e]] = True
    return bool(b.step_bytes[step] + _bytes(b, after) <= limit_bytes)


@kernel
def take_back(b: Reversed, step: int, op: int, demand: Flags, limit_bytes: int, after: Flags) -> bool:
    """Take back a repeated run of `op` with `step` steps before it: fills `after` with what is demanded before it."""
    if not b.again[op]:
        return False
    after[:] = demand
    for e in range(b.makes.start[op], b.makes.start[op + 1]):
        after[b.makes.item[e]] = False
    if _has(b.takes, op, after):
        return False
    for e in range(b.reads.start[op], b.reads.start[op + 1]):
        after[b.reads.item[e]] = True
    return bool(b.between_bytes[step] + _bytes(b, after) + b.run_bytes[op] <= limit_bytes)


@kernel
def rests(b: Reversed, cell: Cell, demand: Flags) -> bool:
    """Whether the demand can be what is saved."""
    held = b.cut_bytes
    for v in range(len(demand)):
        if demand[v]:
            if b.barred[v]:
                return False
            if not b.cut[v]:
                held += b.size_bytes[v]
    if held > cell.saved_bytes:
        return False
    for i in range(len(b.forward_bytes)):
        ahead = b.forward_bytes[i]
        for v in range(len(demand)):
            if demand[v] and b.forward_extra[i, v]:
                ahead += b.size_bytes[v]
        if ahead > cell.forward_bytes:
            return False
    return True


@kernel
def _appraise(space: Space, cell: Cell, rules: Rules, step: int, demand: Flags, enough: int) -> tuple[int, int, float]:
    """(bound, moment, price) of what is still to be spent; stops at the first bound of `enough`."""
    best = cell.before[step - 1] if rules.windows and step > 0 else 0
    best_moment = -1
    best_price = 0.0
    moments = space.moments
    for back in range(len(moments.after)):
        m = len(moments.after) - 1 - back
        u = moments.after[m]
        if u >= step:
            continue
        asked = demand | moments.needed[u + 1, step]
        found, price = best_line(space.net, moments.weight[m], asked, cell.room_bytes[m])
        if found < NEVER and rules.windows and u >= 0:
            found = min(NEVER, found + cell.before[u])
        if found > best:
            best, best_moment, best_price = found, m, price
            if best >= enough:
                break
    if rules.whole and best_moment >= 0 and best < enough:
        u = moments.after[best_moment]
        asked = demand | moments.needed[u + 1, step]
        found = least_after(space.net, moments.weight[best_moment], asked, cell.room_bytes[best_moment])
        best = max(best, found + (cell.before[u] if rules.windows and u >= 0 and found > 0 else 0))
    return best, best_moment, best_price


@kernel
def _glance(space: Space, cell: Cell, rules: Rules, step: int, demand: Flags, moment: int, price: float) -> int:
    """The bound at one moment and price."""
    u = space.moments.after[moment] if moment >= 0 else step
    least = cell.before[step - 1] if rules.windows and step > 0 else 0
    if u >= step or not rules.capacity:
        return least
    asked = demand | space.moments.needed[u + 1, step]
    found = line_at(space.net, space.moments.weight[moment], asked, cell.room_bytes[moment], price)
    if rules.windows and u >= 0:
        found += cell.before[u]
    return max(least, found)


@kernel
def _unpack(low: int, high: int, demand: Flags) -> None:
    for v in range(len(demand)):
        demand[v] = ((low >> v) & 1) != 0 if v < WORD else ((high >> (v - WORD)) & 1) != 0


@kernel
def _pack(demand: Flags) -> tuple[int, int]:
    low = 0
    high = 0
    for v in range(len(demand)):
        if demand[v]:
            if v < WORD:
                low |= 1 << v
            else:
                high |= 1 << (v - WORD)
    return low, high


@kernel
def _slot(step: int, low: int, high: int, mask: int) -> int:
    mixed = low * 0x2545F4914F6CDD1D + high * 0x5851F42D4C957F2D + step * 0x14057B7EF767814F
    mixed ^= (mixed >> 29) & 0x7FFFFFFFF
    mixed *= 0x3C6EF372FE94F82B
    return (mixed >> 20) & mask


@kernel
def _tree(room: int, steps: int) -> Tree:
    slots = 1
    while slots < 2 * room:
        slots *= 2
    ints = np.zeros((11, room), dtype=np.int64)
    return Tree(
        ints[0], ints[1], ints[2], ints[3], ints[4], ints[5], ints[6], ints[7], np.zeros(room, dtype=np.float64),
        ints[8], ints[9], np.zeros(steps + 1, dtype=np.int64), np.zeros(slots, dtype=np.int64),
    )  # fmt: skip


@kernel
def _before(tree: Tree, heap: Heap, i: int, j: int) -> bool:
    if heap.bound[i] != heap.bound[j]:
        return bool(heap.bound[i] < heap.bound[j])
    left, right = heap.node[i], heap.node[j]
    if tree.step[left] != tree.step[right]:
        return bool(tree.step[left] < tree.step[right])
    return bool(left > right)


@kernel
def _swap(heap: Heap, i: int, j: int) -> None:
    heap.bound[i], heap.bound[j] = heap.bound[j], heap.bound[i]
    heap.node[i], heap.node[j] = heap.node[j], heap.node[i]


@kernel
def _push(tree: Tree, heap: Heap, node: int) -> None:
    i = heap.size[0]
    heap.size[0] += 1
    heap.bound[i] = tree.bound[node]
    heap.node[i] = node
    while i > 0 and _before(tree, heap, i, (i - 1) // 2):
        _swap(heap, i, (i - 1) // 2)
        i = (i - 1) // 2


@kernel
def _pop(tree: Tree, heap: Heap) -> int:
    """The open node of the least bound; -1 where there is none."""
    while heap.size[0] > 0:
        heap.size[0] -= 1
        size = heap.size[0]
        _swap(heap, 0, size)
        i = 0
        while True:
            least = i
            for child in (2 * i + 1, 2 * i + 2):
                if child < size and _before(tree, heap, child, least):
                    least = child
            if least == i:
                break
            _swap(heap, i, least)
            i = least
        node = heap.node[size]
        if tree.state[node] <= _APPRAISED and tree.bound[node] == heap.bound[size]:
            return int(node)
    return -1


@kernel
def _dominated(tree: Tree, node: int) -> bool:
    other = tree.shelf[tree.step[node]] - 1
    for _ in range(_SHELF):
        if other < 0:
            return False
        if tree.spent[other] <= tree.spent[node] and other != node:
            if tree.low[other] & ~tree.low[node] == 0 and tree.high[other] & ~tree.high[node] == 0:
                return True
        other = tree.next[other] - 2
    return False


@kernel
def _put_on_shelf(tree: Tree, node: int) -> None:
    if tree.next[node] == 0:
        tree.next[node] = tree.shelf[tree.step[node]] + 1
        tree.shelf[tree.step[node]] = node + 1


@kernel
def _enter(tree: Tree, count: int, step: int, demand: Flags, spent: int, before: int, move: int) -> int:
    """The node of a demand reached at this cost: a new one (number `count`), a known one that is now cheaper, or -1."""
    low, high = _pack(demand)
    mask = len(tree.table) - 1
    slot = _slot(step, low, high, mask)
    node = -1
    while tree.table[slot] > 0:
        known = tree.table[slot] - 1
        if tree.low[known] == low and tree.high[known] == high and tree.step[known] == step:
            node = known
            break
        slot = (slot + 1) & mask
    if node >= 0 and tree.spent[node] <= spent:
        return -1
    if node < 0:
        node = count
        tree.table[slot] = node + 1
        tree.step[node], tree.low[node], tree.high[node] = step, low, high
    tree.spent[node], tree.before[node], tree.move[node] = spent, before, move
    tree.state[node] = _OPEN
    return int(node)


@kernel
def _postponable(b: Reversed, tree: Tree, node: int, limit_bytes: int) -> bool:
    """Whether the run taken back last could be taken back before the next step instead."""
    step, op = tree.step[node], tree.move[node]
    if op < 0 or tree.before[node] < 0:
        return False
    demand = np.zeros(len(b.size_bytes), np.bool_)
    after = np.zeros(len(b.size_bytes), np.bool_)
    _unpack(tree.low[tree.before[node]], tree.high[tree.before[node]], demand)
    if not cross(b, step - 1, demand, limit_bytes, after):
        return False
    return take_back(b, step - 1, op, after, limit_bytes, demand)


@kernel
def _out_of_order(b: Reversed, tree: Tree, node: int, op: int, limit_bytes: int) -> bool:
    """Whether a run of `op` could have been taken back before the one that was taken back last, of an earlier op.

    What is then demanded is no more, for an op reads what earlier ops make.
    """
    last = tree.move[node]
    if last < 0 or op <= last:
        return False
    demand = np.zeros(len(b.size_bytes), np.bool_)
    after = np.zeros(len(b.size_bytes), np.bool_)
    _unpack(tree.low[tree.before[node]], tree.high[tree.before[node]], demand)
    if not take_back(b, tree.step[node], op, demand, limit_bytes, after):
        return False
    return take_back(b, tree.step[node], last, after, limit_bytes, demand)


@kernel
def _wanted(space: Space, cell: Cell, rules: Rules, tree: Tree, heap: Heap, node: int, upper: int,
            demand: Flags) -> bool:  # fmt: skip
    """Whether a node is worth expanding. One that is costlier than it seemed goes back to the heap."""
    if tree.bound[node] >= upper:
        return False
    if tree.state[node] != _OPEN:
        return True
    tree.state[node] = _APPRAISED
    if rules.dominance and _dominated(tree, node):
        tree.state[node] = _DROPPED
        return False
    if not rules.capacity:
        return True
    spent = tree.spent[node]
    ahead, tree.moment[node], tree.price[node] = _appraise(space, cell, rules, tree.step[node], demand, upper - spent)
    if spent + ahead <= tree.bound[node]:
        return True
    tree.bound[node] = spent + ahead
    if tree.bound[node] < upper:
        _push(tree, heap, node)
    return False


@kernel
def _expand(space: Space, cell: Cell, rules: Rules, tree: Tree, heap: Heap, node: int, demand: Flags,
            tally: Ints) -> int:  # fmt: skip
    """Makes the nodes one move further. Returns the most promising. tally: nodes made, best solution, its ticks."""
    b = space.block
    step = tree.step[node]
    after = np.zeros(len(demand), np.bool_)
    best = -1
    for op in range(-1, len(b.ticks)):
        if op < 0:
            if step == 0 or (rules.postpone and _postponable(b, tree, node, cell.limit_bytes)):
                continue
            fits = cross(b, step - 1, demand, cell.limit_bytes, after)
        else:
            fits = _has(b.makes, op, demand) and take_back(b, step, op, demand, cell.limit_bytes, after)
        if not fits or (rules.ordered and op >= 0 and _out_of_order(b, tree, node, op, cell.limit_bytes)):
            continue
        spent = tree.spent[node] + (b.ticks[op] if op >= 0 else 0)
        to = step - 1 if op < 0 else step
        ahead = _glance(space, cell, rules, to, after, tree.moment[node], tree.price[node])
        bound = max(tree.bound[node], spent + ahead)
        if bound >= tally[2]:
            continue
        child = _enter(tree, tally[0], to, after, spent, node, -step if op < 0 else op)
        if child < 0:
            continue
        tally[0] = max(tally[0], child + 1)
        tree.bound[child], tree.moment[child], tree.price[child] = bound, tree.moment[node], tree.price[node]
        if to == 0 and rests(b, cell, after):
            tally[1], tally[2] = child, spent
            tree.state[child] = _EXPANDED
            continue
        _push(tree, heap, child)
        if best < 0 or (bound, to) < (tree.bound[best], tree.step[best]):
            best = child
    return best


@kernel
def _path(tree: Tree, node: int) -> Ints:
    length = 0
    at = node
    while at > 0:
        length += 1
        at = tree.before[at]
    path = np.empty(length, dtype=np.int64)
    for i in range(length):
        path[i] = tree.move[node]
        node = tree.before[node]
    return path


@kernel
def search(space: Space, cell: Cell, rules: Rules, upper_ticks: int, most_nodes: int) -> Found:
    """Least ticks of repeated runs, if that is below `upper_ticks`. most_nodes: to expand."""
    b = space.block
    ops, steps = len(b.ticks), len(b.step_bytes)
    room = 1024 + _NODES_EACH * most_nodes
    tree = _tree(room, steps)
    heap = Heap(np.empty(3 * room, np.int64), np.empty(3 * room, np.int64), np.zeros(1, np.int64))
    demand = np.zeros(len(b.size_bytes), np.bool_)
    tally = np.array([1, -1, upper_ticks])
    _enter(tree, 0, steps, demand, 0, -1, -1)
    tree.moment[0] = -1
    tree.bound[0] = cell.before[steps] if rules.windows else 0
    if steps == 0 and rests(b, cell, demand):
        return Found(0, 0, _path(tree, 0), 0)
    _push(tree, heap, 0)
    nodes, dive, since, open_bound = 0, -1, 0, NEVER
    while True:
        plunging = dive >= 0
        node = dive if plunging else _pop(tree, heap)
        dive = -1
        if node < 0 or (not plunging and tree.bound[node] >= tally[2]):
            break
        _unpack(tree.low[node], tree.high[node], demand)
        if not _wanted(space, cell, rules, tree, heap, node, tally[2], demand):
            continue
        if nodes >= most_nodes or tally[0] + ops + 1 >= room or heap.size[0] + ops + 2 >= 3 * room:
            open_bound = tree.bound[node]
            if plunging:
                top = _pop(tree, heap)
                open_bound = min(open_bound, tree.bound[top]) if top >= 0 else open_bound
            break
        nodes += 1
        tree.state[node] = _EXPANDED
        _put_on_shelf(tree, node)
        child = _expand(space, cell, rules, tree, heap, node, demand, tally)
        since = 0 if plunging else since + 1
        if rules.plunge and (plunging or since % _PLUNGE_EVERY == 1):
            dive = child
    path = _path(tree, tally[1]) if tally[1] >= 0 else np.empty(0, np.int64)
    return Found(tally[2] if tally[1] >= 0 else NEVER, min(tally[2], open_bound), path, nodes)
