"""Calls that can't be traced, in models that ranks train together: islands of whole plans, as without ranks."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed._functional_collectives import all_gather_single_autograd
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import memplan
from memplan.runtime.ranks import agreement
from tests.ranks.cells_agreement import rank
from tests.ranks.sharded_models import held_in_step, part_of, slack_bytes, train
from tests.ranks.spawn import Cell
from tests.support.meter import plans_wait_for_gloo
from tests.support.zoo import copied, first_difference

WIDTH = 32


class ByNumpy(torch.autograd.Function):
    """A product with weights, and tanh of it, by NumPy, which nothing can trace."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.from_numpy(x.double().numpy() @ weight.double().numpy().T).tanh().to(x.dtype)
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, y = ctx.saved_tensors
        inner = gradient * (1 - y * y)
        return inner @ weight, inner.flatten(0, -2).T @ x.flatten(0, -2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = ByNumpy.apply(self.norm(x), self.up.weight)  # type: ignore[no-untyped-call]
        return x + self.down(nn.functional.gelu(inner + self.up.bias))  # type: ignore[no-any-return]


class Logged(nn.Module):
    """A projection whose forward keeps Python state: each call is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(WIDTH, WIDTH), list[float]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        self.seen.append(float(y.detach().sum()))
        return y


class Net(nn.Module):
    def __init__(self, gathers: bool = False) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Layer() for _ in range(4))
        self.log, self.gathers = Logged(), gathers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        x = self.log(x)
        if self.gathers:
            x = x @ all_gather_single_autograd(x.flatten(0, -2), 0, torch.distributed.group.WORLD).T
        return x.pow(2).mean()


def made(how: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    net = Net(gathers=how == "gathers").train()
    torch.manual_seed(10 + rank())
    batch = {"x": torch.randn(8, 16, WIDTH)}
    if how.startswith("units"):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if how == "units bf16" else MixedPrecisionPolicy()
        for layer in net.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(net, mp_policy=policy)
    return net, batch


def compare_sharded(how: str) -> str | None:
    """Three steps give what they give without plans, with equal Python state, and hold what the plan says."""
    net, batch = made(how)
    plain, seen = train(net, batch), net.log.seen
    for budget in (1.0, 0.7, "min"):
        net, batch = made(how)
        with plans_wait_for_gloo():
            memplan.apply(net, batch, budget, costs="estimate")
        plan = memplan.plan_of(net)
        if plan is None or not plan.islands:
            return f"{budget}: no plan with islands"
        held_bytes = held_in_step(net, batch)
        if not plan.peak_bytes <= held_bytes <= plan.peak_bytes + slack_bytes():
            return f"{budget}: {held_bytes} bytes are held, {plan.peak_bytes} were foreseen"
        net.zero_grad()
        net.log.seen.clear()
        found = first_difference((plain, seen), (train(net, batch), net.log.seen), f"{budget}: result")
        if found:
            return found
    return None if plan.recomputed else "nothing was recomputed"


def train_in_group(how: str, budget: float | str | None, rows: tuple[int, ...]) -> tuple[Any, Any, list[float]]:
    """Losses, gradients and parameters of some steps, of batches with so many rows. budget: None for no plan."""
    net, batch = made(how)
    if budget is not None:
        memplan.apply(net, batch, budget, group=torch.distributed.group.WORLD, costs="estimate")
        plan = memplan.plan_of(net)
        assert plan is not None and plan.islands and bool(plan.recomputed) == (budget != 1.0)
    outer = net if how == "units" else DistributedDataParallel(net)
    optimizer, results = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False), list[Any]()
    for count in rows:
        loss = outer(batch["x"][:count])
        loss.backward()
        results.append((copied(loss), {name: copied(part_of(p.grad)) for name, p in net.named_parameters()}))
        optimizer.step()
        optimizer.zero_grad()
    return results, {n: copied(part_of(t)) for n, t in net.state_dict().items()}, net.log.seen  # type: ignore[return-value]


def compare_in_group(how: str) -> str | None:
    """Ranks that train one model together, each with islands of its own, and new lengths at times of its own."""
    rows = (8, 8, 8) if how == "gathers" else [(8, 6, 8, 5), (8, 8, 7, 5)][rank()]
    plain = train_in_group(how, None, rows)
    runs = {budget: train_in_group(how, budget, rows) for budget in (1.0, 0.7, "min")}
    return next((d for b, run in runs.items() if (d := first_difference(plain, run, f"{b}: result"))), None)


def plans_alone() -> str | None:
    """A rank plans a sharded model with islands while the others do something else."""
    net, batch = made("units")
    if rank() == 0:
        plans = [memplan.plan(net, batch, budget, costs="estimate") for budget in (1.0, "min")]
        if not all(plan.islands for plan in plans):
            return "no islands"
    torch.distributed.barrier()
    return None


def times_collectives() -> str | None:
    """Collectives of forward take as long as the ranks have measured together, in a model that is whole on each."""
    net, batch = made("gathers")
    with mock.patch.object(agreement, "_seconds", side_effect=lambda kind, size_bytes, *_: 0.5 + size_bytes / 1e6):
        memplan.apply(net, batch, 1.0, group=torch.distributed.group.WORLD)
    plan = memplan.plan_of(net)
    assert plan is not None
    times = zip(plan.problem.graph.ops, plan.problem.costs.time_s, strict=True)
    found = [f"{time_s:.4f}" for op, time_s in times if op.is_collective]
    whole_s = 0.5 + 2 * batch["x"].nbytes / 1e6
    return None if found == [f"{whole_s:.4f}"] * 2 else f"{found} s, for {whole_s:.4f} s each"


CELLS = {
    "units": Cell(functools.partial(compare_sharded, "units")),
    "units bf16": Cell(functools.partial(compare_sharded, "units bf16"), full=True),
    "group": Cell(functools.partial(compare_in_group, "group"), full=True),
    "gathers": Cell(functools.partial(compare_in_group, "gathers")),
    "speed of collectives": Cell(times_collectives),
    "one rank plans alone": Cell(plans_alone),
    "units of several lengths": Cell(functools.partial(compare_in_group, "units"), full=True),
}
