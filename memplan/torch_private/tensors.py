"""Subclasses of tensors, sharded tensors and storages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload as OpOverload
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree

pytree = _pytree
nn_functions = torch._C._nn  # compiled functions of torch.nn.functional


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of torch.func's own (vmap, grad), for which ops take other paths in eager too."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_allocated(tensor: torch.Tensor) -> bool:
    """Whether an allocator gave a tensor its storage. That of the zeros of forward mode is nowhere, as on "meta"."""
    strided = tensor.layout is torch.strided and not is_transformed(tensor)
    return strided and not (tensor.is_meta or tensor._is_zerotensor())


_ORDINARY = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}

_ORDINARY_FUNCTIONS = (torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of no subclass but PyTorch's own for parameters and buffers."""
    return type(tensor) in _ORDINARY


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A detached tensor in the same memory. It is of no subclass, except of those that ops see (fake tensors)."""
    with torch._C.DisableTorchFunctionSubclass():
        detached = tensor.detach()
        if type(detached).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
            return detached
        return detached.as_subclass(torch.Tensor)


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A quick check that tensors have the classes, dtypes, devices, sizes, strides and `requires_grad` of these.

    They must be strided. Under another autocast it also says no to what is alike, and always where this PyTorch has no
    such check.
    """
    guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    if guards is None:
        return lambda *now: False
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore[no-any-return]


def changes_ops(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class may change what ops on it do."""
    kind: Any = type(tensor)
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    return function not in _ORDINARY_FUNCTIONS or kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def is_held_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether other tensors than this one hold its memory. Autograd copies such a gradient for `.grad`."""
    users, alone = (torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in (tensor, torch.empty(0)))
    return bool(users > alone)


def known_storage(tensor: torch.Tensor) -> StorageWeakRef:
    """A weak reference to a tensor's storage. While it exists, its `cdata` is the `_cdata` of no other storage.

    A storage whose memory is freed and allocated again (`fully_shard`, between forward and backward) is still the same.
    """
    return StorageWeakRef(tensor.untyped_storage())
