"""A planned step as a networkx graph, for looking at it and for algorithms on graphs."""

from __future__ import annotations

from collections import Counter

import networkx as nx

from memplan.plans.figures import PlanFigures
from memplan.problem.schedule import Compute, Offload


def step_graph(plan: PlanFigures) -> nx.DiGraph:
    """Ops and values of the step with their bytes, seconds and decisions: see `Plan.graph`."""
    graph, costs = plan.problem.graph, plan.problem.costs
    runs = Counter(step.op for step in plan.schedule if isinstance(step, Compute))
    offloaded = {step.value for step in plan.schedule if isinstance(step, Offload)}
    maker = {v: i for i, op in enumerate(graph.ops) for v in op.outputs}
    crossing = _crossing(plan, maker)
    found = nx.DiGraph()
    for index, value in enumerate(graph.values):
        decision = None
        if index in crossing:
            decision = "offload" if index in offloaded else "recompute" if runs[maker[index]] > 1 else "keep"
        found.add_node(
            ("value", index), name=value.name, size_bytes=value.size_bytes, role=value.role, held=value.held,
            decision=decision,
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


def _crossing(plan: PlanFigures, maker: dict[int, int]) -> set[int]:
    """Values that forward computes and backward reads."""
    ops = plan.problem.graph.ops
    read = {v for op in ops if op.phase == "backward" for v in op.inputs}
    return {v for v in read if v in maker and ops[maker[v]].phase == "forward"}
