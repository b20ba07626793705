"""Units of `fully_shard` (FSDP2) in a trace: what their hooks do to parameters and gradients, as ops.

A unit's parameters are gathered together before its forward, each from this rank's part of it. Its gradients are
reduced together once the last of them is there, and each rank keeps its part. Here both are ops on tensors that a trace
records, with the layout, the grouping and the arithmetic of `foreach_all_gather` and `foreach_reduce`
(torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py), so that results have their bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from memplan.errors import UnsupportedModel
from memplan.torch_private.dtensors import part_here, spec_of, with_spec

_OPS = torch.ops._c10d_functional


def units_of(model: nn.Module) -> list[FsdpUnit]:
    """The units of a model, each once."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    found: dict[int, FsdpUnit] = {}
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return []
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            state = module._get_fsdp_state()
            if id(state) not in found:
                for group in state._fsdp_param_groups:
                    group.lazy_init()  # of dtypes and padding; which unit is the root its first forward tells
                found[id(state)] = FsdpUnit(state)
    return list(found.values())


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
        self._gathered: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()  # by trace
        self._sharded: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._tables: list[tuple[Any, int, Any]] = []
        self._of_model: list[Any] = []  # hooks on the model itself: before forward, and after it
        self._within: tuple[Any, Any] | None = None  # others on the model, in the last trace

    @property
    def is_root(self) -> bool:
        """Whether no unit is around this one."""
        return self._state._is_root is not False

    # -- what a plan can't do ---------------------------------------------------------------------------------------

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
            if group.gradient_divide_factor is not None or group.force_sum_reduction_for_comms:
                return "a divisor of gradients of its own (set_gradient_divide_factor)"
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
    def on_host(self) -> dict[nn.Parameter, bool]:
        """Parameters whose parts CPUOffloadPolicy has on the host, and whether all ranks have equally large parts."""
        kept = [p for group in self._state._fsdp_param_groups for p in group.fsdp_params if p.offload_to_cpu]
        ranks = (getattr(p.mesh_info, "shard_mesh_size", 1) for p in kept)
        pairs = zip(kept, ranks, strict=True)
        return {p.sharded_param: p.padded_sharded_param_size.numel() * n == p._orig_size.numel() for p, n in pairs}

    @property
    def device(self) -> torch.device:
        """The device that its parameters are gathered on."""
        return self._state._device  # type: ignore[no-any-return]

    @property
    def way(self) -> tuple[Any, ...]:
        """What backward does with whole gradients: for each group what `WholeGradients.way` is."""
        return tuple(sums.way for sums in self._sums)

    def follows(self) -> bool:
        """Whether a plan can do what the unit does with whole gradients now. Those that are there are ready for one."""
        return min((sums.follow() for sums in self._sums), default=True)

    def begin(self, used: Collection[int]) -> None:
        """Have memory for those whole gradients that a step adds to. used: ids of constants that it uses."""
        for sums in self._sums:
            sums.begin(used)

    def end(self, way: tuple[Any, ...], used: Collection[int]) -> None:
        """Note that a planned backward is over. way: of it. used: ids of constants that it has used."""
        for sums, each in zip(self._sums, way, strict=True):
            sums.end(each, used)

    def shard(self) -> None:
        """Free what calls without a plan have left gathered."""
        for group in self._state._fsdp_param_groups:
            group.wait_for_unshard()
            if not group.is_sharded:
                group._to_sharded()

    # -- hooks ------------------------------------------------------------------------------------------------------

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
                            table[key] = _UnitHook(self, _nothing, _nothing)

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

    # -- in a trace -------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        args, kwargs = self._state._cast_forward_inputs(args, kwargs)
        if not self._left:
            self._left = set(self.modules)
            trace, groups = get_proxy_mode(), self._state._fsdp_param_groups
            known = None if trace is None else self._gathered.get(trace)
            gathered = known or [_gathered(sums) for sums in self._sums]
            if trace is not None:
                self._gathered[trace] = gathered
            before = args, kwargs
            for group, (traffic, wholes) in zip(groups, gathered, strict=True):
                self._exchange(group, wholes)
                args, kwargs = type(group)._register_post_backward_hook(_NoReduction(), args, kwargs)
                traffic.reduces_early |= known is not None and (before[0] is not args or before[1] is not kwargs)
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

    def _exchange(self, group: Any, wholes: Sequence[torch.Tensor]) -> None:
        """Put whole parameters in the place of a group's parts."""
        for parameter, whole in zip(group.fsdp_params, wholes, strict=True):
            info = parameter._module_info
            places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
            for module, name in places:
                self._sharded.append((module._parameters, name, module._parameters[name], whole))
                module._parameters[name] = whole


class WholeGradients:
    """Gradients of a group's whole parameters that steps have left, and a later one reduces with its own.

    They are where FSDP2 has them, as `unsharded_accumulated_grad`, each from its first backward to the reduction. Plans
    have the memory of each as a constant. It begins with -0.0 everywhere, because x + -0.0 has the bits of any x, so
    that the first step does what later ones do.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self._memory: list[torch.Tensor | None] = [None] * len(group.fsdp_params)
        self._placements: list[Any] = [None] * len(group.fsdp_params)  # of those that are DTensors

    @property
    def way(self) -> tuple[bool, ...] | None:
        """None where gradients are not reduced now; else of which parameters earlier steps have left one."""
        held = tuple(p.unsharded_accumulated_grad is not None for p in self.group.fsdp_params)
        return held if self.group.reduce_grads else None

    def added(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients, each added to the memory of its sum where there is one."""
        found, way = list[torch.Tensor | None](), self.way or (True,) * len(gradients)
        for index, (gradient, adds) in enumerate(zip(gradients, way, strict=True)):
            memory = self._memory[index]
            if memory is None or not adds:
                found.append(gradient)
                continue
            if gradient is not None:
                memory.add_(part_here(gradient))
                self._note_layout(index, gradient)
            found.append(self._sum(index))
        return found

    def _note_layout(self, index: int, gradient: torch.Tensor) -> None:
        """Note how ranks split a gradient. Raises UnsupportedModel where they split earlier ones otherwise."""
        known, placements = self._placements[index], getattr(spec_of(gradient), "placements", None)
        if known is not None and known != placements:
            raise UnsupportedModel(
                f"gradients of a {type(self.group.modules[0]).__name__} that add up over steps are split over ranks in "
                f"two ways, {known} and {placements}"
            )
        self._placements[index] = placements

    def _sum(self, index: int) -> torch.Tensor:
        """A gradient as FSDP2 has it, in its memory."""
        parameter, memory, placements = self.group.fsdp_params[index], self._memory[index], self._placements[index]
        assert memory is not None
        if placements is None:
            return memory
        spec = parameter._get_unsharded_dtensor_spec(memory)
        return with_spec(memory, dataclasses.replace(spec, placements=placements))

    def follow(self) -> bool:
        """Take over what backwards without a plan have left. False where no plan does as FSDP2 does now."""
        group = self.group
        if group.reduce_grads != group.all_reduce_grads or group._partial_reduce_output is not None:
            return False
        for index, parameter in enumerate(group.fsdp_params):
            whole, memory = getattr(parameter, "_unsharded_param", None), self._memory[index]
            left = parameter.unsharded_accumulated_grad
            left = whole.grad if left is None and whole is not None else left
            if not parameter.sharded_param.requires_grad or (left is None and group.reduce_grads):
                continue
            if memory is None:
                dtype = parameter.reduce_dtype or parameter.param_dtype or parameter.orig_dtype
                memory = torch.empty(parameter._orig_size, dtype=dtype, device=group.device)
                memory.untyped_storage().resize_(0)
                self._memory[index] = memory
            if left is not None and not part_here(left).is_set_to(memory):
                memory.untyped_storage().resize_(memory.nbytes)
                memory.copy_(part_here(left))
                self._note_layout(index, left)
                parameter.unsharded_accumulated_grad = self._sum(index)
                if whole is not None:
                    whole.grad = None
        return True

    def begin(self, used: Collection[int]) -> None:
        for memory in self._memory:
            if memory is not None and id(memory) in used and not memory.untyped_storage().nbytes():
                memory.untyped_storage().resize_(memory.nbytes)
                memory.fill_(-0.0)

    def end(self, way: tuple[bool, ...] | None, used: Collection[int]) -> None:
        """Note that a backward is over. Gradients that it has not reached are reduced now, as FSDP2 does it."""
        parameters = self.group.fsdp_params
        for index, (parameter, memory) in enumerate(zip(parameters, self._memory, strict=True)):
            if id(memory) in used:
                parameter.unsharded_accumulated_grad = self._sum(index) if way is None else None
        if way is None:
            return
        if any(p.unsharded_accumulated_grad is not None for p in parameters):
            parts = _UnitTraffic(self).parts([None] * len(parameters))
            for parameter, part in zip(parameters, parts, strict=True):
                if part is not None:
                    parameter.unsharded_accumulated_grad, sharded = None, parameter.sharded_param
                    part = with_spec(part, sharded._spec)
                    sharded.grad = part if sharded.grad is None else sharded.grad.add_(part)
        for memory in self._memory:
            if memory is not None:
                memory.untyped_storage().resize_(0)


def _gathered(sums: WholeGradients) -> tuple[_UnitTraffic, tuple[torch.Tensor, ...]]:
    """The whole parameters of a group, for all of its runs in a trace."""
    infos, traffic = [p._module_info for p in sums.group.fsdp_params], _UnitTraffic(sums)
    sharded = [info.module._parameters[info.param_name] for info in infos]
    return traffic, _Gather.apply(traffic, *sharded)  # type: ignore[no-untyped-call]


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


def _nothing(*arguments: Any) -> None:
    """What a hook on a planned model does, whose forward does what the hook did."""


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


class _UnitTraffic:
    """What gathering and reducing a group of parameters takes, as `foreach_all_gather` and `foreach_reduce` do it.

    reduces_early: in backward, a run of the unit is over before its first run is, and FSDP2 reduces then what earlier
    steps have left. The gradients of this step, which autograd adds up over all runs, follow by themselves.
    """

    def __init__(self, sums: WholeGradients) -> None:
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
        from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

        group, self._sums, self.reduces_early = sums.group, sums, False
        self.parameters, self.device = group.fsdp_params, group.device
        self.requires_grad = [p.sharded_param.requires_grad for p in group.fsdp_params]
        sharded = isinstance(group.mesh_info, FSDPMeshInfo)
        self._group: Any = group._all_gather_process_group if sharded else None
        self._replicas = group._all_reduce_process_group if isinstance(group.mesh_info, DDPMeshInfo) else None
        self._ranks: int = self._group.size() if self._group is not None else 1
        self._orig_dtype, self._reduce_dtype = group._orig_dtype, group._reduce_dtype
        self._factors = collectives._get_gradient_divide_factors

    def wholes(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The whole parameters, from this rank's part of each."""
        flat = [self._padded(p, part) for p, part in zip(self.parameters, parts, strict=True)]
        dtypes = [t.dtype for t in flat]
        if len(set(dtypes)) > 1:  # they are sent as bytes
            flat = [t.view(torch.uint8) for t in flat]
        counts = [t.numel() for t in flat]
        gathered = torch.cat(flat) if len(flat) > 1 or self._ranks == 1 else flat[0]
        if self._group is not None and self._ranks > 1:
            begun = _OPS.all_gather_into_tensor(gathered, self._ranks, self._group.group_name)
            gathered = _OPS.wait_tensor(begun)
        columns = gathered.view(self._ranks, -1).split(counts, dim=1)
        if len(set(dtypes)) > 1:
            columns = tuple(c.contiguous().view(dtype) for c, dtype in zip(columns, dtypes, strict=True))
        return [self._whole(p, column) for p, column in zip(self.parameters, columns, strict=True)]

    def _padded(self, parameter: Any, part: torch.Tensor) -> torch.Tensor:
        """This rank's part in one dimension and the dtype in which it is sent, as large as the first rank's.

        The memory of a part is that large on each rank, so that all of them have equal ops.
        """
        flat = part.as_strided((parameter.padded_sharded_param_size.numel(),), (1,))
        return flat if parameter.param_dtype is None else flat.to(parameter.param_dtype)

    def _whole(self, parameter: Any, column: torch.Tensor) -> torch.Tensor:
        dim, size = parameter.fsdp_placement.dim, parameter._orig_size
        if dim:
            chunks = column.reshape(self._ranks, *parameter.padded_sharded_param_size).unbind()
            whole = torch.cat(chunks, dim=dim)
        else:
            whole = column.reshape(-1)[: size.numel()].view(size)
        spec = parameter._unsharded_dtensor_spec
        if spec is None:
            return whole
        whole.requires_grad_(False)
        return with_spec(whole, parameter._get_unsharded_dtensor_spec(whole))

    def parts(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """This rank's part of each gradient, reduced over the ranks; None where there is none, or all add up first."""
        if self._sums.way is not None and self.reduces_early:
            pairs = zip(*map(self._reduced, (self._sums.added([None] * len(gradients)), gradients)), strict=True)
            return [old if new is None else new if old is None else old.add_(new) for old, new in pairs]
        whole = self._sums.added(gradients)
        return [None] * len(whole) if self._sums.way is None else self._reduced(whole)

    def _reduced(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        pairs = zip(self.parameters, gradients, strict=True)
        there = [(p, p._get_grad_inner_tensor(g)) for p, g in pairs if g is not None]
        if not there:
            return [None] * len(gradients)
        ranks, grads = self._ranks, []
        for parameter, grad in there:
            dim = parameter.fsdp_placement.dim
            grads.append(torch.cat(torch.chunk(grad, ranks, dim=dim), dim=0) if dim and ranks > 1 else grad)
        dtype = self._reduce_dtype or grads[0].dtype
        pre, post, scatter, reduce = self._factors(self._group, self._replicas, dtype, self.device.type)
        flat = torch._chunk_cat(grads, 0, ranks).view(-1)
        counts = [-(-grad.shape[0] // ranks) * (grad.numel() // grad.shape[0]) for grad in grads]
        if flat.dtype != dtype:
            flat = flat.to(dtype)
        if pre is not None and pre != 1:
            flat = flat / pre
        if ranks > 1:
            begun = _OPS.reduce_scatter_tensor(flat, _name(scatter), ranks, self._group.group_name)
            flat = _OPS.wait_tensor(begun)
        if self._replicas is not None:
            flat = _OPS.wait_tensor(_OPS.all_reduce(flat, _name(reduce), self._replicas.group_name))
        if post is not None and post != 1:
            flat = flat / post
        if self._orig_dtype is not None and flat.dtype != self._orig_dtype:
            flat = flat.to(self._orig_dtype)
        pieces = iter(flat.split(counts))
        sizes = [p.sharded_size for p in self.parameters]
        return [
            None if gradient is None else next(pieces)[: size.numel()].view(size)
            for gradient, size in zip(gradients, sizes, strict=True)
        ]


def _name(op: Any) -> str:
    """The name of a reduction, as functional collectives take it."""
    return str(op).rpartition(".")[2].lower()


class _Gather(torch.autograd.Function):
    """The parameters of a unit, gathered; their gradients, reduced."""

    @staticmethod
    def forward(ctx: Any, gathered: _UnitTraffic, *sharded: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gathered, ctx.specs = gathered, [getattr(t, "_spec", None) for t in sharded]
        wholes = gathered.wholes([part_here(t) for t in sharded])
        wanted = zip(wholes, gathered.requires_grad, strict=True)
        ctx.mark_non_differentiable(*(t for t, requires_grad in wanted if not requires_grad))
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        parts = ctx.gathered.parts(gradients)
        return (None, *(None if t is None else with_spec(t, s) for t, s in zip(parts, ctx.specs, strict=True)))
