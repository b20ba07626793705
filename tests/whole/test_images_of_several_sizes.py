"""Vision-language models with images of several sizes in a batch: planned whole, with bits of the plain step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import memplan
from tests.support.meter import live_peak
from tests.support.zoo import assert_same_bits, run_steps

IMAGE, BEGIN, END = 190, 192, 193
GRID = torch.tensor([[1, 16, 16], [1, 8, 12]])  # time, height and width of each image, in patches


def model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    text = {
        "vocab_size": 200, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None,
        "use_cache": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 4,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 64,
    }  # fmt: skip
    tokens = {
        "image_token_id": IMAGE,
        "video_token_id": 191,
        "vision_start_token_id": BEGIN,
        "vision_end_token_id": END,
    }
    if kind == "Qwen2.5-VL":
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
        return transformers.Qwen2_5_VLForConditionalGeneration(config).train()
    text |= {"head_dim": 16}
    text["rope_parameters"] |= {"mrope_interleaved": True}  # type: ignore[operator]
    vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)
    return transformers.Qwen3VLForConditionalGeneration(config).train()


def batch() -> dict[str, Any]:
    """Two images among words."""
    generator = torch.Generator().manual_seed(0)
    ids, start = torch.randint(0, 180, (1, 150), generator=generator), 5
    for patches in GRID.prod(1).tolist():
        end = start + patches // 4
        ids[0, start - 1], ids[0, start:end], ids[0, end] = BEGIN, IMAGE, END
        start = end + 5
    pixels = torch.randn(int(GRID.prod(1).sum()), 3 * 2 * 4 * 4, generator=generator)
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "image_grid_thw": GRID,
        "labels": ids.clone(), "mm_token_type_ids": (ids == IMAGE).int(),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Qwen2.5-VL", "Qwen3-VL"])
@pytest.mark.parametrize("budget", ["min", 0.8])
def test_steps(kind: str, budget: Any) -> None:
    net, sample = model(kind), batch()
    planned = copy.deepcopy(net)
    memplan.apply(planned, sample, budget, costs="estimate")
    plan = memplan.plan_of(planned)
    assert isinstance(plan, memplan.Plan)
    assert not plan.islands
    assert budget != "min" or plan.peak_bytes < 0.6 * plan.baseline_peak_bytes
    assert_same_bits(run_steps(net, sample, 2), run_steps(planned, sample, 2))
    assert live_peak(planned, sample) <= plan.live_peak_bytes
