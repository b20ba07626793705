"""Maximum flows, and so minimum cuts, by Dinic's algorithm.

Kernels take few arrays of many columns: numba's time of compilation grows with the number of arrays that are passed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memplan.jit import kernel

_Ints = NDArray[np.int64]

# Columns of a network's edges: ends, the next edge of the same source, room, and what a flow leaves of that.
SOURCE, TARGET, AFTER, ROOM, LEFT = 0, 1, 2, 3, 4
# Rows of what a flow scribbles on; the first says where the edges of each node begin.
HEAD, LEVEL, QUEUE, PATH, CURSOR = 0, 1, 2, 3, 4


def network_of(nodes: int, rows: _Ints) -> tuple[_Ints, _Ints]:
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
def max_flow(edge: _Ints, work: _Ints, enough: int) -> int:
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
