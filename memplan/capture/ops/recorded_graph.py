"""The autograd graph of one run of an island, apart from the tensors that it saves."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from memplan.capture.ops.edges import nodes_behind
from memplan.capture.ops.places import Place
from memplan.capture.ops.saver import Saver
from memplan.capture.ops.sizes import Numbers
from memplan.capture.ops.ways import Refusal


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
