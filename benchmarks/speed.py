"""What memplan costs: seconds to plan, seconds that a planned step adds, and how well its overhead was predicted.

    python -m benchmarks.speed [--only planning solving unlimited guards batches lengths prediction] [--output FILE]

With --only, what the file has of the other parts stays.

planning: capture, costs and solve of a 12-layer GPT-2, with nothing on disk, with measured costs there, and, in a new
process, with its front there; a small plan in a new process that has to compile the solvers first.
solving: the front of a 32-layer Llama whose costs are known.
unlimited: plain eager against the same step under a budget that needs no recomputation, in alternation.
guards: what a call of a planned 12-layer GPT-2 with a padding mask spends on finding its plan; each of eight plans for
other lengths kept beside it is asked first.
batches: the first, the second and the third call with a shorter batch than planned.
lengths: what the second length costs, which is captured for all of them, and what each new one costs after that, beyond
the same step again. Models are narrow, so that steps are short.
prediction: measured against predicted overhead at five budgets, in a new process whose C library keeps freed memory, as
CUDA's allocator does: with glibc's own settings every large tensor of a CPU step costs page faults, plain steps, which
hold more, the most of them, and no timing of single ops knows of that. Each of several blocks has copies of its own of
every model, since where a copy's weights lie is worth a percent by itself, and takes their steps in shuffled turns. A
row counts where the blocks' medians lie within 3%. Plans promise what recomputation adds, so the planned step that
recomputes nothing is measured too: it is no plain step, for it runs no module's Python and frees sooner.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memplan
from benchmarks.activation_memory_budget import build_gpt2, build_llama
from benchmarks.environment import environment, own_cache
from memplan.cache import forget
from memplan.capture.capture import capture
from memplan.costs.known_costs import estimate
from memplan.installed.planned_forward import planned_forward
from memplan.problem.data import Problem
from memplan.solvers import solve_front

Sample = dict[str, Any]


def language_sample(vocabulary: int, batch: int, length: int) -> Sample:
    ids = torch.randint(0, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def gpt2(layers: int, width: int, vocabulary: int, batch: int, length: int) -> tuple[nn.Module, Sample]:
    torch.manual_seed(0)
    model = build_gpt2(layers, width, max(4, width // 64), vocabulary, length)
    return model.train(), language_sample(vocabulary, batch, length)


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def planning() -> dict[str, Any]:
    small, small_sample = gpt2(1, 32, 50, 2, 16)
    loaded_s = seconds(lambda: memplan.plan(small, small_sample, 1.0))
    model, sample = gpt2(12, 768, 50257, 4, 512)
    cold_s = seconds(lambda: memplan.plan(model, sample, 0.5))
    forget("front-*")
    warm_s = seconds(lambda: memplan.plan(model, sample, 0.5))
    return {
        "compiling_s": compiling_s(),
        "small_first_plan_s": loaded_s,
        "gpt2_12_cold_costs_s": cold_s,
        "gpt2_12_warm_costs_s": warm_s,
        "gpt2_12_second_start_s": second_start_s(),
    }


def second_start_s() -> float:
    """Seconds of a plan in a new process that finds everything on disk, without imports and making the model.

    What was measured while the machine was busy is measured again in up to two more processes.
    """
    program = "from benchmarks import speed; speed.start_again()"
    for _ in range(3):
        child = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)
    return float(child.stdout.splitlines()[-1])


def start_again() -> None:
    model, sample = gpt2(12, 768, 50257, 4, 512)
    print(seconds(lambda: memplan.apply(model, sample, 0.5)))


def compiling_s() -> float:
    """Seconds of a small plan in a new process whose Numba cache is empty, imports included."""
    program = "from benchmarks.speed import gpt2; import memplan; memplan.plan(*gpt2(1, 32, 50, 2, 16), 1.0)"
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "NUMBA_CACHE_DIR": folder}
        return seconds(partial(subprocess.run, [sys.executable, "-c", program], env=environ, check=True))


def solving() -> dict[str, Any]:
    torch.manual_seed(0)
    model, sample = build_llama(32, 64, 4, 100).train(), language_sample(100, 1, 64)
    traced = capture(model, model.forward, sample).traced
    problem = Problem(traced.graph, estimate(traced))
    times = [seconds(lambda: solve_front(problem)) for _ in range(4)]
    return {"llama_32_ops": len(traced.graph.ops), "llama_32_solve_s": min(times[1:]), "first_solve_s": times[0]}


class CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def step(model: nn.Module, sample: Sample) -> None:
    model(**sample).loss.backward()
    model.zero_grad()


def alternating(
    models: list[nn.Module], sample: Sample, repeats: int, run: Callable[[nn.Module, Sample], None] = step
) -> list[list[float]]:
    """Seconds of steps of each model, taken in turn after two steps of each to warm up."""
    for model in models * 2:
        run(model, sample)
    times: list[list[float]] = [[] for _ in models]
    order = list(enumerate(models))
    for turn in range(repeats):
        random.Random(turn).shuffle(order)
        for index, model in order:
            times[index].append(seconds(lambda m=model: run(m, sample)))  # type: ignore[misc]
    return times


def unlimited() -> dict[str, Any]:
    rows = {}
    for name, arguments, repeats in (
        ("gpt2 3x64", (3, 64, 100, 2, 64), 60),
        ("gpt2 4x128", (4, 128, 1000, 8, 128), 30),
        ("gpt2 4x256", (4, 256, 1000, 8, 256), 12),
        ("gpt2 12x256", (12, 256, 1000, 4, 256), 12),
    ):
        model, sample = gpt2(*arguments)
        planned = copy.deepcopy(model)
        memplan.apply(planned, sample, 1.0)
        counter = CountOps()
        with counter:
            step(model, sample)
        plain_s, planned_s = (statistics.median(t) for t in alternating([model, planned], sample, repeats))
        rows[name] = {
            "plain_s": plain_s,
            "ratio": planned_s / plain_s,
            "extra_us_per_op": (planned_s - plain_s) / counter.count * 1e6,
            "dispatched_ops": counter.count,
        }
    return rows


def guards() -> dict[str, Any]:
    model, sample = gpt2(12, 256, 1000, 2, 128)
    sample["attention_mask"] = torch.ones_like(sample["input_ids"])
    sample["attention_mask"][0, 100:] = 0
    memplan.apply(model, sample, 1.0, costs="estimate")
    memplan.prepare(model, [shortened(sample, length) for length in range(40, 120, 10)])
    planned = planned_forward(model)
    assert planned is not None
    last = planned.steps[-1]  # the sample's own

    def ask(steps: list[Any]) -> None:
        for each in steps:
            each.mismatch(planned.choice.reader.read((), sample))

    calls = [seconds(partial(ask, steps)) for steps in [[last], planned.steps] * 100]
    one, all_of_them = statistics.median(calls[::2]), statistics.median(calls[1::2])
    return {
        "modules": len(list(model.modules())),
        "one_plan_us": one * 1e6,
        "part_of_a_50_ms_step": one / 0.05,
        "nine_plans_us": all_of_them * 1e6,
    }


def shortened(sample: Sample, length: int) -> Sample:
    return {k: v[:, :length].clone() if isinstance(v, torch.Tensor) else v for k, v in sample.items()}


def batches() -> dict[str, Any]:
    rows = {}
    for name, arguments in (("gpt2 4x128", (4, 128, 1000, 8, 128)), ("gpt2 12x256", (12, 256, 1000, 4, 256))):
        model, sample = gpt2(*arguments)
        memplan.apply(model, sample, 0.5)
        step(model, sample)
        short = {k: v[:3] if isinstance(v, torch.Tensor) else v for k, v in sample.items()}
        first, second, third = (seconds(lambda m=model, s=short: step(m, s)) for _ in range(3))  # type: ignore[misc]
        rows[name] = {"first_sight_s": first - third, "planned_in_full_s": second - third, "step_s": third}
    return rows


def lengths() -> dict[str, Any]:
    torch.manual_seed(0)
    llama = build_llama(32, 64, 4, 100).train()
    rows = {}
    for name, (model, sample), budget in (
        ("gpt2 12x64, unlimited", gpt2(12, 64, 1000, 2, 128), "1TiB"),
        ("gpt2 12x64, half", gpt2(12, 64, 1000, 2, 128), 0.5),
        ("llama 32x64, unlimited", (llama, language_sample(100, 1, 64)), "1TiB"),
    ):
        length = sample["input_ids"].shape[1]
        first_s = seconds(partial(memplan.apply, model, sample, budget))
        step(model, sample)
        second_s = seconds(partial(step, model, shortened(sample, length - 1)))
        more, steps = [], []
        for new in range(length - 2, length - 32, -1):
            short = shortened(sample, new)
            times = [seconds(partial(step, model, short)) for _ in range(4)]
            steps.append(min(times[1:]))
            more.append(times[0] - steps[-1])
        rows[name] = {
            "apply_s": first_s,
            "second_length_s": second_s,
            "new_length_s": statistics.median(more),
            "step_s": statistics.median(steps),
        }
        memplan.remove(model)
    return rows


# glibc then keeps what is freed. Figures are bytes
KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 40)}
BLOCKS, BLOCK = 3, 13


def prediction() -> dict[str, Any]:
    program = "import json; from benchmarks.speed import prediction_rows; print(json.dumps(prediction_rows()))"
    environ = {**os.environ, **KEEP_FREED_MEMORY}
    child = subprocess.run([sys.executable, "-c", program], env=environ, check=True, stdout=subprocess.PIPE)
    result: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return result


def prediction_rows() -> dict[str, Any]:
    """One row a budget; steps of a turn are compared with each other."""
    model, sample = gpt2(4, 768, 1000, 4, 512)
    points = memplan.explore(model, sample)
    low, high = points[0].peak_bytes, points[-1].peak_bytes
    budgets = {f: low + int((high - low) * f) for f in (0.0, 0.05, 0.1, 0.2, 0.5)}
    chosen = {f: [p for p in points if p.peak_bytes <= budget][-1] for f, budget in budgets.items()}
    blocks = [block_of_steps(model, sample, [*chosen.values(), points[-1]]) for _ in range(BLOCKS)]
    plain, *ours, unlimited = zip(*blocks, strict=True)
    rows = {}
    for (fraction, point), times in zip(chosen.items(), ours, strict=True):
        rows[f"{fraction:.2f} between floor and unplanned"] = {
            "predicted_overhead": point.overhead,
            "overhead_over_unlimited": overhead(times, unlimited),
            "overhead_over_plain": overhead(times, plain),
            "spread": spread_of(times),
        }
    return {
        "plain_spread": spread_of(plain),
        "unlimited_spread": spread_of(unlimited),
        "unlimited_over_plain": overhead(unlimited, plain),
        "rows": rows,
    }


def overhead(ours: Sequence[list[float]], others: Sequence[list[float]]) -> float:
    """Median over the turns of all blocks."""
    turns = zip(chain.from_iterable(ours), chain.from_iterable(others), strict=True)
    return statistics.median(a / b for a, b in turns) - 1


def block_of_steps(model: nn.Module, sample: Sample, points: list[memplan.Plan]) -> list[list[float]]:
    """Seconds of steps of new copies: of the plain model, and of one planned by each point."""
    planned = [memplan.apply(copy.deepcopy(model), sample, plan=point) for point in points]
    return alternating([copy.deepcopy(model), *planned], sample, BLOCK)


def spread_of(blocks: Sequence[list[float]]) -> float:
    """Largest less smallest median of a block, over the median of all."""
    medians = [statistics.median(block) for block in blocks]
    return (max(medians) - min(medians)) / statistics.median(chain.from_iterable(blocks))


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "planning": planning,
    "solving": solving,
    "unlimited": unlimited,
    "guards": guards,
    "batches": batches,
    "lengths": lengths,
    "prediction": prediction,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "speed.json")
    args = parser.parse_args()
    known = json.loads(args.output.read_text()) if args.output.exists() else {}
    result: dict[str, Any] = {**known, "environment": environment()}
    with own_cache():
        for name in args.only:
            result[name] = PARTS[name]()
            print(name, json.dumps(result[name], indent=1), flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
