"""ZeRO-3 over two gloo ranks with blocks that are planned each by itself, against the same engine without memplan."""

from __future__ import annotations

import functools
from typing import Any

import torch

import memplan
from tests.cells_zero3 import Net, batches, engine_of, step, weights
from tests.meter import LiveMeter, gloo_lets_go
from tests.ranks import Cell
from tests.zoo import first_difference

STEPS = 5


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


def train(planned: bool, share: float, dtype: str, accumulation: int, **zero: Any) -> Any:
    engine = engine_of(dtype, accumulation, build=BranchingNet, **zero)
    try:
        if planned:
            plan = plan_blocks(engine, share)
            print("PLAN", plan.peak_bytes, plan.budget_bytes, plan.baseline_peak_bytes, plan.floor_bytes, [(r.name,r.way) for r in plan.units])
            assert any(row.way != "keep" for row in plan.units)
            assert any(row.way == "planned" for row in plan.units)
            assert plan.peak_bytes <= plan.budget_bytes
        losses = [step(engine, batch) for batch in batches(STEPS * accumulation)]
        return losses, weights(engine), torch.get_rng_state()
    finally:
        engine.destroy()


def compare(share: float, dtype: str = "fp32", accumulation: int = 1, **zero: Any) -> str | None:
    plain, planned = (train(planned, share, dtype, accumulation, **zero) for planned in (False, True))
    return first_difference(plain, planned, "result")


NEEDS = ("deepspeed", "g++")
CELLS = {"fp32": Cell(functools.partial(compare, 0.88), needs=NEEDS)}
