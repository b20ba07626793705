"""Steps over fused groups: equal bits at any budget, the bytes that are predicted, and next to eager's numbers."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan import torch_private as private
from memplan.capture.capture import capture
from memplan.fusion.fuse_step import GroupCompiler, fuse_step
from tests.support.meter import profiler_peak, storage_bytes
from tests.support.parameters import quickly
from tests.support.zoo import MODELS, Sample, assert_same_bits, call, copied, run_steps, tensors_of
from tests.whole.test_exact import loss_inside

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of Inductor
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++"),
]
QUICK = ("handmade",)
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]


def allocator_peak(net: nn.Module, sample: Sample) -> int:
    """By the allocator's own events: what groups allocate no dispatch mode sees."""
    net.zero_grad()

    def step() -> None:
        found = call(net, sample)  # held, as plans take it to be
        loss = found.loss if loss_inside(sample) is None else found
        loss.backward()

    return profiler_peak(step, storage_bytes([*net.parameters(), *net.buffers(), *tensors_of([sample])]))


@pytest.mark.parametrize("name", NAMES)
def test_bits_are_equal_at_any_budget_and_next_to_those_of_eager(name: str) -> None:
    net, sample = MODELS[name](0)
    points = memplan.explore(net, sample, kernels="fused")
    assert any(op.fused for op in points[0].problem.graph.ops)
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


@pytest.mark.parametrize("name", ["handmade", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_held_bytes_are_the_predicted_ones(name: str) -> None:
    net, sample = MODELS[name](0)
    loss_fn = loss_inside(sample)
    points = memplan.explore(net, sample, kernels="fused", loss_fn=loss_fn)
    for point in (points[0], points[len(points) // 2], points[-1]):
        planned = copy.deepcopy(net)
        memplan.apply(planned, sample, plan=point, loss_fn=loss_fn)
        assert allocator_peak(planned, sample) == point.peak_bytes


def test_each_distinct_group_is_compiled_once() -> None:
    """Layers that are alike have the same groups."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(6)))
    sample = torch.randn(64, 32)
    compiler = GroupCompiler()
    fused = fuse_step(capture(net, net.forward, sample).traced, compiler)
    groups = [op for op in fused.graph.ops if op.fused]
    assert len(groups) >= 10
    assert len(compiler) == len({op.key for op in groups}) <= 6


def test_results_lie_as_those_of_eager_where_an_op_comes_to_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A cat with an empty tensor, as caches of transformers begin with, gives contiguous memory."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            keys = self.inner(x).view(4, 16, 2, 16).transpose(1, 2)
            cached = torch.cat([torch.tensor([]), keys], -2)
            return torch.softmax(keys @ (cached.transpose(-2, -1) * 0.25), -1).sum()

    fused = fuse_step(capture(net := Cached(), net.forward, torch.randn(4, 16, 32)).traced, GroupCompiler())
    assert any(op.fused and "mul" in op.kind for op in fused.graph.ops)
    assert "can't be compiled" not in caplog.text


def test_both_gradients_of_a_gate_are_written_over_what_they_read() -> None:
    """Two results, each of which reads both inputs that are given away: Inductor by itself takes neither."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate = nn.Linear(32, 96, bias=False), nn.Linear(32, 96, bias=False)
            self.down = nn.Linear(96, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(nn.functional.silu(self.gate(x)) * self.up(x)).sum()

    fused = fuse_step(capture(net := Gated(), net.forward, torch.randn(64, 32)).traced, GroupCompiler())
    (group,) = (op for op in fused.graph.ops if op.fused and op.phase == "backward" and "sigmoid" in op.kind)
    assert [fused.graph.values[v].reuses is not None for v in group.outputs] == [True, True]


def test_an_op_by_itself_is_a_group_where_it_is_written_over_what_it_reads() -> None:
    net, sample = nn.Sequential(nn.Linear(32, 96, bias=False), nn.ReLU(), nn.Linear(96, 32)), torch.randn(64, 32)
    fused = fuse_step(capture(net, lambda x: net(x.exp()).sum(), sample).traced, GroupCompiler())
    groups = [op for op in fused.graph.ops if op.fused]
    assert [op.phase for op in groups] == ["forward", "backward"]
    assert all(fused.graph.values[v].reuses is not None for op in groups for v in op.outputs)
    assert any(op.kind == "aten.exp.default" for op in fused.graph.ops)  # the sample is not memplan's to write over


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_softmax_of_rows_that_are_masked_whole(dtype: torch.dtype) -> None:
    scores = torch.randn(3, 5, 7, dtype=dtype)
    scores[0, 0], scores[0, 1, :6], scores[1, 2, 3] = -torch.inf, -torch.inf, torch.nan
    safe_softmax = torch.ops.aten._safe_softmax.default
    traced = private.functional_trace(lambda x: safe_softmax(x, -1), [private.MemoryLayout.of(scores)])
    assert safe_softmax not in {node.target for node in traced.graph.nodes}
    found, expected = traced(scores), safe_softmax(scores, -1)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert not found[0, 0].any() and found[1, 2].isnan().all()


@pytest.mark.slow
def test_what_can_not_be_compiled_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("memplan.torch_private.compiled_graph", broken)
    net, sample = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Tanh()), torch.randn(4, 8)
    traced = capture(net, net.forward, sample).traced
    assert fuse_step(traced, GroupCompiler()) is traced
    assert "run as they are: RuntimeError: no compiler" in caplog.text


def test_a_dry_run_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are estimated by what they read and write."""
    monkeypatch.setattr("memplan.torch_private.missing_compiler", lambda device: "a compiler")
    monkeypatch.setattr("memplan.torch_private.compiled_graph", None)
    net, sample = MODELS["handmade"](0)
    fused = memplan.plan(net, sample, 1.0, kernels="fused", costs="estimate")
    eager = memplan.plan(net, sample, 1.0, costs="estimate")
    assert (fused.exact, eager.exact) == ("program", "eager")
    assert len(fused.problem.graph.ops) < len(eager.problem.graph.ops)
    assert all(v.tensor for v in fused.problem.graph.values)
    with pytest.raises(ValueError, match="needs a compiler"):
        memplan.apply(net, sample, 1.0, kernels="fused", costs="estimate")
    assert memplan.plan_of(net) is None


def test_a_plan_file_runs_the_same_program(tmp_path: Path) -> None:
    net, sample = MODELS["handmade"](0)
    plan = memplan.plan(net, sample, 0.9, kernels="fused")
    plan.save(tmp_path / "plan.json")
    found = []
    for _ in range(2):
        planned = copy.deepcopy(net)
        memplan.apply(planned, sample, plan=memplan.Plan.load(tmp_path / "plan.json"))
        found.append(run_steps(planned, sample, 2))
    assert_same_bits(*found)


@pytest.mark.slow
def test_another_process_has_the_same_bits(tmp_path: Path) -> None:
    """Compiled there from nothing, with a cache of its own."""
    script = """
import sys, torch, memplan
from tests.support.zoo import MODELS, run_steps
net, sample = MODELS["handmade"](0)
memplan.apply(net, sample, float(sys.argv[1]), kernels="fused", costs="estimate")
torch.save(run_steps(net, sample, 2), sys.argv[2])
"""
    for name, budget in (("one", "0.9"), ("other", "1.0")):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / name)}
        command = [sys.executable, "-c", script, budget, str(tmp_path / f"{name}.pt")]
        subprocess.run(command, env=environment, check=True)
    assert_same_bits(*(torch.load(tmp_path / f"{name}.pt", weights_only=False) for name in ("one", "other")))


def test_comparing_kernels_changes_nothing() -> None:
    """A planned model is compared as it is without its plan."""
    net, sample = MODELS["handmade"](0)
    errors = memplan.compare_kernels(net, sample)
    assert memplan.plan_of(net) is None
    memplan.apply(net, sample, 1.0, kernels="fused", costs="estimate")
    plan, before = memplan.plan_of(net), torch.get_rng_state()
    assert memplan.compare_kernels(net, sample) == errors
    assert memplan.plan_of(net) is plan
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for p in net.parameters())
    assert 0 < errors.eager_gradients < 1e-6
    assert 0 < errors.fused_gradients < 1e-6
    assert errors.eager_gradients != errors.fused_gradients


@pytest.mark.parametrize("way", quickly(("torch.compile", "compile()"), "torch.compile"))
def test_compiled_models_are_planned_beneath(way: str, caplog: pytest.LogCaptureFixture) -> None:
    net, sample = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Tanh()), torch.randn(64, 32)
    expected = copy.deepcopy(net)
    memplan.apply(expected, sample, 1.0, kernels="fused", costs="estimate")
    compiled: Any = torch.compile(net) if way == "torch.compile" else net
    if way == "compile()":
        net.compile()
    assert memplan.plan(compiled, sample, 1.0, kernels="fused", costs="estimate").exact == "program"
    assert (net._compiled_call_impl is not None) == (way == "compile()")
    with pytest.raises(memplan.BudgetInfeasible):
        memplan.apply(compiled, sample, 1, kernels="fused", costs="estimate")
    assert (net._compiled_call_impl is not None) == (way == "compile()")
    assert memplan.apply(compiled, sample, 1.0, kernels="fused", costs="estimate") is compiled
    assert "in place of what torch.compile made" in caplog.text
    assert isinstance(memplan.plan_of(compiled), memplan.Plan)
    results = []
    for model in (expected, compiled):
        loss = model(sample).square().sum()
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert_same_bits(*results)
    memplan.remove(compiled)
    assert memplan.plan_of(compiled) is None
    assert (net._compiled_call_impl is not None) == (way == "compile()")
    with pytest.raises(memplan.UnsupportedModel, match='kernels="fused"'):
        memplan.apply(compiled, sample, 1.0, costs="estimate")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(nn.functional.gelu(self.inner(x)))


def step_of(model: nn.Module, sample: torch.Tensor) -> Any:
    """The loss and every gradient of one step."""
    model.zero_grad()
    loss = model(sample).square().sum()
    loss.backward()
    return copied([loss.detach(), *(p.grad for p in model.parameters())])


@pytest.mark.parametrize("way", quickly(("torch.compile", "compile()", "forward"), "compile()"))
def test_models_with_compiled_blocks_are_planned_beneath(way: str) -> None:
    """What was compiled comes back once the plan is removed. With eager kernels, the blocks are islands."""
    torch._dynamo.reset()
    ran = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.append(graph)
            return graph.forward(*args)

        return run

    net, sample = nn.Sequential(Layer(), Layer()), torch.randn(64, 16)
    plain, eager = copy.deepcopy(net), step_of(net, sample)
    memplan.apply(plain, sample, 1.0, kernels="fused", costs="estimate")
    for index, layer in enumerate(net):
        if way == "torch.compile":
            net[index] = torch.compile(layer, backend=backend)  # type: ignore[assignment]  # it is one
        elif way == "compile()":
            layer.compile(backend=backend)
        else:
            layer.forward = torch.compile(layer.forward, backend=backend)
    memplan.apply(net, sample, 1.0, costs="estimate")
    plan = memplan.plan_of(net)
    assert plan is not None
    assert [told.partition(" at ")[0] for told in plan.islands] == ["0", "1"]
    assert_same_bits(eager, step_of(net, sample))
    assert ran
    ran.clear()
    for _ in range(2):  # a plan on top of a plan
        memplan.apply(net, sample, 1.0, kernels="fused", costs="estimate")
    assert_same_bits(step_of(plain, sample), step_of(net, sample))
    assert not ran
    memplan.remove(net)
    net(sample)
    assert ran


def test_the_report_says_that_kernels_are_fused() -> None:
    net, sample = MODELS["handmade"](0)
    report = memplan.plan(net, sample, 1.0, kernels="fused", costs="estimate").report()
    assert "kernels           fused: " in report
    assert "a dry run takes them to write over all that they may" in report
    assert "fused" not in memplan.plan(net, sample, 1.0, costs="estimate").report()


@pytest.mark.slow
def test_gradients_are_finite_differences_with_dropout() -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 16)]
    net, sample = nn.Sequential(*parts).double(), torch.randn(32, 16, dtype=torch.float64)
    memplan.apply(net, sample, 1.0, kernels="fused", costs="estimate")

    def loss() -> torch.Tensor:
        torch.manual_seed(1)
        return net(sample).square().mean()

    loss().backward()
    for parameter in net.parameters():
        direction, step = torch.randn_like(parameter), 1e-5
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * step)
            values.append(loss().item())
            with torch.no_grad():
                parameter.sub_(direction, alpha=sign * step)
        assert parameter.grad is not None
        slope = (parameter.grad * direction).sum().item()
        assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=1e-5, abs=1e-9)
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan)
    assert plan.exact == "program"
