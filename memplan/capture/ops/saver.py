"""What the autograd graph of an island saves: tensors as they are, or copies of them in one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memplan import torch_private as private
from memplan.capture.ops.island_facts import ForwardFacts
from memplan.capture.ops.layout import storage_key
from memplan.capture.ops.places import Layout, Place, PlaceFinder, span

_ALIGNED_BYTES = 512  # where tensors begin in a buffer


class Saver:
    """Takes what the graph of one run saves: as it is, or copied to a buffer.

    - tensors: what was saved, in order, where there is no buffer.
    - places: where it lies, where there is one; the tensor itself where the buffer has no room for it.
    - beside_bytes: what the buffer has no room for.
    """

    def __init__(
        self,
        buffer: torch.Tensor | None = None,
        given: Sequence[torch.Tensor] = (),
        planned: ForwardFacts | None = None,
    ) -> None:
        self.buffer, self.tensors, self.places = buffer, list[torch.Tensor](), list[Place | torch.Tensor]()
        self.beside_bytes = self.end_bytes = 0
        kept = () if planned is None else planned.kept
        known = {("input", i): t for i, t in enumerate(given) if ("input", i) in kept}
        self._given, self._made = PlaceFinder(known), 0 if planned is None else planned.made
        self._known: dict[Any, int] = {}  # where the buffer has what lies in which memory
        self._alive: list[Any] = []  # so that no other memory is known by the same key

    def let_go(self) -> None:
        """Hold no tensors any more: hooks of the graph hold this."""
        self.tensors.clear()
        self.places.clear()
        self.buffer, self._given = None, PlaceFinder({})

    def add(self, tensor: torch.Tensor) -> int:
        """Take a tensor. Gives its number."""
        if self.buffer is None:
            self.tensors.append(tensor)
            return len(self.tensors) - 1
        self.places.append(self._given.found(tensor) or self._copied(tensor, self.buffer))
        return len(self.places) - 1

    def _copied(self, tensor: torch.Tensor, buffer: torch.Tensor) -> Place | torch.Tensor:
        if tensor.device != buffer.device or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return tensor.clone()
        elements = span(tensor)
        key = storage_key(tensor), tensor.storage_offset(), elements, tensor.dtype, tensor._version
        if key not in self._known:
            begin_bytes = -(-self.end_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
            end_bytes = begin_bytes + elements * tensor.element_size()
            if end_bytes > buffer.numel():
                self.beside_bytes += elements * tensor.element_size()
                return tensor.clone()
            flat = buffer[begin_bytes:end_bytes].view(tensor.dtype)
            flat.copy_(tensor.as_strided((elements,), (1,), tensor.storage_offset()))
            self._alive.append(private.known_storage(tensor))
            self._known[key], self.end_bytes = begin_bytes, end_bytes
        return Place(("result", self._made), Layout.of(tensor), self._known[key])


def bytes_for(saved: Sequence[torch.Tensor]) -> int:
    """Bytes of a buffer that has room for copies of these tensors."""
    spans = {(storage_key(t), t.storage_offset(), span(t), t.dtype): span(t) * t.element_size() for t in saved}
    return sum(-(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for size_bytes in spans.values())
