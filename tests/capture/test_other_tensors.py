"""Tensors that forward reads and that are neither parameters, buffers nor arguments: in attributes, lists, globals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from tests.support.zoo import assert_same_bits

SIZES = torch.tensor([16, 16])


class Reads(nn.Module):
    """Reads tensors of its own by this function."""

    def __init__(self, read: Callable[[Reads, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        self.scales, self.listed, self.one = torch.tensor([1.0, 1.0]), [torch.ones(2)], torch.tensor(1.0)
        self.hidden = [nn.Linear(32, 32).requires_grad_(False)]
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.read(self, x)).square().mean()  # type: ignore[no-any-return]


def trained(read: Any, change: Callable[[Reads], object], budget: Any, seen: Any) -> tuple[list[Any], Any]:
    """Losses, gradients and what is to be seen after each of four steps, with a change before the third; the plan."""
    torch.manual_seed(0)
    SIZES.fill_(16)
    net, found = Reads(read), list[Any]()
    x = torch.randn(64, 32)
    if budget is not None:
        memplan.apply(net, x, budget, costs="estimate")
    plan = memplan.plan_of(net)
    for step in range(4):
        if step == 2:
            change(net)
        net.zero_grad()
        loss = net(torch.roll(x, step, 0))
        loss.backward()
        found.append((loss.detach(), [p.grad for p in net.parameters()], [t.grad for t in seen(net)]))
    return found, plan


LISTED: dict[str, tuple[Any, Callable[[Reads], object]]] = {
    "attribute": (lambda net, x: x * sum(net.scales.tolist()), lambda net: net.scales.mul_(2)),
    "number": (lambda net, x: x * net.one.tolist(), lambda net: net.one.mul_(2)),
    "list": (lambda net, x: x * net.listed[0].tolist()[1], lambda net: net.listed[0].mul_(2)),
    "rows": (lambda net, x: x * net.scales.view(1, 2).tolist()[0][1], lambda net: net.scales.mul_(2)),
    "global": (
        lambda net, x: torch.cat([part * (1 + i) for i, part in enumerate(x.split(SIZES.tolist(), 1))], 1),
        lambda net: SIZES.copy_(torch.tensor([8, 24])),
    ),
}


@pytest.mark.parametrize("budget", ["min", "1GiB"])
@pytest.mark.parametrize("where", LISTED)
def test_numbers_listed_from_tensors_are_those_of_each_step(where: str, budget: str) -> None:
    read, change = LISTED[where]
    (eager, _), (planned, _) = (trained(read, change, given, lambda net: ()) for given in (None, budget))
    assert_same_bits(eager, planned)


LEARNT: dict[str, tuple[Any, Callable[[Reads], list[torch.Tensor]]]] = {
    "attribute": (lambda net, x: x * net.scales[0], lambda net: [net.scales]),
    "list": (lambda net, x: x * net.listed[0][1], lambda net: net.listed),
    "hidden module": (lambda net, x: net.hidden[0](x), lambda net: list(net.hidden[0].parameters())),
}


@pytest.mark.parametrize("where", LEARNT)
def test_a_tensor_that_is_to_be_learnt_later_gets_its_gradient(where: str) -> None:
    read, learnt = LEARNT[where]

    def unfreeze(net: Reads) -> None:
        for tensor in learnt(net):
            tensor.requires_grad_()

    (eager, _), (planned, plan) = (trained(read, unfreeze, budget, learnt) for budget in (None, "1GiB"))
    assert plan is not None
    assert all(gradient is not None for gradient in eager[-1][2])
    assert_same_bits(eager, planned)


def test_a_tensor_that_is_to_be_learnt_later_is_refused_where_the_plain_step_does_not_fit() -> None:
    read, learnt = LEARNT["attribute"]
    with pytest.raises(memplan.BudgetInfeasible, match="requires grad and is neither a parameter"):
        trained(read, lambda net: net.scales.requires_grad_(), "min", learnt)
