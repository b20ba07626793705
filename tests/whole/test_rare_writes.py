"""Loops in which a module writes to its own buffers, or parameters, in its first run or in some steps alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memplan
from tests.support.zoo import assert_same_bits

STEPS = 9


class _Scaled(nn.Module):
    """Divides by what subclasses write."""

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.is_set = 0, False
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(x)
        return x / self.scale

    def write(self, x: torch.Tensor) -> None:
        raise NotImplementedError


class SetAtFirst(_Scaled):
    def write(self, x: torch.Tensor) -> None:
        if not self.is_set:
            self.scale.copy_(x.abs().max())
            self.is_set = True


class AddedToEveryFourth(_Scaled):
    def write(self, x: torch.Tensor) -> None:
        self.runs += 1
        if self.runs % 4 == 0:
            self.scale.mul_(0.9).add_(x.abs().max())


class RaisedByData(_Scaled):
    def write(self, x: torch.Tensor) -> None:
        if x.abs().max() > 1.5 * self.scale:
            self.scale.copy_(x.abs().max())


class RaisedByNumber(_Scaled):
    def write(self, x: torch.Tensor) -> None:
        most = x.abs().max().item()
        if most > 1.5 * self.scale.item():
            self.scale.fill_(most)


class LearnedStep(_Scaled):
    """As quantizers do whose step sizes are learned."""

    def __init__(self) -> None:
        super().__init__()
        del self.scale
        self.scale = nn.Parameter(torch.ones(64))

    def write(self, x: torch.Tensor) -> None:
        if not self.is_set:
            self.scale.data.copy_(x.abs().flatten(0, -2).amax(0) + 1)
            self.is_set = True


class Net(nn.Module):
    """A layer that writes now and then, between others."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 64), kind(), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.tanh(self.middle(torch.relu(self.first(x))))
        return torch.tanh(self.last(wide)).pow(2).mean()


class ReadOutside(Net):
    """Reads before the layer runs what the layer writes to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.tanh(x * self.middle.scale).square())


class Branching(Net):
    """Takes another branch after the layer has run, in some steps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out * 2 if self.first.weight.sum() > 1e3 else out


def _trained(net: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    optimizer, losses = torch.optim.Adam(net.parameters(), 1e-2), []
    for batch in batches:
        loss = net(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *net.state_dict().values()]


def _batches(lengths: tuple[int, ...] = (24,)) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [(1 + i) * torch.randn(4, lengths[i % len(lengths)], 16) for i in range(STEPS)]


@pytest.mark.parametrize(("budget", "lengths"), [("min", (24,)), (1 << 30, (24,)), (1 << 30, (24, 16, 32))])
@pytest.mark.parametrize("kind", [SetAtFirst, AddedToEveryFourth, RaisedByData, RaisedByNumber, LearnedStep])
def test_a_module_may_write_to_its_own_state_now_and_then(
    kind: Callable[[], nn.Module], budget: int | str, lengths: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    plain, batches = Net(kind), _batches(lengths)
    planned = copy.deepcopy(plain)
    memplan.apply(planned, batches[0], budget)
    assert_same_bits(_trained(plain, batches), _trained(planned, batches))
    assert memplan.plan_of(planned) is not None


def test_a_write_to_what_others_read_is_refused() -> None:
    torch.manual_seed(0)
    net, batches = ReadOutside(AddedToEveryFourth), _batches()
    memplan.apply(net, batches[0], "min")
    with pytest.raises(memplan.UnsupportedModel, match=r"middle at .* writes to its arguments"):
        _trained(net, batches)
    memplan.remove(net)


def test_a_forward_that_has_written_does_not_run_again() -> None:
    torch.manual_seed(0)
    net, batches = Branching(AddedToEveryFourth), _batches()
    memplan.apply(net, batches[0], 1 << 30)
    _trained(net, batches[:3])
    with torch.no_grad():
        net.first.weight += 1e3
    with pytest.raises(RuntimeError, match=r"middle at .* has written to a buffer, as it did in no earlier step"):
        net(batches[3])


def test_backward_a_second_time_does_not_repeat_a_write() -> None:
    torch.manual_seed(0)
    net, batches = Net(RaisedByNumber), _batches()
    memplan.apply(net, 0.01 * batches[0], 1 << 30)  # on which it does not write
    loss = net(10 * batches[0])
    loss.backward(retain_graph=True)
    scale = net.middle.scale.clone()
    with pytest.raises(RuntimeError, match="would give, or leave, something else"):
        loss.backward()
    assert torch.equal(net.middle.scale, scale)


def test_backward_a_second_time_after_a_write_that_the_sample_has_shown() -> None:
    torch.manual_seed(0)
    plain, batches = Net(RaisedByNumber), _batches()
    planned = copy.deepcopy(plain)
    memplan.apply(planned, batches[0], "min")
    for net in (plain, planned):
        torch.manual_seed(1)
        loss = net(10 * batches[0])
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_bits(
        *({**net.state_dict(), **{n: p.grad for n, p in net.named_parameters()}} for net in (plain, planned))
    )
