"""Which ops of a step can be fused: results in memory of their own, made of primitives that Inductor fuses."""

from __future__ import annotations

import torch

from memplan import torch_private as private
from memplan.capture.analysis.traced import Traced
from memplan.capture.ops import op_facts
from memplan.capture.ops.dataflow import written_nodes
from memplan.capture.ops.layout import tensors_of
from memplan.fusion.step_graph import functional_target, is_sum_in_place

aten = torch.ops.aten

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
