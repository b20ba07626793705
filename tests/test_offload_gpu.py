"""What tests/test_offload.py shows on a CPU, on a CUDA device: bits, and bytes as the allocator counts them."""

from __future__ import annotations

import copy

import pytest
import torch

import memplan
from memplan.graph.libraries import most_library_bytes
from tests.on_gpu import ON_GPU, assert_as_plain, assert_peak_is_predicted, deterministic, to_device
from tests.test_in_flight import Stage
from tests.test_keep_frozen import Adapted
from tests.test_offload_in_flight import one_f_one_b
from tests.zoo import MODELS, assert_same_bits, call, copied

pytestmark = ON_GPU


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "t5"])
@pytest.mark.parametrize("share", [0.6, 0.0])
def test_gradients_are_the_plain_models_bits_and_peaks_are_predicted(name: str, share: float) -> None:
    net, sample = MODELS[name](0)
    sample = to_device(sample)
    with deterministic():
        plain = copy.deepcopy(net).cuda()
        low = memplan.plan(plain, sample, 1.0).floor_bytes
        least = memplan.plan(net, sample, low, device="cuda", host_budget="1GiB").floor_bytes
        budget = least + int(share * (low - least))
        memplan.apply(net, sample, budget, device="cuda", host_budget="1GiB")
        plan = memplan.plan_of(net)
        assert plan is not None and plan.offloaded_bytes and plan.peak_bytes <= budget
        assert_as_plain(plain, net, sample)
        del plain
        assert_peak_is_predicted(net, sample)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_the_plain_forward_finds_parameters_on_the_host(autocast: bool) -> None:
    net, sample = MODELS["gpt2"](0)
    sample = to_device(sample)
    plain = copy.deepcopy(net).cuda().eval()
    library_bytes = most_library_bytes(torch.device("cuda"))
    low = memplan.plan(copy.deepcopy(net).cuda(), sample, 1.0).floor_bytes
    budget = library_bytes + (low - library_bytes) // 2
    memplan.apply(net, sample, budget, device="cuda", host_budget="1GiB")
    assert any(p.is_pinned() for p in net.parameters())
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        assert torch.equal(call(net.eval(), sample).logits, call(plain, sample).logits)


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


def test_frozen_parameters_stay_on_a_device() -> None:
    torch.manual_seed(0)
    net, sample = Adapted(256, 6), torch.randn(512, 256, device="cuda")
    library_bytes = most_library_bytes(torch.device("cuda"))
    with deterministic():
        plain = copy.deepcopy(net).cuda()
        low = memplan.plan(plain, sample, 1.0).floor_bytes
        options = {"device": "cuda", "host_budget": "1GiB", "link": memplan.Link(1e8, 1e8), "keep_frozen": True}
        budgets = [library_bytes + int(share * (low - library_bytes)) for share in (0.7, 0.8, 0.9)]
        budget = next(b for b in budgets if memplan.plan(net, sample, b, **options).staying_bytes)
        memplan.apply(net, sample, budget, **options)
        plan = memplan.plan_of(net)
        assert plan is not None and plan.staying_bytes
        for _ in range(4):
            assert_as_plain(plain, net, sample)
            for model in (plain, net):
                with torch.no_grad():
                    model.frozen[0].weight[0, 0] += 1  # type: ignore[index,operator]
        del plain
        assert_peak_is_predicted(net, sample)
