"""What tracing a step starts from and what it gives: surroundings and autocast in, a raw trace out."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from memplan.capture.trace.call import OutputTemplate


@dataclass(frozen=True, slots=True)
class Autocast:
    """The autocast state of one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool

    @staticmethod
    def ambient(device_type: str) -> Autocast:
        return Autocast(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
        )

    @staticmethod
    def of_backward(device_type: str) -> Autocast | None:
        """The state in which backward runs, where that is asked in the middle of it. None: autocast is off, as it is
        where backward is called after the context of forward."""
        return Autocast.ambient(device_type) if torch.is_autocast_enabled(device_type) else None

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(
            self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache_enabled
        )


class GradientLayout(Protocol):
    """Shape, strides and dtype of a gradient that arrives."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """What forward read from tensor data, and from where: (file, line) of each call that led there."""

    value: Any
    place: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class PartSurroundings:
    """What a part of a larger step must know of it, to be captured on its own.

    tangents: the outputs that backward reaches, and the layout of the gradient that arrives for each.
    uses: for inputs, by position, how many ops in here read it, where they are several. Autograd adds each of their
    gradients to what has come from readers outside, one by one, so each has to be handed over by itself: as the
    gradient of one more input, after all others, called "name (use 2)" and so on.
    answers: what an earlier trace of this call read from tensors, where its inputs' data is not at hand. whole: there
    is no step around, and the tangents are all that is said.
    """

    tangents: Mapping[int, GradientLayout]
    uses: Mapping[int, int] = field(default_factory=dict)
    answers: tuple[Answer, ...] = ()
    whole: bool = False

    def further_uses(self) -> list[tuple[int, int]]:
        """(position of the input, number of the use) of each gradient beyond the first."""
        return [(position, use) for position, count in self.uses.items() for use in range(2, count + 1)]


@dataclass(frozen=True, slots=True)
class ScalarRead:
    """A value that forward read from tensor data: the node that was read, and what it was."""

    node: fx.Node
    value: Any
    where: str


@dataclass(frozen=True, slots=True)
class Decision:
    """A boolean that forward computed, from parameters too, and branched on: the output that holds it, its value."""

    output: int
    value: bool
    where: str


@dataclass(frozen=True, slots=True)
class AttributeRead:
    """A number that forward read from a tensor attribute (neither parameter nor buffer) of a module."""

    module: str
    key: str
    value: Any
    where: str


@dataclass(slots=True)
class RawTrace:
    """The traced step. Placeholders are parameters, buffers and input tensors, in this order.

    boundary: the last node of the forward pass. tangents: nodes that stand for the gradients handed in, by output.
    gradients: one node (or None) per parameter that requires grad, then per input that requires grad.
    layers: module path of each forward node. reassigned: buffers that forward puts other tensors into, with the output
    that holds the new one. answers: to all reads of tensors, those of forward first: so many are `forward_reads`.
    decisions: branches that were taken for granted by them.
    arrivals: parameters in the order in which autograd hands over their gradients. summed: those with gradients from
    several uses. inner: the outputs from which others derive, and whether one that backward starts from does. odd_sums:
    (number of an addition in backward, its node, that of its first operand) where the strides would be others, were it
    made in place.
    """

    module: fx.GraphModule
    parameter_names: tuple[str, ...]
    buffer_names: tuple[str, ...]
    boundary: fx.Node
    template: OutputTemplate
    outputs: tuple[fx.Node, ...]
    requires_grad: tuple[bool, ...]
    tangents: dict[int, fx.Node]
    gradients: dict[str, fx.Node | None]
    layers: dict[str, str]
    scalar_reads: tuple[ScalarRead, ...]
    attribute_reads: tuple[AttributeRead, ...]
    reassigned: dict[str, int]
    answers: tuple[Answer, ...]
    forward_reads: int
    decisions: tuple[Decision, ...]
    arrivals: tuple[str, ...]
    summed: tuple[str, ...]
    inner: dict[int, bool]
    odd_sums: tuple[tuple[int, fx.Node, fx.Node], ...]
