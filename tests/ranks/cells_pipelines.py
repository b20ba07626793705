"""Pipelines of two and four stages over gloo ranks, with and without plans: PyTorch's schedules and DeepSpeed's."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

import memplan
from memplan.integrations.pipelining import in_flight, plan_stages
from tests.ranks.spawn import Cell
from tests.support.meter import LiveMeter
from tests.support.zoo import copied, first_difference

WIDTH, ROWS, MICROBATCHES, STEPS = 16, 64, 8, 5
TORCH = ("torch>=2.13",)  # whose schedules can be planned
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


def torch_budget(kind: str, share: float) -> int:
    """Bytes for this rank's stages: a share of the way from the least to the unplanned peak, another on each rank."""
    budgets: dict[int, Any] = dict.fromkeys(in_flight(torch_schedule(kind)[0]), 1.0)
    peaks = []
    for _ in range(2):
        schedule, parts = torch_schedule(kind)
        stages = plan_stages(schedule, budgets, costs="estimate")
        torch_steps(schedule, parts, 1)
        peaks.append(stages.peak_bytes)
        budgets = {index: plan.floor_bytes for index, plan in stages.plans.items()}
    most, least = peaks
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
    stages = plan_stages(schedule, budget, costs="estimate")
    with counted(schedule) as most:
        found = torch_steps(schedule, parts)
    measured = torch_peak(schedule, parts)
    rank, world = rank_of()
    expected = {i: n for i, n in enumerate(COUNTS[kind, world]) if i % world == rank}
    if not most == stages.in_flight == expected:
        return f"in flight: counted {most}, predicted {stages.in_flight}, known {expected}"
    if not any(plan.recomputed for plan in stages.plans.values()):
        return "nothing is recomputed"
    if any(len(stage.whole.forward.steps) != 1 for stage in stages._stages.values()):
        return "a stage was planned more than once"
    if not measured <= stages.peak_bytes <= budget:
        return f"peaks at {measured}, predicted {stages.peak_bytes}, of {budget}"
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


def torch_goes_on_and_ends() -> str | None:
    """Without outputs, evaluation between steps, other microbatches, and after the plans were taken off."""
    found = []
    for planned in (False, True):
        schedule, parts = torch_schedule("interleaved")
        forwards = [part.forward for part in parts]
        if planned:
            stages = plan_stages(schedule, "1GiB", return_outputs=False, costs="estimate", config="rotor")
        rows = torch_steps(schedule, parts, 1, wanted=False)
        first, last = rank_of()[0] == 0, rank_of()[0] == 1
        x, losses = torch.ones(MICROBATCHES * ROWS, WIDTH), list[torch.Tensor]()
        output = schedule.eval(*([x] if first else []), target=x if last else None, losses=losses if last else None)
        rows += [copied(output), copied(losses), *torch_steps(schedule, parts, 1, wanted=False)]
        if planned:
            stages.remove()
            stages.remove()  # does nothing
            if [part.forward for part in parts] != forwards or schedule._loss_fn is not loss_of:
                return "plans were not taken off"
        found.append([*rows, *torch_steps(schedule, parts, 1)])
    return first_difference(*found, "step")


def torch_refuses() -> str | None:
    """What a plan can't be combined with is refused before anything runs, with the fix."""
    rank, world = rank_of()
    blocks = layers(2 * world)

    def stages(**options: Any) -> list[PipelineStage]:
        mine = [i for i in range(2 * world) if i % world == rank]
        return [PipelineStage(blocks[i], i, 2 * world, torch.device("cpu"), **options) for i in mine]

    wrapped = PipelineStage(nn.parallel.DistributedDataParallel(Block()), rank, world, torch.device("cpu"))
    pair = PipelineStage(Block(), rank, world, torch.device("cpu"))
    cases = [
        (ScheduleInterleavedZeroBubble(stages(), MICROBATCHES, loss_of), {}, "zero bubble.*Use Schedule1F1B"),
        (ScheduleInterleaved1F1B(stages(dw_builder=object), MICROBATCHES, loss_of), {}, "dw_builder.*Leave it out"),
        (ScheduleInterleaved1F1B(stages(), MICROBATCHES), {}, "no loss_fn.*Give it one"),
        (ScheduleGPipe(wrapped, MICROBATCHES, loss_of), {}, "DistributedDataParallel.*Leave the wrapper out"),
        (ScheduleGPipe(pair, MICROBATCHES, loss_of), {"budget": {7: 1.0}}, r"stages \[7\].*runs stages"),
        (ScheduleGPipe(pair, MICROBATCHES, loss_of), {"in_flight": 2}, "takes no in_flight="),
    ]
    for schedule, options, message in cases:
        try:
            plan_stages(schedule, options.pop("budget", 1.0), **options)
        except (TypeError, ValueError) as error:
            if not re.search(message, str(error)):
                return f"{message!r} does not match {str(error)!r}"
        else:
            return f"{message!r} was not refused"
    return None


def torch_cells() -> dict[str, Cell]:
    found = {
        "torch-without-shapes": Cell(
            functools.partial(torch_equals_plain, "1f1b", static=False), full=True, needs=TORCH
        ),
        "torch-goes-on-and-ends": Cell(torch_goes_on_and_ends, needs=TORCH),
        "torch-refuses": Cell(torch_refuses, needs=TORCH),
    }
    for kind in SCHEDULES:
        for world in (2, 4):
            run = functools.partial(torch_equals_plain, kind)
            fast = (kind, world) == ("1f1b", 2)
            found[f"torch-{kind}-{world}"] = Cell(run, world, full=not fast, needs=TORCH)
    return found


# -- DeepSpeed --------------------------------------------------------------------------------------------------------


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "zero1": {"zero_optimization": {"stage": 1, "reduce_bucket_size": 2000}, "zero_allow_untested_optimizer": True},
    "bf16": {"bf16": {"enabled": True}},
    "tied": {},
}


class Table(nn.Module):
    """Tokens to vectors on the first stage, and vectors to scores on the last, with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 40 * WIDTH).view(40, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.weight)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


def token_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def deepspeed_engine(stages: int, kind: str, interval: int) -> Any:
    """The engine of this rank. interval: of DeepSpeed's activation checkpointing, in layers."""
    import deepspeed
    from deepspeed.pipe import PipelineModule, TiedLayerSpec

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    parts: list[Any] = list(layers(2 * stages))
    if kind == "tied":
        parts = [TiedLayerSpec("table", Table), *parts, TiedLayerSpec("table", Table, forward_fn=Table.scores)]
    net = PipelineModule(
        parts,
        num_stages=stages,
        loss_fn=token_loss if kind == "tied" else loss_of,
        partition_method="uniform",
        activation_checkpoint_interval=interval,
    )
    config = {
        "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": MICROBATCHES, "steps_per_print": None,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    }  # fmt: skip
    config |= CONFIGS[kind]
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    return engine


def deepspeed_steps(engine: Any, count: int = STEPS) -> list[Any]:
    """What some steps leave: losses, parameters, the generator, and the loss of an evaluation."""
    torch.manual_seed(20 + engine.grid.get_data_parallel_id())
    dtype = next(engine.module.parameters()).dtype
    data = [tuple(torch.randn(2, ROWS, WIDTH).to(dtype)) for _ in range(count * MICROBATCHES)]
    if engine.module.loss_fn is token_loss:
        data = [tuple(torch.randint(0, 40, (2, ROWS, 4))) for _ in range(count * MICROBATCHES)]
    torch.manual_seed(30 + torch.distributed.get_rank())
    batches, found = iter(data), list[Any]()
    for _ in range(count):
        loss = engine.train_batch(data_iter=batches)
        found += [copied(loss), [copied(p) for p in engine.module.parameters()]]
    found.append(torch.get_rng_state())
    return [*found, copied(engine.eval_batch(data_iter=iter(data)))]


@functools.cache
def deepspeed_plain(stages: int, kind: str) -> list[Any]:
    return deepspeed_steps(deepspeed_engine(stages, kind, 0))


def deepspeed_planned(stages: int, kind: str, budget: Any) -> Any:
    from memplan.integrations.deepspeed.pipeline import apply_to_stage

    engine = deepspeed_engine(stages, kind, 1)
    optimizer = engine.basic_optimizer if kind == "plain" else None
    apply_to_stage(engine, None, budget, costs="estimate", accumulate=True, optimizer=optimizer)
    return engine


@contextmanager
def counted_passes(engine: Any) -> Iterator[list[int]]:
    """Forwards less backwards of the stage, and the most of that, while this lasts."""
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass

    before = engine._INSTRUCTION_MAP
    counts = [0, 0]

    def around(instruction: Any, step: int) -> Callable[..., Any]:
        def call(engine: Any, buffer_id: int) -> None:
            counts[0] += step if engine.module.training else 0
            counts[1] = max(counts)
            before[instruction](engine, buffer_id)

        return call

    engine._INSTRUCTION_MAP = {**before, ForwardPass: around(ForwardPass, 1), BackwardPass: around(BackwardPass, -1)}
    yield counts
    engine._INSTRUCTION_MAP = before


def deepspeed_peak(engine: Any) -> int:
    """Bytes that a rank holds at most while it trains on one batch, what is there before included."""
    parameters = list(engine.module.parameters())
    batches = iter([(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)) for _ in range(MICROBATCHES)])
    meter = LiveMeter()
    meter.register([parameters, [p.grad for p in parameters], list(engine.basic_optimizer.state.values())])
    meter.register([engine.pipe_recv_buf, engine.grad_layer, list(engine.pipe_buffers.values())])
    with meter:
        engine.train_batch(data_iter=batches)
    return meter.peak_bytes


def deepspeed_equals_plain(stages: int, kind: str = "plain") -> str | None:
    """Bits of the plain run without checkpointing, counts as foreseen, and within each stage's own budget."""
    from memplan.integrations.deepspeed.pipeline import in_flight as predicted

    plain, engine = deepspeed_plain(stages, kind), deepspeed_planned(stages, kind, 1.0)
    deepspeed_steps(engine, 1)
    free = memplan.plan_of(engine.module)
    assert free is not None
    share = 0.2 + 0.1 * engine.stage_id
    budget = int(free.floor_bytes + share * (free.baseline_peak_bytes - free.floor_bytes))
    engine = deepspeed_planned(stages, kind, budget)
    with counted_passes(engine) as counts:
        found = deepspeed_steps(engine)
    measured, plan = deepspeed_peak(engine) if kind == "plain" else 0, memplan.plan_of(engine.module)
    assert plan is not None
    known = min(stages - engine.stage_id, MICROBATCHES)
    if not counts[1] == predicted(engine) == plan.problem.in_flight == known:
        return f"in flight: counted {counts[1]}, predicted {predicted(engine)}, known {known}"
    if not plan.recomputed:
        return "nothing is recomputed"
    if len(engine.module.forward.steps) != 1:
        return "the stage was planned more than once"
    if kind == "plain" and not measured <= plan.peak_bytes <= budget:
        return f"peaks at {measured}, predicted {plan.peak_bytes}, of {budget}"
    return first_difference(plain, found, "step")


def deepspeed_removed() -> str | None:
    """Without its plan a stage is as it was, and trains on as if it had never had one; also after a refusal."""
    from memplan.integrations.deepspeed.pipeline import apply_to_stage

    def put_on(engine: Any) -> list[Any]:
        """What a plan changes."""
        module = engine.module
        hooks = len(module._forward_pre_hooks), len(module._forward_hooks)
        return [hooks, "forward" in vars(module), module.activation_checkpoint_interval,
                dict(engine._INSTRUCTION_MAP), "_INSTRUCTION_MAP" in vars(engine)]  # fmt: skip

    plain, engine = (deepspeed_engine(2, "plain", 1) for _ in range(2))
    before = put_on(engine)
    for _ in range(2):  # the second plan takes the place of the first
        apply_to_stage(engine, None, 1.0, costs="estimate")
    found = first_difference(deepspeed_steps(plain, 1), deepspeed_steps(engine, 1), "step")
    if put_on(engine) == before or memplan.plan_of(engine.module) is None:
        return "there was no plan"
    memplan.remove(engine.module)
    if put_on(engine) != before:
        return f"left {put_on(engine)}, was {before}"
    found = found or first_difference(deepspeed_steps(plain, 1), deepspeed_steps(engine, 1), "step without")
    try:
        apply_to_stage(engine, None, "no budget", costs="estimate")
    except ValueError:
        return found if put_on(engine) == before else f"a refusal left {put_on(engine)}, was {before}"
    return "a budget that is none was not refused"


class Two(nn.Module):
    """Hands two tensors on."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.block(x), x + 1


def deepspeed_refuses() -> str | None:
    """What a plan can't be combined with, with the fix; the second when the stage's first forward comes."""
    from memplan.integrations.deepspeed.pipeline import apply_to_stage

    engine = deepspeed_engine(2, "plain", 0)
    engine.module.seed_layers = True
    for change, message in (("seed_layers", "Say seed_layers=False"), ("is_pipe_partitioned", "pipe_partitioned")):
        try:
            apply_to_stage(engine, None, 1.0)
        except ValueError as error:
            if message not in str(error):
                return str(error)
        else:
            return f"{change} was not refused"
        engine.module.seed_layers, engine.is_pipe_partitioned = False, True
    engine.is_pipe_partitioned = False
    engine.module.forward_funcs = [Two().train()]
    if engine.stage_id == 0:
        apply_to_stage(engine, None, 1.0, costs="estimate")
        try:
            engine.module(torch.ones(ROWS, WIDTH))
        except ValueError as error:
            return None if "hands 2 floating-point tensors on" in str(error) else str(error)
        return "two tensors between stages were not refused"
    return None


def deepspeed_cells() -> dict[str, Cell]:
    found = {
        "deepspeed-refuses": Cell(deepspeed_refuses, needs=("deepspeed",)),
        "deepspeed-removed": Cell(deepspeed_removed, needs=("deepspeed",)),
    }
    for world, stages, kind in ((2, 2, "plain"), (2, 2, "zero1"), (2, 2, "bf16"), (4, 4, "plain"), (4, 2, "plain"),
                                (4, 2, "zero1"), (4, 2, "bf16"), (2, 2, "tied")):  # fmt: skip
        run = functools.partial(deepspeed_equals_plain, stages, kind)
        name = f"deepspeed-pp{stages}-dp{world // stages}-{kind}"
        found[name] = Cell(run, world, full=(world, kind) != (2, "plain"), needs=("deepspeed",))
    return found


CELLS = torch_cells() | deepspeed_cells()
