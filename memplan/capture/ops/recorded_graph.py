"""What one run of an island leaves for its backward: its autograd graph, and the tensors that the graph saves."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from memplan import torch_private as private
from memplan.capture.ops.edges import nodes_behind
from memplan.capture.ops.island_call import ForwardFacts
from memplan.capture.ops.layout import storage_key
from memplan.capture.ops.places import Layout, Place, PlaceFinder, span
from memplan.capture.ops.sizes import Numbers
from memplan.capture.ops.ways import Refusal

_ALIGNED_BYTES = 512  # where tensors begin in a buffer


class Saver:
    """Takes what the graph of one run saves: as it is, or copied to a buffer.

    - tensors: what was saved, in order, where there is no buffer.
    - places: where it lies, where there is one; the tensor itself where the buffer has no room for it.
    - beside_bytes: what the buffer has no room for.
    """

    def __init__(
        self,
        buffer: torch.Tensor | None = None,
        given: Sequence[torch.Tensor] = (),
        planned: ForwardFacts | None = None,
    ) -> None:
        self.buffer, self.tensors, self.places = buffer, list[torch.Tensor](), list[Place | torch.Tensor]()
        self.beside_bytes = self.end_bytes = 0
        kept = () if planned is None else planned.kept
        known = {("input", i): t for i, t in enumerate(given) if ("input", i) in kept}
        self._given, self._made = PlaceFinder(known), 0 if planned is None else planned.made
        self._known: dict[Any, int] = {}  # where the buffer has what lies in which memory
        self._alive: list[Any] = []  # so that no other memory is known by the same key

    def let_go(self) -> None:
        """Hold no tensors any more: hooks of the graph hold this."""
        self.tensors.clear()
        self.places.clear()
        self.buffer, self._given = None, PlaceFinder({})

    def add(self, tensor: torch.Tensor) -> int:
        """Take a tensor. Gives its number."""
        if self.buffer is None:
            self.tensors.append(tensor)
            return len(self.tensors) - 1
        self.places.append(self._given.found(tensor) or self._copied(tensor, self.buffer))
        return len(self.places) - 1

    def _copied(self, tensor: torch.Tensor, buffer: torch.Tensor) -> Place | torch.Tensor:
        if tensor.device != buffer.device or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return tensor.clone()
        elements = span(tensor)
        key = storage_key(tensor), tensor.storage_offset(), elements, tensor.dtype, tensor._version
        if key not in self._known:
            begin_bytes = -(-self.end_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
            end_bytes = begin_bytes + elements * tensor.element_size()
            if end_bytes > buffer.numel():
                self.beside_bytes += elements * tensor.element_size()
                return tensor.clone()
            flat = buffer[begin_bytes:end_bytes].view(tensor.dtype)
            flat.copy_(tensor.as_strided((elements,), (1,), tensor.storage_offset()))
            self._alive.append(private.known_storage(tensor))
            self._known[key], self.end_bytes = begin_bytes, end_bytes
        return Place(("result", self._made), Layout.of(tensor), self._known[key])


def bytes_for(saved: Sequence[torch.Tensor]) -> int:
    """Bytes of a buffer that has room for copies of these tensors."""
    spans = {(storage_key(t), t.storage_offset(), span(t), t.dtype): span(t) * t.element_size() for t in saved}
    return sum(-(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for size_bytes in spans.values())


@dataclass(eq=False, slots=True)
class RecordedGraph:
    """The autograd graph of one run, without tensors.

    - begin, ends: at the inputs that need gradients, and at the outputs that have them.
    - attributes: (node, name, which of the saved tensors) of tensors that a function has as attributes of its context.
    - unpacked: the saved tensors, while it runs. Hooks of its nodes hold this list, and must not hold the graph itself.
    - saved: where each saved tensor lies; the tensor itself where the plan does not know of it.
    - uses: by input, how many gradients it gets.
    - diverted: by input, its gradients one by one, while it runs.
    - numbers: of the sizes that it ran at, if its island has rules.
    """

    begin: list[GradientEdge] = field(default_factory=list)
    ends: list[GradientEdge | None] = field(default_factory=list)
    attributes: list[tuple[Any, str, int]] = field(default_factory=list)
    unpacked: list[torch.Tensor] = field(default_factory=list)
    saved: Sequence[Place | torch.Tensor] = ()
    uses: tuple[int, ...] = ()
    diverted: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    numbers: Numbers | None = None

    @contextlib.contextmanager
    def holding(self, saved: Sequence[torch.Tensor]) -> Iterator[None]:
        """A context in which the graph has the tensors that it saved."""
        self.unpacked += saved
        for node, name, place in self.attributes:
            setattr(node, name, saved[place])
        try:
            yield
        finally:
            self.unpacked.clear()
            for found in self.diverted.values():
                found.clear()
            for node, name, _ in self.attributes:
                setattr(node, name, None)


_GRAPHS: dict[int, RecordedGraph] = {}  # by the number on the ticket
_NUMBERS = itertools.count()


def ticket_of(graph: RecordedGraph) -> torch.Tensor:
    """A tensor that stands for a graph, which lives as long."""
    number = next(_NUMBERS)
    _GRAPHS[number] = graph
    ticket = torch.tensor(number, device="cpu")
    weakref.finalize(ticket, _GRAPHS.pop, number, None).atexit = False
    return ticket


def graph_of(ticket: torch.Tensor) -> RecordedGraph:
    """The graph that a ticket stands for."""
    return _GRAPHS[int(ticket)]


def take_attributes(graph: RecordedGraph, saver: Saver) -> None:
    """Take tensors out of the contexts of functions, and add them to what was saved. Raises a Refusal."""
    for node in nodes_behind(edge.node for edge in graph.ends if edge is not None):
        if hasattr(type(node), "_forward_cls"):
            for name, value in vars(node).items():
                if isinstance(value, torch.Tensor):
                    graph.attributes.append((node, name, saver.add(value.detach())))
                elif isinstance(value, tuple) and any(isinstance(v, torch.Tensor) for v in value):
                    raise Refusal(
                        f"{type(node).__name__} keeps tensors in a tuple, ctx.{name}; hand them to save_for_backward"
                    )
    for node, name, _ in graph.attributes:
        setattr(node, name, None)
