"""Opaque calls that read tensors which they are not given: refused, or never run a second time, with eager's bits.

So are calls whose Python goes on holding memory that they were given, or have returned.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
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


class Wave(torch.autograd.Function):
    """Holds its argument and its result as arrays, which share their memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x.detach().numpy()
        ctx.sine = np.sin(ctx.x)
        return torch.from_numpy(ctx.sine)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * torch.from_numpy(np.cos(ctx.x) + ctx.sine)


class Residual(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Wave.apply(x) + x.cos()  # type: ignore[no-any-return, no-untyped-call]


class Written(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wave = Wave.apply(x)  # type: ignore[no-untyped-call]
        x.mul_(2.0)
        return x + wave  # type: ignore[no-any-return]


class Logs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(WIDTH, WIDTH), list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((hidden := self.linear(x)).detach())
        return hidden  # type: ignore[no-any-return]


class AddedToLogs(Logs):
    def __init__(self) -> None:
        super().__init__()
        self.logs = Logs()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logs(x) + self.linear(x)  # type: ignore[no-any-return]


class Workspace(torch.autograd.Function):
    """Keeps the gradients that it gives: in a list, or one after the other in the same memory."""

    kept: list[torch.Tensor]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, several: bool) -> torch.Tensor:
        ctx.several = several
        return torch.from_numpy(x.detach().numpy() * 2.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.several or not Workspace.kept:
            Workspace.kept.append(torch.empty_like(grad))
        return Workspace.kept[-1].copy_(grad * 2.0), None


class Scaled(nn.Module):
    def __init__(self, several: bool) -> None:
        super().__init__()
        self.several = several
        self.one, self.other = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = (Workspace.apply(p, self.several) for p in (self.one, self.other))  # type: ignore[no-untyped-call]
        return x * one + other  # type: ignore[no-any-return]


HOLDERS: list[Callable[[], nn.Module]] = [
    Residual, Written, AddedToLogs, lambda: Scaled(several=True), lambda: Scaled(several=False),
]  # fmt: skip


@pytest.mark.parametrize("budget", [1.0, "min"])
@pytest.mark.parametrize("made", HOLDERS, ids=["residual", "written", "logs", "gradients", "workspace"])
def test_memory_that_python_holds_is_not_written_over(made: Callable[[], nn.Module], budget: Any) -> None:
    """Gradients of two batches add up, in place, and are set to zero in place."""
    found = []
    for planned in (False, True):
        torch.manual_seed(3)
        Workspace.kept = []
        net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), made(), nn.Tanh())
        batches = [torch.randn(ROWS, WIDTH) for _ in range(4)]
        if planned:
            memplan.apply(net, batches[0], budget, costs="estimate", on_infeasible="min")
        for number, batch in enumerate(batches):
            net(batch).pow(2).sum().backward()
            grads = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
            logs = [t.clone() for m in net.modules() if isinstance(m, Logs) for t in m.seen]
            found.append((grads, logs, [t.clone() for t in Workspace.kept]))
            if number == 1:
                net.zero_grad(set_to_none=False)
    assert_same_bits(found[:4], found[4:])
