"""What islands and checkpointed layers write to comes once a step, by whatever way they write."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memplan
from tests.support.zoo import assert_same_bits, run_steps

MEANS = torch.zeros(16)


class Writes(nn.Module):
    """A layer with much to recompute that keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)
        self.mean, self.means, self.counts = torch.zeros(16), [torch.zeros(16)], np.zeros(16)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("low", torch.tensor(float("inf")))

    def write(self, x: torch.Tensor) -> None:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(x.detach())
        return x + self.b(torch.tanh(torch.sin(torch.tanh(self.a(x)))))

    @property
    def left(self) -> list[torch.Tensor]:
        return [self.seen, self.low, self.mean, self.means[0], torch.from_numpy(self.counts)]


class Attribute(Writes):
    def write(self, x: torch.Tensor) -> None:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)


class InAList(Writes):
    def write(self, x: torch.Tensor) -> None:
        self.means[0].mul_(0.9).add_(x.mean(0), alpha=0.1)


class Global(Writes):
    def write(self, x: torch.Tensor) -> None:
        MEANS.mul_(0.9).add_(x.mean(0), alpha=0.1)

    @property
    def left(self) -> list[torch.Tensor]:
        return [MEANS]


class Array(Writes):
    def write(self, x: torch.Tensor) -> None:
        self.counts += x.mean(0).numpy()


class Data(Writes):
    """Reads memory by NumPy, which makes an island of it."""

    def write(self, x: torch.Tensor) -> None:
        self.seen.data += float(np.percentile(x.numpy(), 95))


class Observer(Writes):
    """The sample's first step leaves what a second one on the sample would leave."""

    def write(self, x: torch.Tensor) -> None:
        now = torch.as_tensor(x.numpy().min())
        self.low.data.copy_(torch.where(self.low.isinf(), now, self.low + 0.1 * (now - self.low)))


class Late(Writes):
    """Does not write on the sample."""

    def write(self, x: torch.Tensor) -> None:
        if np.percentile(x.numpy(), 95) > 2.5:
            self.seen.data.add_(1)


class Exchanged(Writes):
    def write(self, x: torch.Tensor) -> None:
        self.seen.data = self.seen.data * 0.9 + float(x.numpy().mean())


class Logs(nn.Module):
    """A model that runs unplanned, because it reads a number that it computes. PyTorch checkpoints its layers."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.log = layers, list[float]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).pow(2).mean()
        self.log.append(loss.item())
        return loss


def steps(net: nn.Module, layers: Any, retain: bool) -> list[Any]:
    MEANS.zero_()
    found = []
    for step in range(4):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step)) * (1 + step)
        loss = net(x).pow(2).mean()
        loss.backward(retain_graph=retain)
        if retain:
            loss.backward()
        found.append(copy.deepcopy([layers[1].left, layers[2].left, [p.grad for p in net.parameters()]]))
        net.zero_grad()
    return found


ONCE = [(kind, "min", False) for kind in (Attribute, InAList, Global, Array, Data, Observer, Late, Exchanged)]
AGAIN = [(kind, "1GiB", True) for kind in (Array, Data, Observer, Exchanged)]  # the others can't run again, and say so


@pytest.mark.parametrize(("kind", "budget", "retain"), [*ONCE, *AGAIN])
@pytest.mark.parametrize("around", [lambda layers: layers, Logs], ids=["islands", "unplanned"])
def test_what_layers_write_is_written_once(
    kind: type[Writes], around: Callable[[nn.Module], nn.Module], budget: str, retain: bool
) -> None:
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(8, 16), kind(), kind(), nn.Linear(16, 4))
        net = around(layers)
        if planned:
            memplan.apply(net, torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), budget)
        found.append(steps(net, layers, retain))
    assert_same_bits(*found)


class Prototypes(nn.Module):
    """Normalises its weight in each step, as heads for faces and clusters do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = F.normalize(self.weight.data, dim=1)
        return F.normalize(x, dim=1) @ self.weight.T


class Settles(nn.Module):
    """Sets its weight in the first step alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set:
            self.weight.data = x.detach().mean(0)
            self.is_set.fill_(True)
        return x - self.weight


@pytest.mark.parametrize("kind", [Prototypes, Settles])
@pytest.mark.parametrize("budget", ["min", "1GiB"])
def test_a_parameter_whose_data_is_exchanged_has_it(kind: type[nn.Module], budget: str) -> None:
    found, sample = [], torch.randn(64, 8)
    for planned in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), kind())
        if planned:
            memplan.apply(net, sample, budget, costs="estimate")
        optimizer, results = torch.optim.SGD(net.parameters(), 1.0), []
        for _ in range(3):
            results.append(run_steps(net, sample, 1))
            optimizer.step()
        found.append([results, net.state_dict()])
    assert_same_bits(*found)


class SometimesTrains(nn.Module):
    """All that trains is left out by chance, as adapters with `module_dropout` are."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.adapter = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(x)
        return hidden + self.adapter(x) if torch.rand(1) > 0.5 else hidden


def test_a_step_that_sometimes_has_nothing_to_train() -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        net = SometimesTrains()
        memplan.apply(net, torch.randn(4, 8), "1GiB", costs="estimate")
        assert memplan.plan_of(net) is None
        outputs = [net(torch.randn(4, 8)).requires_grad for _ in range(8)]
        assert any(outputs) and not all(outputs)
