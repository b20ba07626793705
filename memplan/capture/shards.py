"""Parameters that others have sharded over ranks: what memplan has to know of them, and what it asks for.

Between uses each rank holds a part, and the `nn.Parameter` itself is empty. A planned step gathers such a parameter
when its plan says so, reads it, and lets go of it; whoever sharded it reduces the gradients that are handed over.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from memplan.problem.data import GatherSpeed


@dataclass(frozen=True, slots=True)
class Shard:
    """A parameter of which each rank holds a part.

    shape: of the whole, which is contiguous. gathered_bytes: what the whole takes on the device, padding included.
    stays: it is whole between steps too, and plans never let go of it.
    """

    shape: torch.Size
    gathered_bytes: int
    stays: bool = False


class Handle(Protocol):
    """A gather that has begun."""

    def wait(self) -> None:
        """Return when the parameter is whole for what is computed from here on."""


class Shards(Protocol):
    """Somebody who has sharded a model's parameters, asked to gather them by `memplan.apply(..., shards=)`.

    resident_bytes: held on the device throughout: this rank's parts of parameters and gradients, and buffers to reduce.
    speed: of gathers. attributes: names of those attributes of modules that belong to it, which change without changing
    what forward computes.

    Every rank of the group must call `gather` for the same parameters in the same order.
    """

    @property
    def resident_bytes(self) -> int: ...
    @property
    def speed(self) -> GatherSpeed: ...
    @property
    def attributes(self) -> Collection[str]: ...

    def shard(self, parameter: nn.Parameter) -> Shard | None:
        """What a parameter is as a whole; None for one that is not sharded."""

    def owns(self, hook: Any) -> bool:
        """Whether a hook of a module is there to gather for a forward that runs without a plan."""

    def tracing(self) -> AbstractContextManager[None]:
        """Those hooks, and reading a parameter, gather nothing for as long: a rank that looks at the model is alone.
        What else they do, they do: autograd adds up gradients in another order where they put nodes of their own
        between modules. May be entered within itself."""

    def begin(self) -> None:
        """A planned forward or backward begins: whole are those that stay, and those that `gather` made whole."""

    def gather(self, parameter: nn.Parameter) -> Handle:
        """Begin to make a parameter whole. One that is on its way already is given the same handle."""

    def release(self, parameter: nn.Parameter) -> None:
        """Free the whole."""

    def accepting(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Parameters have their whole shape for as long, at no memory, so that autograd can hand them gradients."""
