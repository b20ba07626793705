"""Units of `fully_shard` (FSDP2) in a trace: what their hooks do to parameters and gradients, as ops.

A unit's parameters are gathered together before its forward, each from this rank's part of it. Its gradients are
reduced together once the last of them is there, and each rank keeps its part. Here both are ops on tensors that a trace
records, with the layout, the grouping and the arithmetic of `foreach_all_gather` and `foreach_reduce`
(torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py), so that results have their bits.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from memplan.errors import UnsupportedModel
from memplan.torch_private.fsdp_traffic import WholeGradients, scales_exactly, whole_parameters


def units_of(model: nn.Module) -> list[FsdpUnit]:
    """The units of a model, each once."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return []
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    states = list({id(state): state for state in states}.values())
    for group in (group for state in states for group in state._fsdp_param_groups):
        group.lazy_init()  # of dtypes and padding; which unit is the root its first forward tells
    return [FsdpUnit(state) for state in states]


class FsdpUnit:
    """One unit, and hooks in the place of its own.

    - tracing: forward is traced, so that gathers are ops of the trace.
    - modules: those that it was made of.
    """

    def __init__(self, state: Any) -> None:
        self._state, self.tracing = state, False
        self.modules: tuple[nn.Module, ...] = tuple(state._modules)
        self._sums = [WholeGradients(group) for group in state._fsdp_param_groups]
        self._left: set[nn.Module] = set()  # of a pass that is being traced
        self._gathered: weakref.WeakKeyDictionary[Any, dict[bool, Any]] = weakref.WeakKeyDictionary()  # by trace
        self._sharded: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._tables: list[tuple[Any, int, Any]] = []
        self._of_model: list[Any] = []  # hooks on the model itself: before forward, and after it
        self._within: tuple[Any, Any] | None = None  # others on the model, in the last trace

    @property
    def is_root(self) -> bool:
        """Whether no unit is around this one."""
        return self._state._is_root is not False

    def problem(self) -> str | None:
        """What keeps this unit from being part of a plan, in words; None where nothing does."""
        for group in self._state._fsdp_param_groups:
            communication = [getattr(group, name, None) for name in ("_all_gather_comm", "_reduce_scatter_comm")]
            if any(c is not None and not type(c).__module__.endswith("_fsdp_collectives") for c in communication):
                return "collectives of its own (set_custom_all_gather, set_custom_reduce_scatter)"
            if any(p.sharded_param._backward_hooks for p in group.fsdp_params):
                return "hooks on sharded parameters, which FSDP2 does not call"
            if any(hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in group.fsdp_params):
                return "parameters that have a say in how they are gathered (fsdp_pre_all_gather)"
            if not scales_exactly(group):
                return (
                    "a divisor of gradients that NCCL applies as it reduces (set_gradient_divide_factor); "
                    "set_force_sum_reduction_for_comms(True) has it applied afterwards"
                )
            if group._all_reduce_hook is not None or group.reduce_scatter_unused_params:
                return "a hook or a rule of its own for reducing gradients"
        return None

    def refuse_new_hooks(self, model: nn.Module) -> None:
        """Raise UnsupportedModel for hooks on the model that came after a trace, within what the unit casts."""
        if model in self.modules and self._within not in (None, self._hooks_within(model)):
            for hook, dtype in zip(self._hooks_within(model), self._casts, strict=True):
                self._refuse_hook(model, hook, dtype)

    def _hooks_within(self, model: nn.Module) -> tuple[Any, Any]:
        """The last hook before the model's forward, and the first one after it."""
        return next(reversed(model._forward_pre_hooks.values())), next(iter(model._forward_hooks.values()))

    @property
    def _casts(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """The dtypes that the unit casts arguments and results to; None where it does not."""
        policy = self._state._mp_policy
        return policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype

    def _refuse_hook(self, model: nn.Module, hook: Any, dtype: torch.dtype | None) -> None:
        """Raise UnsupportedModel for a hook of the user's that sees values between a cast to a dtype and forward."""
        if dtype is not None and not self._is_of_unit(hook) and not is_hook_of_unit(hook):
            raise UnsupportedModel(
                f"a hook on the {type(model).__name__} runs where fully_shard has cast to {dtype}, or is about to. A "
                "plan casts inside of forward: put into forward what the hook does, or leave that dtype out of the "
                "policy"
            )

    @property
    def parts(self) -> dict[nn.Parameter, tuple[bool, bool]]:
        """Of each parameter: whether CPUOffloadPolicy has its part on the host, and whether all ranks' are as large."""
        fsdp, found = torch.distributed.fsdp, dict[nn.Parameter, tuple[bool, bool]]()
        for group in self._state._fsdp_param_groups:
            by_policy = isinstance(group.offload_policy, fsdp.CPUOffloadPolicy)
            for p in group.fsdp_params:
                elements = p.padded_sharded_param_size.numel() * getattr(p.mesh_info, "shard_mesh_size", 1)
                found[p.sharded_param] = by_policy, elements == p._orig_size.numel()
        return found

    def settle(self, host: Collection[nn.Parameter]) -> None:
        """Move parts with gradients, these parameters' to the host, others without CPUOffloadPolicy to the device."""
        by_policy = {parameter for parameter, (by_policy, _) in self.parts.items() if by_policy}
        for p in (p for group in self._state._fsdp_param_groups for p in group.fsdp_params):
            parameter = p.sharded_param
            if parameter in by_policy or (parameter in host) == p.offload_to_cpu:
                continue
            p.offload_to_cpu = not p.offload_to_cpu
            if self.device.type != "cpu":
                p.pin_memory = p.offload_to_cpu
                part, gradient = parameter._local_tensor.to("cpu" if p.pin_memory else self.device), parameter.grad
                part = part.pin_memory() if p.pin_memory else part
                parameter.data = p.to_sharded_dtensor(part)
                parameter._local_tensor, p._sharded_param_data = part, part.view(-1)
                if gradient is not None:
                    parameter.grad = p.to_sharded_dtensor(gradient._local_tensor.to(part.device))

    @property
    def device(self) -> torch.device:
        """The device that its parameters are gathered on."""
        return self._state._device  # type: ignore[no-any-return]

    @property
    def way(self) -> tuple[Any, ...]:
        """What backward does with whole gradients: `WholeGradients.way` of each group, and by what it divides."""
        groups = self._state._fsdp_param_groups
        divided = [(g.gradient_divide_factor, g.force_sum_reduction_for_comms) for g in groups]
        return tuple((sums.way, *by) for sums, by in zip(self._sums, divided, strict=True))

    def follows(self) -> bool:
        """Whether a plan can do what the unit does with whole gradients now. Those that are there are ready for one."""
        followed = [sums.follow() for sums in self._sums]
        return all(followed)

    def begin(self, used: Collection[int]) -> None:
        """Have memory for those whole gradients that a step adds to. used: ids of constants that it uses."""
        for sums in self._sums:
            sums.begin(used)

    def end(self, way: tuple[Any, ...], used: Collection[int]) -> None:
        """Note that a planned backward is over. way: of it. used: ids of constants that it has used."""
        for sums, (each, *_) in zip(self._sums, way, strict=True):
            sums.end(each, used)

    def shard(self) -> None:
        """Free what calls without a plan have left gathered."""
        for group in self._state._fsdp_param_groups:
            group.wait_for_unshard()
            if not group.is_sharded:
                group._to_sharded()

    def take_over(self, model: nn.Module) -> None:
        """Put hooks in the place of the unit's own, which are called where nothing is traced.

        Those on the model itself, whose forward is to be planned, do nothing: `around` calls what they stand for.
        """
        for module in self.modules:
            for table, own in ((module._forward_pre_hooks, self._enter), (module._forward_hooks, self._leave)):
                for key, hook in list(table.items()):
                    if self._is_of_unit(hook):
                        self._tables.append((table, key, hook))
                        table[key] = _UnitHook(self, hook, own)
                        if module is model:
                            self._of_model.append(table[key])
                            table[key] = _UnitHook(self, lambda *_: None, lambda *_: None)

    def give_back(self) -> None:
        """Put the unit's own hooks back, each to its place among the others."""
        for table, key, hook in self._tables:
            if key in table:
                table[key] = hook
        self._tables.clear()
        self._of_model.clear()

    def around(
        self, model: nn.Module, others: Sequence[FsdpUnit], forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """What forward gives, with what the unit's hooks on the model itself do before and after it.

        others: all units of the model. A trace of those of several modules, not all of which have run, ends here.
        """
        enter, leave = self._of_model
        (before, after), (argument_dtype, result_dtype) = self._hooks_within(model), self._casts
        if _has_others((args, kwargs), argument_dtype):
            self._refuse_hook(model, before, argument_dtype)
        args, kwargs = enter(model, args, kwargs)
        output = forward(*args, **kwargs)
        for unit in reversed(others):
            if unit.tracing and unit is not self and unit._left:
                unit.let_go()
                output = unit._state._cast_output_dtype(output)
        if _has_others(output, result_dtype):
            self._refuse_hook(model, after, result_dtype)
        if self.tracing:
            self._within = before, after
        return leave(model, args, output)

    def _is_of_unit(self, hook: Any) -> bool:
        while getattr(hook, "__self__", None) is not self._state:
            if not hasattr(hook, "__wrapped__"):
                return False
            hook = hook.__wrapped__
        return True

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        args, kwargs = self._state._cast_forward_inputs(args, kwargs)
        if not self._left:
            self._left = set(self.modules)
            trace, differentiates = get_proxy_mode(), torch.is_grad_enabled()
            gathered = {} if trace is None else self._gathered.setdefault(trace, {})
            is_first = differentiates not in gathered
            if is_first:
                gathered[differentiates] = [whole_parameters(sums) for sums in self._sums]
            before = args, kwargs
            for sums, (traffic, wholes) in zip(self._sums, gathered[differentiates], strict=True):
                for parameter, whole in zip(sums.group.fsdp_params, wholes, strict=True):
                    info = parameter._module_info
                    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
                    for home, name in ((info.module, info.param_name), *shared):
                        self._sharded.append((home._parameters, name, home._parameters[name], whole))
                        home._parameters[name] = whole
                args, kwargs = type(sums.group)._register_post_backward_hook(_NoReduction(), args, kwargs)
                traffic.reduces_early |= not is_first and (before[0] is not args or before[1] is not kwargs)
        return args, kwargs

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._left.discard(module)
        if not self._left:
            self.let_go()
        return self._state._cast_output_dtype(output)

    def let_go(self) -> None:
        """Put the sharded parameters back, which a pass that is over, or has failed, has exchanged."""
        for table, key, sharded, whole in self._sharded:
            if table.get(key) is whole:  # else the trace, which has failed, has put back what was there before it
                table[key] = sharded
        self._sharded.clear()
        self._left = set()


class _NoReduction:
    """Takes a group's place in the nodes that its hooks put before a unit, and does nothing in backward.

    The nodes have to stay, because autograd adds up gradients in another order without them.
    """

    def post_backward(self) -> None:
        pass


def _has_others(values: Any, dtype: torch.dtype | None) -> bool:
    """Whether a cast to a dtype changes any of these values."""
    from torch.distributed.utils import _apply_to_tensors

    found: list[torch.Tensor] = []
    _apply_to_tensors(lambda t: found.append(t) or t, values)  # type: ignore[func-returns-value]
    return any(t.is_floating_point() and t.dtype != dtype for t in found)


class _UnitHook:
    """A hook in the place of one of a unit's own."""

    def __init__(self, unit: FsdpUnit, hook: Any, traced: Any) -> None:
        self._unit, self._hook, self._traced = unit, hook, traced

    def __call__(self, *arguments: Any) -> Any:
        return (self._traced if self._unit.tracing else self._hook)(*arguments)


def is_hook_of_unit(hook: Any) -> bool:
    """Whether a hook stands in the place of one of a unit's own."""
    return isinstance(hook, _UnitHook)


@contextlib.contextmanager
def tracing_units(units: Sequence[FsdpUnit]) -> Iterator[None]:
    """A context in which these units gather by ops that a trace records."""
    before = [unit.tracing for unit in units]
    for unit in units:
        unit.tracing = True
    try:
        yield
    finally:
        for unit, was in zip(units, before, strict=True):
            unit.let_go()
            unit.tracing = was
