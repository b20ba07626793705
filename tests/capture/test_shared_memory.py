"""Arguments, parameters and buffers that are one tensor, or lie in one memory: as eager, also where that changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memplan
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


@pytest.mark.parametrize("requires_grad", [False, True])
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
