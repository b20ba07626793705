"""Capture: from a model and a sample to a `Traced` step and the key that says which calls it serves."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.analysis.traced import Traced
from memplan.capture.analysis.values import build_traced
from memplan.capture.attributes.attribute_reads import AttributeReads
from memplan.capture.attributes.attributes_kept import (
    AddedHook,
    AttributesKept,
    ChangesState,
    LeftBehind,
    SetsAttribute,
    SetValue,
    UselessTensor,
)
from memplan.capture.attributes.kept_memory import KeptMemory
from memplan.capture.attributes.tables import attribute_owners, is_plain
from memplan.capture.key import StepKey, unplanned_hooks
from memplan.capture.ops import op_facts
from memplan.capture.ops.dataflow import written_nodes
from memplan.capture.ops.layout import storage_key
from memplan.capture.ops.sizes import Varying
from memplan.capture.shards import Shards
from memplan.capture.trace.call import Call, CallReader, Sample
from memplan.capture.trace.collector import without_collections
from memplan.capture.trace.cuda_ops import Capability
from memplan.capture.trace.escapes import MadeTensors
from memplan.capture.trace.islands import NO_ISLANDS, CompiledCode, Islands, OpenIsland, calls_around, refuse_reads
from memplan.capture.trace.raw_trace import Answer, Autocast, GradientLayout, RawTrace
from memplan.capture.trace.stand_ins import StartsToRequireGrad
from memplan.capture.trace.sums import with_sums_in_place
from memplan.capture.trace.trace import TraceRequest, trace_step
from memplan.errors import UnsupportedModel
from memplan.problem.data import Role


class UnplannableArgument(UnsupportedModel):
    """An argument with which a step can't run unplanned either."""


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured step of one model.

    - traced: the step.
    - call: the call that it was captured with.
    - reader: reads later calls as it read the sample.
    - key: tells which calls the step serves.
    - expanded: the step for `out.sum().backward()`, where the loss is not part of the plan.
    - settled: Python attributes that the first eager forward sets and later ones leave.
    - counters: Python attributes to which each forward adds, and how much.
    - hooks: hooks that the first eager forward adds to submodules.
    - backward: the autocast under which backward runs; None: without autocast.
    - answers: what forward reads from tensors.
    - left: what the first eager forward leaves, and what was there for the capture.
    - tangents: the gradients that arrive, by output, where that is known from a backward.
    - requiring: positions of arguments that forward lets require grad.
    - islands: with the reason for each, in words.
    """

    traced: Traced
    call: Call
    reader: CallReader
    key: StepKey
    expanded: Traced | None
    settled: tuple[SetValue, ...]
    counters: tuple[SetValue, ...]
    hooks: tuple[AddedHook, ...]
    backward: Autocast | None = None
    answers: tuple[Answer, ...] = ()
    left: LeftBehind | None = None
    tangents: Mapping[int, GradientLayout] | None = None
    requiring: tuple[int, ...] = ()
    islands: tuple[str, ...] = ()

    def changed(self, change: Callable[[Traced], Traced]) -> Capture:
        """The capture with a change made to its step, and to that for `out.sum().backward()`."""
        expanded = None if self.expanded is None else change(self.expanded)
        return dataclasses.replace(self, traced=change(self.traced), expanded=expanded)

    def settle(self, model: nn.Module) -> None:
        """Set the attributes, and add the hooks, that the first eager forward would."""
        if self.left is not None:
            self.left.put_once()
        tables = dict(self.key.tables) if self.settled else {}
        for name, key, value in self.settled:
            tables[name][key] = value  # type: ignore[index]
        for hook in self.hooks:
            getattr(model.get_submodule(hook.module), hook.table).setdefault(hook.key, hook.hook)


def capture(
    model: nn.Module,
    forward: Callable[..., Any],
    sample: Sample | Call,
    loss_fn: Callable[..., Any] | None = None,
    device: torch.device | None = None,
    tangents: Mapping[int, GradientLayout] | None = None,
    shards: Shards | None = None,
    backward: Autocast | None = None,
    seen: Sequence[Answer] | None = None,
    varying: Varying = frozenset(),
    counted: bool = False,
    unsteady: Collection[str] = (),
    islands: Islands = NO_ISLANDS,
    capability: Capability | None = None,
) -> Capture:
    """Trace `forward(*sample)`, or `loss_fn(model, *sample)`, and its backward on fake tensors.

    - device: the device to plan for; None is the model's.
    - tangents: the outputs that backward starts from, and the layout of the gradient of each. With None, backward
      starts from the loss where there is one, else from every output that requires grad.
    - shards: the engine that has sharded the parameters.
    - backward: the autocast under which backward runs; None: without autocast.
    - seen: what forward read from tensors when it ran on the sample. The step then has the branches that forward took,
      and the plan checks them.
    - varying: sizes of the sample that other calls have others of. The step then serves all for which what it depends
      on holds, as its `Sizes` say.
    - counted: masks of dropout are functions of a seed, which fused groups compute.
    - unsteady: values that change from step to step, as `StepKey.other_value` names them. The step must not depend on
      them.
    - islands: calls that can't be traced, as a run of forward has shown them.
    - capability: of a CUDA device whose attention and dropout the step has, though on the CPU. It can't run.

    Nothing of the model, the sample, `.grad` or the generator changes. Raises UnsupportedModel. It is an OpenBranch
    where the step can be captured once `seen` is given, and an OpenIsland where it may be with other `islands`.
    """
    made = MadeTensors()
    once = functools.partial(
        _capture, model, forward, sample, loss_fn, device, tangents, shards, backward, seen, varying, counted, made,
        islands, capability,
    )  # fmt: skip
    with (
        without_collections(),
        contextlib.nullcontext() if shards is None else shards.tracing(),
        private.outside_of_tracing(),  # dispatch modes of the caller see planned ops when these run
        made.kept_in(),
    ):
        run = contextvars.copy_context().run  # context variables that forward sets stay as they are
        try:
            captured = run(once)
        except StartsToRequireGrad as error:
            requiring = error.positions
            captured = run(once, requiring)
        _refuse_unsteady(captured.key, unsteady)
        return captured


def _capture(
    model: nn.Module,
    forward: Callable[..., Any],
    sample: Sample | Call,
    loss_fn: Callable[..., Any] | None,
    device: torch.device | None,
    tangents: Mapping[int, GradientLayout] | None,
    shards: Shards | None,
    backward: Autocast | None,
    seen: Sequence[Answer] | None,
    varying: Varying,
    counted: bool,
    made: MadeTensors,
    islands: Islands,
    capability: Capability | None,
    requiring: tuple[int, ...] = (),
) -> Capture:
    """One try of `capture`.

    - made: notes the tensors of its traces.
    - requiring: positions of arguments that forward lets require grad.
    """
    refuse_wrappers(model, islands)
    _refuse_subclasses(model, shards)
    planned_device = device or model_device(model)
    if planned_device.type not in ("cpu", "cuda"):
        raise ValueError(f"steps on {planned_device} can't be planned, only those on CPUs and on CUDA devices")
    run = forward if loss_fn is None else functools.partial(loss_fn, model)
    reader = CallReader(run)
    call = sample if isinstance(sample, Call) else reader.read_sample(sample)
    _refuse_odd_arguments(call)
    _check_devices(call, planned_device, device is not None)
    _refuse_hooks(model, loss_fn is not None, shards, islands)
    memory, reads, autocast = KeptMemory(), _reads(model, shards, run), Autocast.ambient(planned_device.type)
    ignored = () if shards is None else shards.attributes
    with AttributesKept(model, ignored, run) as attributes, memory:
        request = TraceRequest(
            model, call.requiring_grad(requiring), run, autocast, planned_device, tangents=tangents,
            shapes=_shapes(model, shards), moves_inputs=device is not None, memory=memory, backward=backward,
            seen=seen, left=functools.partial(attributes.look, reads), varying=varying, counted=counted, made=made,
            islands=islands, capability=capability,
        )  # fmt: skip
        raw, settled, counters = _settled_trace(request, reads, attributes, memory)
        raw, other = _with_sums(raw, request, reads, memory), None
        outside = tangents is None and any(raw.outputs[i].meta["val"].dim() for i in raw.tangents)  # of the loss
        if outside and not varying:
            of_sum = dataclasses.replace(request, expanded=True)
            other = _with_sums(_heard(reads, of_sum), of_sum, reads, memory)
        attributes.pass_over(reads, counters)
        reads.pass_over_names(raw.handed)
        device_type = None if device is None else planned_device.type
        key = StepKey(model, call, autocast, device_type, shards, reads, run)
    refuse_reads(raw.islands.values(), model, reads)
    traced = build_traced(raw, call.names, planned_device)
    _refuse_hidden_writes(traced, memory)
    if traced.decisions:  # where forward takes another branch it has to run again
        _refuse_writes_to(traced, "input", "constant")
    expanded = None if other is None else build_traced(other, call.names, planned_device)
    key.guard(traced, raw)
    answers = raw.answers[: raw.forward_reads]
    return Capture(
        traced, call, reader, key, expanded, settled, counters, attributes.added_hooks, backward, answers,
        tangents=tangents, requiring=requiring, islands=raw.told,
    )  # fmt: skip


def _settled_trace(
    request: TraceRequest, reads: AttributeReads, attributes: AttributesKept, memory: KeptMemory
) -> tuple[RawTrace, tuple[SetValue, ...], tuple[SetValue, ...]]:
    """The trace of a step as it is from its second run on, the attributes that the first one sets for good, counters.

    Raises SetsAttribute or UnsupportedModel where each run would be another.
    """
    raw = _heard(reads, request)
    settled = attributes.changes()
    if settled and attributes.set_anew:
        raise SetsAttribute(
            f"forward sets the attribute {'.'.join(attributes.set_anew[0][:2])} to tensors, and "
            f"{'.'.join(settled[0][:2])} to {settled[0].value!r}: the next run may not do either",
            settled[0].owner,
        )
    seen_before = _seen_of(raw)
    things = (None, torch.zeros(7), torch.zeros(7).as_subclass(UselessTensor)) if attributes.set_anew else ()
    for thing in things:  # some ways to read are not heard, and some do not matter
        refusal = SetsAttribute(
            f"forward reads the attribute {'.'.join(attributes.set_anew[0][:2])}, or another that it has set "
            "to tensors before; a planned step would not. Keep such state in a buffer",
            attributes.set_anew[0].owner,
        )
        memory.undo()
        attributes.spoil(thing)
        try:
            raw = _heard(reads, request)
        except UnsupportedModel:
            raise refusal from None
        if _seen_of(raw) != seen_before or attributes.changes() != settled:
            raise refusal
    if settled:
        memory.undo()
        first, raw = raw, _heard(reads, request)
        if _lasting_ops(first) != _lasting_ops(raw):
            raise ChangesState(
                f"the first run of forward sets {'.'.join(settled[0][:2])}, and writes to tensors or draws as no "
                "later one does; a planned step would not. Run the model once before memplan.apply",
                settled[0].owner,
            )
        now = attributes.changes()
        if now == settled:
            return raw, settled, ()
        counters, seen_before = attributes.counters(settled, now), _seen_of(raw)
        memory.undo()
        with attributes.counting(counters) as is_right, contextlib.suppress(TypeError, UnsupportedModel):
            if counters and _seen_of(_heard(reads, request)) == seen_before and is_right():
                return raw, tuple(s for s, n in zip(settled, now, strict=True) if s == n), counters
        raise ChangesState(
            f"forward changes the Python attribute {settled[0][0]}.{settled[0][1]} each time it runs; a "
            "planned step would not. Keep such state in a buffer, or change it outside of forward",
            settled[0].owner,
        )
    return raw, (), ()


def _seen_of(raw: RawTrace) -> tuple[Any, ...]:
    """What one trace has in common with another that differs in nothing."""
    return str(raw.module.graph), raw.template.plain


def _lasting_ops(raw: RawTrace) -> list[str]:
    """Ops of a trace that outlast it: writes to parameters, buffers and arguments, and draws of random numbers."""
    nodes = raw.module.graph.nodes
    sources = (n.meta.get("val") for n in nodes if n.op == "placeholder")
    there = {storage_key(source) for source in sources if isinstance(source, torch.Tensor)}
    return [
        str(node.target)
        for node in nodes
        if node.op == "call_function"
        and (
            any(storage_key(written.meta["val"]) in there for written in written_nodes(node))
            or op_facts.draws_random_numbers(node.target, node.args, node.kwargs)
        )
    ]


def _with_sums(raw: RawTrace, request: TraceRequest, reads: AttributeReads, memory: KeptMemory) -> RawTrace:
    """The trace, with the sums made in place that eager makes in place."""

    def again(in_place: frozenset[int]) -> RawTrace:
        memory.undo()
        return _heard(reads, dataclasses.replace(request, in_place=in_place))

    return with_sums_in_place(raw, again)


def _reads(model: nn.Module, shards: Shards | None, run: Callable[..., Any]) -> AttributeReads:
    owners = attribute_owners(model, () if shards is None else shards.attributes, run)
    return AttributeReads([owner for _, owner in owners])


def _heard(reads: AttributeReads, request: TraceRequest) -> RawTrace:
    """A trace. The attributes that it reads are noted."""
    with reads.listening():
        return trace_step(request)


def _shapes(model: nn.Module, shards: Shards | None) -> dict[str, torch.Size]:
    """Shapes of sharded parameters, by name."""
    if shards is None:
        return {}
    return {name: shard.shape for name, p in model.named_parameters() if (shard := shards.shard(p)) is not None}


def _refuse_hidden_writes(traced: Traced, memory: KeptMemory) -> None:
    for tensor, around in zip(memory.written, memory.around, strict=True):
        same = [c for c in traced.constants.values() if storage_key(c) == storage_key(tensor)]
        if not same or any(constant is not tensor for constant in same):
            raise OpenIsland(
                f"forward writes to a tensor of shape {tuple(tensor.shape)} that is no buffer, under another name than "
                "the one by which it is read (.data, .detach()); a planned step would not. Register it as a buffer",
                [around],
            )


def _refuse_unsteady(key: StepKey, unsteady: Collection[str]) -> None:
    value = key.depends_on(unsteady) if unsteady else None
    if value is not None:
        raise ChangesState(f"forward depends on a value that changes from step to step: {value}", value)


def _refuse_writes_to(traced: Traced, *roles: Role) -> None:
    for value in traced.graph.values:
        if value.role in roles and value.reuses is not None:
            raise UnsupportedModel(f"forward writes to {value.role} {value.name.split('@')[0]}")


def model_device(model: nn.Module) -> torch.device:
    """The one device of a model's parameters and buffers. Raises UnsupportedModel where there are several, or none."""
    devices = {t.device for t in [*model.parameters(), *model.buffers()]}
    if len(devices) > 1:
        raise UnsupportedModel(
            f"the model's parameters are on {sorted(map(str, devices))}; one device can be planned at a time. Move the "
            "model to it, or pass device= to have that done"
        )
    if not devices:
        raise UnsupportedModel("the model has neither parameters nor buffers; there is nothing to train")
    (device,) = devices
    if device.type == "meta":
        raise UnsupportedModel(
            "the model is on the meta device; materialise it first (model.to_empty), then load weights"
        )
    return device


def _check_devices(call: Call, device: torch.device, given: bool) -> None:
    """Refuse tensors of the sample that are on another device than the model.

    A GPU's model may take some from the host (lengths, a number in a tensor) beside those that it takes from the GPU.
    """
    refuse_without_data(call, device)
    some_there = any(tensor.device.type == device.type for tensor in call.tensors)
    for name, tensor in zip(call.names, call.tensors, strict=True):
        beside = some_there and tensor.device.type == "cpu"
        if tensor.device.type != device.type and not given and not beside:
            raise ValueError(
                f"sample {name} is on {tensor.device}, the model on {device}. Move the sample, or pass "
                f"device={str(device)!r} to plan for that device"
            )


def refuse_without_data(call: Call, device: torch.device) -> None:
    """Refuse tensors on the meta device where the model is on a real one. device: where they should be."""
    for name, tensor in zip(call.names, call.tensors, strict=True):
        if tensor.is_meta and device.type != "meta":
            raise ValueError(
                f"sample {name}, of shape {tuple(tensor.shape)}, is on the meta device and has no data. Give one with "
                f"data, on {device}"
            )


def _refuse_odd_arguments(call: Call) -> None:
    """Refuse objects as arguments: their attributes would be read at capture and never again."""
    for name, tensor in zip(call.names, call.tensors, strict=True):
        if private.is_sharded(tensor):
            raise UnplannableArgument(
                f"argument {name} is a DTensor, of which this rank has a part. Pass that part, and make a DTensor of "
                "it in forward"
            )
        if tensor.is_nested and tensor.layout is torch.strided:
            raise UnplannableArgument(
                f"argument {name} is a nested tensor of the strided layout, which has no sizes. Make it with "
                "layout=torch.jagged"
            )
    for name, thing in call.others:
        if not is_plain(thing) and not isinstance(thing, Enum):
            raise UnsupportedModel(
                f"argument {name} is a {type(thing).__module__}.{type(thing).__qualname__}; a planned step takes "
                "tensors, numbers, strings and containers of them"
            )


def refuse_wrappers(model: nn.Module, islands: Islands = NO_ISLANDS) -> None:
    """Refuse models that are wrapped, compiled or told to recompute, and `context_parallel`; say what to do.

    Islands may be compiled.
    """
    if "context_parallel" in private.parallel_contexts():
        raise UnsupportedModel(
            "context_parallel is on, under which attention passes keys and values from rank to rank; no plan of that "
            "was ever compared with steps without one. Split the sequence with SequenceParallel, or run such steps "
            "without a plan (memplan.remove)"
        )
    kinds = {kind.__name__ for kind in type(model).__mro__}
    for kind in (
        "DataParallel",
        "DistributedDataParallel",
        "FullyShardedDataParallel",
        "DeepSpeedEngine",
    ):
        if kind in kinds:
            raise UnsupportedModel(
                f"the model is wrapped in {kind}; apply memplan to the model inside (model.module) first"
            )
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise UnsupportedModel(
                f"gradient checkpointing is on in {name or type(model).__name__}; memplan decides what to recompute. "
                "Call model.gradient_checkpointing_disable() first"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModel(
                f"module {name or type(model).__name__} went through torch.jit; use the original module, of which "
                "memplan can see what it does"
            )
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(isinstance(t, (nn.UninitializedParameter, nn.UninitializedBuffer)) for t in own):
            raise UnsupportedModel(
                f"parameters of {name or type(model).__name__} have no shape yet. Run the model once, under "
                "torch.no_grad(), before you plan it"
            )
    compiled = [
        name
        for name, module in model.named_modules()
        if private.runs_compiled(module) or (module is model and private.is_compiled(model))
        if not islands.has(name)
    ]
    if compiled:
        raise (UnsupportedModel if "" in compiled else CompiledCode)(
            f"module {compiled[0] or type(model).__name__} is compiled, and a plan of eager kernels would lose what "
            'that gains in time. memplan.apply(..., kernels="fused") compiles groups of ops itself, in place of what '
            "torch.compile made; else leave torch.compile and compile() out",
            *(() if "" in compiled else ([calls_around(name) for name in compiled],)),
        )


def _refuse_subclasses(model: nn.Module, shards: Shards | None) -> None:
    """Refuse tensors whose class changes what ops do. Packed weights are taken as the integers that they are.

    shards: knows of DTensors.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if private.is_sharded(tensor) and shards is not None:
            continue
        if private.is_sharded(tensor):
            raise UnsupportedModel(
                f"{name} is a DTensor since the model was planned. Call memplan.apply again once it is sharded"
            )
        packed = not (tensor.requires_grad or tensor.is_floating_point() or tensor.is_complex())
        if private.changes_ops(tensor) and not packed:
            raise UnsupportedModel(
                f"{name} is a {type(tensor).__name__}, whose class has a say in what ops on it do "
                "(__torch_function__, __torch_dispatch__); a planned step would not ask it"
            )


def _refuse_hooks(
    model: nn.Module, with_loss: bool, shards: Shards | None = None, islands: Islands = NO_ISLANDS
) -> None:
    """Refuse hooks on submodules that are no islands: they would run at capture and never again."""
    if any(map(private.foreign_hooks, private.global_hook_tables())):
        raise UnsupportedModel(
            "torch.nn.modules.module has hooks for every module, which a planned step would not run. Remove them"
        )
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooked = {
        name: kind[1:].replace("_", " ")
        for name, module in model.named_modules()
        if not islands.has(name)
        and (module is not model or with_loss)  # the model's own run around the planned forward
        for kind in kinds
        if unplanned_hooks(getattr(module, kind), shards)
    }
    if hooked:
        name, kind = next(iter(hooked.items()))
        raise OpenIsland(
            f"module {name or type(model).__name__} has {kind}, which a planned step would not run. Remove them, or "
            "put what they do into forward",
            [calls_around(path) for path in hooked],
        )
