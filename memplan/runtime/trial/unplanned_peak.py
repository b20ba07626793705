"""What a step as it is holds and leaves, by two runs of it on the sample. Such runs leave no trace."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.attributes.attributes_kept import AttributesKept, LeftBehind
from memplan.capture.attributes.kept_memory import KeptMemory, memory_of, written_by
from memplan.capture.attributes.tables import held_in, is_plain
from memplan.capture.ops import op_facts
from memplan.capture.ops.edges import Edges
from memplan.capture.ops.layout import storage_key, strided_parts
from memplan.capture.trace.call import Call, Forward, OutputTemplate, differentiated_outputs
from memplan.capture.trace.generators import python_generators, python_generators_kept, seed_all
from memplan.errors import UnsupportedModel
from memplan.runtime.program.rng import held_rng
from memplan.runtime.watch.meter import LiveMeter
from memplan.torch_private import pytree


@contextlib.contextmanager
def nothing_kept(model: nn.Module, call: Call, run: Callable[..., Any]) -> Iterator[WritesUndone]:
    """Put back what steps change: gradients, buffers, Python attributes, generators, tensors that forward writes to.

    Hooks of parameters do not run. Parameters that autocast has cast are cast anew in here and afterwards, because a
    step that shared casts with another would add gradients in another order.

    run: what is called.
    """
    leaves = [*model.parameters(), *(t for t in call.tensors if t.is_leaf)]
    homes = [(m._buffers, dict(m._buffers)) for m in model.modules()]
    stand_ins = {b: b.detach().clone() for b in dict.fromkeys(model.buffers())}  # the buffers are not touched at all
    writes = WritesUndone(model, stand_ins.values())
    devices = sorted({t.device for t in leaves if t.device.type == "cuda"}, key=str)
    with contextlib.ExitStack() as stack:  # it puts things back in the reverse order
        for leaf in leaves:
            _set_aside(leaf, stack)
            stack.callback(leaf.requires_grad_, leaf.requires_grad)
        for home, before in homes:
            stack.callback(home.update, before)
            stack.callback(home.clear)
            home.update({name: b if b is None else stand_ins[b] for name, b in before.items()})
        for generator in held_in(model, torch.Generator):
            stack.callback(generator.set_state, generator.get_state())
        stack.callback(writes.undo)
        stack.callback(torch.clear_autocast_cache)
        torch.clear_autocast_cache()
        kept = AttributesKept(model, run=run)
        with python_generators_kept(), torch.random.fork_rng(devices=devices), kept, writes:
            yield writes


def _set_aside(leaf: torch.Tensor, stack: contextlib.ExitStack) -> None:
    """Take a leaf's gradient and hooks away until the stack closes. A hook may well be an optimizer's step."""
    stack.callback(setattr, leaf, "grad", leaf.grad)
    for table in filter(None, (leaf._backward_hooks, leaf._post_accumulate_grad_hooks)):
        stack.callback(table.update, dict(table))
        table.clear()
    leaf.grad = None


class WritesUndone(private.RealOps):
    """Undoes writes to memory that was there before: of parameters, arguments, tensors in attributes, lists, closures.

    Copies memory as soon as an op is about to write to it; `undo` puts it back. made: tensors that are the run's own.
    Parameters whose `.data` was exchanged get theirs back too, except sharded ones, which come and go.
    """

    def __init__(self, model: nn.Module, made: Iterable[torch.Tensor]) -> None:
        super().__init__()
        parameters = [private.part_here(p) for p in model.parameters()]
        self._data = [(p, p.data, storage_key(p)) for p in parameters if p.numel()]
        self._made, self.memory = set(memory_of(list(made))), KeptMemory()

    def on_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        hidden = [args[i] for i in op_facts.HIDDEN_WRITES.get(func, ((), 0))[0] if args[i] is not None]
        for tensor in map(private.part_here, (*written_by(func, args, kwargs), *hidden)):
            owns_memory = tensor.numel() and private.is_ordinary(private.plain(tensor))  # a wrapper has that of others
            if owns_memory and storage_key(tensor) not in self._made:
                self.memory.keep(tensor)
        given = memory_of((args, kwargs))
        result = self.run_op(func, args, kwargs)
        self._made |= memory_of(result).keys() - given.keys()
        return result

    def undo(self) -> None:
        for parameter, data, key in self._data:
            if storage_key(parameter) != key and parameter.shape == data.shape:
                parameter.data = data
        self.memory.undo()


class OtherLeaves(contextlib.ExitStack):
    """Tensors that get gradients though they are no parameters or arguments: a list may hold them, or a closure.

    As a context, it puts their gradients back, and keeps their hooks from running. found: those known so far.
    """

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._known = set(map(id, known))
        self.found: list[torch.Tensor] = []

    def look_behind(self, starts: Sequence[torch.Tensor]) -> None:
        """Find those to which backward from these outputs gives gradients, and take what they have aside."""
        for leaf in [node.variable for node in Edges(starts).leaves if hasattr(node, "variable")]:
            if id(leaf) not in self._known:
                self._known.add(id(leaf))
                self.found.append(leaf)
                _set_aside(leaf, self)


class UnplannedPeak(NamedTuple):
    """Bytes of parameters, buffers and inputs, the most that a step holds, and what it holds when it ends.

    left: what the steps returned and left: bits of tensors, generators, Python state. Two runs can be compared by it.
    """

    resident_bytes: int
    peak_bytes: int
    end_bytes: int
    left: tuple[Any, ...]


def unplanned_peak(model: nn.Module, call: Call, forward: Forward, most_bytes: float = math.inf) -> UnplannedPeak:
    """What a step holds that `forward` begins, parameters, buffers and inputs included, kernel scratch on CUDA only.

    Two steps are run. The first may leave something in Python attributes that the second still holds, or have libraries
    allocate on the device. Where forward draws random numbers, two more are run on other ones; if the peaks of these
    differ, as they do where layers are left out by chance, so are ten more, and a margin of an eighth is kept.

    - most_bytes: if a step holds more, how much more does not matter, and no step is run to find the most.
    """
    meter, returned = LiveMeter(), list[Any]()
    with (
        nothing_kept(model, call, run=forward),
        AttributesKept(model, run=forward) as attributes,
        KnownGenerators(model),
        torch.enable_grad(),
        OtherLeaves((*model.parameters(), *call.tensors)) as others,
    ):
        resident = (private.part_here(t) for t in (*model.parameters(), *model.buffers(), *call.tensors))
        meter.register([part for tensor in resident for part in strided_parts(tensor)])
        resident_bytes = meter.live_bytes

        def step(seed: int | None = None) -> int:
            """Run a step, with a seed on other random numbers. Gives what it held at most."""
            if seed is not None:
                seed_all(seed)
            for leaf in (*model.parameters(), *call.tensors, *others.found):
                leaf.grad = None
            args, kwargs = call.copied(model)
            meter.reset_peak()
            with _allocations(model) as grown:
                with meter:
                    output = forward(*args, **kwargs)
                returned.append(bits_of(output))
                with meter:
                    template = OutputTemplate(output, model)
                    chosen = differentiated_outputs(template, [t.requires_grad for t in template.tensors])
                    starts = [template.tensors[i] for i in chosen]
                    del output, template
                    others.look_behind(starts)
                    torch.clear_autocast_cache()  # backward runs after the context of autocast, whose end drops casts
                    with torch.autocast(starts[0].device.type, enabled=False):
                        torch.autograd.backward(starts, [torch.ones_like(t) for t in starts])
            del starts
            return max(meter.peak_bytes, resident_bytes + grown[0])

        before = generators_of(model, call)
        peaks = [step(), step()]
        now = generators_of(model, call)
        left = _left(model, call, attributes.left())  # whose frame holds gradients no longer than that
        if before != now:
            peaks += map(step, range(2))
        left = (*left, *returned, *now)
        varies = len(set(peaks[1:])) > 1  # the first step may also hold what libraries allocate

        def with_margin() -> int:
            return max(peaks) + varies * (max(peaks) - resident_bytes) // 8

        for seed in range(10):
            if varies and with_margin() <= most_bytes:
                peaks.append(step(seed))
        return UnplannedPeak(resident_bytes, with_margin(), meter.live_bytes, left)


def _left(model: nn.Module, call: Call, state: LeftBehind) -> tuple[Any, ...]:
    """What steps have left: gradients, buffers, and what is in attributes."""
    gradients = [leaf.grad for leaf in (*model.parameters(), *call.tensors)]
    return bits_of([gradients, list(model.buffers()), state.values, state.contents])


def generators_of(model: nn.Module, call: Call) -> tuple[Any, ...]:
    """The states of all generators that forward may draw from."""
    return (*generator_states(held_in(model, torch.Generator)), *map(str, held_rng(torch.device(call.device_type))))


def generator_states(own: Sequence[torch.Generator]) -> tuple[Any, ...]:
    """The states of Python's generators, and of these."""
    return (*(bytes(generator.get_state().numpy()) for generator in own), *python_generators())


def bits_of(thing: Any) -> tuple[Any, ...]:
    """What a nest of containers holds, to be compared: bits of tensors, plain values, the kind of anything else."""
    found = list[Any]()
    for leaf in pytree.tree_leaves(thing):
        if isinstance(leaf, torch.Tensor):
            parts = (part.detach().cpu().contiguous().flatten() for part in strided_parts(private.part_here(leaf)))
            bits = b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)
            found.append((leaf.dtype, tuple(leaf.shape), hashlib.blake2b(bits).digest()))
        else:
            found.append(leaf if is_plain(leaf) else type(leaf))
    return tuple(found)


class KnownGenerators(private.RealOps):
    """Refuses ops that draw from a generator which nobody would put back."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._known = held_in(model, torch.Generator)

    def on_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        for generator in [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Generator)]:
            if not any(private.is_same_generator(generator, known) for known in self._known):
                raise UnsupportedModel(
                    f"{func} draws from a generator that is no attribute of the model; planning would advance it. Make "
                    "it an attribute of a module"
                )
        return self.run_op(func, args, kwargs)


@contextlib.contextmanager
def _allocations(model: nn.Module) -> Iterator[list[int]]:
    """A context that gives by how much PyTorch's allocations on the CUDA device grew at most; 0 on a CPU."""
    device = next((p.device for p in model.parameters() if p.device.type == "cuda"), None)
    grown = [0]
    if device is None:
        yield grown
        return
    torch.cuda.synchronize(device)
    before = private.requested_bytes(device)[0]
    torch.cuda.reset_peak_memory_stats(device)
    yield grown
    torch.cuda.synchronize(device)
    grown[0] = private.requested_bytes(device)[1] - before
