"""Memory as it was before ops wrote to it, for traces and rehearsals, which must leave nothing changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from memplan import torch_private as private
from memplan.capture.ops.dataflow import written_arguments
from memplan.capture.ops.layout import storage_key


class KeptMemory:
    """Copies of storages, made before ops write to them. As a context, it puts all contents back at the end.

    - written: the tensors that were given to `keep`.
    - around: for each of them, the modules that wrote to it first, the innermost first.
    """

    def __init__(self) -> None:
        self.written: list[torch.Tensor] = []
        self.around: list[tuple[Any, ...]] = []
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __enter__(self) -> KeptMemory:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def keep(self, tensor: torch.Tensor, around: tuple[Any, ...] = ()) -> None:
        """Copy a tensor's storage, unless there is a copy already. around: the modules that are running."""
        if any(tensor is known for known in self.written):
            return
        self.written.append(tensor)
        self.around.append(around)
        if (key := storage_key(tensor)) not in self._copies:
            storage = tensor.untyped_storage()
            with private.outside_of_tracing():
                self._copies[key] = storage, storage.clone()

    def undo(self) -> None:
        """Put the contents back. Version counters of tensors are not put back."""
        with private.outside_of_tracing():
            for storage, copy in self._copies.values():
                storage.copy_(copy)


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an op's schema says it writes to. A higher-order op has none: the ops that it runs write."""
    found = () if isinstance(func, private.HigherOrderOperator) else written_arguments(func, args, kwargs)
    return (tensor for tensor in found if isinstance(tensor, torch.Tensor) and has_memory(tensor))


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's contents can be put back: it is neither sparse, nor meta, nor one of torch.func's."""
    return tensor.layout is torch.strided and not tensor.is_meta and not private.is_transformed(tensor)
