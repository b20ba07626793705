"""Where no plan can recompute, PyTorch checkpoints layers: in unplanned steps, and in islands."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import memplan
from memplan.runtime.program.checkpointed import layers_of
from tests.support.meter import live_peak, profiler_peak, storage_bytes
from tests.support.zoo import assert_same_bits, run_steps


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.back, self.drop = (
            nn.LayerNorm(16),
            nn.Linear(16, 64),
            nn.Linear(64, 16),
            nn.Dropout(),
        )

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.drop(self.back(torch.nn.functional.gelu(self.wide(self.norm(x)))))


class Layers(nn.Module):
    """Layers of which each is left out by chance, as LayerDrop does."""

    def __init__(self, block: Any = Block, drop: float = 0.0) -> None:
        super().__init__()
        self.layers, self.drop = nn.ModuleList(block() for _ in range(6)), drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not self.drop or random.random() > self.drop:
                x = layer(x, scale=0.5)
        return x


class Net(nn.Module):
    """Logs a number in its own forward, so that no plan can be made. inner: else it can."""

    def __init__(self, inner: nn.Module, logs: bool = False) -> None:
        super().__init__()
        self.inner, self.head, self.log = inner, nn.Linear(16, 16), list[float]() if logs else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.log is not None:
            self.log.append(float(x.detach().sum()))
        return self.head(x).pow(2).mean()


class Routed(Block):
    """Sends each row through one of four experts, of which each sees another number of rows in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 64) * 0.1), nn.Parameter(torch.randn(4, 64, 16) * 0.1)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        chosen, out = self.norm(x)[:, :4].argmax(-1), torch.zeros_like(x)
        for expert in range(4):
            rows = torch.where(chosen == expert)[0]
            out.index_add_(0, rows, torch.nn.functional.gelu(x[rows] @ self.up[expert]) @ self.down[expert])
        return x + scale * out


class Hooked(Block):
    """Has a hook that logs what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.log = list[float]()
        self.register_forward_hook(lambda module, args, output: module.log.append(float(output.detach().sum())))


class Mapped(Block):
    """Keeps a tensor in an attribute, as layers do that show what they attend to. Another run sets an equal one."""

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        out = super().forward(x, scale=scale)
        self.seen = out.detach().mean()
        return out


def logs(net: nn.Module) -> list[Any]:
    return [m.log for m in net.modules() if hasattr(m, "log")]


def steps(net: nn.Module, x: torch.Tensor) -> Any:
    random.seed(3)
    return run_steps(net, x, 3), random.random()


def peak_bytes(net: nn.Module, x: torch.Tensor, seed: int = 3) -> int:
    random.seed(seed)
    torch.manual_seed(3)
    return live_peak(net, x)


NETS = {
    "a log in the root": lambda: Net(Layers(), logs=True),
    "LayerDrop": lambda: Net(Layers(drop=0.3)),
    "LayerDrop and a log": lambda: Net(Layers(drop=0.3), logs=True),
    "experts": lambda: Net(Layers(Routed)),
    "hooks": lambda: Net(Layers(Hooked)),
    "tensors in attributes": lambda: Net(Layers(Mapped), logs=True),
    "tensors in attributes of an island": lambda: Net(Layers(Mapped, drop=0.3)),
}


@pytest.mark.parametrize("name", NETS)
def test_floors_are_low_and_bits_the_same(name: str) -> None:
    torch.manual_seed(0)
    net, x = NETS[name](), torch.randn(512, 16)
    planned = copy.deepcopy(net)
    plain_bytes = peak_bytes(net, x)
    memplan.apply(planned, x, "min", costs="estimate")
    assert peak_bytes(planned, x) < 0.55 * plain_bytes
    assert_same_bits(steps(net, x), steps(planned, x))
    assert logs(net) == logs(planned)


@pytest.mark.parametrize("budget", ["min", " MIN "])
def test_it_is_told(budget: str) -> None:
    torch.manual_seed(0)
    net, x = Net(Layers(Routed)), torch.randn(512, 16)
    memplan.apply(net, x, budget, costs="estimate")
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan)
    assert "PyTorch checkpoints" in plan.islands[0]
    assert peak_bytes(net, x) <= plan.peak_bytes


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(32, 64), nn.Linear(64, 32)
        self.register_forward_hook(lambda module, args, out: nn.functional.dropout(out, 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(torch.tanh(self.wide(x)))


def test_layers_that_draw_hold_no_more_than_is_foreseen() -> None:
    """A generator's state takes 5,056 bytes, which `live_peak` does not see."""
    torch.manual_seed(0)
    net, x = nn.Sequential(*(Narrow() for _ in range(32))), torch.randn(64, 32)
    planned = copy.deepcopy(net)
    memplan.apply(planned, x, "min")
    assert_same_bits(steps(net, x), steps(planned, x))
    planned.zero_grad()

    def step() -> torch.Tensor:
        loss = planned(x).pow(2).mean()
        loss.backward()
        return loss

    step()
    planned.zero_grad()
    plan = memplan.plan_of(planned)
    assert plan is not None
    assert profiler_peak(step, storage_bytes([*planned.parameters(), x])) <= plan.peak_bytes


def test_a_budget_that_fits_without_takes_no_time() -> None:
    torch.manual_seed(0)
    net, x = Net(Layers(drop=0.3)), torch.randn(512, 16)
    memplan.apply(net, x, "1GiB", costs="estimate")
    runs = list[int]()
    net.inner.layers[0].wide.register_forward_hook(lambda *_: runs.append(1))  # type: ignore[index, union-attr]
    random.seed(1)
    net(x).backward()
    assert len(runs) <= 1


class Normed(Block):
    """Has statistics that a second run would count twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)  # type: ignore[assignment]


class Counted(Block):
    """Leaves a number in a list that a second run would leave twice."""

    seen: ClassVar[list[int]] = []

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.seen.append(len(x))
        return super().forward(x, scale=scale)


class CountedByClass(Block):
    """Counts in an attribute of its class."""

    calls = 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        type(self).calls += 1
        return super().forward(x, scale=scale if self.calls < 100 else 2 * scale)


@pytest.mark.parametrize("block", [Normed, Counted, CountedByClass])
def test_layers_whose_second_run_would_show_are_not_checkpointed(block: Any, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    net, x = Net(Layers(block, drop=0.3), logs=True), torch.randn(128, 16)
    planned = copy.deepcopy(net)
    memplan.apply(planned, x, "min", costs="estimate")
    assert "layers checkpointed" not in caplog.text
    assert CountedByClass.calls == 0
    plain, CountedByClass.calls = steps(net, x), 0
    assert_same_bits(plain, steps(planned, x))
    CountedByClass.calls = 0


class Cache:
    def __init__(self) -> None:
        self.kept = list[torch.Tensor]()


class Caching(Block):
    """Reads what earlier calls have left in a cache, and leaves its own there, as decoders of transformers do."""

    def forward(self, x: torch.Tensor, *, cache: Cache) -> torch.Tensor:  # type: ignore[override]
        x = super().forward(x)
        cache.kept.append(x)
        return x * torch.cat(cache.kept).square().mean()


class WithCache(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = Cache()
        for layer in self.layers:
            if random.random() > self.drop:
                x = layer(x, cache=cache)
        return x


def test_layers_that_are_given_a_cache_are_not_checkpointed(caplog: pytest.LogCaptureFixture) -> None:
    """A graph that PyTorch's checkpoint could not run would hold the cache, and with it itself, for ever."""
    torch.manual_seed(0)
    net, x = Net(WithCache(Caching, drop=0.3), logs=True), torch.randn(128, 16)
    memplan.apply(net, x, "min", costs="estimate")
    assert "layers checkpointed" not in caplog.text
    steps(net, x)
    lasting = [*map(weakref.ref, net.parameters())]
    del net
    gc.collect()
    assert not any(parameter() is not None for parameter in lasting)


@pytest.mark.parametrize("name", ["a log in the root", "experts"])
def test_what_changes_before_backward(name: str) -> None:
    """Layers run again in backward: with other attributes they would give other gradients."""
    torch.manual_seed(0)
    net, x = NETS[name](), torch.randn(512, 16)
    memplan.apply(net, x, "min", costs="estimate")
    loss = net(x)
    net.inner.layers[0].drop.p = 0.2  # type: ignore[index, union-attr]
    with pytest.raises(memplan.PlanMismatch, match="have changed since its forward"):
        loss.backward()


@pytest.mark.parametrize("name", ["a log in the root", "experts"])
def test_hooks_that_are_added_later_run_once(name: str) -> None:
    torch.manual_seed(0)
    net, x = NETS[name](), torch.randn(512, 16)
    memplan.apply(net, x, "min", costs="estimate", on_infeasible="min")
    net(x).backward()
    net.zero_grad()
    runs = list[int]()
    net.inner.layers[0].norm.register_forward_hook(lambda *_: runs.append(1))  # type: ignore[index, union-attr]
    net(x).backward()
    assert runs.count(1) == 1


def test_layers_that_chance_leaves_out_stay_within_the_budget() -> None:
    torch.manual_seed(0)
    net, x = Net(Layers(drop=0.5), logs=True), torch.randn(512, 16)
    plain_bytes = max(peak_bytes(net, x, seed) for seed in range(12))
    memplan.apply(net, x, "min", costs="estimate")
    budget_bytes = int(0.9 * plain_bytes)
    memplan.remove(net)
    memplan.apply(net, x, budget_bytes, costs="estimate")
    assert max(peak_bytes(net, x, seed) for seed in range(12)) <= budget_bytes


def test_layers() -> None:
    stages = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    net = nn.ModuleDict({"stages": stages, "blocks": nn.ModuleList([nn.ModuleList([nn.ReLU()]), nn.Linear(2, 2)])})
    assert layers_of(net) == ("stages", "blocks.0.0", "blocks.1")
    assert layers_of(net, 2) == ("stages.0", "stages.1", "blocks.0.0", "blocks.1")
    assert layers_of(net, 3) == ("stages.0.0", "stages.0.1", "stages.1", "blocks.0.0", "blocks.1")
    assert layers_of(nn.Linear(2, 2)) == ()


def test_a_floor_is_no_higher_where_budgets_are_raised() -> None:
    """The step would hold a little more unplanned, with its layers checkpointed, than planned."""
    floors_bytes = list[int]()
    for on_infeasible in ("advise", "min"):
        torch.manual_seed(0)
        net, x = Net(Layers(drop=0.3)), torch.randn(512, 16)
        memplan.apply(net, x, "min", costs="estimate", on_infeasible=on_infeasible)  # type: ignore[arg-type]
        plan = memplan.plan_of(net)
        assert isinstance(plan, memplan.Plan)
        floors_bytes.append(plan.peak_bytes)
    assert floors_bytes[0] == floors_bytes[1]


def test_trials_end_when_they_decide_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps with checkpoints and four without show that bits are the same. Four show that a plain step holds more
    than the plan. Only one with checkpoints may hold less, and that takes up to fourteen.
    """
    torch.manual_seed(0)
    net, x = Net(Layers(drop=0.3)), torch.randn(512, 16)
    backward, trials = torch.autograd.backward, list[int]()
    monkeypatch.setattr(torch.autograd, "backward", lambda *args: (trials.append(1), backward(*args)))
    memplan.apply(net, x, "min", costs="estimate")
    assert isinstance(memplan.plan_of(net), memplan.Plan)
    assert len(trials) <= 4 + 4 + 4 + 14
