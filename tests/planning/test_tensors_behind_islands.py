"""Opaque calls that read tensors which they are not given: refused, or never run a second time, with eager's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.problem.schedule import Compute
from tests.support.zoo import assert_same_bits, run_steps

WIDTH, ROWS = 32, 64


class Layers(nn.Module):
    """Layers, and an opaque call that `made` makes of the model, so that it can read what belongs to the model."""

    def __init__(self, made: Callable[[Layers], Callable[..., Any]]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.scale, self.table = nn.Parameter(torch.randn(WIDTH)), nn.Embedding(ROWS, WIDTH)
        self.seen: list[torch.Tensor] = []
        self.opaque = memplan.opaque(made(self))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) * torch.sigmoid(x)
        return self.joined(x).sum()

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        return self.opaque(x)  # type: ignore[no-any-return]


class OfPlaces(Layers):
    def joined(self, x: torch.Tensor) -> torch.Tensor:
        return self.opaque(torch.arange(ROWS, device=x.device)) * x  # type: ignore[no-any-return]


class OfTwo(Layers):
    def joined(self, x: torch.Tensor) -> torch.Tensor:
        scale, doubled = self.opaque(x)
        return scale * doubled  # type: ignore[no-any-return]


class Scaling(nn.Module):
    """A module that has a parameter of another one in a list."""

    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.scales = [scale]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scales[0]


def by_scale(model: Layers) -> Callable[..., Any]:
    scale = model.scale
    return lambda x: x * scale


def by_table(model: Layers) -> Callable[..., Any]:
    table = model.table
    return lambda places: table.weight[places]


def with_scale(model: Layers) -> Callable[..., Any]:
    scale = model.scale
    return lambda x: (scale, 2 * x)


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: Layers(by_scale), id="a parameter"),
        pytest.param(lambda: OfPlaces(by_table), id="a parameter alone"),
        pytest.param(lambda: OfTwo(with_scale), id="a parameter that is returned"),
        pytest.param(lambda: Layers(lambda model: Scaling(model.scale)), id="a parameter in a list of a module"),
    ],
)
def test_a_parameter_that_is_not_given_gets_its_gradient(build: Callable[[], Layers]) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    plain, planned = build(), build()
    with pytest.raises(memplan.BudgetInfeasible, match="reads a tensor that requires grad, and that it is not given"):
        memplan.apply(planned, x, memplan.Budget(activations=0.7), costs="estimate", on_infeasible="raise")
    memplan.apply(planned, x, "min", costs="estimate")
    assert_same_bits(run_steps(plain, x, 2), run_steps(planned, x, 2))


class Handing(nn.Module):
    """Hands a tensor of forward to an opaque call by a list that nobody looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.opaque = memplan.opaque(lambda x: x * _handed())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) * torch.sigmoid(x)
            _HANDED.tensors = [x.detach()]
        return self.opaque(x).sum()  # type: ignore[no-any-return]


class _Handed:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []


_HANDED = _Handed()


def _handed() -> torch.Tensor:
    return _HANDED.tensors[0]


def test_a_tensor_of_forward_that_is_not_given_is_not_read_in_a_plan() -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    plain = Handing()
    planned = copy.deepcopy(plain)
    memplan.apply(planned, x, "min", costs="estimate")
    assert memplan.plan_of(planned) is None
    assert_same_bits(run_steps(plain, x, 2), run_steps(planned, x, 2))


class Counting(nn.Module):
    """An opaque call reads a statistic of the model around it, which forward changes afterwards."""

    class Scaled(nn.Module):
        def __init__(self, owner: nn.Module) -> None:
            super().__init__()
            self.owners = [owner]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.owners[0].statistic.clone()).repeat(1, 16)  # type: ignore[operator, union-attr]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.register_buffer("statistic", torch.ones(WIDTH))
        self.opaque = memplan.opaque(self.Scaled(self))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.opaque(x)
        z = wide[:, :WIDTH] * 1.0
        for layer in self.layers:
            z = torch.relu(layer(z)) * torch.sigmoid(z)
        again = torch.tanh(wide) * wide
        with torch.no_grad():
            self.statistic.mul_(0.5).add_(z.mean(0))  # type: ignore[operator, union-attr]
        large = torch.cat([z] * 24, 1)
        large = torch.tanh(large) * torch.sigmoid(large)
        return (again[:, :WIDTH] * z).sum() + (large * torch.cos(large)).sum() + again.sum()


def test_what_reads_a_statistic_of_another_module_runs_once() -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    plain, planned = Counting(), Counting()
    memplan.apply(planned, x, "min", costs="estimate")
    plan = memplan.plan_of(planned)
    assert plan is not None
    kinds = [plan.problem.graph.ops[step.op].kind for step in plan.schedule if isinstance(step, Compute)]
    assert len(kinds) > len(plan.problem.graph.ops), "others run again"
    assert sum(kind.startswith("memplan.island_") and "backward" not in kind for kind in kinds) == 1
    assert_same_bits(run_steps(plain, x, 2), run_steps(planned, x, 2))


@pytest.mark.parametrize("looked_at_by", ["apply", "audit"])
def test_looking_at_a_step_leaves_no_gradient_in_tensors_outside(looked_at_by: str) -> None:
    x, scale = torch.randn(ROWS, WIDTH), torch.ones(WIDTH, requires_grad=True)
    scale.grad, fired = torch.ones(WIDTH), list[int]()
    scale.register_post_accumulate_grad_hook(lambda leaf: fired.append(1))
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Scaling(scale))  # type: ignore[arg-type]
    if looked_at_by == "apply":
        memplan.apply(net, x, "min", costs="estimate")
        assert memplan.plan_of(net) is None
    else:
        memplan.audit(net, x)
    assert not fired
    assert torch.equal(scale.grad, torch.ones(WIDTH))
    net(x).sum().backward()
    assert fired == [1]
    assert not torch.equal(scale.grad, torch.ones(WIDTH))
