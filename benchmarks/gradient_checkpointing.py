"""memplan against the gradient checkpointing of transformers: the memory and the time of a training step.

    python -m benchmarks.gradient_checkpointing [--models gpt2 llama] [--repeats 21] [--output FILE]

The rival is `model.activation_checkpointing_enable(every_n_layers=...)`, which keeps the input of every layer, or of
every second or fourth, and runs it again in backward. memplan runs at each of the rival's peaks, and at its floor.

The activation peak is the total peak less parameters, buffers and inputs: gradients and kernel scratch are in it. It is
measured with the profiler's memory events. Only the loss leaves the model. Steps are taken in turn, in a new process
whose C library keeps freed memory, as CUDA's allocator does. Bits are the loss and all gradients, compared with the
plain step's.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memplan
from benchmarks.activation_memory_budget import LossOnly, build_llama
from benchmarks.environment import environment
from benchmarks.speed import KEEP_FREED_MEMORY, Sample, alternating, gpt2, language_sample, spread_of_blocks
from tests.support.meter import profiler_peak, storage_bytes
from tests.support.zoo import copied, first_difference


def llama() -> tuple[nn.Module, Sample]:
    torch.manual_seed(0)
    return build_llama(8, 256, 4, 1000).train(), language_sample(1000, 8, 256)


MODELS: dict[str, Callable[[], tuple[nn.Module, Sample]]] = {
    "gpt2": lambda: gpt2(8, 256, 1000, 8, 256),
    "llama": llama,
}
EVERY = (1, 2, 4)  # layers


def rows(name: str, repeats: int) -> dict[str, Any]:
    """What a step takes: plain, with each setting of checkpointing, with memplan at its peak, and at the floor."""
    inner, sample = MODELS[name]()
    model = LossOnly(inner)
    resident_bytes = storage_bytes([*model.parameters(), *model.buffers(), *tensors(sample)])
    steps = {"plain": model}
    for every in EVERY:
        rival = steps[f"checkpointing, every {every}"] = copy.deepcopy(model)
        rival.inner.activation_checkpointing_enable(every_n_layers=every)  # type: ignore[operator, union-attr]
        budget = peak_bytes(rival, sample, resident_bytes)
        steps[f"memplan at the peak of every {every}"] = memplan.apply(copy.deepcopy(model), sample, budget)
    floor = memplan.explore(model, sample)[0]
    steps["memplan at its floor"] = memplan.apply(copy.deepcopy(model), sample, plan=floor)
    found = {label: results(net, sample) for label, net in steps.items()}
    times = alternating(list(steps.values()), sample, repeats, step)
    plain_s = statistics.median(times[0])
    return {
        label: {
            "activation_peak_bytes": peak_bytes(net, sample, resident_bytes) - resident_bytes,
            "step_s": statistics.median(own),
            "overhead": statistics.median(own) / plain_s - 1,
            "spread": spread_of_blocks(own),
            "same_bits": first_difference(found["plain"], found[label], label) is None,
        }
        for (label, net), own in zip(steps.items(), times, strict=True)
    }


def tensors(sample: Sample) -> list[torch.Tensor]:
    return [value for value in sample.values() if isinstance(value, torch.Tensor)]


def step(model: nn.Module, sample: Sample) -> None:
    model(**sample).backward()
    model.zero_grad()


def peak_bytes(model: nn.Module, sample: Sample, resident_bytes: int) -> int:
    return profiler_peak(lambda: step(model, sample), resident_bytes)


def results(model: nn.Module, sample: Sample) -> list[Any]:
    torch.manual_seed(5)
    loss = model(**sample)
    loss.backward()
    found = copied([loss, [p.grad for p in model.parameters()]])
    model.zero_grad()
    return found


def show(name: str, repeats: int) -> None:
    print(json.dumps(rows(name, repeats)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=21)
    output = Path(__file__).parent / "results" / "gradient_checkpointing.json"
    parser.add_argument("--output", type=Path, default=output)
    args = parser.parse_args()
    result: dict[str, Any] = {"environment": environment()}
    for name in args.models:
        program = f"from benchmarks.gradient_checkpointing import show; show({name!r}, {args.repeats})"
        environ = {**os.environ, **KEEP_FREED_MEMORY}
        child = subprocess.run([sys.executable, "-c", program], env=environ, check=True, stdout=subprocess.PIPE)
        result[name] = json.loads(child.stdout.splitlines()[-1])
        print(name)
        for label, row in result[name].items():
            print(
                f"  {label:36s} {row['activation_peak_bytes'] / 1e6:9.1f} MB {row['overhead']:+7.1%} (spread "
                f"{row['spread']:.1%}), {'same' if row['same_bits'] else 'other'} bits",
                flush=True,
            )
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
