"""Models of images, videos, sounds and actions of 2026, from small configs with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.architectures import (
    BATCH,
    HEADS,
    LENGTH,
    NO_SPECIAL_TOKENS,
    VOCABULARY,
    WIDTH,
    Architecture,
    architecture,
    class_labels,
    images,
    token_ids,
)
from tests.support.language_of_2026 import DECODER, Built

SEEN_AND_HEARD: dict[str, Architecture] = {}

IMAGE = VOCABULARY - 1
TEXT = {**DECODER, "num_hidden_layers": 3, "head_dim": 16}
VISION: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
}


def illustrated(image_tokens: int, batch: int = BATCH, length: int = LENGTH) -> dict[str, Any]:
    """Texts that begin with an image."""
    ids = token_ids(batch, length, below=VOCABULARY - 10)
    labels = ids.clone()
    ids[:, 2 : 2 + image_tokens] = IMAGE
    labels[:, 2 : 2 + image_tokens] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "use_cache": False}


# -- text and images --------------------------------------------------------------------------------------------------

GRID = torch.tensor([[1, 16, 16], [1, 8, 12]])  # time, height and width of each image, in patches
ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
PATCHES: dict[str, Any] = {
    "depth": 3,
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_heads": HEADS,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": WIDTH,
}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VOCABULARY - 2,
    "vision_start_token_id": VOCABULARY - 3,
    "vision_end_token_id": VOCABULARY - 4,
}


def two_images() -> dict[str, Any]:
    """Images of different sizes among words."""
    ids, start = token_ids(1, 150, below=VOCABULARY - 10), 5
    for patches in GRID.prod(1).tolist():
        end = start + patches // 4
        ids[0, start - 1], ids[0, start:end], ids[0, end] = TOKENS["vision_start_token_id"], IMAGE, VOCABULARY - 4
        start = end + 5
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(int(GRID.prod(1).sum()), 3 * 2 * 4 * 4),
        "image_grid_thw": GRID,
        "labels": ids.clone(),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "use_cache": False,
    }


@architecture("multimodal", "Qwen2_5_VLForConditionalGeneration", SEEN_AND_HEARD)
def qwen2_5_vl() -> Built:
    """Two images of different sizes, most layers look at windows of them."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {key: value for key, value in TEXT.items() if key != "head_dim"}
    vision = {**PATCHES, "window_size": 16, "fullatt_block_indexes": [2]}
    config = Qwen2_5_VLConfig(text_config={**text, "rope_parameters": ROTARY}, vision_config=vision, **TOKENS)
    return Qwen2_5_VLForConditionalGeneration(config), two_images()


@architecture("multimodal", "Qwen3VLForConditionalGeneration", SEEN_AND_HEARD)
def qwen3_vl() -> Built:
    """Two images of different sizes, whose features enter several layers of the text model."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = {**TEXT, "rope_parameters": {**ROTARY, "mrope_interleaved": True}}
    vision = {**PATCHES, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **TOKENS)
    return Qwen3VLForConditionalGeneration(config), two_images()


@architecture("multimodal", "InternVLForConditionalGeneration", SEEN_AND_HEARD)
def internvl() -> Built:
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    text = {key: value for key, value in TEXT.items() if key != "head_dim"}
    config = InternVLConfig(
        text_config={**text, "model_type": "qwen2"},
        vision_config={**VISION, "image_size": 32, "patch_size": 4},
        image_token_id=IMAGE,
        image_seq_length=16,
    )
    return InternVLForConditionalGeneration(config), {**illustrated(16), "pixel_values": images(32)}


@architecture("multimodal", "Gemma3ForConditionalGeneration", SEEN_AND_HEARD)
def gemma3() -> Built:
    """An image whose tokens see each other, sliding windows in most layers."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = Gemma3Config(
        text_config={**TEXT, "sliding_window": 32, "sliding_window_pattern": 3, "query_pre_attn_scalar": 16},
        vision_config={**VISION, "image_size": 32, "patch_size": 4},
        mm_tokens_per_image=16,
        image_token_index=IMAGE,
        boi_token_index=VOCABULARY - 3,
        eoi_token_index=VOCABULARY - 4,
    )
    sample = illustrated(16)
    types = (sample["input_ids"] == IMAGE).int()
    return Gemma3ForConditionalGeneration(config), {**sample, "pixel_values": images(32), "token_type_ids": types}


@architecture("multimodal", "Gemma4ForConditionalGeneration", SEEN_AND_HEARD)
def gemma4() -> Built:
    """An image in patches with places, embeddings for each layer, experts beside dense layers."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    config = Gemma4Config(
        text_config={
            **TEXT,
            "pad_token_id": 0,
            "global_head_dim": 32,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
        vision_config={
            **VISION, "num_key_value_heads": HEADS, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        audio_config=None,
        **{key: value for key, value in TOKENS.items() if not key.startswith("vision")},
    )  # fmt: skip
    sample = illustrated(16)
    places = torch.cartesian_prod(torch.arange(8), torch.arange(8)).expand(BATCH, 64, 2)
    types = (sample["input_ids"] == IMAGE).int()
    return Gemma4ForConditionalGeneration(config), {
        **sample,
        "pixel_values": torch.rand(BATCH, 64, 3 * 4 * 4),
        "image_position_ids": places.contiguous(),
        "mm_token_type_ids": types,
    }


# -- sounds and actions -----------------------------------------------------------------------------------------------


@architecture("audio", "VoxtralForConditionalGeneration", SEEN_AND_HEARD)
def voxtral() -> Built:
    from transformers import VoxtralConfig, VoxtralForConditionalGeneration

    audio = {**VISION, "num_mel_bins": 20, "max_source_positions": 64}
    config = VoxtralConfig(
        text_config={**TEXT, "model_type": "llama"},
        audio_config={**audio, "intermediate_size": 4 * WIDTH},
        audio_token_id=IMAGE,
    )
    return VoxtralForConditionalGeneration(config), {**illustrated(16), "input_features": torch.randn(BATCH, 20, 128)}


class LossAlone(nn.Module):
    """Returns the loss of a model, without the cache that it fills."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **inputs: Any) -> torch.Tensor:
        return self.net(**inputs).loss


@architecture("policy", "PI0ForConditionalGeneration", SEEN_AND_HEARD)
def pi0() -> Built:
    """Two cameras and an instruction: flow matching of a robot's actions, with noise and times that forward draws."""
    from transformers import PI0Config, PI0ForConditionalGeneration

    text = {**TEXT, "model_type": "gemma", "num_key_value_heads": 1}
    config = PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": text,
            "vision_config": {
                **VISION, "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8,
                "vision_use_head": False,
            },
            "projection_dim": WIDTH,
            "image_token_id": IMAGE,
        },
        dit_config={**text, "hidden_size": 32, "intermediate_size": 96},
        chunk_size=16,
        max_state_dim=8,
        max_action_dim=8,
    )  # fmt: skip
    sample = illustrated(32)
    sample = {
        "input_ids": sample["input_ids"],
        "attention_mask": sample["attention_mask"],
        "pixel_values": torch.randn(BATCH, 2, 3, 32, 32),
        "pixel_attention_mask": torch.ones(BATCH, 2, dtype=torch.bool),
        "state": torch.randn(BATCH, 8),
        "actions": torch.randn(BATCH, 16, 8),
    }
    return LossAlone(PI0ForConditionalGeneration(config)), sample


# -- vision -----------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """A backbone that is tuned for classes of images."""

    def __init__(self, net: nn.Module, classes: int = 10) -> None:
        super().__init__()
        self.net, self.head = net, nn.Linear(WIDTH, classes)

    def forward(self, labels: torch.Tensor, **inputs: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.net(**inputs).pooler_output), labels)


@architecture("vision", "DINOv3ViTModel", SEEN_AND_HEARD)
def dinov3() -> Built:
    """Places are shifted, scaled and jittered at random while training."""
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    config = DINOv3ViTConfig(
        **VISION,
        image_size=32,
        patch_size=4,
        num_register_tokens=4,
        use_gated_mlp=True,
        drop_path_rate=0.1,
        pos_embed_shift=0.1,
        pos_embed_jitter=1.1,
    )
    return Classifier(DINOv3ViTModel(config)), {"pixel_values": images(32), "labels": class_labels(10)}


class Segmentation(nn.Module):
    """Masks, boxes and scores that are drawn to given ones, without a matcher: one object for each query."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, masks: torch.Tensor, boxes: torch.Tensor, **inputs: Any) -> torch.Tensor:
        found = self.net(**inputs)
        area = nn.functional.binary_cross_entropy_with_logits(found.pred_masks, masks)
        score = nn.functional.binary_cross_entropy_with_logits(found.pred_logits, masks.flatten(2).amax(-1))
        return area + score + nn.functional.l1_loss(found.pred_boxes, boxes) + found.semantic_seg.square().mean()


@architecture("segmentation", "Sam3Model", SEEN_AND_HEARD)
def sam3() -> Built:
    """Objects of a concept that words name."""
    from transformers import Sam3Config, Sam3Model

    part = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": HEADS, "num_layers": 2}
    config = Sam3Config(
        vision_config={
            "backbone_config": {
                **VISION, "model_type": "sam3_vit_model", "image_size": 64, "patch_size": 8, "window_size": 4,
                "pretrain_image_size": 32, "global_attn_indexes": [2],
            },
            "fpn_hidden_size": 32,
            "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
        },
        text_config={
            **VISION, "model_type": "clip_text_model", "vocab_size": VOCABULARY, "max_position_embeddings": 16,
            "projection_dim": 32, **NO_SPECIAL_TOKENS, "eos_token_id": IMAGE,
        },
        geometry_encoder_config={**part, "roi_size": 3},
        detr_encoder_config=part,
        detr_decoder_config={**part, "num_queries": 12},
        mask_decoder_config={"hidden_size": 32, "num_attention_heads": HEADS},
    )  # fmt: skip
    ids = token_ids(2, 8, below=IMAGE)
    ids[:, -1] = IMAGE
    sample = {
        "pixel_values": images(64, batch=2),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "masks": (torch.rand(2, 12, 32, 32) > 0.5).float(),
        "boxes": torch.rand(2, 12, 4),
    }
    return Segmentation(Sam3Model(config)), sample


def boxes_of(count: int) -> list[dict[str, torch.Tensor]]:
    """What a detector is to find, of a batch of images."""
    return [
        {"class_labels": torch.randint(0, 5, (n,)), "boxes": torch.rand(n, 4) * 0.4 + 0.2} for n in range(1, count + 1)
    ]


@architecture("detection", "RfDetrForObjectDetection", SEEN_AND_HEARD)
def rf_detr() -> Built:
    """Boxes are matched with groups of queries by SciPy, in the middle of the loss."""
    from transformers import RfDetrConfig, RfDetrForObjectDetection

    backbone = {
        "model_type": "rf_detr_dinov2", "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": HEADS,
        "image_size": 64, "patch_size": 8, "num_windows": 2, "out_indices": [1, 3],
    }  # fmt: skip
    config = RfDetrConfig(
        backbone_config=backbone,
        d_model=32,
        num_queries=12,
        group_detr=3,
        decoder_layers=2,
        decoder_ffn_dim=64,
        decoder_n_points=2,
        decoder_self_attention_heads=HEADS,
        decoder_cross_attention_heads=HEADS,
        c2f_num_blocks=1,
        num_labels=5,
    )
    sample = {"pixel_values": images(64), "labels": boxes_of(BATCH)}
    return RfDetrForObjectDetection(config), sample


@architecture("detection", "RTDetrForObjectDetection", SEEN_AND_HEARD)
def rt_detr() -> Built:
    from transformers import RTDetrConfig, RTDetrForObjectDetection, RTDetrResNetConfig

    backbone = RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = RTDetrConfig(
        backbone_config=backbone, encoder_hidden_dim=32, encoder_in_channels=[16, 24, 32], encoder_ffn_dim=32,
        encoder_attention_heads=2, d_model=32, num_queries=12, decoder_in_channels=[32, 32, 32], decoder_ffn_dim=32,
        decoder_n_points=2, decoder_layers=2, decoder_attention_heads=2, num_denoising=6, num_labels=5,
    )  # fmt: skip
    return RTDetrForObjectDetection(config), {"pixel_values": images(128), "labels": boxes_of(BATCH)}
