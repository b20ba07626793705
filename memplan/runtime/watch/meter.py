"""What a step holds while it runs, and what a plan's first steps hold and take, to be compared with the prediction."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memplan import torch_private as private
from memplan.capture.ops.layout import allocated_bytes, strided_parts
from memplan.torch_private import pytree


class LiveMeter(private.RealOps):
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
                storage = part.untyped_storage() if private.is_allocated(part) else None
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


class Observer:
    """Watches the first step for its peak and the second for its seconds, then calls `done` and is finished.

    The first step's seconds would include warming up. On CUDA the device's peak counter is reset when that begins.

    - held: called when the first step begins; gives the tensors that are there and that it reads, in any nesting of
      containers.
    - done: called with bytes beyond what was held when the step began, and seconds. Kernel scratch counts on CUDA only.
    - leaves_out: says of a storage that it is host memory.
    - after_steps: steps that pass before the one that counts as the first.
    - forwards: of that step, before its first backward has ended.
    """

    def __init__(
        self,
        device: torch.device,
        held: Callable[[], object],
        done: Callable[[int, float], None],
        leaves_out: Callable[[torch.UntypedStorage], bool],
        after_steps: int = 0,
    ) -> None:
        self.finished, self._waits, self.forwards = False, after_steps, 0
        self._device, self._held, self._done = device, held, done
        self._meter = LiveMeter(leaves_out) if device.type == "cpu" else None
        self._before_bytes = self._grown_bytes = 0
        self._begun = False
        self._time_s = 0.0
        self._steps = 0

    @property
    def grown_bytes(self) -> int | None:
        """The most that the first step held beyond what was held when it began. None until that step is over."""
        return self._grown_bytes if self._steps else None

    @contextlib.contextmanager
    def forward(self, inputs: object) -> Iterator[None]:
        """A context for the forward pass of a step. inputs: what that reads."""
        if self._waits:
            yield
            return
        self._time_s = 0.0
        self.forwards += not self._steps
        if self._begun:  # further forwards before the first backward: they grow, and so do their inputs
            if self._meter is not None:
                self._meter.register(inputs)
        else:
            self._begun, held = True, self._held()
            if self._meter is not None:
                self._meter.register([inputs, held])
                self._before_bytes = self._meter.live_bytes
            elif self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
                self._before_bytes = private.requested_bytes(self._device)[0]
        with self._half():
            yield

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        if not self._begun:
            self._waits = max(0, self._waits - 1)
            yield
            return
        with self._half():
            yield
        if not self._steps:
            peak_bytes = private.requested_bytes(self._device)[1] if self._device.type == "cuda" else 0
            peak_bytes = peak_bytes if self._meter is None else self._meter.peak_bytes
            self._grown_bytes = peak_bytes - self._before_bytes
            self._meter = None
        else:
            self.finished = True
            self._done(self._grown_bytes, self._time_s)
        self._steps += 1

    @contextlib.contextmanager
    def _half(self) -> Iterator[None]:
        start = self._now()
        with self._meter or contextlib.nullcontext():
            yield
        self._time_s += self._now() - start

    def _now(self) -> float:
        if self._device.type == "cuda" and self._steps:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
