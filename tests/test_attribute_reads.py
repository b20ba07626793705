"""A plan depends on those attributes that forward and backward read, whichever way they do, and on no others."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
import pickle
import threading
import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.graph.attribute_reads import AttributeReads
from tests.zoo import assert_same_bits, copied


class Settings:
    """An object behind a model, read in all the ways that there are."""

    shared = 1.0

    def __init__(self) -> None:
        self.scale, self.other = 1.0, 1.0
        self.table = {"scale": 1.0}
        self.inner = Namespace(scale=1.0)

    @property
    def derived(self) -> float:
        return self.scale * 2


class Mapped:
    """Its attributes go by other names, as those of many configs do."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("scale" if name == "factor" else name)


class Falling:
    """Finds what it does not have in a table."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __getattr__(self, name: str) -> Any:
        if name == "factor":
            return self.__dict__["scale"]
        raise AttributeError(name)


class Wrapping:
    """Hands every question on to another object."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


class Slotted:
    __slots__ = ("__dict__",)

    def __init__(self) -> None:
        self.scale = 1.0


@dataclasses.dataclass
class Record:
    scale: float = 1.0
    other: float = 1.0


class ScaledInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, settings: Settings) -> torch.Tensor:
        ctx.settings = settings
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.settings.scale, None


class Net(nn.Module):
    """Layers, and a number that one of `READS` asks for."""

    def __init__(self, read: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.read = nn.Linear(8, 32), nn.Linear(32, 8), read
        self.settings, self.mapped, self.falling, self.slotted = Settings(), Mapped(), Falling(), Slotted()
        self.wrapping, self.record, self.simple = Wrapping(Settings()), Record(), SimpleNamespace(scale=1.0)
        self.behind, self.proxied = [{"settings": Settings()}], weakref.proxy(self.settings)
        self.scale, self.progress, self.counts, self.trainer = 1.0, 0, [0], Namespace(step=0, log=[], net=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(self.read(self, torch.tanh(hidden * 2))).pow(2).mean()


def number(read: Callable[[Any], float]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """Forward multiplies by a number."""
    return lambda net, x: x * read(net)


def putting(find: Callable[[Any], Any], name: str = "scale") -> Callable[[Any], None]:
    """A change of an attribute."""
    return lambda net: setattr(find(net), name, 3.0)


SETTINGS = operator.attrgetter("settings")
# how the number is read -> (forward, what changes it)
READS: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], Callable[[Any], None]]] = {
    "of the model": (number(lambda net: net.scale), putting(lambda net: net)),
    "of an object": (number(lambda net: net.settings.scale), putting(SETTINGS)),
    "by a getter": (number(operator.attrgetter("settings.scale")), putting(SETTINGS)),
    "by a property": (number(lambda net: net.settings.derived), putting(SETTINGS)),
    "further behind": (number(lambda net: net.settings.inner.scale), putting(lambda net: net.settings.inner)),
    "in a table": (
        number(lambda net: net.settings.table["scale"]),
        lambda net: net.settings.table.update(scale=3.0),
    ),
    "another table": (number(lambda net: net.settings.table["scale"]), putting(SETTINGS, "table_")),
    "behind containers": (
        number(lambda net: net.behind[0]["settings"].scale),
        putting(lambda net: net.behind[0]["settings"]),
    ),
    "by default": (number(lambda net: getattr(net.settings, "missing", 1.0)), putting(SETTINGS, "missing")),
    "of the model, by default": (number(lambda net: getattr(net, "missing", 1.0)), putting(lambda net: net, "missing")),
    "whether there": (number(lambda net: 1.0 + hasattr(net.settings, "missing")), putting(SETTINGS, "missing")),
    "of the class": (number(lambda net: net.settings.shared), putting(SETTINGS, "shared")),
    "all by vars": (number(lambda net: vars(net.settings)["scale"]), putting(SETTINGS)),
    "all of the model by vars": (number(lambda net: vars(net)["scale"]), putting(lambda net: net)),
    "all by __dict__": (number(lambda net: sum(net.record.__dict__.values())), putting(lambda net: net.record)),
    "of a copy": (number(lambda net: copy.copy(net.settings).scale), putting(SETTINGS)),
    "of a deep copy": (number(lambda net: copy.deepcopy(net.settings).scale), putting(SETTINGS)),
    "of a pickled one": (number(lambda net: pickle.loads(pickle.dumps(net.settings)).scale), putting(SETTINGS)),
    "of a record replaced": (
        number(lambda net: dataclasses.replace(net.record, other=1.0).scale),
        putting(lambda net: net.record),
    ),
    "of a record as a dict": (
        number(lambda net: dataclasses.asdict(net.record)["scale"]),
        putting(lambda net: net.record),
    ),
    "of equal records": (number(lambda net: 1.0 + (net.record == Record())), putting(lambda net: net.record)),
    "by another name": (number(lambda net: net.mapped.factor), putting(lambda net: net.mapped)),
    "by falling back": (number(lambda net: net.falling.factor), putting(lambda net: net.falling)),
    "through a wrapper": (number(lambda net: net.wrapping.scale), putting(lambda net: net.wrapping._wrapped)),
    "through a weak reference": (number(lambda net: net.proxied.scale), putting(SETTINGS)),
    "of a class in C": (number(lambda net: net.simple.scale), putting(lambda net: net.simple)),
    "of one with slots": (number(lambda net: net.slotted.scale), putting(lambda net: net.slotted)),
    "in backward": (lambda net, x: ScaledInBackward.apply(x, net.settings), putting(SETTINGS)),
}  # fmt: skip
UNREAD: dict[str, Callable[[Any], None]] = {
    "of the model": lambda net: setattr(net, "progress", net.progress + 1),
    "new in the model": lambda net: setattr(net, "fresh", torch.ones(3)),
    "gone from the model": lambda net: delattr(net, "progress"),
    "in a list": lambda net: net.counts.append(net),
    "of an object": lambda net: setattr(net.settings, "other", 3.0),
    "new in an object": lambda net: setattr(net.settings, "fresh", []),
    "of another object of the class": lambda net: setattr(net.behind[0]["settings"], "scale", 3.0),
    "another object": lambda net: setattr(net, "trainer", Namespace()),
    "a framework that counts": lambda net: (net.trainer.log.append({"loss": 1.0}), setattr(net.trainer, "step", 7)),
    "a framework that knows the model": lambda net: setattr(net.trainer, "net", net),
}  # fmt: skip


def steps_of(net: nn.Module) -> list[Any]:
    return list(vars(net)["forward"].steps)


def outcome(net: nn.Module, x: torch.Tensor) -> Any:
    """Loss and gradients of a step."""
    net.zero_grad()
    loss = net(x)
    loss.backward()
    return copied([loss, [p.grad for p in net.parameters()]])


@pytest.mark.parametrize("name", READS)
def test_what_is_read_counts(name: str) -> None:
    read, change = READS[name]
    torch.manual_seed(0)
    plain, x = Net(read).train(), torch.randn(16, 8)
    torch.manual_seed(0)
    planned = Net(read).train()
    memplan.apply(planned, x, 1.0, costs="estimate")
    assert_same_bits(outcome(planned, x), outcome(plain, x))
    before = outcome(plain, x)
    change(plain)
    change(planned)
    after = outcome(plain, x)
    assert_same_bits(outcome(planned, x), after)
    if name != "another table":
        with pytest.raises(AssertionError):  # the change does something
            assert_same_bits(after, before)


@pytest.mark.parametrize("name", UNREAD)
def test_what_nobody_reads_does_not_count(name: str) -> None:
    torch.manual_seed(0)
    net, x = Net(number(lambda net: net.settings.scale)).train(), torch.randn(16, 8)
    memplan.apply(net, x, 1.0, costs="estimate", on_mismatch="raise")
    before, steps = outcome(net, x), steps_of(net)
    UNREAD[name](net)
    assert_same_bits(outcome(net, x), before)
    assert steps_of(net) == steps


def test_nothing_is_planned_again_while_a_framework_counts() -> None:
    """The model hangs on its trainer, the trainer on the model, and every step leaves its marks on both."""
    net, x = Net(number(lambda net: net.settings.scale)).train(), torch.randn(16, 8)
    net.trainer = Namespace(net=net, step=0, log=deque(maxlen=3), metrics={}, callbacks=[Namespace(seen=0)])
    memplan.apply(net, None, 1.0, costs="estimate")
    for step in range(5):
        loss = net(x)
        loss.backward()
        net.trainer.step, net.trainer.callbacks[0].seen = step, step
        net.trainer.metrics[f"loss {step}"] = loss.detach()
        net.trainer.log.append(loss.item())
        net.progress += 1
    assert len(steps_of(net)) == 1


def test_a_copy_of_a_planned_model_goes_by_what_its_own_objects_say() -> None:
    net, x = Net(number(lambda net: net.settings.scale)).train(), torch.randn(16, 8)
    net.proxied = net.wrapping = None  # these can't be copied
    memplan.apply(net, x, 1.0, costs="estimate")
    before = outcome(net, x)
    other = copy.deepcopy(net)
    net.settings.scale = 3.0
    other.progress = 5
    assert_same_bits(outcome(other, x), before)
    other.settings.scale = 3.0
    assert_same_bits(outcome(other, x), outcome(net, x))


class Breaking(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        raise RuntimeError("broken")


def test_classes_are_left_as_they_were() -> None:
    for kind in (Net, Breaking):
        broken = (
            pytest.raises(memplan.UnsupportedModel, match="broken") if kind is Breaking else contextlib.nullcontext()
        )
        with broken:
            memplan.apply(kind(number(lambda net: net.scale)).train(), torch.randn(16, 8), 1.0, costs="estimate")
        for one in (Net, Breaking, Settings, Falling, nn.Linear, Namespace):
            assert "__getattribute__" not in vars(one)
        assert Settings.__getattribute__ is object.__getattribute__


def test_several_may_listen_at_a_time() -> None:
    """In threads that begin and end in any order; nothing that one thread hears of is lost to another."""
    shared, own = Settings(), Settings()
    outer, inner = AttributeReads([shared, own]), AttributeReads([shared])
    begun, ended = threading.Event(), threading.Event()

    def listen() -> None:
        with inner.listening():
            begun.set()
            ended.wait()

    thread = threading.Thread(target=listen)
    with outer.listening():
        thread.start()
        begun.wait()
        assert shared.scale == own.other == 1.0
    assert shared.table
    ended.set()
    thread.join()
    assert shared.inner is not own.inner
    assert (outer.of(vars(shared)), outer.of(vars(own))) == ({"scale"}, {"other"})
    assert inner.of(vars(shared)) == {"scale", "table"}
    assert inner.of(vars(own)) is None  # nobody listened to that one
    assert type(shared).__getattribute__ is object.__getattribute__
