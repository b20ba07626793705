"""Who asks for the gradient of a tensor between parameters and loss gets eager's, or is told that a plan has it not."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

import memplan
from memplan.installed.planned_forward import planned_forward
from memplan.runtime.program.step import PlannedStep
from tests.support.zoo import assert_same_bits, copied

Notes = list[Any]
Ask = Callable[[torch.Tensor, Notes], Any]


class Net(nn.Module):
    """Returns what comes out, and what is in the middle. inside: what forward does with the latter."""

    def __init__(self, inside: Callable[[Net, torch.Tensor], None] | None = None) -> None:
        super().__init__()
        self.first, self.last, self.inside = nn.Linear(8, 32), nn.Linear(32, 8), inside
        self.deep = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = middle = self.first(x)
        for number, layer in enumerate(self.deep):
            hidden = torch.tanh(layer(torch.sin(hidden) * 2))
            if number == 1:
                middle = hidden
                if self.inside is not None:
                    self.inside(self, middle)
        return self.last(hidden), middle


class Side(Net):
    """Nothing that it returns derives from the rest of that."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, middle = super().forward(x)
        return out, torch.sin(middle)


def retained(middle: torch.Tensor, notes: Notes) -> None:
    middle.retain_grad()
    notes.append(middle)


def looked_at(middle: torch.Tensor, notes: Notes) -> None:
    middle.register_hook(lambda g: notes.append(g.clone()))


def scaled(middle: torch.Tensor, notes: Notes) -> None:
    middle.register_hook(lambda g: g * 0.5)


def taken_back(middle: torch.Tensor, notes: Notes) -> None:
    middle.register_hook(lambda g: g * 0.5).remove()


def among_several(middle: torch.Tensor, notes: Notes) -> None:
    register_multi_grad_hook((middle,), lambda gradients: notes.extend(g.clone() for g in gradients if g is not None))


def of_the_middle(out: torch.Tensor, middle: torch.Tensor) -> torch.Tensor:
    return middle.pow(2).mean()


def of_both(out: torch.Tensor, middle: torch.Tensor) -> torch.Tensor:
    return out.pow(2).mean() + middle.pow(3).mean()


def of_what_comes_out(out: torch.Tensor, middle: torch.Tensor) -> torch.Tensor:
    return out.pow(2).mean()


def loss_of(net: nn.Module, x: torch.Tensor, ask: Ask, loss: Any, notes: Notes) -> torch.Tensor:
    out, middle = net(x)
    ask(middle, notes)
    result: torch.Tensor = loss(out, middle)
    return result


def step(net: nn.Module, x: torch.Tensor, ask: Ask, loss: Any) -> Any:
    """What must be the same with and without a plan. The tensors that were asked about may be gone in backward."""
    notes: Notes = []
    net.zero_grad()
    total = loss_of(net, x, ask, loss, notes)
    gc.collect()
    total.backward()
    found = [n.grad if n.requires_grad else n for n in notes]
    return [copied(found), copied([p.grad for p in net.parameters()])]


def planned(net: nn.Module, x: torch.Tensor, **options: Any) -> nn.Module:
    """A planned copy."""
    other = copy.deepcopy(net)
    memplan.apply(other, x, memplan.Budget(activations=0.8), costs="estimate", **options)
    return other


ASKS = [retained, looked_at, scaled, among_several]


@pytest.mark.parametrize(
    ("ask", "loss", "grads"),
    [
        *((ask, of_both, "surface") for ask in (retained, among_several)),
        *(pytest.param(ask, of_both, "surface", marks=pytest.mark.slow) for ask in (looked_at, scaled)),
        *(pytest.param(ask, of_what_comes_out, "surface", marks=pytest.mark.slow) for ask in ASKS),
        (looked_at, of_both, "edges"),
        pytest.param(retained, of_both, "edges", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_outputs_from_which_others_derive_are_refused(ask: Ask, loss: Any, grads: str) -> None:
    net, x = Net(), torch.randn(64, 8)
    net = planned(net, x, grads=grads)  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="from which the model computes other outputs"):
            step(net, x, ask, loss)


@pytest.mark.parametrize("grads", ["surface", "edges"])
@pytest.mark.parametrize("loss", [of_both, of_what_comes_out])
def test_so_are_those_that_autograd_grad_is_asked_for(loss: Any, grads: str) -> None:
    net, x = planned(Net(), torch.randn(64, 8), grads=grads), torch.randn(64, 8)
    out, middle = net(x)
    with pytest.raises(RuntimeError, match=r"memplan: torch\.autograd\.grad asks for the gradient of output"):
        torch.autograd.grad(loss(out, middle), middle)


@pytest.mark.parametrize(
    ("kind", "ask", "loss", "grads"),
    [
        *((Net, ask, of_the_middle, "surface") for ask in (retained, scaled)),  # nothing it starts from derives from it
        *(
            pytest.param(Net, ask, of_the_middle, "surface", marks=pytest.mark.slow)
            for ask in (looked_at, among_several)
        ),
        *(pytest.param(Side, ask, of_both, "surface", marks=pytest.mark.slow) for ask in ASKS),
        (Net, taken_back, of_both, "surface"),
        pytest.param(Net, taken_back, of_what_comes_out, "surface", marks=pytest.mark.slow),
        (Net, looked_at, of_the_middle, "edges"),
        pytest.param(Side, looked_at, of_both, "edges", marks=pytest.mark.slow),
    ],
)
def test_all_others_are_those_of_eager(kind: type[Net], ask: Ask, loss: Any, grads: str) -> None:
    torch.manual_seed(0)
    plain, x = kind(), torch.randn(64, 8)
    net = planned(plain, x, grads=grads)
    for _ in range(3):
        assert_same_bits(step(plain, x, ask, loss), step(net, x, ask, loss))
    assert all(isinstance(s, PlannedStep) for s in planned_forward(net).steps)  # type: ignore[union-attr]


def test_a_hook_that_waits_for_backward_is_none_that_asks() -> None:
    """FSDP gathers its parameters in such a one."""

    def wait(gradient: torch.Tensor | None) -> None:
        arrived.append(None)

    wait.__module__ = "torch.distributed.fsdp._fully_shard._fsdp_state"
    arrived: list[None] = []
    torch.manual_seed(0)
    plain, x = Net(), torch.randn(64, 8)
    net = planned(plain, x)
    asked = step(net, x, lambda middle, notes: middle.register_hook(wait), of_both)
    assert_same_bits(step(plain, x, taken_back, of_both), asked)
    assert arrived


def keeps_the_gradient(net: Net, middle: torch.Tensor) -> None:
    middle.register_hook(lambda g: setattr(net, "seen", g))


def retains_it(net: Net, middle: torch.Tensor) -> None:
    middle.retain_grad()
    net.seen = middle


def halves_it(net: Net, middle: torch.Tensor) -> None:
    middle.register_hook(lambda g: g / 2)


def halves_it_in_place(net: Net, middle: torch.Tensor) -> None:
    def halve(gradient: torch.Tensor) -> None:
        gradient.mul_(0.5)

    middle.register_hook(halve)


def sees(net: Net) -> torch.Tensor | None:
    return net.seen.grad if isinstance(net.seen, torch.Tensor) and net.seen.requires_grad else net.seen


@pytest.mark.parametrize(
    ("inside", "whole"),
    [(keeps_the_gradient, False), (retains_it, False), (halves_it, True), (halves_it_in_place, True)],
)
def test_what_forward_itself_asks_for_is_there(inside: Any, whole: bool) -> None:
    torch.manual_seed(0)
    plain, x = Net(inside), torch.randn(64, 8)
    net = copy.deepcopy(plain)
    memplan.apply(net, x, memplan.Budget(activations=0.8) if whole else 1 << 20, costs="estimate")
    assert isinstance(memplan.plan_of(net), memplan.Plan) == whole
    for _ in range(2):
        assert_same_bits(step(plain, x, taken_back, of_both), step(net, x, taken_back, of_both))
        if not whole:
            assert_same_bits(sees(plain), sees(net))
