"""The budget of users who name none: that of the environment, or what the device has room for."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from memplan import torch_private as private
from memplan.logs import log
from memplan.problem.budgets import device_bytes
from memplan.units import format_bytes

AUTOMATIC = "auto"
_RESERVE = 0.1  # of the device: for libraries, and what other processes come to need
_RESERVE_FOR_PIECES = 0.25  # the same, and memory that lies in pieces between blocks


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
    """What a step may hold on a device, in bytes, less a reserve (`reserve_of`).

    On a GPU: what is free, and what this process holds already. On a CPU: physical memory, or the limit of the
    container.
    """
    if device.type == "cuda":
        free_bytes, whole_bytes = torch.cuda.mem_get_info(device)
        room_bytes = free_bytes + torch.cuda.memory_reserved(device)
    else:
        room_bytes = whole_bytes = memory_bytes()
    reserve = reserve_of(device)
    budget_bytes = max(1, room_bytes - int(reserve * whole_bytes))
    log.info(
        "the budget 'auto' is %s: %s of %s %s, less a reserve of %d%%",
        format_bytes(budget_bytes), format_bytes(room_bytes), device, "free or this process's" if
        device.type == "cuda" else "memory", 100 * reserve,
    )  # fmt: skip
    return budget_bytes


def reserve_of(device: torch.device) -> float:
    """The share of a device that the budget "auto" leaves: a tenth, more where the allocator wastes memory."""
    wastes = device.type == "cuda" and not private.can_expand_segments(device)
    return _RESERVE_FOR_PIECES if wastes else _RESERVE


def prepare_allocator(device: torch.device) -> None:
    """On CUDA, keep PyTorch's allocator from leaving memory in pieces that no block fits. Warns where that can't be."""
    if device.type != "cuda" or private.segments_expand():
        return
    if private.can_expand_segments(device):
        private.expand_segments()
        log.info("PyTorch's allocator has expandable_segments:True from now on, so that memory is not left in pieces")
    else:
        log.warning(
            "PyTorch's allocator may leave a fifth of the device in pieces that fit nothing: start the program with "
            "PYTORCH_ALLOC_CONF=expandable_segments:True where that works, or choose a lower budget"
        )


def memory_bytes() -> int:
    """Physical memory, or less where a container is limited to that."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            found = min(found, int(Path(path).read_text()))
        except (OSError, ValueError):  # there is none, or it is "max"
            continue
    return found
