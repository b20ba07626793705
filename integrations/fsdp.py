"""memplan in models whose units went through `fully_shard` (FSDP2).

for block in model.layers:
    fully_shard(block)
fully_shard(model)
memplan.integrations.fsdp.apply_blocks(model, sample, "8GiB")

The hooks of a unit gather its parameters before it runs and shard them again afterwards, so a plan must not cross the
edge of a unit. Within a unit, a plan runs as in any other model.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import memplan


def apply_blocks(
    model: nn.Module,
    sample: Any,
    budget: int | float | str | memplan.Budget,
    *,
    blocks: Sequence[nn.Module] | None = None,
    group: torch.distributed.ProcessGroup | None = None,
    **keywords: Any,
) -> memplan.PartialPlan:
    """Plan the blocks of a sharded model, so that this rank's step fits a budget. Every rank calls it.

    - sample: as for `memplan.apply`.
    - budget: the most bytes that this rank may hold; ranks may have other ones.
    - blocks: what to plan; None takes the units of `fully_shard` that have no further unit in them.
    - group: the ranks that rehearse together; None is all of them.
    - keywords: as for `memplan.apply_blocks`.

    The budget is for this rank's part of parameters and gradients, for what the step makes, and for the parameters that
    are gathered at a time. Those are of units that stay gathered (the root, and `reshard_after_forward=False`), and of
    the two largest neighbours among the others, because one of two neighbours is fetched ahead.

    Gives the plan. Raises BudgetInfeasible, on every rank, where one can't meet its budget. Raises ValueError where
    there is nothing to plan.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        raise ValueError(
            "no part of the model went through fully_shard. Shard it first, or plan it with memplan.apply and then "
            "shard it"
        )
    if blocks is None:
        blocks = [unit for unit in units if unit is not model and not _units_inside(unit)]
    if not blocks:
        raise ValueError(
            "the model is one single unit of fully_shard. Call fully_shard on its layers too, or plan the whole of it: "
            "memplan.apply(model, None, budget)"
        )
    with _Gathered(units) as gathered, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of results that a rehearsal looks at
        return memplan.apply_blocks(
            model, blocks, sample, budget, whole=_whole(units), reserved_bytes=gathered.most_bytes,
            leaves_out=gathered.__contains__, group=group or torch.distributed.group.WORLD, **keywords,
        )  # fmt: skip


def _units_inside(unit: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in unit.modules() if module is not unit)


def _whole(units: Sequence[nn.Module]) -> Any:
    """A function from a block to a context in which the block's parameters are gathered."""

    @contextlib.contextmanager
    def whole(block: nn.Module) -> Iterator[None]:
        inside = set(block.modules())
        around = [unit for unit in units if unit in inside or block in set(unit.modules())]
        for unit in around:
            assert isinstance(unit, FSDPModule)
            unit.unshard()
        try:
            yield
        finally:
            for unit in around:
                assert isinstance(unit, FSDPModule)
                unit.reshard()

    return whole


class _Gathered:
    """The storages of gathered parameters by unit, in the order in which forward comes to them.

    All steps have the same storages. Their memory is allocated and freed again, which no op shows.
    """

    def __init__(self, units: Sequence[nn.Module]) -> None:
        self._units = units
        self._bytes: dict[nn.Module, int] = {}
        self._staying: set[nn.Module] = set()
        self._all: dict[int, torch.UntypedStorage] = {}

    def __enter__(self) -> _Gathered:
        # They run after the hooks of fully_shard, which were there before.
        self._hooks = [unit.register_forward_pre_hook(self._note) for unit in self._units]
        self._hooks += [self._units[0].register_forward_hook(self._look_at_the_end)]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return id(storage) in self._all

    def most_bytes(self) -> int:
        """The most bytes that are gathered at a time."""
        leaving = [size for unit, size in self._bytes.items() if unit not in self._staying]
        staying_bytes = sum(self._bytes[unit] for unit in self._staying)
        return staying_bytes + max((a + b for a, b in pairwise([0, *leaving])), default=0)

    def _note(self, unit: nn.Module, args: Any) -> None:
        if unit not in self._bytes:
            whole = [p.untyped_storage() for p in _own_parameters(unit) if not isinstance(p, DTensor)]
            storages = {id(storage): storage for storage in whole}
            self._all |= storages
            self._bytes[unit] = sum(storage.nbytes() for storage in storages.values())

    def _look_at_the_end(self, model: nn.Module, args: Any, output: Any) -> None:
        for unit in self._bytes:
            if any(not isinstance(p, DTensor) for p in _own_parameters(unit)):
                self._staying.add(unit)


def _own_parameters(unit: nn.Module) -> list[nn.Parameter]:
    """The parameters of a unit that are not in a further unit inside of it."""
    inner = [module for module in unit.modules() if isinstance(module, FSDPModule) and module is not unit]
    theirs = {id(m) for module in inner for m in module.modules()}
    return [p for m in unit.modules() if id(m) not in theirs for p in m.parameters(recurse=False)]
