"""Run a step on the sample to see what it holds and what reaches its units, and leave no trace of that run.

In a rehearsal every unit runs at the least memory: as its program, or recomputed as a whole. In the second case its
arguments and results go through marks, which tell when backward enters and leaves the unit.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import set_checkpoint_early_stop

from memplan import torch_private as private
from memplan.capture.attributes.attributes import AttributesKept, LeftBehind, own_generators
from memplan.capture.attributes.kept_memory import has_memory
from memplan.capture.ops.layout import storage_key, strided_parts
from memplan.capture.probe import BackwardWithin, DataFollowed, NotedReads, UnitCall, nothing_saved
from memplan.capture.trace.call import Call, CallReader, Forward, OutputTemplate
from memplan.capture.trace.edges import Edge, Edges
from memplan.capture.trace.forwards import forwards_exchanged
from memplan.capture.trace.raw_trace import Answer
from memplan.capture.trace.starts import differentiated_outputs, shared_objects
from memplan.runtime.parts.forward_writes import WritesUndone
from memplan.runtime.parts.measures import Event, StepMeasure, step_measure
from memplan.runtime.parts.part_step import PartRunner, PartStep
from memplan.runtime.parts.partial_step import Way, Ways
from memplan.runtime.parts.recompute import UnitObserver, recomputed
from memplan.runtime.program.decisions import OtherBranch
from memplan.runtime.program.execute import InFlight, TangentLayout
from memplan.runtime.watch.meter import LeavesOut, LiveMeter


class EditedArguments(Exception):
    """Forward writes to arguments of these modules after they have run, so they can't run again in backward."""

    def __init__(self, modules: set[nn.Module]) -> None:
        super().__init__(f"{len(modules)} modules")
        self.modules = modules


@dataclass(eq=False)
class Visit:
    """One call of a unit in a rehearsal.

    - occurrence: which of its calls in this forward.
    - tangents: by output, the layouts of the gradients that arrived.
    - uses: by argument, how many ops of the unit read it, where they are several.
    - twice: two arguments are one tensor.
    - edited: a result is written to later in forward.
    - repeats: it ran as a program, whose forward can run again in backward.
    """

    module: nn.Module
    occurrence: int
    call: UnitCall
    tangents: dict[int, TangentLayout] = field(default_factory=dict)
    uses: dict[int, int] = field(default_factory=dict)
    twice: bool = False
    edited: bool = False
    repeats: bool = False
    seen: list[tuple[bool, torch.Tensor, int]] = field(default_factory=list)  # (is a result, it, its version then)
    arguments: dict[int, Edge] = field(default_factory=dict)
    mark: Any = None
    waiting: list[tuple[PartRunner, InFlight]] = field(default_factory=list)  # for backward


@dataclass(frozen=True, slots=True)
class Passage:
    """One call of a block.

    - first, end: visits first to end - 1 are in it.
    - before_bytes, after_bytes: held before and after it.
    """

    block: nn.Module
    first: int
    end: int
    before_bytes: int
    after_bytes: int


@contextlib.contextmanager
def nothing_kept(
    model: nn.Module,
    call: Call,
    written: Sequence[torch.Tensor] | None = None,
    run: Callable[..., Any] | None = None,
) -> Iterator[WritesUndone]:
    """Put back what steps change: gradients, buffers, Python attributes, generators, tensors that forward writes to.

    Hooks of parameters do not run. Parameters that autocast has cast are cast anew in here and afterwards, because a
    step that shared casts with another would add gradients in another order.

    - written: what forward writes to, known from an earlier run. With None, ops are watched for it, which takes time.
    - run: what is called, where it is not the model's forward alone.
    """
    writes = WritesUndone(model, call, written or ())
    leaves = [*model.parameters(), *(t for t in call.tensors if t.is_leaf)]
    gradients = [(leaf, leaf.grad, leaf.requires_grad) for leaf in leaves]
    homes = [(m._buffers, dict(m._buffers)) for m in model.modules()]
    stand_ins = {b: b.detach().clone() for b in dict.fromkeys(model.buffers())}  # the buffers are not touched at all
    devices = sorted({t.device for t in leaves if t.device.type == "cuda"}, key=str)
    # Such a hook may well be an optimizer's step.
    tables = [t for leaf in leaves for t in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks) if t]
    hooks = [(table, dict(table)) for table in tables]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    generators = [(g, g.get_state()) for g in own_generators(model)]
    torch.clear_autocast_cache()
    try:
        for leaf in leaves:
            leaf.grad = None
        for home, before in homes:
            home.update({name: b if b is None else stand_ins[b] for name, b in before.items()})
        for table, _ in hooks:
            table.clear()
        watching: contextlib.AbstractContextManager[object] = writes if written is None else contextlib.nullcontext()
        with torch.random.fork_rng(devices=devices), AttributesKept(model, run=run, given=call.leaves), watching:
            yield writes
    finally:
        torch.clear_autocast_cache()
        writes.undo()
        for table, held in hooks:
            table.update(held)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for generator, state in generators:
            generator.set_state(state)
        for home, before in homes:
            home.clear()
            home.update(before)
        for leaf, gradient, required in gradients:
            leaf.requires_grad_(required).grad = gradient


@dataclass(frozen=True, slots=True)
class OneForward:
    """What one run of forward tells.

    - answers: what it read from tensors.
    - left: what it left in the model.
    - caches: the part of `left` that any first run would leave. It depends on shapes, and on buffers that no data
      reach, and not on parameters, inputs or random numbers.
    - written: names of parameters and buffers that it wrote to.
    """

    answers: list[Answer]
    left: LeftBehind
    caches: LeftBehind
    written: frozenset[str]


def one_forward(
    model: nn.Module,
    run: Callable[..., Any],
    call: Call,
    around: contextlib.AbstractContextManager[object] | None = None,
) -> OneForward:
    """Run forward once on a call, within the context `around`. Nothing of that run stays.

    Raises ForwardFails where forward raises.
    """
    with nothing_kept(model, call, run=run) as writes, nothing_saved(), AttributesKept(model, run=run) as attributes:
        data = DataFollowed([*model.parameters(), *call.tensors])
        buffers = [(name, buffer, buffer._version) for name, buffer in model.named_buffers()]
        standing_in = {storage_key(buffer) for buffer in model.buffers() if has_memory(buffer)}
        with around or contextlib.nullcontext(), data, NotedReads() as reads:
            try:
                run(*call.variadic, **call.arguments)
            except BackwardWithin:
                raise
            except Exception as error:
                raise ForwardFails(error) from error
        left = attributes.left()
        caches = left.without(lambda t: data.reached(t) or (has_memory(t) and storage_key(t) in standing_in))
        memory = {storage_key(tensor) for tensor in writes.written}
        written = {n for n, p in model.named_parameters() if has_memory(p) and storage_key(p) in memory}
        written.update(name for name, buffer, version in buffers if buffer._version != version)
        caches = LeftBehind([], []) if data.was_read else caches
        return OneForward(reads.answers, left, caches, frozenset(written))


class ForwardFails(Exception):
    """The model's own forward raises this error on this call."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def errors_of_forward() -> Iterator[None]:
    """A context that raises errors of the model's own forward as they were raised there."""
    try:
        yield
    except ForwardFails as failure:
        raise failure.error from None


class Rehearsal(UnitObserver):
    """One step with real data.

    - events: of passes of units, in order.
    - visits: calls of units, in order.
    - passages: calls of blocks, in order.
    - written: tensors that were there before forward, and that it writes to, buffers excepted.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        call: Call,
        metered: bool = True,
        leaves_out: LeavesOut | None = None,
    ) -> None:
        """Prepare a step.

        - metered: bytes are counted, which slows the step down.
        - leaves_out: storages that do not count.
        """
        self.events: list[Event] = []
        self.visits: list[Visit] = []
        self.passages: list[Passage] = []
        self.written: tuple[torch.Tensor, ...] = ()
        self._metered = metered
        self.last_bytes = self.left_bytes = 0
        self._model, self._original, self._call = model, forward, call
        self._meter = LiveMeter(leaves_out)

    @property
    def measure(self) -> StepMeasure:
        """What the step held, by unit."""
        return step_measure(self.events, len(self.visits), self.last_bytes, self.left_bytes)

    def run(self, ways: Ways, blocks: Collection[nn.Module] = ()) -> None:
        """Run forward and backward. Raises UnsupportedModel where no output is differentiable.

        ways: how each call of a unit runs: as a program, else recomputed as a whole. blocks: modules with units in them
        whose calls are noted as well.
        """
        forwards = {m: self._followed(m, m.forward, ways[m]) for m in ways}
        forwards |= {m: self._passed(m, m.forward) for m in blocks}
        args, kwargs = self._call.variadic, self._call.arguments
        with nothing_kept(self._model, self._call) as writes, torch.enable_grad():
            self._meter.register(resident_tensors(self._model, self._call))
            with self._meter if self._metered else contextlib.nullcontext():
                # A rerun that stopped early would not tell what a forward leaves.
                with forwards_exchanged(forwards), set_checkpoint_early_stop(False):
                    output = self._original(*args, **kwargs)
                starts = starts_of(self._model, output)
                del output
                self._look_for_edits()
                self._look_for_repeats()
                self._look_at_edges(Edges(starts))
                self.begin(-1, "turn")
                _run_backward(starts)
            self.last_bytes, self.left_bytes = self._meter.reset_peak(), self._meter.live_bytes
        self.written = writes.written
        del starts

    # -- units ------------------------------------------------------------------------------------------------------

    def begin(self, index: int, phase: str) -> None:
        self._note(index, phase, True)

    def end(self, index: int, phase: str) -> None:
        self._note(index, phase, False)

    def _note(self, index: int, phase: str, begins: bool) -> None:
        if not self._metered:
            _wait_for_device(self._model)  # or its seconds would be those of launches
        peak_bytes = self._meter.reset_peak()
        self.events.append(Event(index, phase, begins, self._meter.live_bytes, peak_bytes, time.perf_counter()))

    def _followed(self, module: nn.Module, original: Forward, ways: Sequence[Way]) -> Forward:
        reader = CallReader(original)
        count = 0

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            index, way = len(self.visits), ways[count] if count < len(ways) else "recompute"
            call = reader.read(args, kwargs)
            visit = Visit(module, count, UnitCall.of(call))
            count += 1
            self.visits.append(visit)
            self.begin(index, "forward")
            serves = isinstance(way, PartStep) and way.mismatch(call) is None
            if isinstance(way, PartStep) and serves:
                way.runner.watcher, way.runner.index = self, index
                before = set(way.runner.waiting)
                try:
                    output = way.run(call)
                    visit.waiting = [(way.runner, state) for state in way.runner.waiting if state not in before]
                except OtherBranch:
                    serves = False
            if not serves:
                output = self._marked(index, visit, original, call)
            del call
            self.end(index, "forward")
            return output

        return forward

    def _passed(self, block: nn.Module, original: Forward) -> Forward:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            first, before_bytes = len(self.visits), self._meter.live_bytes
            output = original(*args, **kwargs)
            self.passages.append(Passage(block, first, len(self.visits), before_bytes, self._meter.live_bytes))
            return output

        return forward

    def _marked(self, index: int, visit: Visit, original: Forward, call: Call) -> Any:
        tensors = list(call.tensors)
        wanted = [i for i, t in enumerate(tensors) if t.requires_grad]
        if wanted:
            edges = {i: get_gradient_edge(tensors[i]) for i in wanted}
            visit.arguments = {i: (edge.node, edge.output_nr) for i, edge in edges.items()}
            through = _Mark.apply(self, index, *(tensors[i] for i in wanted))  # type: ignore[no-untyped-call]
            visit.mark = through[0].grad_fn
            for i, tensor in zip(wanted, through, strict=True):
                tensors[i] = tensor
        args, kwargs = call.with_tensors(tensors)
        visit.seen = [(False, t.detach(), t._version) for t in tensors]
        del tensors
        output = recomputed(visit.module, original, index, args, kwargs, self)
        template = OutputTemplate(output, shared_objects(visit.module))
        results = [self._tapped(index, visit, i, t) for i, t in enumerate(template.tensors)]
        visit.seen += [(True, t.detach(), t._version) for t in results]
        return template.fill(results)

    def _tapped(self, index: int, visit: Visit, position: int, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        tap = tensor.view_as(tensor)  # gradients of readers outside of the unit meet here, and no others

        def arrived(gradient: torch.Tensor) -> None:
            if not visit.tangents:
                self.begin(index, "backward")
            visit.tangents[position] = TangentLayout.of(str(position), gradient)

        tap.register_hook(arrived)
        return tap

    def _look_for_edits(self) -> None:
        edited = set()
        for visit in self.visits:
            changed = {is_result for is_result, tensor, version in visit.seen if tensor._version != version}
            visit.edited, visit.seen = True in changed, []
            if False in changed:
                edited.add(visit.module)
        if edited:
            raise EditedArguments(edited)

    def _look_for_repeats(self) -> None:
        for visit in self.visits:
            # First runs alone keep buffers that forward reads and writes.
            visit.repeats = any(not r.written.matters and r.repeats(state) for r, state in visit.waiting)
            visit.waiting = []

    def _look_at_edges(self, edges: Edges) -> None:
        for visit in self.visits:
            visit.twice = len(set(visit.arguments.values())) < len(visit.arguments)
            for number, position in enumerate(visit.arguments):
                count = len(edges.into(visit.mark, number))
                if count > 1:
                    visit.uses[position] = count
            visit.arguments, visit.mark = {}, None


class _Mark(torch.autograd.Function):
    """Hands its arguments on, and tells when gradients have come back for all of them."""

    @staticmethod
    def forward(ctx: Any, observer: UnitObserver, index: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.observer, ctx.index = observer, index
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.observer.end(ctx.index, "backward")
        return (None, None, *gradients)


def starts_of(model: nn.Module, output: Any) -> list[torch.Tensor]:
    """The outputs that backward starts from. Raises UnsupportedModel where there is none."""
    template = OutputTemplate(output, shared_objects(model))
    chosen = differentiated_outputs(template, [t.requires_grad for t in template.tensors])
    return [template.tensors[i] for i in chosen]


def _run_backward(starts: Sequence[torch.Tensor]) -> None:
    """Run backward as a training loop does: after the context of autocast, whose end drops its casts."""
    torch.clear_autocast_cache()
    with torch.autocast(starts[0].device.type, enabled=False):
        torch.autograd.backward(starts, [torch.ones_like(t) for t in starts])


def timed_step(
    model: nn.Module,
    call: Call,
    run: Callable[[], Any],
    written: Sequence[torch.Tensor],
) -> float:
    """Seconds of one step, forward and backward.

    written: what forward writes to, beside buffers.
    """
    with nothing_kept(model, call, written), torch.enable_grad():
        _wait_for_device(model)
        start = time.perf_counter()
        starts = starts_of(model, run())
        _run_backward(starts)
        _wait_for_device(model)
        return time.perf_counter() - start


def _wait_for_device(model: nn.Module) -> None:
    for device in {p.device for p in model.parameters() if p.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def resident_tensors(model: nn.Module, call: Call) -> list[torch.Tensor]:
    """Tensors that are there before a step: parameters (this rank's part of sharded ones), buffers and inputs."""
    tensors = [private.part_here(t) for t in (*model.parameters(), *model.buffers(), *call.tensors)]
    return [part for tensor in tensors for part in strided_parts(tensor)]


def measured_peak(
    model: nn.Module,
    call: Call,
    run: Callable[[], Any],
    leaves_out: LeavesOut | None = None,
) -> int:
    """The most bytes that a step holds, parameters, buffers and inputs included, kernel scratch on CUDA only.

    Two steps are run. The first may leave something in Python attributes that the second still holds, or have libraries
    allocate on the device.

    leaves_out: storages that do not count.
    """
    meter = LiveMeter(leaves_out)
    allocated_bytes = 0
    with nothing_kept(model, call), torch.enable_grad():
        meter.register(resident_tensors(model, call))
        resident_bytes = meter.live_bytes
        for _ in range(2):
            for leaf in (*model.parameters(), *call.tensors):
                leaf.grad = None
            with _allocations(model) as grown, meter:
                starts = starts_of(model, run())
                _run_backward(starts)
            del starts
            allocated_bytes = resident_bytes + grown[0]
    return max(meter.peak_bytes, allocated_bytes)


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
