"""How tensors lie in memory: in which storage, in how many bytes, with what strides. For fake tensors too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from memplan import torch_private as private

CUDA_BLOCK_BYTES = 512  # PyTorch's CUDA allocator rounds each request up to this


def storage_key(tensor: torch.Tensor) -> int:
    """A key that is equal for tensors that share a storage, as long as one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def tensor_text(tensor: torch.Tensor) -> str:
    """Dtype and shape of a tensor as people read them: "float32[8, 128, 768]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"


def strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor, or those that a sparse or a jagged one consists of; of a DTensor, the part that is here."""
    if tensor.layout is torch.jagged:
        return [tensor.values(), tensor.offsets()]  # type: ignore[attr-defined]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout is torch.sparse_csr or tensor.layout is torch.sparse_bsr:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout is torch.sparse_csc or tensor.layout is torch.sparse_bsc:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [private.part_here(tensor)]


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors among an op's results, in order."""
    results = result if isinstance(result, (list, tuple)) else [result]
    return [t for t in results if isinstance(t, torch.Tensor)]


def device_bytes_of(tensor: torch.Tensor, device: torch.device) -> int:
    """Bytes that a tensor's storage takes on a device; 0 where the tensor is on that device's host."""
    if tensor.device.type == "cpu" != device.type:
        return 0
    return allocated_bytes(tensor.untyped_storage().nbytes(), device)


def allocated_bytes(size_bytes: int, device: torch.device) -> int:
    """Bytes that the device's allocator sets aside for a storage."""
    if device.type == "cuda":
        return -(-size_bytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES
    return size_bytes


def generator_state_bytes(device: torch.device) -> int:
    """Bytes that one saved generator state takes on the planned device. A CUDA state is kept on the host."""
    return torch.Generator().get_state().numel() if device.type == "cpu" else 0


def strides_that_matter(size: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The strides of dimensions that have more than one element; empty where the tensor is empty."""
    return () if 0 in size else tuple(s for s, n in zip(stride, size, strict=True) if n != 1)


def dense_stride(size: Sequence[int], innermost_first: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides without gaps, in this order of dimensions; by default those of a contiguous tensor."""
    stride, step = [0] * len(size), 1
    for dimension in reversed(range(len(size))) if innermost_first is None else innermost_first:
        stride[dimension] = step
        step *= max(1, size[dimension])
    return tuple(stride)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one stretch of memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `b`'s contents can be written over `a`, which must fill its storage."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and a.stride() == b.stride()
        and not (a.is_neg() or a.is_conj())
        and a.untyped_storage().nbytes() == a.numel() * a.element_size()
    )


def overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether views of one storage may share elements (conservative: their address ranges meet)."""
    reaches = (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in tensors)
    ranges = sorted((t.storage_offset(), t.storage_offset() + reach) for t, reach in zip(tensors, reaches, strict=True))
    return any(later[0] <= earlier[1] for earlier, later in pairwise(ranges))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two strided tensors with one number of elements and one dtype have the same bytes in them."""
    return torch.equal(*(t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (one, other)))


_CHANNELS_LAST = (1, 3, 2, 0)  # dimensions, the innermost first


def gradient_layout(gradient: torch.Tensor, leaf: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(size, stride) of a copy of a gradient: its leaf's, unless ranks split the two in other ways (DTensors).

    The strides are the leaf's own where it is dense, else contiguous ones.
    """
    size = tuple(leaf.shape)
    stride = tuple(leaf.stride()) if is_dense(leaf) else dense_stride(size)
    if gradient.shape == leaf.shape:
        return size, stride
    innermost_first = sorted(range(len(size)), key=lambda dimension: (stride[dimension], -dimension))
    return tuple(gradient.shape), dense_stride(gradient.shape, innermost_first)


def lies_as_leaf(gradient: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Whether a gradient has the strides of a copy of it, where these matter."""
    copied = gradient_layout(gradient, leaf)
    return strides_that_matter(gradient.shape, gradient.stride()) == strides_that_matter(*copied)


def iterated_layout(operands: Sequence[torch.Tensor | complex]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(size, stride) that PyTorch's TensorIterator gives a new result of its operands. The first one decides first.

    Strides of dimensions of one element are exact too: later kernels use them to see whether channels come last, and
    then run in other ways. PyTorch's fake kernels order dimensions otherwise where they have one element or are
    broadcast.
    """
    tensors = [t for t in operands if isinstance(t, torch.Tensor)]
    size = tuple(torch.broadcast_shapes(*(t.shape for t in tensors)))
    if all(isinstance(t, torch.Tensor) and t.shape == size for t in operands):
        for order in (None, _CHANNELS_LAST) if len(size) == 4 else (None,):
            stride = dense_stride(size, order)
            of_each = (zip(size, t.stride(), stride, strict=True) for t in tensors)
            if all(n == 1 or a == b for pairs in of_each for n, a, b in pairs):
                return size, stride
        first = tensors[0].stride()
        if all(t.stride() == first and is_dense(t) for t in tensors):
            return size, first
    strides = list[tuple[int, ...]]()
    for tensor in tensors:  # for all dimensions of the result; 0 where the operand is repeated
        new = len(size) - tensor.dim()
        own = zip(tensor.shape, tensor.stride(), size[new:], strict=True)
        strides.append((0,) * new + tuple(0 if n == 1 and whole != 1 else s for n, s, whole in own))
    return size, dense_stride(size, _sorted(size, strides))


def _sorted(size: tuple[int, ...], strides: Sequence[tuple[int, ...]]) -> list[int]:
    """The dimensions, the innermost first. It is an insertion sort, because not every two of them can be compared."""
    order = list(reversed(range(len(size))))
    for end in range(1, len(order)):
        place = end
        for before in reversed(range(end)):
            swap = _is_outside(size, strides, order[before], order[place])
            if swap is False:
                break
            if swap:
                order[before], order[place] = order[place], order[before]
                place = before
    return order


def _is_outside(size: tuple[int, ...], strides: Sequence[tuple[int, ...]], a: int, b: int) -> bool | None:
    """Whether dimension `a` goes outside of `b`; None where no operand decides."""
    for stride in strides:
        if 0 in (stride[a], stride[b]):
            continue
        if stride[a] != stride[b]:
            return stride[a] > stride[b]
        if size[a] > size[b]:
            return True
    return None
