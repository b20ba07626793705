"""States that a second run of an op needs: of random generators, and of the Python that a call may change.

They are kept before an op that will run again, and put back for that run alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memplan.capture.attributes.attributes_kept import AttributesKept
from memplan.capture.ops.island_ops import IslandKernel
from memplan.capture.trace.generators import python_generators, python_generators_here, python_generators_kept


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


class StateKept(contextlib.ExitStack):
    """Says whether a call changes Python state: attributes, containers, globals that its code names, generators.

    As a context it puts that back, unless it is dropped before.
    """

    def __init__(self, attributes: AttributesKept, own: Sequence[torch.Generator], device: torch.device) -> None:
        """own: generators other than PyTorch's default ones on the device, and Python's."""
        super().__init__()
        self._attributes, self._own, self._device = attributes, own, device
        self.begins()
        self.callback(attributes.restore)

    def _drawn(self) -> tuple[Any, ...]:
        return [bytes(g.get_state().numpy()) for g in self._own], held_rng(self._device), python_generators()

    def begins(self) -> bool:
        """Note where generators are, as the call begins. False where other state is no longer what was noted."""
        self._then, self._put = self._drawn(), python_generators_here()
        return not self._attributes.changed()

    def changed(self, draws: bool) -> bool:
        """Whether the call has changed state. draws: it draws from PyTorch's default generators; they do not count."""
        own, default, _ = self._drawn()
        return own != self._then[0] or (default != self._then[1] and not draws) or self._attributes.changed()

    def replay(self) -> Callable[[Callable[[], Any]], Any] | None:
        """What runs the call again with the same numbers of Python's generators; None where it has drawn none."""
        put = self._put

        def replayed(run: Callable[[], Any]) -> Any:
            with python_generators_kept():
                put()
                return run()

        return replayed if python_generators() != self._then[2] else None
