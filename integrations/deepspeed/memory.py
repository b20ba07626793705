"""What a DeepSpeed engine holds on a rank's device in addition to the step itself."""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

import memplan

log = logging.getLogger("memplan")

_SCALARS = 16  # scaled losses, norms and flags that an engine has around a step
_DENSE_BUCKET_NUMEL = 500_000_000  # gradients that the engine reduces together without ZeRO


class Needs(NamedTuple):
    """What plans for an engine's module have to leave room for, as arguments of `memplan.apply`.

    - accumulate: gradients of earlier micro-batches are in `.grad` while a step runs.
    - optimizer: the torch optimizer whose state and `step()` are to be counted; None where DeepSpeed keeps it
      elsewhere, or it can't be foreseen.
    - surroundings: what the engine holds beside the step.
    """

    accumulate: bool
    optimizer: torch.optim.Optimizer | None
    surroundings: memplan.Surroundings


def needs_of(engine: DeepSpeedEngine) -> Needs:
    """What an engine without sharded parameters (ZeRO 0, 1 or 2) holds around a step of its module."""
    basic, wrapped = engine.basic_optimizer, engine.optimizer
    here = _is_of_pytorch(basic) and all(p.device.type == engine.device.type for p in _parameters_of(basic))
    counted = basic if here else None
    held_bytes = storage_bytes(_tensors_of(wrapped), engine.device, without=_model_tensors(engine))
    if counted is None:
        held_bytes += 0 if basic is None else _state_bytes(basic, engine.device, _parameters_of(basic))
    held_bytes += _SCALARS * _scalar_bytes(engine.device)
    several = engine.gradient_accumulation_steps() > 1 or not engine.managed_gradient_accumulation()
    if isinstance(wrapped, DeepSpeedZeroOptimizer):
        return _zero_needs(engine, wrapped, counted, held_bytes, several)
    gradients = [p for p in engine.module.parameters() if p.requires_grad]
    if isinstance(wrapped, BF16_Optimizer):  # it sums gradients in fp32, and keeps those in `.grad` from step to step
        sums = wrapped.fp32_groups_gradients_flat
        after_bytes = _sent_bytes(engine, sums) if engine.dp_world_size > 1 else 0
        after_bytes = max(after_bytes, sum(4 * p.numel() for p in wrapped.fp32_groups_flat_partition))
        return Needs(True, counted, memplan.Surroundings(held_bytes, after_bytes, keeps_parameters=True))
    after_bytes = _sent_bytes(engine, gradients)
    if wrapped is not basic:  # fp32 copies of all gradients, for the fp32 copies of parameters that it steps
        after_bytes = max(after_bytes, sum(4 * p.numel() for p in gradients))
    return Needs(several, counted, memplan.Surroundings(held_bytes, after_bytes, keeps_parameters=True))


def _sent_bytes(engine: DeepSpeedEngine, gradients: Sequence[torch.Tensor]) -> int:
    """Bytes of gradients while the engine reduces them.

    These are a bucket in one piece, and that once more in the dtype in which it is sent.
    """
    sizes = [t.numel() for t in gradients]
    numel = min(sum(sizes), _DENSE_BUCKET_NUMEL + max(sizes, default=0))
    sent: torch.dtype = engine.communication_data_type
    return int(numel * max((t.element_size() + sent.itemsize * (t.dtype != sent) for t in gradients), default=0))


def _zero_needs(
    engine: DeepSpeedEngine,
    zero: DeepSpeedZeroOptimizer,
    counted: torch.optim.Optimizer | None,
    held_bytes: int,
    several: bool,
) -> Needs:
    """Needs of an engine with ZeRO 1 or 2.

    Both copy gradients into buckets that are there from the first gradient of backward on, and flatten a bucket's
    slices into one more copy to reduce them. Stage 2 does so as each gradient arrives, and keeps only those of its own
    partition. Stage 1 does so after backward.
    """
    sizes = [p.numel() for group in zero.bit16_groups for p in group]
    most_numel = min(sum(sizes), max(zero.reduce_bucket_size, max(sizes, default=0)))
    own_numel = sum(p.numel() for group in zero.params_in_partition for p in group)
    partition_numel = sum(int(size) for size in zero.partition_size)
    model_item, sum_item = zero.dtype.itemsize, zero.gradient_accumulation_dtype.itemsize
    bucket_item = sum_item if zero.use_grad_accum_attribute else model_item
    buckets = (2 if zero.overlap_comm else 1) * len(zero.ipg_buckets) * zero.reduce_bucket_size * bucket_item
    if not zero.contiguous_gradients:  # gradients wait for each other as they are
        buckets = most_numel * bucket_item
    elif zero.reduce_bucket_size > sum(sizes) and engine.global_rank == 0:
        log.warning(
            "DeepSpeed's reduce_bucket_size of %d is more than the %d numbers of the model's gradients, and takes %s. "
            "Set it to %d in zero_optimization",
            zero.reduce_bucket_size, sum(sizes), memplan.format_bytes(buckets), sum(sizes),
        )  # fmt: skip
    sent = sum(most_numel * max(bucket_item, dtype.itemsize) for dtype in zero.ipg_buckets)
    kept = own_numel * model_item * (2 if several else 1)
    if zero.use_separate_grad_accum and not zero.use_grad_accum_attribute:  # one flat sum of its partition instead
        kept = partition_numel * sum_item
    stepping = partition_numel * (sum_item + (4 if sum_item != 4 else 0))  # its gradients in one piece, and in fp32
    if zero.cpu_offload:  # gradients go to the host one by one
        kept = stepping = 0
    in_backward = zero.partition_gradients or zero.overlap_comm
    taken = zero.partition_gradients or zero.use_grad_accum_attribute
    if zero.use_grad_accum_attribute:
        held_bytes += sum(sizes) * sum_item
    return Needs(
        several and not taken,
        counted,
        memplan.Surroundings(
            held_bytes + buckets + (sent + kept if in_backward else 0),
            max(0, stepping - buckets - sent) if in_backward else max(stepping - buckets, sent) + kept,
            takes_gradients=taken,
            keeps_parameters=True,
        ),
    )


def needs_beside_shards(engine: DeepSpeedEngine, reducing_bytes: int) -> Needs:
    """What an engine of ZeRO 3 holds beside its parts of parameters and gradients.

    These are other copies of them, the optimizer's state, and what the optimizer's step takes. It steps one group of
    parameters after the other. reducing_bytes: the part of what is counted already that is free again once gradients
    are reduced.
    """
    zero, basic, device = engine.optimizer, engine.basic_optimizer, engine.device
    counted = [zero.grad_partitions_flat_buffer, *_model_tensors(engine)]
    counted += [bucket.buffer for bucket in zero.ipg_buckets.values() if bucket.buffer is not None]
    held_bytes = storage_bytes(_tensors_of(zero), device, without=counted)
    held_bytes += (_SCALARS + sum(map(len, zero.fp16_groups))) * _scalar_bytes(device)
    groups = [p for p in zero.fp32_partitioned_groups_flat if p.device.type == device.type]
    largest = max(groups, key=lambda p: p.numel(), default=None)
    staying_bytes = sum(p.ds_numel * p.element_size() for p in zero.persistent_parameters)
    if largest is None:
        return Needs(True, None, memplan.Surroundings(held_bytes, max(0, staying_bytes - reducing_bytes)))
    group_bytes = 4 * largest.numel()
    fused = any(group.get("fused") for group in basic.param_groups)
    in_place = fused or isinstance(basic, torch.optim.SGD) or not _is_of_pytorch(basic)
    taken_bytes = 0 if in_place else group_bytes  # by the step at least, and counted with it
    stepping_bytes = 0 if zero.offload_optimizer else group_bytes  # its gradients in one piece
    if zero.gradient_accumulation_dtype != torch.float32:  # and before that in 16 bits
        stepping_bytes = max(stepping_bytes, stepping_bytes * 3 // 2 - taken_bytes)
    # While it steps, parameters that otherwise stay are not whole; then they are gathered in one piece.
    after_bytes = max(stepping_bytes - staying_bytes, staying_bytes - taken_bytes) - reducing_bytes
    after_bytes = max(0, after_bytes)
    index = next(i for i, p in enumerate(zero.fp32_partitioned_groups_flat) if p is largest)
    stepped = None
    if _is_of_pytorch(basic):  # as it is when ZeRO 3 steps it with this group; between steps it has no parameters
        stepped = copy.copy(basic)
        stepped.param_groups = [{**basic.param_groups[zero.sub_group_to_group_id[index]], "params": [largest]}]
        stepped.state = defaultdict(dict, {largest: basic.state[largest]} if largest in basic.state else {})
    rest = [p for p in groups if stepped is None or p is not largest]
    held_bytes += _state_bytes(basic, device, rest)
    return Needs(True, stepped, memplan.Surroundings(held_bytes, after_bytes))


def held_bytes_of(engine: DeepSpeedEngine, inputs: object = ()) -> int:
    """Bytes that a rank holds on the device now: parameters, gradients, the optimizer and these inputs."""
    return storage_bytes(held_by(engine, inputs), engine.device)


def held_by(engine: DeepSpeedEngine, inputs: object = ()) -> list[torch.Tensor]:
    """The tensors that `held_bytes_of` counts."""
    return [
        *_model_tensors(engine),
        *(p.grad for p in engine.module.parameters() if p.grad is not None),
        *_tensors_of(engine.optimizer),
        *_tensors_of(engine.basic_optimizer.state if engine.basic_optimizer is not None else {}),
        *_tensors_of(inputs),
    ]


def storage_bytes(tensors: Iterable[torch.Tensor], device: torch.device, without: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of the distinct storages behind tensors on a device. without: tensors whose storages are left out."""
    known = {t.untyped_storage().data_ptr() for t in without}
    found = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if t.device.type == device.type and t.layout is torch.strided
    }
    return sum(size for address, size in found.items() if address not in known)


def _model_tensors(engine: DeepSpeedEngine) -> list[torch.Tensor]:
    """Parameters, this rank's parts of those that are sharded and second copies of these, and buffers."""
    parameters, kinds = list(engine.module.parameters()), ("ds_tensor", "ds_secondary_tensor")
    parts = [part for p in parameters for kind in kinds if (part := getattr(p, kind, None)) is not None]
    return [*parameters, *parts, *engine.module.buffers()]


def _scalar_bytes(device: torch.device) -> int:
    """The smallest block of the allocator."""
    return 512 if device.type == "cuda" else 8


def _tensors_of(owner: object) -> Iterator[torch.Tensor]:
    """Tensors in containers, and in the attributes of DeepSpeed's optimizers and of their parts."""
    seen: set[int] = set()
    waiting = [owner]
    while waiting:
        here = waiting.pop()
        if id(here) in seen:
            continue
        seen.add(id(here))
        if isinstance(here, torch.Tensor):
            yield here
            if here.is_leaf and here.grad is not None:
                waiting.append(here.grad)
        elif isinstance(here, Mapping):
            waiting.extend(here.values())
        elif isinstance(here, (list, tuple, set, frozenset)):
            waiting.extend(here)
        elif type(here).__module__.startswith("deepspeed.runtime.") and not isinstance(here, torch.nn.Module):
            waiting.extend(getattr(here, "__dict__", {}).values())


def _is_of_pytorch(optimizer: object) -> bool:
    return isinstance(optimizer, torch.optim.Optimizer) and type(optimizer).__module__.startswith("torch.optim")


def _parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _state_bytes(optimizer: Any, device: torch.device, parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of the state of parameters, for an optimizer that can't be run ahead.

    A parameter without state yet counts as two values for each of its elements.
    """
    known, fresh = [], []
    for p in parameters:
        known.append(optimizer.state[p]) if p in optimizer.state else fresh.append(p)
    return storage_bytes(_tensors_of(known), device) + 2 * storage_bytes(fresh, device)
