"""Python state that a call may change: attributes, containers, globals that its code names, generators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memplan.capture.attributes.attributes_kept import AttributesKept
from memplan.capture.trace.generators import python_generators, python_generators_here, python_generators_kept
from memplan.runtime.program.rng import held_rng


class StateKept(contextlib.ExitStack):
    """Says whether a call changes Python state. As a context it puts that back, unless it is dropped before."""

    def __init__(self, attributes: AttributesKept, own: Sequence[torch.Generator], device: torch.device) -> None:
        """own: generators other than PyTorch's default ones on the device, and Python's."""
        super().__init__()
        self._attributes, self._own, self._device = attributes, own, device
        self.begins()
        self.callback(attributes.restore)

    def _drawn(self) -> tuple[Any, ...]:
        return [bytes(g.get_state().numpy()) for g in self._own], held_rng(self._device), python_generators()

    def begins(self) -> bool:
        """Note where generators are, as the call begins. False where other state is no longer what was noted."""
        self._then, self._put = self._drawn(), python_generators_here()
        return not self._attributes.changed()

    def changed(self, draws: bool) -> bool:
        """Whether the call has changed state. draws: it draws from PyTorch's default generators; they do not count."""
        own, default, _ = self._drawn()
        return own != self._then[0] or (default != self._then[1] and not draws) or self._attributes.changed()

    def replay(self) -> Callable[[Callable[[], Any]], Any] | None:
        """What runs the call again with the same numbers of Python's generators; None where it has drawn none."""
        put = self._put

        def replayed(run: Callable[[], Any]) -> Any:
            with python_generators_kept():
                put()
                return run()

        return replayed if python_generators() != self._then[2] else None
