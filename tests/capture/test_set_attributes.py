"""Forward leaves tensors in attributes (attention maps, auxiliary losses, deep supervision), as eager does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.installed.planned_forward import planned_forward
from memplan.runtime.program.step import PlannedStep
from tests.support.meter import LiveMeter
from tests.support.parameters import quickly
from tests.support.zoo import assert_same_bits, copied

Write = Callable[[Any, torch.Tensor], None]
Term = Callable[[Any, torch.Tensor], torch.Tensor]


class State:
    found: torch.Tensor | None = None


class Net(nn.Module):
    """Layers; one of `WAYS` writes to attributes between them, and a loss outside may use what it leaves there."""

    table: torch.Tensor | None = None

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.first, self.inner, self.last, self.write = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 8), write
        self.deep = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.state, self.steps, self.held = State(), 0, None
        self.losses: list[torch.Tensor] = []
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.given = x
        hidden = self.first(x)
        for layer in self.deep:
            hidden = torch.tanh(layer(torch.sin(hidden) * 2))
        self.write(self, hidden)
        hidden = torch.tanh(self.inner(hidden) * 2)
        self.write(self, hidden)
        return self.last(hidden)


def detached(net: Net, hidden: torch.Tensor) -> None:
    net.found = hidden.detach()


def graph(net: Net, hidden: torch.Tensor) -> None:
    net.found = hidden


def scalar(net: Net, hidden: torch.Tensor) -> None:
    net.found = hidden.pow(2).mean()


def begun_anew(net: Net, hidden: torch.Tensor) -> None:
    net.found = None
    net.found = torch.sin(hidden)


def on_a_module(net: Net, hidden: torch.Tensor) -> None:
    net.inner.found = torch.softmax(hidden, -1)
    net.found = net.inner.found * 2


def on_an_object(net: Net, hidden: torch.Tensor) -> None:
    net.state.found = torch.softmax(hidden, -1)


def in_a_list(net: Net, hidden: torch.Tensor) -> None:
    net.losses = [hidden.pow(2).mean()]
    net.losses.append(hidden.pow(3).mean())


def in_a_tree(net: Net, hidden: torch.Tensor) -> None:
    net.found = {"map": torch.softmax(hidden, -1), "sizes": (len(hidden), "rows"), "both": [hidden, hidden]}


def of_a_buffer(net: Net, hidden: torch.Tensor) -> None:
    with torch.no_grad():
        net.mean.mul_(0.9).add_(hidden.mean(0))
        net.found = net.mean * 2


def a_view(net: Net, hidden: torch.Tensor) -> None:
    net.found = hidden[:, ::2].t()


def random(net: Net, hidden: torch.Tensor) -> None:
    net.found = (torch.rand_like(hidden) < 0.5) * hidden


def a_running_value(net: Net, hidden: torch.Tensor) -> None:
    before = net.held
    net.held = hidden.detach().mean() if before is None else 0.9 * before + 0.1 * hidden.detach().mean()


def only_at_first(net: Net, hidden: torch.Tensor) -> None:
    if net.table is None:
        net.table = torch.arange(32.0)
    net.found = hidden * net.table


def only_at_first_by_a_number(net: Net, hidden: torch.Tensor) -> None:
    if net.steps < 1:
        net.steps, net.held = 1, torch.arange(32.0)
    net.found = hidden * net.held


def if_it_is_there(net: Net, hidden: torch.Tensor) -> None:
    if hasattr(net, "extra"):
        net.extra = net.extra + hidden.detach().mean()
    else:
        net.extra = hidden.detach().mean()


def in_place(net: Net, hidden: torch.Tensor) -> None:
    net.losses.append(hidden.pow(2).mean())


def on_the_class(net: Net, hidden: torch.Tensor) -> None:
    Net.table = hidden.detach()


def past_everybody(net: Net, hidden: torch.Tensor) -> None:
    net.__dict__["found"] = hidden.detach()


def unheard(net: Net, hidden: torch.Tensor) -> None:
    before = object.__getattribute__(net, "held")
    net.held = hidden.detach().mean() if before is None else 0.9 * before + 0.1 * hidden.detach().mean()


EVERYTHING: list[torch.Tensor] = []


def in_somebody_elses_list(net: Net, hidden: torch.Tensor) -> None:
    net.losses = EVERYTHING
    EVERYTHING.append(hidden.pow(2).mean())


def a_parameter(net: Net, hidden: torch.Tensor) -> None:
    net.found = net.first.weight.detach() * 2
    net.state.found = net.inner.weight


def through_setattr(net: Net, hidden: torch.Tensor) -> None:
    for name in ("found", "also"):
        setattr(net, name, hidden.detach() + 1)
    object.__setattr__(net, "third", 3)


def found(net: Any, out: torch.Tensor) -> torch.Tensor:
    return net.found.pow(2).mean()


@dataclass(frozen=True)
class Way:
    """write: what forward does. whole: it is planned whole. term: of the loss outside."""

    write: Write
    whole: bool = True
    term: Term | None = None

    def __str__(self) -> str:
        return f"{self.write.__name__}{'' if self.term is None else ', used'}"


WAYS = [
    *(Way(w) for w in (detached, graph, scalar, begun_anew, on_a_module, on_an_object, in_a_list, in_a_tree)),
    *(Way(w) for w in (of_a_buffer, a_view, random, only_at_first, only_at_first_by_a_number, through_setattr)),
    *(Way(w, term=found) for w in (graph, scalar, a_view)),
    Way(in_a_list, term=lambda net, out: torch.stack(net.losses).sum()),
    Way(in_a_tree, term=lambda net, out: net.found["map"].pow(2).sum() + net.found["both"][1].mean()),
    Way(on_an_object, term=lambda net, out: net.state.found[0].sum()),
    *(Way(w, whole=False) for w in (a_running_value, if_it_is_there, in_place, on_the_class, past_everybody)),
    *(Way(w, whole=False) for w in (a_parameter, unheard)),
]
IN_EVERY_RUN = (
    "detached", "on_a_module", "in_a_tree", "of_a_buffer", "random", "only_at_first", "through_setattr", "a_view, used",
    "in_a_list, used", "on_an_object, used", "a_running_value", "in_place", "past_everybody", "unheard",
)  # fmt: skip


def step(net: Net, x: torch.Tensor, term: Term | None, seed: int) -> dict[str, Any]:
    """What must be the same with and without a plan."""
    torch.manual_seed(seed)
    net.zero_grad()
    out = net(x)
    loss = out.pow(2).mean()
    if term is not None:
        loss = loss + term(net, out)
    loss.backward()
    with torch.no_grad():
        for p in net.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad
    left = {
        name: value
        for owner in (net, net.inner, net.state)
        for name, value in vars(owner).items()
        if name not in ("forward", "state", "write") and not name.startswith("_")
    }
    left = {name: left[name] for name in sorted(left)}
    grads = {n: copied(p.grad) for n, p in net.named_parameters()}
    needs = {n: v.requires_grad for n, v in left.items() if isinstance(v, torch.Tensor)}
    return {
        "out": copied(out), "left": copied(left), "grads": grads, "needs": needs, "mean": copied(net.mean),
        "parameters": {n: copied(p) for n, p in net.named_parameters()},
    }  # fmt: skip


@pytest.fixture(autouse=True)
def _class_as_it_was() -> Any:
    yield
    Net.table = None
    EVERYTHING.clear()


def samples() -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randn(n, 8) for n in (64, 32, 64)]


@pytest.mark.parametrize("way", quickly(WAYS, *(way for way in WAYS if str(way) in IN_EVERY_RUN)), ids=str)
def test_what_forward_leaves_is_what_eager_leaves(way: Way) -> None:
    torch.manual_seed(0)
    plain = Net(way.write)
    net, xs = copy.deepcopy(plain), samples()
    expected = [step(plain, x, way.term, i) for i, x in enumerate(xs)]
    Net.table = None
    EVERYTHING.clear()
    memplan.apply(net, xs[0], memplan.Budget(activations=0.8) if way.whole else 1 << 20, costs="estimate")
    assert not hasattr(net, "found") and net.state.found is None and not net.losses
    for i, (x, want) in enumerate(zip(xs, expected, strict=True)):
        assert_same_bits(want, step(net, x, way.term, i), f"step {i}")
        if way.whole:
            assert isinstance(planned_forward(net).steps[0], PlannedStep)  # type: ignore[union-attr]
    captures = {id(s.key) for s in planned_forward(net).steps if isinstance(s, PlannedStep)}  # type: ignore[union-attr]
    assert not way.whole or len(captures) <= 4  # two shapes, and another loss than was thought for each


def test_the_loss_inside_may_read_what_forward_has_left() -> None:
    def loss_of(net: Net, x: torch.Tensor) -> torch.Tensor:
        return net(x).pow(2).mean() + net.found + torch.stack(net.losses).sum()

    def write(net: Net, hidden: torch.Tensor) -> None:
        in_a_list(net, hidden)
        scalar(net, hidden)

    torch.manual_seed(0)
    plain, xs = Net(write), samples()
    net = copy.deepcopy(plain)
    memplan.apply(net, (xs[0],), memplan.Budget(activations=0.8), loss_fn=loss_of, costs="estimate")
    for x in xs:
        for model in (plain, net):
            model.zero_grad()
            loss = loss_of(plain, x) if model is plain else net(x)
            loss.backward()
        assert_same_bits([p.grad for p in plain.parameters()], [p.grad for p in net.parameters()])
        assert_same_bits([*plain.losses, plain.found], [*net.losses, net.found])
    assert all(isinstance(s, PlannedStep) for s in planned_forward(net).steps)  # type: ignore[union-attr]


def test_it_is_the_very_tensor_that_forward_returns_or_takes() -> None:
    class Same(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.out = super().forward(x)
            self.pair = [self.out, self.out]
            return self.out

    net, (x, *_) = Same(lambda net, hidden: None), samples()
    memplan.apply(net, x, memplan.Budget(activations=0.8), costs="estimate")
    out = net(x)
    assert net.out is out and net.pair[0] is out and net.pair[1] is out
    assert net.given is x
    out.sum().backward()
    assert len(planned_forward(net).steps) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("write", [graph, begun_anew, in_a_tree, on_a_module])
def test_what_the_step_before_has_left_is_let_go_of(write: Write) -> None:
    """No step holds more than predicted, though attributes hold tensors from one to the next."""
    net, (x, *_) = Net(write), samples()
    plan = memplan.apply(net, x, memplan.Budget(activations=0.8), costs="estimate") and memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan)
    for _ in range(3):
        out = net(x)
        out.sum().backward()
        net.zero_grad()
        del out
    with LiveMeter() as meter:
        meter.register([list(net.parameters()), list(net.buffers()), x])
        net(x).sum().backward()
    assert meter.peak_bytes <= plan.live_peak_bytes


def test_a_list_that_somebody_else_has_is_not_exchanged() -> None:
    net, (x, *_) = Net(in_somebody_elses_list), samples()
    memplan.apply(net, x, 1 << 20, costs="estimate")
    assert memplan.plan_of(net) is None


def test_evaluation_leaves_what_it_leaves() -> None:
    net, (x, *_) = Net(detached), samples()
    memplan.apply(net, x, memplan.Budget(activations=0.8), costs="estimate")
    net(x).sum().backward()
    net.zero_grad()
    net.eval()
    with torch.no_grad():
        net(x[:3])
    assert net.found.shape == (3, 32)
    net.train()
    net(x).sum().backward()
    assert net.found.shape == (64, 32)
    assert len(planned_forward(net).steps) == 1  # type: ignore[union-attr]
