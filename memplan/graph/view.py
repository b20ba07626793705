"""A captured step as a networkx graph, for looking at it and for algorithms on graphs."""

from __future__ import annotations

import networkx as nx

from memplan.problem import Graph


def to_networkx(graph: Graph) -> nx.DiGraph:
    """Nodes ("op", i) and ("value", i) with the fields of each as attributes.

    Edges run from a value to the ops that read it and from an op to the values that it writes; one with `reuses=True`
    runs from a value to the one that takes over its memory.
    """
    view = nx.DiGraph()
    for index, value in enumerate(graph.values):
        view.add_node(("value", index), name=value.name, size_bytes=value.size_bytes, role=value.role, held=value.held)
        if value.reuses is not None:
            view.add_edge(("value", value.reuses), ("value", index), reuses=True)
    for index, op in enumerate(graph.ops):
        view.add_node(("op", index), name=op.name, kind=op.kind, phase=op.phase, layer=op.layer, random=op.random)
        view.add_edges_from((("value", v), ("op", index)) for v in op.inputs)
        view.add_edges_from((("op", index), ("value", v)) for v in op.outputs)
        view.add_edges_from((("op", index), ("value", effect.new)) for effect in op.effects)
    return view
