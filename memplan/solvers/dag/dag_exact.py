"""The best order of a small DAG: A* (Hart, Nilsson and Raphael, 1968) over what has run and what is retained.

A state is two bit masks. Outputs are given up only when the next run does not fit, and then no more than it takes:
giving up later never hurts. An output goes at once when none of its descendants is still to run. The estimate of what
is left is what is still to run for the first time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from memplan.solvers.dag.dag_bound import Relations, members
from memplan.solvers.orders.flat import Flat


@dataclass(frozen=True, slots=True)
class Exact:
    """What the search came to.

    - order: the best one; None where none fits, or where the search was cut short.
    - bound_s: no order takes less.
    """

    order: tuple[int, ...] | None
    bound_s: float


def best_order(flat: Flat, relations: Relations, budget_bytes: int, expansions: int) -> Exact:
    """The order of fewest seconds within a budget, after at most `expansions` states."""
    sizes = [int(size) for size in flat.arrays.size_bytes]
    time_s = [float(seconds) for seconds in flat.arrays.time_s]
    held = sum(1 << v for v in range(flat.op_count) if flat.arrays.held[v])
    inputs = [sum(1 << u for u in reads) for reads in flat.reads]
    everything = (1 << flat.op_count) - 1
    cheapest = {(0, 0): 0.0}
    parent: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}
    ticket = 0
    waiting = [(math.fsum(time_s), 0, 0, (0, 0))]
    spent = 0
    while waiting:
        estimate_s, _undone, _ticket, state = heapq.heappop(waiting)
        done, live = state
        taken_s = cheapest[state]
        if estimate_s > taken_s + _left_s(time_s, everything & ~done) + 1e-15:
            continue
        if done == everything:
            return Exact(_path(parent, state), estimate_s)
        if spent == expansions:
            return Exact(None, estimate_s)
        spent += 1
        for v in range(flat.op_count):
            again = done >> v & 1
            if live >> v & 1 or inputs[v] & ~live or (again and not relations.descendants[v] & ~done):
                continue
            over = sum(sizes[u] for u in members(live)) + sizes[v] - budget_bytes
            for evicted in _evictions(sizes, members(live & ~inputs[v] & ~held), over):
                reached = _tidy(relations, done | 1 << v, live & ~evicted | 1 << v, held)
                cost_s = taken_s + time_s[v]
                if cost_s < cheapest.get(reached, math.inf):
                    cheapest[reached] = cost_s
                    parent[reached] = (state, v)
                    ticket += 1
                    undone = everything & ~reached[0]
                    entry = (cost_s + _left_s(time_s, undone), undone.bit_count(), -ticket, reached)
                    heapq.heappush(waiting, entry)
    return Exact(None, math.inf)


def _left_s(time_s: list[float], undone: int) -> float:
    return math.fsum(time_s[v] for v in members(undone))


def _tidy(relations: Relations, done: int, live: int, held: int) -> tuple[int, int]:
    for v in members(live & ~held):
        if not relations.descendants[v] & ~done:
            live ^= 1 << v
    return done, live


def _evictions(sizes: list[int], candidates: list[int], over_bytes: int) -> Iterator[int]:
    """Masks of candidates that free enough, and no longer do without any one of their members."""
    if over_bytes <= 0:
        yield 0
        return
    ranked = sorted(candidates, key=lambda v: sizes[v], reverse=True)  # then the last one taken is the smallest

    def choose(i: int, mask: int, left_bytes: int) -> Iterator[int]:
        if left_bytes <= 0:
            yield mask
            return
        for k in range(i, len(ranked)):
            if sizes[ranked[k]] > 0:
                yield from choose(k + 1, mask | 1 << ranked[k], left_bytes - sizes[ranked[k]])

    yield from choose(0, 0, over_bytes)


def _path(parent: dict[tuple[int, int], tuple[tuple[int, int], int]], state: tuple[int, int]) -> tuple[int, ...]:
    order = []
    while state in parent:
        state, v = parent[state]
        order.append(v)
    return tuple(reversed(order))
