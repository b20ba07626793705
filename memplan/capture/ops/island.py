"""A call that can't be traced, as two ops of a plan, whose Python runs in each step as its author wrote it.

    y = RawTanh.apply(x)        # an autograd function that reads x's memory by NumPy

    forward op:  x -> y, ticket                  backward op:  ticket, y, gradient of y -> gradient of x

- The forward op runs the call under autograd. Whatever its graph saves goes through a hook, so the graph holds places
  instead of tensors. Results of the op are the outputs and the saved tensors that lie in no input and no output. They
  are values like any others: kept, dropped, made again, or copied to the host.
- The ticket is a tensor of 8 bytes that stands for the graph. The graph lives as long as the ticket.
- The backward op puts the saved tensors back into the graph, by the same hook, and runs it.

Islands are run outside of PyTorch's dispatcher: kernels of ops run beneath autograd, and record no graph.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils import _pytree as pytree

from memplan import torch_private as private
from memplan.capture.ops.layout import storage_key
from memplan.errors import PlanMismatch, UnsupportedModel

Source = tuple[str, int]  # "input", "result" (of the forward op) or "gradient" (that is handed in), and which of them


class NoIsland(Exception):
    """A call can't be an op, for the reason that the message says."""


class OtherIsland(UnsupportedModel):
    """A call gave, or saved, other tensors in this run than when it was looked at. function: what was called."""

    def __init__(self, message: str, function: str) -> None:
        super().__init__(message)
        self.function = function


class Layout(NamedTuple):
    """All of a tensor but its contents."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device_type: str

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        return Layout(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.device.type)

    def empty(self, device: torch.device) -> torch.Tensor:
        """A tensor of this layout. device: that of the plan; the tensor may be on its host."""
        on = device if device.type == self.device_type else torch.device(self.device_type)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=on)


class Place(NamedTuple):
    """Where a tensor lies. offset_bytes: from where the tensor begins in whose memory it lies."""

    source: Source
    layout: Layout
    offset_bytes: int

    def seen_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in this place. tensor: the source."""
        if self.offset_bytes == 0 and Layout.of(tensor) == self.layout:
            return tensor
        layout = self.layout
        offset_bytes = tensor.storage_offset() * tensor.element_size() + self.offset_bytes
        empty = torch.empty(0, dtype=layout.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), offset_bytes // layout.dtype.itemsize, layout.shape, layout.stride)

    def view_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in this place, in a trace. Raises UnsupportedModel where it has another dtype than its source."""
        layout = self.layout
        if self.offset_bytes == 0 and (tensor.dtype, tensor.shape, tensor.stride()) == layout[:3]:
            return tensor
        if tensor.dtype != layout.dtype:
            raise UnsupportedModel(f"an opaque call returns {tensor.dtype} as {layout.dtype}")
        offset = int(tensor.storage_offset()) + self.offset_bytes // layout.dtype.itemsize
        return tensor.as_strided(layout.shape, layout.stride, offset)


@dataclass(frozen=True, slots=True)
class ForwardFacts:
    """What one run of a call gave.

    - outputs: where each output lies; of what is no tensor, the thing itself.
    - spec: how outputs are nested.
    - differentiable: by output.
    - saved: where each tensor lies that its graph saves.
    - results: layouts of what the forward op makes.
    """

    outputs: tuple[Any, ...]
    spec: pytree.TreeSpec
    differentiable: tuple[bool, ...]
    saved: tuple[Place, ...]
    results: tuple[Layout, ...]

    @property
    def kept(self) -> tuple[Source, ...]:
        """Inputs and results that backward reads, each once."""
        return tuple(dict.fromkeys(place.source for place in self.saved))


@dataclass(frozen=True, slots=True)
class BackwardFacts:
    """What one run of the backward of a call gave.

    - given: which outputs it was given gradients of.
    - gradients: where the gradient of each input that needs one lies; None: there is none.
    - results: layouts of what the backward op makes.
    """

    given: tuple[bool, ...]
    gradients: tuple[Place | None, ...]
    results: tuple[Layout, ...]


@dataclass(eq=False, slots=True)
class _RecordedGraph:
    """The autograd graph of one run, without tensors.

    - begin, ends: at the inputs that need gradients, and at the outputs that have them.
    - attributes: (node, name, which of the saved tensors) of tensors that a function has as attributes of its context.
    - unpacked: the saved tensors, while it runs. Hooks of its nodes hold this list, and must not hold the graph itself.
    """

    begin: list[GradientEdge]
    ends: list[GradientEdge | None]
    attributes: list[tuple[Any, str, int]]
    unpacked: list[torch.Tensor] = field(default_factory=list)

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
            for node, name, _ in self.attributes:
                setattr(node, name, None)


_GRAPHS: dict[int, _RecordedGraph] = {}  # by the number on the ticket
_NUMBERS = itertools.count()


def _ticket(graph: _RecordedGraph) -> torch.Tensor:
    number = next(_NUMBERS)
    _GRAPHS[number] = graph
    ticket = torch.tensor(number, device="cpu")
    weakref.finalize(ticket, _GRAPHS.pop, number, None).atexit = False
    return ticket


class _Enter(torch.autograd.Function):
    """Lets a graph begin at tensors that it does not hold. A leaf would be held by its accumulator."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        return (None, *(None for _ in grads))


class IslandCost(NamedTuple):
    """What one run of an op takes. scratch_bytes: held at its peak beyond its results."""

    time_s: float
    scratch_bytes: int


_NOTHING = IslandCost(0.0, 0)


@dataclass(eq=False)
class Island:
    """One call that can't be traced.

    - name: no other call of the step has it.
    - function: what is called. title: it and the line that calls it, for messages.
    - static: arguments that are no tensors; None in the place of one.
    - module: path of the module that is called; None for a function.
    - call: takes that module and the tensors, and gives what was returned.
    - named: takes the model, and gives the Python attributes that each of the tensors has.
    - inputs, needs: layouts of the tensors, and which of them get gradients.
    - around, around_backward: make the contexts in which it and its backward run. backward_mode: names the latter.
    - attributes: of a module, which must not have changed where it runs again in a step.
    - device: of the plan.
    - forward_facts, backward_facts: what runs of it gave, and have to give again.
    - random: it draws from PyTorch's generators.
    - repeats: it may run again, and gives the same bits then.
    - forward_cost, backward_cost: what a run took.
    """

    name: str
    function: str
    title: str
    static: tuple[Any, ...]
    module: str | None
    call: Callable[..., Any]
    named: Callable[[nn.Module], Sequence[Mapping[str, Any]]]
    inputs: tuple[Layout, ...]
    needs: tuple[bool, ...]
    device: torch.device
    around: Callable[[], AbstractContextManager[Any]]
    attributes: Callable[[nn.Module], Any] = type
    around_backward: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    backward_mode: str = ""
    forward_facts: ForwardFacts | None = None
    backward_facts: BackwardFacts | None = None
    random: bool = False
    repeats: bool = True
    forward_cost: IslandCost = _NOTHING
    backward_cost: IslandCost = _NOTHING
    _seen: weakref.WeakKeyDictionary[nn.Module, Any] = field(default_factory=weakref.WeakKeyDictionary)

    # -- forward ----------------------------------------------------------------------------------------------------

    def forward(self, model: nn.Module, tensors: Sequence[torch.Tensor], again: bool = False) -> list[torch.Tensor]:
        """Run the forward op: its results, then the ticket. again: it has run in this step before.

        Raises OtherIsland or NoIsland, and PlanMismatch where it should give what it gave before and would not.
        """
        module = None if self.module is None else model.get_submodule(self.module)
        if module is not None:
            attributes = self.attributes(module)
            if again and self._seen.get(module) != attributes:
                raise PlanMismatch(
                    f"modes or attributes of {self.title} have changed since its forward, and it runs again in "
                    "backward. Change them after backward, or plan for a larger budget"
                )
            self._seen[module] = attributes
        outputs, saved, graph, spec = self._recorded(model, module, tensors)
        places, results = _PlaceFinder({("input", i): t for i, t in enumerate(tensors)}), list[torch.Tensor]()
        places_of_outputs = tuple(
            places.of(o, "result", results) if isinstance(o, torch.Tensor) else o for o in outputs
        )
        places_of_saved = tuple(places.of(t, "result", results) for t in saved)
        differentiable = tuple(edge is not None for edge in graph.ends)
        facts = ForwardFacts(places_of_outputs, spec, differentiable, places_of_saved, tuple(map(Layout.of, results)))
        if self.forward_facts is None:
            self.forward_facts = facts
        elif facts != self.forward_facts:
            raise OtherIsland(f"{self.title} gives, or saves, other tensors than in its first run", self.function)
        return [*results, _ticket(graph)]

    def _recorded(
        self, model: nn.Module, module: nn.Module | None, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[Any], list[torch.Tensor], _RecordedGraph, pytree.TreeSpec]:
        """Run the call. Gives its outputs, what its graph saved, the graph, and how the outputs were nested."""
        saved, unpacked = list[torch.Tensor](), list[torch.Tensor]()
        graph = _RecordedGraph([], [], [], unpacked)

        def pack(tensor: torch.Tensor) -> int | torch.Tensor:
            if isinstance(tensor, private.FakeTensor):  # higher-order ops trace their branches
                return tensor
            saved.append(tensor.detach())
            return len(saved) - 1

        def unpack(place: int | torch.Tensor) -> torch.Tensor:
            return unpacked[place] if isinstance(place, int) else place

        versions, given = [t._version for t in tensors], list(tensors)
        records = any(self.needs)
        with torch.set_grad_enabled(records), self.around(), saved_tensors_hooks(pack, unpack):
            if records:
                anchor = torch.empty(0, device="cpu", requires_grad=True)
                positions = [i for i, needed in enumerate(self.needs) if needed]
                entered = _Enter.apply(anchor, *(tensors[i].detach() for i in positions))  # type: ignore[no-untyped-call]
                for i, tensor in zip(positions, entered, strict=True):
                    given[i] = tensor
                graph.begin = [get_gradient_edge(t) for t in entered]
            for tensor, attributes in zip(given, self.named(model), strict=True):
                vars(tensor).update(attributes)
            before = _attributes_of(given)
            returned = self.call(module, *given)
        outputs, spec = pytree.tree_flatten(returned)
        results = [o for o in outputs if isinstance(o, torch.Tensor)]
        if _attributes_of(given) != before or any(map(private.attributes_set_on, results)):
            raise NoIsland(f"{self.title} sets attributes of tensors that it is given or returns")
        tracked = [isinstance(o, torch.Tensor) and o.requires_grad for o in outputs]
        graph.ends = [get_gradient_edge(o) if t else None for o, t in zip(outputs, tracked, strict=True)]
        _take_attributes(graph, saved)
        if [t._version for t in tensors] != versions:
            raise NoIsland(f"{self.title} writes to its arguments")
        return [o.detach() if isinstance(o, torch.Tensor) else o for o in outputs], saved, graph, spec

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward(self, grads: Sequence[torch.Tensor | None], kept: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the backward op: its results, then 8 bytes that nobody reads. kept: the ticket, then what backward reads.

        Raises UnsupportedModel where the gradients are others than in its first run.
        """
        assert self.forward_facts is not None
        graph = _GRAPHS[int(kept[0])]
        sources = dict(zip(self.forward_facts.kept, kept[1:], strict=True))
        saved = [place.seen_in(sources[place.source]) for place in self.forward_facts.saved]
        pairs = [(end, g) for end, g in zip(graph.ends, grads, strict=True) if end is not None and g is not None]
        tensors = [g for _, g in pairs]
        versions = [t._version for t in (*tensors, *sources.values())]
        with self.around_backward(), graph.holding(saved):
            found = torch.autograd.grad(
                [end for end, _ in pairs], graph.begin, tensors, allow_unused=True, retain_graph=True
            )
        if [t._version for t in (*tensors, *sources.values())] != versions:
            raise NoIsland(f"the backward of {self.title} writes to what it is given")
        sources |= {("gradient", i): g for i, g in enumerate(grads) if g is not None}
        places, results = _PlaceFinder(sources), list[torch.Tensor]()
        gradients = tuple(None if t is None else places.of(t.detach(), "result of backward", results) for t in found)
        facts = BackwardFacts(tuple(g is not None for g in grads), gradients, tuple(map(Layout.of, results)))
        if self.backward_facts is None:
            self.backward_facts = facts
        elif facts != self.backward_facts:
            raise UnsupportedModel(
                f"the backward of {self.title} gives other gradients than in its first run; remove the plan for it"
            )
        return [*results, torch.zeros((), dtype=torch.int64, device="cpu")]


class _PlaceFinder:
    """Finds where tensors lie: in the memory of those that are at hand, else in results of their own."""

    def __init__(self, at_hand: Mapping[Source, torch.Tensor]) -> None:
        self._homes: dict[int, tuple[Source, torch.Tensor]] = {}
        for source, tensor in at_hand.items():
            self._homes.setdefault(storage_key(tensor), (source, tensor))

    def of(self, tensor: torch.Tensor, kind: str, results: list[torch.Tensor]) -> Place:
        """The place of a tensor. Where that is new memory, it is added to the results. Raises NoIsland."""
        if (
            tensor.layout is not torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
            or type(tensor) is not torch.Tensor
        ):
            raise NoIsland("an opaque call gives, or saves, tensors of a kind that has no place")
        key = storage_key(tensor)
        if key not in self._homes:
            self._homes[key] = ((kind, len(results)), _whole(tensor))
            results.append(self._homes[key][1])
        source, home = self._homes[key]
        begin_bytes = int(tensor.storage_offset() * tensor.element_size() - home.storage_offset() * home.element_size())
        if begin_bytes < 0:
            raise NoIsland("an opaque call gives, or saves, tensors that begin before its argument does")
        return Place(source, Layout.of(tensor), begin_bytes)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where it takes up its memory, else all of that memory."""
    memory = tensor.untyped_storage()
    if memory.nbytes() == tensor.numel() * tensor.element_size() and tensor.storage_offset() == 0:
        return tensor
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return flat.set_(memory, 0, (memory.nbytes() // tensor.element_size(),), (1,))


def _attributes_of(tensors: Sequence[torch.Tensor]) -> list[list[tuple[str, int]]]:
    """The attributes of each tensor, by name, and which object each is."""
    return [[(key, id(value)) for key, value in vars(tensor).items()] for tensor in tensors]


def _take_attributes(graph: _RecordedGraph, saved: list[torch.Tensor]) -> None:
    """Take tensors out of the contexts of functions, and add them to what was saved. Raises NoIsland."""
    pending = [edge.node for edge in graph.ends if edge is not None]
    seen: set[Any] = set(pending)
    while pending:
        node = pending.pop()
        if hasattr(type(node), "_forward_cls"):
            for name, value in vars(node).items():
                if isinstance(value, torch.Tensor):
                    graph.attributes.append((node, name, len(saved)))
                    saved.append(value.detach())
                elif isinstance(value, tuple) and any(isinstance(v, torch.Tensor) for v in value):
                    raise NoIsland(
                        f"{type(node).__name__} keeps tensors in a tuple, ctx.{name}; hand them to save_for_backward"
                    )
        for target, _ in node.next_functions:
            if target is not None and target not in seen:
                seen.add(target)
                pending.append(target)
    for node, name, _ in graph.attributes:
        setattr(node, name, None)


# -- in a trace ------------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("memplan", "FRAGMENT")
_LIBRARY.define("island(str name, Tensor[] tensors) -> Tensor[]")
_LIBRARY.define("island_backward(str name, Tensor?[] grads, Tensor[] kept) -> Tensor[]")
FORWARD = torch.ops.memplan.island.default
BACKWARD = torch.ops.memplan.island_backward.default

_TRACED: dict[str, Island] = {}  # those of the trace in progress, by name


@contextlib.contextmanager
def as_ops(islands: Mapping[str, Island]) -> Iterator[None]:
    """A context for a trace, in which the ops of these islands have results. One thread at a time may trace."""
    _TRACED.update(islands)
    try:
        yield
    finally:
        _TRACED.clear()


def _fake_forward(name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    island = _TRACED[name]
    assert island.forward_facts is not None
    return [*_empty(island, island.forward_facts.results), torch.empty((), dtype=torch.int64, device="cpu")]


def _fake_backward(name: str, grads: Sequence[torch.Tensor | None], kept: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    island = _TRACED[name]
    assert island.backward_facts is not None
    return [*_empty(island, island.backward_facts.results), torch.empty((), dtype=torch.int64, device="cpu")]


def _empty(island: Island, layouts: Sequence[Layout]) -> list[torch.Tensor]:
    return [layout.empty(island.device) for layout in layouts]


torch.library.register_fake("memplan::island", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("memplan::island_backward", _fake_backward, lib=_LIBRARY)


@dataclass(frozen=True)
class IslandKernel:
    """One of the two ops, to be called in a program.

    - forward: which.
    - again: it has run in the step before.
    """

    island: Island
    forward: bool
    again: bool = False
    __name__: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        kind = "island" if self.forward else f"island_backward{self.island.backward_mode}"
        object.__setattr__(self, "__name__", f"{kind}_{self.island.function}")

    def __call__(self, store: Any, *args: Any) -> list[torch.Tensor]:
        """Run it. store: knows the model that runs."""
        if self.forward:
            return self.island.forward(store.model, args[0], self.again)
        return self.island.backward(*args)

    @property
    def is_random(self) -> bool:
        """Whether it draws from PyTorch's generators and may run again."""
        return self.forward and self.island.random

    @property
    def repeats(self) -> bool:
        """Whether it may run again. Backward runs once."""
        return self.forward and self.island.repeats

    @property
    def cost(self) -> IslandCost:
        """What one run takes."""
        return self.island.forward_cost if self.forward else self.island.backward_cost


def kernel_of(target: Any, name: str, islands: Mapping[str, Island]) -> IslandKernel | None:
    """The kernel that an op of a trace stands for; None for an op that is none of an island's. name: its argument."""
    return IslandKernel(islands[name], target is FORWARD) if target in (FORWARD, BACKWARD) else None
