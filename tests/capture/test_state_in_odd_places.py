"""State in classes under other names, in sets, behind weak references, in subclasses of containers, on tensors.

Each case says what forward reads, and how that is changed before a later step; or what forward writes.
"""

from __future__ import annotations

import threading
import weakref
from collections import ChainMap, UserDict, UserList
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memplan
from tests.support.zoo import assert_same_bits


class Config:
    scale = 1.0


class Counts:
    runs = 0


class Term:
    def __init__(self) -> None:
        self.scale = 1.0


class Attributes(dict[str, Any]):
    """Finds its items as attributes; what is set as an attribute is none."""

    __getattr__ = dict.__getitem__


class Rows(list[float]):
    scale = 1.0
    runs = 0


def config() -> type[Config]:
    return Config


NUMPY, FRACTION, SPAN, STEPS = np.float64(1.0), Fraction(1), slice(0, 4), range(1, 3)
USER, CHAIN, READY = UserDict({"scale": 1.0}), ChainMap({"scale": 1.0}), threading.Event()
OPTIMIZER = torch.optim.SGD([torch.zeros(1)], lr=1.0)


class Net(nn.Module):
    """Scales by what `read` gives."""

    def __init__(self, read: Callable[[Net], Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 16))
        self.kind, self.read, self.term = Config, read, Term()
        self.terms, self.names, self.weak = {Term()}, {Term(): "name"}, weakref.ref(self.term)
        self.found, self.rows, self.table = Attributes(scale=1.0), Rows(), torch.ones(16)
        self.table.scale = 1.0  # type: ignore[attr-defined]
        self.table.runs = 0  # type: ignore[attr-defined]
        self.views = {"scale": 1.0}.values()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) * self.table * self.read(self)).pow(2).mean()  # type: ignore[no-any-return]


def put(name: str, value: Any) -> None:
    globals()[name] = value


def alias(net: Net) -> float:
    cfg = Config
    return cfg.scale


def set_scale(thing: Any) -> None:
    thing.scale = 2.0


READS: dict[str, tuple[Callable[[Net], Any], Callable[[Net], Any]]] = {
    "class in a variable": (alias, lambda net: set_scale(Config)),
    "class of a call": (lambda net: config().scale, lambda net: set_scale(Config)),
    "classes in a loop": (lambda net: sum(kind.scale for kind in (Config, Rows)), lambda net: set_scale(Config)),
    "object in a set": (lambda net: next(iter(net.terms)).scale, lambda net: set_scale(next(iter(net.terms)))),
    "key of a dict": (lambda net: next(iter(net.names)).scale, lambda net: set_scale(next(iter(net.names)))),
    "weak reference": (lambda net: net.weak().scale, lambda net: set_scale(net.weak())),
    "attribute of a dict": (lambda net: net.found.scale, lambda net: set_scale(net.found)),
    "attribute of a list": (lambda net: net.rows.scale, lambda net: set_scale(net.rows)),
    "attribute of a tensor": (lambda net: net.table.scale, lambda net: set_scale(net.table)),
    "number of NumPy": (lambda net: NUMPY, lambda net: put("NUMPY", np.float64(2.0))),
    "fraction": (lambda net: float(FRACTION), lambda net: put("FRACTION", Fraction(2))),
    "slice": (lambda net: net.table[SPAN].sum(), lambda net: put("SPAN", slice(0, 8))),
    "range": (lambda net: sum(STEPS), lambda net: put("STEPS", range(1, 4))),
    "UserDict": (lambda net: USER["scale"], lambda net: USER.update(scale=2.0)),
    "ChainMap": (lambda net: CHAIN["scale"], lambda net: CHAIN.update(scale=2.0)),
    "event": (lambda net: 2.0 if READY.is_set() else 1.0, lambda net: READY.set()),
    "optimizer": (lambda net: OPTIMIZER.param_groups[0]["lr"], lambda net: OPTIMIZER.param_groups[0].update(lr=2.0)),
}


def reset() -> None:
    Config.scale, Counts.runs = 1.0, 0
    USER["scale"] = CHAIN["scale"] = OPTIMIZER.param_groups[0]["lr"] = 1.0
    USER["runs"] = 0
    READY.clear()
    HISTORY.clear()
    put("NUMPY", np.float64(1.0))
    put("FRACTION", Fraction(1))
    put("SPAN", slice(0, 4))
    put("STEPS", range(1, 3))


def trained(read: Any, change: Callable[[Net], Any], seen: Callable[[Net], Any], plans: bool) -> list[Any]:
    """Losses, gradients and what is to be seen after each of four steps, with a change before the third."""
    reset()
    torch.manual_seed(0)
    net, x, found = Net(read), torch.randn(32, 16), list[Any]()
    if plans:
        memplan.apply(net, x, "1GiB", costs="estimate")
    for step in range(4):
        if step == 2:
            change(net)
        net.zero_grad()
        loss = net(torch.roll(x, step, 0))
        loss.backward()
        found.append((loss.detach(), [p.grad for p in net.parameters()], seen(net)))
    return found


@pytest.mark.parametrize("what", READS)
def test_what_forward_reads_is_that_of_each_step(what: str) -> None:
    read, change = READS[what]
    eager, planned = (trained(read, change, lambda net: None, plans) for plans in (False, True))
    assert not torch.equal(eager[1][0], eager[2][0])
    assert_same_bits(eager, planned)


HISTORY = UserList[float]()


def counted(thing: Any) -> float:
    thing.runs += 1
    return 1.0


def into_user_dict(net: Net) -> float:
    USER["runs"] += 1
    return 1.0


def into_history(net: Net) -> float:
    HISTORY.append(1.0)
    return 1.0


def set_event(net: Net) -> float:
    READY.set()
    return 1.0


WRITES: dict[str, tuple[Callable[[Net], Any], Callable[[Net], Any]]] = {
    "class that is handed on": (lambda net: counted(Counts), lambda net: Counts.runs),
    "attribute of a list": (lambda net: counted(net.rows), lambda net: net.rows.runs),
    "attribute of a tensor": (lambda net: counted(net.table), lambda net: net.table.runs),  # type: ignore[attr-defined]
    "UserDict": (into_user_dict, lambda net: USER["runs"]),
    "UserList": (into_history, lambda net: len(HISTORY)),
    "event": (set_event, lambda net: READY.is_set()),
}


@pytest.mark.parametrize("what", WRITES)
def test_what_forward_writes_is_there_once_for_each_step(what: str) -> None:
    write, seen = WRITES[what]
    eager, planned = (trained(write, lambda net: None, seen, plans) for plans in (False, True))
    assert eager[-1][2] in (4, True)
    assert_same_bits(eager, planned)


@pytest.mark.parametrize("read", [float.__abs__, lambda number: number])
def test_zeros_of_both_signs_get_plans_of_their_own(read: Callable[[float], float]) -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, number: float, tensor: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.layer(x)) * read(number) * tensor.item()

    torch.manual_seed(0)
    net, x = Scales(), torch.randn(4, 8)
    expected = [net(x, *pair).signbit() for pair in ((0.0, torch.tensor(0.0)), (-0.0, torch.tensor(0.0)))]
    expected.append(net(x, 0.0, torch.tensor(-0.0)).signbit())
    memplan.apply(net, (x, 0.0, torch.tensor(0.0)), "1GiB", costs="estimate")
    found = [net(x, *pair).signbit() for pair in ((0.0, torch.tensor(0.0)), (-0.0, torch.tensor(0.0)))]
    found.append(net(x, 0.0, torch.tensor(-0.0)).signbit())
    assert all(map(torch.equal, expected, found))
