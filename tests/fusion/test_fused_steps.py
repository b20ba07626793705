"""Steps over fused groups: equal bits at any budget, the bytes that are predicted, and next to eager's numbers."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.capture.capture import Capture, capture
from memplan.fusion.compile_groups import GroupCompiler
from memplan.fusion.fuse_step import fuse_step
from memplan.fusion.fused_step import FUSED
from memplan.planning.capturing import Capturing
from tests.support.meter import profiler_peak, storage_bytes
from tests.support.zoo import MODELS, Sample, assert_same_bits, call, loss_of, run_steps, tensors_of

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of Inductor
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++"),
]
QUICK = ("handmade", "gpt2")
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]


@pytest.fixture
def fusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned is captured over fused groups."""
    compiler, plain = GroupCompiler(), Capturing.capture

    def fused(self: Capturing, *args: Any, **kwargs: Any) -> Capture:
        found = plain(self, *args, **kwargs)
        expanded = None if found.expanded is None else fuse_step(found.expanded, compiler)
        return dataclasses.replace(found, traced=fuse_step(found.traced, compiler), expanded=expanded)

    monkeypatch.setattr(Capturing, "capture", fused)


def allocator_peak(net: nn.Module, sample: Sample) -> int:
    """By the allocator's own events: what groups allocate no dispatch mode sees."""
    net.zero_grad()

    def step() -> Any:
        output = call(net, sample)
        loss_of(output).backward()
        return output

    return profiler_peak(step, storage_bytes([*net.parameters(), *net.buffers(), *tensors_of([sample])]))


@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize("name", NAMES)
def test_bits_are_equal_at_any_budget_and_next_to_those_of_eager(name: str) -> None:
    net, sample = MODELS[name](0)
    points = memplan.explore(net, sample, costs="estimate")
    assert any(op.kind.startswith(FUSED) for op in points[0].problem.graph.ops)
    found = []
    for point in (points[-1], points[len(points) // 2], points[0]):
        planned = copy.deepcopy(net)
        memplan.apply(planned, sample, plan=point)
        found.append(run_steps(planned, sample, 2))
    for other in found[1:]:
        assert_same_bits(found[0], other)
    plain = run_steps(copy.deepcopy(net), sample, 2)
    torch.testing.assert_close(found[0]["losses"], plain["losses"], rtol=1e-5, atol=1e-6)
    assert_same_bits(plain["rng_state"], found[0]["rng_state"])


@pytest.mark.usefixtures("fusing")
def test_held_bytes_are_the_predicted_ones() -> None:
    net, sample = MODELS["gpt2"](0)
    points = memplan.explore(net, sample)
    for point in (points[0], points[len(points) // 2], points[-1]):
        planned = copy.deepcopy(net)
        memplan.apply(planned, sample, plan=point)
        assert allocator_peak(planned, sample) == point.peak_bytes


def test_each_distinct_group_is_compiled_once() -> None:
    """Layers that are alike have the same groups."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(6)))
    sample = torch.randn(64, 32)
    compiler = GroupCompiler()
    fused = fuse_step(capture(net, net.forward, sample).traced, compiler)
    groups = [op for op in fused.graph.ops if op.kind.startswith(FUSED)]
    assert len(groups) >= 10
    assert len(compiler) == len({op.key for op in groups}) <= 6


def test_what_can_not_be_compiled_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("memplan.torch_private.compiled_graph", broken)
    net, sample = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Tanh()), torch.randn(4, 8)
    traced = capture(net, net.forward, sample).traced
    assert fuse_step(traced, GroupCompiler()) is traced
    assert "stays as it is: no compiler" in caplog.text
