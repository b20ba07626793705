"""Calls that run as they are, and give something else in a later step than when the plan was made: bits of eager.

What such a call gives decides what follows, also where no op reads it: an argument that is returned, a flag, nothing.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memplan
from tests.support.parameters import quickly
from tests.support.zoo import assert_same_bits, run_steps

WIDTH = 16


class Layer(nn.Module):
    """Layers with statistics and dropout around a module that looks at numbers."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.wide, self.norm, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH), nn.Dropout(0.2)
        self.back, self.middle, self.last = nn.Linear(4 * WIDTH, WIDTH), middle, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.middle(self.back(self.drop(self.norm(self.wide(x)).sin())))
        if isinstance(found, torch.Tensor):
            return self.last(found).cos()  # type: ignore[no-any-return]
        return self.last(x).sin() if found in (True, "large", None) else self.last(x).tanh() * float(found)


class Looks(nn.Module):
    """Gives one of two things, by the sign of a sum that it reads by NumPy."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of, self.linear = of, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        large = bool(x.detach().numpy().sum() > 0)
        return {
            "its argument": lambda: x if large else self.linear(x),
            "a result": lambda: self.linear(x) if large else x,
            "a list": lambda: sum([self.linear(x), x] if large else [self.linear(x)]),
            "a flag": lambda: large,
            "a word": lambda: "large" if large else "2",
            "a number": lambda: float(x.detach().numpy().sum()),
            "nothing": lambda: None if large else x,
        }[self.of]()


@pytest.mark.parametrize("backward", quickly((True, False), True))
@pytest.mark.parametrize("of", ["its argument", "a result", "a list", "a flag", "a word", "a number", "nothing"])
def test_what_a_call_gives_may_change(of: str, backward: bool) -> None:
    torch.manual_seed(1)
    plain = Layer(Looks(of))
    planned, batches = copy.deepcopy(plain), [torch.randn(32, WIDTH) for _ in range(6)]
    memplan.apply(planned, batches[0], "min", costs="estimate", on_infeasible="min")
    for batch in batches:
        found = [run_steps(net, batch, 1) if backward else _forward(net, batch) for net in (plain, planned)]
        assert_same_bits(*found)


def _forward(net: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
    torch.manual_seed(5)
    return {"out": net(batch).detach(), "state": dict(net.state_dict()), "generator": torch.get_rng_state()}


class Turned(nn.Module):
    """Runs as it is, and returns a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * float(x.detach().numpy().mean()))[:, 2:].T


def shifted(x: torch.Tensor) -> torch.Tensor:
    x += 1.0
    return x


class Shifts(Turned):
    def __init__(self) -> None:
        super().__init__()
        self.turned = Turned()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + shifted(self.turned(x)).sum()  # type: ignore[no-any-return]


def test_a_function_that_writes_to_a_view_which_a_module_returns() -> None:
    """PyTorch allows that in no trace with that module as an island, whether the function is one or not."""
    torch.manual_seed(1)
    plain, x = Layer(Shifts()), torch.randn(32, WIDTH)
    planned = copy.deepcopy(plain)
    memplan.apply(planned, x, "min", costs="estimate", on_infeasible="min")
    assert_same_bits(*(run_steps(net, x, 2) for net in (plain, planned)))


class Logged(Turned):
    """Runs as it is, and returns its result and, to be logged, the same without a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (hidden := self.linear(x) * float(x.detach().numpy().mean())), hidden.detach()  # type: ignore[return-value]


class LogsItsResult(Shifts):
    def __init__(self) -> None:
        super().__init__()
        self.turned = Logged()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, logged = self.turned(x)
        return self.linear(hidden) + logged  # type: ignore[no-any-return]


def test_a_result_and_the_same_without_a_gradient() -> None:
    torch.manual_seed(1)
    plain, x = Layer(LogsItsResult()), torch.randn(32, WIDTH)
    planned = copy.deepcopy(plain)
    memplan.apply(planned, x, "min", costs="estimate", on_infeasible="min")
    assert memplan.plan_of(planned) is not None
    assert_same_bits(*(run_steps(net, x, 2) for net in (plain, planned)))


def rounds() -> nn.Module:
    """A layer whose compiled function is compiled anew for each number that the loop sets."""

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(WIDTH, WIDTH), 1.0
            self.function = torch.compile(lambda x, scale: (x * scale).tanh() if scale < 3 else x, backend="aot_eager")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.function(self.linear(x), self.scale)  # type: ignore[no-any-return]

    return Layer(Scales())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
@pytest.mark.parametrize("budget", ["min", "1GiB"])
def test_a_compiled_function_that_is_compiled_again_in_training(budget: str) -> None:
    torch.manual_seed(1)
    plain = rounds()
    planned, x = copy.deepcopy(plain), torch.randn(32, WIDTH)
    memplan.apply(planned, x, budget, costs="estimate")
    plan = memplan.plan_of(planned)
    assert plan is not None and [line.partition(" at ")[0] for line in plan.islands] == ["middle"]
    for scale, rows in ((1.0, 32), (2.0, 32), (4.0, 32), (2.0, 24), (0.5, 32)):
        for net in (plain, planned):
            net.middle.scale = scale  # type: ignore[union-attr]
        assert_same_bits(run_steps(plain, x[:rows], 2), run_steps(planned, x[:rows], 2))


DRAWN: list[int] = []


def _jittered(x: torch.Tensor) -> torch.Tensor:
    return x * random.uniform(0, 2)


class Rare(nn.Module):
    """Draws numbers, or changes Python state, on a branch that the sample does not take."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.last = kind, nn.Linear(32, 256), nn.Linear(256, 32)
        self.own, self.generator = random.Random(3), torch.Generator().manual_seed(1)
        self.log, self.calls = list[int](), 0
        nn.init.zeros_(self.first.weight)
        nn.init.constant_(self.first.bias, -1)

    def changed(self, h: torch.Tensor) -> torch.Tensor:
        match self.kind:
            case "random":
                return _jittered(h)
            case "numpy":
                return h[:, torch.as_tensor(np.random.permutation(256))]
            case "own generator":
                return h * self.own.random()
            case "own torch generator":
                return h * torch.rand(256, generator=self.generator)
            case "dropout":
                return nn.functional.dropout(h, 0.5)
            case "list":
                self.log.append(1)
                return h * len(self.log)
            case "global":
                DRAWN.append(1)
                return h * len(DRAWN)
            case _:
                self.calls += 1
                return h * self.calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if h[0, 0].item() > 0.8:
            h = self.changed(h)
        return x + self.last(torch.tanh(h).square())  # type: ignore[no-any-return]

    def state(self) -> Any:
        return self.log, self.calls, self.own.getstate(), self.generator.get_state()


def _block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))


def _trained(kind: str, x: torch.Tensor, budget: Any) -> tuple[Any, Any]:
    """Gradients of each step, None where it raised PlanMismatch; and the state that is left, generators included."""
    torch.manual_seed(0)
    random.seed(5)
    np.random.seed(5)
    DRAWN.clear()
    net = nn.Sequential(_block(), Rare(kind), _block(), Rare(kind), _block(), nn.Linear(32, 8))
    if budget is not None:
        memplan.apply(net, x, budget, costs="estimate")
    torch.manual_seed(7)
    steps = []
    for rare in ((), (1,), (), (1, 3)):
        for place in (1, 3):
            nn.init.constant_(net[place].first.bias, 1 if place in rare else -1)  # type: ignore[union-attr, arg-type]
        net.zero_grad()
        try:
            net(x).square().mean().backward()
        except memplan.PlanMismatch:
            steps.append(None)
        else:
            steps.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    left = [net[place].state() for place in (1, 3)]  # type: ignore[operator]
    return steps, (left, len(DRAWN), random.random(), np.random.rand(), torch.rand(1))


@pytest.mark.parametrize(
    "kind", ["random", "numpy", "own generator", "own torch generator", "dropout", "list", "global", "calls"]
)
def test_a_second_run_does_not_draw_or_count_once_more(kind: str) -> None:
    x = torch.randn(128, 32)
    plain, (planned, state) = _trained(kind, x, None), _trained(kind, x, 0.75)
    assert_same_bits(plain, (planned, state))
    checkpointed, state = _trained(kind, x, "min")  # by PyTorch, whose second run can't be left out
    loud = kind not in ("dropout", "random", "numpy")
    assert [step is None for step in checkpointed] == [False, loud, False, loud]
    assert_same_bits(
        [s for s, c in zip(plain[0], checkpointed) if c is not None], [c for c in checkpointed if c is not None]
    )
    assert_same_bits(plain[1], state)


def test_the_first_of_the_plans_above_runs_an_island_again() -> None:
    net = nn.Sequential(_block(), Rare("list"), _block(), Rare("list"), _block(), nn.Linear(32, 8))
    plan = memplan.plan(net, torch.randn(128, 32), 0.75, costs="estimate")
    assert any(plan.problem.graph.ops[op].kind.startswith("memplan.island") for op in plan.recomputed)


class Seeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        np.random.seed(1)
        random.seed(3)
        return x + self.linear(x)[:, torch.as_tensor(np.random.permutation(32))]  # type: ignore[no-any-return]


def test_a_forward_that_seeds_a_generator_leaves_it_so_in_each_step() -> None:
    """Also where the generator is there already when the step is planned, for forward has run before."""
    torch.manual_seed(0)
    net, x, found = nn.Sequential(Seeds(), _block()), torch.randn(128, 32), []
    for is_planned in (False, True):
        each = copy.deepcopy(net)
        each(x)
        if is_planned:
            memplan.apply(each, x, 0.9, costs="estimate", on_infeasible="min")
        drawn = []
        for _ in range(3):
            each.zero_grad()
            torch.manual_seed(7)
            each(x).square().mean().backward()
            drawn.append((np.random.rand(), random.random()))
        found.append((drawn, [p.grad for p in each.parameters()]))
    assert_same_bits(*found)
