"""What the tests on a CUDA device share: training there in the same bits each time, and what the allocator held."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan import torch_private as private
from tests.support.zoo import Sample, assert_same_bits, call, copied, first_difference, loss_of

if torch.cuda.is_available():  # else plans on paper for named cards would count the workspaces of these tests
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used: sums in one order

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REAL_GPU = pytest.mark.skipif(hasattr(torch.cuda, "stand_in"), reason="the stand-in for a CUDA device has no clock")
SLACK_BYTES = 1 << 14  # of tiny tensors in kernels' own code


def to_device(sample: Sample, device: str = "cuda") -> Sample:
    """The sample there."""
    if isinstance(sample, dict):
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in sample.items()}
    return tuple(t.to(device) for t in sample) if isinstance(sample, tuple) else sample.to(device)


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that sum in one order. Ops that have none raise."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def trained(net: nn.Module, sample: Sample, steps: int = 3, autocast: bool = False) -> dict[str, Any]:
    """Losses, gradients and generators of a few steps, and the parameters after them, all on the CPU.

    Parameters are stepped on the CPU wherever they live: devices multiply and add in other roundings.
    """
    torch.manual_seed(7)
    losses, grads = [], []
    for _ in range(steps):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            output = call(net, sample)
        loss = loss_of(output)
        loss.backward()
        losses.append(loss.detach().cpu())
        grads.append({n: copied(p.grad.cpu()) for n, p in net.named_parameters() if p.grad is not None})
        del output, loss
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.copy_(parameter.cpu() - 1e-3 * parameter.grad.cpu())
                    parameter.grad = None
    states = [torch.get_rng_state(), torch.cuda.get_rng_state(next(_devices(sample)))]
    return {"losses": losses, "grads": grads, "params": {n: p.detach().cpu() for n, p in net.named_parameters()},
            "generators": states}  # fmt: skip


def _devices(sample: Sample) -> Iterator[torch.device]:
    tensors = sample.values() if isinstance(sample, dict) else sample if isinstance(sample, tuple) else [sample]
    yield from (t.device for t in tensors if isinstance(t, torch.Tensor) and t.device.type == "cuda")


def assert_as_plain(plain: nn.Module, net: nn.Module, sample: Sample, **keywords: Any) -> None:
    """The planned `net` trains to the bits of `plain`, of which the parameters are the same, and which has the same
    bits each time."""
    before = {n: copied(p.detach()) for n, p in plain.named_parameters()}
    expected = trained(plain, sample, **keywords)
    plain.load_state_dict(before, strict=False)
    for buffer, other in zip(plain.buffers(), net.buffers(), strict=True):
        buffer.copy_(other)
    difference = first_difference(expected, trained(plain, sample, **keywords), "plain")
    assert difference is None, f"two runs of the plain model differ: {difference}"
    assert_same_bits(expected, trained(net, sample, **keywords))


def assert_peak_is_predicted(net: nn.Module, sample: Sample, autocast: bool = False) -> None:
    """A step holds what the plan says, as the allocator counts it; the model's outputs are held to its end."""
    device = next(_devices(sample))
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan)
    for _ in range(2):  # the first has libraries make up their minds
        net.zero_grad()
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        others_bytes = private.requested_bytes(device)[0] - plan.problem.resident_bytes
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            output = call(net, sample)
        loss_of(output).backward()
        del output
        measured_bytes = private.requested_bytes(device)[1] - max(0, others_bytes)
    net.zero_grad()
    assert measured_bytes <= plan.peak_bytes * 1.003 + SLACK_BYTES
