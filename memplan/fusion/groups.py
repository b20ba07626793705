"""Which primitives of a step run together: groups along producers, siblings and readers, in one phase, in no circle.

Results of groups are written over what is read for the last time, as eager's own ops in place do (`donate`).
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import networkx as nx
import torch
from torch import fx

from memplan.fusion.step_graph import StepGraph, base_of, bases_read, node_bytes, node_kind, place_of_node, readers_of
from memplan.problem.data import Phase

REACH = 3  # ops that are not fused and may lie between members of a group
MOST_NODES = 120  # in a group
_LEAST_BYTES = 4096  # of what is worth to be written over something


@dataclass(eq=False)
class FusedGroup:
    """Primitives that are compiled as one op.

    - nodes: in order; those that backward makes again first.
    - inputs: the nodes whose memory it reads. outputs: what leaves it.
    - over: position of an output -> that of the input in whose memory it is written.
    """

    nodes: list[fx.Node]
    phase: Phase
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    over: dict[int, int] = field(default_factory=dict)

    def read(self) -> list[fx.Node]:
        """The nodes outside of it whose memory its primitives read."""
        inside = set(self.nodes)
        return list(dict.fromkeys(b for n in self.nodes for b in bases_read(n) if b not in inside))


Unit = FusedGroup | int  # a group, or an op of the trace that is not fused


def phase_of_unit(step: StepGraph, unit: Unit) -> Phase:
    return step.traced.graph.ops[unit].phase if isinstance(unit, int) else unit.phase


class Grouper:
    """Puts one node after the other into a group that is there, or into a new one."""

    def __init__(self, step: StepGraph) -> None:
        self._step = step
        self._group: dict[fx.Node, int] = {}
        self._members: dict[int, list[fx.Node]] = {}
        self._order = nx.DiGraph()  # of groups: an edge leads to one that must run later
        self._externs_before: dict[fx.Node, int] = {}
        self._of_op: dict[int, list[fx.Node]] = defaultdict(list)
        self._readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)  # of those worth a join
        self._all_readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        self._latest_random: fx.Node | None = None
        self._position = {node: position for position, node in enumerate(step.nodes.nodes)}
        externs = 0
        for node in step.nodes.nodes:
            if node_kind(node) in ("computed", "extern"):
                self._externs_before[node] = externs
                externs += node_kind(node) == "extern"
                self._place(node)

    def units(self) -> list[Unit]:
        """Groups and ops that are not fused, in an order in which they can run, as near as can be to the trace's."""
        turn: dict[int, int] = {}  # of each group: it runs as the first op of which something leaves it
        for group, members in self._members.items():
            members.sort(key=self._position.__getitem__)
            inside = set(members)
            leaving = [m for m in members if node_kind(m) == "extern" or any(u not in inside for u in readers_of(m))]
            turn[group] = min((place_of_node(m).op for m in leaving), default=place_of_node(members[-1]).op)
        found: list[Unit] = []
        for index in nx.lexicographical_topological_sort(self._order, key=lambda group: (turn[group], group)):
            members = self._members[index]
            if node_kind(members[0]) == "extern":
                found.append(place_of_node(members[0]).op)
            else:
                found.append(FusedGroup(members, place_of_node(members[0]).phase))
        return found

    def _place(self, node: fx.Node) -> None:
        made_by = (b.all_input_nodes[0] if node_kind(b) == "result" else b for b in bases_read(node))
        sources = list(dict.fromkeys(n for n in made_by if node_kind(n) in ("computed", "extern")))
        if node.target is operator.getitem:  # one result of a primitive that has several
            self._group[node] = self._group[sources[0]]
            self._members[self._group[node]].append(node)
            return
        self._group[node] = own = len(self._group)
        self._members[own] = [node]
        self._order.add_node(own)
        self._order.add_edges_from((self._group[before], own) for before in (*sources, *self._conflicts(node)))
        for base in bases_read(node):
            self._all_readers[base].append(node)
        if node_kind(node) == "extern":
            return
        op = place_of_node(node).op
        producers = [s for s in reversed(sources) if node_kind(s) == "computed"]
        for other in (*producers, *self._of_op[op]):
            self._join(other, node)
        self._of_op[op].append(node)
        for base in bases_read(node):
            if node_kind(base) != "source" and 2 * node_bytes(base) >= node_bytes(node):
                for other in self._readers[base]:
                    self._join(other, node)
                self._readers[base].append(node)

    def _conflicts(self, node: fx.Node) -> Iterator[fx.Node]:
        """Who must run before an op that is not fused, beside those that make what it reads.

        They read memory in which it writes, or draw random numbers before it.
        """
        for base in self._step.overwrites.get(node, ()):
            yield from self._all_readers[base]
        if node_kind(node) == "extern" and self._step.traced.graph.ops[place_of_node(node).op].random:
            if self._latest_random is not None:
                yield self._latest_random
            self._latest_random = node

    def _join(self, other: fx.Node, node: fx.Node) -> None:
        """Put the group of the newest node into that of another, where they can run together."""
        a, b = self._group[other], self._group[node]
        if a == b:
            return
        first, second = self._members[a], self._members[b]
        if len(first) + len(second) > MOST_NODES or place_of_node(first[0]).phase != place_of_node(node).phase:
            return
        last = max(self._externs_before[m] for m in first if m in self._externs_before)
        if self._externs_before[node] - last > REACH and not self._replaces(first, node, last):
            return
        if self._leads(a, b) or self._leads(b, a):
            return
        for member in second:
            self._group[member] = a
        first.extend(second)
        del self._members[b]
        self._order.add_edges_from([(a, after) for after in self._order.succ[b]])
        self._order.add_edges_from([(before, a) for before in self._order.pred[b]])
        self._order.remove_node(b)
        self._order.remove_edges_from([(a, a)])

    def _replaces(self, group: Collection[fx.Node], node: fx.Node, last: int) -> bool:
        """Whether a node may as well run where a group does, for its result takes the place of one of the group's."""
        inside, freed_bytes = set(group), 0
        for base in bases_read(node):
            if base in inside:
                outside = {reader for reader in readers_of(base) if reader not in inside}
                freed_bytes += node_bytes(base) if outside == {node} else 0
            elif node_kind(base) != "source":
                made_by = base.all_input_nodes[0] if node_kind(base) == "result" else base
                if self._externs_before.get(made_by, 0) > last:
                    return False
        return freed_bytes >= node_bytes(node)

    def _leads(self, a: int, b: int) -> bool:
        """Whether a way through a third group leads from one to the other."""
        return any(nx.has_path(self._order, after, b) for after in self._order.succ[a] if after != b)


def without_dead(step: StepGraph, units: list[Unit]) -> list[Unit]:
    """Leave out ops whose results nobody reads any more: memory that an op in place was to write to."""
    graph = step.traced.graph
    lasting = {o.value for o in step.traced.outputs} | {g.value for g in step.traced.gradients}
    kept: list[Unit] = []
    needed: set[fx.Node] = set()
    for unit in reversed(units):
        if isinstance(unit, int):
            op, node = graph.ops[unit], step.externs[unit]
            used = any(user in needed for user in node.users) or any(v in lasting for v in op.outputs)
            if not (used or op.random or op.stays):
                continue
            needed.update(bases_read(node))
        else:
            needed.update(unit.read())
        kept.append(unit)
    return kept[::-1]


def kept_outside(step: StepGraph) -> set[fx.Node]:
    """The nodes that somebody outside of the step holds: outputs and gradients."""
    outputs = [(o.node, o.value) for o in step.traced.outputs]
    gradients = [(node, g.value) for g in step.traced.gradients for _, node in g.nodes]
    return {base_of(step.look(node, value)) for node, value in (*outputs, *gradients)}


def set_ends(step: StepGraph, units: Sequence[Unit]) -> None:
    """Set what each group reads, and what leaves it."""
    wanted = kept_outside(step)
    for unit in units:
        if isinstance(unit, int):
            wanted.update(bases_read(step.externs[unit]))
        else:
            unit.inputs = unit.read()
            wanted.update(unit.inputs)
    for unit in units:
        if not isinstance(unit, int):
            own = [n for n in unit.nodes if place_of_node(n).phase == unit.phase]
            unit.outputs = [n for n in own if n in wanted and isinstance(n.meta["val"], torch.Tensor)]


def donate(step: StepGraph, units: Sequence[Unit]) -> None:
    """Set what each group may write over what: position of an output -> that of the input."""
    kept = kept_outside(step)
    reads = [set(bases_read(step.externs[u])) if isinstance(u, int) else set(u.inputs) for u in units]
    makes = [set(step.externs[u].users) if isinstance(u, int) else set(u.outputs) for u in units]
    phases = [phase_of_unit(step, unit) for unit in units]
    last = {base: position for position, bases in enumerate(reads) for base in bases}
    readers = Counter(base for bases in reads for base in bases)
    tensors_of_value = Counter(value for value, _ in step.home.values())

    def is_free(given: fx.Node, group: FusedGroup, position: int) -> bool:
        """Whether nobody reads an input of a group once the group has run, in every schedule."""
        if given in kept or last[given] != position or node_kind(given) not in ("result", "computed"):
            return False
        value = step.home.get(given, (None, None))[0]
        if value is not None:
            facts = step.traced.graph.values[value]
            if tensors_of_value[value] != 1 or facts.role != "activation" or facts.held:
                return False
        if group.phase == "forward":
            return readers[given] == 1
        if place_of_node(given).phase == "backward":
            return True
        from_it = {given}  # what forward would make again from it: who reads that later needs the input, too
        for bases, made, phase in zip(reads, makes, phases, strict=True):
            if phase == "forward" and bases & from_it:
                from_it |= made
        return not any(bases & from_it for bases in reads[position + 1 :])

    for position, unit in enumerate(units):
        if isinstance(unit, int):
            continue
        unit.over = {}
        for o, output in enumerate(unit.outputs):
            if output in kept or node_bytes(output) < _LEAST_BYTES:
                continue
            for i, given in enumerate(unit.inputs):
                if i not in unit.over.values() and _fits(given, output) and is_free(given, unit, position):
                    unit.over[o] = i
                    break


def _fits(given: fx.Node, output: fx.Node) -> bool:
    a: torch.Tensor = given.meta["val"]
    b: torch.Tensor = output.meta["val"]
    whole = a.untyped_storage().nbytes() == node_bytes(given) and a.is_contiguous() and b.is_contiguous()
    return whole and a.dtype == b.dtype and a.numel() == b.numel()
