"""DeepSpeed engines of ZeRO 0, 1 and 2 over two gloo ranks, with and without plans; the Trainer and Accelerate."""

from __future__ import annotations

import functools
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memplan
from tests.meter import profiler_peak
from tests.ranks import Cell
from tests.zoo import copied, first_difference

STEPS = 5
BATCH, WIDTH = 256, 32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SECTION: dict[str, Any] = {"budget": 0.6, "costs": "estimate"}


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


def deepspeed_config(stage: int, dtype: str, accumulation: int, section: dict[str, Any] | None) -> dict[str, Any]:
    """Buckets of two layers and a half, so that ZeRO reduces several of them in one backward pass."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 2600},
        "bf16": {"enabled": dtype == "bfloat16"},
        "steps_per_print": None,
    }
    return config if section is None else config | {"memplan": section}


@contextmanager
def engine_for(
    stage: int, dtype: str = "float32", accumulation: int = 1, section: dict[str, Any] | None = None, **arguments: Any
) -> Iterator[Any]:
    """An engine over a `Net`, planned where there is a section; the data generator is seeded by rank afterwards."""
    from memplan.integrations.deepspeed import initialize

    torch.manual_seed(0)
    net = Net().train()
    config = deepspeed_config(stage, dtype, accumulation, section or {"enabled": False})
    engine, *_ = initialize(model=net, model_parameters=net.parameters(), config=config, **arguments)
    torch.manual_seed(10 + torch.distributed.get_rank())
    try:
        yield engine
    finally:
        engine.destroy()


def batch(dtype: str, size: int = BATCH) -> torch.Tensor:
    return torch.randn(size, WIDTH).to(DTYPES[dtype])


def step(engine: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = engine(x)
    engine.backward(loss)
    engine.step()
    return loss


def train(stage: int, dtype: str, accumulation: int, section: dict[str, Any] | None, **arguments: Any) -> Any:
    """Losses of every micro-batch, parameters after every step, and the generator in the end."""
    results: list[Any] = []
    with engine_for(stage, dtype, accumulation, section, **arguments) as engine:
        for _ in range(STEPS):
            losses = [copied(step(engine, batch(dtype))) for _ in range(accumulation)]
            results.append((losses, {n: copied(p) for n, p in engine.module.named_parameters()}))
        if section is not None:
            plan = memplan.plan_of(engine.module)
            assert plan is not None
            assert plan.recomputed, "the plan runs, and recomputes"
            assert plan.peak_bytes <= plan.problem.budget_bytes
    return results, torch.get_rng_state()


@functools.cache
def plain(stage: int, dtype: str, accumulation: int) -> Any:
    """The run without a plan."""
    return train(stage, dtype, accumulation, None)


def compare_training(stage: int, dtype: str, accumulation: int) -> str | None:
    return first_difference(plain(stage, dtype, accumulation), train(stage, dtype, accumulation, SECTION), "result")


def compare_life(stage: int, section: dict[str, Any] | None = None) -> str | None:
    """Evaluation between steps, a checkpoint that is loaded into another engine, and short last batches."""

    def live(section: dict[str, Any] | None, folder: str) -> Any:
        results: list[Any] = []
        for resumed in (False, True):
            with engine_for(stage, section=section) as engine:
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
                    results.append(copied(step(engine, batch("float32"))))
                else:
                    results.append(copied(step(engine, batch("float32"))))
        return results

    outcomes = []
    for each in (None, section or SECTION):
        with tempfile.TemporaryDirectory() as folder:
            shared = [folder]
            torch.distributed.broadcast_object_list(shared)
            outcomes.append(live(each, shared[0]))
            torch.distributed.barrier()
    return first_difference(*outcomes, "result")


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
    with engine_for(stage, section=section) as engine:
        peak_bytes, plan = measured_peak(engine, batch("float32")), memplan.plan_of(engine.module)
    assert plan is not None
    if plan.problem.budget_bytes != per_rank[str(rank)]:
        return f"planned for {plan.problem.budget_bytes} bytes"
    if not peak_bytes <= plan.peak_bytes <= per_rank[str(rank)]:
        return f"measured {peak_bytes} bytes, predicted {plan.peak_bytes}"
    return first_difference(plain(stage, "float32", 1), train(stage, "float32", 1, section), "result")


def check_whole_step(stage: int, dtype: str, accumulation: int, size: int = BATCH) -> str | None:
    """By the allocator's own record a step, buckets, reduction and the optimizer's part included, is within its budget.

    The steps before it have made the optimizer's state and all plans. With few rows the optimizer's part is the peak.
    """
    from memplan.integrations.deepspeed.memory import held_bytes_of

    section = {"budget": 0.6 if size == BATCH else "1GiB", "costs": "measure"}
    with engine_for(stage, dtype, accumulation, section) as engine:
        for _ in range(2 * accumulation):
            step(engine, batch(dtype, size))
        batches = [batch(dtype, size) for _ in range(accumulation)]
        held_bytes = held_bytes_of(engine, batches[0])

        def steps() -> None:
            for x in batches:
                step(engine, x)

        peak_bytes = profiler_peak(steps, held_bytes)
        plan = memplan.plan_of(engine.module)
    assert plan is not None
    return None if peak_bytes <= plan.peak_bytes else f"held {peak_bytes} bytes, predicted {plan.peak_bytes}"


def check_measured_budget() -> str | None:
    """Without a budget the first step runs as it is; the least that a rank has free then sets the budget."""

    class Memory:
        def free_bytes(self) -> int:
            return 600_000 if torch.distributed.get_rank() else 400_000

    from memplan.integrations.deepspeed.memory import held_bytes_of

    section = {"costs": "estimate", "reserve_fraction": 0.1}
    with engine_for(2, section=section, memory=Memory()) as engine:
        step(engine, batch("float32"))
        assert memplan.plan_of(engine.module) is None
        x = batch("float32")
        expected = 360_000 + held_bytes_of(engine, x)
        step(engine, x)
        step(engine, x)
        plan = memplan.plan_of(engine.module)
    if plan is None or plan.problem.budget_bytes != expected:
        return f"the budget is not {expected} bytes, but that of {plan}"
    return first_difference(plain(2, "float32", 1), train(2, "float32", 1, section, memory=Memory()), "result")


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
        with messages() as said, engine_for(2, section=section) as engine:
            for _ in range(3):
                step(engine, batch("float32"))
                torch.distributed.barrier()
            hooks = len(engine.module._forward_hooks)
        for words in ("predicted peak", "the first step peaked at"):
            lines = [line for line in said if words in line and line.startswith("memplan: stage 0, rank")]
            if len(lines) != (count if torch.distributed.get_rank() == 0 else 0):
                problem = f"said {said}"
        if hooks != 1:  # that of the engine itself
            problem = problem or "the watch goes on though all is told"
    return problem


def refused(words: str, run: Callable[[], object]) -> str | None:
    try:
        run()
    except ValueError as error:
        return None if words in str(error) else f"refused with: {error}"
    return "not refused"


def check_refusals() -> str | None:
    from memplan.integrations.deepspeed import attach

    with engine_for(3) as engine:
        engine.config["memplan"] = SECTION
        problem = refused("stage 3", lambda: attach(engine))
    with engine_for(2) as engine:
        engine.config["memplan"] = {"reserve_fraction": 0.1}
        problem = problem or refused("there is no budget for rank", lambda: attach(engine))
        engine.config["memplan"] = {"per_rank": {"2": "1GiB"}}
        problem = problem or refused("ranks 0 to 1", lambda: attach(engine))
        engine.config["memplan"] = SECTION
        engine._config.compile_config.deepcompile = True
        problem = problem or refused("deepcompile", lambda: attach(engine))
        engine._config.compile_config.deepcompile = False
        engine.compile(backend="eager")
        problem = problem or refused("engine.compile()", lambda: attach(engine))
    return problem


# -- other libraries' loops -------------------------------------------------------------------------------------------


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """Accelerate as in a process that uses it for DeepSpeed alone; on a CPU it has to be told of gloo."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    before = dict(os.environ)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_CPU", None)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    try:
        PartialState(backend="gloo")
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def compare_trainers(stage: int, **options: Any) -> str | None:
    """The Trainer with a DeepSpeed config in a file, in which much is left to it."""
    from memplan.integrations.deepspeed import MemplanDeepSpeedCallback
    from tests.test_integrations import Watch, arguments, language_model, outcome, trainer_for

    results = []
    for section in (None, {"budget": 0.6, "costs": "estimate"}):
        with fresh_accelerate(), tempfile.TemporaryDirectory() as folder:
            config = {
                "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
                "train_batch_size": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 6000},
                "zero_allow_untested_optimizer": True,
            }  # fmt: skip
            path = Path(folder) / "deepspeed.json"
            path.write_text(json.dumps(config | ({} if section is None else {"memplan": section})))
            options |= {
                "deepspeed": str(path),
                "per_device_train_batch_size": 4,
                "save_strategy": "no",
                "use_cpu": False,
            }
            options |= {"accelerator_config": {"use_configured_state": True}}
            trainer = trainer_for(language_model(), arguments(Path(folder), num_train_epochs=1, **options))
            watch = Watch()
            if section is not None:
                trainer.add_callback(MemplanDeepSpeedCallback(trainer))
                trainer.add_callback(watch)
            trainer.train()
            assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine"
            assert section is None or (watch.plans and all(plan.recomputed for plan in watch.plans[:1]))
            assert memplan.plan_of(trainer.model) is None, "the plan is taken off when training ends"
            results.append(outcome(trainer))
            trainer.model_wrapped.destroy()
    return first_difference(*results, "result")


def compare_accelerate(stage: int) -> str | None:
    """A loop of Accelerate with a DeepSpeedPlugin."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    from memplan.integrations.deepspeed import attach

    results = []
    for section in (None, SECTION):
        with fresh_accelerate():
            config = deepspeed_config(stage, "float32", 2, section or {"enabled": False})
            del config["optimizer"]
            config["zero_allow_untested_optimizer"] = True
            accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
            torch.manual_seed(0)
            net = Net().train()
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            model, optimizer = accelerator.prepare(net, optimizer)
            attach(model)
            torch.manual_seed(10 + torch.distributed.get_rank())
            found: list[Any] = []
            for _ in range(2 * STEPS):
                with accelerator.accumulate(model):
                    loss = model(batch("float32"))
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                found.append((copied(loss), {n: copied(p) for n, p in net.named_parameters()}))
            assert section is None or memplan.plan_of(net) is not None
            results.append(found)
            model.destroy()
    return first_difference(*results, "result")


MATRIX = [(stage, dtype, accumulation) for stage in (0, 1, 2) for dtype in DTYPES for accumulation in (1, 2)]
QUICK = {(0, "float32", 1), (1, "bfloat16", 2), (2, "float32", 2), (2, "bfloat16", 1)}
QUICK_STEPS = {(2, "float32", 1)}
NEEDS = ("deepspeed", "g++")  # DeepSpeed builds an op of its own when it is first used
HUGGING_FACE = (*NEEDS, "transformers", "accelerate")
CELLS = {
    f"ZeRO {stage} {dtype} x{accumulation}": Cell(
        functools.partial(compare_training, stage, dtype, accumulation),
        full=(stage, dtype, accumulation) not in QUICK,
        needs=NEEDS,
    )
    for stage, dtype, accumulation in MATRIX
}
CELLS |= {
    f"whole step of ZeRO {stage} {dtype} x{accumulation}": Cell(
        functools.partial(check_whole_step, stage, dtype, accumulation),
        full=(stage, dtype, accumulation) not in QUICK_STEPS,
        needs=NEEDS,
    )
    for stage, dtype, accumulation in MATRIX
}
CELLS |= {
    f"whole step of ZeRO {stage} {dtype} x{accumulation}, few rows": Cell(
        functools.partial(check_whole_step, stage, dtype, accumulation, 8), full=True, needs=NEEDS
    )
    for stage, dtype, accumulation in MATRIX
}
CELLS |= {
    "life of ZeRO 1": Cell(functools.partial(compare_life, 1), needs=NEEDS, full=True),
    "life of ZeRO 2": Cell(functools.partial(compare_life, 2), needs=NEEDS),
    "budgets of ZeRO 0": Cell(functools.partial(check_budgets, 0), needs=NEEDS, full=True),
    "budgets of ZeRO 1": Cell(functools.partial(check_budgets, 1), needs=NEEDS, full=True),
    "budgets of ZeRO 2": Cell(functools.partial(check_budgets, 2), needs=NEEDS),
    "measured budget": Cell(check_measured_budget, needs=NEEDS),
    "log": Cell(check_log, needs=NEEDS),
    "refusals": Cell(check_refusals, needs=NEEDS),
    "Trainer ZeRO 2": Cell(functools.partial(compare_trainers, 2), needs=HUGGING_FACE),
    "Trainer ZeRO 1": Cell(functools.partial(compare_trainers, 1), needs=HUGGING_FACE, full=True),
    "Accelerate ZeRO 1": Cell(functools.partial(compare_accelerate, 1), needs=HUGGING_FACE, full=True),
    "Accelerate ZeRO 2": Cell(functools.partial(compare_accelerate, 2), needs=HUGGING_FACE),
}
