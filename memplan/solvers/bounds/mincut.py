"""Which values to save at a given price of memory: a minimum cut, exact for a whole forward pass.

For a price of `lambda` seconds per byte, choose the ops to run again and the values to save so that every value that is
demanded is saved or its op runs again. A demanded value that is not made again pays `lambda` times its bytes. That is a
term D_v (1 - r_p), so the whole is a minimum cut (Picard and Ratliff, 1975), however many values an op reads or makes.
Ops that may wait for the backward pass cost nothing: there they can run for the first time. Cuts find the corners of
the convex hull; filling reaches the points between them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.solvers.bounds.max_flow import LEFT, LEVEL, SOURCE, TARGET, max_flow, network_of
from memplan.solvers.orders.flat import Flat, Ints

_TICK_S = 1e-12
_NEVER = 1 << 58


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
