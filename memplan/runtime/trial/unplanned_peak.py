"""What a step as it is holds and leaves, by runs on the sample that leave no trace; and what an island takes."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.attributes.attributes_kept import AttributesKept, LeftBehind
from memplan.capture.attributes.kept_memory import KeptMemory, SeesWrites, has_memory, memory_of
from memplan.capture.attributes.tables import held_in, is_plain
from memplan.capture.ops.island_call import IslandCost
from memplan.capture.ops.layout import mark_of, same_bits, storage_key, strided_parts
from memplan.capture.ops.recorded_graph import Edges
from memplan.capture.trace.call import Call, Forward, OutputTemplate, differentiated_outputs, nothing_to_train
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


class WritesUndone(SeesWrites):
    """Undoes writes to memory that was there before: of parameters, arguments, tensors in attributes, lists, closures.

    Copies memory as soon as an op is about to write to it; `undo` puts it back. made: tensors that are the run's own.
    Parameters whose `.data` was exchanged get theirs back too, except sharded ones, which come and go.
    """

    def __init__(self, model: nn.Module, made: Iterable[torch.Tensor]) -> None:
        super().__init__(memory_of(list(made)))
        parameters = [private.part_here(p) for p in model.parameters()]
        self._data = [(p, p.data, storage_key(p)) for p in parameters if p.numel()]
        self.memory = KeptMemory()

    def on_write(self, tensor: torch.Tensor) -> None:
        self.memory.keep(tensor)

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
    meter, returned, trained = LiveMeter(), list[Any](), list[bool]()
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
                    requires_grad = [t.requires_grad for t in template.tensors]
                    chosen = differentiated_outputs(template, requires_grad) if any(requires_grad) else []
                    starts = [template.tensors[i] for i in chosen]
                    del output, template
                    others.look_behind(starts)
                    torch.clear_autocast_cache()  # backward runs after the context of autocast, whose end drops casts
                    for start in starts[:1]:  # none where all that trains was left out by chance
                        with torch.autocast(start.device.type, enabled=False):
                            torch.autograd.backward(starts, [torch.ones_like(t) for t in starts])
                trained.append(bool(starts))
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
        if not any(trained):
            raise nothing_to_train()
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
            found.append(leaf.tolist() if isinstance(leaf, np.ndarray) else leaf if is_plain(leaf) else type(leaf))
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


def measured_twice(
    run: Callable[[], list[torch.Tensor]], given: Sequence[torch.Tensor | None], device: torch.device
) -> tuple[list[torch.Tensor], IslandCost, int]:
    """Results and cost of one of the two ops, from two runs: one for memory, one for time. given: its inputs.

    Last come the bytes that a run leaves behind and does not return: tensors in a closure that `ctx` has, for instance.
    """
    meter, record = LiveMeter(), private.MemoryRecord()  # which has what kernels allocate for themselves, too
    meter.register(given)
    before_bytes = meter.live_bytes
    with record if device.type == "cpu" else contextlib.nullcontext(), meter:
        results = run()
    made_bytes = sum(t.untyped_storage().nbytes() for t in results)
    peak_bytes = max(meter.peak_bytes - before_bytes, record.peak_bytes)
    meter.register(results)
    if meter.live_bytes > before_bytes + made_bytes:
        gc.collect()
    left_bytes = meter.live_bytes - before_bytes - made_bytes
    del results
    begin = time.perf_counter()
    results = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    time_s = time.perf_counter() - begin
    return results, IslandCost(time_s, max(0, peak_bytes - made_bytes)), left_bytes


class WrittenArguments:
    """Compares the arguments of a call with what they were. The copies lie in the CPU's memory, so none is on a GPU."""

    def __init__(self, tensors: Sequence[torch.Tensor], given: int) -> None:
        """Note what is there. tensors: the first `given` are arguments, each once."""
        self._all, self._tensors = tensors, tensors[:given]
        self._marks = list(map(mark_of, tensors))
        self._copies = [t.detach().to("cpu", copy=True) if has_memory(t) else None for t in self._tensors]

    @property
    def seen(self) -> list[int]:
        """Positions of tensors to which something was written, as autograd knows."""
        return [i for i, (t, mark) in enumerate(zip(self._all, self._marks, strict=True)) if mark_of(t) != mark]

    def unseen(self) -> frozenset[int]:
        """Positions of arguments that have other contents, and autograd does not know of it."""
        known = enumerate(zip(self._tensors, self._marks, self._copies))  # not of all
        unseen = ((i, t, copy) for i, (t, mark, copy) in known if mark_of(t) == mark and copy is not None)
        return frozenset(i for i, t, copy in unseen if not same_bits(t.cpu(), copy))

    def returned(self, outputs: Sequence[Any]) -> tuple[tuple[int, int], ...]:
        """(argument, output) where the call writes to an argument, and returns it: see `Island.in_place`.

        Arguments in whose memory other tensors lie, that are given or returned, are not among them.
        """
        there = [t for t in (*self._all, *outputs) if isinstance(t, torch.Tensor) and has_memory(t)]
        keys = [storage_key(t) for t in there]
        written = [i for i in self.seen if i < len(self._tensors)]
        pairs = ((i, place) for i in written for place, output in enumerate(outputs) if output is self._tensors[i])
        return tuple((i, place) for i, place in pairs if keys.count(storage_key(outputs[place])) == 2)
