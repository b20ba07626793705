"""A lowered plan, and its two graphs while they are written."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from memplan import torch_private as private
from memplan.capture.ops.sizes import Expression

Grads = Literal["surface", "edges"]
Instance = dict[fx.Node, fx.Node]  # node of the trace -> node of the program, for one live value


@dataclass(frozen=True, slots=True)
class Program:
    """A lowered plan.

    - forward: takes [store, sizes, *inputs] and returns [*outputs, *saved].
    - backward: takes [store, sink, *tangents, *saved] and returns the gradients of the inputs that require grad, then,
      under grads="edges", those of parameters.
    - forward_inputs: positions of the inputs that forward takes.
    - sizes: what the numbers in `sizes` are; none where the program is for one size.
    - backward_inputs: positions of the inputs that backward reads.
    - backward_state: parameters and buffers that backward reads or gives gradients to.
    - backward_outputs: positions of the outputs whose memory backward reads.
    - input_outputs: outputs that are inputs themselves: position of the output -> position of the input.
    - output_count: the number of outputs.
    - input_gradients: position of the input that each of the first results of backward belongs to.
    - parameter_gradients: names of the parameters that the other results of backward belong to.
    - grads: what `lower` was told.
    - collectives: events that other ranks have to run in the same order, as in `Collectives`.
    - staying: parameters of which copies stay on the device between steps.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    forward_inputs: tuple[int, ...]
    sizes: tuple[Expression, ...]
    backward_inputs: tuple[int, ...]
    backward_state: tuple[str, ...]
    backward_outputs: tuple[int, ...]
    input_outputs: dict[int, int]
    output_count: int
    input_gradients: tuple[int, ...]
    parameter_gradients: tuple[str, ...]
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
    return [tensor if private.is_ordinary(tensor) else private.plain(tensor) for tensor in store.tensors(names)]
