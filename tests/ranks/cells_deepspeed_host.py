"""DeepSpeed engines of every stage whose plans offload activations to the host: `host_budget` in the section.

On a CPU copies run on memplan's stand-in for streams, which delays each until somebody waits for it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

import memplan
from tests.ranks.cells_deepspeed import measured_peak
from tests.ranks.spawn import Cell
from tests.support.deepspeed_runs import DTYPES, STEPS, Setting, batch, engine_for, step
from tests.support.zoo import copied, first_difference

HOST = {"host_budget": "100MiB", "costs": "estimate"}
ENGINE_HOLDS: dict[str, dict[str, Any]] = {
    "": {},
    "its optimizer on the host": {"offload_optimizer": {"device": "cpu"}},
    "its parameters on the host": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
}


def share(setting: Setting) -> float:
    """A share of the unplanned peak that takes copies: recomputing alone can't meet it, or takes longer."""
    return 0.5 if setting.dtype == "bfloat16" and setting.stage < 3 else 0.4


def config_of(setting: Setting, section: dict[str, Any] | None, holds: str) -> dict[str, Any]:
    config = setting.config(section)
    config["zero_optimization"] = config["zero_optimization"] | ENGINE_HOLDS[holds]
    if setting.stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 40
    return config | {"zero_force_ds_cpu_optimizer": False}


def train(setting: Setting, section: dict[str, Any] | None, holds: str, uneven_from: int) -> Any:
    """Losses of every micro-batch, whole parameters in the end, and the generator.

    uneven_from: the micro-batch from which on batches have other sizes on each rank.
    """
    import deepspeed

    losses, rank = [], torch.distributed.get_rank()
    with engine_for(setting, section, config=config_of(setting, section, holds)) as engine:
        for i in range(STEPS * setting.accumulation):
            size = 120 if i >= uneven_from and (i + rank) % 2 else 256
            losses.append(copied(step(engine, batch(setting.dtype, size))))
            plan = memplan.plan_of(engine.module)
            if plan is not None:
                assert plan.offloaded_bytes or size < 256, "nothing is offloaded"
                assert plan.host_bytes <= memplan.parse_bytes(HOST["host_budget"])
                assert plan.peak_bytes <= (plan.problem.budget_bytes or 0)
        assert section is None or plan is not None
        parameters = dict(engine.module.named_parameters())
        whole = deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=setting.stage == 3)
        with whole:
            return losses, {name: copied(p) for name, p in parameters.items()}, torch.get_rng_state()


def compare(setting: Setting, holds: str = "", uneven_from: int = 100) -> str | None:
    section = {"budget": share(setting), **HOST}
    plain, planned = (train(setting, each, holds, uneven_from) for each in (None, section))
    return first_difference(plain, planned, "result")


def check_peak(stage: int) -> str | None:
    """What the device holds beside the copies on the host is within the budget, and needs them to be."""
    setting = Setting(stage)
    with engine_for(setting, {"budget": share(setting), **HOST}) as engine:
        peak_bytes, plan = measured_peak(engine, batch()), memplan.plan_of(engine.module)
    assert plan is not None
    if not plan.offloaded_bytes or not peak_bytes <= plan.peak_bytes <= (plan.problem.budget_bytes or 0):
        return f"measured {peak_bytes}, predicted {plan.peak_bytes}, offloaded {plan.offloaded_bytes}"
    return None


NEEDS = ("deepspeed", "g++")
SETTINGS = [Setting(stage, dtype, n) for stage in range(4) for dtype in DTYPES for n in (1, 2)]
QUICK = {Setting(1, "bfloat16", 2)}
CELLS = {
    f"{setting}": Cell(functools.partial(compare, setting), full=setting not in QUICK, needs=NEEDS)
    for setting in SETTINGS
}
CELLS |= {
    f"{Setting(stage)}, {holds}": Cell(functools.partial(compare, Setting(stage), holds), full=True, needs=NEEDS)
    for stage, holds in (
        (2, "its optimizer on the host"),
        (3, "its optimizer on the host"),
        (3, "its parameters on the host"),
    )
}
CELLS |= {
    f"{Setting(stage)}, uneven batches": Cell(
        functools.partial(compare, Setting(stage), uneven_from=3 - stage), full=True, needs=NEEDS
    )
    for stage in (2, 3)
}
CELLS |= {
    f"peak of ZeRO {stage}": Cell(functools.partial(check_peak, stage), full=True, needs=NEEDS) for stage in range(4)
}
