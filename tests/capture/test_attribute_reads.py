"""A plan depends on those attributes that forward and backward read, whichever way they do, and on no others."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import operator
import pickle
import threading
import weakref
from argparse import Namespace
from collections import UserDict, deque
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.capture.attributes.attribute_reads import AttributeReads
from tests.support.zoo import assert_same_bits, copied


class Settings:
    """An object behind a model, read in all the ways that there are."""

    shared = 1.0

    def __init__(self) -> None:
        self.scale, self.other, self.zero, self.training = 1.0, 1.0, 0.0, False
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


@dataclasses.dataclass
class Alike:
    scale: float = dataclasses.field(compare=False)


class AsUsual(Mapped):
    """Finds its attributes as if its base did not find them otherwise."""

    __getattribute__ = object.__getattribute__


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
        self.user_dict, self.alike, self.as_usual = UserDict(scale=1.0), Alike(1.0), AsUsual()
        self.scale, self.progress, self.counts, self.trainer = 1.0, 0, [0], Namespace(step=0, log=[], net=None)
        self.ordered, self.index = {"scale": 2.0, "other": 3.0}, [0, 1]

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
    "of a simple object, by default": (
        number(lambda net: getattr(net.simple, "missing", 1.0)),
        putting(lambda net: net.simple, "missing"),
    ),
    "of a mapped object, by default": (
        number(lambda net: getattr(net.mapped, "missing", 1.0)),
        putting(lambda net: net.mapped, "missing"),
    ),
    "by vars, by default": (number(lambda net: vars(net.settings).get("missing", 1.0)), putting(SETTINGS, "missing")),
    "by a name that modules have": (number(lambda net: 1.0 + net.settings.training), putting(SETTINGS, "training")),
    "in a mapping that is no dict": (
        number(lambda net: net.user_dict["scale"]),
        lambda net: net.user_dict.update(scale=3.0),
    ),
    "of a record that is equal": (
        number(lambda net: net.alike.scale),
        lambda net: setattr(net, "alike", Alike(3.0)),
    ),
    "by the sign of zero": (
        number(lambda net: math.copysign(2.0, net.settings.zero)),
        lambda net: setattr(net.settings, "zero", -0.0),
    ),
    "by the order of keys": (
        number(lambda net: next(iter(net.ordered.values()))),
        lambda net: net.ordered.update(scale=net.ordered.pop("scale")),
    ),
    "of a list, then a tuple": (
        number(lambda net: 1.0 + isinstance(net.index, tuple)),
        lambda net: setattr(net, "index", (0, 1)),
    ),
    "of one as usual": (number(lambda net: net.as_usual.scale), putting(lambda net: net.as_usual)),
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


@pytest.mark.parametrize("name", ["by default", "of the model, by default", "whether there", "of the class"])
def test_one_that_comes_counts_though_another_goes(name: str) -> None:
    read, change = READS[name]
    torch.manual_seed(0)
    planned, x = Net(read).train(), torch.randn(16, 8)
    memplan.apply(planned, x, 1.0, costs="estimate", on_mismatch="raise")
    planned(x).backward()
    change(planned)
    del planned.progress, planned.settings.other
    with pytest.raises(memplan.PlanMismatch):
        planned(x)


def test_what_forward_sets_is_set_again_where_somebody_puts_it_back() -> None:
    def read(net: Any, x: torch.Tensor) -> torch.Tensor:
        net.progress, net.settings.other = 1, 2.0
        return x

    net, x = Net(read).train(), torch.randn(16, 8)
    memplan.apply(net, x, 1.0, costs="estimate")
    for _ in range(3):
        net(x).backward()
        assert (net.progress, net.settings.other) == (1, 2.0)
        net.progress, net.settings.other = 0, 1.0


class ScaledByKind(ScaledInBackward):
    """Backward asks for one number or another."""

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        dense = grads[0].is_contiguous() and not torch.is_autocast_enabled("cpu")
        return grads[0] * (ctx.settings.other if dense else ctx.settings.scale), None


class WithoutLoss(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ScaledByKind.apply(self.last(self.first(x)), self.settings)  # type: ignore[no-any-return]


@pytest.mark.parametrize("autocast", [False, True])
def test_every_kind_of_backward_counts_that_the_plan_serves(autocast: bool) -> None:
    """One for a gradient that is one number expanded, and one inside of autocast."""

    def grads(net: nn.Module) -> Any:
        net.zero_grad()
        loss = net(x).sum() if not autocast else net(x).pow(2).sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss.backward()
        return copied([p.grad for p in net.parameters()])

    torch.manual_seed(0)
    plain, x = WithoutLoss(number(lambda net: 1.0)).train(), torch.randn(16, 8)
    torch.manual_seed(0)
    planned = WithoutLoss(number(lambda net: 1.0)).train()
    memplan.apply(planned, x, 1.0, costs="estimate")
    assert_same_bits(grads(planned), grads(plain))
    plain.settings.scale = planned.settings.scale = 3.0
    assert_same_bits(grads(planned), grads(plain))


def test_what_is_added_to_classes_counts() -> None:
    class Inheriting(Net):
        pass

    net, x = Inheriting(number(lambda net: getattr(net, "added", 1.0))).train(), torch.randn(16, 8)
    memplan.apply(net, x, 1.0, costs="estimate", on_mismatch="raise")
    net(x).backward()
    Inheriting.added = 3.0  # type: ignore[attr-defined]
    with pytest.raises(memplan.PlanMismatch, match="added"):
        net(x)


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
        net.zero_grad()
        net.progress += 1
    assert len(steps_of(net)) == 1


def test_a_method_that_is_bound_anew_is_the_same() -> None:
    net, x = Net(number(lambda net: net.settings.scale)).train(), torch.randn(16, 8)

    def doubled(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return nn.Linear.forward(linear, x) * 2

    net.last.forward = MethodType(nn.Linear.forward, net.last)
    memplan.apply(net, x, 1.0, costs="estimate", on_mismatch="raise")
    before = outcome(net, x)
    net.last.forward = MethodType(nn.Linear.forward, net.last)
    assert_same_bits(outcome(net, x), before)
    net.last.forward = MethodType(doubled, net.last)
    with pytest.raises(memplan.PlanMismatch, match="forward"):
        net(x)


class Breaking(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        raise RuntimeError("broken")


def test_classes_are_left_as_they_were() -> None:
    for kind in (Net, Breaking):
        broken = pytest.raises(RuntimeError, match="broken") if kind is Breaking else contextlib.nullcontext()
        with broken:
            memplan.apply(kind(number(lambda net: net.scale)).train(), torch.randn(16, 8), 1.0, costs="estimate")
        for one in (Net, Breaking, Settings, Falling, nn.Linear, Namespace):
            assert not {"__getattribute__", "__setattr__"} & vars(one).keys()
        assert AsUsual().scale == 1.0
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
