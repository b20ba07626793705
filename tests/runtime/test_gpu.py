"""Plans on a CUDA device: the plain model's bits, and peaks as the allocator counts them. `make test-gpu`."""

from __future__ import annotations

import copy
import ctypes
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memplan
from memplan import torch_private as private
from memplan.costs.optimizer import most_library_bytes
from tests.support.on_gpu import (
    ON_GPU,
    SLACK_BYTES,
    assert_as_plain,
    assert_peak_is_predicted,
    deterministic,
    to_device,
)
from tests.support.zoo import MODELS, loss_of

pytestmark = ON_GPU


QUICK = ("gpt2", "llama", "transformer")


def low_budget(net: nn.Module, sample: object, **keywords: object) -> int:
    """A budget in which much has to run again: near the smallest."""
    plan = memplan.plan(net, sample, 1 << 45, **keywords)  # type: ignore[arg-type]
    return plan.floor_bytes + (plan.baseline_peak_bytes - plan.floor_bytes) // 10


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_a_planned_model_trains_to_the_same_bits_within_its_peak(name: str, autocast: bool) -> None:
    net, sample = MODELS[name](0)
    net, sample = net.cuda(), to_device(sample)
    plain = copy.deepcopy(net)
    with deterministic():
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            memplan.apply(net, sample, low_budget(net, sample))
        assert_peak_is_predicted(net, sample, autocast)
        plain.load_state_dict(net.state_dict())
        assert_as_plain(plain, net, sample, autocast=autocast)


class _Overwrites(torch.autograd.Function):
    """Fills its input by its address, which PyTorch does not see, and saves it, as kernels of Liger do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = x * 1.0
        if hasattr(torch.cuda, "stand_in"):
            ctypes.memset(x.data_ptr(), 0x40, x.nbytes)
        else:
            fill = ctypes.CDLL("libcuda.so.1").cuMemsetD8_v2
            assert fill(ctypes.c_uint64(x.data_ptr()), ctypes.c_ubyte(0x40), ctypes.c_size_t(x.nbytes)) == 0
        ctx.save_for_backward(x.detach())
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x


class _Overwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(_Overwrites.apply(torch.exp(0.1 * layer(x))))  # type: ignore[no-untyped-call]
        return x.mean()


def test_what_a_kernel_puts_into_its_input_stays_in_memory_for_backward() -> None:
    net, x = _Overwritten().cuda(), torch.randn(4096, 256, device="cuda")
    plain = copy.deepcopy(net)
    with deterministic():
        memplan.apply(net, x, "min")
        assert_peak_is_predicted(net, x)
        assert_as_plain(plain, net, x)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_on_another_device_than_the_current_one() -> None:
    net, sample = MODELS["gpt2"](0)
    net, sample = net.to("cuda:1"), to_device(sample, "cuda:1")
    plain = copy.deepcopy(net)
    with deterministic():
        memplan.apply(net, sample, low_budget(net, sample))
        assert_peak_is_predicted(net, sample)
        assert_as_plain(plain, net, sample)


class Host(nn.Module):
    """Noise from the CPU's generator, lengths and a number on the host, beside dropout on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            noise = torch.rand(x.shape).to(x.device)
            x = self.drop(torch.tanh(layer(x) * noise)) * lengths.to(x.device).sum() * torch.tensor(0.5)
        return x.pow(2).mean()


def test_what_is_on_the_host_stays_there() -> None:
    net = Host().cuda()
    sample = (torch.randn(512, 256, device="cuda"), torch.tensor([1.0, 2.0]))
    plain = copy.deepcopy(net)
    with deterministic():
        memplan.apply(net, sample, low_budget(net, sample))
        assert_peak_is_predicted(net, sample)
        assert_as_plain(plain, net, sample)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor"])
def test_the_optimizers_step_is_in_the_peak(name: str) -> None:
    net, sample = MODELS["gpt2"](0)
    net, sample = net.cuda(), to_device(sample)
    optimizer = getattr(torch.optim, name)(net.parameters(), lr=1e-3)
    memplan.apply(net, sample, low_budget(net, sample, optimizer=optimizer), optimizer=optimizer)
    plan = memplan.plan_of(net)
    assert plan is not None
    for _ in range(3):
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        loss_of(net(**sample)).backward()
        optimizer.step()
        optimizer.zero_grad()
    device = torch.device("cuda", torch.cuda.current_device())
    others_bytes = private.requested_bytes(device)[0] - plan.problem.resident_bytes
    assert private.requested_bytes(device)[1] - max(0, others_bytes) <= plan.peak_bytes * 1.003 + SLACK_BYTES


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.pow(2).mean()


def test_a_step_that_runs_out_of_memory_is_planned_again(cost_cache: object) -> None:
    net, x = Deep().cuda(), torch.randn(4096, 1024, device="cuda")
    memplan.apply(net, x, memplan.plan(net, x, 1 << 45).baseline_peak_bytes, on_oom="replan")
    plan = memplan.plan_of(net)
    assert plan is not None
    torch.cuda.empty_cache()
    others_bytes = torch.cuda.memory_allocated() - plan.problem.resident_bytes
    allowed_bytes = plan.peak_bytes + others_bytes - (8 << 20)
    torch.cuda.set_per_process_memory_fraction(allowed_bytes / torch.cuda.get_device_properties(0).total_memory)
    try:
        net(x).backward()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    after = memplan.plan_of(net)
    assert after is not None and after.peak_bytes < plan.peak_bytes


def test_a_model_trains_on_a_stream_of_its_own() -> None:
    net, x = Deep().cuda(), torch.randn(1024, 1024, device="cuda")
    plain, stream = copy.deepcopy(net), torch.cuda.Stream()
    with deterministic(), torch.cuda.stream(stream):
        memplan.apply(net, x, low_budget(net, x))
        assert_as_plain(plain, net, x)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if x.sum().item() > 1e9:
                x = x * 2
        return x.pow(2).mean()


def test_what_runs_unplanned_has_to_be_on_the_device() -> None:
    net, x = Branching(), torch.randn(512, 64)
    with pytest.raises(memplan.UnsupportedModel, match=r"call model\.to\('cuda:0'\) before"):
        memplan.apply(net, x, 1.0, device="cuda")
    net.cuda()
    plain, here = copy.deepcopy(net), x.cuda()
    with pytest.raises(memplan.BudgetInfeasible) as caught:
        memplan.apply(net, x, 1, device="cuda")
    assert caught.value.floor_bytes is not None
    with deterministic():
        memplan.apply(net, x, caught.value.floor_bytes, device="cuda")
        assert memplan.plan_of(net) is None
        assert_as_plain(plain, net, here)


class Seeding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return grad


class Seeded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Seeding.apply(self.linear(x)).sum()  # type: ignore[no-any-return, no-untyped-call]


def test_seeding_is_found_on_autograds_thread_too() -> None:
    (island,) = memplan.plan(Seeded().cuda(), torch.randn(8, 64, device="cuda"), 1.0).islands
    assert island.startswith("Seeding at ")
    assert "seeds the generator" in island


def test_the_precision_that_pytorch_recommends_to_set() -> None:
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        net, x = Deep().cuda(), torch.randn(512, 1024, device="cuda")
        plain = copy.deepcopy(net)
        with deterministic():
            memplan.apply(net, x, low_budget(net, x))
            assert_as_plain(plain, net, x)
    finally:
        matmul.fp32_precision = before


def test_workspaces_are_as_large_as_counted() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch._C._cuda_clearCublasWorkspaces()
    before_bytes = torch.cuda.memory_allocated(device)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(device)
    x = torch.ones(64, 64, device=device)
    checkpoint(net, x, use_reentrant=False).sum().backward()  # on autograd's thread a bias is added, too
    del net, x
    assert torch.cuda.memory_allocated(device) - before_bytes == most_library_bytes(device)


@pytest.mark.skipif(hasattr(torch.cuda, "stand_in"), reason="the stand-in for a CUDA device has no graphs")
def test_a_planned_step_in_a_cuda_graph_has_the_bits_of_plain_steps() -> None:
    layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)) for _ in range(4))
    net = nn.Sequential(*layers).cuda()
    plain, x, side = copy.deepcopy(net), torch.randn(512, 64, device="cuda"), torch.cuda.Stream()
    memplan.apply(net, x, "min", loss_fn=lambda net, x: net(x).square().mean())
    for stream in (torch.cuda.current_stream(), side):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            net(x).backward()
            net.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = net(x)
        loss.backward()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        expected = plain(x).square().mean()
        expected.backward()
        assert torch.equal(loss, expected)
        for parameter, other in zip(net.parameters(), plain.parameters(), strict=True):
            assert parameter.grad is not None and other.grad is not None and torch.equal(parameter.grad, other.grad)
        plain.zero_grad()
