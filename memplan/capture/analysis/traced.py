"""What capture hands on: the plain `Graph` for the planner, and beside it how to run each op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memplan.capture.trace.call import OutputTemplate
from memplan.capture.trace.raw_trace import Decision
from memplan.problem.data import Graph


@dataclass(frozen=True, slots=True)
class MetaTensor:
    """Stands in an argument list for a tensor of which the op reads only shape, strides and dtype."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def build(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that a run of an op makes: `node` names it in the trace, `index` is its place among several results."""

    node: fx.Node
    index: int | None
    value: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """How to run an op. Arguments are those of the trace: nodes, numbers, `MetaTensor`s.

    node: the op in the trace. reads: which value each argument node stands for when the op runs.
    repeat_args: arguments of a recompute, which must not write running statistics again.
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
    """A tensor that is there before the step: where the runtime finds it.

    kind: "parameter", "buffer" (looked up by name), "input" (by position) or "constant" (by name in `constants`).
    """

    kind: str
    name: str
    position: int = -1


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor that forward returns: `node` in the trace; `value` holds its contents at the boundary."""

    node: fx.Node
    value: int
    requires_grad: bool
    tangent: int | None  # the value handed in for it at the boundary; None: backward does not start here


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient that backward hands over: of which parameters or inputs ("parameter transformer.wte.weight")."""

    value: int
    nodes: tuple[tuple[str, fx.Node], ...]


@dataclass(frozen=True, slots=True)
class Guard:
    """A number that forward read from the data of its inputs: `nodes` compute it again."""

    nodes: tuple[fx.Node, ...]
    node: fx.Node
    value: Any
    where: str


@dataclass(slots=True)
class Traced:
    """A captured training step.

    kernels[i] runs graph.ops[i]. roots[v]: the nodes that hold value v's memory (views of them are re-derived).
    parents: for a node that only looks at another node's memory, that other node. residents: by root node.
    reassigned: buffers that forward puts other tensors into, with the position of the output that holds the new one.
    decisions: branches that the trace has taken for granted; what they depend on is an output, too. summed: parameters
    whose gradients autograd adds up from several uses. inner: the outputs from which others derive, and whether one
    that backward starts from does: the gradient that is handed in for such an output is not all of it.
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
    reassigned: dict[str, int]
    decisions: tuple[Decision, ...]
    summed: tuple[str, ...]
    inner: dict[int, bool]
    device: torch.device

    @property
    def forward_ops(self) -> tuple[str, ...]:
        """Kernels, shapes and settings of the forward pass, what each reads, and the branches that it takes."""
        ops = (
            f"{op.key} {[self.graph.values[v].name for v in op.inputs]}" for op in self.graph.ops[: self.graph.boundary]
        )
        return (*ops, *map(repr, self.decisions))
