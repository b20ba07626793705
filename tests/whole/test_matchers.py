"""Detectors, whose losses match boxes by SciPy in the middle of a step: whole plans, with the matcher in them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import memplan
from tests.support.meter import live_peak
from tests.support.zoo import assert_same_bits

pytestmark = pytest.mark.slow


def detector() -> nn.Module:
    torch.manual_seed(0)
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.RTDetrConfig(
        backbone_config=backbone, encoder_hidden_dim=32, encoder_in_channels=[16, 24, 32], encoder_ffn_dim=32,
        encoder_attention_heads=2, d_model=32, num_queries=12, decoder_in_channels=[32, 32, 32], decoder_ffn_dim=32,
        decoder_n_points=2, decoder_layers=2, decoder_attention_heads=2, num_denoising=6, num_labels=5,
    )  # fmt: skip
    return transformers.RTDetrForObjectDetection(config).train()


def losses(net: nn.Module, pixels: torch.Tensor, labels: object) -> list[torch.Tensor]:
    """Losses, parameters and buffers after two steps of an optimizer."""
    torch.manual_seed(1)
    optimizer, found = torch.optim.AdamW(net.parameters(), 1e-3), []
    for _ in range(2):
        loss = net(pixel_values=pixels, labels=labels).loss
        loss.backward()
        found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach() for p in net.parameters()), *net.buffers()]


def test_rt_detr() -> None:
    net, pixels = detector(), torch.randn(2, 3, 64, 64)
    labels = [
        {"class_labels": torch.tensor([1, 3]), "boxes": torch.tensor([[0.4, 0.5, 0.2, 0.3], [0.6, 0.4, 0.3, 0.1]])},
        {"class_labels": torch.tensor([2]), "boxes": torch.tensor([[0.5, 0.5, 0.4, 0.4]])},
    ]
    sample, plain = {"pixel_values": pixels, "labels": labels}, losses(copy.deepcopy(net), pixels, labels)
    budget: Any = "min"
    for _ in range(2):
        planned = copy.deepcopy(net)
        memplan.apply(planned, sample, budget, costs="estimate")
        plan = memplan.plan_of(planned)
        assert isinstance(plan, memplan.Plan)
        assert plan.islands
        assert all(line.startswith("RTDetrHungarianMatcher") for line in plan.islands)
        assert_same_bits(plain, losses(planned, pixels, labels))
        assert live_peak(planned, sample) <= plan.live_peak_bytes
        budget = (plan.peak_bytes + plan.baseline_peak_bytes) // 2
