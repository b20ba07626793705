"""Parameters that are sharded over ranks: what memplan has to know of them, and what it asks for.

Between uses each rank holds a part, and the `nn.Parameter` itself is empty. A planned step gathers such a parameter
when its plan says so, reads it, and releases it. The engine that sharded it reduces the gradients that are handed
over.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from memplan.problem.data import GatherSpeed


class NetworkSpeed(NamedTuple):
    """How fast collectives are, by kind. Bytes are those of the whole: what a gather gives, or a reduction takes."""

    all_gather: GatherSpeed = GatherSpeed()
    reduce_scatter: GatherSpeed = GatherSpeed()
    all_reduce: GatherSpeed = GatherSpeed(bytes_per_s=5e8)

    @staticmethod
    def of(gather: GatherSpeed) -> NetworkSpeed:
        """The speeds on a ring of ranks, which sends all parts but one for a gather, and twice for an all-reduce."""
        return NetworkSpeed(gather, gather, GatherSpeed(gather.bytes_per_s / 2, gather.latency_s))

    def time_s(self, kind: str, whole_bytes: int) -> float:
        """Seconds of a collective. kind: of its op. One of no kind that is known here takes as long as a gather."""
        known = (getattr(self, name) for name in ("reduce_scatter", "all_reduce") if name in kind)
        speed = next(known, self.all_gather)
        return float(speed.latency_s + whole_bytes / speed.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Shard:
    """A parameter of which each rank holds a part.

    - shape: of the whole, which is contiguous.
    - gathered_bytes: what the whole takes on the device, padding included.
    - stays: it is whole between steps too, and plans never release it.
    """

    shape: torch.Size
    gathered_bytes: int
    stays: bool = False


class Handle(Protocol):
    """A gather that has begun."""

    def wait(self) -> None:
        """Return when the parameter is whole for what is computed from here on."""


class Shards(Protocol):
    """The interface to the engine that has sharded a model's parameters, for `memplan.apply(..., shards=)`.

    - resident_bytes: held on the device throughout: this rank's parts of parameters and gradients, and buffers to
      reduce.
    - speed: of gathers.
    - takes_gradients: whether gradients that are handed over are its own, and not the parameters' `.grad`.
    - way: whether backward reduces gradients, and by what it divides them. A plan is for one way.
    - attributes: names of attributes of modules that belong to it, which change without changing what forward computes.

    Every rank of the group must call `gather` for the same parameters in the same order.
    """

    @property
    def resident_bytes(self) -> int: ...
    @property
    def speed(self) -> GatherSpeed: ...
    @property
    def takes_gradients(self) -> bool: ...
    @property
    def way(self) -> Any: ...
    @property
    def attributes(self) -> Collection[str]: ...

    def shard(self, parameter: nn.Parameter) -> Shard | None:
        """What a parameter is as a whole; None for one that is not sharded."""

    def owns(self, hook: Any) -> bool:
        """Whether a hook of a module is there to gather for a forward that runs without a plan."""

    def unplanned_because(self) -> str | None:
        """What goes on just now that no plan follows, in words: calls run the model's own forward. None: nothing."""

    def tracing(self) -> AbstractContextManager[None]:
        """A context in which those hooks, and reading a parameter, gather nothing.

        A rank that runs the model to plan it is alone. Nodes that the hooks put between modules have to stay, because
        autograd adds up gradients in another order without them. The context may be entered within itself.
        """

    def begin(self, used: Collection[int]) -> None:
        """Prepare for a planned forward or backward. used: ids of the constants of its plan.

        From then on only parameters that stay, and those that `gather` made whole, are whole.
        """

    def end(self, way: Any, used: Collection[int]) -> None:
        """Note that a planned backward is over. way: of its plan. used: ids of constants that it has used."""

    def gather(self, parameter: nn.Parameter) -> Handle:
        """Begin to make a parameter whole. A gather that is under way already gives its handle again."""

    def release(self, parameter: nn.Parameter) -> None:
        """Free the whole parameter."""

    def accepting(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """A context in which parameters have their whole shape, without memory, so that autograd accepts gradients."""
