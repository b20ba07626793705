"""Llama-3-8B on eight ranks, in simulation: a plan against the schedules of FSDP2, with collectives beside ops in all.

    python -m benchmarks.overlap [--layers 32] [--tokens 4096 16384]

The step is captured as rank 0 of a process group that sends nothing: bfloat16, one unit of `fully_shard` a layer. Ops
take what a roofline of 600 TFLOP/s and 3 TB/s says, collectives what a link of 50 GB/s does. Compared are

- FSDP2: parameters are gathered in forward and again in backward, activations are kept;
- FSDP2 with every layer checkpointed: layers run again in backward, with the same gathers;
- plans within what each of the two peaks at.

FSDP2's schedules have room for one unit more than they need, in which the next unit is gathered ahead and the last one
reduced. The accountant (`simulate`) times all of them. About five minutes for each number of tokens.
"""

from __future__ import annotations

import argparse
import json

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import memplan
from benchmarks.environment import environment, own_cache
from memplan.problem.data import Problem
from memplan.problem.schedule import BOUNDARY, Schedule, Timeline, schedule_of
from memplan.problem.simulate import simulate
from memplan.solvers.offload.overlap import overlapped

RANKS, LINK_BYTES_PER_S, LATENCY_S = 8, 50e9, 20e-6
# Of a ring over the link: each rank sends all parts but its own.
ROOFLINE = memplan.Roofline(
    600e12, 3e12, 5e-6, network=memplan.GatherSpeed(LINK_BYTES_PER_S * RANKS / (RANKS - 1), LATENCY_S)
)
LENGTH = 4096


def sharded(layers: int) -> torch.nn.Module:
    """The model, with weights that nobody has filled in."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh).to_empty(device="cpu")


def of_fsdp(problem: Problem, layers: int, checkpoints: bool) -> tuple[Schedule, int]:
    """(FSDP2's schedule with each collective waited for at once, what one unit takes beside it).

    checkpoints: layers run again in backward, and not only their gathers.
    """
    graph = problem.graph
    forward = range(graph.boundary)
    again: dict[int, list[int]] = {}  # by the op of backward before which they run
    unit_bytes = 0
    for layer in range(layers):
        names = (f"model.layers.{layer}", f"model.layers.{layer}.")
        ops = [i for i in forward if graph.ops[i].layer == names[0] or graph.ops[i].layer.startswith(names[1])]
        gather = next(i for i in ops if graph.ops[i].is_asynchronous)
        whole = graph.ops[gather].outputs[0]
        unit_bytes = max(unit_bytes, graph.op_bytes(gather))
        read_outside = {v for i in forward if i not in ops for v in graph.ops[i].inputs}
        inner = {v for i in ops for v in graph.ops[i].outputs} - read_outside
        if not checkpoints:
            unpacked = [i for i in ops if whole in graph.ops[i].inputs]
            inner, ops = {v for i in unpacked for v in graph.ops[i].outputs}, [gather - 1, gather, *unpacked]
        first = next(i for i in range(graph.boundary, len(graph.ops)) if inner & {*graph.ops[i].inputs})
        again.setdefault(first, []).extend(ops)
    order = [*forward, BOUNDARY]
    for op in range(graph.boundary, len(graph.ops)):
        order += [*again.get(op, ()), op]
    return schedule_of(graph, order), unit_bytes


def told(name: str, timeline: Timeline) -> None:
    print(
        f"  {name}: {timeline.peak_bytes / 2**30:.2f} GiB, {timeline.time_s * 1e3:.1f} ms, "
        f"of which {timeline.stall_s * 1e3:.1f} ms are waiting",
        flush=True,
    )


@own_cache()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, nargs="*", default=[4096, 16384])
    args = parser.parse_args()
    print(json.dumps(environment()))
    torch.distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    model = sharded(args.layers)
    for tokens in args.tokens:
        ids = torch.zeros(tokens // LENGTH, LENGTH, dtype=torch.long)
        sample = {"input_ids": ids, "labels": ids}

        def planned(budget: float | int, sample: dict[str, torch.Tensor] = sample) -> memplan.Plan:
            return memplan.plan(model, sample, budget, costs=ROOFLINE, device="cpu")

        problem = planned(1.0).problem
        ops_s, network_s = problem.without_network.baseline_time_s, problem.network_s
        print(
            f"{args.layers} layers, {tokens} tokens a rank: ops take {ops_s * 1e3:.1f} ms, "
            f"each collective once {network_s * 1e3:.1f} ms",
            flush=True,
        )
        for name, checkpoints in (("FSDP2, every layer checkpointed", True), ("FSDP2", False)):
            schedule, unit_bytes = of_fsdp(problem, args.layers, checkpoints)
            at_once = simulate(problem, schedule)
            told(f"{name}, nothing overlaps", at_once)
            _, timeline = overlapped(problem, schedule, at_once.peak_bytes + unit_bytes)
            told(name, timeline)
            told("a plan within that peak", planned(timeline.peak_bytes).timeline)


if __name__ == "__main__":
    main()
