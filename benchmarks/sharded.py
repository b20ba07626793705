"""What the least memory is of a Llama under FSDP2: a plan's floor, against checkpointing of every layer.

    torchrun --nproc_per_node 2 benchmarks/sharded.py [layers]

Both peaks are read from the allocator's record, in one process, on rank 0.
"""

from __future__ import annotations

import sys

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import memplan
from memplan.units import format_bytes
from tests.support.meter import gloo_lets_go, plans_wait_for_gloo, profiler_peak

WIDTH, WORDS, ROWS, LENGTH = 256, 2048, 4, 256


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


def peak_bytes(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """The most that a second step holds beyond the parts of parameters."""

    def step() -> None:
        output = model(**batch)
        output.loss.backward()

    step()
    for parameter in model.parameters():
        parameter.grad = None
    with gloo_lets_go():
        return profiler_peak(step)


def main() -> None:
    layers = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    ids = torch.randint(0, WORDS, (ROWS, LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    plain, checkpointed = (peak_bytes(made(layers, way), batch) for way in (False, True))
    model = made(layers, False)
    with plans_wait_for_gloo():
        memplan.apply(model, batch, "min", costs="estimate")
    plan = memplan.plan_of(model)
    floor, predicted = peak_bytes(model, batch), plan.peak_bytes - plan.problem.resident_bytes
    if rank == 0:
        print(f"FSDP2, {layers} layers: {format_bytes(plain)} beyond the parts of parameters")
        print(f"every layer checkpointed: {format_bytes(checkpointed)}")
        print(f"floor of a plan: {format_bytes(floor)}, predicted {format_bytes(predicted)}")
        print(f"floor / checkpointed: {floor / checkpointed:.2f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
