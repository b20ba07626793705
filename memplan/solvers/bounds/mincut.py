"""Which values to save at a given price of memory: a minimum cut, exact for a whole forward pass.

For a price of `lambda` seconds per byte, choose the ops to run again and the values to save so that every value that is
demanded is saved or its op runs again. A demanded value that is not made again pays `lambda` times its bytes. That is a
term D_v (1 - r_p), so the whole is a minimum cut (Picard and Ratliff, 1975), however many values an op reads or makes.
Ops that may wait for the backward pass cost nothing: there they can run for the first time. Cuts find the corners of
the convex hull; filling reaches the points between them. Flows are maximised by Dinic's algorithm; its kernel takes few
arrays of many columns, for numba's time of compilation grows with the number of arrays that are passed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.jit import kernel
from memplan.solvers.orders.flat import Flat, Ints

_TICK_S = 1e-12
_NEVER = 1 << 58
# Columns of a network's edges: ends, the next edge of the same source, room, and what a flow leaves of that.
SOURCE, TARGET, AFTER, ROOM, LEFT = 0, 1, 2, 3, 4
# Rows of what a flow scribbles on; the first says where the edges of each node begin.
HEAD, LEVEL, QUEUE, PATH, CURSOR = 0, 1, 2, 3, 4


@dataclass(frozen=True, slots=True)
class SavedSet:
    """Values kept from the forward pass, and what that costs.

    - saved_bytes: of those values.
    - recompute_s: seconds of recomputing the rest once.
    - line_s_per_byte, line_s: no set saves at most b bytes for less than line_s - line_s_per_byte * b seconds.
    """

    saved: frozenset[int]
    saved_bytes: int
    recompute_s: float
    line_s_per_byte: float
    line_s: float


@dataclass(frozen=True, slots=True)
class _Network:
    """Edges of the cut; the room of an edge is ticks + price * bytes.

    - edge, work: as of `network_of`.
    - fixed, priced: ticks and bytes of each edge, reverses left out.
    - values: by edge likewise, -1 where it stands for none.
    """

    edge: Ints
    work: Ints
    fixed: Ints
    priced: Ints
    values: Ints


def _network(flat: Flat, needed: frozenset[int], twice: bool) -> _Network:
    a = flat.arrays
    node_of_op: dict[int, int] = {}
    node_of_value: dict[int, int] = {}
    edges: list[tuple[int, ...]] = []
    stack: list[int] = []

    def edge(tail: int, head: int, ticks: int, size_bytes: int = 0, value: int = -1) -> None:
        edges.append((tail, head, ticks, size_bytes, value))

    def demand(v: int) -> int:
        if v not in node_of_value:
            node_of_value[v] = 2 + len(node_of_value) + len(node_of_op)
            stack.append(v)
        return node_of_value[v]

    for v in sorted(needed):
        edge(0, demand(v), _NEVER)
    while stack:
        v = stack.pop()
        op = int(a.producer[v])
        price = 0 if a.overwritten[v] and not twice else int(a.size_bytes[v])
        ticks = _NEVER if a.overwritten[v] else 0
        if twice and a.overwritten[v]:
            ticks = 0 if a.deferrable[op] else int(a.time_s[op] / _TICK_S)
        if not a.rerunnable[op]:
            edge(node_of_value[v], 1, ticks, price, v)
            continue
        fresh = op not in node_of_op
        if fresh:
            node_of_op[op] = 2 + len(node_of_value) + len(node_of_op)
            edge(node_of_op[op], 1, 0 if a.deferrable[op] else int(a.time_s[op] / _TICK_S))
        edge(node_of_value[v], node_of_op[op], ticks, price, v)
        if fresh:
            for u in flat.reads[op]:
                if not a.held[u]:
                    edge(node_of_op[op], demand(u), _NEVER)
    rows = np.array(edges, dtype=np.int64).reshape(-1, 5)
    return _Network(*network_of(2 + len(node_of_value) + len(node_of_op), rows), *rows.T[2:])


def saved_sets(flat: Flat, needed: frozenset[int], limit: int, twice: bool = False) -> tuple[SavedSet, ...]:
    """Corners of the convex hull of (saved bytes, recompute seconds), from all saved to nothing saved.

    - needed: forward values that the backward pass reads, held ones left out.
    - limit: minimum cuts to spend.
    - twice: a value that the forward pass overwrites can be saved as well, at the price of running its op once more.
      Schedules may do so, so bounds have to allow for it.
    """
    network = _network(flat, needed, twice)
    total_s = float(flat.arrays.time_s[: flat.arrays.boundary].sum())
    if not needed or network.priced.sum() == 0:
        return (_cut(flat, network, 0.0),)
    steepest = max(total_s, 1e-9) * 2.0  # seconds per byte at which one byte outweighs every recomputation
    found = [_cut(flat, network, 0.0), _cut(flat, network, steepest)]
    gaps = [(found[0], found[1])]
    spent = 2
    while gaps and spent < limit:
        gaps.sort(key=lambda pair: (pair[0].saved_bytes - pair[1].saved_bytes) * (_rise(pair)), reverse=True)
        left, right = gaps.pop(0)
        width = left.saved_bytes - right.saved_bytes
        if width <= 0 or _rise((left, right)) <= 0:
            continue
        middle = _cut(flat, network, _rise((left, right)) / width)
        spent += 1
        on_line = left.recompute_s + middle.line_s_per_byte * left.saved_bytes
        if middle.line_s < on_line * (1 - 1e-6) and right.saved_bytes < middle.saved_bytes < left.saved_bytes:
            gaps += [(left, middle), (middle, right)]
        found.append(middle)
    return tuple(sorted(found, key=lambda s: (-s.saved_bytes, s.recompute_s, s.line_s_per_byte)))


def _rise(pair: tuple[SavedSet, SavedSet]) -> float:
    return pair[1].recompute_s - pair[0].recompute_s


def _cut(flat: Flat, network: _Network, price_s_per_byte: float) -> SavedSet:
    a = flat.arrays
    price = np.floor(network.priced * (price_s_per_byte / _TICK_S))
    room = network.fixed + np.minimum(price, float(_NEVER >> 4)).astype(np.int64)
    network.edge[::2, LEFT], network.edge[1::2, LEFT] = room, 0
    flow = max_flow(network.edge, network.work, np.iinfo(np.int64).max)
    tail, head, inside = network.edge[::2, SOURCE], network.edge[::2, TARGET], network.work[LEVEL] >= 0
    saved = network.values[(network.values >= 0) & inside[tail] & ~inside[head]]
    ran = (head == 1) & (network.values < 0) & inside[tail]
    recompute_s = float(network.fixed[ran].sum()) * _TICK_S
    saved_bytes = int(a.size_bytes[saved].sum())
    return SavedSet(frozenset(saved.tolist()), saved_bytes, recompute_s, price_s_per_byte, flow * _TICK_S)


def network_of(nodes: int, rows: Ints) -> tuple[Ints, Ints]:
    """(edges, work) of a network from node 0 to node 1.

    rows: ends and room of each edge. Row k is edge 2k; edge 2k + 1 is its reverse, without room.
    """
    pairs = rows[:, :2]
    source = pairs.ravel()
    edge = np.zeros((len(source), 5), dtype=np.int64)
    edge[:, SOURCE], edge[:, TARGET], edge[:, AFTER] = source, pairs[:, ::-1].ravel(), -1
    edge[::2, ROOM] = rows[:, 2]
    order = np.argsort(source, kind="stable")
    same = source[order[1:]] == source[order[:-1]]
    edge[order[1:][same], AFTER] = order[:-1][same]
    work = np.zeros((5, nodes + 1), dtype=np.int64)
    work[HEAD] = -1
    work[HEAD, source] = np.arange(len(source))  # the last one stands
    return edge, work


@kernel
def max_flow(edge: Ints, work: Ints, enough: int) -> int:
    """The flow through what edges have left, which it takes; stops where it is `enough`, the most that matters.

    Else `work[LEVEL]` is 0 or more on the source's side of the minimum cut, and -1 on the other.
    """
    level, queue, path, cursor = work[LEVEL], work[QUEUE], work[PATH], work[CURSOR]
    flow = 0
    while True:
        level[:] = -1
        level[0] = 0
        queue[0] = 0
        first, last = 0, 1
        while first < last:
            node = queue[first]
            first += 1
            e = work[HEAD, node]
            while e >= 0:
                target = edge[e, TARGET]
                if edge[e, LEFT] > 0 and level[target] < 0:
                    level[target] = level[node] + 1
                    queue[last] = target
                    last += 1
                e = edge[e, AFTER]
        if level[1] < 0:
            return int(flow)
        cursor[:] = work[HEAD]
        depth = 0
        node = 0
        while True:
            if node == 1:
                push = edge[path[0], LEFT]
                for i in range(1, depth):
                    push = min(push, edge[path[i], LEFT])
                flow += push
                if flow >= enough:
                    return int(flow)
                back = depth
                for i in range(depth - 1, -1, -1):
                    edge[path[i], LEFT] -= push
                    edge[path[i] ^ 1, LEFT] += push
                    if edge[path[i], LEFT] == 0:
                        back = i
                depth = back
                node = edge[path[depth], SOURCE]
                continue
            e = cursor[node]
            while e >= 0 and not (edge[e, LEFT] > 0 and level[edge[e, TARGET]] == level[node] + 1):
                e = edge[e, AFTER]
            cursor[node] = e
            if e >= 0:
                path[depth] = e
                depth += 1
                node = edge[e, TARGET]
            elif depth > 0:
                level[node] = -1
                depth -= 1
                node = edge[path[depth], SOURCE]
            else:
                break
