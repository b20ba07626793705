"""DeepSpeed engines of ZeRO 0, 1 and 2 over two gloo ranks, with and without plans."""

from __future__ import annotations

import functools
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import memplan
from tests.ranks.spawn import Cell
from tests.support.deepspeed_runs import (
    BATCH,
    DTYPES,
    BranchingNet,
    Net,
    Setting,
    batch,
    engine_for,
    plain,
    step,
    train,
)
from tests.support.meter import gloo_lets_go, profiler_peak
from tests.support.plannings import plannings
from tests.support.zoo import copied, first_difference


def compare_training(
    setting: Setting, section: dict[str, Any] | None = None, kind: type[nn.Module] = Net
) -> str | None:
    return first_difference(plain(setting, kind), train(setting, section or setting.section, kind), "result")


def compare_from_file() -> str | None:
    """A sample, and the config in a file."""
    setting = Setting(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(setting.config(setting.section)))
        torch.manual_seed(3)
        planned = train(setting, setting.section, config=str(path), sample=batch())
    return first_difference(plain(setting), planned, "result")


def compare_life(stage: int, section: dict[str, Any] | None = None) -> str | None:
    """Evaluation between steps, a checkpoint that is loaded into another engine, and short last batches."""

    def live(section: dict[str, Any] | None, folder: str) -> Any:
        results: list[Any] = []
        for resumed in (False, True):
            with engine_for(Setting(stage), section) as engine:
                if resumed:
                    engine.load_checkpoint(folder)
                for size in (BATCH, BATCH, 40, BATCH, 40):
                    results.append(copied(step(engine, batch("float32", size))))
                    engine.eval()
                    with torch.no_grad():
                        results.append(copied(engine(batch("float32", 8))))
                    engine.train()
                    results.append(float(engine.get_global_grad_norm() or 0.0))
                results.append(copied(engine.module_state_dict()))
                if not resumed:
                    engine.save_checkpoint(folder)
                if section is not None:
                    plan = memplan.plan_of(engine.module)
                    assert plan is not None
                    memplan.remove(engine.module)
                    results.append(copied(step(engine, batch())))
                else:
                    results.append(copied(step(engine, batch())))
        return results

    outcomes = []
    for each in (None, section or Setting(stage).section):
        with tempfile.TemporaryDirectory() as folder:
            shared = [folder]
            torch.distributed.broadcast_object_list(shared)
            outcomes.append(live(each, shared[0]))
            torch.distributed.barrier()
    return first_difference(*outcomes, "result")


def compare_uneven(setting: Setting) -> str | None:
    """Ranks whose batches are of other sizes, as a sampler's last ones are: first on one rank, then on both."""

    def run(section: dict[str, Any] | None) -> Any:
        short = (False, torch.distributed.get_rank() == 1, True, torch.distributed.get_rank() == 0, False)
        with engine_for(setting, section) as engine:
            losses = [copied(step(engine, batch(setting.dtype, 40 if less else BATCH))) for less in short]
            assert section is None or memplan.plan_of(engine.module) is not None
            return losses, {n: copied(p) for n, p in engine.module.named_parameters()}, torch.get_rng_state()

    return first_difference(run(None), run(setting.section), "result")


def compare_sizes(setting: Setting) -> str | None:
    """Ranks whose batches have sizes of their own, all of which one capture serves."""
    sizes = [(BATCH, 40, 64, 33, 72, 50, 81), (BATCH, BATCH, 51, 90, 44, 64, 35)][torch.distributed.get_rank()]

    def run(section: dict[str, Any] | None) -> Any:
        with engine_for(setting, section) as engine:
            losses = [copied(step(engine, batch(setting.dtype, size))) for size in sizes]
            return losses, {n: copied(p) for n, p in engine.module.named_parameters()}, torch.get_rng_state()

    with plannings() as reasons:
        difference = first_difference(run(None), run(setting.section), "result")
    return difference or (f"planned {len(reasons)} times: {reasons}" if len(reasons) > 2 else None)


def compare_scaled(stage: int) -> str | None:
    """Float16 with a loss scale that is too large at first, so that steps are skipped. DeepSpeed has float16 on GPUs
    alone, and goes by what the accelerator says of itself."""
    from deepspeed.accelerator import get_accelerator

    from memplan.integrations.deepspeed import initialize

    def run(section: dict[str, Any] | None) -> Any:
        torch.manual_seed(0)
        net = Net().train()
        fp16 = {"enabled": True, "initial_scale_power": 17, "hysteresis": 1, "loss_scale_window": 2}
        config = Setting(stage).config(section) | {"bf16": {"enabled": False}, "fp16": fp16}
        with mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True):
            engine, *_ = initialize(model=net, model_parameters=net.parameters(), config=config)
        torch.manual_seed(10 + torch.distributed.get_rank())
        found: list[Any] = []
        for _ in range(7):
            found.append(copied(step(engine, batch().half())))
            found.append((engine.skipped_steps, float(engine.optimizer.cur_scale)))
            found.append([copied(p) for p in engine.optimizer.fp32_partitioned_groups_flat] if stage == 3 else
                         [copied(p) for p in net.parameters()])  # fmt: skip
        assert 2 < engine.skipped_steps < 6, f"{engine.skipped_steps} steps were skipped"
        plan = memplan.plan_of(net)
        assert section is None or (isinstance(plan, memplan.Plan) and plan.recomputed)
        engine.destroy()
        return found

    return first_difference(run(None), run(Setting(stage).section | {"budget": 0.75}), "result")


def measured_peak(engine: Any, x: torch.Tensor) -> int:
    """What the engine's next step, which must be its first one with a plan, is measured to hold."""
    from memplan.integrations.deepspeed.memory import held_bytes_of

    before_bytes = held_bytes_of(engine, x)
    step(engine, x)
    grown_bytes = memplan.grown_bytes(engine.module)
    assert grown_bytes is not None
    return before_bytes + grown_bytes


def check_budgets(stage: int) -> str | None:
    """Ranks with budgets of their own keep within them, and compute what ranks without plans do."""
    per_rank = {"0": 380_000, "1": 560_000}
    rank = torch.distributed.get_rank()
    section = {"budget": "1GiB", "per_rank": per_rank, "costs": "estimate"}
    with engine_for(Setting(stage), section) as engine:
        peak_bytes, plan = measured_peak(engine, batch()), memplan.plan_of(engine.module)
    assert plan is not None
    if plan.problem.budget_bytes != per_rank[str(rank)]:
        return f"planned for {plan.problem.budget_bytes} bytes"
    if not peak_bytes <= plan.peak_bytes <= per_rank[str(rank)]:
        return f"measured {peak_bytes} bytes, predicted {plan.peak_bytes}"
    return first_difference(plain(Setting(stage)), train(Setting(stage), section), "result")


def check_whole_step(setting: Setting, size: int = BATCH) -> str | None:
    """By the allocator's own record a step, buckets, reduction and the optimizer's part included, is within its budget.

    The steps before it have made the optimizer's state and all plans. With few rows the optimizer's part is the peak.
    """
    from memplan.integrations.deepspeed.memory import held_bytes_of

    section = setting.section | {"costs": "measure"} | ({} if size == BATCH else {"budget": "1GiB"})
    with engine_for(setting, section) as engine:
        for _ in range(2 * setting.accumulation):
            step(engine, batch(setting.dtype, size))
        batches = [batch(setting.dtype, size) for _ in range(setting.accumulation)]
        held_bytes = held_bytes_of(engine, batches[0])

        def steps() -> None:
            for x in batches:
                step(engine, x)

        with gloo_lets_go():
            peak_bytes = profiler_peak(steps, held_bytes)
        plan = memplan.plan_of(engine.module)
    assert plan is not None
    return None if peak_bytes <= plan.peak_bytes else f"held {peak_bytes} bytes, predicted {plan.peak_bytes}"


def check_no_budget(stage: int) -> str | None:
    """Without a budget, plans hold from the first step on, in what each rank's device has room for."""
    rooms = [400_000, 380_000] if stage < 3 else [620_000, 560_000]
    room = rooms[torch.distributed.get_rank()]
    with mock.patch("memplan.api.automatic_bytes", return_value=room):
        with engine_for(Setting(stage), {"costs": "estimate"}) as engine:
            step(engine, batch())
            plan = memplan.plan_of(engine.module)
        planned = train(Setting(stage), {"costs": "estimate"})
    if plan is None or plan.problem.budget_bytes != (room if stage < 3 else min(rooms)):
        return f"the budget is not that of {rooms}, but that of {plan}"
    return first_difference(plain(Setting(stage)), planned, "result")


@contextmanager
def messages() -> Iterator[list[str]]:
    """What the logger of memplan says on this rank."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger("memplan"), Keep()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def check_log() -> str | None:
    """Rank 0 has a line for the plans of both ranks, and one for their peaks; where budgets differ, two of each."""
    problem = None
    for per_rank, count in (({}, 1), ({"1": "560kB"}, 2)):
        section = {"budget": "380kB", "per_rank": per_rank, "costs": "estimate"}
        with messages() as said, engine_for(Setting(2), section) as engine:
            for _ in range(3):
                step(engine, batch())
                torch.distributed.barrier()
            hooks = len(engine.module._forward_hooks)
        for words in ("predicted peak", "the first step peaked at"):
            lines = [line for line in said if words in line and line.startswith("stage 0, rank")]
            if len(lines) != (count if torch.distributed.get_rank() == 0 else 0):
                problem = f"said {said}"
        if hooks != 1:  # that of the engine itself
            problem = problem or "the watch goes on though all is told"
    return problem


def check_a_bucket_too_large() -> str | None:
    """Rank 0 says how much of the budget a bucket takes that is never filled, and which size would do."""
    from memplan.integrations.deepspeed import attach

    config = Setting(2).config({"budget": 0.9, "costs": "estimate"})
    config["zero_optimization"]["reduce_bucket_size"] = 50_000
    with messages() as said, engine_for(Setting(2), config=config) as engine:
        attach(engine, batch())
        count = sum(p.numel() for p in engine.module.parameters())
    told = [line for line in said if "reduce_bucket_size of 50000" in line and f"Set it to {count} in" in line]
    return None if bool(told) == (torch.distributed.get_rank() == 0) else f"said {said}"


def refused(words: str, run: Callable[[], object]) -> str | None:
    try:
        run()
    except ValueError as error:
        return None if words in str(error) else f"refused with: {error}"
    return "not refused"


def check_refusals() -> str | None:
    from memplan.integrations.deepspeed import attach

    with engine_for(Setting(2)) as engine:
        engine.config["memplan"] = {"reserve": 0.1}
        problem = refused("has no key 'reserve'", lambda: attach(engine))
        engine.config["memplan"] = {"per_rank": {"2": "1GiB"}}
        problem = problem or refused("ranks 0 to 1", lambda: attach(engine))
        engine.config["memplan"] = {"budget": 0.6}
        engine.has_moe_layers = True
        problem = problem or refused("mixture-of-experts", lambda: attach(engine))
        engine.has_moe_layers = False
        engine._config.compile_config.deepcompile = True
        problem = problem or refused("deepcompile", lambda: attach(engine))
        engine._config.compile_config.deepcompile = False
        engine._config.flops_profiler_config.enabled = True
        problem = problem or refused("flops_profiler", lambda: attach(engine))
        engine._config.flops_profiler_config.enabled = False
        engine.compile(backend="eager")
        problem = problem or refused("engine.compile()", lambda: attach(engine))
    return problem


MATRIX = [Setting(s, dtype, accumulation) for s in (0, 1, 2) for dtype in DTYPES for accumulation in (1, 2)]
QUICK = {Setting(0), Setting(1, "bfloat16", 2), Setting(2, "float32", 2)}
VARIED = [
    Setting(1, variant="overlap"),
    Setting(2, "float32", 2, "overlap"),
    Setting(2, "float32", 2, "scattered"),
    Setting(2, "float32", 2, "round robin"),
    Setting(2, "float32", 2, "reduced whole"),
    Setting(1, "bfloat16", 2, "fp32 sums"),
    Setting(1, "bfloat16", 2, "fp32 sums at once"),
    Setting(2, "bfloat16", 2, "fp32 sums"),
    Setting(2, variant="autocast"),
]
ON_HOST = Setting(2, "float32", 2, "optimizer on the host")  # which the allocator's record of a CPU can't tell apart
NEEDS = ("deepspeed", "g++")  # DeepSpeed builds an op of its own when it is first used


def cell(run: Callable[..., str | None], *arguments: Any, full: bool = False, **keywords: Any) -> Cell:
    return Cell(functools.partial(run, *arguments, **keywords), full=full, needs=NEEDS)


CELLS = {
    f"{setting}": cell(compare_training, setting, full=setting not in QUICK) for setting in [*MATRIX, *VARIED, ON_HOST]
}
CELLS |= {f"whole step of {s}": cell(check_whole_step, s, full=s != Setting(2)) for s in [*MATRIX, *VARIED]}
CELLS |= {f"whole step of {s}, few rows": cell(check_whole_step, s, 8, full=True) for s in [*MATRIX, *VARIED]}
CELLS |= {f"life of ZeRO {stage}": cell(compare_life, stage, full=stage == 1) for stage in (1, 2)}
CELLS |= {
    f"uneven batches, ZeRO {stage}": cell(compare_uneven, Setting(stage, dtype), full=stage < 2)
    for stage, dtype in ((0, "float32"), (1, "bfloat16"), (2, "float32"))
}
CELLS |= {
    f"sizes of its own on each rank, ZeRO {stage}": cell(compare_sizes, Setting(stage), full=stage < 2)
    for stage in (0, 1, 2)
}
CELLS |= {f"skipped steps, ZeRO {stage} float16": cell(compare_scaled, stage, full=stage != 2) for stage in (1, 2, 3)}
CELLS |= {f"budgets of ZeRO {stage}": cell(check_budgets, stage, full=stage < 2) for stage in (0, 1, 2)}
CELLS |= {
    "four ranks, ZeRO 2": Cell(  # of so many the order in which they are summed depends on the place in a bucket
        functools.partial(compare_training, Setting(2)), world=4, full=True, needs=NEEDS
    ),
    "from a file": cell(compare_from_file, full=True),
    "unplanned": cell(compare_training, Setting(2), {"budget": "1GiB"}, BranchingNet),
    "activations on the host": cell(
        compare_training, Setting(2), {"budget": 0.4, "host_budget": "100MiB", "costs": "estimate"}, full=True
    ),
    **{f"no budget, ZeRO {stage}": cell(check_no_budget, stage, full=stage < 2) for stage in (0, 2, 3)},
    "log": cell(check_log),
    "a bucket too large": cell(check_a_bucket_too_large),
    "refusals": cell(check_refusals),
}
