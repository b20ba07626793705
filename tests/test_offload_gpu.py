"""What tests/test_offload.py shows on a CPU, on a CUDA device: bits, and bytes as the allocator counts them."""

from __future__ import annotations

import copy

import pytest
import torch

import memplan
from tests.test_in_flight import Stage
from tests.test_offload_in_flight import one_f_one_b
from tests.zoo import MODELS, Sample, assert_same_bits, call, copied, loss_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_device(sample: Sample) -> Sample:
    if isinstance(sample, dict):
        return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in sample.items()}
    return tuple(t.cuda() for t in sample) if isinstance(sample, tuple) else sample.cuda()


def trained(net: torch.nn.Module, sample: Sample, steps: int = 3) -> dict[str, object]:
    """Losses and gradients of a few steps, and the parameters after them, all on the CPU."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, foreach=False)
    losses, grads = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(call(net, sample))
        loss.backward()
        losses.append(loss.detach().cpu())
        grads.append({n: p.grad.cpu() for n, p in net.named_parameters() if p.grad is not None})
        optimizer.step()
    return {"losses": losses, "grads": grads}


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "t5"])
@pytest.mark.parametrize("share", [0.8, 0.5])
def test_gradients_are_the_plain_models_bits_and_peaks_are_predicted(name: str, share: float) -> None:
    net, sample = MODELS[name](0)
    there = on_device(sample)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain = copy.deepcopy(net).cuda()
        expected = trained(plain, there)
        del plain
        low = memplan.plan(copy.deepcopy(net).cuda(), there, 1.0).floor_bytes
        memplan.apply(net, there, int(share * low), device="cuda", host_budget="1GiB")
        plan = memplan.plan_of(net)
        assert plan is not None and plan.offloaded_bytes
        call(net, there)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        assert_same_bits(expected, trained(net, there))
        measured = torch.cuda.max_memory_allocated()
        assert measured <= plan.peak_bytes * 1.003 + (1 << 20)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_several_forwards_in_flight_on_a_device(share: float) -> None:
    torch.manual_seed(0)
    plain = Stage().train().cuda()
    planned = copy.deepcopy(plain)
    sample = torch.randn(1 << 14, 32, device="cuda").requires_grad_()
    around = memplan.Surroundings(keeps_parameters=True)
    alone = memplan.plan(planned, sample, 1.0, in_flight=3, surroundings=around)
    free = memplan.plan(planned, sample, 1.0, in_flight=3, surroundings=around, host_budget="1GiB")
    budget = int(free.floor_bytes + share * (alone.floor_bytes - free.floor_bytes))
    memplan.apply(planned, sample, budget, in_flight=3, surroundings=around, host_budget="1GiB")
    plan = memplan.plan_of(planned)
    assert plan is not None and plan.offloaded_bytes
    found = []
    for stage in (plain, planned):
        torch.manual_seed(1)
        waiting, rows = [], []
        for kind, _ in one_f_one_b(3, 12):
            if kind == "F":
                x = torch.randn_like(sample).requires_grad_()
                waiting.append((x, stage(x)))
            else:
                x, out = waiting.pop(0)
                out.backward(torch.ones_like(out))
                rows += [copied(out), copied(x.grad)]
        found.append([*rows, [copied(p.grad) for p in stage.parameters()]])
    assert_same_bits(*found)
