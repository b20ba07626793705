"""Backward groups make again what forward's pointwise ops make, where they then read fewer bytes.

That is independent of the budget, and so are the bits: what a group reads is chosen once, by a minimum cut over the
pointwise ops behind it. A value that would exist only to be saved weighs twice, for it is written too; one that
backward reads anyway weighs an eighth; what is there before the step weighs nothing. What has been overwritten by the
time that a group runs can't be read at all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence, Set

import networkx as nx
import torch
from torch import fx

from memplan.fusion.groups import FusedGroup, Unit
from memplan.fusion.step_graph import StepGraph, base_of, bases_read, node_bytes, node_kind, place_of_node

aten, prims = torch.ops.aten, torch.ops.prims

_CHEAP = frozenset({prims.convert_element_type.default, aten.clone.default})  # beside what is tagged as pointwise
_NEVER = frozenset({aten.embedding.default, aten.index.Tensor, aten.gather.default, aten.cat.default})
_SMALL = 8  # values of less than this part of the group's largest are saved


def rematerialise(step: StepGraph, units: Sequence[Unit]) -> None:
    """Put copies of forward's pointwise nodes into backward groups."""
    groups = [unit for unit in units if not isinstance(unit, int)]
    externs = [step.externs[unit] for unit in units if isinstance(unit, int)]
    read_anyway = {b for n in externs if place_of_node(n).phase == "backward" for b in bases_read(n)}
    made_anyway = Counter(b for n in externs for b in set(bases_read(n)))
    made_anyway.update(b for g in groups if g.phase == "forward" for b in g.read())
    forward = {n for g in groups if g.phase == "forward" for n in g.nodes}
    order = {node: position for position, node in enumerate(step.nodes.nodes)}
    overwritten: set[fx.Node] = set()
    for group in units:
        if isinstance(group, int):
            overwritten.update(step.overwrites[step.externs[group]])
        elif group.phase == "backward":
            made_again, saved = _cut(group, forward, made_anyway, read_anyway, overwritten)
            group.nodes = sorted(made_again, key=order.__getitem__) + group.nodes
            read_anyway |= saved


def _cut(
    group: FusedGroup,
    forward: Set[fx.Node],
    made_anyway: Counter[fx.Node],
    read_anyway: Set[fx.Node],
    overwritten: Set[fx.Node],
) -> tuple[list[fx.Node], set[fx.Node]]:
    """What one backward group makes again, and which values of forward it then reads."""
    largest = max((node_bytes(n) for n in group.nodes), default=0)

    def weight(node: fx.Node) -> float:
        if node in overwritten:
            return math.inf
        if node_kind(node) == "source":
            return 0
        only_to_be_saved = node_kind(node) == "computed" and not made_anyway[node]
        size = node_bytes(node) * (2 if only_to_be_saved else 1)
        return max(1, size // (8 if node in read_anyway else 1))

    def can_make(node: fx.Node) -> bool:
        if node not in forward or node.target in _NEVER or not isinstance(node.meta["val"], torch.Tensor):
            return False
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _CHEAP
        return pointwise and node_bytes(node) * _SMALL >= largest

    network, seen = nx.DiGraph(), dict[fx.Node, None]()
    stack = reads = [b for b in group.read() if b in forward]
    if not reads:
        return [], set()
    network.add_edges_from(((base, "out"), "sink") for base in reads)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen[node] = None
        network.add_edge((node, "in"), (node, "out"), capacity=weight(node))
        if can_make(node):
            bases = [base_of(a) for a in node.all_input_nodes]
            network.add_edges_from(((base, "out"), (node, "in")) for base in bases)
            stack += bases
        else:
            network.add_edge("source", (node, "in"))
    _, (_, near_sink) = nx.minimum_cut(network, "source", "sink")
    made_again = [n for n in seen if (n, "in") in near_sink]
    return made_again, {n for n in seen if (n, "in") not in near_sink and (n, "out") in near_sink}
