"""The two ops of an island: as a trace has them, and as programs call them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from memplan import torch_private as private
from memplan.capture.ops.island import Island, copy_of
from memplan.capture.ops.island_call import IslandCost
from memplan.capture.ops.recorded_graph import graph_of, ticket_of

_LIBRARY = torch.library.Library("memplan", "FRAGMENT")
_LIBRARY.define("island(str name, Tensor[] tensors, SymInt[] sizes) -> Tensor[]")
_LIBRARY.define("island_backward(str name, Tensor?[] grads, Tensor[] kept) -> Tensor[]")
FORWARD = torch.ops.memplan.island.default
BACKWARD = torch.ops.memplan.island_backward.default

_TRACED: dict[str, Island] = {}  # those of the trace in progress, by name, at its sizes


@contextlib.contextmanager
def as_ops() -> Iterator[dict[str, Island]]:
    """A context for a trace. Gives a table for islands, whose ops have results then. One thread at a time may trace."""
    try:
        yield _TRACED
    finally:
        _TRACED.clear()


def _fake_results(which: str, name: str, *arguments: Any) -> list[torch.Tensor]:
    """Results of an op, and its last 8 bytes. which: of the facts of the island."""
    island = _TRACED[name]
    layouts = getattr(island, which).results
    return [*(layout.empty(island.device) for layout in layouts), torch.empty((), dtype=torch.int64, device="cpu")]


for _op, _which in (("island", "forward_facts"), ("island_backward", "backward_facts")):
    torch.library.register_fake(f"memplan::{_op}", functools.partial(_fake_results, _which), lib=_LIBRARY)


@dataclass(frozen=True)
class IslandKernel:
    """One of the two ops, to be called in a program.

    - forward: which.
    - again: it has run in the step before. repeated: it runs more than once in the step.
    """

    island: Island
    forward: bool
    again: bool = False
    repeated: bool = False
    __name__: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        kind = "island" if self.forward else f"island_backward{self.island.backward_mode}"
        object.__setattr__(self, "__name__", f"{kind}_{self.island.function}")

    def __call__(self, store: Any, *args: Any) -> list[torch.Tensor]:
        """Run it. store: has the model, and how to repeat first runs that drew numbers or changed Python state."""
        island, is_sized = self.island, self.island.rules is not None
        if self.forward:
            tensors, sizes = args
            own = island.at(island.numbers(tensors, sizes)) if is_sized else island
            run = functools.partial(own.forward, store.model, tensors, self.again)
            if self.again and island.name in store.first_runs:
                return store.first_runs[island.name](run)  # type: ignore[no-any-return]
            is_first = self.repeated and not self.again and not private.is_captured(island.device)
            state = store.states.get(island.name) if is_first else None
            if is_first and (state is None or not state.begins()):
                state = store.states[island.name] = island.kept(store.model)
            results = run()
            if graph_of(results[-1]).wrote:
                store.wrote.append(island.title)
            if state is None:
                return results
            if state.changed(island.random) or graph_of(results[-1]).wrote:
                copies, graph = [*map(copy_of, results[:-1])], graph_of(results[-1])
                store.first_runs[island.name] = lambda _: [*map(copy_of, copies), ticket_of(graph)]
                island.tell_of(sum(t.nbytes for t in copies))
            elif (replay := state.replay()) is not None:
                store.first_runs[island.name] = replay
            return results
        grads, kept = args
        island = island.at(graph_of(kept[0]).numbers or ()) if is_sized else island
        results = island.backward(grads, kept, store.absent)
        if store.gets_none((island.name,)):  # in eager, its backward does not run
            store.absent.update((island.name, position) for position in range(len(island.inputs)))
        return results

    @property
    def repeats(self) -> bool:
        """Whether it may run again. Backward runs once."""
        return self.forward and self.island.repeats

    @property
    def cost(self) -> IslandCost:
        """What one run takes."""
        return self.island.forward_cost if self.forward else self.island.backward_cost


def kernel_of(target: Any, name: str, islands: Mapping[str, Island]) -> IslandKernel | None:
    """The kernel that an op of a trace stands for; None for an op that is none of an island's. name: its argument."""
    return IslandKernel(islands[name], target is FORWARD) if target in (FORWARD, BACKWARD) else None
