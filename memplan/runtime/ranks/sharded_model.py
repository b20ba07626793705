"""Models with DTensors as parameters: each rank has a part of them, and what brings the parts together is an op.

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    memplan.apply(model, batch, "8GiB")

A trace sees below DTensors: a parameter is this rank's part, `redistribute` and what `parallelize_module` puts around
modules are collectives. The hooks of units of `fully_shard` make way for ops that gather parameters and reduce
gradients (`torch_private/fsdp.py`). A plan keeps what was gathered, or gathers it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.ops.layout import storage_key
from memplan.capture.shards import Handle, NetworkSpeed, Shard
from memplan.errors import UnsupportedModel
from memplan.problem.data import GatherSpeed

_PARTIAL = "reductions over some of the ranks (set_requires_all_reduce), or in the step after them"


class ShardedModel:
    """The `Shards` of a model with DTensors as parameters. Its plans gather parameters by ops of the graph alone."""

    takes_gradients = False
    attributes: tuple[str, ...] = ()
    speed = GatherSpeed()  # that there is one says that parameters are sharded; ops of the graph gather them

    def __init__(self, model: nn.Module, units: Sequence[private.FsdpUnit]) -> None:
        self._model = model
        self._specs = [spec for p in model.parameters() if (spec := private.spec_of(p)) is not None]
        self._units = units
        self._taken_over, self.network = False, NetworkSpeed()  # as measured, for later plans too
        self._own: Callable[..., Any] | None = None  # a forward of the model's own that its class does not have
        if any(model in unit.modules and not unit.is_root for unit in self._units):
            raise UnsupportedModel(
                f"the {type(model).__name__} is a unit within a model that went through fully_shard, which gathers "
                "parameters around it. Plan the whole model: memplan.apply(model, sample, budget)"
            )

    def _problem(self) -> str | None:
        """How a unit gathers or reduces unlike plans, in words; None where all do as plans do."""
        return next((problem for unit in self._units if (problem := unit.problem()) is not None), None)

    @staticmethod
    def of(model: nn.Module) -> ShardedModel | None:
        """The shards of a model; None where no parameter is a DTensor."""
        units = private.units_of(model)
        for unit in units:
            unit.shard()  # calls without a plan may have left them gathered
        return ShardedModel(model, units) if any(map(private.is_sharded, model.parameters())) else None

    def group(self) -> torch.distributed.ProcessGroup:
        """The ranks that have parts of parameters. Raises ValueError where it takes group= to say so."""
        ranks = sorted({rank for spec in self._specs for rank in private.ranks_of(spec)})
        if ranks == list(range(torch.distributed.get_world_size())):
            return torch.distributed.group.WORLD  # type: ignore[return-value]
        for spec in self._specs:
            if spec.mesh.ndim == 1 and sorted(private.ranks_of(spec)) == ranks:
                return spec.mesh.get_group()  # type: ignore[no-any-return]
        raise ValueError(f"parameters are sharded over ranks {ranks}; pass their process group as group=")

    def take_over(self, aside: contextlib.ExitStack) -> None:
        """Set the hooks of units aside until the stack closes, so that planned calls run none of them.

        Those on the model itself become part of its forward, which a plan takes the place of.
        """
        if (problem := self._problem()) is not None:
            raise UnsupportedModel(f"a unit of fully_shard has {problem}; a plan would not gather and reduce so")
        if self._taken_over:
            return
        for unit in self._units:
            unit.take_over(self._model)
            if self._model in unit.modules:
                self._own = vars(self._model).get("forward")
                self._model.forward = _WithinUnit(unit, self._units, self._model, self._model.forward)
        self._taken_over = True
        aside.callback(self.give_back)

    def give_back(self) -> None:
        for unit in self._units:
            unit.give_back()
        if isinstance(vars(self._model).get("forward"), _WithinUnit):
            del self._model.forward
            if self._own is not None:
                self._model.forward = self._own
        self._taken_over = False

    def unplanned_because(self) -> str | None:
        """What the ranks do just now that no plan follows, in words; None for nothing."""
        if (problem := self._problem()) is not None:
            return f"a unit of fully_shard with {problem}"
        for unit in self._units:
            unit.refuse_new_hooks(self._model)
        self._shard()  # keys of steps look at parameters that are sharded
        return None if self._follows() else _PARTIAL

    def _follows(self) -> bool:
        """Whether plans can do what all units do with gradients now."""
        followed = [unit.follows() for unit in self._units]
        return all(followed)

    def _shard(self) -> None:
        for unit in self._units:
            unit.shard()

    @property
    def on_host(self) -> frozenset[str]:
        """Names of parameters whose parts CPUOffloadPolicy has on the host.

        Raises UnsupportedModel for one whose parts differ in size: a gather reads padding, which no plan fetches.
        """
        named = {name: even for name, (by_policy, even) in self._parts().items() if by_policy}
        uneven = sorted(name for name, even in named.items() if not even)
        if uneven:
            raise UnsupportedModel(
                f"CPUOffloadPolicy has {uneven[0]} on the host, which is not split evenly over ranks. Leave the policy "
                "out for its unit"
            )
        return frozenset(named)

    @property
    def movable(self) -> frozenset[str]:
        """Names of parameters whose parts a plan may have on the host.

        There are none where ranks can't reduce tensors on the CPU: `clip_grad_norm_` does so with norms of gradients.
        """
        groups = {group for spec in self._specs for group in spec.mesh.get_all_groups()}
        parts = self._parts().items() if all(map(private.reduces_on_cpu, groups)) else ()
        return frozenset(name for name, (by_policy, even) in parts if even and not by_policy)

    def settle(self, host: Collection[str]) -> None:
        """Have the parts of these parameters and their gradients on the host, and all others on the device."""
        parameters = {p for name, p in self._model.named_parameters() if name in host}
        for unit in self._units:
            unit.settle(parameters)

    def _parts(self) -> dict[str, tuple[bool, bool]]:
        """`FsdpUnit.parts` of all units, by name."""
        parts = {parameter: part for unit in self._units for parameter, part in unit.parts.items()}
        return {name: parts[p] for name, p in self._model.named_parameters() if p in parts}

    @property
    def device(self) -> torch.device | None:
        """The device that units run on; None where there are none."""
        return self._units[0].device if self._units else None

    @property
    def resident_bytes(self) -> int:
        """What the storages of parts hold beyond the parts: `fully_shard` pads them to one size on all ranks."""
        parts = {id(part): part for part in map(private.part_here, self._model.parameters())}
        storages = {storage_key(part): part.untyped_storage().nbytes() for part in parts.values()}
        return max(0, sum(storages.values()) - sum(part.nbytes for part in parts.values()))

    def shard(self, parameter: nn.Parameter) -> Shard | None:
        return None  # a part is a parameter like any other

    def owns(self, hook: Any) -> bool:
        return private.is_hook_of_unit(hook) or private.is_hook_of_dtensors(hook)

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        if not self._follows():
            raise UnsupportedModel(f"no plan follows {_PARTIAL}")
        self._shard()
        return private.tracing_units(self._units)

    def begin(self, used: Collection[int]) -> None:
        self._shard()
        for unit in self._units:
            unit.begin(used)

    @property
    def way(self) -> tuple[Any, ...]:
        return tuple(unit.way for unit in self._units)

    def end(self, way: Any, used: Collection[int]) -> None:
        for unit, each in zip(self._units, way, strict=True):
            unit.end(each, used)

    def gather(self, parameter: nn.Parameter) -> Handle:
        raise NotImplementedError("parameters are gathered by ops")

    def release(self, parameter: nn.Parameter) -> None:
        raise NotImplementedError("parameters are gathered by ops")

    def accepting(self, parameters: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class _WithinUnit:
    """The forward of a model that is a unit itself, with what the unit's hooks on the model do."""

    def __init__(
        self, unit: private.FsdpUnit, units: Sequence[private.FsdpUnit], model: nn.Module, original: Callable[..., Any]
    ) -> None:
        self._unit, self._units, self._model = unit, units, model
        self.__wrapped__, self.__name__ = original, "forward"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._unit.around(self._model, self._units, self.__wrapped__, args, kwargs)
