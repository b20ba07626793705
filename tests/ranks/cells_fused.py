"""Fused kernels over two gloo ranks: the bits are those of the fused program with everything kept."""

from __future__ import annotations

import functools
from typing import Any

import torch

import memplan
from memplan.integrations.pipelining import plan_stages
from tests.ranks import cells_ddp, cells_zero3
from tests.ranks.cells_pipelines import TORCH, torch_schedule, torch_steps
from tests.ranks.spawn import Cell
from tests.support import deepspeed_runs
from tests.support.zoo import first_difference


def compare_replicas(agree: bool) -> str | None:
    keywords = {"group": torch.distributed.group.WORLD} if agree else {}
    runs = [
        cells_ddp.train("plain", "every-step", "surface", budget=budget, kernels="fused", **keywords)
        for budget in (1.0, cells_ddp.BUDGET)
    ]
    return first_difference(*runs, "result")


def compare_engines(stage: int) -> str | None:
    """DeepSpeed's, whose parameters are whole, at two budgets that take recomputing."""
    setting = deepspeed_runs.Setting(stage, accumulation=2)
    sections = [setting.section | {"kernels": "fused", "budget": budget} for budget in (0.9, 0.7)]
    return first_difference(*(deepspeed_runs.train(setting, section) for section in sections), "result")


def compare_shards() -> str | None:
    """Parameters that ZeRO 3 has sharded, and the plan gathers."""

    def trained(activations: float) -> Any:
        engine = cells_zero3.engine_of()
        try:
            plan = cells_zero3.plan_it(engine, memplan.Budget(activations=activations), kernels="fused")
            assert plan.exact == "program"
            assert bool(plan.recomputed) == (activations < 1)
            losses = [cells_zero3.step(engine, batch) for batch in cells_zero3.batches(3)]
            return losses, cells_zero3.weights(engine), torch.get_rng_state()
        finally:
            engine.destroy()

    return first_difference(trained(1.0), trained(0.5), "result")


def compare_stages() -> str | None:
    """A pipeline's, some of whose microbatches wait for their backward."""

    def trained(budgets: dict[int, Any]) -> tuple[Any, dict[int, memplan.Plan]]:
        schedule, parts = torch_schedule("1f1b")
        stages = plan_stages(schedule, budgets, costs="estimate", kernels="fused")
        return torch_steps(schedule, parts, 2), dict(stages.plans)

    kept, plans = trained({torch.distributed.get_rank(): 1.0})
    low, others = trained({index: plan.floor_bytes for index, plan in plans.items()})
    assert all(plan.exact == "program" and plan.recomputed for plan in others.values())
    return first_difference(kept, low, "result")


CELLS = {
    f"replicas{', who agree' if agree else ''}": Cell(
        functools.partial(compare_replicas, agree), full=True, needs=("g++",)
    )
    for agree in (False, True)
}
CELLS |= {
    f"ZeRO {stage}": Cell(functools.partial(compare_engines, stage), full=True, needs=("deepspeed", "g++"))
    for stage in (0, 1, 2)
}
CELLS |= {
    "ZeRO 3": Cell(compare_shards, full=True, needs=("deepspeed", "g++")),
    "stages": Cell(compare_stages, full=True, needs=(*TORCH, "g++")),
}
