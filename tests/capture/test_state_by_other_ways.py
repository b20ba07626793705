"""State that code reaches otherwise than by a name: bound objects, defaults, classes as values; first runs."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memplan

COUNT = 0
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Log:
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def add(self, row: Any) -> None:
        self.rows.append(row)

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        global COUNT
        COUNT += 1
        return x * COUNT

    def __getitem__(self, index: int) -> int:
        global COUNT
        COUNT += 1
        return COUNT


LOG = Log()


class Tracker:
    """Has methods that are named as those of tensors."""

    runs, alpha = 0, 1.0

    @classmethod
    def log(cls) -> float:
        cls.runs += 1
        return cls.alpha

    @staticmethod
    def mean() -> float:
        return Tracker.alpha

    def add(self) -> float:
        Tracker.runs += 1
        return Tracker.alpha


TRACKER = Tracker()


class Settings:
    scale = 1.0


class MethodOfAnObject(Base):
    def __init__(self) -> None:
        super().__init__()
        self.helper = Log()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper.scale(self.hidden(x)).pow(2).mean()


class NamedAsOfTensors(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.hidden(x) * Tracker.log()).pow(2).mean() * Tracker.mean()


class NamedAsOfTensorsOnAnObject(Base):
    def __init__(self) -> None:
        super().__init__()
        self.tracker = Tracker()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.hidden(x) * self.tracker.add()).pow(2).mean() + TRACKER.add()


class SpecialMethod(Base):
    def __init__(self) -> None:
        super().__init__()
        self.helper = Log()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.hidden(x) * self.helper[0]).pow(2).mean()


class BoundMethod(Base):
    def __init__(self) -> None:
        super().__init__()
        self.emit: Any = LOG.add

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.emit({"tokens": x.numel()})
        return self.hidden(x).pow(2).mean()


class Partial(BoundMethod):
    def __init__(self) -> None:
        super().__init__()
        self.emit = functools.partial(LOG.add)


def hook(log: Log, module: nn.Module, given: Any, output: Any) -> None:
    log.add(1)


class PartialAsHook(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layer.register_forward_hook(functools.partial(hook, LOG))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden(x).pow(2).mean()


class Default(Base):
    def forward(self, x: torch.Tensor, seen: list[int] = []) -> torch.Tensor:  # noqa: B006
        seen.append(1)
        return self.hidden(x).pow(2).mean() * len(seen)


def counted(x: torch.Tensor) -> torch.Tensor:
    vars(counted)["calls"] += 1
    return x * vars(counted)["calls"]


class AttributeOfAFunction(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return counted(self.hidden(x)).pow(2).mean()


class ClassAsAValue(Base):
    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.hidden(x) * self.settings.scale).pow(2).mean()


class AttributeOfAParameter(Base):
    def __init__(self) -> None:
        super().__init__()
        vars(self.layer.weight)["uses"] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vars(self.layer.weight)["uses"] += 1
        return self.hidden(x).pow(2).mean() * vars(self.layer.weight)["uses"]


class FirstBatchInitialises(Base):
    def __init__(self) -> None:
        super().__init__()
        self.shift, self.is_ready = nn.Parameter(torch.zeros(8)), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        if not self.is_ready:
            with torch.no_grad():
                self.shift.copy_(-hidden.mean(0))
            self.is_ready = True
        return torch.tanh(hidden + self.shift).pow(2).mean()


class Draws(Base):
    """From generators of Python's and NumPy's, in an attribute and in a global."""

    def __init__(self) -> None:
        super().__init__()
        self.generators = [random.Random(1), np.random.default_rng(1), np.random.RandomState(1)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        python, new, old = self.generators
        factor = python.random() + float(new.random()) + float(old.rand()) + DRAWN.random()  # type: ignore[attr-defined]
        return self.hidden(x).pow(2).mean() * factor


DRAWN = random.Random(3)
READY: set[str] = set()


class FirstBatchEntersASet(FirstBatchInitialises):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        if "shift" not in READY:
            with torch.no_grad():
                self.shift.copy_(-hidden.mean(0))
            READY.add("shift")
        return torch.tanh(hidden + self.shift).pow(2).mean()


KINDS = [
    FirstBatchEntersASet,
    Draws,
    MethodOfAnObject, NamedAsOfTensors, NamedAsOfTensorsOnAnObject, SpecialMethod, BoundMethod, Partial, PartialAsHook,
    Default, AttributeOfAFunction, ClassAsAValue, AttributeOfAParameter, FirstBatchInitialises,
]  # fmt: skip


@pytest.fixture(autouse=True)
def as_at_first() -> Iterator[None]:
    reset()
    yield
    reset()


def reset() -> None:
    global COUNT
    COUNT, Settings.scale, Tracker.runs, Tracker.alpha = 0, 1.0, 0, 1.0
    LOG.rows.clear()
    READY.clear()
    (Default.forward.__defaults__ or ([],))[0].clear()
    vars(counted)["calls"] = 0
    DRAWN.seed(3)


def seen() -> str:
    return str(
        (
            COUNT,
            LOG.rows,
            READY,
            Default.forward.__defaults__,
            vars(counted),
            Settings.scale,
            Tracker.runs,
            DRAWN.getstate()[1][:3],
        )
    )


def four_steps(net: nn.Module) -> list[Any]:
    found: list[Any] = []
    for step in range(4):
        Settings.scale = Tracker.alpha = 1.0 + step
        net.zero_grad()
        loss = net(X)
        loss.backward()
        found += [loss.item(), seen(), *((p.tolist(), p.grad.tolist()) for p in net.parameters() if p.grad is not None)]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", ["1GiB", "min"])
def test_four_steps_leave_the_same(kind: type[nn.Module], budget: str) -> None:
    torch.manual_seed(0)
    plain = four_steps(kind())
    reset()
    torch.manual_seed(0)
    planned, before = kind(), seen()
    memplan.apply(planned, X, budget, costs="estimate")
    assert seen() == before
    assert four_steps(planned) == plain


@pytest.mark.parametrize("way", ["loss_fn", "min"])
def test_a_value_that_changes_goes_on_making_plans_where_parts_can_not_serve(way: str) -> None:
    weight = 1.0

    def loss_fn(model: Base, x: torch.Tensor) -> torch.Tensor:
        return model.hidden(x).pow(2).mean() * weight

    class Weighted(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return loss_fn(self, x)

    torch.manual_seed(0)
    net = Weighted()
    planned = Base() if way == "loss_fn" else Weighted()
    planned.load_state_dict(net.state_dict())
    options: dict[str, Any] = {"loss_fn": loss_fn, "budget": "1GiB"} if way == "loss_fn" else {"budget": "min"}
    memplan.apply(planned, X, costs="estimate", **options)
    for step in range(7):
        weight = 1.0 + step
        for one in (net, planned):
            one.zero_grad()
            one(X).backward()
        assert torch.equal(net.layer.weight.grad, planned.layer.weight.grad)  # type: ignore[arg-type]


def test_a_log_that_only_the_loop_writes_to_never_ends_training() -> None:
    """The loss function names it where nothing comes by; the step could not run unplanned."""
    log: list[float] = []
    verbose = False

    def loss_fn(model: Base, x: torch.Tensor) -> torch.Tensor:
        loss = model.hidden(x).pow(2).mean()
        if verbose:
            log.append(loss.item())
        return loss

    torch.manual_seed(0)
    net = memplan.apply(Base(), X, "1GiB", loss_fn=loss_fn, costs="estimate")
    for _ in range(8):
        loss = net(X)
        loss.backward()
        log.append(loss.item())


@pytest.mark.parametrize("inside", [True, False])
def test_an_iterator_among_attributes_is_refused_and_not_advanced(inside: bool) -> None:
    class Cycles(Base):
        def __init__(self) -> None:
            super().__init__()
            self.scales = itertools.cycle([1.0, 2.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * next(self.scales)  # type: ignore[no-any-return]

    net = Cycles()
    with pytest.raises(memplan.UnsupportedModel, match="an iterator"):
        memplan.apply(nn.Sequential(net, nn.ReLU()) if inside else net, X, "min", costs="estimate")
    assert next(net.scales) == 1.0
