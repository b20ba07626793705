"""Forward may ask what its tensors are: a trace, which has others in their place, goes the way that eager goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from tests.support.zoo import assert_same_bits, run_steps


class Asks(nn.Module):
    """Detaches what a weight makes where a question is answered otherwise than in eager."""

    def __init__(self, question: Callable[[Asks, torch.Tensor], bool]) -> None:
        super().__init__()
        self.inner, self.question = nn.Linear(8, 8), question
        self.register_buffer("scale", torch.ones(8))
        self.gains, self.ids, self.seen = {self.inner.weight: 2.0}, {id(self.inner.weight)}, {self.inner.weight}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(x)) * self.scale
        return (hidden if self.question(self, x) else hidden.detach() * 2).pow(2).mean()


WHOLE: dict[str, Callable[[Asks, torch.Tensor], bool]] = {
    "isinstance": lambda net, x: isinstance(net.inner.weight, nn.Parameter),
    "no parameter": lambda net, x: not isinstance(x, nn.Parameter) and not isinstance(net.scale, nn.Parameter),
    "type of a parameter": lambda net, x: type(net.inner.weight) is nn.Parameter,
    "type of an input": lambda net, x: type(x) is torch.Tensor,
    "type of a buffer": lambda net, x: type(net.scale) is torch.Tensor,
    "type of a result": lambda net, x: type(x * 2) is torch.Tensor,
    "types of other things": lambda net, x: isinstance(type(net), type) and type(net) is Asks and type(net.ids) is set,
    "id": lambda net, x: id(net.inner.weight) in net.ids and id(net.scale) not in net.ids,
}
UNPLANNED: dict[str, Callable[[Asks, torch.Tensor], bool]] = {
    "in a dict": lambda net, x: net.inner.weight in net.gains,
    "of a dict": lambda net, x: net.gains.get(net.inner.weight, 1.0) == 2.0,
    "in a set": lambda net, x: net.inner.weight in net.seen,
}


@pytest.mark.parametrize("question", [*WHOLE, *UNPLANNED])
def test_questions_are_answered_as_in_eager(question: str) -> None:
    sample = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(nn.Sequential(nn.Linear(8, 8), Asks((WHOLE | UNPLANNED)[question])))
    memplan.apply(nets[1], sample, "1GiB", costs="estimate")
    plan = memplan.plan_of(nets[1])
    assert (plan is None) is (question in UNPLANNED) and (plan is None or not plan.islands)
    assert_same_bits(*(run_steps(net, sample, 3) for net in nets))
    assert nets[0][0].weight.grad is not None


class Opaque(nn.Module):
    """Reads memory by NumPy, so that it is an island, and asks whether its weight is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1.0 + float(x.detach().numpy()[0, 0] > 1e9)
        return self.inner(x) * scale * (2.0 if isinstance(self.inner.weight, nn.Parameter) else 1.0)


def test_islands_see_parameters() -> None:
    sample, nets = torch.randn(16, 8), list[Any]()
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(nn.Sequential(nn.Linear(8, 8), Opaque(), nn.Linear(8, 8)))
    memplan.apply(nets[1], sample, "1GiB", costs="estimate")
    plan = memplan.plan_of(nets[1])
    assert plan is not None and plan.islands
    assert_same_bits(*(run_steps(net, sample, 3) for net in nets))
    assert not any(vars(parameter) for parameter in nets[1].parameters())
