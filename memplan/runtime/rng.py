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


def held_rng(device: torch.device) -> Any:
    """The same in a form that takes no tensor memory, for states that are held for the length of a step."""
    return bytearray(torch.get_rng_state().numpy()) if device.type == "cpu" else save_rng(device)


def restore_rng(device: torch.device, state: Any) -> None:
    """Put the generator where `save_rng` or `held_rng` found it."""
    if device.type == "cpu":
        torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8) if isinstance(state, bytearray) else state)
        return
    generator = torch.cuda.default_generators[device.index or 0]
    generator.manual_seed(state[0])
    generator.set_offset(state[1])


def replay(state: Any, device: torch.device, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a random op with the generator state of its first run; the generator itself is left as it was."""
    present = save_rng(device)
    try:
        restore_rng(device, state)
        return target(*args, **kwargs)
    finally:
        restore_rng(device, present)
