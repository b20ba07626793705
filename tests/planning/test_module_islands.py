"""Modules that can't be captured run as they are, as ops of a whole plan.

Steps have the bits of the plain step, keep their budget, and hold what is predicted.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memplan
from memplan.solvers.offload.copies import movables_of
from tests.support.island_models import (
    WIDTH,
    Block,
    Counts,
    Inside,
    Normalises,
    assert_planned,
    rows,
    steps,
    twins,
    whole_plan,
)
from tests.support.meter import live_peak
from tests.support.parameters import quickly
from tests.support.zoo import assert_same_bits, run_steps


class Reads(nn.Module):
    """Reads a number that it computes, and its argument several times."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x).tanh() * self.other(x)
        return hidden * min(1.0, hidden.mean().item()) + x.sigmoid()


class Appends(nn.Module):
    """Keeps numbers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = nn.Linear(WIDTH, WIDTH), list[float]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x).tanh()
        self.seen.append(float(hidden.detach().mean()))
        return hidden * (1 + len(self.seen))


SEEN: list[float] = []


class AppendsOutside(nn.Module):
    """Appends to a list that its code names, after a draw from Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(random.random())
        return self.inner(x).tanh() * SEEN[-1]


class Sorts(nn.Module):
    """Reads memory by NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        return hidden * torch.from_numpy(np.sort(hidden.detach().numpy(), 0))


class Averages(nn.Module):
    """Writes to a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.average = nn.Linear(WIDTH, WIDTH), torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        self.average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return hidden.tanh() + self.average


class Matches(nn.Module):
    """Has rows matched by a module that it makes in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        (order,) = Matcher(2.0)({"rows": hidden})
        return hidden[order] * x


class Matcher(nn.Module):
    def __init__(self, power: float) -> None:
        super().__init__()
        self.power = power

    @torch.no_grad()
    def forward(self, outputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor]:
        return (torch.from_numpy(np.argsort(np.abs(outputs["rows"].numpy()).sum(1) ** self.power)),)


@pytest.mark.parametrize("summed", quickly((True, False), False))
@pytest.mark.parametrize("kind", [Reads, Counts, Appends, AppendsOutside, Sorts, Normalises])
def test_a_module_is_an_island(kind: type[nn.Module], summed: bool) -> None:
    SEEN.clear()
    exactly = kind is not AppendsOutside
    assert_planned(lambda: Inside(kind(), summed=summed), rows(), "middle", exactly=exactly)


def test_a_module_that_writes_to_a_tensor_that_is_no_buffer() -> None:
    net, plain = twins(lambda: Inside(Averages()))
    memplan.apply(net, rows(), "min", costs="estimate")
    assert whole_plan(net).islands
    assert not net.middle.average.any()
    assert_same_bits(steps(plain, rows()), steps(net, rows()))
    assert torch.equal(net.middle.average, plain.middle.average)


def test_a_module_that_forward_makes_is_an_island() -> None:
    assert_planned(lambda: Inside(Matches()), rows(), "Matcher")


def test_state_in_python_changes_once_a_step() -> None:
    net, _ = assert_planned(lambda: Inside(Counts()), rows(), "middle")
    assert net.middle.calls == 1  # under the meter, and not while it was planned
    run_steps(net, rows(), steps=3)
    assert net.middle.calls == 4


class Holds(nn.Module):
    """A container that is called, around a module that can't be an island, because it writes to its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.odd = nn.Linear(WIDTH, WIDTH), WritesToItsArgument()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        return self.odd(hidden * 1) + hidden


class WritesToItsArgument(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(1 + min(0.0, x.mean().item()))
        return x.tanh()


def test_where_a_module_can_be_no_island_the_one_around_it_is() -> None:
    assert_planned(lambda: Inside(Holds()), rows(), "middle")


class AppendsToItsArgument(Reads):
    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        hidden = super().forward(x)
        losses.append(hidden.pow(2).mean())
        return hidden


class Gives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = AppendsToItsArgument()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        return self.inner(x, losses) + sum(losses)  # type: ignore[no-any-return]


def test_a_list_that_is_given_to_a_module_has_what_it_appends() -> None:
    assert_planned(lambda: Inside(Gives()), rows(), "middle")


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.pow(2).mean()


def test_hooks_fire_once_a_step() -> None:
    fired: list[str] = []

    def build() -> nn.Module:
        net = nn.Sequential(Block(16), Block(16), Block(16), nn.Linear(16, 4), Mean())
        net[1].register_forward_hook(lambda m, args, out: fired.append("forward"))
        net[1].wide.register_forward_hook(lambda m, args, out: out * 2)
        net[2].drop.register_forward_pre_hook(lambda m, args: fired.append("drop"))
        net[3].register_full_backward_hook(lambda m, given, made: fired.append("backward"))
        net[2].back.register_full_backward_pre_hook(lambda m, given: (given[0] * 1.5,))
        return net

    net, plain = twins(build)
    run_steps(plain, rows(128), steps=3)
    expected = list(fired)
    net, plain = twins(build)
    memplan.apply(net, rows(128), "min")
    assert {line.partition(" at ")[0] for line in whole_plan(net).islands} == {"1", "2.drop", "2.back", "3"}
    assert live_peak(net, rows(128)) == whole_plan(net).peak_bytes
    fired.clear()
    result = run_steps(net, rows(128), steps=3)
    assert fired == expected
    assert_same_bits(run_steps(plain, rows(128), steps=3), result)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
def test_compiled_modules_keep_the_bits_of_compiled_code() -> None:
    def build() -> nn.Module:
        net = nn.Sequential(*(Block(16) for _ in range(4)))
        net[1].compile(backend="aot_eager")
        net[2].wide.forward = torch.compile(net[2].wide.forward, backend="aot_eager")
        net[3] = torch.compile(net[3], backend="aot_eager")
        return net

    net, plain = twins(build)
    memplan.apply(net, rows(), "min")
    plan = whole_plan(net)
    assert {line.partition(" at ")[0] for line in plan.islands} == {"1", "2.wide", "3"}
    assert_same_bits(run_steps(plain, rows()), run_steps(net, rows()))


# -- marked by hand ---------------------------------------------------------------------------------------------------


def scaled_tanh(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * scale


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = memplan.opaque(nn.Linear(WIDTH, WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.function = memplan.opaque(scaled_tanh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.inner(x), self.scale)  # type: ignore[no-any-return]


def test_functions_and_modules_that_are_marked_run_as_they_are() -> None:
    _, plan = assert_planned(lambda: Inside(Marked()), rows(), "middle.inner", "middle.function")
    assert "marked by memplan.opaque" in plan.report()


LOOSE = memplan.opaque(scaled_tanh)


def test_a_marked_function_that_belongs_to_no_model() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return LOOSE(x, self.scale)  # type: ignore[no-any-return]

    assert_planned(lambda: Inside(Calls()), rows(), "Opaque")


# -- with other features ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"budget": "1GiB", "host_budget": "1GiB"},
        pytest.param({"budget": "1GiB", "kernels": "fused"}, marks=pytest.mark.slow),
        {"budget": "min", "grads": "edges"},
        {"budget": "1GiB", "accumulate": True},
        {"budget": "min", "loss_fn": lambda net, x: net(x) * 2},
    ],
    ids=["offload", "fused", "edges", "accumulate", "loss_fn"],
)
def test_other_features(options: dict[str, Any]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(Inside(Reads()), nn.Flatten(0))

    net, plain = twins(build)
    loss_fn = options.get("loss_fn")
    memplan.apply(net, rows(), costs="estimate", **options)
    whole_plan(net)
    if options.get("kernels") == "fused":  # has bits of its own
        memplan.apply(plain, rows(), "min", costs="estimate", kernels="fused")
    for _ in range(2):
        for each in (net, plain):
            each.zero_grad()
            (each(rows()) if loss_fn is None or each is net else loss_fn(each, rows())).sum().backward()
    assert_same_bits({n: p.grad for n, p in plain.named_parameters()}, {n: p.grad for n, p in net.named_parameters()})


def test_what_stands_for_the_graph_of_an_island_is_not_offloaded() -> None:
    """Backward finds that graph by the very tensor that the forward op gave, which no copy of it is."""
    net = nn.Sequential(Inside(Reads()), nn.Flatten(0))
    problem = memplan.plan(
        net, rows(), "1GiB", costs="estimate", host_budget="1GiB", link=memplan.Link(1e10, 1e10)
    ).problem
    movable, ops = movables_of(problem).movable, problem.graph.ops
    tickets = {op.outputs[-1] for op in ops if op.is_island}
    assert tickets and not movable[[*tickets]].any() and movable.any()
    assert {problem.graph.values[v].size_bytes for v in tickets} == {8}


def test_under_autocast() -> None:
    """Casts of a parameter that two modules share are shared, so neither can be an island."""
    for tied in (False, True):

        def build(tied: bool = tied) -> nn.Module:
            net = Inside(Reads())
            if tied:
                net.last.norm.weight = net.middle.one.bias
            return net

        net, plain = twins(build)
        with torch.autocast("cpu", torch.bfloat16):
            memplan.apply(net, rows(), "1GiB", costs="estimate")
        assert_same_bits(run_steps(plain, rows(), autocast=True), run_steps(net, rows(), autocast=True))
        assert isinstance(memplan.plan_of(net), memplan.Plan) is not tied


def test_one_module_that_is_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Reads()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + self.inner(x * 2).tanh()

    net, plain = twins(lambda: Inside(Twice()))
    memplan.apply(net, rows(), "min", costs="estimate")
    assert len(whole_plan(net).islands) == 1
    assert_same_bits(steps(plain, rows()), steps(net, rows()))


def test_a_tensor_that_is_given_as_several_arguments() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention(WIDTH, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x[None]
            return self.attention(x, x, x, need_weights=False)[0][0] + x[0]  # type: ignore[no-any-return]

    class Attention(nn.MultiheadAttention):
        calls = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls = self.calls + 1
            return super().forward(*args, **kwargs)

    net, plain = twins(lambda: Inside(Attends()))
    memplan.apply(net, rows(), "min", costs="estimate")
    assert [line.partition(" at ")[0] for line in whole_plan(net).islands] == ["middle.attention"]
    assert_same_bits(steps(plain, rows()), steps(net, rows()))
