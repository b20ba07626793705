"""Layers that call higher-order ops (`torch.cond`, `scan`) are islands; models that call them themselves run unplanned.

Both have eager's bits.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_op
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

import memplan
from tests.support.meter import profiler_peak, storage_bytes
from tests.support.parameters import quickly
from tests.support.small import nothing_changes
from tests.support.zoo import assert_same_bits, run_steps

pytestmark = pytest.mark.filterwarnings("ignore")  # of Dynamo


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Middle(nn.Module):
    """A function that PyTorch hands to its compiler."""

    def __init__(self, middle: str) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.ones(()))
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.middle)(x)  # type: ignore[no-any-return]

    def cond(self, x: torch.Tensor) -> Any:
        return torch.cond(x.detach().mean() > 0, lambda t: t.sin() * t, lambda t: t.cos(), (x,))

    def scan(self, x: torch.Tensor) -> Any:
        last, each = scan(lambda total, row: (total * 0.5 + row, torch.tanh(total)), torch.zeros(8), x)
        return last + each

    def map(self, x: torch.Tensor) -> Any:
        return map_op(lambda row, total: row.sin() * total, x, x.sum(0))

    def while_loop(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            start = torch.zeros((), dtype=torch.long), x.detach()
            _, factor = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y.sin()), start)
        return x * factor

    def flex_attention(self, x: torch.Tensor) -> Any:
        rows = x.detach().view(1, 1, 32, 8)  # there is no backward of it on a CPU
        return x * flex_attention(rows, rows, rows, score_mod=lambda s, b, h, i, j: s - (i - j)).view(32, 8)

    def modules_as_branches(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            factor: Any = torch.cond(x.detach().mean() > 0, self.one, self.other, (x.detach(),))
        return self.one(x) * factor

    def write_in_a_branch(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            torch.cond(x.detach().mean() > -9, lambda c: c.add_(1), lambda c: c.mul_(2), (self.count,))
        return x * self.count


class Net(Middle):
    """Blocks, and the function between them in the model's own forward."""

    def __init__(self, middle: str) -> None:
        super().__init__(middle)
        self.first, self.last = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(super().forward(self.first(x))).pow(2).mean()  # type: ignore[no-any-return]


class Layered(nn.Module):
    """Blocks, and the function between them in a layer."""

    def __init__(self, middle: str) -> None:
        super().__init__()
        self.first, self.layer, self.last = Block(), Middle(middle), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(self.first(x))).pow(2).mean()  # type: ignore[no-any-return]


NAMES = {"modules_as_branches": "cond", "write_in_a_branch": "cond"}
KINDS = [name for name in vars(Middle) if name not in ("forward", "__init__") and callable(getattr(Middle, name))]


def train(net: nn.Module, sample: torch.Tensor) -> None:
    net(sample).backward()


def assert_names(text: str, kind: str) -> None:
    """A text names the op, and the line that calls it."""
    assert f"{NAMES.get(kind, kind)} is a higher-order op" in text
    assert f"{__file__}:" in text
    assert " object at 0x" not in text


@pytest.mark.parametrize("kind", quickly(KINDS, "cond", "scan"))
def test_a_layer_that_calls_them_is_an_island(kind: str) -> None:
    torch.manual_seed(0)
    net, sample = Layered(kind), torch.randn(32, 8)
    found, budgets = [], list[Any](["min"])
    for number in range(3):
        planned = copy.deepcopy(net)
        with nothing_changes(net, sample):
            memplan.apply(planned, sample, budgets[number], costs="estimate")
        plan = memplan.plan_of(planned)
        assert plan is not None
        assert number > 0 or plan.peak_bytes < plan.baseline_peak_bytes
        budgets += [(plan.peak_bytes + plan.baseline_peak_bytes) // 2, "1GiB"]
        (told,) = plan.islands
        assert told.startswith("layer at ")
        assert_names(told, kind)
        found.append(run_steps(planned, sample, 3))
    plain = run_steps(net, sample, 3)  # PyTorch has not come to skip any of its code
    for each in found:
        assert_same_bits(plain, each)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cond", "scan", "map"])
def test_steps_hold_what_is_predicted(kind: str) -> None:
    """By the allocator's record: `scan` has lists of tensors in an object of its context."""
    torch.manual_seed(0)
    net, sample = Layered(kind), torch.randn(512, 8)
    least = memplan.plan(net, sample, "min", costs="estimate")
    for budget in (least.floor_bytes, (least.floor_bytes + least.baseline_peak_bytes) // 2):
        planned = memplan.apply(copy.deepcopy(net), sample, budget, costs="estimate")
        plan = memplan.plan_of(planned)
        assert plan is not None
        before_bytes = storage_bytes([*net.parameters(), *net.buffers(), sample])
        for _ in range(2):
            planned.zero_grad()
            held_bytes = profiler_peak(functools.partial(train, planned, sample), before_bytes)
            assert held_bytes <= plan.peak_bytes


@pytest.mark.parametrize("kind", quickly(KINDS, "cond", "scan"))
def test_a_model_that_calls_them_itself_runs_unplanned(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    net, sample = Net(kind), torch.randn(32, 8)
    with nothing_changes(net, sample), pytest.raises(memplan.BudgetInfeasible) as infeasible:
        memplan.apply(net, sample, 1, costs="estimate")
    assert_names(str(infeasible.value), kind)
    found = []
    for budget in (infeasible.value.floor_bytes, "min"):
        planned = copy.deepcopy(net)
        caplog.clear()
        with nothing_changes(net, sample):
            memplan.apply(planned, sample, budget, costs="estimate")
        found.append(run_steps(planned, sample, 3))
        assert memplan.plan_of(planned) is None
        (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert warning.startswith("calls like this one run unplanned")
        assert_names(warning, kind)
    plain = run_steps(net, sample, 3)
    for each in found:
        assert_same_bits(plain, each)


def test_the_message_of_a_whole_plan_names_the_op_and_the_line() -> None:
    with pytest.raises(
        memplan.UnsupportedModel, match=r"cond is a higher-order op.*module \(the model itself\), at .*py:"
    ):
        memplan.plan(Net("cond"), torch.randn(32, 8), "1GiB", costs="estimate")


def test_an_op_that_is_called_by_itself_is_refused_too() -> None:
    class Direct(Net):
        def cond(self, x: torch.Tensor) -> Any:
            return torch.ops.higher_order.cond(x.detach().mean() > 0, torch.sin, torch.cos, (x,))

    with pytest.raises(memplan.UnsupportedModel, match="cond is a higher-order op"):
        memplan.plan(Direct("cond"), torch.randn(32, 8), "1GiB", costs="estimate")
