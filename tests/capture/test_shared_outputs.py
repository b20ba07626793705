"""Outputs that share memory with inputs, buffers, attributes or each other: edits of them are eager's, or refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from tests.support.parameters import quickly
from tests.support.zoo import assert_same_bits, copied

Outputs = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """`returned` says what it returns of its input, a tensor in the middle and its result."""

    def __init__(self, returned: Callable[[Net, torch.Tensor, torch.Tensor, torch.Tensor], Outputs]) -> None:
        super().__init__()
        self.first, self.last, self.returned = nn.Linear(8, 32), nn.Linear(32, 8), returned
        self.deep = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.register_buffer("scale", torch.arange(1.0, 33.0) / 8)
        self.table = torch.arange(1.0, 33.0) / 16

    def forward(self, x: torch.Tensor) -> Outputs:
        hidden = middle = torch.tanh(self.first(x))
        for layer in self.deep:
            hidden = torch.tanh(layer(torch.sin(hidden) * 2))
        return self.returned(self, x, middle, self.last(hidden))


RETURNED: dict[str, Callable[[Net, torch.Tensor, torch.Tensor, torch.Tensor], Outputs]] = {
    "view of the middle": lambda net, x, middle, out: (out, middle.view(-1)),
    "the middle, detached": lambda net, x, middle, out: (out, middle.detach()),
    "the result, detached": lambda net, x, middle, out: (out, out.detach()),
    "a view of it, detached": lambda net, x, middle, out: (torch.tanh(out), out.detach()[:, 2:]),
    "the input": lambda net, x, middle, out: (torch.sin(out) * x.pow(2), x),
    "the input, detached": lambda net, x, middle, out: (torch.sin(out) * x.pow(2), x.detach()),
    "view of the input, detached": lambda net, x, middle, out: (torch.sin(out) * x.pow(2), x.detach()[:, 2:]),
    "buffer": lambda net, x, middle, out: (out * net.scale[:8], net.scale),
    "view of a buffer": lambda net, x, middle, out: (out * net.scale[:8], net.scale[2:]),
    "attribute": lambda net, x, middle, out: (out * net.table[:8], net.table),
    "view of an attribute": lambda net, x, middle, out: (out * net.table[:8], net.table[2:]),
    "view of a weight": lambda net, x, middle, out: (out * net.last.weight.mean(), net.last.weight.detach()[2:]),
}


def unedited(out: torch.Tensor, other: torch.Tensor) -> None:
    pass


def doubled(out: torch.Tensor, other: torch.Tensor) -> None:
    with torch.no_grad():
        other.mul_(2)


def result_doubled(out: torch.Tensor, other: torch.Tensor) -> None:
    out.mul_(2)


def step(net: Net, x: torch.Tensor, edit: Callable[[torch.Tensor, torch.Tensor], None]) -> Any:
    """What is the same with and without a plan; None where the edit makes a backward pass impossible."""
    net.zero_grad()
    outputs = net(x)
    edit(*outputs)
    loss = torch.stack([t.pow(2).mean() for t in outputs]).sum()
    try:
        loss.backward()
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        return None
    return copied([*outputs, x.grad, *(p.grad for p in net.parameters())])


@pytest.mark.parametrize("edit", [unedited, doubled, result_doubled])
@pytest.mark.parametrize(
    ("returned", "wanted"),
    [*((name, False) for name in RETURNED), ("the input, detached", True), ("view of the input, detached", True)],
)
def test_edits_are_those_of_eager_or_refused_as_there(returned: str, edit: Any, wanted: bool) -> None:
    torch.manual_seed(0)
    plain, sample = Net(RETURNED[returned]), torch.randn(64, 8)
    net = copy.deepcopy(plain)
    memplan.apply(net, sample.clone().requires_grad_(wanted), memplan.Budget(activations=0.8), costs="estimate")
    assert isinstance(memplan.plan_of(net), memplan.Plan)
    expected, found = (step(m, sample.clone().requires_grad_(wanted), edit) for m in (plain, net))
    assert_same_bits(expected, found)


PAIRS: dict[str, Callable[[Net, torch.Tensor, torch.Tensor, torch.Tensor], Outputs]] = {
    "and a view of it": lambda net, x, middle, out: (out, out[:, :4]),
    "two views": lambda net, x, middle, out: (out[:, :6], out[:, 2:]),
}


EDITED = ("", "0", "1", "01", "without autograd")
IN_EVERY_RUN = [
    *(("and a view of it", edited, True) for edited in EDITED),
    *(("two views", edited, False) for edited in ("", "0", "without autograd")),
]


@pytest.mark.parametrize(
    ("returned", "edited", "kept"), quickly(itertools.product(PAIRS, EDITED, (True, False)), *IN_EVERY_RUN)
)
def test_differentiable_edits_of_memory_that_outputs_share(returned: str, edited: str, kept: bool) -> None:
    def losses(net: nn.Module, used: str) -> tuple[torch.Tensor, Any]:
        outputs = net(x)
        for index in edited if edited.isdigit() else "":
            outputs[int(index)].mul_(3)
        if edited == "without autograd":
            with torch.no_grad():
                outputs[0].mul_(3)
        return torch.stack([outputs[int(i)].sin().mean() for i in used]).sum(), outputs if kept else None

    def gradients(net: nn.Module, used: str) -> Any:
        net.zero_grad()
        loss, _kept = losses(net, used)
        loss.backward()
        return copied([p.grad for p in net.parameters()])

    torch.manual_seed(0)
    plain, x = Net(PAIRS[returned]), torch.randn(64, 8)
    net = copy.deepcopy(plain)
    memplan.apply(net, x, memplan.Budget(activations=0.8), costs="estimate")
    for used in ("0", "1", "01"):
        if not edited or (kept and edited in {used, "without autograd"} - {"01"}):
            assert_same_bits(gradients(plain, used), gradients(net, used))
        else:
            with pytest.raises(RuntimeError, match="which share memory, has been modified"):
                gradients(net, used)
