"""What tracing a step starts from and what it gives: surroundings and autocast in, a raw trace out."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from memplan.capture.attributes.code_facts import NamedOn
from memplan.capture.ops.island import Island
from memplan.capture.ops.sizes import SymbolicInputs
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
        """The autocast under which backward runs, asked in the middle of it; None where autocast is off.

        It is off where backward is called after the context of forward.
        """
        return Autocast.ambient(device_type) if torch.is_autocast_enabled(device_type) else None

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(
            self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache_enabled
        )


@dataclass(frozen=True, slots=True)
class GradientLayout:
    """The layout of a gradient that arrives at an output."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(gradient: torch.Tensor) -> GradientLayout:
        return GradientLayout(tuple(gradient.shape), tuple(gradient.stride()), gradient.dtype)


def line_of_place(where: str) -> str:
    """The source line of a place in forward: "block.0 at net.py:3: x = ..." and "at net.py:3: x = ..." have one."""
    return where.partition("at ")[2]


@dataclass(frozen=True, slots=True)
class Answer:
    """What forward read from tensor data, and where: (file, line) of each call that led there."""

    value: Any
    place: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Guard:
    """A number that forward read from the data of its inputs, or the shape of a result that depends on it.

    - node: what was read.
    - value: the number or shape that was read; None for a number or a size that may vary.
    - where: the place in forward, in words.
    - nodes: these compute it again; known once the trace is over.
    """

    node: fx.Node
    value: Any
    where: str
    nodes: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """A boolean that forward computed, from parameters too, and branched on.

    - output: the output that holds it.
    - value: what it was.
    - where: the place in forward, in words.
    """

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


@dataclass(slots=True, kw_only=True)
class StepNotes:
    """What is noted while a step is traced, and stays with the step.

    - reassigned: buffers that forward puts other tensors into, with the position of the output that holds the new one.
    - decisions: branches that the trace has taken from an earlier run. What each depends on is an output, too.
    - summed: parameters whose gradients autograd adds up from several uses.
    - inner: outputs from which others derive, by position; True where one of these others is a start of backward. The
      gradient that is handed in for such an output is not all of it.
    - specs: of gradients that are DTensors, by parameter: which ranks have which parts of them.
    """

    reassigned: dict[str, int] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    summed: tuple[str, ...] = ()
    inner: dict[int, bool] = field(default_factory=dict)
    specs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Noted(StepNotes):
    """What is noted while a step is traced, and what its trace has of that.

    - requires_grad: of the outputs.
    - tangents: nodes that stand for the gradients handed in, by output.
    - scalar_reads, attribute_reads: numbers that forward read.
    - tensor_reads: attributes of parameters, buffers and inputs that it read: see `StandIns`.
    - answers, forward_reads: what was read from tensors; the first `forward_reads` of these were read by forward.
    - arrivals: parameters in the order in which autograd hands over their gradients.
    - odd_sums: (number of an addition in backward, its node, that of its first operand) where its strides would be
      others if it were made in place.
    - checkpointed: nodes that a checkpoint of forward would run twice, and whether it draws the same numbers again.
    """

    requires_grad: tuple[bool, ...] = ()
    tangents: dict[int, fx.Node] = field(default_factory=dict)
    scalar_reads: list[Guard] = field(default_factory=list)
    attribute_reads: list[AttributeRead] = field(default_factory=list)
    tensor_reads: dict[tuple[str, str], Any] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    forward_reads: int = 0
    arrivals: list[str] = field(default_factory=list)
    odd_sums: list[tuple[int, fx.Node, fx.Node]] = field(default_factory=list)
    checkpointed: dict[fx.Node, bool] = field(default_factory=dict)


@dataclass(slots=True)
class RawTrace(Noted):
    """The traced step. Placeholders are parameters, buffers and input tensors, in this order.

    - boundary: the last node of the forward pass.
    - gradients: one node (or None) per parameter that requires grad, then per input that requires grad.
    - layers: module path of each forward node.
    - symbolic: symbols in the place of sizes that vary; None where none do.
    - fixed: (symbol, place) where PyTorch came to depend on the value of one.
    - islands: calls that are ops of their own, by the name that these ops have for it.
    - told: islands with the reason for each, in words.
    - handed: names that lines of forward only hand on to islands.
    """

    module: fx.GraphModule
    parameter_names: tuple[str, ...]
    buffer_names: tuple[str, ...]
    boundary: fx.Node
    template: OutputTemplate
    outputs: tuple[fx.Node, ...]
    gradients: dict[str, fx.Node | None]
    layers: dict[str, str]
    symbolic: SymbolicInputs | None = None
    fixed: tuple[tuple[str, str], ...] = ()
    islands: Mapping[str, Island] = field(default_factory=dict)
    told: tuple[str, ...] = ()
    handed: frozenset[NamedOn] = frozenset()
