"""Engines of DeepSpeed over a small model, and runs of them; what cells of ranks are made of."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

import memplan
from tests.support.zoo import copied

STEPS = 5
BATCH, WIDTH = 256, 32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "overlap": {"zero_optimization": {"overlap_comm": True}},
    "scattered": {"zero_optimization": {"contiguous_gradients": False}},
    "round robin": {"zero_optimization": {"round_robin_gradients": True}},
    "reduced whole": {"zero_optimization": {"reduce_scatter": False}},
    "fp32 sums": {"data_types": {"grad_accum_dtype": "fp32"}},
    "fp32 sums at once": {
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": True, "immediate_grad_update": True},
    },
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "optimizer on the host": {
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
    },
}


class Setting(NamedTuple):
    """stage: of ZeRO. accumulation: micro-batches of a step. variant: one of `VARIANTS`, for further options."""

    stage: int
    dtype: str = "float32"
    accumulation: int = 1
    variant: str = ""

    @property
    def section(self) -> dict[str, Any]:
        """A section that plans for a share of the unplanned peak which takes recomputing and can be met."""
        return {"budget": 0.8 if self.variant == "autocast" else 0.6, "costs": "estimate"}

    def __str__(self) -> str:
        words = (f"ZeRO {self.stage} {self.dtype} x{self.accumulation}", self.variant)
        return ", ".join(word for word in words if word)

    def config(self, section: dict[str, Any] | None) -> dict[str, Any]:
        """Buckets of two layers and a half, so that ZeRO reduces several of them in one backward pass."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": self.stage, "reduce_bucket_size": 2600},
            "bf16": {"enabled": self.dtype == "bfloat16"},
            "steps_per_print": None,
            "memplan": section or {"enabled": False},
        }
        for key, value in VARIANTS[self.variant].items():
            config[key] = config[key] | value if isinstance(config.get(key), dict) else value
        return config


class Net(nn.Module):
    """A loss behind layers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        return (self.norm(x) - 1).pow(2).mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class BranchingNet(nn.Module):
    """Which way it goes depends on the data, so that it runs unplanned."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if float(x.detach().sum()) > 0:
                x = x * 0.5
        return (x - 1).pow(2).mean()


@contextmanager
def engine_for(
    setting: Setting, section: dict[str, Any] | None = None, kind: type[nn.Module] = Net, **arguments: Any
) -> Iterator[Any]:
    """An engine, planned where there is a section. The generator is seeded by rank afterwards."""
    from memplan.integrations.deepspeed import initialize

    torch.manual_seed(0)
    net = kind().train()
    arguments = {"config": setting.config(section)} | arguments
    engine, *_ = initialize(model=net, model_parameters=net.parameters(), **arguments)
    torch.manual_seed(10 + torch.distributed.get_rank())
    try:
        yield engine
    finally:
        engine.destroy()


def batch(dtype: str = "float32", size: int = BATCH) -> torch.Tensor:
    return torch.randn(size, WIDTH).to(DTYPES[dtype])


def step(engine: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = engine(x)
    engine.backward(loss)
    engine.step()
    return loss


def train(setting: Setting, section: dict[str, Any] | None, kind: type[nn.Module] = Net, **arguments: Any) -> Any:
    """Losses of every micro-batch, parameters after every step, and the generator in the end."""
    results: list[Any] = []
    with engine_for(setting, section, kind, **arguments) as engine:
        for _ in range(STEPS):
            losses = [copied(step(engine, batch(setting.dtype))) for _ in range(setting.accumulation)]
            results.append((losses, {n: copied(p) for n, p in engine.module.named_parameters()}))
        if section is not None:
            plan = memplan.plan_of(engine.module)
            if kind is BranchingNet:
                assert plan is None
            else:
                assert plan is not None
                assert plan.recomputed or plan.offloaded_bytes, "the plan runs, and recomputes"
                assert plan.peak_bytes <= (plan.problem.budget_bytes or 0)
    return results, torch.get_rng_state()


@functools.cache
def plain(setting: Setting, kind: type[nn.Module] = Net) -> Any:
    """The run without a plan."""
    return train(setting, None, kind)
