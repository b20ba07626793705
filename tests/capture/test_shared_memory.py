"""Arguments, parameters and buffers that are one tensor, or lie in one memory: as eager, also where that changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from tests.support.parameters import quickly
from tests.support.zoo import assert_same_bits, copied


class Attention(nn.Module):
    """PyTorch's attention has another way for a query that is the key."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        mixed = self.attention(query, key, value, need_weights=False)[0]
        return torch.tanh(mixed * query.sin() + key) * value


def run(net: nn.Module, calls: list[tuple[torch.Tensor, ...]]) -> Any:
    """What these calls, and their backwards, give and leave."""
    given = []
    for arguments in calls:
        net.zero_grad()
        out = net(*arguments)
        out.pow(2).mean().backward()
        grads = [p.grad for p in net.parameters()]
        given.append(copied([out, grads, [t.grad for t in arguments if t.is_leaf], list(net.buffers())]))
    return given


@pytest.mark.parametrize("requires_grad", quickly((False, True), True))
def test_one_tensor_for_several_arguments(requires_grad: bool) -> None:
    def calls() -> list[tuple[torch.Tensor, ...]]:
        torch.manual_seed(1)
        x, y, z = (torch.randn(2, 8, 16, requires_grad=requires_grad) for _ in range(3))
        return [(x, x, x), (x, y, y), (x, y, z), (x, y, y.view(2, 8, 16)), (x, x, x)]

    torch.manual_seed(0)
    net = Attention()
    expected = run(net, calls())
    memplan.apply(net, calls()[0], "1GiB", costs="estimate")
    assert_same_bits(run(net, calls()), expected)


class Sums(nn.Module):
    """Reads a table, and adds to a sum that may come to lie in one memory with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("table", torch.randn(12, 16))
        self.register_buffer("total", torch.zeros(12, 16))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        for number in (0, 1, 0, 2, 1, 3):
            x = torch.tanh(self.layers[number](x)) * self.table.sin() * shift.cos()
        self.total.add_(x.detach())
        return torch.tanh(self.layers[0](x))


def ties_layers(net: Sums) -> None:
    net.layers[1].weight = net.layers[2].weight = net.layers[0].weight


def ties_buffers(net: Sums) -> None:
    net.table = net.total


def shares_memory(net: Sums) -> None:
    net.table.data = net.total.data


@pytest.mark.parametrize("change", [ties_layers, ties_buffers, shares_memory, None])
def test_what_comes_to_be_one_is_noticed(change: Callable[[Sums], None] | None) -> None:
    def trained(net: Sums) -> Any:
        torch.manual_seed(1)
        xs, shift = [torch.randn(12, 16) for _ in range(7)], torch.randn(12, 16)
        before = run(net, [(x, shift) for x in xs[:4]])  # so many that checks before calls are quick by then
        if change is not None:
            change(net)
        shift = net.total if change is None else shift
        return before, run(net, [(x, shift) for x in xs[4:]])

    torch.manual_seed(0)
    net, plain = Sums(), Sums()
    plain.load_state_dict(net.state_dict())
    memplan.apply(net, (torch.randn(12, 16), torch.randn(12, 16)), "min", costs="estimate", on_infeasible="min")
    assert_same_bits(trained(net), trained(plain))
