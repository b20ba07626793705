"""How tensors lie in memory, fake ones too: storages, bytes, strides, and where in those of others (`Place`)."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from memplan import torch_private as private
from memplan.capture.ops.ways import Refusal
from memplan.errors import UnsupportedModel

CUDA_BLOCK_BYTES = 512  # PyTorch's CUDA allocator rounds each request up to this


def storage_key(tensor: torch.Tensor) -> int:
    """A key that is equal for tensors that share a storage, as long as one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def mark_of(tensor: torch.Tensor) -> tuple[int, int]:
    """A mark of a tensor's contents, which differs once something is written to it, or its `.data` is exchanged."""
    has_storage = tensor.layout is torch.strided and not private.is_transformed(tensor)
    return tensor._version, storage_key(tensor) if has_storage else 0


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


Source = tuple[str, int]  # "input", "result" (of the forward op) or "gradient" (that is handed in), and which of them


class Layout(NamedTuple):
    """All of a tensor but its contents."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device_type: str

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        return Layout(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.device.type)

    @property
    def nbytes(self) -> int:
        """What its elements take."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> torch.Tensor:
        """A tensor of this layout. device: that of the plan; the tensor may be on its host."""
        on = device if device.type == self.device_type else torch.device(self.device_type)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=on)


class Place(NamedTuple):
    """Where a tensor lies. offset_bytes: from where the tensor begins in whose memory it lies."""

    source: Source
    layout: Layout
    offset_bytes: int

    def seen_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in this place. tensor: the source."""
        if self.offset_bytes == 0 and Layout.of(tensor) == self.layout:
            return tensor
        layout = self.layout
        offset_bytes = tensor.storage_offset() * tensor.element_size() + self.offset_bytes
        empty = torch.empty(0, dtype=layout.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), offset_bytes // layout.dtype.itemsize, layout.shape, layout.stride)

    def view_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in this place, in a trace. Raises UnsupportedModel where it has another dtype than its source."""
        layout = self.layout
        if self.offset_bytes == 0 and (tensor.dtype, tensor.shape, tensor.stride()) == layout[:3]:
            return tensor
        if tensor.dtype != layout.dtype:
            raise UnsupportedModel(f"an opaque call returns {tensor.dtype} as {layout.dtype}")
        offset = tensor.storage_offset() + self.offset_bytes // layout.dtype.itemsize
        return tensor.as_strided(layout.shape, layout.stride, offset)


class PlaceFinder:
    """Finds where tensors lie: in the memory of those that are given, else in results of their own."""

    def __init__(self, at_hand: Mapping[Source, torch.Tensor]) -> None:
        self._homes: dict[int, list[tuple[Source, torch.Tensor]]] = {}
        for source, tensor in at_hand.items():
            self._homes.setdefault(storage_key(tensor), []).append((source, tensor))

    def found(self, tensor: torch.Tensor) -> Place | None:
        """The place of a tensor in the memory of those that are given; None where it lies in none of them."""
        return self.of(tensor, "", []) if storage_key(tensor) in self._homes else None

    def of(self, tensor: torch.Tensor, kind: str, results: list[torch.Tensor]) -> Place:
        """The place of a tensor. Where that is new memory, it is added to the results. Raises a Refusal."""
        is_lazy = tensor.layout is torch.strided and (tensor.is_conj() or tensor.is_neg())
        if tensor.layout is not torch.strided or is_lazy or type(tensor) is not torch.Tensor:
            raise Refusal("an opaque call gives, or saves, tensors of a kind that has no place")
        homes, begin_bytes = self._homes.setdefault(storage_key(tensor), []), _begin_bytes(tensor)
        if not homes:
            homes.append(((kind, len(results)), whole(tensor)))
            results.append(homes[0][1])
        before = [(begin_bytes - _begin_bytes(h), source) for source, h in homes if _begin_bytes(h) <= begin_bytes]
        if not before:
            raise Refusal("an opaque call gives, or saves, tensors that begin before its argument does")
        offset_bytes, source = min(before, key=operator.itemgetter(0))  # of the last that begins before
        return Place(source, Layout.of(tensor), offset_bytes)


def _begin_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset() * tensor.element_size())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where it takes up its memory, else all of that memory."""
    memory = tensor.untyped_storage()
    if memory.nbytes() == tensor.numel() * tensor.element_size() and tensor.storage_offset() == 0:
        return tensor
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return flat.set_(memory, 0, (memory.nbytes() // tensor.element_size(),), (1,))


def span(tensor: torch.Tensor) -> int:
    """How many elements lie between the first and the last one of a tensor, these included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
