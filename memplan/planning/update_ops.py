"""Parameters that are updated in the middle of backward, written into a captured step."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping

from memplan.capture.analysis.traced import Gradient, Traced
from memplan.problem.data import Value


def with_updates(traced: Traced, update_bytes: Mapping[str, int]) -> Traced:
    """The step with parameters of these names updated as soon as their gradients are handed over.

    update_bytes: by name, what the update allocates for a while on the device.
    """
    values: list[Value] = list(traced.graph.values)
    memory = _memory_of_parameters(traced)
    for gradient in traced.gradients:
        names = [name for name in _parameters(gradient) if name in update_bytes]
        if names:
            values[gradient.value] = dataclasses.replace(
                values[gradient.value],
                held=len(names) < len(gradient.nodes),  # somebody else keeps it
                updates=tuple(sorted({v for name in names for v in memory[name]})),
                update_bytes=max(update_bytes[name] for name in names),
            )
    return dataclasses.replace(traced, graph=dataclasses.replace(traced.graph, values=tuple(values)))


def _parameters(gradient: Gradient) -> list[str]:
    pairs = [name.partition(" ") for name, _ in gradient.nodes]
    return [leaf for kind, _, leaf in pairs if kind == "parameter"]


def _memory_of_parameters(traced: Traced) -> dict[str, list[int]]:
    """By name of a parameter, the values in the graph that hold it.

    They may be several, because parameters may share memory, and ops may write to it.
    """
    found: dict[str, list[int]] = defaultdict(list)
    for value in range(len(traced.graph.values)):
        for node in traced.roots.get(value, ()):
            source = traced.residents.get(node)
            if source is not None and source.kind == "parameter":
                found[source.name].append(value)
    return found
