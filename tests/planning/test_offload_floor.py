"""The smallest budget on the device that copies to host memory can reach: what is promised can be planned, and run."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import memplan
from tests.support.zoo import MODELS, assert_same_bits, run_steps


@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_a_model_of_which_no_more_fits_than_the_promised_floor_is_timed_planned_and_run(name: str) -> None:
    """Its ops are timed too, though all parameters together are larger than the budget."""
    net, sample = MODELS[name](0)
    assert isinstance(sample, dict)
    sample = {key: of[:, :32] if isinstance(of, torch.Tensor) else of for key, of in sample.items()}
    plain = copy.deepcopy(net)
    top = memplan.plan(net, sample, memplan.plan(net, sample, 1.0).floor_bytes, host_budget="1GiB")
    assert top.floor_bytes < sum(p.nbytes for p in net.parameters())
    memplan.apply(net, sample, top.floor_bytes, host_budget="1GiB")
    plan = memplan.plan_of(net)
    assert plan is not None and plan.problem.costs.source == "measured" and plan.peak_bytes == top.floor_bytes
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))
    with pytest.raises(memplan.BudgetInfeasible):
        memplan.plan(copy.deepcopy(plain), sample, top.floor_bytes - 1, host_budget="1GiB")


class Table(nn.Module):
    """Small layers beside a large buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1 << 22))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + self.table[:16]
        return x.pow(2).sum()


def test_small_values_leave_where_nothing_else_helps() -> None:
    net, x = Table(), torch.randn(8, 16)
    low = memplan.plan(net, x, 1.0, costs="estimate").floor_bytes
    least = memplan.plan(net, x, low, host_budget="1MiB", costs="estimate").floor_bytes
    assert least < low
    assert memplan.plan(net, x, least, host_budget="1MiB", costs="estimate").peak_bytes == least
