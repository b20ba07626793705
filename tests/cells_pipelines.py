"""Pipelines of two and four stages over gloo ranks, with and without plans: PyTorch's schedules and DeepSpeed's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from memplan.integrations.pipelining import in_flight, plan_stages
from tests.meter import LiveMeter
from tests.ranks import Cell
from tests.zoo import copied, first_difference

WIDTH, ROWS, MICROBATCHES, STEPS = 16, 64, 8, 5
SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
COUNTS = {  # of microbatches in flight, by stage: facts of PyTorch's schedules with eight microbatches
    ("gpipe", 2): [8, 8], ("gpipe", 4): [8, 8, 8, 8],
    ("1f1b", 2): [2, 1], ("1f1b", 4): [4, 3, 2, 1],
    ("interleaved", 2): [4, 3, 2, 1], ("interleaved", 4): [8, 8, 7, 5, 4, 4, 3, 1],
}  # fmt: skip


class Block(nn.Module):
    """Wide inside, narrow where stages meet; with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


def layers(count: int) -> list[Block]:
    torch.manual_seed(0)
    return [Block().train() for _ in range(count)]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def rank_of() -> tuple[int, int]:
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


# -- torch.distributed.pipelining -------------------------------------------------------------------------------------


def torch_schedule(kind: str, static: bool = True) -> tuple[Any, nn.ModuleList]:
    """The schedule of this rank, and its submodules; two stages a rank where stages interleave."""
    rank, world = rank_of()
    count = 2 * world if kind == "interleaved" else world
    blocks, mine = layers(2 * count), [i for i in range(count) if i % world == rank]
    parts = nn.ModuleList(nn.Sequential(*blocks[2 * i : 2 * i + 2]) for i in mine)
    example = torch.zeros(ROWS, WIDTH)
    known = [
        {"input_args": example.clone().requires_grad_(i > 0), "output_args": example.clone().requires_grad_()}
        for i in mine
    ]
    stages = [
        PipelineStage(part, i, count, torch.device("cpu"), **(shapes if static else {}))
        for i, part, shapes in zip(mine, parts, known, strict=True)
    ]
    return SCHEDULES[kind](stages if kind == "interleaved" else stages[0], MICROBATCHES, loss_of), parts


def torch_steps(schedule: Any, parts: nn.ModuleList, count: int = STEPS, wanted: bool = True) -> list[Any]:
    """What some steps leave: losses, outputs, gradients, parameters, the generator."""
    rank, world = rank_of()
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(20)
    data = [torch.randn(2, MICROBATCHES * ROWS, WIDTH) for _ in range(count)]
    torch.manual_seed(30 + rank)
    found: list[Any] = []
    for x, target in data:
        losses: list[torch.Tensor] = []
        first, last = rank == 0, rank == world - 1
        output = schedule.step(
            *([x] if first else []), target=target if last else None, losses=losses if last else None,
            return_outputs=wanted,
        )  # fmt: skip
        found += [copied(losses), copied(output), [copied(p.grad) for p in parts.parameters()]]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        found.append([copied(p) for p in parts.parameters()])
    return [*found, torch.get_rng_state()]


@functools.cache
def torch_plain(kind: str) -> list[Any]:
    return torch_steps(*torch_schedule(kind))


def torch_budget(kind: str, share: float) -> Any:
    """Bytes for this rank's stages: a share of the way from the least to the unplanned peak, another on each rank."""
    schedule, parts = torch_schedule(kind)
    plans = plan_stages(schedule, dict.fromkeys(in_flight(schedule), 1.0), costs="estimate")
    torch_steps(schedule, parts, 1)
    least = sum(plan.floor_bytes for plan in plans.plans.values())
    most = sum(plan.baseline_peak_bytes for plan in plans.plans.values())
    return int(least + (share + 0.1 * rank_of()[0]) * (most - least))


@contextmanager
def counted(schedule: Any) -> Iterator[dict[int, int]]:
    """The most forwards less backwards that each stage has run, while this lasts."""
    waiting: dict[int, int] = {}
    most: dict[int, int] = {}

    def around(run: Callable[..., Any], stage: int, step: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            waiting[stage] = waiting.get(stage, 0) + step
            most[stage] = max(most.get(stage, 0), waiting[stage])
            return run(*args, **kwargs)

        return call

    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    for stage in stages:
        stage.forward_one_chunk = around(stage.forward_one_chunk, stage.stage_index, 1)
        stage.backward_one_chunk = around(stage.backward_one_chunk, stage.stage_index, -1)
    yield most
    for stage in stages:
        del stage.forward_one_chunk, stage.backward_one_chunk


def torch_equals_plain(kind: str, static: bool = True) -> str | None:
    """Bits of the plain run, counts as foreseen, and within each rank's own budget."""
    plain, budget = torch_plain(kind), torch_budget(kind, 0.2)
    schedule, parts = torch_schedule(kind, static)
    plans = plan_stages(schedule, budget, costs="estimate")
    with counted(schedule) as most:
        found = torch_steps(schedule, parts)
    rank, world = rank_of()
    expected = {i: n for i, n in enumerate(COUNTS[kind, world]) if i % world == rank}
    if not most == plans.in_flight == expected:
        return f"in flight: counted {most}, predicted {plans.in_flight}, known {expected}"
    if not any(plan.recomputed for plan in plans.plans.values()):
        return "nothing is recomputed"
    if static:
        peak, measured = plans.peak_bytes, torch_peak(schedule, parts)
        if not measured <= peak <= budget:
            return f"peaks at {measured}, predicted {peak}, of {budget}"
    return first_difference(plain, found, "step")


def torch_peak(schedule: Any, parts: nn.ModuleList) -> int:
    """Bytes that a rank holds at most while a step runs, buffers of the stages that are there before included."""
    rank, world = rank_of()
    x, target = torch.randn(MICROBATCHES * ROWS, WIDTH), torch.randn(MICROBATCHES * ROWS, WIDTH)
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    tables = [table for stage in stages for table in (stage.args_recv_info, stage.grad_recv_info)]
    meter = LiveMeter()
    meter.register([[p, p.grad] for p in parts.parameters()])
    meter.register([info.buffer for table in tables for row in table.values() for info in row])
    first, last = rank == 0, rank == world - 1
    meter.register([[x] if first else [], [target] if last else []])
    with meter:
        schedule.step(*([x] if first else []), target=target if last else None)
    return meter.peak_bytes


def torch_cells() -> dict[str, Cell]:
    found = {}
    for kind in SCHEDULES:
        for world in (2, 4):
            run = functools.partial(torch_equals_plain, kind)
            found[f"torch-{kind}-{world}"] = Cell(run, world, full=(kind, world) not in (("1f1b", 2), ("interleaved", 2)))
    return found


CELLS = torch_cells()
