"""State that changes where a plan might not look: the plain model's bits, or an error; never other numbers."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memplan
from tests.installed.test_replan import NoMemory
from tests.support.parameters import quickly
from tests.support.zoo import assert_same_bits, copied, run_steps


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Margins that are learnt here are no concern of other tests."""
    monkeypatch.setenv("MEMPLAN_CACHE_DIR", str(tmp_path))


def planned_twin(net: nn.Module, sample: Any, budget: Any = 10**7, **options: Any) -> nn.Module:
    return memplan.apply(copy.deepcopy(net), sample, budget, costs="estimate", **options)


def results(net: nn.Module, run: Callable[[Any], torch.Tensor]) -> Any:
    """The loss and every gradient of one step."""
    torch.manual_seed(1)
    net.zero_grad()
    loss = run(net)
    loss.backward()
    return copied([loss.detach(), [p.grad for p in net.parameters()]])


def results_or_refusal(net: nn.Module, run: Callable[[Any], torch.Tensor]) -> tuple[Any, str]:
    try:
        return results(net, run), ""
    except (memplan.PlanMismatch, RuntimeError) as error:
        return None, str(error)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, **features: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat(list(features.values()), -1)).tanh().pow(2).mean()


def test_the_order_of_keywords_counts_where_forward_sees_it() -> None:
    torch.manual_seed(0)
    net = Keywords()
    a, b = torch.randn(32, 8), torch.randn(32, 8)
    planned = planned_twin(net, {"b": b, "a": a})
    for features in ({"b": b, "a": a}, {"a": a, "b": b}, {"b": b, "a": a}):
        assert_same_bits(*(results(n, lambda n, f=features: n(**f)) for n in (net, planned)))


class Several(nn.Module):
    """Two outputs, of which losses often use one; reads a buffer, a flag and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.second = nn.Linear(8, 64), nn.Linear(8, 64), nn.Linear(64, 6)
        self.flag = True
        self.register_buffer("shift", torch.randn(64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh((self.first if self.flag else self.other)(x) + self.shift + x[:, :1])
        return self.second(hidden), hidden


def shift_buffer(net: Any, x: torch.Tensor) -> None:
    net.shift.add_(1.0)


def turn_flag(net: Any, x: torch.Tensor) -> None:
    net.flag = False


def write_input(net: Any, x: torch.Tensor) -> None:
    x.zero_()


def eval_mode(net: Any, x: torch.Tensor) -> None:
    net.eval()


@pytest.mark.parametrize("change", [shift_buffer, turn_flag, write_input, eval_mode])
@pytest.mark.parametrize("options", [{}, {"on_oom": "replan"}], ids=["", "replan"])
def test_forward_never_runs_again_on_other_state(change: Callable[..., None], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = Several()
    sample = torch.randn(64, 8)
    planned = planned_twin(net, sample, **options)

    def step(net: Any) -> torch.Tensor:
        x = sample.clone()
        out, _ = net(x)
        change(net, x)
        return out.pow(2).mean()

    got, refusal = results_or_refusal(planned, step)
    if refusal:
        assert "did not reach output" in refusal or "modified by an inplace" in refusal
    else:
        assert_same_bits(results(net, step), got)


def test_two_forwards_of_a_new_shape_in_flight() -> None:
    torch.manual_seed(0)
    net = Several()
    planned = planned_twin(net, torch.randn(64, 8))
    x = torch.randn(50, 8)

    def step(net: Any) -> torch.Tensor:
        (a, _), (b, _) = net(x), net(x)
        return a.pow(2).mean() + b.pow(3).mean()

    assert_same_bits(*(results(n, step) for n in (net, planned)))


def test_parameters_frozen_after_forward() -> None:
    torch.manual_seed(0)
    net, x = Several(), torch.randn(64, 8)
    planned = planned_twin(net, x)

    def step(net: Any) -> torch.Tensor:
        net.requires_grad_(True)
        a, b = net(x)
        loss = a.pow(2).mean() + b.mean()
        net.first.requires_grad_(False)
        return loss

    assert_same_bits(*(results(n, step) for n in (net, planned)))


def test_hooks_for_every_module() -> None:
    torch.manual_seed(0)
    net, x = Several(), torch.randn(64, 8)
    planned = planned_twin(net, x)
    step = lambda net: net(x)[0].pow(2).mean()  # noqa: E731
    results(planned, step)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: output * 2 if isinstance(module, nn.Linear) else None
    )
    try:
        assert_same_bits(*(results(n, step) for n in (net, planned)))
    finally:
        handle.remove()
    assert_same_bits(*(results(n, step) for n in (net, planned)))


class WritesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(self.first(x.mul_(2.0)).tanh())).pow(2).mean()


@pytest.mark.parametrize("at", [2, 3, 5])
def test_out_of_memory_after_a_write_to_an_input_is_raised(at: int) -> None:
    torch.manual_seed(0)
    net, x = WritesItsInput(), torch.randn(64, 16)
    planned = planned_twin(net, x.clone(), on_oom="replan")
    planned(x.clone()).backward()
    with pytest.raises(torch.OutOfMemoryError, match="can't run again"), NoMemory(at):
        planned(x.clone())


def test_out_of_memory_with_the_loss_inside() -> None:
    torch.manual_seed(0)
    net, x = Several(), torch.randn(64, 8)
    inside = lambda net, x: net(x)[0].pow(2).mean()  # noqa: E731
    planned = planned_twin(net, x, loss_fn=inside, on_oom="replan")
    results(planned, lambda net: net(x))
    expected = results(net, lambda net: inside(net, x))
    with NoMemory(8) as fault:
        got = results(planned, lambda net: net(x))
    assert fault.left <= 0
    assert_same_bits(expected, got)


# -- islands ----------------------------------------------------------------------------------------------------------


class Opaque(nn.Module):
    """Can't be captured: a branch on a number. Reads a number, a mode and a parameter that others change."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.step, self.calls, self.counts = 1.0, 0, counts
        self.register_buffer("bias", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts and (x.sum() * (self.weight.sum() * 0 + 1)).item() > 0:
            self.calls += 1
        out = F.linear(x, self.weight).tanh() * self.step * (2.0 if self.training else 1.0) + self.bias
        return out.sin() if out.sum().item() > 0 else out.cos()


class Around(nn.Module):
    def __init__(self, change: str) -> None:
        super().__init__()
        self.first, self.opaque, self.last = nn.Linear(16, 16), Opaque(change == "counts"), nn.Linear(16, 16)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        for number in range(3):
            if self.change == "attribute":
                self.opaque.step = 1.0 + number
            hidden = hidden + self.opaque(hidden)
            if self.change == "buffer":
                with torch.no_grad():
                    self.opaque.bias.add_(hidden.mean(0))
        return self.last(hidden).pow(2).mean()


@pytest.mark.parametrize("change", ["none", "attribute", "buffer", "counts", "eval", "parameter"])
@pytest.mark.parametrize("part", quickly((0.6, 0.8, 1.0), 0.8))
def test_an_island_never_runs_on_other_state(change: str, part: float) -> None:
    torch.manual_seed(0)
    net = Around(change)
    sample = -torch.rand(64, 16) if change == "counts" else torch.randn(64, 16)
    x = torch.rand(64, 16) if change == "counts" else sample
    try:
        planned = planned_twin(net, sample, memplan.Budget(activations=part))
    except memplan.MemplanError:
        assert change != "none" or part < 1.0
        return

    def step(net: Any) -> torch.Tensor:
        net.train()
        loss = net(x)
        if change == "eval":
            net.eval()
        elif change == "parameter":
            with torch.no_grad():
                net.opaque.bias.add_(1.0)
        return loss

    got, refusal = results_or_refusal(planned, step)
    if refusal:
        assert "have changed since its forward" in refusal or "modified by an inplace operation" in refusal
        assert change != "none"
    else:
        assert_same_bits(results(net, step), got)


class Handed(nn.Module):
    """Can't be captured, and scales what it computes by what others leave with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.scale: Any = 1.0
        self.box: dict[str, Any] = {"scale": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(self.linear(x)) * self.scale * self.box["scale"]
        return out.sin() if out.sum().item() > 0 else out.cos()


def leave_a_number(island: Handed, hidden: torch.Tensor) -> None:
    island.scale = 3.0


def leave_a_tensor(island: Handed, hidden: torch.Tensor) -> None:
    island.scale = hidden.sin()


def leave_a_constant(island: Handed, hidden: torch.Tensor) -> None:
    island.scale = hidden.detach().sin()


def leave_in_a_box(island: Handed, hidden: torch.Tensor) -> None:
    island.box["scale"] = hidden.sin()


class Handing(nn.Module):
    def __init__(self, leave: Callable[[Handed, torch.Tensor], None], before: bool) -> None:
        super().__init__()
        self.first, self.island, self.last = nn.Linear(16, 16), Handed(), nn.Linear(16, 16)
        self.leave, self.before = leave, before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.before:
            self.leave(self.island, hidden)
        out = self.island(hidden)
        if not self.before:
            self.leave(self.island, hidden.detach())
        return self.last(hidden + out).pow(2).mean()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("leave", [leave_a_number, leave_a_tensor, leave_a_constant, leave_in_a_box])
def test_an_island_reads_what_forward_leaves_with_it(
    leave: Callable[[Handed, torch.Tensor], None], before: bool
) -> None:
    torch.manual_seed(0)
    net, sample = Handing(leave, before), torch.randn(64, 16)
    planned = copy.deepcopy(net)
    memplan.apply(planned, sample, "min", costs="estimate")
    assert_same_bits(run_steps(net, sample, 3), run_steps(planned, sample, 3))


class Tells(nn.Module):
    """Can't be captured, and sets attributes: `count` is for itself, `told` for others."""

    def __init__(self, of: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.of = nn.Linear(16, 16), of
        self.count, self.told = 0, of(torch.ones(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(self.linear(x))
        self.count += 1
        self.told = self.of(out.detach())
        return out.sin() if out.sum().item() > 0 else out.cos()


class Told(nn.Module):
    def __init__(self, of: Callable[[torch.Tensor], Any], listens: bool) -> None:
        super().__init__()
        self.first, self.island, self.listens = nn.Linear(16, 16), Tells(of), listens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.island(torch.tanh(self.first(x)))
        return (hidden * self.island.told if self.listens else hidden).pow(2).mean()


@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.parametrize("of", [lambda out: 1.0 + (out.sum().item() > 0), torch.cos], ids=["number", "tensor"])
def test_forward_reads_what_an_island_sets(of: Callable[[torch.Tensor], Any], listens: bool) -> None:
    torch.manual_seed(0)
    net, sample = Told(of, listens), torch.randn(64, 16)
    planned = copy.deepcopy(net)
    memplan.apply(planned, sample, "min", costs="estimate")
    assert (memplan.plan_of(planned) is None) == listens
    for batch in (sample, -sample):
        assert_same_bits(run_steps(net, batch, 2), run_steps(planned, batch, 2))
    assert planned.island.count == net.island.count


def test_planning_islands_leaves_the_callers_graph_alone() -> None:
    torch.manual_seed(0)
    encoder, net, x = nn.Linear(16, 16), Around("none"), torch.randn(64, 16)
    twin = copy.deepcopy(encoder)
    planned = memplan.apply(copy.deepcopy(net), None, 10**7, costs="estimate")
    net(encoder(x).exp()).backward()
    planned(twin(x).exp()).backward()
    assert_same_bits(copied([p.grad for p in encoder.parameters()]), copied([p.grad for p in twin.parameters()]))


# -- copies and threads -----------------------------------------------------------------------------------------------


def test_a_copy_keeps_a_forward_that_was_exchanged() -> None:
    def patched(self: Any, x: torch.Tensor) -> Any:
        return tuple(t * 3 for t in type(self).forward(self, x))

    torch.manual_seed(0)
    net, x = Several(), torch.randn(64, 8)
    net.forward = functools.update_wrapper(functools.partial(patched, net), net.forward)
    expected = results(net, lambda net: net(x)[0].mean())
    planned = memplan.apply(net, x, 10**7, costs="estimate")
    twin = copy.deepcopy(planned)
    assert_same_bits(expected, results(twin, lambda net: net(x)[0].mean()))
    memplan.remove(twin)
    assert_same_bits(expected, results(twin, lambda net: net(x)[0].mean()))
    with torch.no_grad():
        twin.first.weight.zero_()
    assert_same_bits(expected, results(planned, lambda net: net(x)[0].mean()))


def test_planning_in_threads() -> None:
    x, failures = torch.randn(32, 16), list[BaseException]()

    def work(layers: int) -> None:
        try:
            for _ in range(3):
                memplan.apply(nn.Sequential(*[nn.Linear(16, 16) for _ in range(layers)]), x, 10**7, costs="estimate")
        except BaseException as error:
            failures.append(error)

    seed, state = torch.manual_seed, torch.set_rng_state
    threads = [threading.Thread(target=work, args=(4 + 5 * i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert torch.manual_seed is seed
    assert torch.set_rng_state is state
