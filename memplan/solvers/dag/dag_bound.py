"""Lower bounds on the seconds of a plain DAG that hold for every order of its nodes, and the least budget.

**Moments.** Take the first run of a node w. None of its descendants has run yet, and all of its ancestors have. Beside
w, its inputs and what is held, the budget leaves some bytes for other outputs. What descendants read from elsewhere is
among those bytes, or runs later: an ancestor of w then runs again, for its seconds, and any other node may run for the
first time, for nothing. The cheapest choice is a minimum cut for any price of memory, and a line under it bounds the
seconds (Lagrange, as in `lower_bound`; the cut is Picard and Ratliff's, 1975).

**Windows.** Between the first runs of w and of a descendant z, all nodes between the two run for the first time, and
what they read from elsewhere was retained at w or runs within the window. Runs of windows that follow one another are
different runs, so their bounds add up: the best chain of windows is a longest path.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memplan.solvers.bounds.mincut import saved_sets
from memplan.solvers.orders.flat import Flat

_WHOLE_S = 1000.0  # seconds of all nodes are scaled to this: minimum cuts count in whole ticks of `mincut`


@dataclass(frozen=True, slots=True)
class Relations:
    """Bit masks over nodes, one for each node.

    - ancestors[v], descendants[v]: nodes that v needs, and that need v, itself left out.
    - readers[v]: nodes that read v.
    """

    ancestors: tuple[int, ...]
    descendants: tuple[int, ...]
    readers: tuple[int, ...]


def relations_of(flat: Flat) -> Relations:
    """Who precedes and follows whom. The ops of `flat` have one output each, of the same index."""
    count = flat.op_count
    ancestors, descendants, readers = [0] * count, [0] * count, [0] * count
    for v, reads in enumerate(flat.reads):
        for u in reads:
            ancestors[v] |= ancestors[u] | 1 << u
            readers[u] |= 1 << v
    for v in range(count - 1, -1, -1):
        for u in flat.reads[v]:
            descendants[u] |= descendants[v] | 1 << v
    return Relations(tuple(ancestors), tuple(descendants), tuple(readers))


def members(mask: int) -> list[int]:
    """The indices of the bits of a mask, in rising order."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def _free(flat: Flat, relations: Relations, w: int) -> int:
    """Outputs that are there at the first run of w whatever the order: inputs, w itself, held ancestors; a mask."""
    mask = 1 << w
    for u in flat.reads[w]:
        mask |= 1 << u
    return mask | sum(1 << u for u in members(relations.ancestors[w]) if flat.arrays.held[u])


def _bytes(flat: Flat, mask: int) -> int:
    return sum(int(flat.arrays.size_bytes[v]) for v in members(mask))


def floor_bytes(flat: Flat, relations: Relations) -> int:
    """No order peaks below this: each node needs its inputs, its output and held ancestors; the end, all held."""
    held = sum(int(size) for size, kept in zip(flat.arrays.size_bytes, flat.arrays.held, strict=True) if kept)
    return max([held, *(_bytes(flat, _free(flat, relations, w)) for w in range(flat.op_count))])


def lower_bound_s(flat: Flat, relations: Relations, budget_bytes: int, moments: int, cuts: int) -> float:
    """A lower bound on the seconds of every order that peaks within the budget.

    - moments: first runs to look at; the work grows with the square of it.
    - cuts: minimum cuts for each window.
    """
    base_s = float(flat.arrays.time_s.sum())
    if base_s <= 0.0:
        return base_s
    scale = _WHOLE_S / base_s
    scaled = replace(flat, arrays=flat.arrays._replace(time_s=flat.arrays.time_s * scale))
    chosen = _moments(flat, relations, budget_bytes, moments)
    before = [0.0] * len(chosen)
    most = 0.0
    for j, w in enumerate(chosen):
        below = relations.descendants[w]
        for k in range(j + 1, len(chosen)):
            z = chosen[k]
            between = below & (relations.ancestors[z] | 1 << z)
            found = _window_s(scaled, relations, budget_bytes, w, between, cuts)
            before[k] = max(before[k], before[j] + found)
        most = max(most, before[j] + _window_s(scaled, relations, budget_bytes, w, below, cuts))
    return base_s + most / scale * (1 - 1e-9)


def _needed(flat: Flat, relations: Relations, w: int, window: int) -> int:
    """What the nodes of a window read from before it or beside it, and what is not there anyway; a mask."""
    reads = 0
    for v in members(window):
        for u in flat.reads[v]:
            reads |= 1 << u
    return reads & ~relations.descendants[w] & ~_free(flat, relations, w)


def _moments(flat: Flat, relations: Relations, budget_bytes: int, limit: int) -> list[int]:
    """Nodes at whose first run not all that is needed later fits: the tightest one, and some of a longest chain.

    Each one is a descendant of the one before: windows lie between any two.
    """
    pressure: dict[int, int] = {}
    for w in range(flat.op_count):
        below = relations.descendants[w]
        alive = _free(flat, relations, w)
        alive |= sum(1 << u for u in members(relations.ancestors[w]) if relations.readers[u] & below)
        over = _bytes(flat, alive) - budget_bytes
        if over > 0 and below:
            pressure[w] = over
    if not pressure or limit < 1:
        return []
    tightest = max(pressure, key=lambda w: (pressure[w], -w))
    chain = _longest_chain(relations, list(pressure), tightest)
    count = min(limit, len(chain))
    picked = {tightest} | {chain[i * len(chain) // count] for i in range(count)}
    return sorted(picked)


def _longest_chain(relations: Relations, nodes: list[int], through: int) -> list[int]:
    """The most nodes of a list, each a descendant of the one before, among those comparable to one of them."""
    ancestors = relations.ancestors
    line = [v for v in nodes if v == through or ancestors[v] >> through & 1 or ancestors[through] >> v & 1]
    length: dict[int, int] = {}
    previous: dict[int, int] = {}
    for v in line:
        length[v] = 1
        for u in line:
            if u >= v:
                break
            if ancestors[v] >> u & 1 and length[u] >= length[v]:
                length[v] = length[u] + 1
                previous[v] = u
    at = max(line, key=lambda v: (length[v], -v))
    chain = [at]
    while chain[-1] in previous:
        chain.append(previous[chain[-1]])
    return chain[::-1]


def _window_s(flat: Flat, relations: Relations, budget_bytes: int, w: int, window: int, cuts: int) -> float:
    """Least (scaled) seconds of repeated runs from the first run of w until a window of its descendants has run."""
    free = _free(flat, relations, w)
    room_bytes = budget_bytes - _bytes(flat, free)
    needed = _needed(flat, relations, w, window)
    if _bytes(flat, needed & relations.ancestors[w]) <= room_bytes:
        return 0.0
    count = flat.op_count
    ancestors = relations.ancestors[w]
    there = np.array([bool(free >> v & 1) for v in range(count)], dtype=np.bool_)
    later = np.array([not ancestors >> v & 1 for v in range(count)], dtype=np.bool_)
    at_w = replace(flat, arrays=flat.arrays._replace(held=there, deferrable=later))
    sets = saved_sets(at_w, frozenset(members(needed)), cuts)
    return max([0.0, *(s.line_s - s.line_s_per_byte * room_bytes for s in sets)])
