"""ZeRO stage 3 where memplan can't gather itself: blocks of the model are planned, and DeepSpeed gathers around them.

A step may be impossible to capture whole, or DeepSpeed may gather in ways of its own (in another dtype under autocast,
from a secondary partition). Blocks of it can still be planned, each by itself. Each block becomes a leaf for
DeepSpeed's hooks, which gather all of its parameters before its forward and before its backward. So what is recomputed
in backward finds them there. The blocks stay leaves when plans are removed. Gradients are reduced by the hooks on
parameters as before, when a block's backward is over.

Hooks on modules inside of a block stay for the nodes that they put into autograd's graph, which fix the order in which
gradients are added up. They gather nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from deepspeed.utils.z3_leaf_module import set_z3_leaf_module, z3_leaf_parameter
from torch import nn

import memplan

from .memory import needs_beside_shards
from .zero3 import ZeroShards, reasons, refuse_stage


def apply_sharded_blocks(
    engine: Any,
    sample: Any,
    budget: int | float | str | memplan.Budget,
    *,
    blocks: Sequence[nn.Module] | None = None,
    **keywords: Any,
) -> memplan.PartialPlan:
    """Plan blocks of the model of a DeepSpeed engine of ZeRO stage 3, so that this rank's step fits a budget.

    All of its ranks have to call it, in train mode. Their budgets may differ. Counted is what `apply_sharded` counts,
    with the parameters that DeepSpeed has gathered at a time in a rehearsal on the sample. A call of a block unlike its
    sample, on any rank, is recomputed as a whole on all of them, which may hold more.

    - sample, budget: as for `memplan.apply`.
    - blocks: what to plan; None takes the modules that are repeated, as layers of a transformer are.
    - keywords: as for `memplan.apply_blocks`.

    Gives the plan. Raises BudgetInfeasible, on every rank, where one can't meet its budget. Raises ValueError where
    there is nothing to plan.
    """
    model = engine.module
    refuse_stage(engine)
    for found, reason, blocks_can_be_planned in reasons(engine):
        if found and not blocks_can_be_planned:
            raise ValueError(f"memplan can't plan blocks of ZeRO-3 with {reason}")
    if any(map(z3_leaf_parameter, model.parameters())):
        raise ValueError(
            "the engine was made with leaf modules, whose gradients are reduced when DeepSpeed has called them. Leave "
            "set_z3_leaf_modules, and stage3_module_granularity_threshold, out"
        )
    memplan.remove(model)
    blocks = repeated_blocks(model) if blocks is None else list(blocks)
    if not blocks:
        raise ValueError(
            f"nothing in {type(model).__name__} is repeated that could be planned. Say what its blocks are: blocks="
        )
    shards = BlockShards(engine)
    needs = needs_beside_shards(engine, shards.reducing_bytes)
    around = needs.surroundings
    shards.gather_around(blocks)
    with shards.fresh_forwards(), autocast_if_enabled(engine):
        return memplan.apply_blocks(
            model, blocks, sample, budget, optimizer=needs.optimizer, shards=shards, group=shards.group,
            reserved_bytes=lambda: shards.resident_bytes + around.held_bytes + around.after_bytes, **keywords,
        )  # fmt: skip


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Modules in a list of several of one kind, where that list is not inside another such list."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        children = list(module.children())
        alike = len(children) > 1 and len({type(child) for child in children}) == 1
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and alike and module not in inside:
            if any(p.requires_grad for p in module.parameters()):
                found += children
                inside.update(module.modules())
    return found


class BlockShards(ZeroShards):
    """The parameters of an engine whose hooks gather them around each pass of a block."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine, memplan.GatherSpeed())

    def begin(self) -> None:
        """Does nothing: DeepSpeed's hooks have gathered what a block reads."""

    def let_hooks_rest(self) -> None:
        """Does nothing: the hooks have to gather around blocks."""

    def gather_around(self, blocks: Sequence[nn.Module]) -> None:
        """Let DeepSpeed gather all of a block before any of it runs, and nothing for the modules in it.

        Then ranks gather in one order, however each of them runs a block.
        """
        self._offload.partition_all_parameters()
        for block in blocks:
            set_z3_leaf_module(block, True)
            self.rest_within(block)
        self._forget_order()

    @contextlib.contextmanager
    def fresh_forwards(self) -> Iterator[None]:
        """A context in which each forward begins as after a step, with nothing gathered. So does what follows it."""
        hook = self._module.register_forward_pre_hook(lambda *_: self._begin_anew(), prepend=True)
        try:
            yield
        finally:
            hook.remove()
            self._begin_anew()
            self._forget_order()

    def _begin_anew(self) -> None:
        if torch.is_grad_enabled():
            self._offload.partition_all_parameters()

    def _forget_order(self) -> None:
        """Let DeepSpeed forget the order in which modules ran, by which it gathers ahead: now other modules run."""
        coordinator = self._offload.get_param_coordinator()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()
