"""What capture hands on: the plain `Graph` for the planner, and beside it how to run each op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memplan.capture.ops.island import Island
from memplan.capture.ops.island_ops import IslandKernel
from memplan.capture.ops.sizes import Sizes
from memplan.capture.trace.call import OutputTemplate
from memplan.capture.trace.raw_trace import Guard, StepNotes
from memplan.problem.data import Graph, Role


@dataclass(frozen=True, slots=True)
class MetaTensor:
    """An argument of an op that reads only a tensor's shape, strides and dtype, in the place of that tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def build(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that a run of an op makes.

    - node: the tensor in the trace.
    - index: its place among several results; None where there is one.
    - value: the value that it belongs to.
    """

    node: fx.Node
    index: int | None
    value: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """How to run an op. Arguments are those of the trace: nodes, numbers, `MetaTensor`s.

    - node: the op in the trace.
    - target, args, kwargs: the function to call, and its arguments.
    - reads: which value each argument node stands for when the op runs.
    - made: the tensors that a run makes.
    - repeat_args: arguments of a recompute, which must not write running statistics again.
    """

    node: fx.Node
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: dict[fx.Node, int]
    made: tuple[Made, ...]
    repeat_args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Resident:
    """A tensor that is there before the step, and where the runtime finds it.

    kind: "parameter" or "buffer" (looked up by name), "input" (by position), or "constant" (by name in `constants`).
    """

    kind: Role
    name: str
    position: int = -1


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor that forward returns. `value` holds its contents at the boundary."""

    node: fx.Node
    value: int
    requires_grad: bool
    tangent: int | None  # the value handed in for it at the boundary; None: backward does not start here


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient that backward hands over.

    - value: the value that holds it.
    - nodes: which parameters or inputs it belongs to ("parameter transformer.wte.weight"), with the node for each.
    """

    value: int
    nodes: tuple[tuple[str, fx.Node], ...]

    @property
    def parameters(self) -> list[str]:
        """The names of its parameters."""
        pairs = [name.partition(" ") for name, _ in self.nodes]
        return [leaf for kind, _, leaf in pairs if kind == "parameter"]


@dataclass(slots=True)
class Traced(StepNotes):
    """A captured training step.

    - kernels: kernels[i] runs graph.ops[i].
    - roots: roots[v] are the nodes that hold value v's memory. Views of them are derived again.
    - parents: for a node that is a view, the node whose memory it shows.
    - residents: by root node.
    - outputs, template: what forward returns.
    - gradients: what backward hands over.
    - tangent_nodes: by value, the node of a gradient that is handed in.
    - constants: tensors of forward's own, by name.
    - guards: numbers that forward read from inputs, to be read again before each call.
    - sizes: how the step goes on for other sizes; None where it is for these alone.
    """

    graph: Graph
    kernels: tuple[Kernel, ...]
    roots: dict[int, tuple[fx.Node, ...]]
    parents: dict[fx.Node, fx.Node]
    residents: dict[fx.Node, Resident]
    outputs: tuple[OutputTensor, ...]
    template: OutputTemplate
    gradients: tuple[Gradient, ...]
    tangent_nodes: dict[int, fx.Node]
    constants: dict[str, torch.Tensor]
    guards: tuple[Guard, ...]
    device: torch.device
    sizes: Sizes | None = None

    @property
    def fx_graph(self) -> fx.Graph:
        """The trace, whose nodes kernels, roots and the rest are about."""
        return self.kernels[0].node.graph

    @property
    def islands(self) -> list[Island]:
        """Its calls that are islands, in order."""
        return [k.target.island for k in self.kernels if isinstance(k.target, IslandKernel) and k.target.forward]

    @property
    def forward_ops(self) -> tuple[str, ...]:
        """A signature of the forward pass: kernels, shapes, settings, what each op reads, and branches taken."""
        values, forward = self.graph.values, self.graph.ops[: self.graph.boundary]
        ops = (f"{op.key} {[values[v].name for v in op.inputs]}" for op in forward)
        return (*ops, *map(repr, self.decisions))
