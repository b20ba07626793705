"""Stage 3 and pipelines planned by the memplan section of the DeepSpeed config alone, over gloo ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch

import memplan
from tests.deepspeed_runs import STEPS, Setting, batch, engine_for, step
from tests.ranks import Cell
from tests.zoo import copied, first_difference


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


def cell(run: Any, *arguments: Any, **settings: Any) -> Cell:
    return Cell(functools.partial(run, *arguments), needs=("deepspeed", "g++"), **settings)


CELLS = {
    "ZeRO 3, the first call is planned": cell(compare_sharded, False),
    "ZeRO 3, with a sample": cell(compare_sharded, True, full=True),
}
