"""A planned step as a networkx graph, for looking at it and for algorithms on graphs."""

from __future__ import annotations

from collections import Counter

import networkx as nx

from memplan.plans.choices import decisions
from memplan.plans.figures import PlanFigures
from memplan.problem.schedule import Compute


def step_graph(plan: PlanFigures) -> nx.DiGraph:
    """Ops and values of the step with their bytes, seconds and decisions: see `Plan.graph`."""
    graph, costs = plan.problem.graph, plan.problem.costs
    runs = Counter(step.op for step in plan.schedule if isinstance(step, Compute))
    decided = decisions(graph, plan.schedule)
    found = nx.DiGraph()
    for index, value in enumerate(graph.values):
        found.add_node(
            ("value", index), name=value.name, size_bytes=value.size_bytes, role=value.role, held=value.held,
            decision=decided.get(index),
        )  # fmt: skip
        if value.reuses is not None:
            found.add_edge(("value", value.reuses), ("value", index), reuses=True)
    for index, op in enumerate(graph.ops):
        found.add_node(
            ("op", index), name=op.name, kind=op.kind, phase=op.phase, layer=op.layer, random=op.random,
            time_s=costs.time_s[index], scratch_bytes=costs.scratch_bytes[index], runs=runs[index],
        )  # fmt: skip
        found.add_edges_from((("value", v), ("op", index)) for v in op.inputs)
        found.add_edges_from((("op", index), ("value", v)) for v in op.outputs)
        found.add_edges_from((("op", index), ("value", effect.new)) for effect in op.effects)
    return found
