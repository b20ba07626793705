"""The order in which each unit of sharded parameters runs again before its backward, as FSDP2 does with checkpoints.

    gather 1, layer 1, gather 2, layer 2, head | head', gather 2, layer 2, layer 2', gather 1, layer 1, layer 1'

Here ops marked ' are those of backward. Other searches add up the seconds of ops and of the network. Where both run at
the same time this order, and those with fewer repeated runs, may take less.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from memplan.problem.data import Graph
from memplan.problem.schedule import BOUNDARY
from memplan.solvers.orders.flat import Flat, Ints
from memplan.solvers.orders.replay import prune


def unit_order(graph: Graph, flat: Flat) -> Ints:
    """The order in which units run again. A unit around others, as the root is, runs once.

    It may not be legal: where a unit writes to buffers, what it reads is gone.
    """
    order = [*range(graph.boundary), BOUNDARY]
    again = _again(graph)
    for index in range(graph.boundary, len(graph.ops)):
        order += [i for i in again[index] if flat.arrays.rerunnable[i]]
        order.append(index)
    return prune(flat.arrays, np.array(order, dtype=np.int64))


def _again(graph: Graph) -> dict[int, list[int]]:
    """Forward ops of units, by the op of backward before which they run again."""
    forward, backward = range(graph.boundary), range(graph.boundary, len(graph.ops))
    paths = {graph.ops[i].layer for i in forward if graph.ops[i].is_asynchronous}  # of modules that are units
    units: dict[str, list[int]] = defaultdict(list)
    for index in forward:
        around = [path for path in paths if not path or f"{graph.ops[index].layer}.".startswith(f"{path}.")]
        if around:
            units[max(around, key=len)].append(index)
    again: dict[int, list[int]] = defaultdict(list)
    for unit in units.values():
        members = set(unit)
        read_outside = {v for i in forward if i not in members for v in graph.ops[i].inputs}
        inner = {v for i in unit for v in graph.ops[i].outputs} - read_outside
        first = next((i for i in backward if not inner.isdisjoint(graph.ops[i].inputs)), None)
        if first is not None and not any(unit[0] < other[0] < unit[-1] for other in units.values()):
            again[first] += unit
    return again
