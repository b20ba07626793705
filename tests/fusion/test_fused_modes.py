"""Fused kernels in all the ways in which plans run: the bits are those of the fused program with everything kept."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from tests.ranks.test_shards import small, train
from tests.support.fake_shards import FakeShards
from tests.support.zoo import MODELS, Sample, assert_same_bits, call, copied, loss_of, run_steps

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of Inductor
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++"),
]
LINK = memplan.Link(1e9, 1e9)
NO_LIMIT = 1 << 40


def fused(net: nn.Module, sample: Sample, budget: Any, **settings: Any) -> nn.Module:
    """A planned copy."""
    return memplan.apply(copy.deepcopy(net), sample, budget, kernels="fused", costs="estimate", **settings)


def floor_bytes(net: nn.Module, sample: Sample, **settings: Any) -> int:
    return memplan.plan(net, sample, NO_LIMIT, kernels="fused", **settings).floor_bytes


@pytest.fixture(scope="module")
def model() -> tuple[nn.Module, Sample]:
    return MODELS["handmade"](0)


@pytest.fixture(scope="module")
def expected(model: tuple[nn.Module, Sample]) -> dict[str, Any]:
    return run_steps(fused(*model, NO_LIMIT), model[1])


@pytest.mark.parametrize(
    "settings",
    [
        {"grads": "edges"},
        pytest.param({"accumulate": True}, marks=pytest.mark.slow),
        {"in_flight": 2},
        {"host_budget": "1GiB", "link": LINK},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_settings(model: tuple[nn.Module, Sample], expected: dict[str, Any], settings: dict[str, Any]) -> None:
    planned = fused(*model, floor_bytes(*model, **settings), **settings)
    plan = memplan.plan_of(planned)
    assert isinstance(plan, memplan.Plan)
    assert plan.exact == "program"
    assert plan.recomputed or plan.offloaded_bytes
    assert_same_bits(expected, run_steps(planned, model[1]))


def test_updates_in_backward(model: tuple[nn.Module, Sample]) -> None:
    net, sample = model
    found = []
    for update in ("step", "backward"):
        planned = copy.deepcopy(net)
        optimizer = torch.optim.SGD(planned.parameters(), lr=1e-2)
        memplan.apply(planned, sample, NO_LIMIT, kernels="fused", costs="estimate", optimizer=optimizer, update=update)
        torch.manual_seed(1)
        for _ in range(2):
            loss_of(call(planned, sample)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: copied(p) for name, p in planned.named_parameters()})
    assert_same_bits(*found)


@pytest.mark.slow
def test_sharded_parameters() -> None:
    net, sample = small()
    expected = train(fused(net, sample, NO_LIMIT), sample, None)
    for share in (0.0, 0.5):
        hidden, _ = small()
        shards = FakeShards(hidden)
        whole = memplan.plan(hidden, sample, 1.0, costs="estimate", shards=shards, kernels="fused")
        budget = whole.floor_bytes + int(share * (whole.baseline_peak_bytes - whole.floor_bytes))
        memplan.apply(hidden, sample, int(budget * 1.05), costs="estimate", shards=shards, kernels="fused")
        assert_same_bits(expected, train(hidden, sample, shards))


class Branches(nn.Module):
    """Blocks, and between them a branch on what they compute, which no graph has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128), nn.Linear(128, 32))
            for _ in range(4)
        )
        self.guards = nn.ModuleList(Guard() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, guard in zip(self.blocks, [nn.Identity(), *self.guards, nn.Identity()], strict=True):
            x = guard(x + block(x))
        return x


class Guard(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2 if x.abs().mean().item() > 1e6 else x * 1.5


@pytest.mark.slow
def test_islands_between_groups() -> None:
    torch.manual_seed(0)
    net, sample = Branches(), torch.randn(256, 32)
    whole = fused(net, sample, 1.0)
    plan = memplan.plan_of(whole)
    assert isinstance(plan, memplan.Plan)
    assert plan.exact == "program"
    assert len(plan.islands) == 2
    low = fused(net, sample, plan.floor_bytes)
    assert memplan.plan_of(low).recomputed  # type: ignore[union-attr]
    assert_same_bits(run_steps(whole, sample), run_steps(low, sample))


def test_memory_at_other_addresses_gives_the_same_bits(model: tuple[nn.Module, Sample]) -> None:
    """Parameters that begin anywhere in a buffer, as those of optimizers and engines that flatten them do."""
    net, sample = model
    results = []
    for shift in (0, 1, 3):
        moved = fused(net, sample, NO_LIMIT)
        for parameter in moved.parameters():
            buffer = torch.empty(parameter.numel() + 8)
            buffer[shift : shift + parameter.numel()] = parameter.detach().flatten()
            parameter.data = buffer[shift : shift + parameter.numel()].view_as(parameter)
        results.append(run_steps(moved, sample, 1)["grads"])
    for other in results[1:]:
        assert_same_bits(results[0], other)


@pytest.mark.slow
def test_another_batch_is_planned_with_the_same_kernels(model: tuple[nn.Module, Sample]) -> None:
    net, sample = model
    planned = fused(net, sample, NO_LIMIT)
    assert isinstance(sample, torch.Tensor)
    shorter = sample[:32].clone()
    run_steps(planned, shorter, 1)
    assert memplan.plan_of(planned).exact == "program"  # type: ignore[union-attr]
    assert [plan.exact for plan in memplan.prepare(planned, [sample, shorter])] == ["program"] * 2  # type: ignore[union-attr]
