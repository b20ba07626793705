"""A forward that waits for its backward: what it returned and saved, what it read, and what it wrote to.

Saved tensors live in a list that backward empties, so the version checks that autograd would make on them are made
here. Outputs are results of one autograd node, which knows nothing of how they depend on each other within the plan.
Where other outputs derive from one, autograd sees only the part of its gradient that comes from outside. Where two lie
in the same memory, a differentiable edit of one does not become part of the other's history. Both are noticed in
backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch

from memplan import torch_private as private
from memplan.capture.analysis.traced import Traced
from memplan.capture.ops.layout import storage_key, tensors_of
from memplan.capture.ops.sizes import Numbers
from memplan.capture.trace.raw_trace import Autocast
from memplan.capture.trace.stand_ins import only_waits
from memplan.runtime.program.parameters import ParameterStore
from memplan.runtime.program.program import Program

_NEVER = -1  # the number of no backward pass


@dataclass(frozen=True, slots=True)
class Outputs:
    """The tensors that a planned forward returns.

    - names, requires_grad: of each.
    - inner: outputs from which others derive, by position; True where one of these others is a start of backward.
    - shared: groups of differentiable outputs that lie in the same memory.
    - specs: of DTensors, by position: of the tensor, and of its gradient.
    - own: those that the step makes and the caller alone holds, by position; one for each memory.
    """

    names: tuple[str, ...]
    requires_grad: tuple[bool, ...]
    inner: Mapping[int, bool]
    shared: tuple[tuple[int, ...], ...]
    specs: Mapping[int, tuple[Any, Any]]
    own: tuple[int, ...]

    @staticmethod
    def of(traced: Traced) -> Outputs:
        graph, template = traced.graph, traced.template
        # What the model keeps, in buffers or attributes, it lets go as the next call begins.
        kept = range(len(traced.outputs)) if template.attributes else traced.reassigned.values()
        own = {v for v in graph.outputs if graph.values[v].size_bytes} - {traced.outputs[i].value for i in kept}
        positions = {o.value: i for i, o in enumerate(traced.outputs[: template.returned]) if o.value in own}
        by_value: dict[int, list[int]] = {}
        for index, output in enumerate(traced.outputs):
            if output.requires_grad:
                by_value.setdefault(output.value, []).append(index)
        return Outputs(
            names=tuple(traced.template.names[i] or "output" for i in range(len(traced.outputs))),
            requires_grad=tuple(o.requires_grad for o in traced.outputs),
            inner=traced.inner,
            shared=tuple(tuple(group) for group in by_value.values() if len(group) > 1),
            specs=template.specs,
            own=tuple(positions.values()),
        )

    def as_dtensors(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """These tensors, with DTensors in the place of parts of them."""
        if not self.specs:
            return tuple(tensors)
        specs = [self.specs.get(index) for index in range(len(tensors))]
        known = zip(tensors, specs, self.names, strict=True)
        return tuple(t if spec is None else private.as_returned(t, *spec, name) for t, spec, name in known)

    def returned(self, tensors: Sequence[torch.Tensor]) -> Callable[[Outputs, Collection[int]], None]:
        """A check for backward of these tensors, which are returned now.

        It takes the outputs of the plan that runs backward, which may be another. It raises RuntimeError where
        gradients that arrive for some of them are not all that eager's would be. It keeps only their memory alive,
        which the plan holds until backward ends anyway.
        """
        number, names = [_NEVER], self.names
        onlookers = {i: _Onlookers(names[i], tensors[i], number) for i in self.inner if tensors[i].grad_fn is not None}
        groups = [_SharedOutputs([names[i] for i in group], {i: tensors[i] for i in group}) for group in self.shared]

        def check(outputs: Outputs, reached: Collection[int]) -> None:
            for index, asks in onlookers.items():
                if outputs.inner.get(index):
                    asks.check()
            for shared in groups:
                shared.check(reached)

        return check


class _Onlookers:
    """Hooks and the like that ask for the gradient of an output.

    looked_at: shared by all outputs of a forward: the number of the backward pass that was found to run the planned
    one.
    """

    def __init__(self, name: str, output: torch.Tensor, looked_at: list[int]) -> None:
        self._name, self._output, self._looked_at = name, weakref.ref(output), looked_at
        self._hooks = output.register_hook(self._begin).hooks_dict_ref

    def _begin(self, gradient: torch.Tensor | None) -> None:
        """Runs before all other hooks, which could not handle a gradient that is None."""
        if self._looked_at[0] != private.backward_in_progress():
            output = self._output()
            node = None if output is None else output.grad_fn
            if node is not None and not any(private.engine_reaches(n) for n, _ in node.next_functions if n):
                raise self._refusal("torch.autograd.grad")
            self._looked_at[0] = private.backward_in_progress()
        if gradient is None:
            self.check()

    def check(self) -> None:
        """Raise RuntimeError where something asks for the gradient."""
        output, hooks = self._output(), self._hooks() or {}
        if output is not None and output.retains_grad:
            raise self._refusal("retain_grad()")
        if len(hooks) > 1 and not all(only_waits(hook) for hook in hooks.values()):
            raise self._refusal("a hook")

    def _refusal(self, who: str) -> RuntimeError:
        return RuntimeError(
            f"memplan: {who} asks for the gradient of output {self._name}, from which the model computes other outputs "
            "inside of the plan, so autograd sees only the part that comes from outside. Compute those outside of the "
            "model, or call memplan.remove(model) to train without a plan"
        )


class _SharedOutputs:
    """Outputs in the same memory, which share one version counter."""

    def __init__(self, names: Sequence[str], outputs: Mapping[int, torch.Tensor]) -> None:
        first = next(iter(outputs.values()))
        self._names, self._memory, self._version = names, first.detach(), first._version
        self._outputs = {i: weakref.ref(output) for i, output in outputs.items()}
        self._node = id(first.grad_fn)  # which lives until its backward is over

    def check(self, reached: Collection[int]) -> None:
        """Raise RuntimeError where an edit of one may change the gradient of another."""
        wanted = self._outputs.keys() & reached
        if self._memory._version == self._version or not wanted:
            return
        outputs = {i: ref() for i, ref in self._outputs.items()}
        # Of one that is gone nobody can say.
        edited = {i for i, output in outputs.items() if output is None or id(output.grad_fn) != self._node}
        if len(edited) > 1 or (edited and wanted != edited):
            raise RuntimeError(
                f"memplan: one of the outputs {', '.join(self._names)}, which share memory, has been modified by an "
                "inplace operation between forward and backward, so what others of them hold depends on it, which a "
                "planned step can't follow. Use an operation that is not in place, or return a copy (.clone())"
            )


@dataclass(frozen=True, slots=True)
class Written:
    """What forward writes to, of that which is there before it.

    - buffers: names of these buffers.
    - for_good: it also writes to what can't be put back: inputs, constants, buffers that it exchanges.
    - matters: forward's results depend on such a write.
    - in_backward: names of constants that backward alone writes to.
    """

    buffers: tuple[str, ...] = ()
    for_good: bool = False
    matters: bool = False
    in_backward: frozenset[str] = frozenset()

    @staticmethod
    def of(traced: Traced) -> Written:
        graph, names = traced.graph, list[str]()
        forward = graph.ops[: graph.boundary]
        in_forward = {v for op in forward for v in (*op.outputs, *(e.new for e in op.effects))}
        for_good, versions, in_backward = bool(traced.reassigned), set[int](), set[str]()
        first, in_one_memory = list[int](), dict[int, set[int]]()  # values by the first that had their memory
        for index, value in enumerate(graph.values):
            first.append(index if value.reuses is None else first[value.reuses])
            in_one_memory.setdefault(first[index], set()).add(index)
        for index, later in in_one_memory.items():
            if graph.values[index].resident and len(later) > 1:
                sources = [traced.residents[n] for n in traced.roots.get(index, ()) if n in traced.residents]
                if not later & in_forward:
                    in_backward |= {s.name for s in sources if s.kind == "constant"}
                for_good |= any(s.kind in ("input", "constant") and s.name not in in_backward for s in sources)
                names += [s.name for s in sources if s.kind in ("buffer", "parameter")]
                versions |= later
        readers = [op for op in forward if versions & set(op.inputs) and not versions.issuperset(op.outputs)]
        matters = for_good or any(versions.isdisjoint(effect.new for effect in op.effects) for op in readers)
        return Written(tuple(dict.fromkeys(names)), for_good, matters, frozenset(in_backward))


class Watched:
    """Tensors as they are when forward ends. A step has hundreds of them, so all are looked at together.

    store: where parameters and buffers are looked up by name; None for inputs, outputs and constants.
    """

    def __init__(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor] = (), store: ParameterStore | None = None
    ) -> None:
        self._names, self._store = names, store
        self._tensors = tensors if store is None else store.tensors(names)
        # Of sharded parameters, whose memory comes and goes, only the version counts.
        self._sharded = store is not None and store.gathers is not None and [*map(store.is_sharded, names)]
        self.then = self._look()
        known = None if store is None else store.known_storages(self._tensors, self.then[1])
        self._storages = known or [*map(private.known_storage, tensors)]  # while they are held, their keys are theirs

    @staticmethod
    def of(tensors: Sequence[tuple[str, torch.Tensor]], constants: Mapping[str, torch.Tensor]) -> Watched:
        """Inputs and outputs, and constants by name."""
        tensors = [*tensors, *((f"constant {name}", tensor) for name, tensor in constants.items())]
        return Watched([name for name, _ in tensors], [tensor for _, tensor in tensors])

    def _look(self) -> tuple[list[int], list[int], list[Any]]:
        """Versions of the tensors, keys of their storages, and their offsets."""
        storages = [storage._cdata for storage in map(torch.Tensor.untyped_storage, self._tensors)]
        return [t._version for t in self._tensors], storages, [*map(torch.Tensor.storage_offset, self._tensors)]

    def exchanged(self) -> str | None:
        """The name of a tensor in whose place there is another."""
        if self._store is None:
            return None
        now = self._store.tensors(self._names)
        return next((n for n, tensor, then in zip(self._names, now, self._tensors) if tensor is not then), None)

    def modified(self) -> tuple[str, int, int] | None:
        """(name, version, version when forward ended) of a tensor that was written to, or lies elsewhere."""
        now = self._look()
        if now == self.then:
            return None
        looks = zip(self._names, zip(*now), zip(*self.then), self._sharded or repeat(False))
        changed = ((n, now, then) for n, now, then, gone in looks if now[0] != then[0] or (now != then and not gone))
        return next(((name, now[0], then[0]) for name, now, then in changed), None)

    def check(self, written: Collection[str] = ()) -> None:
        """Raise RuntimeError where one was written to, as autograd does. written: what forward itself writes to."""
        if (found := self.modified()) is not None:
            raise RuntimeError(
                f"{found[0]}, which backward needs, has been modified by an inplace operation between forward and "
                f"backward: it is at version {found[1]}, expected version {found[2]}"
                + (". Forward writes to it, so say in_flight=2 where two run before a backward" * (found[0] in written))
            )


@dataclass(eq=False)
class InFlight:
    """One forward that waits for its backward.

    - saved: what the forward program hands to the backward program.
    - watched: inputs, outputs and constants, as they were when forward ended.
    - parameters: parameters and buffers that backward reads, as they were when forward ended.
    - start: what it takes to run this forward once more.
    - program: which ran it.
    - way: `Shards.way` when forward ran.
    - numbers: of its sizes, where they vary.
    - decided: booleans that forward has branched on. They stay until backward, as the plan says.
    - first_runs: by name of an island, how it gives again what its first run gave.
    - wrote: islands that wrote to what they did not write to before.
    - python_state: puts back what islands found when forward began; None where that is not known, or of no concern.
    - surfaced: parameters whose gradients backward has handed over.
    - surfacing: backward is handing gradients over right now, or has begun to add to constants.
    - autocast: under which backward runs; None: without autocast.
    - returned: checks how the outputs were used, where that has to be checked before backward.
    - spent: what was saved is gone, so a backward has to run forward again.
    """

    saved: list[Any]
    watched: Watched
    parameters: Watched
    start: ForwardStart
    program: Program
    way: Any = None
    numbers: Numbers = ()
    decided: list[torch.Tensor] = field(default_factory=list)
    first_runs: dict[str, Any] = field(default_factory=dict)
    wrote: list[str] = field(default_factory=list)
    python_state: ExitStack | None = None
    surfaced: set[str] = field(default_factory=set)
    surfacing: bool = False
    autocast: Autocast | None = None
    returned: Callable[[Outputs, Collection[int]], None] | None = None
    spent: bool = False

    def spend(self) -> None:
        self.saved.clear()
        self.spent = True

    @property
    def saved_bytes(self) -> int:
        """Bytes that it holds for backward, beside its inputs and outputs. 0 once backward has begun."""
        held = {storage_key(t): t.untyped_storage().nbytes() for t in tensors_of(self.saved)}
        beside = {*self.watched.then[1]}
        return sum(size_bytes for key, size_bytes in held.items() if key not in beside)


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


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own that does not count as the device's, because plans do not count it."""
    memory = bytearray(max(1, tensor.nbytes))
    with private.outside_of_tracing():
        flat = torch.frombuffer(memory, dtype=torch.uint8)[: tensor.nbytes]
        return flat.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
