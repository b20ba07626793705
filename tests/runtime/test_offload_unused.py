"""Parameters that a step does not use, where parameters may live on the host: towers for other inputs, spare blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.problem.data import Link
from memplan.problem.simulate import simulate, unplanned
from tests.support.offloads import host_resident_bytes
from tests.support.zoo import assert_same_bits, copied

PCIE = Link(25e9, 25e9)


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(count)])


class Towers(nn.Module):
    """A side tower that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.side = layers(6), layers(4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        out = self.tower(x)
        return (out + self.side(x) if both else out).pow(2).mean()  # type: ignore[no-any-return]


def sample(both: bool, seed: int = 0) -> dict[str, Any]:
    return {"x": torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)), "both": both}


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3, foreach=False)


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, calls: list[bool]) -> list[Any]:
    found = []
    for seed, both in enumerate(calls):
        optimizer.zero_grad()
        loss = net(**sample(both, seed))
        loss.backward()
        optimizer.step()
        found.append((loss.item(), [copied(p) for p in net.parameters()]))
    return found


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("first", [pytest.param(False, marks=pytest.mark.slow), True])
def test_calls_may_use_fewer_parameters_or_more(first: bool, frozen: bool, update: Any) -> None:
    torch.manual_seed(0)
    plain = Towers()
    plain.side.requires_grad_(not frozen)
    net = copy.deepcopy(plain)
    calls = [first, not first, first, not first]
    expected = trained(plain, adamw(plain), calls)
    optimizer = adamw(net)
    options = {"costs": "estimate", "optimizer": optimizer, "update": update, "link": PCIE, "host_budget": "1GiB"}
    floor_bytes = memplan.plan(net, sample(first), 1.0, costs="estimate", optimizer=optimizer).floor_bytes
    memplan.apply(net, sample(first), floor_bytes // 2, **options)  # type: ignore[arg-type]
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan) and host_resident_bytes(plan.problem.graph)
    assert_same_bits(expected, trained(net, optimizer, calls))


def test_what_is_not_used_lives_on_the_host_first() -> None:
    net = Towers()
    optimizer = adamw(net)
    options = {"costs": "estimate", "optimizer": optimizer, "link": PCIE, "host_budget": "1GiB"}
    alone = memplan.plan(net, sample(False), 1.0, costs="estimate", optimizer=optimizer)
    side_bytes = sum(p.nbytes for p in net.side.parameters())
    budget = alone.floor_bytes - side_bytes
    with pytest.raises(memplan.BudgetInfeasible):
        memplan.plan(net, sample(False), budget, costs="estimate", optimizer=optimizer)
    plan = memplan.plan(net, sample(False), budget, **options)  # type: ignore[arg-type]
    assert isinstance(plan, memplan.Plan)
    assert host_resident_bytes(plan.problem.graph) == side_bytes
    assert plan.peak_bytes <= budget and not simulate(plan.problem, plan.schedule).stall_s
    enough = memplan.plan(net, sample(False), 10**9, **options)  # type: ignore[arg-type]
    assert isinstance(enough, memplan.Plan) and not host_resident_bytes(enough.problem.graph)


def test_all_that_is_held_unplanned_is_room_for_updates_in_backward() -> None:
    """What the optimizer's step takes for a while is held without a plan, too."""
    net = nn.Sequential(nn.Linear(8, 2048, bias=False), nn.Tanh(), nn.Linear(2048, 8, bias=False))
    x = torch.randn(4, 8)
    plan = memplan.plan(net, x, 1.0, costs="estimate", optimizer=adamw(net), update="backward")
    assert isinstance(plan, memplan.Plan)
    assert plan.problem.budget_bytes == unplanned(plan.problem).peak_bytes >= plan.peak_bytes
