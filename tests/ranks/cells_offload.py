"""Pipelines whose stages offload, over gloo ranks: copies on streams that are as late as they may be, or early at
random, and hold NaN until then."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import memplan
from memplan.installed.planned_forward import planned_forward
from memplan.integrations.pipelining import plan_stages
from memplan.problem.schedule import Boundary
from memplan.runtime.host import transfers as engine
from memplan.runtime.host.streams import Streams
from tests.ranks.cells_deepspeed_sections import attached
from tests.ranks.cells_pipelines import (
    MICROBATCHES,
    ROWS,
    TORCH,
    WIDTH,
    deepspeed_plain,
    deepspeed_steps,
    rank_of,
    torch_plain,
    torch_schedule,
    torch_steps,
)
from tests.ranks.spawn import Cell
from tests.support.meter import LiveMeter
from tests.support.offloads import CountingStreams, DeviceMeter, host_resident_bytes
from tests.support.zoo import first_difference

HOST = "1MiB"


@contextmanager
def copies_on_fakes(seed: int | None) -> Iterator[None]:
    """Stages that are planned meanwhile copy on counted fake streams."""
    before = engine.streams_for

    def streams_for(device: torch.device) -> Streams:
        streams = CountingStreams(seed)
        streams.meter = LiveMeter()
        return streams

    engine.streams_for = streams_for
    try:
        yield
    finally:
        engine.streams_for = before


def transfers_of(model: Any) -> engine.Transfers:
    planned = planned_forward(model)
    assert planned is not None
    return planned.steps[0].runner.store.transfers  # type: ignore[no-any-return,union-attr]


def below_the_floor(floor_bytes: int, least_bytes: int) -> int:
    """A budget that takes copies: half of the way from what they can do with to what recomputing alone can."""
    assert least_bytes < floor_bytes
    return (least_bytes + floor_bytes) // 2


def crossing(plan: memplan.Plan) -> int:
    """Bytes that a microbatch has on the host while it waits."""
    return plan.timeline.host_bytes[plan.schedule.index(Boundary())] // plan.problem.in_flight


# -- torch.distributed.pipelining -------------------------------------------------------------------------------------


def torch_stages(kind: str, budgets: Any, steps: int = 1, **options: Any) -> tuple[Any, Any, Any, list[Any]]:
    """A planned schedule, its submodules, its plans, and what some steps leave."""
    schedule, parts = torch_schedule(kind)
    stages = plan_stages(schedule, budgets, costs="estimate", **options)
    return schedule, parts, stages, torch_steps(schedule, parts, steps)


@functools.cache
def torch_budgets(kind: str) -> dict[int, int]:
    """By stage of this rank; recomputing alone fits none of them."""
    floors = []
    for options in ({}, {"host_budget": HOST}):
        own = dict.fromkeys(torch_stage_indices(kind), 1.0)
        stages = torch_stages(kind, own, **options)[2]
        floors.append({index: plan.floor_bytes for index, plan in stages.plans.items()})
    return {index: below_the_floor(floors[0][index], floors[1][index]) for index in floors[0]}


def torch_stage_indices(kind: str) -> list[int]:
    rank, world = rank_of()
    return [i for i in range(2 * world if kind == "interleaved" else world) if i % world == rank]


def torch_equals_plain(kind: str) -> str | None:
    """Bits of the plain run, bytes of each stage on device and host as planned."""
    plain, budgets = torch_plain(kind), torch_budgets(kind)
    for seed in (None, 0):
        with copies_on_fakes(seed):
            schedule, parts, stages, found = torch_stages(kind, budgets, len(plain) // 4, host_budget=HOST)
            plans = stages.plans
            for index, plan in plans.items():
                if not plan.offloaded_bytes or (plan.problem.in_flight > 1 and not crossing(plan)):
                    return f"stage {index} has nothing on the host while it waits"
                if host_resident_bytes(plan.problem.graph):
                    return f"stage {index} has parameters on the host"
            wrong = torch_bytes(schedule, parts, stages, budgets) if len(plans) == 1 else None
        wrong = wrong or first_difference(plain, found, "step")
        if wrong:
            return f"copies of seed {seed}: {wrong}"
    return None


def torch_bytes(schedule: Any, parts: Any, stages: Any, budgets: dict[int, int]) -> str | None:
    """What is wrong with the bytes that the one stage of this rank holds while a step runs.

    To the byte on the first stage; of the last one's buffers PyTorch has less at the peak than is counted.
    """
    (plan,), (stage,) = stages.plans.values(), stages._stages.values()
    transfers, (budget,) = transfers_of(stage.whole), budgets.values()
    streams = transfers.streams
    assert isinstance(streams, CountingStreams)
    if streams.host_bytes != plan.host_bytes or transfers.allocations != plan.problem.in_flight:
        return f"{streams.host_bytes} bytes on the host in {transfers.allocations} slabs, planned {plan.host_bytes}"
    transfers.slabs.clear()  # so that the meter sees new ones
    rank, world = rank_of()
    x, target = torch.randn(MICROBATCHES * ROWS, WIDTH), torch.randn(MICROBATCHES * ROWS, WIDTH)
    tables = (stage.stage.args_recv_info, stage.stage.grad_recv_info)
    meter = DeviceMeter(streams, 0)
    meter.register([[p, p.grad] for p in parts.parameters()])
    meter.register([info.buffer for table in tables for row in table.values() for info in row])
    first, last = rank == 0, rank == world - 1
    meter.register([[x] if first else [], [target] if last else []])
    with meter:
        schedule.step(*([x] if first else []), target=target if last else None)
    if streams.host_bytes != plan.host_bytes:
        return f"{streams.host_bytes} bytes on the host, planned {plan.host_bytes}"
    measured = meter.device_peak_bytes
    if not measured <= plan.peak_bytes <= budget or (first and measured != plan.live_peak_bytes):
        return f"peaks at {measured}, predicted {plan.live_peak_bytes}, of {budget}"
    return None


def torch_misses_a_wait(kind: str) -> str | None:
    """A stage whose copies are not waited for gives wrong numbers, on every rank."""
    plain, budgets = torch_plain(kind), torch_budgets(kind)
    before = engine.Transfers.wait
    engine.Transfers.wait = lambda self, ticket: ticket.data  # type: ignore[method-assign]
    try:
        with copies_on_fakes(None):
            found = torch_stages(kind, budgets, len(plain) // 4, host_budget=HOST)[3]
    finally:
        engine.Transfers.wait = before  # type: ignore[method-assign]
    return None if first_difference(plain, found, "step") else "nobody noticed"


def torch_shares_a_host_budget() -> str | None:
    """Stages of one rank have equal parts of a host budget, and those that are given in a dict their own."""
    plain = torch_plain("interleaved")
    own = torch_budgets("interleaved")
    with copies_on_fakes(0):
        *_, stages, found = torch_stages("interleaved", sum(own.values()), len(plain) // 4, host_budget=HOST)
    if not 0 < stages.host_bytes <= memplan.parse_bytes(HOST):
        return f"{stages.host_bytes} bytes on the host"
    wrong = first_difference(plain, found, "step")
    for given, message in (
        ({7: HOST}, r"host budgets are for stages \[7\].*runs stages"),
        (0.5, "host_budget is an int or a str"),
        (0, "more than 0 bytes"),
    ):
        try:
            plan_stages(torch_schedule("1f1b")[0], 1.0, host_budget=given)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            wrong = wrong or (None if re.search(message, str(error)) else f"{message!r} does not match {error}")
        else:
            wrong = wrong or f"{given!r} was not refused"
    return wrong


# -- DeepSpeed --------------------------------------------------------------------------------------------------------


def deepspeed_equals_plain(stages: int, kind: str = "plain") -> str | None:
    """The same with budgets for device and host in the section, by stage."""
    plain = deepspeed_plain(stages, kind)
    floors = []
    for host in ({}, {"host_budget": HOST}):
        engine_ = attached(stages, {"budget": 1.0, **host}, kind)
        deepspeed_steps(engine_, 1)
        plan = memplan.plan_of(engine_.module)
        assert plan is not None
        floors.append(plan.floor_bytes)
    budgets: list[Any] = [None] * rank_of()[1]
    torch.distributed.all_gather_object(budgets, (engine_.stage_id, below_the_floor(*floors)))
    per_stage = [max(b for s, b in budgets if s == stage) for stage in range(stages)]
    section = {"per_stage": per_stage, "host_per_stage": [HOST] * stages}
    for seed in (None, 0):
        with copies_on_fakes(seed):
            engine_ = attached(stages, section, kind)
            found = deepspeed_steps(engine_)
            wrong = deepspeed_host_bytes(engine_)
            if kind == "plain":
                wrong = wrong or deepspeed_device_bytes(engine_, per_stage[engine_.stage_id])
        wrong = wrong or first_difference(plain, found, "step")
        if wrong:
            return f"copies of seed {seed}: {wrong}"
    return None


def deepspeed_host_bytes(engine_: Any) -> str | None:
    """What is wrong with the host memory that a stage has taken in some steps."""
    plan, streams = memplan.plan_of(engine_.module), transfers_of(engine_.module).streams
    assert plan is not None
    assert isinstance(streams, CountingStreams)
    if not plan.offloaded_bytes or (plan.problem.in_flight > 1 and not crossing(plan)):
        return "nothing is on the host while a microbatch waits"
    if streams.host_bytes != plan.host_bytes:
        return f"{streams.host_bytes} bytes on the host, planned {plan.host_bytes}"
    return None


def deepspeed_device_bytes(engine_: Any, budget: int) -> str | None:
    """What is wrong with the bytes that a stage holds on the device while it trains on one batch."""
    plan, transfers = memplan.plan_of(engine_.module), transfers_of(engine_.module)
    assert plan is not None
    assert isinstance(transfers.streams, CountingStreams)
    transfers.slabs.clear()  # so that the meter sees new host memory
    parameters = list(engine_.module.parameters())
    batches = iter([(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)) for _ in range(MICROBATCHES)])
    meter = DeviceMeter(transfers.streams, 0)
    meter.register([parameters, [p.grad for p in parameters], list(engine_.basic_optimizer.state.values())])
    meter.register([engine_.pipe_recv_buf, engine_.grad_layer, list(engine_.pipe_buffers.values())])
    with meter:
        engine_.train_batch(data_iter=batches)
    if not meter.device_peak_bytes <= plan.peak_bytes <= budget:
        return f"peaks at {meter.device_peak_bytes}, predicted {plan.peak_bytes}, of {budget}"
    return None


def deepspeed_cell(stages: int, kind: str = "plain", **settings: Any) -> Cell:
    return Cell(functools.partial(deepspeed_equals_plain, stages, kind), needs=("deepspeed", "g++"), **settings)


CELLS = {
    "torch-gpipe": Cell(functools.partial(torch_equals_plain, "gpipe"), full=True, needs=TORCH),
    "torch-1f1b": Cell(functools.partial(torch_equals_plain, "1f1b"), needs=TORCH),
    "torch-interleaved": Cell(functools.partial(torch_equals_plain, "interleaved"), full=True, needs=TORCH),
    "torch-1f1b-4": Cell(functools.partial(torch_equals_plain, "1f1b"), world=4, full=True, needs=TORCH),
    "torch-missing-wait": Cell(functools.partial(torch_misses_a_wait, "1f1b"), needs=TORCH),
    "torch-shared": Cell(torch_shares_a_host_budget, full=True, needs=TORCH),
    "deepspeed-pp2": deepspeed_cell(2),
    "deepspeed-pp2-zero1": deepspeed_cell(2, "zero1", full=True),
    "deepspeed-pp2-bf16": deepspeed_cell(2, "bf16", full=True),
    "deepspeed-pp2-tied": deepspeed_cell(2, "tied", full=True),
    "deepspeed-pp4": deepspeed_cell(4, world=4, full=True),
    "deepspeed-pp2-dp2": deepspeed_cell(2, world=4, full=True),
}
