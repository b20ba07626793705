"""Undo writes of a forward to what was there before it: parameters, arguments, tensors in attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.attributes.kept_memory import KeptMemory, has_memory, written_by
from memplan.capture.attributes.tables import held_tensors
from memplan.capture.ops.layout import storage_key
from memplan.capture.trace.call import Call


class WritesUndone(private.RealOps):
    """Copies memory as soon as an op is about to write to it; `undo` puts it back.

    Parameters whose `.data` was exchanged get theirs back too, except sharded ones, which come and go. Buffers are not
    looked at.
    """

    def __init__(self, model: nn.Module, call: Call, known: Sequence[torch.Tensor] = ()) -> None:
        """Watch memory of a model and a call. known: tensors that are written to for certain; they are copied now."""
        super().__init__()
        parameters = [private.part_here(p) for p in model.parameters()]
        self._data = [(p, p.data, storage_key(p)) for p in parameters if p.numel()]
        tensors = [t for t in (*parameters, *call.tensors, *held_tensors(model)) if has_memory(t)]
        self._watched = {storage_key(t) for t in tensors if t.numel()}
        self._memory = KeptMemory()
        for tensor in known:
            self._memory.keep(tensor)

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        """What forward has written to."""
        return tuple(self._memory.written)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            if storage_key(tensor) in self._watched:
                self._memory.keep(tensor)
        return self.run_op(func, args, kwargs)

    def undo(self) -> None:
        for parameter, data, key in self._data:
            if storage_key(parameter) != key and parameter.shape == data.shape:
                parameter.data = data
        self._memory.undo()
