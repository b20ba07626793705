"""Ops that can't be timed like others: on made-up data, again and again on one tensor, or at all."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memplan
from memplan import torch_private as private
from memplan.capture.ops import real_results
from tests.support.zoo import assert_same_bits, run_steps

Inner = Callable[[torch.Tensor], torch.Tensor]
EYE = torch.eye(8)
RUNS = {"refused": True, "wrong": False}  # whether it is refused by itself, and whether it is laid out as it says


@torch.library.custom_op("memplan_timing::refuses", mutates_args=())
def refuses(x: torch.Tensor) -> torch.Tensor:
    """Runs in a step alone."""
    if RUNS["refused"]:
        raise ValueError("it is not step time")
    return (x * 2).t().contiguous().t() if RUNS["wrong"] else x * 2


refuses.register_fake(torch.empty_like)


@torch.library.custom_op("memplan_timing::no_memory", mutates_args=())
def no_memory(x: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("no memory")


no_memory.register_fake(torch.empty_like)


@torch.library.custom_op("memplan_timing::adds_rows", mutates_args={"total"})
def adds_rows(x: torch.Tensor, total: torch.Tensor) -> None:
    total.add_(x.sum(0))


@torch.library.custom_op("memplan_timing::counts_negative", mutates_args={"total"})
def counts_negative(x: torch.Tensor, total: torch.Tensor) -> None:
    if not bool((x < 0).any()):
        raise ValueError("there are none")
    total.add_((x < 0).sum())


_LIBRARY = torch.library.Library("memplan_timing", "FRAGMENT")
_LIBRARY.define("doubles(Tensor x, *, Tensor(a!) out) -> ()")


@torch.library.impl(_LIBRARY, "doubles", "CPU")
def doubles(x: torch.Tensor, *, out: torch.Tensor) -> None:
    out.copy_(x * 2)


@torch.library.impl(_LIBRARY, "doubles", "Meta")
def fake_doubles(x: torch.Tensor, *, out: torch.Tensor) -> None:
    pass


def doubled(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.ops.memplan_timing.doubles(x.detach(), out=out)
    return x + out


def added_up(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(8)
    adds_rows(x.detach(), total)
    return x * total


def averaged(x: torch.Tensor) -> torch.Tensor:
    lists = [x.detach().clone(), x.detach().clone()]
    torch._foreach_mul_(lists, 0.9)
    torch._foreach_add_(lists, [x.detach(), x.detach()], alpha=0.1)
    return x * lists[0] + lists[1]


class Model(nn.Module):
    """An op between two layers."""

    def __init__(self, inner: Inner) -> None:
        super().__init__()
        self.inner, self.first, self.last = inner, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden).mean() + self.inner(hidden).sin().mean()


def model_and_sample(inner: Inner) -> tuple[Model, torch.Tensor]:
    torch.manual_seed(0)
    return Model(inner), torch.randn(8, 8)


def assert_planned_as_plain(inner: Inner, source: str = "measured") -> None:
    net, sample = model_and_sample(inner)
    plain = copy.deepcopy(net)
    memplan.apply(net, sample, "min")
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan)
    assert plan.problem.costs.source == source
    RUNS["refused"] = False
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))


@pytest.fixture(autouse=True)
def refused() -> None:
    RUNS.update(refused=True, wrong=False)


PARTICULAR: dict[str, Inner] = {
    "inverse": lambda x: torch.linalg.inv(x + 3 * EYE),
    "determinant": lambda x: torch.linalg.slogdet(x + 3 * EYE)[1],
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + EYE),
    "solution": lambda x: torch.linalg.solve(x + 3 * EYE, x),
    "pivots": lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor(x + 3 * EYE), x),
    "lengths": lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([3, 5])),
}


@pytest.mark.parametrize("name", PARTICULAR)
def test_ops_that_made_up_data_is_not_legal_for(name: str) -> None:
    """They are timed on what the model computes."""
    assert_planned_as_plain(PARTICULAR[name])


RESHAPED: dict[str, Inner] = {
    "squeeze": lambda x: (x[:, :1] * 2).squeeze_(1),
    "unsqueeze": lambda x: (x * 2).unsqueeze_(0),
    "t": lambda x: (x[:3] * 2).t_(),
    "transpose": lambda x: (x[:3] * 2).transpose_(0, 1),
    "swapaxes": lambda x: (x[:3] * 2).swapaxes_(0, 1),
    "as_strided": lambda x: (x * 2).as_strided_((3, 4), (4, 1)),
    "resize": lambda x: x.mean() + x.detach().clone().resize_(4, 2),
}


@pytest.mark.parametrize("name", RESHAPED)
def test_ops_that_change_the_shape_of_their_argument(name: str) -> None:
    """They run on a new tensor object each time."""
    assert_planned_as_plain(RESHAPED[name])


@pytest.mark.parametrize("inner", [added_up, doubled, averaged])
def test_ops_without_results(inner: Inner) -> None:
    assert_planned_as_plain(inner)


def test_an_op_that_can_not_be_timed_is_estimated(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "memplan"):
        assert_planned_as_plain(lambda x: x + refuses(x.detach()), "measured in part")
    assert "refuses.default in the model is estimated, for it can't be timed: it is not step time" in caplog.text


def test_what_an_op_that_was_not_timed_gives_is_compared_in_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    RUNS["wrong"] = True
    assert_planned_as_plain(lambda x: x + refuses(x.detach()), "measured in part")
    assert "planning again, because in its first run refuses" in caplog.text


class Counting(Model):
    """Writes to a buffer by an op that made-up data is not legal for."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts_negative(self.first(x).detach(), self.total)
        return super().forward(x) + self.total.mean()


def test_ops_that_are_timed_on_computed_data_write_to_copies() -> None:
    net, sample = Counting(), torch.randn(8, 8)
    plan = memplan.plan(net, sample, 1.0)
    assert plan.problem.costs.source == "measured"
    assert not net.total.any()


def test_running_out_of_memory_is_no_failure_to_time() -> None:
    with pytest.raises(memplan.BudgetInfeasible, match="no room to time single ops"):
        memplan.plan(*model_and_sample(lambda x: x + no_memory(x.detach())), "1GiB", on_infeasible="raise")


def test_standard_error_has_all_that_others_write_and_no_line_of_the_profiler(
    capfd: pytest.CaptureFixture[str],
) -> None:
    @torch.library.custom_op("memplan_timing::speaks", mutates_args=())
    def speaks(x: torch.Tensor) -> torch.Tensor:
        os.write(2, b"I am timed\n")
        return x * 2

    speaks.register_fake(torch.empty_like)
    memplan.plan(*model_and_sample(lambda x: x + speaks(x.detach())), 1.0)
    written = capfd.readouterr().err
    assert "I am timed" in written
    assert "USDT" not in written


CALLS = [0]


@torch.library.custom_op("memplan_timing::unsteady", mutates_args=())
def unsteady(x: torch.Tensor) -> torch.Tensor:
    """Rounds otherwise in every run, unless all numbers are equal."""
    CALLS[0] += 1
    return x * 2 + x.var() * 1e-3 * CALLS[0]


unsteady.register_fake(torch.empty_like)


@torch.library.custom_op("memplan_timing::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Has the same bits wherever the generator's state is the same."""
    return x + torch.rand_like(x)


noisy.register_fake(torch.empty_like)


def floor_of_two_ops() -> memplan.Plan:
    net, sample = model_and_sample(lambda x: unsteady(x.detach()) * noisy(x.detach()) * x)
    return memplan.explore(net, sample)[0]


def run_once(plan: memplan.Plan) -> set[str]:
    """Kinds of ops of forward that never run again."""
    return {op.kind for op in plan.problem.graph.ops if op.phase == "forward" and not op.recomputable}


def test_ops_that_give_other_bits_in_a_second_run_never_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found is on disk, for the next process."""
    monkeypatch.setattr(real_results, "_UNSTEADY", set())
    plan = floor_of_two_ops()
    assert run_once(plan) == {"memplan_timing.unsteady.default"}
    assert run_once(plan).isdisjoint(plan.problem.graph.ops[i].kind for i in plan.recomputed)
    runs = CALLS[0]
    monkeypatch.setattr(real_results, "_UNSTEADY", set())
    assert run_once(floor_of_two_ops()) == run_once(plan)
    assert CALLS[0] == runs + 1  # of forward, which is compared with its trace


def test_a_record_of_memory_has_its_peak() -> None:
    with private.MemoryRecord() as nothing:
        pass
    with private.MemoryRecord() as record:
        first, second = torch.empty(1000), torch.empty(500)
        del first
        third = torch.empty(100)
    assert (nothing.peak_bytes, record.peak_bytes, second.nbytes + third.nbytes) == (0, 6000, 2400)
