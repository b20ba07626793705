"""How fast the ranks of a group communicate, measured by all of them together."""

from __future__ import annotations

import time

import torch

from memplan.capture.shards import NetworkSpeed
from memplan.problem.data import GatherSpeed

_SMALL_BYTES, _LARGE_BYTES = 1 << 14, 1 << 22  # of the whole
_RUNS = 3  # of each size; the best counts


def measure_network(group: torch.distributed.ProcessGroup, device: torch.device) -> NetworkSpeed:
    """The speed of collectives of each kind, from two sizes. All ranks of the group call it together.

    A kind that the group's backend does not have keeps the figure of `NetworkSpeed()`.
    """
    found = NetworkSpeed()
    for kind in NetworkSpeed._fields if device.type != "meta" else ():
        try:
            small_s, large_s = (_seconds(kind, size, group, device) for size in (_SMALL_BYTES, _LARGE_BYTES))
        except RuntimeError as error:
            if "not support" not in str(error) and "No backend" not in str(error):
                raise
            continue
        bytes_per_s = (_LARGE_BYTES - _SMALL_BYTES) / max(large_s - small_s, 1e-9)
        found = found._replace(**{kind: GatherSpeed(bytes_per_s, max(0.0, small_s - _SMALL_BYTES / bytes_per_s))})
    return found


def _seconds(kind: str, size_bytes: int, group: torch.distributed.ProcessGroup, device: torch.device) -> float:
    """Seconds of the best of some collectives of this size."""
    part = torch.zeros(size_bytes // 4 // group.size(), dtype=torch.float32, device=device)
    whole, times = part.new_zeros(part.numel() * group.size()), []
    for _ in range(_RUNS):
        start = time.perf_counter()
        if kind == "all_gather":
            torch.distributed.all_gather_into_tensor(whole, part, group)
        elif kind == "reduce_scatter":
            torch.distributed.reduce_scatter_tensor(part, whole, group=group)
        else:
            torch.distributed.all_reduce(whole, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)
