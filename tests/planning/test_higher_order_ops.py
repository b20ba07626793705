"""Models that call higher-order ops (`torch.cond`, `scan`) are planned around them, with eager's bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_op
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

import memplan
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


class Net(nn.Module):
    """Blocks, and between them a function that PyTorch hands to its compiler."""

    def __init__(self, middle: str) -> None:
        super().__init__()
        self.first, self.last = Block(), Block()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.ones(()))
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(getattr(self, self.middle)(x)).pow(2).mean()

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


NAMES = {"modules_as_branches": "cond", "write_in_a_branch": "cond"}
KINDS = [name for name in vars(Net) if name not in ("forward", "__init__") and callable(getattr(Net, name))]


@pytest.mark.parametrize("kind", quickly(KINDS, "cond", "scan"))
def test_a_model_is_planned_around_them(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    net, sample = Net(kind), torch.randn(32, 8)
    found = []
    for budget in ("1GiB", "min"):
        planned = copy.deepcopy(net)
        with nothing_changes(net, sample):
            memplan.apply(planned, sample, budget, costs="estimate")
        assert any(row.name == "first" for row in memplan.plan_of(planned).units)  # type: ignore[union-attr]
        found.append(run_steps(planned, sample, 3))
    plain = run_steps(net, sample, 3)  # PyTorch has not come to skip any of its code
    for each in found:
        assert_same_bits(plain, each)
    assert f"because {NAMES.get(kind, kind)} is a higher-order op" in caplog.text
    assert f"{__file__}:" in caplog.text
    assert " object at 0x" not in caplog.text


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
