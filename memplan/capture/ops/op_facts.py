"""Facts about PyTorch's ops that their schemas do not say."""

from __future__ import annotations

from typing import Any

import torch

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
        "its fake kernel does not know the size of the memory that backward reads. Set torch.backends.cudnn.enabled = "
        "False: recurrent layers then run as plain ops, which can be planned"
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

_DROPOUT_P_ARGUMENT = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "dropout_p",
    "aten::_scaled_dot_product_flash_attention": "dropout_p",
    "aten::_scaled_dot_product_efficient_attention": "dropout_p",
    "aten::_scaled_dot_product_cudnn_attention": "dropout_p",
}


_KNOWN = ("aten", "prims", "prim", "memplan")
_SEEDED_BEFORE = frozenset(  # their forwards hand them what they drew
    getattr(aten, f"_scaled_dot_product_{kind}_attention_backward").default for kind in ("efficient", "cudnn")
)


# Views that are the very tensor that they look at, as far as a program without autograd can tell.
SAME_TENSOR = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default})


def is_of_pytorch(target: Any) -> bool:
    """Whether an op is PyTorch's own, or one of memplan's. What other ops do is not known."""
    return not isinstance(target, torch._ops.OpOverload) or target.namespace in _KNOWN


def is_view(target: Any) -> bool:
    """Whether the results of an op lie in the memory of an argument, by its schema."""
    if not isinstance(target, torch._ops.OpOverload):
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
    name = _DROPOUT_P_ARGUMENT.get(target._schema.name)
    if name is None:
        return True
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            given = kwargs.get(name, args[position] if position < len(args) else argument.default_value)
            return bool(given)
    return True
