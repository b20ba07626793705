"""What one run of the forward or backward of an island takes: time, memory while it runs, and memory left behind."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Sequence

import torch

from memplan import torch_private as private
from memplan.capture.ops.island_call import IslandCost
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
