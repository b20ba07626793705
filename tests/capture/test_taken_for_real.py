"""Forward may ask what its tensors are: a trace, which has others in their place, goes the way that eager goes."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
        self.known = [self.inner.weight]
        self.weak = weakref.ref(self.inner.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(x)) * self.scale
        return (hidden if self.question(self, x) else hidden.detach() * self.inner.bias).pow(2).mean()


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


def _is_pickled(tensor: torch.Tensor) -> bool:
    try:
        return bool(pickle.dumps(tensor))
    except Exception:
        return False


# Nobody can answer these in a trace. A run of forward goes another way than its trace, which is noticed.
OTHERWISE: dict[str, Callable[[Asks, torch.Tensor], bool]] = {
    "is": lambda net, x: any(weight is net.inner.weight for weight in net.known),
    "weak reference": lambda net, x: net.weak() is net.inner.weight,
    "class": lambda net, x: x.__class__ is torch.Tensor and net.inner.weight.__class__ is nn.Parameter,
    "attribute": lambda net, x: not hasattr(x, "fake_mode"),
    "pickle": lambda net, x: _is_pickled(x.detach()),
}


@pytest.mark.parametrize("question", [*WHOLE, *UNPLANNED, *OTHERWISE])
def test_questions_are_answered_as_in_eager(question: str) -> None:
    sample = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(nn.Sequential(nn.Linear(8, 8), Asks((WHOLE | UNPLANNED | OTHERWISE)[question])))
    memplan.apply(nets[1], sample, "1GiB", costs="estimate")
    plan = memplan.plan_of(nets[1])
    assert (plan is None) is (question not in WHOLE) and (plan is None or not plan.islands)
    assert_same_bits(*(run_steps(net, sample, 3) for net in nets))
    assert nets[0][0].weight.grad is not None


Way = Callable[["Chooses", torch.Tensor], torch.Tensor]
_WAYS: dict[str, tuple[Way, Way]] = {  # with a tensor that forward knows, and with another
    "a number": (lambda net, x: x * 2, lambda net, x: x * 3),
    "a weight": (lambda net, x: x @ net.one, lambda net, x: x @ net.two),
    "a buffer": (lambda net, x: x @ net.one * net.three, lambda net, x: x @ net.one * net.four),
    "a gradient": (lambda net, x: x @ net.one, lambda net, x: x.detach() @ net.one),
    "which gradient": (
        lambda net, x: x.detach() @ net.one + x @ net.two,
        lambda net, x: x @ net.one + x.detach() @ net.two,
    ),
    "an order": (lambda net, x: (x * 2).tanh() @ net.one, lambda net, x: x.tanh() * 2 @ net.one),
    "what follows from a result": (lambda net, x: x.sin() + x.cos().exp(), lambda net, x: x.sin().exp() + x.cos()),
    "which result": (lambda net, x: x * x.max(0)[0], lambda net, x: x * x.max(0)[1]),
    "a part": (lambda net, x: x @ net.one[:4].t(), lambda net, x: x @ net.one[4:].t()),
    "a shape": (lambda net, x: x.view(4, -1).cumsum(1), lambda net, x: x.view(-1, 4).cumsum(1)),
    "a transpose": (lambda net, x: x @ net.one, lambda net, x: x @ net.one.t()),
    "nothing": (lambda net, x: x @ net.one, lambda net, x: x),
    "a dtype": (lambda net, x: (x @ net.one).double(), lambda net, x: x @ net.one),
    "draws": (lambda net, x: x @ net.one, lambda net, x: F.dropout(x @ net.one, 0.5)),
    "a write": (lambda net, x: x @ net.one, lambda net, x: (x @ net.one).add_(net.three.add_(1))),
}


class Chooses(nn.Module):
    """Goes one way with its own weight, and another way with any other tensor."""

    def __init__(self, way: str, known: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.register_buffer("three", torch.ones(8))
        self.register_buffer("four", torch.full((8,), 2.0))
        self.ways, self.known = _WAYS[way] if known else _WAYS[way][::-1], [self.one]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ways[not any(weight is self.one for weight in self.known)](self, x)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("way", _WAYS)
def test_another_way_than_in_the_trace_is_noticed(way: str, known: bool) -> None:
    sample, nets = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), list[Any]()
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(nn.Sequential(nn.Linear(8, 8), Chooses(way, known), nn.Tanh()))
    memplan.apply(nets[1], sample, "1GiB", costs="estimate")
    assert memplan.plan_of(nets[1]) is None
    assert_same_bits(*(run_steps(net, sample, 3) for net in nets))
    assert_same_bits(*(run_steps(net, sample[:12], 2) for net in nets))  # which is captured once more
    assert memplan.plan_of(nets[1]) is None


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
