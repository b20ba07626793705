"""What a plan adds to a step of a DeepSpeed engine where nothing has to be recomputed.

    python -m benchmarks.deepspeed_overhead [--stage 2] [--width 256] [--repeats 40] [--output FILE]

Steps of three engines over the same 12-layer GPT-2 are taken in turn, in one process: one plain, one planned with a
budget that nothing exceeds, and a second plain one, which tells how far two equal engines differ on this machine.
Ratios are of steps of one round, by the clock and by the processor's time for the process, which other jobs disturb
less. A step is forward, backward and the optimizer's.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

import memplan
from benchmarks.environment import environment
from benchmarks.speed import Sample, gpt2

RESULTS = Path(__file__).resolve().parent / "results" / "deepspeed_overhead.json"
ENGINES = ("plain", "planned", "plain again")
LAYERS, VOCABULARY, BATCH, LENGTH = 12, 1000, 4, 128


def alone() -> None:
    """This process is the only rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")


def engine_for(kind: str, stage: int, width: int) -> tuple[Any, Sample]:
    from memplan.integrations.deepspeed import initialize

    model, sample = gpt2(LAYERS, width, VOCABULARY, BATCH, LENGTH)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "steps_per_print": None,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 2_000_000},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "memplan": {"enabled": kind == "planned", "budget": "1TiB", "costs": "estimate"},
    }
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config, sample=sample)
    return engine, sample


def step(engine: Any, sample: Sample) -> None:
    engine.backward(engine(**sample).loss)
    engine.step()


def measure(stage: int, width: int, repeats: int) -> dict[str, Any]:
    engines = {kind: engine_for(kind, stage, width) for kind in ENGINES}
    plan = memplan.plan_of(engines["planned"][0].module)
    assert plan is not None
    assert not plan.recomputed
    for engine, sample in list(engines.values()) * 3:
        step(engine, sample)
    rounds: dict[str, list[Timed]] = {kind: [] for kind in engines}
    for turn in range(repeats):
        for offset in range(len(ENGINES)):  # each comes first as often as the others
            kind = ENGINES[(turn + offset) % len(ENGINES)]
            rounds[kind].append(timed(*engines[kind]))
    return {
        "stage": stage,
        "model": f"GPT-2, {LAYERS} layers of {width}, batch {BATCH}, length {LENGTH}",
        "rounds": repeats,
        "plain_wall_s": statistics.median(t.wall_s for t in rounds["plain"]),
        "plain_processor_s": statistics.median(t.processor_s for t in rounds["plain"]),
        "planned": ratios(rounds["planned"], rounds["plain"]),
        "plain_again": ratios(rounds["plain again"], rounds["plain"]),
    }


class Timed(NamedTuple):
    """Seconds of a step: by the clock, and of the processor for this process alone."""

    wall_s: float
    processor_s: float


def timed(engine: Any, sample: Sample) -> Timed:
    wall_s, processor_s = time.perf_counter(), time.process_time()
    step(engine, sample)
    return Timed(time.perf_counter() - wall_s, time.process_time() - processor_s)


def ratios(steps: list[Timed], plain: list[Timed]) -> dict[str, dict[str, float]]:
    """Quartiles of the ratios of steps to the plain ones of the same rounds."""
    names = ("lower_quartile", "median", "upper_quartile")
    return {
        field: dict(
            zip(
                names,
                statistics.quantiles([getattr(a, field) / getattr(b, field) for a, b in zip(steps, plain)], n=4),
                strict=True,
            )
        )
        for field in Timed._fields
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2))
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    alone()
    versions = environment() | {"deepspeed": metadata.version("deepspeed")}
    result = {"environment": versions, **measure(args.stage, args.width, args.repeats)}
    torch.distributed.destroy_process_group()
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
