"""`retain_graph=True`: a further backward through a planned forward has the bits of eager's."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import memplan
from tests.support.parameters import quickly
from tests.support.small import Net, grads_of, nothing_changes
from tests.support.zoo import assert_same_bits, copied, run_steps

Losses = Callable[[nn.Module, torch.Tensor], Any]


class Trunk(Net):
    """Two heads on one trunk, which has ops in place, dropout, and batch norm."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu_(self.norm(self.inner(x)))
        hidden = torch.tanh(self.middle(self.drop(hidden)))
        return self.outer(hidden), hidden.square().mean(1)


class Loss(Net):
    """The loss of one head."""


class Noting(Trunk):
    """Notes its calls in a list, so it can't be captured whole."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = list[int]()
        self.first, self.second = nn.Sequential(self.inner, self.norm, nn.ReLU(True)), nn.Sequential(self.middle)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append(len(x))
        hidden = torch.tanh(self.second(self.drop(self.first(x))))
        return self.outer(hidden), hidden.square().mean(1)


class Around(nn.Module):
    """Such a model as an island of another."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Noting()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        main, side = self.net(x)
        return main * self.scale, side


def three_times(net: nn.Module, x: torch.Tensor) -> Any:
    """The third time frees the graph. Random numbers that are drawn in between stay as they are."""
    (loss, *_) = out if isinstance(out := net(x), tuple) else (out,)
    loss = loss.pow(2).mean()
    loss.backward(retain_graph=True)
    first, drawn = copied(grads_of(net)), torch.rand(3)
    loss.backward(retain_graph=True)
    loss.backward()
    return first, drawn, loss.detach()


def output_by_output(net: nn.Module, x: torch.Tensor) -> Any:
    main, side = net(x)
    main.pow(2).mean().backward(retain_graph=True)
    first = copied(grads_of(net))
    side.sum().backward()
    return first


def both_then_each(net: nn.Module, x: torch.Tensor) -> None:
    main, side = net(x)
    (main.sum() + side.pow(2).mean()).backward(retain_graph=True)
    main.pow(2).mean().backward(retain_graph=True)
    side[:2].sum().backward()


def weighted(net: nn.Module, x: torch.Tensor) -> Any:
    """A weight that depends on gradients of the last layer, as in training of VQGAN."""
    main, _ = net(x)
    one, two = main.pow(2).mean(), main.exp().mean()
    (a,) = torch.autograd.grad(one, net.outer.weight, retain_graph=True)
    (b,) = torch.autograd.grad(two, net.outer.weight, retain_graph=True)
    (one + (a.norm() / b.norm()) * two).backward()
    return a, b


def trained(net: nn.Module, losses: Losses, x: torch.Tensor) -> Any:
    """What two steps give, and leave."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = []
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        x.grad = None
        seen.append((losses(net, x), copied(grads_of(net)), copied(x.grad)))
        optimizer.step()
    return seen, copied(dict(net.named_buffers())), torch.get_rng_state()


def compare(kind: type[nn.Module], losses: Losses, x: torch.Tensor | None = None, **options: Any) -> nn.Module:
    """Train a model plainly and planned, compare, and give the planned one."""
    torch.manual_seed(0)
    plain = kind().train()
    x = torch.randn(16, 8, requires_grad=True) if x is None else x
    planned = memplan.apply(copy.deepcopy(plain), x, **{"budget": "min", "costs": "estimate", **options})
    assert_same_bits(trained(plain, losses, x), trained(planned, losses, x))
    return planned


@pytest.mark.parametrize("grads", ["surface", "edges"])
@pytest.mark.parametrize(
    ("kind", "losses"),
    [(Loss, three_times), (Trunk, three_times), (Trunk, output_by_output), (Trunk, both_then_each)],
)
def test_a_further_backward_has_eager_bits(kind: type[nn.Module], losses: Losses, grads: str) -> None:
    compare(kind, losses, grads=grads)


@pytest.mark.parametrize("losses", [three_times, output_by_output, both_then_each])
@pytest.mark.parametrize("budget", quickly(("1GiB", "min"), "min"))
@pytest.mark.parametrize("kind", [Noting, Around])
def test_unplanned_and_islands(kind: type[nn.Module], losses: Losses, budget: str) -> None:
    planned = compare(kind, losses, budget=budget)
    assert isinstance(memplan.plan_of(planned), memplan.Plan) == (kind is Around)


def test_gradients_that_are_asked_for_before_backward() -> None:
    compare(Trunk, weighted, grads="edges")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"budget": 0.9, "accumulate": True}, id="accumulate"),
        pytest.param({"budget": 0.6, "host_budget": "1MiB"}, id="offload", marks=pytest.mark.slow),
        pytest.param({"on_oom": "replan"}, id="replan"),
    ],
)
def test_with_options(options: dict[str, Any]) -> None:
    compare(Loss, three_times, **options)


def test_under_autocast() -> None:
    def losses(net: nn.Module, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            main, side = net(x)
        main.float().pow(2).mean().backward(retain_graph=True)
        side.sum().backward()

    compare(Trunk, losses, budget=1.0)


def test_two_forwards_wait_for_several_backwards() -> None:
    """Buffers that the first forward writes are those of the second one by then."""

    def losses(net: nn.Module, x: torch.Tensor) -> None:
        one, two = net(x), net(x.flip(0))
        one.backward(retain_graph=True)
        two.backward(retain_graph=True)
        one.backward()
        two.backward()

    compare(Loss, losses, budget="1GiB")


def test_another_batch_size() -> None:
    planned = compare(Loss, three_times, budget="1GiB")
    plain = copy.deepcopy(planned)
    memplan.remove(plain)
    x = torch.randn(24, 8, requires_grad=True)
    assert_same_bits(trained(plain, three_times, x), trained(planned, three_times, x))


class Spectral(nn.Module):
    """Reads buffers that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)).pow(2).mean()


def test_buffers_that_forward_reads_and_writes() -> None:
    compare(Spectral, three_times, on_oom="replan")
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    planned = memplan.apply(Spectral(), x, "min", costs="estimate")
    planned(x).backward()  # so that nothing runs for the first time
    planned.zero_grad()
    loss = planned(x)
    loss.backward(retain_graph=True)
    with nothing_changes(planned, x), pytest.raises(RuntimeError, match=r"reads what it writes to .*on_oom='replan'"):
        loss.backward()


def test_what_forward_read_has_changed() -> None:
    class Shifted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.ones(8))  # which only forward reads

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.features(x) + self.shift).pow(2).mean()

    torch.manual_seed(0)
    x = torch.randn(16, 8)
    planned = memplan.apply(Shifted(), x, "min", costs="estimate")
    loss = planned(x)
    loss.backward(retain_graph=True)
    planned.shift.add_(1)
    with pytest.raises(RuntimeError, match=r"shift has been modified by an inplace operation"):
        loss.backward()


def test_updates_in_backward_are_refused() -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(16, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    memplan.apply(net, x, "min", costs="estimate", optimizer=optimizer, update="backward")
    loss = net(x)
    with nothing_changes(net, x), pytest.raises(RuntimeError, match=r"update='backward'.*retain_graph"):
        loss.backward(retain_graph=True)
    loss.backward()


def test_all_is_freed_after_the_last_backward(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    net, x = memplan.apply(Net(), torch.randn(16, 8), "min", costs="estimate"), torch.randn(16, 8)
    with caplog.at_level(logging.WARNING, "memplan"):
        loss = net(x)
        held = weakref.ref(x)
        del x
        loss.backward(retain_graph=True)
        assert held() is not None
        loss.backward(retain_graph=True)
        loss.backward()
    gc.collect()
    assert held() is None
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    told = [r.getMessage() for r in caplog.records if "retain_graph" in r.getMessage()]
    assert len(told) == 1
    assert "runs forward again" in told[0]


def test_a_plain_backward_saves_nothing_for_others() -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(16, 8)
    planned = memplan.apply(copy.deepcopy(net), x, "min", costs="estimate")
    assert_same_bits(run_steps(net, x), run_steps(planned, x))
    loss = planned(x)
    state = loss.grad_fn.state
    loss.backward(retain_graph=True)
    assert state.saved == [], "a backward that keeps the graph frees as it goes, too"


class Draws(nn.Module):
    """Draws random numbers where its bias is large, and that is not so on the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        nn.init.constant_(self.linear.bias, -9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        return nn.functional.dropout(h) if h[0, 0].item() > 0 else h


def test_an_island_that_first_draws_after_the_sample_draws_the_same_again() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), Draws(), nn.Linear(8, 8)).train()
    x, planned, found = torch.randn(4, 8), copy.deepcopy(net), []
    memplan.apply(planned, x, 1.0, costs="estimate")
    for each in (net, planned):
        nn.init.constant_(each[1].linear.bias, 9)  # type: ignore[union-attr, arg-type]
        torch.manual_seed(1)
        loss = each(x).pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([*(p.grad for p in each.parameters()), torch.rand(1)])
    assert_same_bits(*found)


class EveryFew(nn.Module):
    """Does something else in every second or fourth run, by a list that it fills."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.first, self.last, self.every, self.seen = nn.Linear(8, 8), nn.Linear(8, 8), every, list[int]()
        self.inner = Counting(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.inner(self.first(x))))
        return out


class Averaging(EveryFew):
    """Divides by a running mean, which a second run on the same batch would not change."""

    def __init__(self, every: int) -> None:
        super().__init__(every)
        self.inner = RunningMean()  # type: ignore[assignment]


class RunningMean(nn.Module):
    mean: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now = float(x.detach().square().mean())
        self.mean = now if self.mean is None else 0.5 * self.mean + 0.5 * now
        return x / (1 + self.mean)


class Counting(nn.Module):
    def __init__(self, outer: EveryFew) -> None:
        super().__init__()
        self.every, self.seen = outer.every, outer.seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        return x * (3 if len(self.seen) % self.every == 0 else 1)


def other_strides(out: torch.Tensor) -> None:
    torch.stack([out, out.detach()], 1).pow(2).sum().backward()


def two_losses(out: torch.Tensor) -> None:
    out.pow(2).sum().backward(retain_graph=True)
    out.sum().backward()


def both(out: torch.Tensor) -> None:
    torch.stack([out, out.detach()], 1).pow(2).sum().backward(retain_graph=True)
    two_losses(out)


@pytest.mark.parametrize("backward", [other_strides, two_losses, both])
@pytest.mark.parametrize(("kind", "every"), [(EveryFew, 2), (EveryFew, 4), (Averaging, 3)])
def test_a_forward_runs_again_with_the_python_state_that_it_found(
    kind: type[EveryFew], every: int, backward: Callable[[torch.Tensor], None]
) -> None:
    torch.manual_seed(0)
    plain, x, found = kind(every), torch.randn(6, 8), []
    planned = copy.deepcopy(plain)
    memplan.apply(planned, x, 1 << 30)
    for net in (plain, planned):
        for step in range(2 * every + 1):
            backward(net(x * step))
        found.append(([p.grad for p in net.parameters()], net.seen))
    assert_same_bits(*found)


def test_a_forward_with_python_state_that_is_not_known_does_not_run_again() -> None:
    torch.manual_seed(0)
    net, x = EveryFew(4), torch.randn(6, 8)
    memplan.apply(net, x, 1 << 30)
    for _ in range(2):
        net(x).sum().backward()
    with pytest.raises(RuntimeError, match="would give, or leave, something else"):
        two_losses(net(x))
