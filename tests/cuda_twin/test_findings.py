"""What a real allocator and real kernels showed of budgets, devices and comparisons, on the twin of a device."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from torch import nn

import memplan
from memplan import torch_private as private

twin = pytest.importorskip("tests.cuda_twin.twin", reason="there is no twin of a device here")
pytestmark = [pytest.mark.twin, pytest.mark.skipif(twin.missing() is not None, reason=str(twin.missing()))]


class Network(nn.Module):
    """Layers whose odd sizes leave pieces in an allocator, and an output that is much larger than the rest."""

    def __init__(self, device: str = "cuda", classes: int = 9001) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(700, 700) for _ in range(12))
        self.head = nn.Linear(700, classes)
        self.to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(nn.functional.gelu(layer(x)), 0.1)
        return nn.functional.log_softmax(self.head(x), -1).mean()


def test_a_tight_budget_runs_within_a_tenth_more_of_reserved_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    net, x = Network().train(), torch.zeros(4003, 700, device="cuda")
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    memplan.apply(net, x, "min", optimizer=optimizer)
    assert private.segments_expand()
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan) and plan.recomputed
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(plan.peak_bytes * 1.1 / total)
    try:
        for _ in range(5):
            net(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_blocks_that_are_larger_than_asked_for_teach_no_margin(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memplan")
    net, x = Network(classes=11).train(), torch.zeros(1500, 700, device="cuda")
    memplan.apply(net, x, 0.9)
    for _ in range(3):
        net(x).backward()
        net.zero_grad()
    assert "the step peaks at" in caplog.text
    assert "more than predicted" not in caplog.text


def test_a_default_device_leaves_the_host_alone() -> None:
    torch.set_default_device("cuda")
    try:
        net, x = Network(classes=11).train(), torch.zeros(500, 700)
        plan = memplan.plan(net, x, 1.0)
        memplan.apply(net, x, plan.floor_bytes, host_budget="1GiB")
        for _ in range(2):
            net(x).backward()
    finally:
        torch.set_default_device(None)


def test_fused_kernels_run_on_the_models_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices, and the twin is one")
    gc.collect()
    before_bytes = torch.cuda.memory_allocated(0)
    net, x = Network("cuda:1", 11).train(), torch.zeros(500, 700, device="cuda:1")
    memplan.apply(net, x, 1.0, kernels="fused")
    for _ in range(2):
        net(x).backward()
        net.zero_grad()
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan) and plan.exact == "program"
    assert torch.cuda.memory_allocated(0) == before_bytes
