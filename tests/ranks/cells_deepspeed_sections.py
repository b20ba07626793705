"""Stage 3 and pipelines planned by the memplan section of the DeepSpeed config alone, over gloo ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch

import memplan
from tests.ranks.cells_deepspeed import messages
from tests.ranks.cells_pipelines import deepspeed_engine, deepspeed_peak, deepspeed_plain, deepspeed_steps
from tests.ranks.spawn import Cell
from tests.support.deepspeed_runs import STEPS, Setting, batch, engine_for, step
from tests.support.meter import LiveMeter, gloo_lets_go
from tests.support.zoo import copied, first_difference


def train_sharded(section: dict[str, Any] | None, sample: bool = False) -> Any:
    """Losses, and whole parameters in the end."""

    import deepspeed

    setting, results = Setting(3), []
    given = {"sample": (batch(),)} if sample else {}
    with engine_for(setting, section, **given) as engine:
        for _ in range(STEPS):
            results.append(copied(step(engine, batch(setting.dtype))))
        if section is not None:
            plan = memplan.plan_of(engine.module)
            assert plan is not None
            assert plan.peak_bytes <= (plan.problem.budget_bytes or 0)
        parameters = dict(engine.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            whole = {name: copied(p) for name, p in parameters.items()}
    return results, whole


def compare_sharded(sample: bool) -> str | None:
    section = {"budget": 0.8, "costs": "estimate"}
    return first_difference(train_sharded(None, sample), train_sharded(section, sample), "result")


def check_sharded_budgets() -> str | None:
    """Ranks with budgets of their own: the plan for the lowest is that of all, which the log says."""
    from memplan.integrations.deepspeed.memory import held_by

    per_rank, rank, problem = {"0": "620kB", "1": 560_000}, torch.distributed.get_rank(), None
    section = {"per_rank": per_rank, "costs": "estimate"}
    with messages() as said, engine_for(Setting(3), section) as engine:
        step(engine, batch())
        for _ in range(3):
            x = batch()
            meter = LiveMeter()
            meter.register(held_by(engine, x))
            with gloo_lets_go(), meter:
                step(engine, x)
            plan = memplan.plan_of(engine.module)
            assert plan is not None
            assert plan.recomputed
            if not meter.peak_bytes <= plan.peak_bytes <= 560_000:
                problem = f"held {meter.peak_bytes} bytes, predicted {plan.peak_bytes}"
            torch.distributed.barrier()
    lines = [line for line in said if "that for the lowest" in line and "of rank 1" in line]
    shown = [line for line in said if line.startswith("stage 0, ranks 0 to 1: budget")]
    if [len(lines), len(shown)] != ([1, 1] if rank == 0 else [0, 0]):
        problem = problem or f"said {said}"
    return problem or first_difference(train_sharded(None), train_sharded(section), "result")


def attached(stages: int, section: dict[str, Any], kind: str = "plain") -> Any:
    """The engine of a pipeline, planned by its section."""
    from memplan.integrations.deepspeed import attach

    engine = deepspeed_engine(stages, kind, 1)
    engine.config["memplan"] = {"costs": "estimate", **section}
    return attach(engine)


def compare_pipeline(stages: int) -> str | None:
    """A budget for each stage, a third of the way from the least that it can do with to what it takes unplanned."""
    plain, engine = deepspeed_plain(stages, "plain"), attached(stages, {"budget": 1.0})
    deepspeed_steps(engine, 1)
    free = memplan.plan_of(engine.module)
    assert free is not None
    budgets: list[Any] = [None] * torch.distributed.get_world_size()
    own = int(free.floor_bytes + (free.baseline_peak_bytes - free.floor_bytes) / 3)
    torch.distributed.all_gather_object(budgets, (engine.stage_id, own))
    engine = attached(stages, {"per_stage": [max(b for s, b in budgets if s == stage) for stage in range(stages)]})
    found = deepspeed_steps(engine)
    plan = memplan.plan_of(engine.module)
    assert plan is not None
    assert plan.recomputed
    if deepspeed_peak(engine) > plan.problem.budget_bytes:
        return f"peaks at {deepspeed_peak(engine)} of {plan.problem.budget_bytes}"
    return first_difference(plain, found, "step")


def cell(run: Any, *arguments: Any, **settings: Any) -> Cell:
    return Cell(functools.partial(run, *arguments), needs=("deepspeed", "g++"), **settings)


CELLS = {
    "ZeRO 3, the first call is planned": cell(compare_sharded, False),
    "ZeRO 3, with a sample": cell(compare_sharded, True, full=True),
    "ZeRO 3, budgets of ranks": cell(check_sharded_budgets, full=True),
    "two stages": cell(compare_pipeline, 2),
    "two stages, two replicas": cell(compare_pipeline, 2, world=4, full=True),
}
