"""Train a small GPT-2 three times from the same seed: as it is, at half of its peak, and in as little as it can.

    python examples/demo.py

Prints for each run the measured and the predicted peak, the seconds of a step and the loss of every step. The exit code
is 0 only if all losses are the same numbers and no run's measured peak is above its budget. Under three minutes on
two cores; needs transformers and no download: the data are the bytes of this repository's licence.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel

import memplan

BATCH, LENGTH, STEPS = 8, 128, 8
MEBIBYTE = 2**20
Batch = dict[str, torch.Tensor]


@dataclass
class Run:
    """One training run: its budget (None for no plan), what was predicted and what it came to."""

    name: str
    budget_bytes: int | None
    predicted_bytes: int
    peak_bytes: int
    step_s: float
    losses: list[float]

    @property
    def fits(self) -> bool:
        return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=6, n_head=4, bos_token_id=None, eos_token_id=None
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model.train()


def make_batches() -> list[Batch]:
    text = (Path(__file__).resolve().parent.parent / "LICENSE").read_bytes()
    data = torch.tensor(list(text))
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(STEPS):
        starts = torch.randint(0, len(data) - LENGTH, (BATCH,), generator=generator)
        ids = torch.stack([data[start : start + LENGTH] for start in starts.tolist()])
        batches.append({"input_ids": ids, "labels": ids.clone()})
    return batches


def measured_peak(step: Callable[[], float], resident_bytes: int) -> tuple[int, float]:
    """Peak bytes of a step, by the allocator's record, and what the step returns."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        loss = step()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    held_bytes = most_bytes = resident_bytes
    for event in sorted(events, key=lambda e: e.start_ns()):
        held_bytes += event.nbytes()
        most_bytes = max(most_bytes, held_bytes)
    return most_bytes, loss


def train(model: GPT2LMHeadModel, batches: list[Batch]) -> tuple[int, float, list[float]]:
    """Peak bytes (of the second step), median seconds of a step, and all losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tensors = [*model.parameters(), *model.buffers(), *batches[0].values()]
    resident_bytes = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    def step(batch: Batch) -> float:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    torch.manual_seed(1)
    losses, times, peak_bytes = [], [], 0
    for index, batch in enumerate(batches):
        if index == 1:
            peak_bytes, loss = measured_peak(lambda batch=batch: step(batch), resident_bytes)
        else:
            start = time.perf_counter()
            loss = step(batch)
            times.append(time.perf_counter() - start)
        losses.append(loss)
    return peak_bytes, statistics.median(times[1:]), losses


def planned_run(name: str, budget: float | int, batches: list[Batch]) -> Run:
    model = make_model()
    memplan.apply(model, {**batches[0], "use_cache": False}, budget)
    plan = memplan.plan_of(model)
    budget_bytes = budget if isinstance(budget, int) else int(budget * plan.baseline_peak_bytes)
    return Run(name, budget_bytes, plan.peak_bytes, *train(model, batches))


def show(runs: list[Run]) -> None:
    print(f"\n{'':12}{'budget':>12}{'predicted':>12}{'measured':>12}{'of unplanned':>14}{'s a step':>10}")
    for run in runs:
        sizes = [run.budget_bytes, run.predicted_bytes, run.peak_bytes]
        cells = "".join(f"{'-' if size is None else f'{size / MEBIBYTE:.2f} MiB':>12}" for size in sizes)
        print(f"{run.name:12}{cells}{run.peak_bytes / runs[0].peak_bytes:>13.1%}{run.step_s:>11.3f}")
    print(f"\n{'loss of step':12}" + "".join(f"{run.name:>24}" for run in runs))
    for index in range(STEPS):
        print(f"{index + 1:12}" + "".join(f"{run.losses[index]!r:>24}" for run in runs))


def main() -> int:
    batches = make_batches()
    outlook = memplan.plan(make_model(), {**batches[0], "use_cache": False}, 1.0)
    runs = [Run("unplanned", None, outlook.baseline_peak_bytes, *train(make_model(), batches))]
    runs.append(planned_run("half", 0.5, batches))
    runs.append(planned_run("floor", outlook.floor_bytes, batches))
    show(runs)
    same = all(run.losses == runs[0].losses for run in runs)
    fits = all(run.fits for run in runs)
    print(
        f"\nlosses are {'the same numbers' if same else 'DIFFERENT'}; peaks are {'within' if fits else 'ABOVE'} budget"
    )
    return 0 if same and fits else 1


if __name__ == "__main__":
    sys.exit(main())
