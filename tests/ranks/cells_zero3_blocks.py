"""ZeRO-3 over two gloo ranks with blocks that are planned each by itself, against the same engine without memplan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import memplan
from tests.ranks.cells_agreement import refused
from tests.ranks.cells_deepspeed import messages
from tests.ranks.cells_zero3 import Net, batches, engine_of, weights
from tests.ranks.cells_zero3 import step as step_of
from tests.ranks.spawn import Cell
from tests.support.deepspeed_runs import STEPS, Setting, batch, engine_for, step
from tests.support.deepspeed_runs import BranchingNet as Branching
from tests.support.meter import LiveMeter, gloo_lets_go
from tests.support.zoo import copied, first_difference


class BranchingNet(Net):
    """Which way it goes depends on the data, so that it can't be captured whole."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale[: self.embed.embedding_dim]
        for layer in self.layers:
            x = layer(x)
            if float(x.detach().sum()) > 0:
                x = x * 0.5
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


def plan_blocks(engine: Any, budget: Any) -> memplan.PartialPlan:
    from memplan.integrations.deepspeed.zero3_blocks import apply_sharded_blocks

    blocks = list(engine.module.layers)
    with gloo_lets_go():
        return apply_sharded_blocks(engine, batches(1)[0], budget, blocks=blocks, costs="estimate")


def all_as_planned(engine: Any, plan: memplan.PartialPlan) -> bool:
    """Whether some blocks recompute, and each that has a plan has run by it, and by nothing else."""
    from memplan.installed.planned_forward import planned_forward

    planned = [planned_forward(block) for block in engine.module.layers]
    return "planned" in [row.way for row in plan.units] and all(p is not None and len(p.steps) == 1 for p in planned)


def train(planned: bool, share: float, dtype: str, accumulation: int, **zero: Any) -> Any:
    engine = engine_of(dtype, accumulation, build=BranchingNet, **zero)
    try:
        plan = plan_blocks(engine, share) if planned else None
        losses = [step_of(engine, x) for x in batches(STEPS * accumulation)]
        assert plan is None or all_as_planned(engine, plan)
        return losses, weights(engine), torch.get_rng_state()
    finally:
        engine.destroy()


def compare(share: float, dtype: str = "fp32", accumulation: int = 1, **zero: Any) -> str | None:
    plain, planned = (train(planned, share, dtype, accumulation, **zero) for planned in (False, True))
    return first_difference(plain, planned, "result")


def check_peak(share: float, dtype: str = "fp32", accumulation: int = 1, **zero: Any) -> str | None:
    """All that steps hold is within the budget, from the first step on."""
    from memplan.integrations.deepspeed.memory import held_by

    engine, problem = engine_of(dtype, accumulation, build=BranchingNet, **zero), None
    try:
        plan = plan_blocks(engine, share)
        for x in batches(5 * accumulation):
            meter = LiveMeter()
            meter.register(held_by(engine, x))
            with gloo_lets_go(), meter:
                step_of(engine, x)
            if not meter.peak_bytes <= plan.peak_bytes <= plan.budget_bytes:
                problem = f"held {meter.peak_bytes}, predicted {plan.peak_bytes} of {plan.budget_bytes}"
    finally:
        engine.destroy()
    return problem


# -- by the section of the config -------------------------------------------------------------------------------------


def train_by_section(
    section: dict[str, Any] | None, setting: Setting, build: Callable[[], torch.nn.Module], zero: dict[str, Any]
) -> Any:
    """Losses, and whole parameters in the end."""
    import deepspeed

    config = setting.config(section)
    config["zero_optimization"] |= zero
    with engine_for(setting, section, build, config=config, sample=(batch(setting.dtype),)) as engine:  # type: ignore[arg-type]
        losses = [copied(step(engine, batch(setting.dtype))) for _ in range(STEPS)]
        planned = [block for block in engine.module.blocks if memplan.plan_of(block) is not None]
        assert section is None or planned
        memplan.remove(engine.module)
        assert not any(memplan.plan_of(block) for block in planned)
        losses.append(copied(step(engine, batch(setting.dtype))))
        parameters = dict(engine.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            return losses, {name: copied(p) for name, p in parameters.items()}


def compare_by_section(
    build: Callable[[], torch.nn.Module], variant: str = "", share: float = 0.9, **zero: Any
) -> str | None:
    from deepspeed.utils import groups

    setting = Setting(3, variant=variant)
    # DeepSpeed keeps the group of secondary partitions for every later engine of the process.
    with messages() as said, mock.patch.object(groups, "_ZERO_PARAM_INTRA_PARALLEL_GROUP", None):
        found = [
            train_by_section(section, setting, build, zero)
            for section in (None, {"budget": share, "costs": "estimate"})
        ]
    told = [line for line in said if "blocks are planned each by itself" in line]
    lines = [line for line in said if line.startswith("stage 0") and "of 4 parts" in line]
    if len(told) != 1 or len(lines) != (torch.distributed.get_rank() == 0):
        return f"said {said}"
    return first_difference(*found, "result")


def check_other_budgets() -> str | None:
    """Ranks with budgets of their own run their blocks in other ways, and gather in one order."""
    engine, rank = engine_of(build=BranchingNet), torch.distributed.get_rank()
    try:
        plan = plan_blocks(engine, (1 << 30) if rank == 0 else 0.88)
        ways: list[Any] = [None, None]
        torch.distributed.all_gather_object(ways, [row.way for row in plan.units])
        losses = [step_of(engine, x) for x in batches(STEPS)]
        found = losses, weights(engine), torch.get_rng_state()
    finally:
        engine.destroy()
    if ways[0] != ["keep"] * 3 or "planned" not in ways[1]:
        return f"blocks run {ways}"
    return first_difference(train(False, 1.0, "fp32", 1), found, "result")


OTHER_LENGTHS = ((40, 40), (30, 30), (40, 30), (40, 40), (9, 40), (30, 17), (40, 40))  # of each step, by rank


def train_other_batches(planned: bool) -> Any:
    """Batches of another length than the sample on both ranks, and on one alone, and evaluation. Gives what the run
    found, and how many blocks ran by a plan in each step."""
    from memplan.runtime.parts.part_step import PartStep

    engine, found, by_plan = engine_of(build=BranchingNet), [], []
    rank, original = torch.distributed.get_rank(), PartStep.run
    data = [x[:, : of[rank]].contiguous() for x, of in zip(batches(len(OTHER_LENGTHS)), OTHER_LENGTHS, strict=True)]

    def run(block_step: Any, call: Any) -> Any:
        by_plan[-1] += 1
        return original(block_step, call)

    try:
        if planned:
            plan_blocks(engine, 0.88)
        with mock.patch.object(PartStep, "run", run):
            for x in data:
                by_plan.append(0)
                found.append(step_of(engine, x))
                engine.eval()
                with torch.no_grad():
                    found.append(engine(x).clone())
                engine.train()
        return (found, weights(engine)), by_plan
    finally:
        engine.destroy()


def compare_other_batches() -> str | None:
    (plain, _), (found, by_plan) = train_other_batches(False), train_other_batches(True)
    if by_plan[0] < 2 or by_plan != [by_plan[0] * (of == (40, 40)) for of in OTHER_LENGTHS]:
        return f"{by_plan} blocks ran by their plans in each step"
    return first_difference(plain, found, "result")


def leafy() -> torch.nn.Module:
    """A model whose blocks DeepSpeed was told to gather as a whole."""
    import deepspeed

    net = Branching()
    deepspeed.utils.set_z3_leaf_modules(net, [type(net.blocks[0])])
    return net


def check_refusals() -> str | None:
    """On both ranks, with the reason: what blocks can't mend, and a budget that one of them can't meet."""
    from memplan.integrations.deepspeed import apply_sharded_blocks

    with engine_for(Setting(3), None, leafy) as engine:  # type: ignore[arg-type]
        found = refused(lambda: apply_sharded_blocks(engine, batch(), 0.9), ValueError, "made with leaf modules")
    with engine_for(Setting(3), None, Branching) as engine:

        def plan(budget: Any, **keywords: Any) -> Any:
            return apply_sharded_blocks(engine, batch(), budget, costs="estimate", **keywords)

        found = found or refused(lambda: plan(0.9, blocks=[]), ValueError, "Say what its blocks are")
        limit = 1 << 30 if torch.distributed.get_rank() else 1000
        found = found or refused(lambda: plan(limit), memplan.BudgetInfeasible, "the model does not fit")
        plan(0.9)
        expected, again = [memplan.plan_of(block) is not None for block in engine.module.blocks], plan(1 << 30)
        if not any(expected) or any(row.way != "keep" for row in again.units):
            found = found or "planned anew, no block recomputes"
        engine.eval()
        found = found or refused(lambda: plan(0.9), ValueError, "engine.train()")
    return found


NEEDS = ("deepspeed", "g++")
CELLS = {
    f"{dtype} accumulation {n}": Cell(
        functools.partial(compare, 0.88, dtype, n), full=(dtype, n) != ("fp32", 1), needs=NEEDS
    )
    for dtype in ("fp32", "bf16")
    for n in (1, 2)
}
CELLS |= {
    f"whole step of {dtype} accumulation {n}": Cell(
        functools.partial(check_peak, 0.88, dtype, n), full=True, needs=NEEDS
    )
    for dtype in ("fp32", "bf16")
    for n in (1, 2)
}
CELLS["four ranks"] = Cell(functools.partial(compare, 0.9), world=4, full=True, needs=NEEDS)
CELLS |= {
    "what can't be captured": Cell(functools.partial(compare_by_section, Branching), full=True, needs=NEEDS),
    "autocast": Cell(functools.partial(compare_by_section, Branching, "autocast", 0.95), full=True, needs=NEEDS),
    "budgets of ranks": Cell(check_other_budgets, full=True, needs=NEEDS),
    "other batches": Cell(compare_other_batches, full=True, needs=NEEDS),
    "refusals": Cell(check_refusals, needs=NEEDS),
    "secondary partitions": Cell(
        functools.partial(compare_by_section, Branching, zero_hpz_partition_size=2), full=True, needs=NEEDS
    ),
}
