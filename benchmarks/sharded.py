"""What the least memory is of a Llama under FSDP2: a plan's floor, against checkpointing of every layer.

    torchrun --nproc_per_node 2 -m benchmarks.sharded [layers] [result file]

All of it in one process, on rank 0, in bytes beyond the parts of parameters. Two measurements of five steps each:

- alive: the most that tensors hold, as FSDP2 resizes them. What gloo takes for itself is not in it.
- allocated: the allocator's record. Copies in which gloo reduces are in it, and those that gloo's threads free late may
  be in it for good. So it differs from step to step, upwards.
"""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import memplan
from benchmarks.environment import environment
from memplan.units import format_bytes
from tests.support.meter import LiveMeter, gloo_lets_go, plans_wait_for_gloo, profiler_peak

WIDTH, WORDS, ROWS, LENGTH = 256, 2048, 4, 256
STEPS = 5


def made(layers: int, checkpointed: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=WORDS, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    for index, layer in enumerate(model.model.layers):
        if checkpointed:
            model.model.layers[index] = layer = checkpoint_wrapper(layer)
        fully_shard(layer)
    return fully_shard(model)


class ResizedMeter(LiveMeter):
    """Counts also storages that no op returned, and each at its present size: FSDP2 empties what it gathered."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for key, reference in [*self._seen.items()]:
            if (storage := reference()) is None:
                del self._seen[key]
            else:
                super()._see(storage)
        self.register((args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _see(self, storage: torch.UntypedStorage) -> None:
        self._seen[storage._cdata] = weakref.ref(storage)
        super()._see(storage)


def peaks_bytes(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    """The most that steps after the first hold beyond the parts of parameters, by way of measurement."""

    def step() -> None:
        output = model(**batch)  # with its logits, which loops hold in backward
        output.loss.backward()

    def alive() -> int:
        meter = ResizedMeter()
        meter.register([[p.to_local() for p in model.parameters()], *model.buffers(), *batch.values()])
        before_bytes = meter.live_bytes
        with meter:
            step()
        return meter.peak_bytes - before_bytes

    step()
    found: dict[str, list[int]] = {"alive": [], "allocated": []}
    for _ in range(STEPS):
        for name, measure in (("alive", alive), ("allocated", lambda: profiler_peak(step))):
            for parameter in model.parameters():
                parameter.grad = None
            with gloo_lets_go():
                found[name].append(measure())
    return found


def told(name: str, found: dict[str, list[int]]) -> str:
    figures = (
        f"{way} {format_bytes(median(n))} ({format_bytes(min(n))} to {format_bytes(max(n))})"
        for way, n in found.items()
    )
    return f"{name}: {', '.join(figures)}"


def main() -> None:
    layers = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    ids = torch.randint(0, WORDS, (ROWS, LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    found = {
        "FSDP2": peaks_bytes(made(layers, False), batch),
        "FSDP2, every layer checkpointed": peaks_bytes(made(layers, True), batch),
    }
    model = made(layers, False)
    with plans_wait_for_gloo():
        memplan.apply(model, batch, "min", costs="estimate")
    plan = memplan.plan_of(model)
    found["floor of a plan"] = peaks_bytes(model, batch)
    predicted_bytes = plan.peak_bytes - plan.problem.resident_bytes
    ratios = {
        way: median(found["floor of a plan"][way]) / median(found["FSDP2, every layer checkpointed"][way])
        for way in ("alive", "allocated")
    }
    if rank == 0:
        for name, figures in found.items():
            print(told(name, figures))
        print(f"predicted: {format_bytes(predicted_bytes)}")
        print("floor / checkpointed: " + ", ".join(f"{way} {ratio:.3f}" for way, ratio in ratios.items()))
        if len(sys.argv) > 2:
            result = {
                "environment": environment(),
                "layers": layers,
                "peaks_bytes": found,
                "predicted_bytes": predicted_bytes,
                "floor_of_checkpointed": ratios,
            }
            Path(sys.argv[2]).write_text(json.dumps(result, indent=1) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
