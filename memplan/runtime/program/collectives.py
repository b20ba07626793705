"""Collectives of a step: their signature, which all ranks of a group have in common, and what a program calls.

A program starts a collective where the schedule has its op, and completes it where the schedule waits. In between it
runs beside the ops: gloo has threads for that, NCCL a stream of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from memplan import torch_private as private

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
        events = tuple(events)
        return Collectives(events, hashlib.sha256("\n".join(events).encode()).digest()[:8])

    @property
    def only_gradients(self) -> bool:
        """Whether the step runs no collective itself, so that its passes may run again on one rank alone."""
        return all(event.startswith(GRADIENT) for event in self.events)


def start(store: Any, collective: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Start a collective. Gives the tensor to which it writes."""
    result: torch.Tensor = collective(*args, **kwargs)
    store.transfers.collectives[id(result)] = result
    return result


def complete(store: Any, result: torch.Tensor, *inputs: torch.Tensor) -> None:
    """Let what follows wait for a collective. inputs: what it reads, which is held for it until here."""
    del store.transfers.collectives[id(result)]
    private.wait_for(result)
