"""A lowered plan, and its two graphs while they are written: views are derived again wherever an op needs them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from memplan import torch_private as private
from memplan.capture.analysis.traced import Traced
from memplan.capture.ops import op_facts
from memplan.capture.ops.dataflow import written_nodes
from memplan.capture.ops.sizes import Expression, Numbers, put
from memplan.runtime.program.bindings import binding

Grads = Literal["surface", "edges"]
Instance = dict[fx.Node, fx.Node]  # node of the trace -> node of the program, for one live value


@dataclass(frozen=True, slots=True)
class Program:
    """A lowered plan.

    - forward: takes [store, sizes, *inputs] and returns [*outputs, *saved].
    - backward: takes [store, sink, *tangents, *saved] and returns the gradients of the inputs that require grad, then,
      under grads="edges", those of parameters.
    - forward_inputs: positions of the inputs that forward takes.
    - sizes_at: gives the numbers in `sizes` for those of a call; none where the program is for one size.
    - backward_inputs: positions of the inputs that backward reads.
    - backward_state: parameters and buffers that backward reads or gives gradients to.
    - backward_outputs: positions of the outputs whose memory backward reads.
    - input_outputs: outputs that are inputs themselves: position of the output -> position of the input.
    - gradients: position of the input, or name of the parameter, that each result of backward belongs to.
    - grads: what `lower` was told.
    - collectives: events that other ranks have to run in the same order, as in `Collectives`.
    - staying: parameters of which copies stay on the device between steps.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    forward_inputs: tuple[int, ...]
    sizes_at: Callable[[Numbers], tuple[Any, ...]]
    backward_inputs: tuple[int, ...]
    backward_state: tuple[str, ...]
    backward_outputs: tuple[int, ...]
    input_outputs: dict[int, int]
    gradients: tuple[int | str, ...]
    grads: Grads
    collectives: tuple[str, ...]
    staying: tuple[str, ...]


class Side:
    """One of the two graphs, while it is written."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.state_names: list[str] = []
        self.residents: Instance = {}
        self.numbers: dict[Expression, fx.Node] = {}
        self.views: dict[Any, fx.Node] = {}  # by what they are views of, and their layout
        self._last_placeholder: fx.Node | None = None
        self._state: fx.Node | None = None
        self.store = self.placeholder("store")

    def placeholder(self, name: str) -> fx.Node:
        with self.graph.inserting_after(self._last_placeholder):
            self._last_placeholder = self.graph.placeholder(name)
        return self._last_placeholder

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, name: str = "") -> fx.Node:
        return self.graph.create_node("call_function", target, args, kwargs or {}, name=name or None)

    def constant(self, name: str, tensor: torch.Tensor) -> fx.Node:
        self.constants[name] = tensor
        return self.graph.get_attr(name)

    def state(self, name: str) -> fx.Node:
        if self._state is None:
            with self.graph.inserting_after(self._last_placeholder):
                self._state = self.call(get_state, (self.store, ()))
        self.state_names.append(name)
        return self.call(operator.getitem, (self._state, len(self.state_names) - 1), name=name)

    def module(self, results: Sequence[fx.Node], name: str) -> fx.GraphModule:
        if self._state is not None:
            self._state.args = (self.store, tuple(self.state_names))
        self.graph.output(list(results))
        private.boxed(self.graph)
        root = torch.nn.Module()
        for attribute, tensor in self.constants.items():
            root.register_buffer(attribute, tensor, persistent=False)
        module = fx.GraphModule(root, self.graph, class_name=name)
        self.graph.lint()
        return module


def get_state(store: Any, names: tuple[str, ...]) -> list[torch.Tensor]:
    """The parameters and buffers of these names, looked up when the program begins."""
    tensors: list[torch.Tensor] = store.tensors(names)
    whole = private.are_ordinary(tensors)
    return tensors if whole else [t if private.is_ordinary(t) else private.plain(t) for t in tensors]


class ProgramNodes:
    """The nodes of a program that stand for tensors and numbers of the trace.

    - forward: the graph of forward. side: the graph that is written now.
    - live: of each live value, the program's nodes.
    - sizes, expressions: the placeholder of the numbers that forward takes, and what they are, with their places.
    - inputs: those of the forward program, by position.
    - carried: by node of the forward program, its placeholder in the backward program. carried_values: what these are.
    """

    def __init__(self, traced: Traced) -> None:
        self.traced, self.graph = traced, traced.graph
        self.side = self.forward = Side()
        self.sizes = self.forward.placeholder("sizes")
        self.expressions: dict[Expression, int] = {}
        self.live: dict[int, Instance] = {}
        self.inputs: dict[int, fx.Node] = {}
        self.carried: dict[fx.Node, fx.Node] = {}
        self.carried_values: set[int] = set()

    def tensor(self, node: fx.Node, value: int) -> fx.Node:
        """The program's node for `node` of the trace, as a view of `value`'s memory."""
        if self.graph.values[value].resident and not self.graph.values[value].fetched:
            return self.look(node, self.side.residents, value)
        return self.look(node, self.live[value], value)

    def look(self, node: fx.Node, instance: Instance, value: int) -> fx.Node:
        if node in instance:
            if instance[node].graph is not self.side.graph:
                self.carried_values.add(value)
                instance[node] = self.carry(instance[node])
            return instance[node]
        if node in self.traced.residents:
            instance[node] = self._resident(node)
            return instance[node]
        parent = self.traced.parents[node]
        if (alike := self._seen_alike(node)) is not None:
            found = self.look(alike, instance, value)
        elif node.target in op_facts.SAME_TENSOR or written_nodes(node):
            found = self.look(parent, instance, value)
        elif (shortcut := self._strided(node, parent, instance, value)) is not None:
            found = shortcut
        else:
            base, sizes = self.look(parent, instance, value), self.traced.sizes
            call = (node.args, node.kwargs)
            if sizes is not None and node.name in sizes.nodes:
                call = put(sizes.nodes[node.name], self.number)
            args, kwargs = fx.map_arg(call, lambda n: n if n.graph is self.side.graph else base)
            found = self.side.call(binding(node.target, node.args, node.kwargs), args, kwargs)
        instance[node] = found
        return found

    def _seen_alike(self, node: fx.Node) -> fx.Node | None:
        """The tensor that a view is a view of, if it has the same layout as the view: `w` for `w.t().t()`.

        With dimensions of one element, whose strides vary from call to call, the view is made.
        """
        seen, sizes = node.meta["val"], self.traced.sizes
        if not isinstance(seen, torch.Tensor) or 1 in seen.shape or seen.is_complex() or sizes is not None:
            return None
        above = self.traced.parents.get(node)
        while above is not None and not (_is_seen_as(above, seen) and self.layout(above) == self.layout(node)):
            above = self.traced.parents.get(above)
        return above

    def _strided(self, node: fx.Node, parent: fx.Node, instance: Instance, value: int) -> fx.Node | None:
        """A view of an op's result, or a chain of them, in one step, by the call that takes Python the least time."""
        root = nearest = parent
        while root in self.traced.parents:
            root = self.traced.parents[root]
        if node.target is operator.getitem or root in self.traced.residents or root not in self.traced.roots[value]:
            return None
        seen, may_be_part = node.meta["val"], self.graph.values[value].role == "tangent"  # of a cat's gradient
        if may_be_part or not isinstance(seen, torch.Tensor) or seen.is_complex() or not _is_seen_as(root, seen):
            return None
        while nearest is not root and (nearest not in instance or not _is_seen_as(nearest, seen)):
            nearest = self.traced.parents[nearest]
        base, (shape, stride, offset) = self.look(nearest, instance, value), self.layout(node)
        key = (base, *shape, *stride, offset)
        if key not in self.side.views:
            self.side.views[key] = self.side.call(torch.as_strided, (base, shape, stride, offset))
        return self.side.views[key]

    def layout(self, node: fx.Node) -> tuple[list[Any], list[Any], Any]:
        """(shape, stride, offset) of a tensor of the trace, in numbers of the program."""
        sizes, tensor = self.traced.sizes, node.meta["val"]
        found = None if sizes is None or node.name not in sizes.results else sizes.results[node.name][0]
        if found is None:
            return list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
        shape, stride, offset = put((list(found.shape), list(found.stride), found.offset), self.number)
        return shape, stride, offset

    def number(self, expression: Expression) -> fx.Node:
        place = self.expressions.setdefault(expression, len(self.expressions))
        if expression not in self.side.numbers:
            self.side.numbers[expression] = self.side.call(operator.getitem, (self.carry(self.sizes), place))
        return self.side.numbers[expression]

    def _resident(self, node: fx.Node) -> fx.Node:
        source = self.traced.residents[node]
        if source.kind == "constant":
            return self.side.constant(source.name, self.traced.constants[source.name])
        if source.name in self.traced.reassigned and self.side is not self.forward:  # backward reads the old tensor
            if node not in self.forward.residents:
                self.forward.residents[node] = self.forward.state(source.name)
            return self.carry(self.forward.residents[node])
        if source.kind != "input":
            return self.side.state(source.name)
        if source.position not in self.inputs:
            self.inputs[source.position] = self.forward.placeholder(f"input_{source.position}")
        return self.carry(self.inputs[source.position])

    def carry(self, node: fx.Node) -> fx.Node:
        """`node` on the present side: what the forward program made is handed to the backward program."""
        if node.graph is self.side.graph:
            return node
        if node not in self.carried:
            self.carried[node] = self.side.placeholder(f"saved_{node.name}")
        return self.carried[node]


def _is_seen_as(node: fx.Node, seen: torch.Tensor) -> bool:
    """Whether a view is one tensor that reads memory as `seen` does, and not several, as of unbind."""
    tensor = node.meta["val"]
    return isinstance(tensor, torch.Tensor) and tensor.dtype == seen.dtype and tensor.is_neg() == seen.is_neg()
