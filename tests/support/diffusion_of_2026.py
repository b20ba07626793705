"""Diffusion models of 2026, from small configs with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.architectures import BATCH, HEADS, WIDTH, Architecture, Regression, architecture, images
from tests.support.language_of_2026 import Built

DIFFUSION: dict[str, Architecture] = {}

SIDE, WORDS, HEAD = 8, 24, 16


def places(axes: int) -> torch.Tensor:
    """Of the patches of an image, in rows; the first axis stays 0."""
    found = torch.zeros(SIDE, SIDE, axes)
    found[..., 1] = torch.arange(SIDE)[:, None]
    found[..., 2] = torch.arange(SIDE)[None]
    return found.reshape(-1, axes)


@architecture("diffusion", "Flux2Transformer2DModel", DIFFUSION)
def flux2() -> Built:
    """Modulation that the blocks share, attention beside the feedforward."""
    from diffusers import Flux2Transformer2DModel

    net = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=HEAD,
        num_attention_heads=HEADS,
        joint_attention_dim=32,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
    )
    sample = {
        "hidden_states": torch.randn(BATCH, SIDE * SIDE, 16),
        "encoder_hidden_states": torch.randn(BATCH, WORDS, 32),
        "timestep": torch.rand(BATCH),
        "img_ids": places(4),
        "txt_ids": torch.zeros(WORDS, 4),
        "guidance": torch.full((BATCH,), 4.0),
        "target": torch.randn(BATCH, SIDE * SIDE, 16),
    }
    return Regression(net), sample


@architecture("diffusion", "QwenImageTransformer2DModel", DIFFUSION)
def qwen_image() -> Built:
    """Positions as complex numbers, texts of several lengths."""
    from diffusers import QwenImageTransformer2DModel

    net = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=3,
        attention_head_dim=HEAD,
        num_attention_heads=HEADS,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    mask = torch.ones(BATCH, WORDS, dtype=torch.int64)
    mask[1, WORDS - 5 :] = 0
    sample = {
        "hidden_states": torch.randn(BATCH, SIDE * SIDE, 16),
        "encoder_hidden_states": torch.randn(BATCH, WORDS, 32),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.rand(BATCH),
        "img_shapes": [(1, SIDE, SIDE)] * BATCH,
        "target": torch.randn(BATCH, SIDE * SIDE, 16),
    }
    return Regression(net), sample


@architecture("diffusion", "WanTransformer3DModel", DIFFUSION)
def wan() -> Built:
    """A video."""
    from diffusers import WanTransformer3DModel

    net = WanTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=4 * WIDTH,
        num_layers=3,
        rope_max_seq_len=32,
    )
    video = torch.randn(2, 4, 4, 16, 16)
    sample = {
        "hidden_states": video,
        "timestep": torch.randint(0, 1000, (2,)),
        "encoder_hidden_states": torch.randn(2, WORDS, 32),
        "target": torch.randn_like(video),
    }
    return Regression(net), sample


class ListRegression(nn.Module):
    """`Regression` of a model that takes and returns a list of images."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, target: list[torch.Tensor], **inputs: Any) -> torch.Tensor:
        found = self.net(**inputs).sample
        return torch.stack([nn.functional.mse_loss(a, b) for a, b in zip(found, target, strict=True)]).mean()


@architecture("diffusion", "ZImageTransformer2DModel", DIFFUSION)
def z_image() -> Built:
    """Lists of images and captions of several sizes, padded in the model."""
    from diffusers import ZImageTransformer2DModel

    net = ZImageTransformer2DModel(
        in_channels=4,
        dim=WIDTH,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=HEADS,
        n_kv_heads=HEADS,
        cap_feat_dim=32,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 32, 32],
    )
    sizes = [(16, 16), (16, 8)]
    sample = {
        "x": [torch.randn(4, 1, *size) for size in sizes],
        "t": torch.rand(2),
        "cap_feats": [torch.randn(WORDS, 32), torch.randn(WORDS + 20, 32)],
        "target": [torch.randn(4, 1, *size) for size in sizes],
    }
    return ListRegression(net), sample


@architecture("diffusion", "SD3Transformer2DModel", DIFFUSION)
def sd3_5() -> Built:
    """Of Stable Diffusion 3.5: two attentions in the first blocks."""
    from diffusers import SD3Transformer2DModel

    net = SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=HEAD,
        num_attention_heads=HEADS,
        joint_attention_dim=32,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=32,
        pos_embed_max_size=16,
        dual_attention_layers=(0, 1),
        qk_norm="rms_norm",
    )
    sample = {
        "hidden_states": images(16, 4),
        "encoder_hidden_states": torch.randn(BATCH, WORDS, 32),
        "pooled_projections": torch.randn(BATCH, 32),
        "timestep": torch.randint(0, 1000, (BATCH,)),
        "target": images(16, 4),
    }
    return Regression(net), sample
