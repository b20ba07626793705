"""Masks of dropout that fused groups make from seeds: the same at any budget, in their share, and differentiable."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.fusion import fuse_step
from memplan.fusion.fuse_step import GroupCompiler
from tests.support.zoo import assert_same_bits, run_steps

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of Inductor
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++"),
]
NO_LIMIT = 1 << 40
ROOT = Path(__file__).resolve().parents[2]


class Dropped(nn.Module):
    """Dropout as CPUs run it, and as GPUs do (`native_dropout`), between products."""

    def __init__(self, p: float = 0.2, dtype: torch.dtype = torch.float32, turns: int = 2) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 64, dtype=dtype), nn.Linear(64, 16, dtype=dtype)
        self.norm, self.p, self.turns = nn.LayerNorm(16, dtype=dtype), p, turns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.turns):
            hidden = nn.functional.dropout(torch.tanh(self.inner(self.norm(x))), self.p, self.training)
            x = x + torch.native_dropout(self.outer(hidden), self.p, True)[0]
        return x.pow(2).mean()


def net_and_sample(**options: Any) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    net = Dropped(**options)
    return net, torch.randn(64, 16, dtype=net.norm.weight.dtype)


def counted(net: nn.Module, sample: Any, budget: int | str = NO_LIMIT, **options: Any) -> nn.Module:
    return memplan.apply(
        copy.deepcopy(net), sample, budget, kernels="fused", random="counter", costs="estimate", **options
    )


def test_bits_are_equal_at_any_budget() -> None:
    net, sample = net_and_sample()
    whole = counted(net, sample)
    found = run_steps(whole, sample, 3)
    peak_bytes = memplan.plan_of(whole).peak_bytes
    for budget in ("min", int(peak_bytes * 0.9)):
        planned = counted(net, sample, budget)
        assert memplan.plan_of(planned).peak_bytes < peak_bytes
        assert_same_bits(found, run_steps(planned, sample, 3))
    offloaded = counted(net, sample, int(memplan.plan_of(planned).floor_bytes * 0.9), host_budget="1GiB")
    assert_same_bits(found, run_steps(offloaded, sample, 3))


def test_masks_are_kept_as_booleans_and_one_op_draws() -> None:
    """The other masks of the step come from other seeds of the same draw."""
    graph = memplan.plan(*net_and_sample(), 1.0, kernels="fused", random="counter", costs="estimate").problem.graph
    assert [op.kind for op in graph.ops if op.random] == ["prims.inductor_seeds.default"]
    assert sum(value.tensor == "bool[64, 64]" for value in graph.values) == 2


def test_masks_have_their_share_of_ones_each_its_own_and_follow_the_generator() -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return tuple(nn.functional.dropout(x * self.scale, 0.3) for _ in range(2))

    x = torch.ones(400, 500)
    net = counted(Masks(), x)
    first, second = net(x)
    for mask in (first, second):
        assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / 0.7).item()}
        assert abs(mask.mean().item() - 1) < 0.01
        assert abs(mask.var().item() - 0.3 / 0.7) < 0.01
        for rows in (mask.mean(0), mask.mean(1)):
            assert (rows - 1).abs().max() < 0.2
    together = ((first > 0) == (second > 0)).float().mean().item()
    assert abs(together - (0.7**2 + 0.3**2)) < 0.01
    torch.manual_seed(3)
    again = [net(x)[0] for _ in range(2)]
    assert not torch.equal(*again)
    torch.manual_seed(3)
    assert all(torch.equal(net(x)[0], mask) for mask in again)


@pytest.mark.slow
def test_gradients_are_those_of_finite_differences() -> None:
    net, sample = net_and_sample(dtype=torch.float64)
    planned = counted(net, sample, "min")
    weight = planned.inner.weight

    def loss() -> torch.Tensor:
        torch.manual_seed(7)
        return planned(sample)

    loss().backward()
    direction, by = torch.randn_like(weight), 1e-6
    with torch.no_grad():
        weight.add_(direction, alpha=by)
    above = loss().item()
    with torch.no_grad():
        weight.sub_(direction, alpha=2 * by)
    expected = (above - loss().item()) / (2 * by)
    assert abs((weight.grad * direction).sum().item() - expected) < 1e-6 * abs(expected) + 1e-9


def test_a_plan_file_says_so(tmp_path: Path) -> None:
    net, sample = net_and_sample()
    plan = memplan.plan(net, sample, NO_LIMIT, kernels="fused", random="counter")
    plan.save(tmp_path / "plan.json")
    found = run_steps(counted(net, sample), sample, 2)
    planned = memplan.apply(copy.deepcopy(net), sample, plan=memplan.Plan.load(tmp_path / "plan.json"))
    assert memplan.plan_of(planned).random == "counter"
    assert_same_bits(found, run_steps(planned, sample, 2))


@pytest.mark.slow
def test_another_process_has_the_same_bits() -> None:
    script = (
        "from tests.fusion.test_counted_random import counted, net_and_sample\n"
        "net, sample = net_and_sample()\nplanned = counted(net, sample, 'min')\n"
        "import torch; torch.manual_seed(1); print(planned(sample).item().hex())\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    net, sample = net_and_sample()
    planned = counted(net, sample)
    torch.manual_seed(1)
    assert run.stdout.split()[-1] == planned(sample).item().hex()


def test_it_is_for_fused_kernels() -> None:
    with pytest.raises(ValueError, match="give kernels='fused' too"):
        memplan.apply(*net_and_sample(), NO_LIMIT, random="counter")


def test_where_groups_can_not_be_compiled_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as it is, the op would draw from the generator each time."""

    def broken(*args: Any) -> Callable[..., Any]:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("memplan.torch_private.compiled_graph", broken)
    monkeypatch.setattr("memplan.fusion.fuse_step.compile_elsewhere", lambda programs: {})
    monkeypatch.setattr(fuse_step, "_process_compiler", GroupCompiler())
    net, sample = net_and_sample()
    with pytest.raises(ValueError, match="needs groups that can't be compiled"):
        counted(net, sample)
    assert "forward" not in vars(net)
