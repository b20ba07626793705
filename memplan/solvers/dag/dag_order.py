"""Orders of nodes of a plain DAG: what they peak at and take, and kernels that make and change them.

An order lists runs of nodes, first ones and repeated ones. A run's output is retained from the run to its last read
before the node runs again, so an order with at most C runs of each node is a choice of at most C retention intervals
for each (Bartan et al., "Moccasin", arXiv 2304.14463, who hand the same space to a constraint solver). Any order in
which every node follows the first runs of its inputs is legal, which makes moves cheap: insert a run, remove a repeated
run, move a run. Node indices are a topological order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memplan.solvers.numeric.jit import kernel
from memplan.solvers.orders.flat import Flags, Flat, Floats, Ints


class DagArrays(NamedTuple):
    """A DAG in compressed rows: node i reads `read[read_start[i]:read_start[i + 1]]`.

    - size_bytes: of each node's output.
    - time_s: of one run of each node.
    - held[i]: the output stays once made, so i runs once.
    """

    read_start: Ints
    read: Ints
    size_bytes: Ints
    time_s: Floats
    held: Flags


def dag_arrays(flat: Flat) -> DagArrays:
    """What the kernels below read of a flattened DAG, whose op i makes value i and nothing else."""
    a = flat.arrays
    return DagArrays(a.read_start, a.read, a.size_bytes, a.time_s, a.held)


@kernel
def measure_order(a: DagArrays, order: Ints, end: Ints, during: Ints) -> tuple[int, float]:
    """(peak bytes, seconds) of an order; (-1, 0.0) where it reads what was never made, or runs a held node twice.

    Fills end[p], the last position to which the output of run p is retained, and during[p], the bytes held there.
    """
    n = len(order)
    latest = np.full(len(a.size_bytes), -1, dtype=np.int64)
    change = np.zeros(n + 1, dtype=np.int64)
    time_s = 0.0
    for p in range(n):
        node = order[p]
        for e in range(a.read_start[node], a.read_start[node + 1]):
            source = latest[a.read[e]]
            if source < 0:
                return -1, 0.0
            end[source] = p
        if a.held[node] and latest[node] >= 0:
            return -1, 0.0
        latest[node] = p
        end[p] = p
        time_s += a.time_s[node]
    for p in range(n):
        node = order[p]
        if a.held[node]:
            end[p] = n - 1
        change[p] += a.size_bytes[node]
        change[end[p] + 1] -= a.size_bytes[node]
    live = 0
    peak = 0
    for p in range(n):
        live += change[p]
        during[p] = live
        peak = max(peak, live)
    return peak, time_s


@kernel
def needed_runs(a: DagArrays, order: Ints) -> Ints:
    """The order without runs that nobody reads; every node that ran still runs once."""
    n = len(order)
    nodes = len(a.size_bytes)
    first = np.full(nodes, -1, dtype=np.int64)
    for p in range(n - 1, -1, -1):
        first[order[p]] = p
    keep = np.zeros(n, dtype=np.bool_)
    later = np.zeros(nodes, dtype=np.bool_)
    runs = np.zeros(nodes, dtype=np.bool_)
    for p in range(n - 1, -1, -1):
        node = order[p]
        if (a.held[node] and p != first[node]) or not (later[node] or (p == first[node] and not runs[node])):
            continue
        keep[p] = True
        runs[node] = True
        later[node] = False
        for e in range(a.read_start[node], a.read_start[node + 1]):
            later[a.read[e]] = True
    return order[keep]


@kernel
def excess(during: Ints, limit_bytes: int) -> float:
    """Bytes above a limit, added up over positions."""
    total = 0.0
    for held_bytes in during:
        if held_bytes > limit_bytes:
            total += float(held_bytes - limit_bytes)
    return total


@kernel
def recompute(
    a: DagArrays, order: Ints, end: Ints, during: Ints, node: int, before: int, limit_bytes: int, intervals: int,
    extend: bool,
) -> Ints:  # fmt: skip
    """The order with `node` run again just before a position, so that its output need not be retained up to there.

    An input that is gone by then is run again as well, or retained for longer. It is retained where the input has all
    its intervals, or where `extend` is set and it fits.
    """
    nodes = len(a.size_bytes)
    latest = np.full(nodes, -1, dtype=np.int64)
    runs = np.zeros(nodes, dtype=np.int64)
    for p in range(before):
        latest[order[p]] = p
        runs[order[p]] += 1
    for p in range(before, len(order)):
        runs[order[p]] += 1
    marked = np.zeros(node + 1, dtype=np.bool_)
    marked[node] = True
    count = 0
    # Inputs have smaller indices, so one sweep downwards closes the set.
    for x in range(node, -1, -1):
        if not marked[x]:
            continue
        count += 1
        for e in range(a.read_start[x], a.read_start[x + 1]):
            u = a.read[e]
            stop = end[latest[u]]
            if stop >= before or marked[u] or a.held[u]:
                continue
            retain = runs[u] >= intervals
            if extend and not retain:
                retain = True
                for q in range(stop + 1, before):
                    if during[q] + a.size_bytes[u] > limit_bytes:
                        retain = False
                        break
            if not retain:
                marked[u] = True
    longer = np.empty(len(order) + count, dtype=np.int64)
    longer[:before] = order[:before]
    at = before
    for x in range(node + 1):
        if marked[x]:
            longer[at] = x
            at += 1
    longer[at:] = order[before:]
    return longer


@kernel
def moved(order: Ints, source: int, target: int) -> Ints:
    """The order with the run at `source` standing at `target`."""
    result = order.copy()
    node = order[source]
    if target < source:
        result[target + 1 : source + 1] = order[target:source]
    else:
        result[source:target] = order[source + 1 : target + 1]
    result[target] = node
    return result


@kernel
def repeated(a: DagArrays, order: Ints) -> Ints:
    """Positions of runs that are not their node's first."""
    seen = np.zeros(len(a.size_bytes), dtype=np.bool_)
    again = np.zeros(len(order), dtype=np.bool_)
    for p in range(len(order)):
        again[p] = seen[order[p]]
        seen[order[p]] = True
    return np.nonzero(again)[0]


@kernel
def greedy_order(a: DagArrays, readers: Ints) -> Ints:
    """Every node once: of the nodes that can run, always the one after which the fewest bytes are added.

    readers[i]: nodes that read i.
    """
    nodes = len(a.size_bytes)
    left = readers.copy()
    waits = np.zeros(nodes, dtype=np.int64)
    for v in range(nodes):
        waits[v] = a.read_start[v + 1] - a.read_start[v]
    done = np.zeros(nodes, dtype=np.bool_)
    order = np.empty(nodes, dtype=np.int64)
    for p in range(nodes):
        best = -1
        best_bytes = 0
        for v in range(nodes):
            if done[v] or waits[v] > 0:
                continue
            added = a.size_bytes[v] if left[v] > 0 or a.held[v] else 0
            for e in range(a.read_start[v], a.read_start[v + 1]):
                if left[a.read[e]] == 1 and not a.held[a.read[e]]:
                    added -= a.size_bytes[a.read[e]]
            if best < 0 or added < best_bytes:
                best = v
                best_bytes = added
        order[p] = best
        done[best] = True
        for e in range(a.read_start[best], a.read_start[best + 1]):
            left[a.read[e]] -= 1
        for v in range(best + 1, nodes):
            for e in range(a.read_start[v], a.read_start[v + 1]):
                if a.read[e] == best:
                    waits[v] -= 1
    return order
