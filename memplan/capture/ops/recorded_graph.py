"""Autograd graphs: their edges, and what one run of an island leaves for its backward, with the tensors it saves.

Of the nodes that are ready, autograd's engine always runs the one that was made last. Every node was made after those
that it hands its gradients to. So a backward pass runs nodes in the reverse of the order in which they were made, and
gradients for one tensor are added in that order.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from memplan import torch_private as private
from memplan.capture.ops.island_call import ForwardFacts
from memplan.capture.ops.layout import Layout, Place, PlaceFinder, span, storage_key
from memplan.capture.ops.sizes import Numbers

Edge = tuple[Any, int]  # a node of the autograd graph, and which of its gradients


class Edges:
    """The graph behind some tensors. It keeps the graph's nodes alive.

    - functions: nodes of autograd functions that are written in Python.
    - leaves: the nodes in which gradients end: one for each leaf that requires grad.
    """

    def __init__(self, starts: Iterable[torch.Tensor], since: int = 0) -> None:
        """since: leave out nodes that are older than that, see `next_node`."""
        self._into: dict[Edge, list[Edge]] = {}
        nodes = list(nodes_behind((get_gradient_edge(t).node for t in starts if t.requires_grad), since))
        for node in nodes:
            for index, (target, number) in enumerate(node.next_functions):
                if target is not None:
                    self._into.setdefault((target, number), []).append((node, index))
        self.functions: list[Any] = [node for node in nodes if hasattr(type(node), "_forward_cls")]
        self.leaves = {node for node in nodes if not node.next_functions}

    def to(self, tensor: torch.Tensor) -> list[Edge]:
        """(node, which of its gradients) for each gradient that is added up for `tensor`, in that order."""
        target = get_gradient_edge(tensor)
        return self.into(target.node, target.output_nr)

    def into(self, node: Any, number: int) -> list[Edge]:
        """(node, which of its gradients) for the tensor that is result `number` of `node`."""
        return sorted(self._into.get((node, number), []), key=lambda edge: (-edge[0]._sequence_nr(), edge[1]))

    def uses(self, tensor: torch.Tensor, starts: Iterable[Any]) -> int:
        """How many gradients are added up for `tensor`, which may be among the starts."""
        return len(self.to(tensor)) + any(start is tensor for start in starts)

    def divert(self, edge: GradientEdge) -> list[torch.Tensor]:
        """A list that takes all gradients for a tensor as they come; autograd adds them up no more."""
        found: list[torch.Tensor] = []
        by_node: dict[Any, list[int]] = {}
        for node, index in self.into(edge.node, edge.output_nr):
            by_node.setdefault(node, []).append(index)

        def hook(results: tuple[Any, ...], given: tuple[Any, ...], indices: Sequence[int]) -> tuple[Any, ...]:
            found.extend(results[index] for index in indices if results[index] is not None)
            return tuple(None if index in indices else result for index, result in enumerate(results))

        for node, indices in by_node.items():
            node.register_hook(functools.partial(hook, indices=indices))
        return found


def next_node() -> int:
    """The number of the node that autograd makes next on this thread. Nodes of leaves have a higher number than any."""
    with torch.enable_grad():
        return 1 + int(get_gradient_edge(torch.empty(0, requires_grad=True).view(-1)).node._sequence_nr())


def nodes_behind(starts: Iterable[Any], since: int = 0) -> Iterator[Any]:
    """The nodes of an autograd graph from some nodes on, each once. since: but for older ones, see `next_node`."""
    pending = [node for node in dict.fromkeys(starts) if node._sequence_nr() >= since]
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        for target, _ in node.next_functions:
            if target is not None and target not in seen and target._sequence_nr() >= since:
                seen.add(target)
                pending.append(target)


def graph_behind(tensors: Iterable[torch.Tensor]) -> int:
    """A hash of the autograd graph behind tensors: names of its nodes, and which of their gradients go nowhere.

    Where views were written to, nodes of one gradient are left out: in a trace they are others, for the same views.
    """
    nodes = nodes_behind(get_gradient_edge(t).node for t in tensors if t.requires_grad)
    found = [(node.name(), *(target is None for target, _ in node.next_functions)) for node in nodes]
    views = any(name == "torch::autograd::CopySlices" for name, *_ in found)
    return hash(tuple(one for one in found if not views or len(one) != 2))


_NUMPY_TYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")  # that PyTorch has
_ALIGNED_BYTES = 512  # where tensors begin in a buffer
_REFERENCES = 2  # that `sys.getrefcount(container[key])` counts where the container alone holds an object: its own too
_SHARED = (nn.Module, type, types.ModuleType, types.FunctionType)  # objects that are not looked into


class Saver:
    """Takes what the graph of one run saves: as it is, or copied to a buffer.

    - tensors: what was saved, in order, where there is no buffer.
    - places: where it lies, where there is one; the tensor itself where the buffer has no room for it.
    - beside_bytes: what the buffer has no room for.
    """

    def __init__(
        self, buffer: torch.Tensor | None = None, given: Sequence[torch.Tensor] = (), facts: ForwardFacts | None = None
    ) -> None:
        """facts: as planned."""
        self.buffer, self.tensors, self.places = buffer, list[torch.Tensor](), list[Place | torch.Tensor]()
        self.beside_bytes = self.end_bytes = 0
        kept = () if facts is None else facts.kept
        known = {("input", i): t for i, t in enumerate(given) if ("input", i) in kept}
        self._given, self._made = PlaceFinder(known), 0 if facts is None else facts.made
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


@dataclass(frozen=True, slots=True)
class _Taken:
    """Stands for a tensor that was taken, or an array of NumPy. place: its number among the saved tensors."""

    place: int
    is_array: bool = False


@dataclass(eq=False, slots=True)
class RecordedGraph:
    """The autograd graph of one run, without tensors.

    - begin, ends: at the inputs that need gradients, and at the outputs that have them.
    - attributes: (dict or list, key, `_Taken` or a tuple with these) of tensors that functions have in their contexts.
    - unpacked: the saved tensors, while it runs. Hooks of its nodes hold this list, and must not hold the graph itself.
    - saved: where each saved tensor lies; the tensor itself where the plan does not know of it.
    - uses: by input, how many gradients it gets.
    - diverted: by input, its gradients one by one, while it runs.
    - numbers: of the sizes that it ran at, if its island has rules.
    - wrote: the run wrote to what its island does not say that it writes to.
    """

    begin: list[GradientEdge] = field(default_factory=list)
    ends: list[GradientEdge | None] = field(default_factory=list)
    attributes: list[tuple[Any, Any, Any]] = field(default_factory=list)
    unpacked: list[torch.Tensor] = field(default_factory=list)
    saved: Sequence[Place | torch.Tensor] = ()
    uses: tuple[int, ...] = ()
    diverted: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    numbers: Numbers | None = None
    wrote: bool = False

    @contextlib.contextmanager
    def holding(self, saved: Sequence[torch.Tensor]) -> Iterator[None]:
        """A context in which the graph has the tensors that it saved."""
        self.unpacked += saved
        for container, key, left in self.attributes:
            container[key] = _with_tensors(left, saved)
        try:
            yield
        finally:
            self.unpacked.clear()
            for found in self.diverted.values():
                found.clear()
            for container, key, _ in self.attributes:
                with contextlib.suppress(IndexError):  # backward has taken it out of its list
                    container[key] = None


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
    """Take tensors and NumPy arrays out of the contexts of functions, and add them to what was saved.

    `ctx.rows = [a, b]` counts as `ctx.row = a` does; so do tuples, dicts, and attributes of an object, if nothing else
    holds the list, the dict or the object.
    """
    for node in nodes_behind(edge.node for edge in graph.ends if edge is not None):
        if hasattr(type(node), "_forward_cls"):
            _take(vars(node), graph, saver)


def _take(container: Any, graph: RecordedGraph, saver: Saver) -> None:
    """Take tensors out of a dict or a list, and out of what it alone holds."""
    for key in list(container) if isinstance(container, dict) else range(len(container)):
        left = _without_tensors(container, key, True, graph, saver)
        if left is not container[key]:
            graph.attributes.append((container, key, left))
            container[key] = None


def _without_tensors(container: Any, key: Any, alone: bool, graph: RecordedGraph, saver: Saver) -> Any:
    """What `container[key]` is with `_Taken` for tensors. alone: nothing but the context holds the container."""
    alone = alone and sys.getrefcount(container[key]) <= _REFERENCES
    value = container[key]
    if isinstance(value, torch.Tensor) and not isinstance(value, private.FakeTensor):
        return _Taken(saver.add(value.detach()))
    if alone and type(value) is np.ndarray and (tensor := _tensor_of(value)) is not None:
        return _Taken(saver.add(tensor), True)
    if isinstance(value, tuple):
        parts = [_without_tensors(value, i, alone, graph, saver) for i in range(len(value))]
        return value if all(map(operator.is_, parts, value)) else getattr(value, "_make", type(value))(parts)
    if alone and isinstance(value, (dict, list)):
        _take(value, graph, saver)
    elif alone and hasattr(value, "__dict__") and not isinstance(value, _SHARED):
        _take(vars(value), graph, saver)
    return value


def _tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """A tensor in the memory of an array: that of the tensor behind it, if there is one.

    None if it is part of an array that something else holds, or if PyTorch has no such tensors.
    """
    if array.dtype not in _NUMPY_TYPES or not array.flags.writeable or min(array.strides, default=0) < 0:
        return None
    tensor: torch.Tensor = torch.from_numpy(array)
    base: Any = array
    while isinstance(base, np.ndarray):
        if isinstance(base.base, np.ndarray) and sys.getrefcount(base.base) > _REFERENCES:
            return None
        base = base.base
    if isinstance(base, torch.Tensor) and base.dtype == tensor.dtype:
        offset = (tensor.data_ptr() - base.untyped_storage().data_ptr()) // tensor.element_size()
        return base.detach().as_strided(tensor.shape, tensor.stride(), offset)
    return tensor


def _with_tensors(left: Any, saved: Sequence[torch.Tensor]) -> Any:
    """The opposite of `_without_tensors`."""
    if isinstance(left, _Taken):
        return saved[left.place].numpy() if left.is_array else saved[left.place]
    if isinstance(left, tuple):
        return getattr(left, "_make", type(left))([_with_tensors(part, saved) for part in left])
    return left
