"""`use_kernels` of transformers, with a local kernel, by the real `kernels` and Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import KernelConfig, LlamaConfig, LlamaForCausalLM

import memplan
from tests.kernels.test_kernels import planned_like_plain
from tests.support.plannings import plannings
from tests.support.zoo import assert_same_bits, run_steps

pytestmark = pytest.mark.kernels

LAYERS = """
import torch
import triton
import triton.language as tl
from torch import nn

@triton.jit
def _norm(x, weight, y, eps, n: tl.constexpr):
    columns = tl.arange(0, n)
    row = tl.load(x + tl.program_id(0) * n + columns)
    row = row / tl.sqrt(tl.sum(row * row) / n + eps) * tl.load(weight + columns)
    tl.store(y + tl.program_id(0) * n + columns, row)

class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps, y = eps, torch.empty_like(x)
        _norm[(x.numel() // x.shape[-1],)](x, weight, y, eps, x.shape[-1])
        return y

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        scale = (x.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
        normed, given = x * scale, grad * weight
        of_x = scale * (given - normed * (given * normed).mean(-1, keepdim=True))
        return of_x, (grad * normed).flatten(0, -2).sum(0), None

class RMSNorm(nn.Module):
    has_backward, can_torch_compile = True, False

    def forward(self, hidden_states):
        return Norm.apply(hidden_states, self.weight, self.variance_epsilon)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of one kernel, as `kernels` reads it."""
    build = tmp_path / "build" / "torch-cpu"
    build.mkdir(parents=True)
    facts = {"name": "norm", "id": "_norm", "version": 0, "license": "none", "backend": {"type": "cpu"}}
    (build / "metadata.json").write_text(json.dumps({**facts, "python-depends": []}))
    (build / "__init__.py").write_text("from . import layers\n\n__all__ = ['layers']\n")
    (build / "layers.py").write_text(LAYERS)
    return tmp_path


def with_kernels(repository: Path) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    net = LlamaForCausalLM(config).train()
    net.set_use_kernels(True, KernelConfig({"RMSNorm": f"{repository}:RMSNorm"}, use_local_kernel=True))
    return net


def sample_of(batch: int) -> dict[str, Any]:
    ids = torch.randint(0, 64, (batch, 32), generator=torch.Generator().manual_seed(batch))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def test_local_kernels_are_islands(repository: Path) -> None:
    plan = planned_like_plain(with_kernels(repository), sample_of(4))
    assert any("Norm at" in line for line in plan.islands)
    assert plan.peak_bytes < 0.75 * plan.baseline_peak_bytes


def test_going_from_eval_to_train_keeps_the_plan(repository: Path) -> None:
    """It binds all forwards anew."""
    plain, planned, sample = with_kernels(repository), with_kernels(repository), sample_of(2)
    memplan.apply(planned, sample, "min", costs="estimate")
    run_steps(planned, sample, 1)
    run_steps(plain, sample, 1)
    before = _forwards(planned)
    for net in (plain, planned):
        net.eval()
        net.train()
    assert not any(a is b for a, b in zip(before, _forwards(planned), strict=True))
    with plannings() as reasons:
        assert_same_bits(run_steps(plain, sample), run_steps(planned, sample))
    assert not reasons


def _forwards(net: nn.Module) -> list[Any]:
    return [vars(m)["forward"] for m in net.modules() if m is not net and "forward" in vars(m)]
