"""What gathering and reducing the parameters of a unit of `fully_shard` (FSDP2) takes, as ops of a trace.

The layout, the grouping and the arithmetic are those of `foreach_all_gather` and `foreach_reduce`
(torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py), so that results have their bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from memplan.errors import UnsupportedModel
from memplan.torch_private.distributed import part_here, spec_of, with_spec
from memplan.torch_private.tracing import outside_of_tracing

_OPS = torch.ops._c10d_functional


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
        """For each parameter, whether earlier steps have left a gradient. None where gradients are not reduced now."""
        held = tuple(p.unsharded_accumulated_grad is not None for p in self.group.fsdp_params)
        return held if self.group.reduce_grads else None

    def added(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients, each added to the memory of its sum where there is one."""
        found, way = list[torch.Tensor | None](), self.way or (True,) * len(gradients)
        for index, (gradient, adds) in enumerate(zip(gradients, way, strict=True)):
            if gradient is not None and adds:
                self._memory_of(index, gradient).add_(part_here(gradient))
            found.append(self._sum(index) if adds and self._memory[index] is not None else gradient)
        return found

    def _memory_of(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """The memory for gradients like this one. Raises UnsupportedModel where ranks split earlier ones otherwise."""
        part, memory = part_here(gradient), self._memory[index]
        placements = getattr(spec_of(gradient), "placements", None)
        if memory is None:
            dtype = self.group.fsdp_params[index].reduce_dtype or part.dtype
            with outside_of_tracing():
                memory = torch.empty(part.shape, dtype=dtype, device=part.device)
            memory.untyped_storage().resize_(0)
            self._memory[index], self._placements[index] = memory, placements
        if self._placements[index] != placements:
            raise UnsupportedModel(
                f"gradients of a {type(self.group.modules[0]).__name__} that add up over steps are split over ranks in "
                f"two ways, {self._placements[index]} and {placements}"
            )
        return memory

    def _sum(self, index: int) -> torch.Tensor:
        """A gradient as FSDP2 has it, in its memory."""
        parameter, memory, placements = self.group.fsdp_params[index], self._memory[index], self._placements[index]
        assert memory is not None
        if placements is None:
            return memory
        spec = parameter._get_unsharded_dtensor_spec(memory)
        return with_spec(memory, type(spec)(spec.mesh, placements, tensor_meta=spec.tensor_meta))

    def follow(self) -> bool:
        """Take over what backwards without a plan have left. False where no plan does as FSDP2 does now."""
        group = self.group
        if group.reduce_grads != group.all_reduce_grads or group._partial_reduce_output is not None:
            return False
        for index, parameter in enumerate(group.fsdp_params):
            whole = getattr(parameter, "_unsharded_param", None)
            left = parameter.unsharded_accumulated_grad
            left = whole.grad if left is None and whole is not None else left
            if left is None:
                continue
            memory = self._memory_of(index, left)
            if not part_here(left).is_set_to(memory):
                memory.untyped_storage().resize_(memory.nbytes)
                memory.copy_(part_here(left))
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
                    part = with_spec(part.to(part_here(sharded).device), sharded._spec)
                    sharded.grad = part if sharded.grad is None else sharded.grad.add_(part)
                    for hook in (sharded._post_accumulate_grad_hooks or {}).values():
                        hook(sharded)
        for memory in self._memory:
            if memory is not None:
                memory.untyped_storage().resize_(0)


def scales_exactly(group: Any) -> bool:
    """Whether ops divide gradients as a group does. They can't where NCCL multiplies by something as it reduces."""
    divisor, ranks = group.gradient_divide_factor, getattr(group.mesh_info, "shard_mesh_size", 1)
    return divisor in (None, 1) or (ranks > 1 and (divisor == ranks or group.force_sum_reduction_for_comms))


def whole_parameters(sums: WholeGradients) -> tuple[_UnitTraffic, tuple[torch.Tensor, ...]]:
    """The whole parameters of a group, for all of its runs in a trace."""
    infos, traffic = [p._module_info for p in sums.group.fsdp_params], _UnitTraffic(sums)
    sharded = [info.module._parameters[info.param_name] for info in infos]
    return traffic, _Gather.apply(traffic, *sharded)  # type: ignore[no-untyped-call]


class _UnitTraffic:
    """What gathering and reducing a group of parameters takes, as `foreach_all_gather` and `foreach_reduce` do it.

    reduces_early: in backward, a run of the unit is over before its first run is, and FSDP2 reduces then what earlier
    steps have left. The gradients of this step, which autograd adds up over all runs, are reduced later.
    """

    def __init__(self, sums: WholeGradients) -> None:
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
        from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

        group, self._sums, self.reduces_early = sums.group, sums, False
        self.parameters, self.device = group.fsdp_params, group.device
        self.requires_grad = [p.sharded_param.requires_grad for p in group.fsdp_params]
        self._group: Any = group._all_gather_process_group if isinstance(group.mesh_info, FSDPMeshInfo) else None
        self._replicas = group._all_reduce_process_group if isinstance(group.mesh_info, DDPMeshInfo) else None
        self._ranks: int = self._group.size() if self._group is not None else 1
        self._orig_dtype, self._reduce_dtype = group._orig_dtype, group._reduce_dtype
        self._factors, self._divisor = collectives._get_gradient_divide_factors, group.gradient_divide_factor
        self._sums_alone: bool = group.force_sum_reduction_for_comms or self._divisor == 1  # which NCCL multiplies by

    def wholes(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The whole parameters, from this rank's part of each."""
        flat = [self._padded(p, part) for p, part in zip(self.parameters, parts, strict=True)]
        dtypes = [t.dtype for t in flat]
        if len(set(dtypes)) > 1:  # they are sent as bytes
            flat = [t.view(torch.uint8) for t in flat]
        counts = [t.numel() for t in flat]
        gathered = torch.cat(flat) if len(flat) > 1 or self._ranks == 1 else flat[0]
        if self._group is not None and self._ranks > 1:
            gathered = _OPS.wait_tensor(_OPS.all_gather_into_tensor(gathered, self._ranks, self._group.group_name))
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
        if parameter._unsharded_dtensor_spec is None:
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
        groups, divided = (self._group, self._replicas), (self._divisor, self._sums_alone)
        pre, post, scatter, reduce = self._factors(*groups, dtype, self.device.type, *divided)
        flat = torch._chunk_cat(grads, 0, ranks).view(-1)
        counts = [-(-grad.shape[0] // ranks) * (grad.numel() // grad.shape[0]) for grad in grads]
        if flat.dtype != dtype:
            flat = flat.to(dtype)
        if pre is not None and pre != 1:
            flat = flat / pre
        if ranks > 1:
            flat = _OPS.wait_tensor(_OPS.reduce_scatter_tensor(flat, _name(scatter), ranks, self._group.group_name))
        if self._replicas is not None:
            flat = _OPS.wait_tensor(_OPS.all_reduce(flat, _name(reduce), self._replicas.group_name))
        if post is not None and post != 1:
            flat = flat / post
        if self._orig_dtype is not None and flat.dtype != self._orig_dtype:
            flat = flat.to(self._orig_dtype)
        pieces = iter(flat.split(counts))
        return [
            None if gradient is None else next(pieces)[: p.sharded_size.numel()].view(p.sharded_size)
            for gradient, p in zip(gradients, self.parameters, strict=True)
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
