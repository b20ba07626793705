"""What can't be captured with any forward: wrappers, subclasses of tensors, hooks, odd arguments."""

from __future__ import annotations

from enum import Enum

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.attributes.tables import is_plain
from memplan.capture.key import unplanned_hooks
from memplan.capture.ops.ways import MakeIslands, Never, Refusal
from memplan.capture.shards import Shards
from memplan.capture.trace.call import Call
from memplan.capture.trace.islands import NO_ISLANDS, Islands, calls_around
from memplan.errors import UnsupportedModel


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
    if device.type != "meta":
        return device
    raise UnsupportedModel("the model is on the meta device; materialise it first (model.to_empty), then load weights")


def check_devices(call: Call, device: torch.device, given: bool) -> None:
    """Refuse tensors of the sample that are on another device than the model, or on the meta device.

    A GPU's model may take some from the host (lengths, a number in a tensor) beside those that it takes from the GPU.
    """
    some_there = any(tensor.device.type == device.type for tensor in call.tensors)
    for name, tensor in zip(call.names, call.tensors, strict=True):
        if tensor.is_meta and device.type != "meta":
            raise ValueError(
                f"sample {name}, of shape {tuple(tensor.shape)}, is on the meta device and has no data. Give one with "
                f"data, on {device}"
            )
        beside = some_there and tensor.device.type == "cpu"
        if tensor.device.type != device.type and not given and not beside:
            raise ValueError(
                f"sample {name} is on {tensor.device}, the model on {device}. Move the sample, or pass "
                f"device={str(device)!r} to plan for that device"
            )


def refuse_odd_arguments(call: Call) -> None:
    """Refuse objects as arguments: their attributes would be read at capture and never again."""
    for name, tensor in zip(call.names, call.tensors, strict=True):
        if private.is_sharded(tensor):
            raise Refusal(
                f"argument {name} is a DTensor, of which this rank has a part. Pass that part, and make a DTensor of "
                "it in forward",
                Never(),
            )
        if tensor.is_nested and tensor.layout is torch.strided:
            raise Refusal(
                f"argument {name} is a nested tensor of the strided layout, which has no sizes. Make it with "
                "layout=torch.jagged",
                Never(),
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
    for kind in ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"):
        if kind in kinds:
            raise UnsupportedModel(f"the model is wrapped in {kind}; apply memplan to the model inside (model.module)")
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
    outside = [(name, module) for name, module in model.named_modules() if not islands.has(name)]
    compiled = [n for n, m in outside if private.runs_compiled(m) or (m is model and private.is_compiled(model))]
    if compiled:
        raise Refusal(
            f"module {compiled[0] or type(model).__name__} is compiled, and a plan of eager kernels would lose what "
            'that gains in time. memplan.apply(..., kernels="fused") compiles groups of ops itself, in place of what '
            "torch.compile made; else leave torch.compile and compile() out",
            None if "" in compiled else MakeIslands([calls_around(name) for name in compiled], compiled=True),
        )


def refuse_subclasses(model: nn.Module, shards: Shards | None) -> None:
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


def refuse_hooks(model: nn.Module, with_loss: bool, shards: Shards | None, islands: Islands) -> None:
    """Refuse hooks on submodules that are no islands: they would run at capture and never again."""
    if any(map(private.foreign_hooks, private.global_hook_tables())):
        raise UnsupportedModel(
            "torch.nn.modules.module has hooks for every module, which a planned step would not run. Remove them"
        )
    hooked = {
        name: kind[1:].replace("_", " ")
        for name, module in model.named_modules()
        if not islands.has(name)
        and (module is not model or with_loss)  # the model's own run around the planned forward
        for kind in private.HOOK_TABLES
        if unplanned_hooks(getattr(module, kind), shards)
    }
    if hooked:
        name, kind = next(iter(hooked.items()))
        raise Refusal(
            f"module {name or type(model).__name__} has {kind}, which a planned step would not run. Remove them, or "
            "put what they do into forward",
            MakeIslands([calls_around(path) for path in hooked]),
        )
