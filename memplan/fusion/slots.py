"""Arguments of ops with slots in place of tensors, so that they can be compared, kept, and given to other processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memplan.capture.analysis.traced import MetaTensor


@dataclass(frozen=True)
class TensorSlot:
    """Stands for a tensor: its position among those that are given."""

    index: int


def with_slots(thing: Any, position: Callable[[fx.Node], int]) -> Any:
    """Arguments with slots in place of nodes. position: of the tensor that a node stands for."""
    if isinstance(thing, fx.Node):
        return TensorSlot(position(thing))
    if isinstance(thing, (list, tuple)):
        return type(thing)(with_slots(part, position) for part in thing)
    if isinstance(thing, dict):
        return {key: with_slots(part, position) for key, part in thing.items()}
    return thing


def filled(thing: Any, given: Sequence[torch.Tensor]) -> Any:
    """Arguments with tensors in their slots."""
    if isinstance(thing, TensorSlot):
        return given[thing.index]
    if isinstance(thing, MetaTensor):
        return thing.build()
    if isinstance(thing, (list, tuple)):
        return type(thing)(filled(part, given) for part in thing)
    if isinstance(thing, dict):
        return {key: filled(part, given) for key, part in thing.items()}
    return thing
