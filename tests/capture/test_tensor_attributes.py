"""Python attributes of tensors, which no op knows of: forward sets them on what it gives, or reads those of others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan

Habit = Callable[["Net", torch.Tensor, torch.Tensor], Any]


class Block(nn.Module):
    """before, after: what its forward does with its argument and its result."""

    def __init__(self, before: Any = None, after: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.before, self.after = before, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x if self.before is None else self.before(x)
        for layer in self.layers:
            y = torch.tanh(layer(y)) * torch.sigmoid(y)
        return y if self.after is None else self.after(y)  # type: ignore[no-any-return]


class Net(nn.Module):
    """Three blocks, and a habit: what forward gives for its result and its argument. count: how often it has run."""

    def __init__(self, habit: Habit, middle: nn.Module | None = None, counts: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.last = Block(), middle or Block(), Block()
        self.weight = nn.Parameter(torch.randn(8))
        self.register_buffer("buffer", torch.ones(8))
        self.kept: Any = None
        self.habit, self.counts, self.count = habit, counts, 0

    def forward(self, x: torch.Tensor) -> Any:
        self.count += self.counts
        y = self.first(x)
        if self.counts:
            y.scale = 2.0 + self.count
        return self.habit(self, self.last(self.middle(y)), x)


def with_attribute(tensor: torch.Tensor, name: str, value: Any) -> torch.Tensor:
    setattr(tensor, name, value)
    return tensor


def in_attribute(net: Net, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    net.kept = {"y": with_attribute(y.detach(), "note", "seen")}
    return y


def in_buffer(net: Net, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    net.buffer = with_attribute(y.detach().mean(0), "note", "seen")
    return y


SETS: dict[str, Habit] = {
    "a result": lambda net, y, x: with_attribute(y, "note", "seen"),
    "one of several": lambda net, y, x: {"loss": y.mean(), "y": with_attribute(y, "note", [1, 2])},
    "a tensor": lambda net, y, x: with_attribute(y, "aux", y.pow(2).mean()),
    "a number of the data": lambda net, y, x: with_attribute(y, "largest", float(x.max())),
    "in an attribute": in_attribute,
    "in a buffer": in_buffer,
    "a parameter": lambda net, y, x: y * len(with_attribute(net.weight, "note", "seen").note),  # type: ignore[attr-defined]
    "an argument": lambda net, y, x: y * len(with_attribute(x, "note", "seen").note),  # type: ignore[attr-defined]
    "for itself": lambda net, y, x: y * with_attribute(y * 1, "scale", 3.0).scale,  # type: ignore[attr-defined]
}
READS: dict[str, Habit] = {
    "argument": lambda net, y, x: y * getattr(x, "scale", 1.0),
    "parameter": lambda net, y, x: y * (net.weight.scale if hasattr(net.weight, "scale") else 1.0),
    "buffer": lambda net, y, x: y * getattr(net.buffer, "scale", 1.0),
}


def plain(tree: Any) -> Any:
    """Values that can be compared, of tensors their bits and their attributes too."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().tolist(), plain(vars(tree))
    return {key: plain(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def steps(net: nn.Module, before: Callable[[Any, torch.Tensor, int], None] = lambda net, x, step: None) -> list[Any]:
    """What four steps give and leave. before: called with the model, the argument and the number of each step."""
    found = []
    for step in range(4):
        x = torch.full((4, 8), 1.0 + step % 2)
        before(net, x, step)
        net.zero_grad(set_to_none=True)
        out = net(x)
        y = out["loss"] if isinstance(out, dict) else out
        (y.pow(2).mean() + getattr(y, "aux", 0)).backward()
        gradients = {name: plain(p.grad) for name, p in net.named_parameters()}
        found.append([plain(t) for t in (out, x, dict(net.named_parameters()), dict(net.named_buffers()))])
        found[-1] += [gradients, plain(getattr(net, "kept", None))]
    return found


def compare(net: nn.Module, budget: str, before: Any = lambda net, x, step: None) -> nn.Module:
    planned = copy.deepcopy(net)
    for ours, theirs in zip(net.parameters(), planned.parameters(), strict=True):
        vars(theirs).update(copy.deepcopy(vars(ours)))  # which a copy of a parameter leaves out
    memplan.apply(planned, torch.ones(4, 8), budget, costs="estimate")
    assert steps(net, before) == steps(planned, before)
    return planned


@pytest.mark.parametrize("budget", ["1GiB", "min"])
@pytest.mark.parametrize("habit", SETS)
def test_attributes_that_forward_sets_are_there(habit: str, budget: str) -> None:
    torch.manual_seed(0)
    compare(Net(SETS[habit]), budget)


@pytest.mark.parametrize("budget", ["1GiB", "min"])
@pytest.mark.parametrize("sets", [True, False])
def test_attributes_that_modules_set_or_read(sets: bool, budget: str) -> None:
    """The model counts its runs, so that it runs unplanned."""
    torch.manual_seed(0)
    before = None if sets else lambda x: x * getattr(x, "scale", 1.0)
    middle = Block(before, (lambda y: with_attribute(y, "aux", y.mean())) if sets else None)
    net = Net(lambda net, y, x: y, middle, counts=True)
    if sets:
        net.last.before = lambda x: x + x.aux
    assert memplan.plan_of(compare(net, budget)) is None


@pytest.mark.parametrize("absent", [0, 3])
@pytest.mark.parametrize("of", READS)
def test_a_plan_depends_on_attributes_that_forward_reads(of: str, absent: int) -> None:
    """They come after the first step, or change. absent: the step without them."""

    def before(net: Any, x: torch.Tensor, step: int) -> None:
        tensor = {"argument": x, "parameter": net.weight, "buffer": net.buffer}[of]
        vars(tensor).update({"scale": 2.0 + step // 2} if step != absent else {})

    torch.manual_seed(0)
    planned = compare(Net(READS[of]), "1GiB", before)
    assert isinstance(memplan.plan_of(planned), memplan.Plan)


def test_attributes_that_nobody_reads_do_not_matter() -> None:
    torch.manual_seed(0)
    net = Net(lambda net, y, x: y)
    memplan.apply(net, torch.ones(4, 8), "1GiB", costs="estimate", on_mismatch="raise")
    for step in range(2):
        net.weight.step = net.buffer.step = step  # type: ignore[attr-defined]
        net(with_attribute(torch.ones(4, 8), "step", step)).sum().backward()


def test_attributes_that_may_change_in_place() -> None:
    torch.manual_seed(0)
    net = Net(lambda net, y, x: y * net.weight.scales[0])  # type: ignore[attr-defined]
    net.weight.scales = [2.0]  # type: ignore[attr-defined]

    def before(net: Any, x: torch.Tensor, step: int) -> None:
        net.weight.scales[0] = 1.0 + step

    compare(net, "1GiB", before)
    with pytest.raises(
        memplan.UnsupportedModel, match="reads the attribute scales of weight, a list, which may change"
    ):
        memplan.plan(net, torch.ones(4, 8), "1GiB")


class ByNumPy(nn.Module):
    """Can't be traced. what: whose attribute it reads or sets."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer, self.what = nn.Linear(8, 8), what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x) * float(x.detach().numpy().max())
        if self.what in ("weight", "argument"):
            return y * getattr(self.layer.weight if self.what == "weight" else x, "scale", 1.0)
        tensor: Any = y if self.what == "result" else self.layer.weight
        tensor.scale = getattr(tensor, "scale", 0.0) + 1.0
        return y


@pytest.mark.parametrize("what", ["weight", "argument", "result", "weight that it sets"])
def test_attributes_in_islands(what: str) -> None:
    torch.manual_seed(0)
    first = Block(None, (lambda y: with_attribute(y, "scale", 2.0)) if what == "argument" else None)
    net = nn.Sequential(first, ByNumPy(what), nn.Linear(8, 8))
    net[1].layer.weight.scale = 3.0  # type: ignore[union-attr]
    net[2].forward = lambda x: torch.tanh(x) * getattr(x, "scale", 1.0)  # type: ignore[method-assign]

    def before(net: Any, x: torch.Tensor, step: int) -> None:
        if what == "weight":
            net[1].layer.weight.scale = 3.0 + step

    planned = compare(net, "1GiB", before)
    if what == "weight":
        assert isinstance(memplan.plan_of(planned), memplan.Plan)
