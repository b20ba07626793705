"""Language models of 2026, from small configs with random weights: rows of `tests.support.models_of_2026`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.architectures import (
    BATCH,
    HEADS,
    LAYERS,
    LENGTH,
    NO_SPECIAL_TOKENS,
    VOCABULARY,
    WIDTH,
    Architecture,
    architecture,
    language_sample,
    token_ids,
)

LANGUAGE: dict[str, Architecture] = {}

DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 160,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    **NO_SPECIAL_TOKENS,
}
# Gated delta rule in three of four layers.
DELTA_RULE: dict[str, Any] = {
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": HEADS,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
# State spaces beside attention.
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}

Built = tuple[nn.Module, dict[str, Any]]


def routed_sample() -> dict[str, Any]:
    """With the loss that balances experts."""
    return {**language_sample(), "output_router_logits": True}


# -- attention alone --------------------------------------------------------------------------------------------------


@architecture("decoder", "Qwen3ForCausalLM", LANGUAGE)
def qwen3() -> Built:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**DECODER, head_dim=16)), language_sample()


@architecture("decoder", "Gemma3nForCausalLM", LANGUAGE)
def gemma3n() -> Built:
    """Several predictions of each layer, embeddings for each layer, the last layers share keys and values."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    config = Gemma3nTextConfig(
        **DECODER | {"intermediate_size": [128] * LAYERS},
        head_dim=16,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
        num_kv_shared_layers=2,
        laurel_rank=16,
        activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0],
    )
    return Gemma3nForCausalLM(config), language_sample()


@architecture("decoder", "Ministral3ForCausalLM", LANGUAGE)
def ministral3() -> Built:
    from transformers import Ministral3Config, Ministral3ForCausalLM

    return Ministral3ForCausalLM(Ministral3Config(**DECODER, head_dim=16)), language_sample()


# -- experts ----------------------------------------------------------------------------------------------------------


def qwen3_moe(experts: str) -> Built:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    net = Qwen3MoeForCausalLM(Qwen3MoeConfig(**DECODER, **EXPERTS, head_dim=16, norm_topk_prob=True))
    net.set_experts_implementation(experts)
    return net, routed_sample()


@architecture("mixture of experts", "Qwen3MoeForCausalLM", LANGUAGE)
def qwen3_moe_grouped() -> Built:
    return qwen3_moe("grouped_mm")


@architecture("mixture of experts", "Qwen3MoeForCausalLM", LANGUAGE)
def qwen3_moe_looped() -> Built:
    """A loop over the experts that data chooses."""
    return qwen3_moe("eager")


@architecture("mixture of experts", "GptOssForCausalLM", LANGUAGE)
def gpt_oss() -> Built:
    """Sinks in attention, sliding windows in every other layer."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **DECODER | {"intermediate_size": 48},
        head_dim=16,
        sliding_window=32,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    return GptOssForCausalLM(config), routed_sample()


@architecture("mixture of experts", "DeepseekV3ForCausalLM", LANGUAGE)
def deepseek_v3() -> Built:
    """Latent attention, and a router with groups of experts."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **DECODER | {"num_key_value_heads": HEADS},
        moe_intermediate_size=48,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )
    return DeepseekV3ForCausalLM(config), language_sample()


@architecture("mixture of experts", "Glm4MoeForCausalLM", LANGUAGE)
def glm4_moe() -> Built:
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    config = Glm4MoeConfig(
        **DECODER,
        head_dim=16,
        moe_intermediate_size=48,
        n_routed_experts=8,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        use_qk_norm=True,
    )
    return Glm4MoeForCausalLM(config), language_sample()


# -- recurrences beside attention -------------------------------------------------------------------------------------


@architecture("hybrid", "Qwen3NextForCausalLM", LANGUAGE)
def qwen3_next() -> Built:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(**DECODER, **DELTA_RULE, **EXPERTS, shared_expert_intermediate_size=48)
    return Qwen3NextForCausalLM(config), routed_sample()


@architecture("hybrid", "Qwen3_5ForCausalLM", LANGUAGE)
def qwen3_5() -> Built:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**DECODER, **DELTA_RULE)), language_sample()


@architecture("hybrid", "Qwen3_5MoeForCausalLM", LANGUAGE)
def qwen3_5_moe() -> Built:
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    decoder = {key: value for key, value in DECODER.items() if key != "intermediate_size"}
    config = Qwen3_5MoeTextConfig(**decoder, **DELTA_RULE, **EXPERTS, shared_expert_intermediate_size=48)
    return Qwen3_5MoeForCausalLM(config), routed_sample()


@architecture("hybrid", "NemotronHForCausalLM", LANGUAGE)
def nemotron_h() -> Built:
    from transformers import NemotronHConfig, NemotronHForCausalLM

    decoder = {key: value for key, value in DECODER.items() if key != "num_hidden_layers"}
    config = NemotronHConfig(
        **decoder,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        head_dim=16,
        ssm_state_size=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=8,
        moe_intermediate_size=48,
        moe_shared_expert_intermediate_size=48,
    )
    return NemotronHForCausalLM(config), language_sample()


@architecture("hybrid", "FalconH1ForCausalLM", LANGUAGE)
def falcon_h1() -> Built:
    """Attention and a state space side by side in each layer."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    return FalconH1ForCausalLM(FalconH1Config(**DECODER, **MAMBA, mamba_d_ssm=128)), language_sample()


@architecture("hybrid", "Lfm2ForCausalLM", LANGUAGE)
def lfm2() -> Built:
    """Short convolutions with gates, and attention in some layers."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(**DECODER, block_multiple_of=16, full_attn_idxs=[1, 3])
    return Lfm2ForCausalLM(config), language_sample()


@architecture("hybrid", "GraniteMoeHybridForCausalLM", LANGUAGE)
def granite4() -> Built:
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        **DECODER | {"intermediate_size": 48},
        **MAMBA,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        shared_intermediate_size=64,
        num_local_experts=8,
    )
    return GraniteMoeHybridForCausalLM(config), routed_sample()


# -- embeddings of texts ----------------------------------------------------------------------------------------------


class Contrast(nn.Module):
    """Trains an encoder of texts as embedders are trained: each query finds its passage among those of the batch."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def embed(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.net(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    def forward(self, queries: dict[str, torch.Tensor], passages: dict[str, torch.Tensor]) -> torch.Tensor:
        scores = self.embed(**queries) @ self.embed(**passages).t() / 0.05
        return nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


@architecture("encoder", "ModernBertModel", LANGUAGE)
def modernbert_embedder() -> Built:
    from transformers import ModernBertConfig, ModernBertModel

    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    decoder = {key: value for key, value in DECODER.items() if key != "num_key_value_heads"}
    net = ModernBertModel(ModernBertConfig(**decoder | tokens | {"intermediate_size": 96}, local_attention=32))

    def texts(length: int) -> dict[str, torch.Tensor]:
        mask = torch.ones(BATCH, length, dtype=torch.int64)
        mask[1, length - 10 :] = 0
        return {"input_ids": token_ids(BATCH, length), "attention_mask": mask}

    return Contrast(net), {"queries": texts(LENGTH // 2), "passages": texts(LENGTH)}
