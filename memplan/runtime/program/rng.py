"""States of random generators: kept before a random op that will run again, and put back for that run alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memplan.capture.ops.island_ops import IslandKernel


def _default_generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def save_rng(device: torch.device) -> Any:
    """The state of the device's default generator: 5056 bytes on a CPU; (seed, offset) on CUDA, no device memory."""
    if device.type == "cpu":
        return torch.get_rng_state()
    generator = _default_generator(device)
    return generator.initial_seed(), generator.get_offset()


def restore_rng(device: torch.device, state: Any) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
        return
    generator = _default_generator(device)
    generator.manual_seed(state[0])
    generator.set_offset(state[1])


def held_rng(device: torch.device) -> tuple[bytearray, Any]:
    """The states of all generators that a step on the device may draw from: a step on a GPU also from the CPU's.

    They are held for the length of the step, so they are in a form that takes no tensor memory.
    """
    return bytearray(torch.get_rng_state().numpy()), None if device.type == "cpu" else save_rng(device)


def restore_held_rng(device: torch.device, state: tuple[bytearray, Any]) -> None:
    on_cpu, on_device = state
    torch.set_rng_state(torch.frombuffer(on_cpu, dtype=torch.uint8))
    if on_device is not None:
        restore_rng(device, on_device)


def replay_random(state: Any, device: torch.device, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a random op with the generator state of its first run, and leave the generator as it was."""
    present = save_rng(device)
    try:
        restore_rng(device, state)
        return target(*args, **kwargs)
    finally:
        restore_rng(device, present)


@dataclass(frozen=True)
class ReplayedIsland:
    """Runs the forward op of an island with the generator states of its first run. fx writes no call with it in it."""

    kernel: IslandKernel

    @property
    def __name__(self) -> str:
        return self.kernel.__name__

    def __call__(self, state: tuple[bytearray, Any], device: torch.device, /, *args: Any) -> Any:
        return replay_all(state, device, self.kernel, *args)


def replay_all(state: Any, device: torch.device, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run an op that draws from an unknown generator, with all states of its first run. state: from `held_rng`."""
    present = held_rng(device)
    try:
        restore_held_rng(device, state)
        return target(*args, **kwargs)
    finally:
        restore_held_rng(device, present)
