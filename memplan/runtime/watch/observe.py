"""The first steps of a plan as they really run: what they held and took, for a comparison with the prediction."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

from memplan import torch_private as private
from memplan.runtime.watch.meter import LiveMeter


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
