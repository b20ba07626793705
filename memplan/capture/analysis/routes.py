"""Parameters whose gradients come through islands alone: where those give none, `.grad` stays as it is.

    y = layer(y + encoder(x)) if torch.rand(()) < 0.5 else y        # LayerDrop, in an island

In a step without the layer, eager has no gradient for the encoder, and an optimizer leaves its weights alone. A plan
has backward ops for them all the same, which get zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memplan.capture.analysis.traced import Traced
from memplan.capture.ops.island_ops import IslandKernel

Route = tuple[str, int] | None  # an island and which of its inputs a gradient is of; None: no island
_PAST_ISLANDS: frozenset[Route] = frozenset({None})


def routes_of_gradients(traced: Traced) -> Mapping[Any, frozenset[Route]]:
    """The routes by which gradients come to parameters, by name, inputs, by position, and islands, by (name,).

    Only those to which all routes lead through islands are in it.
    """
    graph, found = traced.graph, dict[Any, frozenset[Route]]()
    backward = list(zip(graph.ops, traced.kernels, strict=True))[graph.boundary :]
    made = {value for op, _ in backward for value in op.outputs}
    routes = dict.fromkeys(graph.tangents, _PAST_ISLANDS)  # by value, of what is computed from gradients
    for op, kernel in backward:
        through = frozenset[Route]().union(*(routes[v] for v in op.inputs if v in routes))
        if (op.kind.startswith("aten.add") or op.fused) and not routes.keys() >= made.intersection(op.inputs):
            through = _PAST_ISLANDS  # a gradient that is a constant is added
        routes |= dict.fromkeys(op.outputs if through else (), through)
        if isinstance(kernel.target, IslandKernel):
            island = kernel.target.island
            found[(island.name,)] = through
            inputs = island.inputs_by_gradient
            routes |= {m.value: frozenset({(island.name, inputs[m.index])}) for m in kernel.made if m.index in inputs}
    positions = {r.name: r.position for r in traced.residents.values() if r.kind == "input"}
    for gradient in traced.gradients:
        for title, _ in gradient.nodes:
            kind, _, name = title.partition(" ")
            found[name if kind == "parameter" else positions[name]] = routes.get(gradient.value, _PAST_ISLANDS)
    return {key: through for key, through in found.items() if through and None not in through}
