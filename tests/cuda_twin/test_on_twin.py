"""What memplan does with PyTorch's CUDA build, on the twin of a device: `make test-twin`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import memplan
from tests.cuda_twin import twin
from tests.cuda_twin.models import Built, bert, gpt2, llama, pictures, resnet50, small_llama, train

pytestmark = [pytest.mark.twin, pytest.mark.skipif(twin.missing() is not None, reason=str(twin.missing()))]

MIB, GIB = 1 << 20, 1 << 30
ROOT = Path(__file__).resolve().parents[2]
FAST = memplan.Roofline(500e12, 2.4e12)
SMALL: dict[str, Callable[[], Built]] = {
    "gpt2": lambda: gpt2(4, 256, n_layer=4),
    "llama": small_llama,
    "bert": bert,
    "resnet": pictures(resnet50, 16, 128, ()),
}


def held_bytes(step: Callable[[], None]) -> int:
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def plan_of(model: nn.Module) -> memplan.Plan:
    plan = memplan.plan_of(model)
    assert isinstance(plan, memplan.Plan)
    return plan


def counted_bytes(plan: memplan.Plan) -> int:
    """The peak of PyTorch's counter, which has the arena's plugs and its guard in it."""
    return plan.peak_bytes + (0 if plan.steering is None else plan.steering.plugged_bytes)


# -- the twin itself --------------------------------------------------------------------------------------------------


def test_memory_has_a_hard_limit() -> None:
    twin.set_memory(2 * GIB)
    try:
        before = torch.cuda.memory_allocated()
        kept = torch.empty(GIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(GIB, dtype=torch.uint8, device="cuda")
        assert kept.numel() == torch.cuda.memory_allocated() - before
    finally:
        twin.set_memory(80 * GIB)


def test_products_take_the_time_of_their_multiplications() -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    x = torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(20):  # so that the device has work until the host has given it the next
        x @ x
    start.record()
    x @ x
    end.record()
    end.synchronize()
    assert pytest.approx(start.elapsed_time(end) / 1e3, rel=1e-3) == 2 * 8192**3 / 600e12


def test_small_copies_come_back() -> None:
    assert torch.arange(5).cuda().cpu().tolist() == [0, 1, 2, 3, 4]


# -- a step -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arena", [True, False])
@pytest.mark.parametrize("budget", [1.0, 0.7, "min"])
@pytest.mark.parametrize("name", SMALL)
def test_what_is_predicted_is_what_the_allocator_holds(name: str, budget: float | str, arena: bool) -> None:
    model, sample = SMALL[name]()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    memplan.apply(model, sample, budget, optimizer=optimizer, on_infeasible="min", arena=arena)
    held = held_bytes(lambda: train(model, sample, optimizer, steps=3))
    assert held == counted_bytes(plan_of(model))


def test_an_op_is_timed_on_the_devices_clock() -> None:
    model, sample = small_llama(1)
    costs = memplan.plan(model, sample, 1.0).problem.costs
    assert costs.source == "measured" and max(costs.time_s) > 5e-6


def test_frozen_layers_with_attention_by_cudnn_are_planned_whole() -> None:
    model, sample = small_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.3" in name)
    memplan.apply(model, sample, "min")
    held = held_bytes(lambda: train(model, sample))
    with twin.recorded() as calls:
        train(model, sample)
    assert any("cudnn" in twin.name_of(call) for call in calls)
    assert held == counted_bytes(plan_of(model))


def test_llama_of_eight_billion_parameters_trains_its_norms_on_a_card_of_80_gib() -> None:
    model, sample = llama(32, batch=4, length=1024)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    memplan.apply(model, sample, "24GiB", optimizer=optimizer, costs=FAST)
    held = held_bytes(lambda: train(model, sample, optimizer))
    assert 16 * GIB < held <= plan_of(model).peak_bytes <= 24 * GIB


# -- fused kernels ----------------------------------------------------------------------------------------------------

FUSED = """
import sys, torch, memplan
from tests.cuda_twin.models import gpt2
model, sample = gpt2(2, 128, n_layer=1, n_embd=64, n_head=2, vocab_size=500)
memplan.apply(model, sample, 1.0, kernels="fused", costs=memplan.Roofline(500e12, 2.4e12))
model(**sample).loss.backward()
assert all(p.grad is not None for p in model.parameters())
print(memplan.plan_of(model))
"""


@pytest.mark.parametrize("architecture", [80, 89, 90])
def test_groups_are_compiled_for_the_device(architecture: int, tmp_path: Path) -> None:
    """By Inductor, Triton and ptxas, in processes that have the twin as well."""
    environment = {"TWIN_SM": str(architecture), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", FUSED], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    targets = {json.loads(p.read_text())["target"]["arch"] for p in tmp_path.rglob("triton_*.json")}
    assert targets == {architecture}
    assert list(tmp_path.rglob("*.cubin"))
