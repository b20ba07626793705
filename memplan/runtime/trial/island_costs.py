"""What one run of an island takes and leaves: time, memory while it runs, memory left behind, arguments written to."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memplan import torch_private as private
from memplan.capture.attributes.kept_memory import has_memory
from memplan.capture.ops.island_call import IslandCost
from memplan.capture.ops.layout import same_bits, storage_key
from memplan.runtime.watch.meter import LiveMeter


def measured_twice(
    run: Callable[[], list[torch.Tensor]], given: Sequence[torch.Tensor | None], device: torch.device
) -> tuple[list[torch.Tensor], IslandCost, int]:
    """Results and cost of one of the two ops, from two runs: one for memory, one for time. given: its inputs.

    Last come the bytes that a run leaves behind and does not return: tensors in a closure that `ctx` has, for instance.
    """
    meter, record = LiveMeter(), private.MemoryRecord()  # which has what kernels allocate for themselves, too
    meter.register(given)
    before_bytes = meter.live_bytes
    with record if device.type == "cpu" else contextlib.nullcontext(), meter:
        results = run()
    made_bytes = sum(t.untyped_storage().nbytes() for t in results)
    peak_bytes = max(meter.peak_bytes - before_bytes, record.peak_bytes)
    meter.register(results)
    if meter.live_bytes > before_bytes + made_bytes:
        gc.collect()
    left_bytes = meter.live_bytes - before_bytes - made_bytes
    del results
    begin = time.perf_counter()
    results = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    time_s = time.perf_counter() - begin
    return results, IslandCost(time_s, max(0, peak_bytes - made_bytes)), left_bytes


class WrittenArguments:
    """Compares the arguments of a call with what they were. The copies lie in the CPU's memory, so none is on a GPU."""

    def __init__(self, tensors: Sequence[torch.Tensor], given: int) -> None:
        """Note what is there. tensors: the first `given` are arguments, each once."""
        self._all, self._tensors = tensors, tensors[:given]
        self._versions = [t._version for t in tensors]
        self._copies = [t.detach().to("cpu", copy=True) if has_memory(t) else None for t in self._tensors]

    @property
    def seen(self) -> list[int]:
        """Positions of tensors to which something was written, as autograd knows."""
        return [i for i, (t, v) in enumerate(zip(self._all, self._versions, strict=True)) if t._version != v]

    def unseen(self) -> frozenset[int]:
        """Positions of arguments that have other contents, and autograd does not know of it."""
        known = enumerate(zip(self._tensors, self._versions, self._copies))  # not of all
        unseen = ((i, t, copy) for i, (t, v, copy) in known if t._version == v and copy is not None)
        return frozenset(i for i, t, copy in unseen if not same_bits(t.cpu(), copy))

    def returned(self, outputs: Sequence[Any]) -> tuple[tuple[int, int], ...]:
        """(argument, output) where the call writes to an argument, and returns it: see `Island.in_place`.

        Arguments in whose memory other tensors lie, that are given or returned, are not among them.
        """
        there = [t for t in (*self._all, *outputs) if isinstance(t, torch.Tensor) and has_memory(t)]
        keys = [storage_key(t) for t in there]
        written = [i for i in self.seen if i < len(self._tensors)]
        pairs = ((i, place) for i in written for place, output in enumerate(outputs) if output is self._tensors[i])
        return tuple((i, place) for i, place in pairs if keys.count(storage_key(outputs[place])) == 2)
