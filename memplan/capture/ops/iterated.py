"""The layout that PyTorch's TensorIterator gives a new result of its operands.

Strides of dimensions of one element are exact too: later kernels use them to see whether channels come last, and then
run in other ways. PyTorch's fake kernels order dimensions otherwise where they have one element or are broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memplan.capture.ops.layout import dense_stride, is_dense

Extents = tuple[int, ...]

_CHANNELS_LAST = (1, 3, 2, 0)  # dimensions, the innermost first


def iterated_layout(operands: Sequence[torch.Tensor | complex]) -> tuple[Extents, Extents]:
    """(size, stride) of the result of an op over these operands. The first operand decides before the others."""
    tensors = [t for t in operands if isinstance(t, torch.Tensor)]
    size = tuple(torch.broadcast_shapes(*(t.shape for t in tensors)))
    if all(isinstance(t, torch.Tensor) and t.shape == size for t in operands):
        for order in (None, _CHANNELS_LAST) if len(size) == 4 else (None,):
            stride = dense_stride(size, order)
            if all(_is_like(t, stride) for t in tensors):
                return size, stride
        first = tensors[0].stride()
        if all(t.stride() == first and is_dense(t) for t in tensors):
            return size, first
    return size, dense_stride(size, _sorted(size, [_broadcast(size, t) for t in tensors]))


def _is_like(tensor: torch.Tensor, stride: Extents) -> bool:
    """Whether elements lie as with these strides. Strides of dimensions of one element do not count."""
    return all(n == 1 or a == b for n, a, b in zip(tensor.shape, tensor.stride(), stride, strict=True))


def _broadcast(size: Extents, tensor: torch.Tensor) -> Extents:
    """Strides for all dimensions of the result; 0 where the operand is repeated."""
    new = len(size) - tensor.dim()
    own = zip(tensor.shape, tensor.stride(), size[new:], strict=True)
    return (0,) * new + tuple(0 if n == 1 and whole != 1 else s for n, s, whole in own)


def _sorted(size: Extents, strides: Sequence[Extents]) -> list[int]:
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


def _is_outside(size: Extents, strides: Sequence[Extents], a: int, b: int) -> bool | None:
    """Whether dimension `a` goes outside of `b`; None where no operand decides."""
    for stride in strides:
        if 0 in (stride[a], stride[b]):
            continue
        if stride[a] != stride[b]:
            return stride[a] > stride[b]
        if size[a] > size[b]:
            return True
    return None
