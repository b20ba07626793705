"""Python state that a call may change: attributes, containers, globals that its code names, generators."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from memplan.capture.attributes.attributes_kept import AttributesKept
from memplan.capture.attributes.tables import held_in
from memplan.capture.trace.generators import generator_states
from memplan.runtime.program.rng import held_rng


class StateKept(contextlib.ExitStack):
    """Puts Python state back when it ends. It can be dropped before, and puts nothing back then."""

    def __init__(self, attributes: AttributesKept, model: nn.Module, device: torch.device) -> None:
        """attributes: what is put back. model: has the generators that count too. device: on which it draws."""
        super().__init__()
        self._attributes, self._generators, self._device = attributes, held_in(model, torch.Generator), device
        self._drawn = self._draws()
        self.callback(attributes.restore)

    def _draws(self) -> tuple[Any, Any]:
        return generator_states(self._generators), held_rng(self._device)

    def begins(self) -> bool:
        """Note where generators are, as the call begins. False where other state is no longer what was noted."""
        self._drawn = self._draws()
        return not self._attributes.changed()

    def changed(self, draws: bool) -> bool:
        """Whether the call has changed anything. draws: other than PyTorch's generators, which it draws from."""
        (others, own), (others_then, own_then) = self._draws(), self._drawn
        return others != others_then or (own != own_then and not draws) or self._attributes.changed()
