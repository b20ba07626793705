"""A forward that waits for its backward: what it saved, what it read, and what it wrote to.

Saved tensors live in a list that backward empties, so the version checks that autograd would make on them are made
here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from memplan import torch_private as private
from memplan.capture.analysis.traced import Traced
from memplan.capture.ops.layout import storage_key, tensors_of
from memplan.capture.ops.sizes import Numbers
from memplan.capture.trace.raw_trace import Autocast
from memplan.runtime.program.lower import Program
from memplan.runtime.program.outputs import Returned
from memplan.runtime.program.parameters import ParameterStore


@dataclass(frozen=True, slots=True)
class Written:
    """What forward writes to, of that which is there before it.

    - buffers: names of these buffers.
    - for_good: it also writes to what can't be put back: inputs, constants, buffers that it exchanges.
    - matters: forward's results depend on such a write.
    """

    buffers: tuple[str, ...] = ()
    for_good: bool = False
    matters: bool = False

    @staticmethod
    def of(traced: Traced) -> Written:
        """What the forward of a trace writes to."""
        graph, names = traced.graph, list[str]()
        for_good, versions = bool(traced.reassigned), set[int]()
        successors: dict[int | None, list[int]] = {}
        for index, value in enumerate(graph.values):
            successors.setdefault(value.reuses, []).append(index)
        for index, value in enumerate(graph.values):
            if value.resident and value.reuses is None and (later := set(_versions(successors, index))) != {index}:
                sources = [traced.residents[n] for n in traced.roots.get(index, ()) if n in traced.residents]
                for_good |= any(s.kind in ("input", "constant") for s in sources)
                names += [s.name for s in sources if s.kind in ("buffer", "parameter")]
                versions |= later
        readers = [
            op
            for op in graph.ops[: graph.boundary]
            if versions & set(op.inputs)
            and not versions.issuperset(op.outputs)
            and versions.isdisjoint(effect.new for effect in op.effects)
        ]
        return Written(tuple(dict.fromkeys(names)), for_good, bool(readers or for_good))


def _versions(successors: Mapping[int | None, Sequence[int]], value: int) -> Iterator[int]:
    """A value and those that later take over its memory.

    successors: for each value, those that take over its memory next.
    """
    yield value
    for later in successors.get(value, ()):
        yield from _versions(successors, later)


class Watched(NamedTuple):
    """A tensor that backward reads, as it was when forward ended.

    - what: its name, for messages.
    - storage, offset: where its contents lie.
    """

    what: str
    tensor: torch.Tensor
    version: int
    storage: Any  # None for a sharded parameter, which comes and goes
    offset: int

    @staticmethod
    def of(what: str, tensor: torch.Tensor) -> Watched:
        return Watched(what, tensor, tensor._version, private.known_storage(tensor), int(tensor.storage_offset()))

    @staticmethod
    def named(name: str, store: ParameterStore) -> Watched:
        """A parameter or buffer."""
        tensor = store[name]
        watched = Watched.of(name, tensor)
        return watched._replace(storage=None) if store.is_sharded(name) else watched

    def is_same(self, store: ParameterStore) -> bool:
        """Whether the tensor is the one that it was, with the contents that it had."""
        return store.get(self.what, self.tensor) is self.tensor and self._is_untouched()

    def _is_untouched(self) -> bool:
        tensor = self.tensor
        return tensor._version == self.version and (self.storage is None or self._is_in_place())

    def _is_in_place(self) -> bool:
        return storage_key(self.tensor) == self.storage.cdata and self.tensor.storage_offset() == self.offset

    def check(self) -> None:
        if not self._is_untouched():
            raise RuntimeError(
                f"{self.what}, which backward needs, has been modified by an inplace operation between forward and "
                f"backward: it is at version {self.tensor._version}, expected version {self.version}"
            )


@dataclass(eq=False)
class InFlight:
    """One forward that waits for its backward.

    - saved: what the forward program hands to the backward program.
    - watched: inputs and outputs, as they were when forward ended.
    - parameters: parameters and buffers, as they were when forward ended.
    - start: what it takes to run this forward once more; None where that is not kept.
    - program: which ran it.
    - numbers: of its sizes, where they vary.
    - decided: booleans that forward has branched on.
    - surfaced: parameters whose gradients backward has handed over.
    - surfacing: backward is handing gradients over right now.
    - autocast: under which backward runs; None: without autocast.
    - returned: the outputs, where their use before backward has to be checked.
    - spent: what was saved is gone, so a backward has to run forward again.
    """

    saved: list[Any]
    watched: list[Watched]
    parameters: list[Watched]
    start: ForwardStart | None
    program: Program
    numbers: Numbers = ()
    decided: list[torch.Tensor] = field(default_factory=list)
    surfaced: set[str] = field(default_factory=set)
    surfacing: bool = False
    autocast: Autocast | None = None
    returned: Returned | None = None
    spent: bool = False

    def spend(self) -> None:
        """Let go of what is saved."""
        self.saved.clear()
        self.spent = True

    @property
    def saved_bytes(self) -> int:
        """Bytes that it holds for backward, beside its inputs and outputs. 0 once backward has begun."""
        held = {storage_key(t): t.untyped_storage().nbytes() for t in tensors_of(self.saved)}
        return sum(held.values()) - sum(held.get(storage_key(watched.tensor), 0) for watched in self.watched)


@dataclass(frozen=True, slots=True)
class ForwardStart:
    """The state in which a forward began.

    - inputs: the arguments' tensors.
    - generator: states of generators, where forward draws from them.
    - buffers: copies of those that it writes to, where they are kept.
    - read: everything that forward reads and does not write to, as it was when forward ended.
    """

    inputs: tuple[torch.Tensor, ...]
    generator: Any
    buffers: dict[str, torch.Tensor]
    read: list[Watched] = field(default_factory=list)
