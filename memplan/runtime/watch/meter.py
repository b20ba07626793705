"""What a step holds while it runs: bytes of every storage that an op returns, until that storage is freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from memplan.capture.ops.layout import allocated_bytes, strided_parts
from memplan.torch_private import RealOps, is_allocated, pytree


class LiveMeter(RealOps):
    """Counts the bytes of storages from the op that returns them until they are freed.

    A storage counts once, however many tensors share it. What lives before the step (parameters, buffers, inputs) is
    handed to `register` first. On a CPU the backward pass runs on the calling thread, so it is counted too. Kernel
    scratch and tensors that are made without the dispatcher (a saved generator state) are not counted, nor tensors
    that have a size but no memory. Of sparse tensors, the indices and the values count.

    - live_bytes: held now.
    - peak_bytes: the most held since the meter was made, or since `reset_peak`.
    - leaves_out: says of a storage that it does not count.
    """

    def __init__(self, leaves_out: Callable[[torch.UntypedStorage], bool] | None = None) -> None:
        super().__init__()
        self._leaves_out = leaves_out
        self._sizes_bytes: dict[int, int] = {}
        self.live_bytes = 0
        self.peak_bytes = 0

    def register(self, tensors: Any) -> None:
        """Count tensors that exist already, in any nesting of containers."""
        for tensor in pytree.tree_leaves(tensors):
            for part in strided_parts(tensor) if isinstance(tensor, torch.Tensor) else ():
                storage = part.untyped_storage() if is_allocated(part) else None
                if storage is None or (self._leaves_out is not None and self._leaves_out(storage)):
                    continue
                key, size_bytes = storage._cdata, allocated_bytes(storage.nbytes(), storage.device)
                known_bytes = self._sizes_bytes.get(key)
                if known_bytes is None:
                    # The Python object lives exactly as long as the storage, whoever holds that.
                    weakref.finalize(storage, self._freed, key).atexit = False
                self._sizes_bytes[key] = size_bytes
                self.live_bytes += size_bytes - (known_bytes or 0)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def reset_peak(self) -> None:
        """Start a new peak at the bytes that are live now."""
        self.peak_bytes = self.live_bytes

    def on_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out = self.run_op(func, args, kwargs)
        self.register(out)
        return out

    def _freed(self, key: int) -> None:
        self.live_bytes -= self._sizes_bytes.pop(key)
