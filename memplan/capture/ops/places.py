"""Where the tensors lie that an island gives, saves and reads: in arguments, in results, or in gradients."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import NamedTuple

import torch

from memplan.capture.ops.layout import storage_key
from memplan.capture.ops.ways import Refusal
from memplan.errors import UnsupportedModel

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
