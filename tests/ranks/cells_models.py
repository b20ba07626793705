"""Models of transformers, sharded in the ways that they are trained: `fully_shard`, HSDP, tensor and sequence parallel.

Each is compared with the same training without plans (`sharded_models.py`), and what it holds with what was predicted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import memplan
from tests.ranks.cells_agreement import rank
from tests.ranks.sharded_models import BF16, Made, sharded, train, unlike_predicted
from tests.ranks.spawn import Cell
from tests.support.meter import plans_wait_for_gloo
from tests.support.zoo import first_difference

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
DECODER = {**SIZES, "num_key_value_heads": 2, "vocab_size": 96, "use_cache": False, "attention_dropout": 0.1}


class Names(NamedTuple):
    """Ends of names of a layer's modules: split by columns, by rows, over the sequence; attention; what stays whole.

    - whole: takes all of the sequence, and is not split over ranks.
    - inputs: numbers of positional arguments of a layer, and of attention; 0 for a keyword.
    - outputs: number of what a layer, or a whole module, returns.
    - stacks: number of those that layers are in.
    """

    columns: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1")
    rows: tuple[str, ...] = ("o_proj", "down_proj", "fc2")
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    attention: str = "self_attn"
    whole: tuple[str, ...] = ()
    inputs: tuple[int, int] = (1, 0)
    outputs: int = 1
    stacks: int = 1


_BERT = ("query", "key", "value", "intermediate.dense")
NAMES = {
    "Llama": Names(),
    "Qwen3, tied": Names(),
    "Mixtral": Names(whole=("mlp",)),
    "ViT": Names(norms=("layernorm_before", "layernorm_after"), attention="attention", inputs=(2, 2)),
    "BERT": Names(_BERT, ("output.dense",), ("LayerNorm",), "attention.self", inputs=(3, 1)),
    "T5 with LoRA": Names(  # whole, for the bias of attention is one of all heads
        ("wi",), ("wo",), ("layer_norm",), "", ("SelfAttention", "EncDecAttention"), (6, 1), outputs=3, stacks=2
    ),
}


def made(kind: str, seed: int) -> tuple[nn.Module, list[nn.Module], dict[str, Any]]:
    """A model, its layers, and the arguments of a step."""
    import transformers

    torch.manual_seed(0)
    words = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": words, "labels": words}
    net: Any
    if kind == "Qwen3, tied":
        config = transformers.Qwen3Config(**DECODER, head_dim=8, tie_word_embeddings=True)
        net = transformers.Qwen3ForCausalLM(config)
        layers = net.model.layers
    elif kind == "Mixtral":
        net = transformers.MixtralForCausalLM(transformers.MixtralConfig(**DECODER, num_local_experts=4))
        layers = net.model.layers
    elif kind == "Llama":
        net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))
        layers = net.model.layers
    elif kind == "BERT":
        net = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, vocab_size=96))
        layers = net.bert.encoder.layer
    elif kind == "ViT":
        config = transformers.ViTConfig(
            **SIZES, image_size=(12, 20), patch_size=4, num_labels=5, hidden_dropout_prob=0.1
        )
        net = transformers.ViTForImageClassification(config)
        batch = {"pixel_values": torch.rand(2, 3, 12, 20), "labels": torch.arange(2)}
        layers = next(m for m in net.modules() if isinstance(m, nn.ModuleList))
    else:
        import peft

        config = transformers.T5Config(
            d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, vocab_size=96, decoder_start_token_id=0,
            use_cache=False,
        )  # fmt: skip
        inner = transformers.T5ForConditionalGeneration(config)
        net = peft.get_peft_model(inner, peft.LoraConfig(r=4, target_modules=["q", "v"], lora_dropout=0.1))
        layers = [*inner.encoder.block, *inner.decoder.block]
    return net.train(), list(layers), batch


def ending_in(module: nn.Module, ends: tuple[str, ...]) -> Iterator[str]:
    return (name for name, _ in module.named_modules() if any(f".{name}".endswith(f".{end}") for end in ends))


def split(kind: str, layers: list[nn.Module], mesh: DeviceMesh, sequence: bool = False) -> None:
    """Split layers by columns and rows. sequence: what goes from layer to layer is split over the sequence."""
    names, whole, part = NAMES[kind], Replicate(), Shard(1)
    for layer in layers:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in ending_in(layer, names.columns)}
        plan |= {n: RowwiseParallel(output_layouts=part if sequence else whole) for n in ending_in(layer, names.rows)}
        if sequence:
            first = ending_in(layer, ("gate_proj", "up_proj", "fc1", "intermediate.dense", "wi"))
            plan |= {name: ColwiseParallel(input_layouts=part) for name in first}
            local = kind == "BERT"  # norms come after sums, whose other terms are local
            plan |= {name: SequenceParallel(use_local_output=local) for name in ending_in(layer, names.norms)}
            if names.attention:
                plan[names.attention] = passed(names.inputs[1], part, whole)
        parallelize_module(layer, mesh, plan)
        for name in ending_in(layer, names.whole) if sequence else ():
            for style in (passed(1, part, whole), returned(names.outputs, whole, part)):
                parallelize_module(layer.get_submodule(name), mesh, style)
    size = len(layers) // names.stacks
    for first_layer, last_layer in zip(layers[::size], layers[size - 1 :: size], strict=True) if sequence else ():
        parallelize_module(first_layer, mesh, passed(names.inputs[0], whole, part))
        parallelize_module(last_layer, mesh, returned(names.outputs, part, whole))


def passed(count: int, before: Placement, after: Placement) -> PrepareModuleInput:
    """Changes how hidden states are split that a module gets, the first of `count` positional arguments."""
    if not count:
        keywords = {"input_kwarg_layouts": {"hidden_states": before}}
        desired = {"desired_input_kwarg_layouts": {"hidden_states": after}}
        return PrepareModuleInput(**keywords, **desired, use_local_output=True)  # type: ignore[arg-type]
    others = (None,) * (count - 1)
    return PrepareModuleInput(
        input_layouts=(before, *others), desired_input_layouts=(after, *others), use_local_output=True
    )


def returned(count: int, before: Placement, after: Placement) -> PrepareModuleOutput:
    """Changes how hidden states are split that a module returns, the first of `count` results."""
    others = (None,) * (count - 1)
    return PrepareModuleOutput(output_layouts=(before, *others), desired_output_layouts=(after, *others))


def sharded_model(kind: str, way: str) -> Made:
    """A model that is sharded in this way, and a batch. Ranks that split a layer have the same one."""
    if way in ("TP", "sequence parallel"):
        net, layers, batch = made(kind, 0)
        split(kind, layers, init_device_mesh("cpu", (2,)), way != "TP")
        return net, batch
    if way == "FSDP2 x TP":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        net, layers, batch = made(kind, mesh["data"].get_local_rank())
        split(kind, layers, mesh["tensor"])
        return sharded(net, layers, mesh=mesh["data"]), batch
    net, layers, batch = made(kind, rank())
    if way == "HSDP":
        return sharded(net, layers, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))), batch
    return sharded(net, layers, **({"mp_policy": BF16} if "bf16" in way else {})), batch


def as_without_plan(kind: str, way: str) -> str | None:
    """Training of one and of three micro-batches gives what it gives without plans, in predicted peaks."""
    wrong = []  # of this rank alone it may be, so all go on
    for accumulated in (1, 3):
        plain, half_bytes = train(*sharded_model(kind, way), accumulated), 0
        for budget in (1.0, "min", "half way"):
            net, batch = sharded_model(kind, way)
            limit = half_bytes if budget == "half way" else budget
            with plans_wait_for_gloo():
                memplan.apply(net, batch, limit, costs="estimate", accumulate=accumulated > 1)
            plan = memplan.plan_of(net)
            assert isinstance(plan, memplan.Plan)
            half_bytes = (plan.peak_bytes + plan.baseline_peak_bytes) // 2
            found = first_difference(plain, train(net, batch, accumulated), f"x{accumulated}, budget {budget}")
            unlike = unlike_predicted(net, batch, accumulated > 1)
            kept = "nothing was recomputed" if budget != 1.0 and not plan.recomputed else None
            wrong += [text for text in (found, unlike, kept) if text]
    return "; ".join(wrong) or None


WAYS = {
    "FSDP2": 2,
    "FSDP2, bf16": 2,
    "FSDP2 on four ranks": 4,
    "FSDP2, bf16, on four ranks": 4,
    "HSDP": 4,
    "TP": 2,
    "FSDP2 x TP": 4,
    "sequence parallel": 2,
}
CELLS = {
    f"{kind}, {way}": Cell(functools.partial(as_without_plan, kind, way), world, True, ("transformers", "peft"))
    for kind in NAMES
    for way, world in WAYS.items()
}
