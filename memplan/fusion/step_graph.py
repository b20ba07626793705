"""A captured step as one functional graph: ops that can be fused as primitives, all others as opaque nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from memplan import torch_private as private
from memplan.capture.analysis.traced import Kernel, MetaTensor, Traced
from memplan.capture.ops import op_facts
from memplan.capture.ops.dataflow import written_nodes
from memplan.capture.ops.layout import tensors_of
from memplan.problem.data import Phase
from memplan.torch_private import pytree

aten, prims = torch.ops.aten, torch.ops.prims

# Beside what PyTorch tags as pointwise: Inductor's decompositions of these are pointwise ops and reductions.
_NAMES = (
    "native_layer_norm", "native_layer_norm_backward", "_log_softmax", "_log_softmax_backward_data", "_softmax",
    "_softmax_backward_data", "nll_loss_forward", "nll_loss_backward", "clone", "_to_copy", "cat", "constant_pad_nd",
    "tanh_backward", "gelu", "gelu_backward", "silu", "silu_backward", "threshold_backward", "sigmoid_backward",
    "native_dropout_backward", "embedding", "sum", "mean", "copy", "zeros", "full", "arange", "ones",
    "slice_backward", "select_backward", "new_zeros", "_safe_softmax", "tril", "empty_strided",
)  # fmt: skip
_COMPOSITE = frozenset(getattr(aten, name).default for name in _NAMES if hasattr(getattr(aten, name), "default")) | {
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.var_mean.correction, aten.pow.Tensor_Scalar,
    aten.mul.Scalar, aten.add.Scalar, aten.arange.start, aten.arange.start_step, aten.scalar_tensor.default,
}  # fmt: skip

NodeKind = Literal["source", "extern", "result", "computed", "view"]


@dataclass(frozen=True, slots=True)
class NodePlace:
    """What a node of a step graph stands for.

    - kind: "source" is there before the step, or handed in. "extern" is an op that is not fused, "result" one of its
      tensors. "computed" is a primitive that can be in a group. A "view" belongs to whoever reads it.
    - op: the op of the trace that it comes from.
    """

    kind: NodeKind
    phase: Phase
    op: int


def node_kind(node: fx.Node) -> NodeKind:
    return place_of_node(node).kind


def place_of_node(node: fx.Node) -> NodePlace:
    place: NodePlace = node.meta["place"]
    return place


def node_bytes(node: fx.Node) -> int:
    """Bytes of the elements of its tensor; 0 where it has several."""
    tensor = node.meta["val"]
    return tensor.numel() * tensor.element_size() if isinstance(tensor, torch.Tensor) else 0


def base_of(node: fx.Node) -> fx.Node:
    """The node whose memory a view looks at."""
    while node_kind(node) == "view":
        node = node.all_input_nodes[0]
    return node


def bases_read(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory a node reads, each once."""
    return list(dict.fromkeys(base_of(a) for a in node.all_input_nodes))


def readers_of(base: fx.Node) -> Iterator[fx.Node]:
    """Who reads a node's memory, through views too."""
    stack = list(base.users)
    while stack:
        user = stack.pop()
        if node_kind(user) == "view":
            stack.extend(user.users)
        else:
            yield user


@dataclass(frozen=True)
class TensorSlot:
    """Stands for a tensor: its position among those that are given."""

    index: int


def with_slots(arguments: Any, position: Callable[[fx.Node], int]) -> Any:
    """Arguments with slots in place of nodes, so that they can be compared, and given to other processes."""
    return fx.map_arg(arguments, lambda node: TensorSlot(position(node)))  # type: ignore[arg-type, return-value]


def filled(arguments: Any, given: Sequence[torch.Tensor]) -> Any:
    """Arguments with tensors in their slots."""

    def real(thing: Any) -> Any:
        if isinstance(thing, TensorSlot):
            return given[thing.index]
        return thing.build() if isinstance(thing, MetaTensor) else thing

    return pytree.tree_map(real, arguments)


def opaque_call(*args: Any) -> Any:
    """Stands for an op that is not fused."""
    raise NotImplementedError


class StepGraph:
    """The functional graph of a step.

    - nodes: its fx graph. Every node has a `NodePlace` in its meta.
    - home: the value, and the node of the trace, that a node stands for.
    - externs: the node of each op that is not fused.
    - overwrites: for the node of an op that is not fused: the nodes in whose memory it writes. Whoever reads one of
      those must have run by then.
    """

    def __init__(self, traced: Traced, extern: set[int]) -> None:
        """extern: ops that are not fused. Ops of which there are no primitives join them."""
        self.traced = traced
        self.nodes = fx.Graph()
        self.home: dict[fx.Node, tuple[int, fx.Node]] = {}
        self.externs: dict[int, fx.Node] = {}
        self.overwrites: dict[fx.Node, list[fx.Node]] = {}
        self._looks: dict[int, dict[fx.Node, fx.Node]] = {}  # by value: node of the trace -> node of this graph
        self._expansions: dict[Any, fx.GraphModule] = {}
        self._place: tuple[Phase, int] = ("forward", -1)
        for value, roots in traced.roots.items():
            facts = traced.graph.values[value]
            if facts.reuses is not None or not (facts.resident or facts.role == "tangent"):
                continue
            resident = [n for n in roots if n in traced.residents] or list(roots)
            for node in [traced.tangent_nodes[value]] if facts.role == "tangent" else resident:
                source = self.nodes.placeholder(f"v{value}_{node.name}")
                source.meta.update(val=node.meta["val"], place=NodePlace("source", *self._place))
                self._set(value, node, source)
        for index, op in enumerate(traced.graph.ops):
            self._place = (op.phase, index)
            if index in extern or not self._add_fusible(index):
                extern.add(index)
                self._add_extern(index)

    def look(self, node: fx.Node, value: int) -> fx.Node:
        """The node for a node of the trace, seen as a look at a value's memory."""
        looks = self._looks[value]
        if node in looks:
            return looks[node]
        base = self.look(self.traced.parents[node], value)
        if node.target in op_facts.SAME_TENSOR or written_nodes(node):
            return base
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: base)
        looks[node] = self._call(node.target, args, kwargs, node.meta["val"], "view")
        return looks[node]

    def _call(self, target: Any, args: Any, kwargs: Any, val: Any, kind: NodeKind) -> fx.Node:
        node = self.nodes.create_node("call_function", target, args, kwargs)
        node.meta.update(val=val, place=NodePlace(kind, *self._place))
        return node

    def _set(self, value: int, root: fx.Node, node: fx.Node) -> None:
        self._looks.setdefault(value, {})[root] = node
        self.home[node] = (value, root)

    def _add_extern(self, index: int) -> None:
        traced, op, kernel = self.traced, self.traced.graph.ops[index], self.traced.kernels[index]
        reads = [self.look(node, value) for node, value in kernel.reads.items() if value in self._looks]
        written = [(old, value) for value in op.outputs if (old := traced.graph.values[value].reuses) is not None]
        taken = [
            (value, root, node)
            for old, value in (*written, *op.effects)
            for root, node in self._looks.get(old, {}).items()
            if root in traced.roots[value]
        ]
        overwritten = [node for _, _, node in taken]
        run = self._call(opaque_call, (index, *dict.fromkeys([*reads, *overwritten])), {}, None, "extern")
        self.externs[index], self.overwrites[run] = run, overwritten
        for made in kernel.made:
            result = self._call(operator.getitem, (run, made.index), {}, made.node.meta["val"], "result")
            self._set(made.value, made.node, result)
        for value, root, _ in taken:
            self._set(value, root, self._call(operator.getitem, (run, root.name), {}, root.meta["val"], "result"))

    def _add_fusible(self, index: int) -> bool:
        """Add an op, decomposed. Gives whether it can be."""
        op, kernel = self.traced.graph.ops[index], self.traced.kernels[index]
        target, in_place = functional_target(kernel)
        args, kwargs = fx.map_arg((kernel.args, kernel.kwargs), lambda node: self.look(node, kernel.reads[node]))
        copied = target is aten.copy.default
        if copied:  # to where it would lie in the same way
            first, second = (node.meta["val"] for node in args[:2])
            copied = first.device == second.device and (first.shape, first.stride()) == (second.shape, second.stride())
        results = [args[1]] if copied else self._expanded(target, args, kwargs)
        if results is None:
            return False
        if in_place:
            (value,) = op.outputs
            old = self.traced.graph.values[value].reuses
            assert old is not None
            (root,) = self._looks[old].keys() & set(self.traced.roots[value])
            self._bind(value, root, results[0])
            return True
        for made in kernel.made:
            self._bind(made.value, made.node, results[made.index or 0])
        return True

    def _bind(self, value: int, root: fx.Node, node: fx.Node | None) -> None:
        """Let a node stand for a value of the trace: with the dtype, the layout and memory of its own that it has."""
        assert node is not None
        wanted = root.meta["val"]
        lies_otherwise = wanted.is_contiguous() and not node.meta["val"].is_contiguous()
        if node.meta["val"].dtype != wanted.dtype:
            node = self._call(prims.convert_element_type.default, (node, wanted.dtype), {}, wanted, "computed")
        if lies_otherwise or node in self.home or node_kind(node) != "computed":
            kwargs = {"memory_format": torch.contiguous_format} if wanted.is_contiguous() else {}
            node = self._call(aten.clone.default, (node,), kwargs, wanted, "computed")
        self._set(value, root, node)

    def _expanded(self, target: Any, args: Any, kwargs: Any) -> list[fx.Node | None] | None:
        """The nodes for the results of an op, decomposed as Inductor does; None if it is then given constants."""
        tensors: dict[fx.Node, int] = {}
        look = with_slots((args, kwargs), lambda node: tensors.setdefault(node, len(tensors)))
        layouts = tuple(private.MemoryLayout.of(n.meta["val"]) for n in tensors)
        key = (target, repr(look), layouts)
        if key not in self._expansions:

            def run(*given: Any) -> Any:
                real_args, real_kwargs = filled(look, given)
                return target(*real_args, **real_kwargs)

            self._expansions[key] = private.functional_trace(run, layouts)
        expansion = self._expansions[key]
        if any(node.op == "get_attr" for node in expansion.graph.nodes):  # a constant, of which a plan would not know
            return None
        local: dict[fx.Node, fx.Node] = {}
        inputs, results = iter(tensors), None
        for node in expansion.graph.nodes:
            if node.op == "placeholder":
                local[node] = next(inputs)
            elif node.op == "output":
                results = node.args[0]
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), local.__getitem__)
                view = op_facts.is_view(node.target) and isinstance(node.meta["val"], torch.Tensor)
                local[node] = self._call(node.target, args, kwargs, node.meta["val"], "view" if view else "computed")
        found = results if isinstance(results, (list, tuple)) else [results]
        return [None if result is None else local[result] for result in found]


def is_sum_in_place(kernel: Kernel) -> bool:
    """Whether it is a sum that is traced out of place, and runs in place as in eager."""
    return kernel.target is aten.add_.Tensor and kernel.node.target is aten.add.Tensor


def functional_target(kernel: Kernel) -> tuple[Any, bool]:
    """The op that gives the same results in new memory, and whether the trace has it write over an argument instead.

    The op is None where there is none.
    """
    target = kernel.node.target if is_sum_in_place(kernel) else kernel.target
    if not isinstance(target, private.OpOverload) or not target._schema.is_mutable:
        return target, False
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(aten, name[:-1], None) if name.endswith("_") else None
    return getattr(packet, target._overloadname, None) if packet is not None else None, True


def is_fusible(traced: Traced, index: int) -> bool:
    op, kernel = traced.graph.ops[index], traced.kernels[index]
    if op.random or op.effects or not op.recomputable or kernel.args is not kernel.repeat_args:
        return False
    target, in_place = functional_target(kernel)
    if not isinstance(target, private.OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    if target not in _COMPOSITE and torch.Tag.pointwise not in target.tags and not private.keeps_to_seed(target):
        return False
    values = traced.graph.values
    if in_place and not _writes_a_whole_value(traced, index):
        return False
    if not in_place and not is_sum_in_place(kernel) and any(values[v].reuses is not None for v in op.outputs):
        return False
    if any(len(traced.roots[v]) != 1 for v in op.outputs):
        return False
    results = [root.meta["val"] for v in op.outputs for root in traced.roots[v]]
    if not all(isinstance(t, torch.Tensor) and t.untyped_storage().nbytes() == t.nbytes for t in results):
        return False
    read = [t for node in kernel.reads for t in tensors_of(node.meta["val"])]
    return not any(t.is_complex() for t in (*read, *results))


def _writes_a_whole_value(traced: Traced, index: int) -> bool:
    """Whether an op in place writes all of one value of the step, and nothing else."""
    op, kernel = traced.graph.ops[index], traced.kernels[index]
    if len(op.outputs) != 1 or kernel.made:
        return False
    (value,) = op.outputs
    old = traced.graph.values[value].reuses
    if old is None or traced.graph.values[old].resident:
        return False
    if len(traced.roots[old]) != 1 or len(traced.roots[value]) != 1:
        return False
    written = written_nodes(kernel.node)
    if len(written) != 1:
        return False
    (node,) = written
    while node in traced.parents and (node.target in op_facts.SAME_TENSOR or written_nodes(node)):
        node = traced.parents[node]
    return node is traced.roots[value][0]
