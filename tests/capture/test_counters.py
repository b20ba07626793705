"""Numbers that forward only adds to: steps are planned whole, and each adds what the plain one would."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.capture.attributes.attributes_kept import Counting
from tests.support.zoo import assert_same_bits, run_steps


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(16, 64), nn.Linear(64, 16)
        self.calls = self.rows = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        self.rows += x.shape[0]
        return x + self.back(torch.nn.functional.gelu(self.wide(x)))


class Net(nn.Module):
    def __init__(self, count: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.blocks, self.count = nn.ModuleList(Block() for _ in range(4)), count
        self.calls, self.downward, self.reads_it = 7, 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.count(self, x)
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean() * factor


def numbers(net: nn.Module) -> list[dict[str, Any]]:
    return [{k: v for k, v in vars(m).items() if type(v) is int} for m in net.modules()]


def up(net: Any, x: torch.Tensor) -> int:
    net.calls += 1
    net.downward -= x.shape[1]
    return 1


def planned_and_plain(count: Any, budget: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    net, x = Net(count), torch.randn(512, 16)
    planned = copy.deepcopy(net)
    memplan.apply(planned, x, budget, costs="estimate")
    for _ in range(2):  # a second length too
        assert_same_bits(run_steps(net, x, 3), run_steps(planned, x, 3))
        assert numbers(net) == numbers(planned)
        x = x[:400]
    return planned, net


def test_counters_are_part_of_a_whole_plan() -> None:
    planned, _ = planned_and_plain(up, "min")
    plan = memplan.plan_of(planned)
    assert isinstance(plan, memplan.Plan)
    assert not plan.islands
    assert plan.peak_bytes < 0.7 * plan.baseline_peak_bytes
    twin = copy.deepcopy(planned)
    x = torch.randn(64, 16)
    twin(x).backward()
    assert (twin.calls, planned.calls) == (planned.calls + 1, planned.calls)


def reads_the_parity(net: Any, x: torch.Tensor) -> int:
    net.calls += 1
    return 1 + net.calls % 2


def reads_it_in_an_op(net: Any, x: torch.Tensor) -> Any:
    net.calls += 1
    return x.sum().detach() * net.calls


def reads_it_late(net: Any, x: torch.Tensor) -> int:
    net.calls += 1
    return 2 if net.calls > 9 else 1


def reads_it_and_swallows(net: Any, x: torch.Tensor) -> int:
    net.calls += 1
    try:
        return 2 if net.calls > 9 else 1
    except TypeError:
        return 1


def asks_for_its_type(net: Any, x: torch.Tensor) -> int:
    net.calls += 1
    return 2 if type(net.calls) is int else 1


def asks_whether_it_is_one(net: Any, x: torch.Tensor) -> int:
    net.calls += 1
    return 2 if isinstance(net.calls, int) else 1


def copies_it(net: Any, x: torch.Tensor) -> int:
    net.calls += 1
    net.downward = net.calls
    return 1


def doubles_it(net: Any, x: torch.Tensor) -> int:
    net.calls *= 2
    return 1


def stops_at_nine(net: Any, x: torch.Tensor) -> int:
    net.calls = min(net.calls + 1, 9)
    return 1


def copies_it_in_turn(net: Any, x: torch.Tensor) -> int:
    net.calls, net.downward = net.downward + 1, net.calls + 1
    return 1


class AddsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, net: Any) -> torch.Tensor:
        ctx.net = net
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.net.calls += 1
        return grads[0] * 2, None


def counts_in_backward(net: Any, x: torch.Tensor) -> Any:
    return AddsInBackward.apply(net.blocks[0].wide.weight, net).mean()  # type: ignore[no-untyped-call]


def branches_on_what_it_computes(net: Any, x: torch.Tensor) -> Any:
    net.calls += 1
    value = net.blocks[0].wide(x).sum()
    return 2 if value + x[0, 0] > 0 else 1


@pytest.mark.parametrize(
    "count",
    [
        copies_it_in_turn,
        counts_in_backward,
        branches_on_what_it_computes,
        reads_the_parity,
        reads_it_in_an_op,
        reads_it_late,
        reads_it_and_swallows,
        asks_for_its_type,
        asks_whether_it_is_one,
        copies_it,
        doubles_it,
        stops_at_nine,
    ],
    ids=lambda count: count.__name__,
)
def test_numbers_that_are_read_keep_their_bits(count: Any) -> None:
    planned_and_plain(count, "1GiB")


@pytest.mark.parametrize(
    "use",
    [
        lambda n: n * 2, lambda n: n > 1, bool, str, "{}".format, int, lambda n: n == 1, hash, range, repr, float,
        lambda n: 7 - n, lambda n: n + 0.5, lambda n: 2**n, lambda n: [0][n], lambda n: n & 1, lambda n: round(n),
        lambda n: n.bit_length(),
    ],
)  # fmt: skip
def test_any_other_use_is_heard(use: Any) -> None:
    number = Counting(0, []) + 1
    assert number.by == 1
    with pytest.raises(TypeError):
        use(number)
    assert number.reads


class Returns(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.calls


def test_numbers_that_forward_returns_stay_numbers() -> None:
    torch.manual_seed(0)
    net = Returns(up)
    memplan.apply(net, torch.randn(64, 16), "1GiB", costs="estimate")
    assert [net(torch.randn(64, 16))[1] for _ in range(3)] == [8, 9, 10]


def test_a_number_that_another_sets_and_one_that_is_gone() -> None:
    torch.manual_seed(0)
    net, x = Net(up), torch.randn(64, 16)
    memplan.apply(net, x, "1GiB", costs="estimate")
    net.calls = 100
    net(x).backward()
    assert net.calls == 101
    del net.calls
    with pytest.raises(Exception, match="calls"):
        net(x)


class Meter:
    """Counts calls. There is one, made when it is first asked for."""

    made: Meter | None = None

    def __init__(self) -> None:
        self.calls, self.rows = 0, 100

    @classmethod
    def get(cls) -> Meter:
        if cls.made is None:
            cls.made = cls()
        return cls.made


THREAD = threading.local()


class Counts(nn.Module):
    def __init__(self, count: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.count = nn.Linear(16, 16), count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh().mean() * self.count(self, x)


def in_one_object(net: Any, x: torch.Tensor) -> int:
    Meter.get().calls += 1
    Meter.get().rows += x.shape[0]
    return 1


def in_an_own_object(net: Any, x: torch.Tensor) -> int:
    if not hasattr(net, "meter"):
        net.meter = Meter()
    net.meter.calls += 1
    return 1


def in_this_thread(net: Any, x: torch.Tensor) -> int:
    THREAD.calls += 1
    return 1


@pytest.mark.parametrize("count", [in_one_object, in_an_own_object, in_this_thread])
def test_what_a_first_run_makes_has_counted_once_after_the_first_call(
    count: Callable[[Any, torch.Tensor], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for planned in (False, True):
        monkeypatch.setattr(Meter, "made", None)
        THREAD.calls = 0
        net, x = Counts(count), torch.randn(64, 16)
        if planned:
            memplan.apply(net, x, "1GiB", costs="estimate")
            assert Meter.made is None and not hasattr(net, "meter") and THREAD.calls == 0
        seen = []
        for _ in range(3):
            loss = net(x)
            loss.backward()
            assert type(loss.grad_fn).__name__.startswith("_StepFunction") is planned
            there = (m for m in (Meter.made, getattr(net, "meter", None)) if m is not None)
            seen.append([*(dict(vars(m)) for m in there), THREAD.calls])
        results.append(seen)
    assert results[0] == results[1]


class Scale:
    asked = 0

    @property
    def now(self) -> float:
        type(self).asked += 1
        return 0.5


def test_runs_of_planning_do_not_count_in_the_class_of_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(net: Any, x: torch.Tensor) -> float:
        return scale.now

    monkeypatch.setattr(Scale, "asked", 0)
    scale, x = Scale(), torch.randn(64, 16)
    net = Counts(count)
    memplan.apply(net, x, "1GiB", costs="estimate")
    assert Scale.asked == 0
    net(x).backward()
    net(x).backward()
    assert Scale.asked == 2


class Describes:
    """What a class has under a name, and what that gives."""

    def __init__(self) -> None:
        self.asked = 0

    def __get__(self, owner: Any, kind: Any = None) -> float:
        self.asked += 1
        return 0.5


class Shared:
    def __init__(self) -> None:
        self.calls, self.log, self.inner = 0, list[int](), [Meter()]


class OfClass(Counts):
    shared, factor, by_name = Shared(), Describes(), {"one": Shared()}


OF_CLASSES: dict[str, Callable[[Any, torch.Tensor], float]] = {
    "by the model": lambda net, x: setattr(net.shared, "calls", net.shared.calls + 1) or 1.0,
    "by the class": lambda net, x: setattr(OfClass.shared, "calls", OfClass.shared.calls + 1) or 1.0,
    "by the type": lambda net, x: setattr(type(net).shared, "calls", type(net).shared.calls + 1) or 1.0,
    "deep inside": lambda net, x: setattr(net.shared.inner[0], "rows", net.shared.inner[0].rows + len(x)) or 1.0,
    "in a dict": lambda net, x: setattr(net.by_name["one"], "calls", net.by_name["one"].calls + 1) or 1.0,
    "a descriptor": lambda net, x: net.factor,
    "in a list": lambda net, x: net.shared.log.append(1) or 1.0,
    "read": lambda net, x: net.shared.inner[0].rows / 100,
}


@pytest.mark.parametrize("name", OF_CLASSES)
def test_objects_that_a_class_of_the_model_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found only behind the class: no module has them, and code names them as it names its own attributes."""
    results = []
    for planned in (False, True):
        torch.manual_seed(0)
        for key, value in {"shared": Shared(), "factor": Describes(), "by_name": {"one": Shared()}}.items():
            monkeypatch.setattr(OfClass, key, value)
        net, x, seen = OfClass(OF_CLASSES[name]), torch.randn(64, 16), list[Any]()

        def state() -> Any:
            own = [OfClass.shared, OfClass.shared.inner[0], vars(OfClass)["factor"], OfClass.by_name["one"]]
            return [copy.deepcopy({k: v for k, v in vars(one).items() if k != "inner"}) for one in own]

        if planned:
            memplan.apply(net, x, "1GiB", costs="estimate")
        seen.append(state())
        for step in range(4):
            if step == 2:
                OfClass.shared.inner[0].rows += 50
            loss = net(x)
            loss.backward()
            seen += [loss.item(), state()]
        results.append(seen)
    assert results[0] == results[1]
