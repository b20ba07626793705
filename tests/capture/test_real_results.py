"""Kernels that give other results than PyTorch's fake ones say, and of which nobody knew beforehand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.capture.ops import real_results
from memplan.capture.trace import op_watch
from memplan.costs import bench
from tests.capture.test_capture import LAID_OUT, LOSSES, NORMS, Loss, Norm, Permuted
from tests.support.zoo import Sample, assert_same_bits, run_steps


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("_LAYOUTS", "_STATISTICS", "_ELEMENTS"):
        monkeypatch.setattr(real_results, table, {})
    monkeypatch.setattr(real_results, "_NOTED", {})


def assert_planned_as_plain(net: nn.Module, sample: Sample, plan: memplan.Plan | None = None) -> None:
    plain = copy.deepcopy(net)
    memplan.apply(net, sample, None if plan else 1.0, plan=plan)
    assert isinstance(memplan.plan_of(net), memplan.Plan)
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))


# Those whose fake kernels are wrong in this order of dimensions, in bfloat16.
WRONG = sorted(set(LAID_OUT) - {"layer norm", "roll", "reflected padding", "replicated padding"})


def permuted(name: str) -> tuple[Permuted, torch.Tensor]:
    dimensions, function = LAID_OUT[name]
    order = (1, 2, 0) if dimensions == 3 else (0, 3, 2, 1)
    return Permuted(function, order, torch.bfloat16), torch.randn((2, 4, 5, 6)[:dimensions])


@pytest.mark.parametrize("name", WRONG)
def test_layouts_are_found_by_running_ops(name: str) -> None:
    assert_planned_as_plain(*permuted(name))
    assert real_results._NOTED


@pytest.mark.parametrize("name", NORMS)
def test_dtypes_are_found_by_running_ops(name: str) -> None:
    assert_planned_as_plain(Norm(NORMS[name]), torch.randn(2, 3, 6, 6))
    assert real_results._NOTED


@pytest.mark.parametrize("name", LOSSES)
def test_memory_is_found_by_running_ops(name: str) -> None:
    assert_planned_as_plain(Loss(LOSSES[name]), (torch.randn(2, 4, 6, 6), torch.ones(2, 4, 6, 6)))
    assert real_results._NOTED


@pytest.mark.parametrize("name", LOSSES)
def test_memory_is_found_again_where_costs_are_known(name: str, cost_cache: object) -> None:
    """As by a later process."""
    peaks = []
    for _ in range(2):
        real_results._NOTED.clear()
        sample = (torch.randn(2, 4, 6, 6), torch.ones(2, 4, 6, 6))
        peaks.append(memplan.plan(Loss(LOSSES[name]), sample, 1.0).peak_bytes)
        assert real_results._NOTED
    assert peaks[0] == peaks[1]


def test_what_nobody_can_trace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the trace does not change, whatever is noted."""
    monkeypatch.setattr(op_watch, "with_noted_results", lambda func, args, kwargs, outputs: outputs)
    with pytest.raises(memplan.UnsupportedModel, match=r"elu.*fake kernel for it is wrong"):
        memplan.plan(*permuted("elu"), 1.0)


def test_a_model_that_nobody_can_trace_runs_unplanned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(op_watch, "with_noted_results", lambda func, args, kwargs, outputs: outputs)
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), permuted("elu")[0])
    plain, sample = copy.deepcopy(net), torch.randn(2, 4, 5, 6)[:, :, 0]
    memplan.apply(net, sample, 1.0)
    assert memplan.plan_of(net) is None
    assert "run unplanned" in caplog.text and "aten.elu" in caplog.text
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))


class Bags(nn.Module):
    """Its calls are traced without the defaults at their ends."""

    def __init__(self, weighted: bool, **options: Any) -> None:
        super().__init__()
        self.bags, self.top = nn.EmbeddingBag(20, 6, **options), nn.Linear(6, 4)
        self.weights = nn.Parameter(torch.linspace(0, 1, 24)) if weighted else None
        self.top.to(self.bags.weight.dtype)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        weights = None if self.weights is None else self.weights.to(self.bags.weight.dtype)
        return self.top(self.bags(ids, offsets, per_sample_weights=weights))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("include_last_offset", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weighted"])
def test_embedding_bags(mode: str, include_last_offset: bool, padding_idx: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weighted = mode == "weighted"
    net = Bags(
        weighted, mode="sum" if weighted else mode, include_last_offset=include_last_offset,
        padding_idx=padding_idx, dtype=dtype,
    )  # fmt: skip
    assert_planned_as_plain(net, (torch.randint(0, 20, (24,)), torch.arange(0, 24 + include_last_offset, 4)))


def test_a_call_is_the_same_however_it_is_spelt() -> None:
    x, op = torch.ones(3), torch.ops.aten.cumsum.default
    call = real_results._call(op, (x, 0), {})
    assert call == real_results._call(op, (x,), {"dim": 0}) == real_results._call(op, (x, 0), {"dtype": None})
    assert call != real_results._call(op, (x, 0), {"dtype": torch.float64})


def test_a_plan_from_a_process_that_knew_is_taken_over(tmp_path: Path) -> None:
    net, sample = permuted("elu")
    memplan.plan(net, sample, 1.0).save(tmp_path / "plan.json")
    assert real_results._NOTED
    real_results._NOTED.clear()
    assert_planned_as_plain(net, sample, memplan.Plan.load(tmp_path / "plan.json"))


def test_the_first_step_of_a_plan_that_was_taken_over_is_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where it was made other kernels may have run."""
    net, sample = permuted("elu")
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("MEMPLAN_CACHE_DIR", str(tmp_path))
        elsewhere.setattr(bench, "_alike", lambda *facts: True)
        plan = memplan.plan(net, sample, 1.0)
    assert_planned_as_plain(copy.deepcopy(net), sample, plan)
    real_results._NOTED.clear()
    memplan.apply(net, sample, plan=plan, on_mismatch="raise")
    with pytest.raises(memplan.UnsupportedModel, match="Plan again"):
        net(sample).backward()


class Drawing(nn.Module):
    """Draws random numbers and writes to a buffer that it reads, before ops whose fake kernels are wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = permuted("elu")[0], nn.Dropout(0.3)
        self.register_buffer("count", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.inner(self.drop(x) * self.count)  # type: ignore[no-any-return]


@pytest.mark.parametrize("build", [lambda: permuted("elu")[0], Drawing])
def test_a_first_step_that_was_not_timed_is_planned_again(build: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Forward and backward of that step run again, by the new plan."""
    net, sample = build(), permuted("elu")[1]
    plain = copy.deepcopy(net)
    memplan.apply(net, sample, 1.0, costs="estimate")
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))
    assert "planning again, because in its first run" in caplog.text


@pytest.mark.parametrize("build", [lambda: permuted("elu")[0], Drawing])
def test_a_first_step_that_no_new_plan_mends_is_refused(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is planned again once, and not for ever."""
    monkeypatch.setattr(op_watch, "with_noted_results", lambda func, args, kwargs, outputs: outputs)
    net, sample = build(), permuted("elu")[1]
    memplan.apply(net, sample, 1.0, costs="estimate")
    with pytest.raises(memplan.UnsupportedModel, match="elu"):
        net(sample).float().sum().backward()


@torch.library.custom_op("memplan_tests::widened", mutates_args=())
def widened(x: torch.Tensor) -> torch.Tensor:
    return x.double()


widened.register_fake(torch.empty_like)  # which is wrong
widened.register_autograd(lambda ctx, gradient: gradient.float())


class Widening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return widened(x * self.scale).exp().sum()


def test_the_least_budget_is_that_of_the_plan_made_again() -> None:
    """The first plan's least was for results that are half as large as real ones."""
    net, sample = Widening(), torch.randn(2, 50)
    plain = copy.deepcopy(net)
    memplan.apply(net, sample, "min", costs="estimate")
    before = memplan.plan_of(net)
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))
    plan = memplan.plan_of(net)
    assert before is not None and plan is not None
    assert plan.problem.budget_bytes == plan.peak_bytes > before.peak_bytes
