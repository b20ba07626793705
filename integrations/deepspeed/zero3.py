"""ZeRO stage 3: planned steps in which parameters are gathered when the plan says so, instead of by DeepSpeed's hooks.

DeepSpeed's hooks gather the parameters of a module when its forward or backward begins. A planned step runs no module,
so these hooks do nothing in it. Calls that run without a plan (evaluation, `generate`) go through them as before.
Gradients are handed over through the hooks that DeepSpeed has on parameters, which reduce them and keep this rank's
part.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import get_z3_leaf_modules, z3_leaf_parameter
from torch import nn

import memplan

from .memory import needs_beside_shards

log = logging.getLogger("memplan")

# Attributes of modules in which DeepSpeed keeps its books.
_ATTRIBUTES = frozenset(
    {
        "ds_id", "ds_inflight_param_registry", "ds_recompute_parameters", "ds_grads_remaining",
        "ds_external_parameters", "ds_model_granularity", "applied_pre_backward_ref_cnt", "pre_bwd_fn", "post_bwd_fn",
        "all_parameters", "_external_params", "_original_parameters", "_z3_leaf",
    }
)  # fmt: skip
_FUNCTIONS = ("pre_bwd_fn", "post_bwd_fn")  # those of autograd that its hooks put around modules


def apply_sharded(
    engine: Any,
    sample: Any,
    budget: int | float | str | memplan.Budget | None,
    *,
    gather_speed: memplan.GatherSpeed | None = None,
    **apply_keywords: Any,
) -> None:
    """Plan the model of a DeepSpeed engine of ZeRO stage 3, in place. All of its ranks have to call it, in train mode.

    All ranks run one schedule, because all must gather in one order. It fits each rank's batch in its budget. Beside
    what `memplan.apply` counts, the budget is for this rank's part of parameters, gradients and optimizer state, for
    what the optimizer's step takes, for the buffer in which gradients are reduced, and for another of its size that
    reducing takes.

    - sample: None plans the first call when it comes.
    - gather_speed: of one parameter after the other; None measures it.
    - apply_keywords: as for `memplan.apply`.

    Raises ValueError on all ranks for an engine that can't be planned so, with the reason and the fix. What
    `memplan.apply` raises on one rank is raised on all.
    """
    _refuse(engine)
    shards = ZeroShards(engine, gather_speed)
    _look_at_budgets(budget, shards.group)
    keywords = {**needs_beside_shards(engine, shards.reducing_bytes)._asdict(), **apply_keywords}
    memplan.apply(engine.module, sample, budget, shards=shards, group=shards.group, **keywords)
    shards.let_hooks_rest()


class ZeroShards:
    """The `memplan.Shards` of an engine's parameters."""

    attributes = _ATTRIBUTES
    takes_gradients = True
    way = None

    def __init__(self, engine: Any, speed: memplan.GatherSpeed | None = None) -> None:
        self._module: nn.Module = engine.module
        self._optimizer: Any = engine.optimizer
        self._offload: Any = engine.optimizer.parameter_offload
        self._parameters: list[Any] = list(engine.module.parameters())
        self._passing = [p for p in self._parameters if not p.ds_persist]
        self._staying = [p for p in self._parameters if p.ds_persist]
        self._coming: dict[int, _Gathering] = {}
        self._whole: set[int] = set()  # what `gather` made whole and nobody released, by ds_id
        # DeepSpeed's hooks on modules, by id: those that gather, and those that put nodes into autograd's graph.
        self._gathering: dict[int, Any] = {}
        self._marking: dict[int, Any] = {}
        self._forward: Any = None  # of the model, once it is planned
        self._elements = {p.dtype: p.data.new_empty(1) for p in self._parameters}
        self._find_hooks()
        self.group = self._parameters[0].ds_process_group
        self.speed = speed or self._measured_speed()

    # -- what memplan asks for --------------------------------------------------------------------------------------

    @property
    def resident_bytes(self) -> int:
        optimizer, device = self._optimizer, self._parameters[0].device.type
        held = [p.ds_tensor for p in self._parameters]
        held.append(optimizer.grad_partitions_flat_buffer)
        held += [bucket.buffer for bucket in optimizer.ipg_buckets.values() if bucket.buffer is not None]
        parts_bytes = sum(t.numel() * t.element_size() for t in held if t.device.type == device)
        if optimizer.zero_hpz_partition_size > 1:  # second copies, from the first release on
            near = [p for p in self._parameters if p.ds_tensor.device.type == device]
            parts_bytes += sum(_part_elements(p) * p.element_size() for p in near)
        waiting_bytes = 0 if optimizer.contiguous_gradients else self.reducing_bytes  # gradients, as they are
        return int(parts_bytes + waiting_bytes + self.reducing_bytes)

    @property
    def reducing_bytes(self) -> int:
        """Bytes that reducing a bucket of gradients takes for a while."""
        trainable = sum(p.ds_numel for p in self._parameters if p.requires_grad)
        item_bytes = max(dtype.itemsize for dtype in self._optimizer.ipg_buckets)
        return int(min(self._optimizer.reduce_bucket_size, trainable) * item_bytes)

    def shard(self, parameter: Any) -> memplan.Shard | None:
        if not hasattr(parameter, "ds_id"):
            return None
        ranks = parameter.ds_zero_partition_world_size
        elements = -(-parameter.ds_numel // ranks) * ranks if ranks > 1 else 0  # one rank looks at its part
        if parameter.ds_tensor.device != parameter.device:
            elements += _part_elements(parameter)  # the part comes to the device first
        return memplan.Shard(parameter.ds_shape, elements * parameter.element_size(), bool(parameter.ds_persist))

    def owns(self, hook: Any) -> bool:
        if self._offload.forward_hooks is not self._known_hooks:  # DeepSpeed took them off for a while
            self._find_hooks()
            self.let_hooks_rest()
        return id(hook) in self._gathering or id(hook) in self._marking

    def unplanned_because(self) -> str | None:
        return None

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module in self._module.modules():
                for table in (module._forward_pre_hooks, module._forward_hooks):
                    before = dict(table)
                    stack.callback(table.update, before)
                    stack.callback(table.clear)
                    for key in [key for key, hook in before.items() if id(hook) in self._gathering]:
                        del table[key]
                functions = {name: own for name, own in vars(module).items() if name in _FUNCTIONS}
                stack.callback(vars(module).update, functions)
                vars(module).update(dict.fromkeys(functions, _Passing))
                if getattr(module._parameters, "_in_forward", False):
                    stack.callback(setattr, module._parameters, "_in_forward", True)
                    module._parameters._in_forward = False  # type: ignore[attr-defined]
            yield

    def begin(self, used: Collection[int]) -> None:
        astray = (
            p for p in self._passing if p.ds_status != ZeroParamStatus.NOT_AVAILABLE and p.ds_id not in self._whole
        )
        if next(astray, None) is not None:  # calls without a plan leave parameters whole
            self._offload.partition_all_parameters()
        missing = [p for p in self._staying if p.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        if missing:
            missing[0].all_gather(missing)

    def gather(self, parameter: Any) -> _Gathering:
        self._whole.add(parameter.ds_id)
        if parameter.ds_id in self._coming:
            return self._coming[parameter.ds_id]
        if parameter.ds_status == ZeroParamStatus.AVAILABLE:
            return _Gathering(lambda: None)
        pending = parameter.all_gather_coalesced([parameter])

        def arrive() -> None:
            pending.wait()
            del self._coming[parameter.ds_id]

        self._coming[parameter.ds_id] = _Gathering(arrive)
        return self._coming[parameter.ds_id]

    def release(self, parameter: Any) -> None:
        self._whole.discard(parameter.ds_id)
        if parameter.ds_status == ZeroParamStatus.AVAILABLE:
            parameter.partition()

    def end(self, way: object, used: Collection[int]) -> None:
        pass

    @contextlib.contextmanager
    def accepting(self, parameters: Sequence[Any]) -> Iterator[None]:
        empty = [(p, p.data) for p in parameters if p.shape != p.ds_shape]
        for parameter, _ in empty:
            parameter.data = self._elements[parameter.dtype].expand(parameter.ds_shape)
        try:
            yield
        finally:
            for parameter, data in empty:
                parameter.data = data

    @property
    def plans_the_call(self) -> bool:
        """Whether a call of the model is a planned one now."""
        planned = self._forward is not None and vars(self._module).get("forward") is self._forward
        return planned and self._module.training and torch.is_grad_enabled()

    # -- hooks ------------------------------------------------------------------------------------------------------

    def _find_hooks(self) -> None:
        offload = self._offload
        self._known_hooks = offload.forward_hooks
        gathering = map(_hook_of, (*offload.forward_hooks, offload.fwd_pre_hook))
        self._gathering.update((id(hook), hook) for hook in gathering if hook is not None)
        self._marking.update((id(hook), hook) for hook in map(_hook_of, offload.backward_hooks) if hook is not None)

    def let_hooks_rest(self) -> None:
        """Let DeepSpeed's hooks on the model itself, which run around planned forwards too, do nothing there."""
        self._forward = vars(self._module).get("forward")
        for table in (self._module._forward_pre_hooks, self._module._forward_hooks):
            for key, hook in list(table.items()):
                for own in (self._gathering, self._marking):
                    if id(hook) in own:
                        table[key] = resting = _RestingHook(hook, self)
                        own[id(resting)] = resting

    # -- speed ------------------------------------------------------------------------------------------------------

    def _measured_speed(self) -> memplan.GatherSpeed:
        """The speed from the best of three gathers each of the largest parameter and of the smallest."""
        self.begin(())
        if not self._passing:
            return memplan.GatherSpeed()
        bounds = [pick(self._passing, key=lambda p: (p.ds_numel, p.ds_id)) for pick in (min, max)]
        small_s, large_s = (min(self._gather_s(p) for _ in range(3)) for p in bounds)
        small_bytes, large_bytes = (p.ds_numel * p.element_size() for p in bounds)
        if large_bytes == small_bytes or large_s <= small_s:
            return memplan.GatherSpeed(large_bytes / large_s, 0.0)
        bytes_per_s = (large_bytes - small_bytes) / (large_s - small_s)
        return memplan.GatherSpeed(bytes_per_s, max(0.0, small_s - small_bytes / bytes_per_s))

    def _gather_s(self, parameter: Any) -> float:
        get_accelerator().synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            self.gather(parameter).wait()
        get_accelerator().synchronize()
        time_s = time.perf_counter() - start
        self.release(parameter)
        return time_s


def _part_elements(parameter: Any) -> int:
    """Elements of a parameter that this rank sends when it is gathered: of its part, or of a second copy (hpZ)."""
    return int(parameter.ds_tensor.ds_numel * parameter.ds_secondary_tensor_num_of_groups)


class _Gathering:
    """A gather that has begun. arrive: ends it."""

    def __init__(self, arrive: Callable[[], None]) -> None:
        self._arrive: Callable[[], None] | None = arrive

    def wait(self) -> None:
        arrive, self._arrive = self._arrive, None
        if arrive is not None:
            arrive()


def _hook_of(handle: Any) -> Any:
    """The hook that a handle would remove; None where it is gone."""
    return (handle.hooks_dict_ref() or {}).get(handle.id)


class _Passing(torch.autograd.Function):
    """Takes the place of the autograd functions that DeepSpeed puts around modules, and does nothing in backward."""

    @staticmethod
    def forward(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients


class _RestingHook:
    """A hook of DeepSpeed on the model itself, which does nothing in planned calls."""

    def __init__(self, hook: Callable[..., Any], shards: ZeroShards) -> None:
        self._hook: Callable[..., Any] = getattr(hook, "_hook", hook)  # which rests for a plan before this one
        self._shards = shards

    def __call__(self, *arguments: Any) -> Any:
        return None if self._shards.plans_the_call else self._hook(*arguments)


# -- what can't be planned --------------------------------------------------------------------------------------------


def _refuse(engine: Any) -> None:
    """Raise ValueError for an engine that does not train under ZeRO 3, or gathers in a way that no plan can follow."""
    if engine.zero_optimization_stage() != 3:
        raise ValueError(
            f"the engine is of ZeRO stage {engine.zero_optimization_stage()}; sharded plans are for stage 3"
        )
    if not hasattr(engine.optimizer, "parameter_offload"):
        raise ValueError(
            "the engine has no ZeRO-3 optimizer, and so nothing to train. Give deepspeed.initialize an optimizer"
        )
    if not engine.module.training:
        raise ValueError("the engine is in eval mode; call engine.train() first, for the plan is one of training")
    offload = engine.optimizer.parameter_offload
    leaves = [type(module).__name__ for module in get_z3_leaf_modules(engine.module)]
    parameters = list(engine.module.parameters())  # some belong to modules that were leaves before
    leaves += [type(p.ds_z3_leaf_module).__name__ for p in parameters if z3_leaf_parameter(p)]
    where = str(getattr(offload.offload_device, "value", offload.offload_device))
    mics_size = int(engine.config.get("zero_optimization", {}).get("mics_shard_size", -1))
    quantized = offload.zero_quantized_weights or offload.zero_quantized_nontrainable_weights
    sharded = all(hasattr(p, "ds_id") for p in parameters)
    reasons = {
        'DeepCompile: it compiles them in. Leave "compile": {"deepcompile": true} out': engine.is_deepcompile_enabled(),
        'parameters on NVMe, which DeepSpeed reads in its own order. Set offload_param to "device": "cpu", or drop '
        "it": where == "nvme",
        "quantized weights. Leave zero_quantized_weights and zero_quantized_nontrainable_weights out": quantized,
        "MiCS. Leave mics_shard_size out": mics_size > 0,
        "ZenFlow. Leave zenflow out": engine.optimizer.zenflow,
        "torch_autocast, under which DeepSpeed rounds a parameter or not, by what gathered it last. Use "
        '"bf16": {"enabled": true} instead': engine.torch_autocast_enabled(),
        f"leaf modules ({', '.join(dict.fromkeys(leaves))}), whose gradients are reduced by hooks on them. Leave "
        "set_z3_leaf_modules, and stage3_module_granularity_threshold, out": leaves,
        "parameters that DeepSpeed has not sharded. Add them before deepspeed.initialize": not sharded,
    }
    reason = next((reason for reason, found in reasons.items() if found), None)
    if reason is not None:
        raise ValueError(f"memplan can't plan the gathers of ZeRO-3 with {reason}")


def _look_at_budgets(budget: Any, group: Any) -> None:
    """Log which of the ranks' budgets is the lowest, which all use.

    Raises ValueError where they differ and are not in bytes, because it is not known then which one is the lowest.
    """
    budgets: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(budgets, budget, group)
    if all(other == budget for other in budgets):
        return
    if not all(isinstance(other, (int, str)) for other in budgets):
        raise ValueError(f"the ranks' budgets differ: {budgets}. Give each in bytes: the lowest is for all")
    limits = [memplan.parse_bytes(other) if isinstance(other, str) else other for other in budgets]
    lowest = limits.index(min(limits))
    if torch.distributed.get_rank(group) == 0:
        log.info(
            "ranks have other budgets, and under ZeRO 3 all run one plan, for they gather in one order: that "
            "for the lowest, %s of rank %d",
            memplan.format_bytes(limits[lowest]), torch.distributed.get_global_rank(group, lowest),
        )  # fmt: skip
