"""Parameters that are updated in the middle of backward, written into a captured step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from memplan.capture.analysis.traced import Traced
from memplan.problem.data import Value


def with_updates(traced: Traced, update_bytes: Mapping[str, int]) -> Traced:
    """The step with parameters of these names updated as soon as their gradients are handed over.

    update_bytes: by name, what the update allocates for a while on the device.
    """
    values: list[Value] = list(traced.graph.values)
    for gradient in traced.gradients:
        names = [name for name in gradient.parameters if name in update_bytes]
        if names:
            values[gradient.value] = dataclasses.replace(
                values[gradient.value],
                held=len(names) < len(gradient.nodes),  # somebody else keeps it
                updates=True,
                update_bytes=max(update_bytes[name] for name in names),
            )
    return dataclasses.replace(traced, graph=dataclasses.replace(traced.graph, values=tuple(values)))
