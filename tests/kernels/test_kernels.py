"""Kernels of libraries, which run on a CPU by Triton's interpreter: bits of the plain step, and planned peaks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from liger_kernel.transformers import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
from liger_kernel.transformers.rope import liger_rotary_pos_emb
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch_geometric.nn import GATConv, GCNConv

import memplan
from memplan.installed.planned_forward import planned_forward
from memplan.runtime.program.step import PlannedStep
from tests.support.meter import live_peak
from tests.support.plannings import plannings
from tests.support.zoo import assert_same_bits, copied, run_steps

pytestmark = pytest.mark.kernels


class Block(nn.Module):
    """Attention with rotary positions by Liger's kernel, and a wide layer."""

    def __init__(self, rotary: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm, self.wide, self.back = nn.RMSNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.rotary = rotary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        if self.rotary:
            angles = torch.arange(x.shape[1])[:, None] / 100.0 ** (torch.arange(16) % 8 / 8)
            q, k = liger_rotary_pos_emb(q, k, angles.cos()[None], angles.sin()[None])
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.back(nn.functional.silu(self.wide(self.norm(x))))


class Model(nn.Module):
    def __init__(self, loss: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.blocks = nn.ModuleList(Block(loss == "rotary") for _ in range(3))
        self.fused = LigerFusedLinearCrossEntropyLoss() if loss == "fused linear cross entropy" else None
        self.loss = nn.CrossEntropyLoss() if loss == "rotary" else LigerCrossEntropyLoss()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        if self.fused is not None:
            return self.fused(self.head.weight, x.flatten(0, 1), labels.flatten())  # type: ignore[no-any-return]
        return self.loss(self.head(x).flatten(0, 1), labels.flatten())  # type: ignore[no-any-return]


class Graph(nn.Module):
    """Layers of PyG on the edges that a mask leaves."""

    def __init__(self, attention: bool) -> None:
        super().__init__()
        layers = (GATConv(16, 8, heads=2, dropout=0.1) if attention else GCNConv(16, 16) for _ in range(3))
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, edges[:, mask]).relu()
        return nn.functional.cross_entropy(self.head(x), torch.arange(len(x)) % 4)


def planned_like_plain(net: nn.Module, sample: Any) -> memplan.Plan:
    """Bits of two steps and the peak, at the floor and half way to the plain peak. Gives the plan at the floor."""
    plain = run_steps(copy.deepcopy(net), sample)
    floor = None
    for budget in ("min", None):
        planned = copy.deepcopy(net)
        if floor is not None:
            budget = (floor.peak_bytes + floor.baseline_peak_bytes) // 2
        memplan.apply(planned, sample, budget, costs="estimate")
        plan = memplan.plan_of(planned)
        assert isinstance(plan, memplan.Plan)
        floor = floor or plan
        assert_same_bits(plain, run_steps(planned, sample))
        assert live_peak(planned, sample) <= plan.live_peak_bytes
    assert floor is not None
    return floor


@pytest.mark.parametrize("loss", ["cross entropy", "fused linear cross entropy", "rotary"])
def test_liger(loss: str) -> None:
    torch.manual_seed(0)
    sample = torch.randint(0, 64, (2, 32)), torch.randint(0, 64, (2, 32))
    plan = planned_like_plain(Model(loss), sample)
    assert any("Liger" in line for line in plan.islands)
    assert plan.peak_bytes < 0.75 * plan.baseline_peak_bytes


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("loss", ["cross entropy", "fused linear cross entropy", "rotary"])
def test_liger_in_units_of_fully_shard(loss: str, one_rank: None) -> None:
    def in_units() -> nn.Module:
        torch.manual_seed(0)
        net = Model(loss)
        for unit in (*net.blocks, net):
            fully_shard(unit)
        return net

    sample = torch.randint(0, 64, (2, 32)), torch.randint(0, 64, (2, 32))
    plain, planned = in_units(), in_units()
    memplan.apply(planned, sample, "min", costs="estimate")
    plan = memplan.plan_of(planned)
    assert plan is not None and any("Liger" in line for line in plan.islands) and plan.recomputed
    for _ in range(3):
        losses = [net(*sample) for net in (plain, planned)]
        for each in losses:
            each.backward()
        grads = [[copied(p.grad.to_local()) for p in net.parameters()] for net in (plain, planned)]  # type: ignore[union-attr, operator]
        assert_same_bits((losses[0], grads[0]), (losses[1], grads[1]))


@pytest.mark.parametrize("loss", ["cross entropy", "fused linear cross entropy"])
def test_liger_at_several_lengths(loss: str) -> None:
    torch.manual_seed(0)
    samples = [tuple(torch.randint(0, 64, (2, length)) for _ in range(2)) for length in (12, 16, 9, 21)]
    plain, planned = Model(loss), Model(loss)
    planned.load_state_dict(plain.state_dict())
    memplan.apply(planned, samples[0], "4MiB", costs="estimate")  # before any kernel has run
    forward = planned_forward(planned)
    assert forward is not None
    with plannings() as reasons:
        for sample in samples:
            assert_same_bits(run_steps(plain, sample, steps=1), run_steps(planned, sample, steps=1))
            (step, *_) = forward.steps
            assert isinstance(step, PlannedStep)
            plan = step.plan_for(forward.choice.reader.read_sample(sample))
            assert live_peak(planned, sample) <= plan.live_peak_bytes
    assert len(reasons) == 1  # for all lengths but the first


@pytest.mark.parametrize("attention", [False, True])
def test_graphs(attention: bool) -> None:
    torch.manual_seed(0)
    sample = torch.randn(200, 16), torch.randint(0, 200, (2, 1500)), torch.rand(1500) > 0.3
    plan = planned_like_plain(Graph(attention), sample)
    assert not plan.islands
    assert plan.peak_bytes < 0.75 * plan.baseline_peak_bytes
