"""Capture: from a model and a sample to a `Traced` step and the key that says which calls it serves."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from memplan import torch_private as private
from memplan.capture import capturable
from memplan.capture.analysis.traced import Traced
from memplan.capture.analysis.values import build_traced
from memplan.capture.attributes.attribute_reads import AttributeReads
from memplan.capture.attributes.attributes_kept import AttributesKept, LeftBehind, SetValue, UselessTensor
from memplan.capture.attributes.kept_memory import KeptMemory
from memplan.capture.attributes.tables import attribute_owners
from memplan.capture.key import StepKey
from memplan.capture.ops.dataflow import draws, written_nodes
from memplan.capture.ops.island_ops import FORWARD
from memplan.capture.ops.layout import storage_key
from memplan.capture.ops.ways import MakeIslands, Refusal, StateChanges
from memplan.capture.shards import Shards
from memplan.capture.trace.call import Call, CallReader, Sample
from memplan.capture.trace.islands import refuse_reads
from memplan.capture.trace.raw_trace import Autocast, RawTrace
from memplan.capture.trace.stand_ins import MadeTensors, without_collections
from memplan.capture.trace.trace import TraceOptions, TraceRequest, trace_step
from memplan.errors import UnsupportedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions(TraceOptions):
    """What a capture depends on besides the model and the call.

    - loss_fn: what is traced in the place of forward: `loss_fn(model, *sample)`.
    - device: the device to plan for; None is the model's.
    - shards: the engine that has sharded the parameters.
    - unsteady: values that change from step to step, as `StepKey.other_value` names them. The step must not depend on
      them.
    - requiring: positions of arguments that forward lets require grad.
    """

    loss_fn: Callable[..., Any] | None = None
    device: torch.device | None = None
    shards: Shards | None = None
    unsteady: Collection[str] = ()
    requiring: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured step of one model.

    - traced: the step.
    - call: the call that it was captured with.
    - key: tells which calls the step serves.
    - expanded: the step for `out.sum().backward()`, where the loss is not part of the plan.
    - counters: Python attributes to which each forward adds, and how much.
    - options: what it was made with.
    - answers: what forward reads from tensors.
    - left: what the first eager forward leaves: attributes, hooks of submodules, caches. The step is that of a later
      one, which finds them there.
    - islands: with the reason for each, in words.
    """

    traced: Traced
    call: Call
    key: StepKey
    expanded: Traced | None
    counters: tuple[SetValue, ...]
    options: CaptureOptions
    answers: tuple[Any, ...]
    islands: tuple[str, ...]
    left: LeftBehind

    def changed(self, change: Callable[[Traced], Traced]) -> Capture:
        """The capture with a change made to its step, and to that for `out.sum().backward()`."""
        expanded = None if self.expanded is None else change(self.expanded)
        return dataclasses.replace(self, traced=change(self.traced), expanded=expanded)

    def settle(self, call: Call) -> bool:
        """Leave in the model what the first eager forward does, if the step then serves the call, and only then."""
        return self.left.settle(lambda: self.key.mismatch(call) is None)


def capture(
    model: nn.Module, forward: Callable[..., Any], sample: Sample | Call, options: CaptureOptions = CaptureOptions()
) -> Capture:
    """Trace `forward(*sample)`, or `loss_fn(model, *sample)`, and its backward on fake tensors.

    Nothing of the model, the sample, `.grad` or the generator changes. Raises UnsupportedModel. It is a `Refusal` if
    the step may be captured with other options.
    """
    made, shards = MadeTensors(), options.shards
    with (
        without_collections(),
        contextlib.nullcontext() if shards is None else shards.tracing(),
        private.outside_of_tracing(),  # dispatch modes of the caller see planned ops when these run
        made,
    ):
        run = contextvars.copy_context().run  # context variables that forward sets stay as they are
        captured = run(_capture, model, forward, sample, options, made)
        value = captured.key.depends_on(options.unsteady)
        if value is not None:
            raise Refusal(f"forward depends on a value that changes from step to step: {value}", StateChanges(value))
        return captured


def _capture(
    model: nn.Module, forward: Callable[..., Any], sample: Sample | Call, options: CaptureOptions, made: MadeTensors
) -> Capture:
    """What `capture` gives. made: notes the tensors of its traces."""
    loss_fn, device, shards, islands = options.loss_fn, options.device, options.shards, options.islands
    capturable.refuse_wrappers(model, islands)
    capturable.refuse_subclasses(model, shards)
    planned_device = device or capturable.model_device(model)
    if planned_device.type not in ("cpu", "cuda"):
        raise ValueError(f"steps on {planned_device} can't be planned, only those on CPUs and on CUDA devices")
    run = forward if loss_fn is None else functools.partial(loss_fn, model)
    call = sample if isinstance(sample, Call) else CallReader(run).read_sample(sample)
    capturable.refuse_odd_arguments(call)
    capturable.check_devices(call, planned_device, device is not None)
    capturable.refuse_hooks(model, loss_fn is not None, shards, islands)
    ignored = () if shards is None else shards.attributes
    reads = AttributeReads([owner for _, owner in attribute_owners(model, ignored, run)])
    whole = {} if shards is None else {name: shards.shard(p) for name, p in model.named_parameters()}
    shapes = {name: shard.shape for name, shard in whole.items() if shard is not None}
    memory, autocast = KeptMemory(), Autocast.ambient(planned_device.type)
    with AttributesKept(model, ignored, run) as attributes, memory:
        request = TraceRequest(
            model, call.requiring_grad(options.requiring), run, autocast, planned_device,
            shapes=shapes, moves_inputs=device is not None, memory=memory,
            reads=reads, left=functools.partial(attributes.look, reads), made=made,
            **{one.name: getattr(options, one.name) for one in dataclasses.fields(TraceOptions)},
        )  # fmt: skip
        raw, settled, counters = _settled_trace(request, attributes)
        _refuse_effects_in_checkpoints(raw, bool(settled or counters or attributes.set_anew))
        raw, other = _with_sums(raw, request), None
        outside = options.tangents is None and any(raw.outputs[i].meta["val"].dim() for i in raw.tangents)  # the loss
        if outside and not options.varying:
            of_sum = dataclasses.replace(request, expanded=True)
            other = _with_sums(trace_step(of_sum), of_sum)
        attributes.pass_over(reads, counters)
        reads.pass_over_names(raw.handed)
        device_type = None if device is None else planned_device.type
        key = StepKey(model, call, autocast, device_type, shards, reads, run)
        left = attributes.settled(settled)
    refuse_reads(raw.islands.values(), model, reads)
    traced = build_traced(raw, call.names, planned_device)
    _refuse_hidden_writes(traced, memory)
    for value in traced.graph.values if traced.decisions else ():  # on another branch forward has to run again
        if value.role in ("input", "constant") and value.reuses is not None:
            raise UnsupportedModel(f"forward writes to {value.role} {value.name.split('@')[0]}")
    expanded = None if other is None else build_traced(other, call.names, planned_device)
    key.guard(traced, raw, call)
    answers = tuple(raw.answers[: raw.forward_reads])
    return Capture(
        traced, call, key, expanded, counters, options, answers, islands.told, left
    )  # fmt: skip


def _settled_trace(
    request: TraceRequest, attributes: AttributesKept
) -> tuple[RawTrace, tuple[SetValue, ...], tuple[SetValue, ...]]:
    """The trace of a step, the attributes that its first run sets for good, and counters.

    If forward leaves anything in Python, the trace is that of a later run, which finds it there. Raises a Refusal
    if each run would be another.
    """
    raw = trace_step(request)
    settled = attributes.changes()
    if settled and attributes.set_anew:
        raise Refusal(
            f"forward sets the attribute {'.'.join(attributes.set_anew[0][:2])} to tensors, and "
            f"{'.'.join(settled[0][:2])} to {settled[0].value!r}: the next run may not do either",
            StateChanges(settled[0].owner, at_first=True),
        )
    seen_before = _seen_of(raw)
    things = (None, torch.zeros(7), torch.zeros(7).as_subclass(UselessTensor)) if attributes.set_anew else ()
    for thing in things:  # some reads are not heard: all traces, with any content, must be equal
        refusal = Refusal(
            f"forward reads the attribute {'.'.join(attributes.set_anew[0][:2])}, or another that it has set "
            "to tensors before; a planned step would not. Keep such state in a buffer",
            StateChanges(attributes.set_anew[0].owner, at_first=True),
        )
        request.memory.undo()
        attributes.spoil(thing)
        again = _trace_once_more(request)
        if again is None or _seen_of(again) != seen_before or attributes.changes() != settled:
            raise refusal
        raw = again
    if settled:
        request.memory.undo()
        later = _trace_once_more(request)
        is_same, now = later is not None and _seen_of(later) == seen_before, attributes.changes()
        if later is None or (now == settled and not is_same):
            raise Refusal(
                f"the first run of forward sets {'.'.join(settled[0][:2])}, and does what no later one does; a planned "
                "step would not. Run the model once before memplan.apply",
                StateChanges(settled[0].owner, at_first=True),
            )
        if now == settled:
            return later, settled, ()
        raw, counters = later, attributes.counters(settled, now) if is_same else ()
        request.memory.undo()
        with attributes.counting(counters) as is_right, contextlib.suppress(TypeError):
            again = _trace_once_more(request) if counters else None
            if again is not None and _seen_of(again) == seen_before and is_right():
                return raw, tuple(s for s, n in zip(settled, now, strict=True) if s == n), counters
        raise Refusal(
            f"forward changes the Python attribute {settled[0][0]}.{settled[0][1]} each time it runs; a "
            "planned step would not. Keep such state in a buffer, or change it outside of forward",
            StateChanges(settled[0].owner),
        )
    return raw, (), ()


def _seen_of(raw: RawTrace) -> tuple[Any, ...]:
    """What one trace has in common with another that differs in nothing."""
    return str(raw.module.graph), raw.template.plain()


def _writing(raw: RawTrace) -> set[fx.Node]:
    """The nodes that write to parameters, buffers and arguments."""
    nodes = raw.module.graph.nodes
    sources = (n.meta.get("val") for n in nodes if n.op == "placeholder")
    there = {storage_key(source) for source in sources if isinstance(source, torch.Tensor)}
    return {node for node in nodes if any(storage_key(n.meta["val"]) in there for n in written_nodes(node))}


def _refuse_effects_in_checkpoints(raw: RawTrace, leaves_attributes: bool) -> None:
    """Refuse what would happen twice in a step, because a checkpoint of forward runs it again in backward.

    leaves_attributes: forward sets attributes, in or out of checkpoints.
    """
    calls = [node for node in raw.checkpointed if node.op == "call_function"]
    if not calls:
        return
    islands = {node: raw.islands[str(node.args[0])] for node in calls if node.target is FORWARD}
    random = {node for node in calls if (islands[node].random if node in islands else draws(node))}
    again = [node for node in random if not raw.checkpointed[node]]
    lasting = any(island.once or island.writes for island in islands.values()) or leaves_attributes or raw.reassigned
    if again or not _writing(raw).isdisjoint(calls) or lasting:
        what = "draws random numbers" if again else "writes to a buffer, or sets an attribute,"
        raise UnsupportedModel(
            f"forward {what} and calls torch.utils.checkpoint, which does so once more in backward; a planned step "
            "would do it once. Leave the checkpoint out, for memplan decides what to recompute"
        )


def _with_sums(raw: RawTrace, request: TraceRequest) -> RawTrace:
    """The trace, or a new one in which sums that eager makes in place have the strides of their first operands.

    Where several gradients come for one tensor, autograd's engine adds them into the memory of the first, if nothing
    else holds that. Under a dispatch mode, as in a trace, it adds out of place. That may give other strides to
    dimensions of one element, and later kernels use those to see whether channels come last.
    """
    known: frozenset[int] = frozenset()
    while not (found := _sums_in_place(raw)) <= known:
        known |= found
        request.memory.undo()
        raw = trace_step(dataclasses.replace(request, in_place=known))
    return raw


def _sums_in_place(raw: RawTrace) -> frozenset[int]:
    """Numbers of the odd sums whose first operand nothing else holds."""
    if not raw.odd_sums:
        return frozenset()
    nodes = list(raw.module.graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    looks: dict[int, list[fx.Node]] = {}
    for node in nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            looks.setdefault(storage_key(node.meta["val"]), []).append(node)

    def is_alone(total: fx.Node, first: fx.Node) -> bool:
        seen_as = looks[storage_key(first.meta["val"])]
        made_here = first.op == "call_function" and seen_as[0] is first
        users = {user for look in seen_as for user in look.users} - {total}
        return made_here and all(position[user] < position[total] for user in users)

    return frozenset(number for number, total, first in raw.odd_sums if is_alone(total, first))


def _trace_once_more(request: TraceRequest) -> RawTrace | None:
    """The trace of a later run of forward; None if it is refused."""
    try:
        return trace_step(request)
    except UnsupportedModel:
        return None


def _refuse_hidden_writes(traced: Traced, memory: KeptMemory) -> None:
    for tensor, around in zip(memory.written, memory.around, strict=True):
        same = [c for c in traced.constants.values() if storage_key(c) == storage_key(tensor)]
        if not same or any(constant is not tensor for constant in same):
            raise Refusal(
                f"forward writes to a tensor of shape {tuple(tensor.shape)} that is no buffer, under another name than "
                "the one by which it is read (.data, .detach()); a planned step would not. Register it as a buffer",
                MakeIslands([around]),
            )
