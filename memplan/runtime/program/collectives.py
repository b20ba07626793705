"""The collective signature of a step: the events that all ranks of a group have to run in one order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

GRADIENT = "gradient "  # a gradient is handed over to autograd, where hooks may reduce it across ranks


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collective signature of a step.

    - events: what happens, in order. "gradient layers.0.weight" is the hand-over of that gradient; any other event is a
      collective that the step runs itself. Shapes are left out, because ranks may have other batches.
    - digest: 8 bytes, equal for equal events.
    """

    events: tuple[str, ...]
    digest: bytes

    @staticmethod
    def of(events: Iterable[str]) -> Collectives:
        """The signature of events in this order."""
        events = tuple(events)
        return Collectives(events, hashlib.sha256("\n".join(events).encode()).digest()[:8])

    @property
    def only_gradients(self) -> bool:
        """Whether the step runs no collective itself, so that its passes may run again on one rank alone."""
        return all(event.startswith(GRADIENT) for event in self.events)
