"""Collectives of a step: their signature, which all ranks of a group have in common, and what a program calls.

A program starts a collective where the schedule has its op, and completes it where the schedule waits. In between it
runs beside the ops: gloo has threads for that, NCCL a stream of its own.

Sharded parameters are gathered by the engine (`Shards`). One `GatherSession` serves one forward and its backward.
Several may be under way at once: a parameter is freed when the last of them releases it. A session that is collected,
because its step was given up, releases all that it holds.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.shards import Handle, Shards

GRADIENT = "gradient "  # a gradient is handed over to autograd, where hooks may reduce it across ranks


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collective signature of a step.

    - events: what happens, in order. "gradient layers.0.weight" is the hand-over of that gradient; any other event is a
      collective that the step runs itself. Shapes are left out, because ranks may have other batches.
    - digest: 8 bytes, equal for equal events.
    """

    events: tuple[str, ...]
    digest: bytes

    @staticmethod
    def of(events: Iterable[str]) -> Collectives:
        events = tuple(events)
        return Collectives(events, hashlib.sha256("\n".join(events).encode()).digest()[:8])

    @property
    def only_gradients(self) -> bool:
        """Whether the step runs no collective itself, so that its passes may run again on one rank alone."""
        return all(event.startswith(GRADIENT) for event in self.events)


def start(store: Any, collective: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Start a collective. Gives the tensor to which it writes."""
    result: torch.Tensor = collective(*args, **kwargs)
    store.transfers.collectives[id(result)] = result
    return result


def complete(store: Any, result: torch.Tensor, *inputs: torch.Tensor) -> None:
    """Let what follows wait for a collective. inputs: what it reads, which is held for it until here."""
    del store.transfers.collectives[id(result)]
    private.wait_for(result)


class Gathers:
    """The gathered parameters of one planned model. users: the number of sessions that hold each, by its id."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.users: Counter[int] = Counter()

    def end(self, parameter: nn.Parameter) -> None:
        """Note that one user has done with a parameter, and free it after the last."""
        self.users[id(parameter)] -= 1
        if not self.users[id(parameter)]:
            del self.users[id(parameter)]
            self.shards.release(parameter)


class GatherSession:
    """The gathered parameters of one forward and its backward."""

    __slots__ = ("__weakref__", "_find", "_gathers", "_held")

    def __init__(self, gathers: Gathers, find: Callable[[str], torch.Tensor]) -> None:
        self._gathers, self._find = gathers, find
        self._held: dict[str, tuple[nn.Parameter, Handle]] = {}
        weakref.finalize(self, _give_up, gathers, self._held).atexit = False


def _give_up(gathers: Gathers, held: dict[str, tuple[nn.Parameter, Handle]]) -> None:
    for parameter, handle in held.values():
        handle.wait()
        gathers.end(parameter)
    held.clear()


def open_gathers(store: Any) -> GatherSession:
    return GatherSession(store.gathers, store.__getitem__)


@private.with_function_modes
def gather(session: GatherSession, name: str) -> str:
    """Begin to gather the parameter called `name`, for one more user. Gives what `gathered` takes."""
    parameter = session._find(name)
    assert isinstance(parameter, nn.Parameter)
    assert name not in session._held, f"{name} is gathered twice"
    session._gathers.users[id(parameter)] += 1
    session._held[name] = parameter, session._gathers.shards.gather(parameter)
    return name


@private.with_function_modes
def gathered(session: GatherSession, ticket: str) -> torch.Tensor:
    """The whole parameter. What follows waits for its gather."""
    parameter, handle = session._held[ticket]
    handle.wait()
    shard = session._gathers.shards.shard(parameter)
    if shard is None or parameter.shape != shard.shape:
        raise RuntimeError(
            f"memplan: {ticket} has shape {tuple(parameter.shape)} after it was gathered. Somebody else frees it, or "
            "changed its shape"
        )
    return parameter.detach()


@private.with_function_modes
def release(session: GatherSession, name: str) -> None:
    """Let the session be done with a gathered parameter, which nothing reads from here on."""
    session._gathers.end(session._held.pop(name)[0])
