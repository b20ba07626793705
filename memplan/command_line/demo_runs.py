"""Train a small GPT-2 three times from the same seed: as it is, at half of its peak, and in as little as it can."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memplan
from memplan.torch_private import MemoryRecord

BATCH, LENGTH, STEPS = 8, 128, 8
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One training run: its budget (None for no plan), what was predicted and what it came to.

    overhead: predicted step time over that of the unplanned step, minus one.
    """

    name: str
    budget_bytes: int | None
    predicted_bytes: int
    overhead: float
    peak_bytes: int
    step_s: float
    losses: list[float]

    @property
    def fits(self) -> bool:
        return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes


def demo_runs() -> list[DemoRun]:
    """The three runs, the unplanned one first. Needs transformers."""
    batches = demo_batches()
    outlook = memplan.plan(demo_model(), {**batches[0], "use_cache": False}, 1.0)
    plain = DemoRun("unplanned", None, outlook.baseline_peak_bytes, 0.0, *_trained(demo_model(), batches))
    return [plain, _planned_run("half", 0.5, batches), _planned_run("floor", outlook.floor_bytes, batches)]


def demo_model() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=6, n_head=4, bos_token_id=None, eos_token_id=None
    )
    model: Any = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model.train()  # type: ignore[no-any-return]


def demo_batches() -> list[Batch]:
    data = torch.tensor(list(Path(__file__).read_bytes()))  # any text would do
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(STEPS):
        starts = torch.randint(0, len(data) - LENGTH, (BATCH,), generator=generator)
        ids = torch.stack([data[start : start + LENGTH] for start in starts.tolist()])
        batches.append({"input_ids": ids, "labels": ids.clone()})
    return batches


def _trained(model: nn.Module, batches: list[Batch]) -> tuple[int, float, list[float]]:
    """Peak bytes (of the second step, by the allocator's record), median seconds of a step, and all losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tensors = [*model.parameters(), *model.buffers(), *batches[0].values()]
    resident_bytes = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    def step(batch: Batch) -> float:
        loss: torch.Tensor = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    torch.manual_seed(1)
    losses, times, peak_bytes = [], [], 0
    for index, batch in enumerate(batches):
        if index == 1:
            gc.collect()
            with MemoryRecord() as record:
                loss = step(batch)
            peak_bytes = resident_bytes + record.peak_bytes
        else:
            start = time.perf_counter()
            loss = step(batch)
            times.append(time.perf_counter() - start)
        losses.append(loss)
    return peak_bytes, statistics.median(times[1:]), losses


def _planned_run(name: str, budget: float | int, batches: list[Batch]) -> DemoRun:
    model = demo_model()
    memplan.apply(model, {**batches[0], "use_cache": False}, budget)
    plan = memplan.plan_of(model)
    assert plan is not None
    budget_bytes = budget if isinstance(budget, int) else int(budget * plan.baseline_peak_bytes)
    return DemoRun(name, budget_bytes, plan.peak_bytes, plan.overhead, *_trained(model, batches))
