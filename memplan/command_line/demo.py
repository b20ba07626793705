"""`memplan demo`: a small GPT-2 is trained three times from one seed: as it is, at half of its peak, at the least."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memplan
from memplan.command_line.outcomes import DONE, MISTAKEN, Commands, Mistake, Outcome

if TYPE_CHECKING:
    import torch
    from torch import nn

BATCH, LENGTH, STEPS = 8, 128, 8
_MEBIBYTE = 2**20
_FAR_OFF = 0.25

Batch = dict[str, "torch.Tensor"]


@dataclasses.dataclass(frozen=True, slots=True)
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


def add_demo(commands: Commands) -> None:
    commands.add_parser(
        "demo",
        help="train a small GPT-2 as it is, at half of its peak and in as little as it can",
        description="Prints for each run the measured and the predicted peak, the seconds of a step and the loss of "
        "every step. Exit status 1 where losses differ, or a measured peak is above its budget. Under three minutes on "
        "two cores; needs transformers and no download.",
    ).set_defaults(run=_demo)


def _demo(given: argparse.Namespace) -> Outcome:
    if importlib.util.find_spec("transformers") is None:
        raise Mistake("the demo trains a GPT-2", "transformers is not installed", "pip install transformers")
    batches = demo_batches()
    outlook = memplan.plan(demo_model(), {**batches[0], "use_cache": False}, 1.0)
    plain = DemoRun("unplanned", None, outlook.baseline_peak_bytes, 0.0, *_trained(demo_model(), batches))
    runs = [plain, _planned_run("half", 0.5, batches), _planned_run("floor", outlook.floor_bytes, batches)]
    same = all(run.losses == plain.losses for run in runs)
    fits = all(run.peak_bytes <= run.budget_bytes for run in runs if run.budget_bytes is not None)
    losses, peaks = "the same numbers" if same else "DIFFERENT", "within" if fits else "ABOVE"
    lines = [
        f"\n{'':12}{'budget':>12}{'predicted':>12}{'measured':>12}{'of unplanned':>14}{'s a step':>10}{'predicted':>11}"
    ]
    for run in runs:
        sizes = [run.budget_bytes, run.predicted_bytes, run.peak_bytes]
        cells = "".join(f"{'-' if size is None else f'{size / _MEBIBYTE:.2f} MiB':>12}" for size in sizes)
        times = f"{run.step_s:>11.3f}{plain.step_s * (1 + run.overhead):>11.3f}"
        lines.append(f"{run.name:12}{cells}{run.peak_bytes / plain.peak_bytes:>13.1%}{times}")
    lines.append(f"\n{'loss of step':12}" + "".join(f"{run.name:>24}" for run in runs))
    for index in range(STEPS):
        lines.append(f"{index + 1:12}" + "".join(f"{run.losses[index]!r:>24}" for run in runs))
    lines.append(f"\nlosses are {losses}; peaks are {peaks} budget")
    if any(abs(run.step_s / plain.step_s / (1 + run.overhead) - 1) > _FAR_OFF for run in runs):
        lines.append("seconds are not as predicted: the machine does other work too. Bytes and losses are")
    facts = {"same_losses": same, "fits": fits, "runs": [dataclasses.asdict(run) for run in runs]}
    return Outcome("\n".join(lines), facts, DONE if same and fits else MISTAKEN)


def demo_model() -> nn.Module:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=6, n_head=4, bos_token_id=None, eos_token_id=None
    )
    model: Any = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model.train()  # type: ignore[no-any-return]


def demo_batches() -> list[Batch]:
    import torch

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
    import torch

    from memplan.torch_private import MemoryRecord

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
