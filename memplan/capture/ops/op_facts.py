"""Facts about PyTorch's ops that their schemas do not say."""

from __future__ import annotations

from typing import Any

import torch

from memplan.torch_private import OpOverload

aten = torch.ops.aten

# Ops that write to arguments though their schema does not say so: op -> (argument indices, index of `training`).
HIDDEN_WRITES: dict[Any, tuple[tuple[int, ...], int]] = {
    aten.native_batch_norm.default: ((3, 4), 5),
    aten.cudnn_batch_norm.default: ((3, 4), 5),
    aten.miopen_batch_norm.default: ((3, 4), 5),
}

# Ops that can't be traced exactly: op -> why, and what to do.
UNPLANNABLE: dict[Any, str] = {
    aten.mkldnn_rnn_layer.default: (
        "its fake kernel does not know the size of the workspace that backward reads, and the kernel leaves it out "
        "under no_grad. Set torch.backends.mkldnn.enabled = False: recurrent layers then run as plain ops, which can "
        "be planned"
    ),
    aten._cudnn_rnn.default: (
        "its fake kernel does not know the size of the memory that backward reads. Call the layer in "
        "`with torch.backends.cudnn.flags(enabled=False):`, which leaves cuDNN to the rest: it then runs as plain ops, "
        "which can be planned"
    ),
}

# Ops that read nothing of a tensor argument but its shape, strides, dtype and device.
METADATA_ONLY = frozenset(
    getattr(aten, name).default
    for name in (
        "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
        "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full",
    )
)  # fmt: skip

# Ops that look at a tensor's memory, by the same code on the meta device as anywhere else.
VIEWS = frozenset(
    getattr(getattr(aten, name), overload)
    for name, overload in (
        ("_unsafe_view", "default"), ("alias", "default"), ("as_strided", "default"), ("detach", "default"),
        ("diagonal", "default"), ("expand", "default"), ("permute", "default"), ("select", "int"), ("slice", "Tensor"),
        ("split", "Tensor"), ("split_with_sizes", "default"), ("squeeze", "default"), ("squeeze", "dim"),
        ("squeeze", "dims"), ("t", "default"), ("transpose", "int"), ("unbind", "int"), ("unfold", "default"),
        ("unsqueeze", "default"), ("view", "default"),
    )
)  # fmt: skip

_WITH_DROPOUT_P = frozenset({
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
})  # fmt: skip

# Ops whose kernels add in the order in which threads arrive, and the argument that says so where one does. All of them
# do on CUDA, those with an argument on CPUs too (20 of 20 second runs of `index_put` on two threads had other bits).
_ADDS_IN_ANY_ORDER: dict[str, str | None] = {
    "aten::index_add": None, "aten::index_add_": None, "aten::scatter_add": None, "aten::scatter_add_": None,
    "aten::scatter_reduce": None, "aten::scatter_reduce_": None, "aten::index_reduce": None,
    "aten::index_reduce_": None, "aten::index_put": "accumulate", "aten::index_put_": "accumulate",
    "aten::_index_put_impl_": "accumulate", "aten::_unsafe_index_put": "accumulate", "aten::put": "accumulate",
    "aten::put_": "accumulate", "aten::cumsum": None, "aten::cumsum_": None, "aten::bincount": None,
    "aten::histc": None, "aten::nll_loss2d_forward": None,
}  # fmt: skip

# Ops that choose among numbers of which several may be equal: which of those is not promised. Where a second run chose
# others, a token would go to another expert in backward than in forward.
_CHOOSES_AMONG_EQUALS = ("aten::topk", "aten::sort", "aten::kthvalue", "aten::median", "aten::nanmedian", "aten::mode")

_KNOWN = ("aten", "prims", "prim", "profiler", "memplan", "_c10d_functional", "_dtensor")
_SEEDED_BEFORE = frozenset(  # their forwards hand them what they drew
    getattr(aten, f"_scaled_dot_product_{kind}_attention_backward").default for kind in ("efficient", "cudnn")
)

# Views that are the very tensor that they look at, as far as a program without autograd can tell.
SAME_TENSOR = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default})


def is_of_pytorch(target: Any) -> bool:
    """Whether an op is PyTorch's own, or one of memplan's. What other ops do is not known."""
    return not isinstance(target, OpOverload) or target.namespace in _KNOWN


def checks_data(target: Any) -> bool:
    """Whether a call gives nothing, and may raise for some data: no assertion of sizes or dtypes, which guards hold."""
    if not isinstance(target, OpOverload) or target._schema.returns or target._schema.is_mutable:
        return False
    return target._schema.name in ("aten::_linalg_check_errors", "aten::_assert_async") or not is_of_pytorch(target)


def gives_numbers(target: Any) -> bool:
    """Whether the results of a user's op are no tensors alone."""
    return not is_of_pytorch(target) and any("Tensor" not in str(result.type) for result in target._schema.returns)


def is_view(target: Any) -> bool:
    """Whether the results of an op lie in the memory of an argument, by its schema."""
    if not isinstance(target, OpOverload):
        return False
    infos = [result.alias_info for result in target._schema.returns]
    return target in VIEWS or (bool(infos) and all(info is not None and not info.is_write for info in infos))


def draws_random_numbers(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an op advances the generator.

    Fused attention is tagged random, but draws nothing without dropout, nor in backward. Of a user's own op (another
    fused attention, say) that is not known.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return not is_of_pytorch(target)
    if target in _SEEDED_BEFORE:
        return False
    return target._schema.name not in _WITH_DROPOUT_P or bool(argument_of(target, "dropout_p", args, kwargs))


def may_give_other_bits(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """Whether a second run of an op on the same values may give others. result: of the first run, or a fake of it.

    With `torch.use_deterministic_algorithms(True)` PyTorch takes other kernels, or raises.
    """
    if not isinstance(target, OpOverload):
        return False
    tensor = result[0] if isinstance(result, (tuple, list)) and result else result
    if target._schema.name in _CHOOSES_AMONG_EQUALS:
        return tensor.device.type == "cuda" and not kwargs.get("stable")
    if target._schema.name not in _ADDS_IN_ANY_ORDER:
        return False
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    name = _ADDS_IN_ANY_ORDER[target._schema.name]
    adds_so = tensor.device.type == "cuda" or (tensor.device.type == "cpu" and name is not None)
    if not adds_so or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return name is None or bool(argument_of(target, name, args, kwargs))


def is_uneven_exchange(target: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call sends parts of several sizes to other ranks, as routing by data does: ranks run it once.

    `all_to_all_single` takes (tensor, sizes of what comes, sizes of what goes, group).
    """
    if not str(target).startswith("_c10d_functional.all_to_all_single"):
        return False
    return any(len(set(map(str, sizes))) > 1 for sizes in args[1:3])


def argument_of(target: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call gives for an argument of its schema, or the default."""
    position, argument = next((i, a) for i, a in enumerate(target._schema.arguments) if a.name == name)
    return kwargs.get(name, args[position] if position < len(args) else argument.default_value)
