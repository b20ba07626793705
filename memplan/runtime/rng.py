"""The generator's state: kept before a random op that will run again, and put back for that run alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def save_rng(device: torch.device) -> Any:
    """The state of the device's default generator: 5056 bytes on a CPU; (seed, offset) on CUDA, no device memory."""
    if device.type == "cpu":
        return torch.get_rng_state()
    generator = torch.cuda.default_generators[device.index or 0]
    return generator.initial_seed(), generator.get_offset()


def _restore_rng(device: torch.device, state: Any) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
        return
    generator = torch.cuda.default_generators[device.index or 0]
    generator.manual_seed(state[0])
    generator.set_offset(state[1])


def replay(state: Any, device: torch.device, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a random op with the generator state of its first run; the generator itself is left as it was."""
    present = save_rng(device)
    try:
        _restore_rng(device, state)
        return target(*args, **kwargs)
    finally:
        _restore_rng(device, present)
