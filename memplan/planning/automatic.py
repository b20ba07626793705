"""The budget of users who name none: that of the environment, or what the device has room for."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from memplan.logs import log
from memplan.problem.budgets import device_bytes
from memplan.units import format_bytes

AUTOMATIC = "auto"
_RESERVE = 0.1  # of the device: for fragmentation, libraries, and what other processes come to need


def budget_of_environment() -> str | None:
    """`MEMPLAN_BUDGET`, for calls that name no budget; None where it is not set. Raises ValueError where it is none."""
    given = os.environ.get("MEMPLAN_BUDGET", "").strip()
    if given and given != AUTOMATIC:
        try:
            device_bytes(given)
        except ValueError as error:
            raise ValueError(f"MEMPLAN_BUDGET is {given!r}: {error}") from error
    return given or None


def automatic_bytes(device: torch.device) -> int:
    """What a step may hold on a device, in bytes, less a reserve of a tenth of the device.

    On a GPU: what is free, and what this process holds already. On a CPU: physical memory, or the limit of the
    container.
    """
    if device.type == "cuda":
        free_bytes, whole_bytes = torch.cuda.mem_get_info(device)
        room_bytes = free_bytes + torch.cuda.memory_reserved(device)
    else:
        room_bytes = whole_bytes = memory_bytes()
    budget_bytes = max(1, room_bytes - int(_RESERVE * whole_bytes))
    log.info(
        "the budget 'auto' is %s: %s of %s %s, less a reserve of %d%%",
        format_bytes(budget_bytes), format_bytes(room_bytes), device, "free or this process's" if
        device.type == "cuda" else "memory", 100 * _RESERVE,
    )  # fmt: skip
    return budget_bytes


def memory_bytes() -> int:
    """Physical memory, or less where a container is limited to that."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            found = min(found, int(Path(path).read_text()))
        except (OSError, ValueError):  # there is none, or it is "max"
            continue
    return found
