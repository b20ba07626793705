"""Gradients land without autograd's engine only where nobody could tell."""

from __future__ import annotations

import copy
import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan import torch_private as private
from memplan.installed.planned_forward import planned_forward
from memplan.runtime.host.streams import FakeStreams
from tests.support.zoo import assert_same_bits


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))).train()


def accumulator(parameter: nn.Parameter) -> Any:
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


Told = list[tuple[str, Any]]


def on_tensor(net: Any, told: Told) -> Any:
    return net[1][0].weight.register_hook(lambda g: told.append(("tensor", g.clone())) or 2 * g)


def on_node(net: Any, told: Told) -> Any:
    node = accumulator(net[2][0].weight)
    return node, node.register_hook(lambda *_: told.append(("node", net[2][0].weight.grad.clone())))


def before_node(net: Any, told: Told) -> Any:
    node = accumulator(net[2][0].bias)
    return node, node.register_prehook(lambda grads: told.append(("before node", grads[0].clone())))


def when_accumulated(net: Any, told: Told) -> Any:
    return net[3][0].bias.register_post_accumulate_grad_hook(lambda p: told.append(("accumulated", p.grad.clone())))


def on_several(net: Any, told: Told) -> Any:
    of = [net[0][0].weight, net[3][0].weight]
    return torch.autograd.graph.register_multi_grad_hook(
        of, lambda gs: told.append(("several", [g.clone() for g in gs]))
    )


HOOKS = [on_tensor, on_node, before_node, when_accumulated, on_several]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("put", HOOKS, ids=lambda hook: hook.__name__)
def test_every_hook_is_called_with_the_same_bits(put: Callable[[Any, Told], Any], late: bool) -> None:
    net, x = network(), torch.randn(16, 8)
    planned = memplan.apply(copy.deepcopy(net), x, 0.9, costs="estimate")
    results = []
    for each in (net, planned):
        told: Told = []
        held = None if late else put(each, told)
        for step in range(3):
            output = each(x * (step + 1)).pow(2).mean()
            if late and step == 1:
                held = put(each, told)
            each.zero_grad()
            output.backward()
        results.append((told, [p.grad for p in each.parameters()]))
        del held
    assert results[0][0], "it was called"
    assert_same_bits(*results)


@pytest.mark.parametrize("mode", ["all", "any"])
def test_hooks_that_wait_for_several_gradients_are_told_of(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Gradients that are handed over at different times are several backward passes to them."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3))).train()
    x, seen = torch.randn(64, 8), []
    for grads in (None, "edges", "surface"):
        each, told = copy.deepcopy(net), list[Any]()
        if grads is not None:
            memplan.apply(each, x, "min", costs="estimate", grads=grads)  # type: ignore[call-overload]
        of = [each[0][0].weight, each[2][0].weight]  # type: ignore[index]
        torch.autograd.graph.register_multi_grad_hook(of, told.append, mode=mode)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "memplan"):
            each(x).pow(2).mean().backward()
        seen.append(told)
        messages = [r.getMessage() for r in caplog.records if "register_multi_grad_hook" in r.getMessage()]
        assert len(messages) == (grads == "surface")
    assert_same_bits(seen[0], seen[1])
    assert len(seen[0]) == 1 and len(seen[2]) == 2


def test_who_holds_an_accumulator_is_seen_and_who_held_it_is_not() -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2), requires_grad=False)
    third = nn.Parameter(torch.zeros(2))
    assert private.without_accumulators([first, second, third]) == [True, False, True]
    node = accumulator(first)
    for _ in range(2):
        assert private.without_accumulators([first, second, third]) == [False, False, True]
    del node
    gc.collect()
    assert private.without_accumulators([first, second, third]) == [True, False, True]


def holds_gradients(net: Any, told: Told) -> Any:
    for parameter in net[2].parameters():
        parameter.grad = torch.ones_like(parameter)


def takes_other_strides(net: Any, told: Told) -> Any:
    net[1][0].weight.data = net[1][0].weight.data.t().contiguous().t()


@pytest.mark.parametrize("change", [*HOOKS, holds_gradients, takes_other_strides])
def test_what_comes_after_some_steps_is_heeded(change: Callable[[Any, Told], Any]) -> None:
    results = []
    net = network()
    for each in (net, memplan.apply(copy.deepcopy(net), torch.randn(16, 8), 1.0, costs="estimate")):
        told: Told = []
        torch.manual_seed(1)
        for step in range(6):
            each.zero_grad()
            kept = change(each, told) if step == 4 else None
            each(torch.randn(16, 8)).pow(2).mean().backward()
            told.append(("step", [p.grad.clone() for p in each.parameters()]))
            del kept
        results.append(told)
    assert_same_bits(*results)


def test_gradients_of_other_layouts_are_laid_out_as_autograd_does() -> None:
    """Where a parameter is not contiguous, `.grad` has its strides."""
    net = nn.Linear(6, 4, bias=False)
    net.weight = nn.Parameter(torch.randn(6, 4).t())
    planned, x = memplan.apply(copy.deepcopy(net), torch.randn(3, 6), 1.0, costs="estimate"), torch.randn(3, 6)
    for each in (net, planned):
        each(x).pow(2).sum().backward()
    assert net.weight.grad is not None and planned.weight.grad is not None
    assert planned.weight.grad.stride() == net.weight.grad.stride()
    assert_same_bits(net.weight.grad, planned.weight.grad)


def test_gradients_of_another_dtype_than_their_parameter() -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this PyTorch has no grad_dtype")
    net, x = network().to(torch.bfloat16), torch.randn(16, 8, dtype=torch.bfloat16)
    for parameter in net[:2].parameters():  # type: ignore[index]
        parameter.grad_dtype = torch.float32
    planned = memplan.apply(copy.deepcopy(net), x, 1.0, costs="estimate")
    for theirs, mine in zip(net.parameters(), planned.parameters(), strict=True):
        mine.grad_dtype = theirs.grad_dtype
    for each in (net, planned):
        each(x).float().pow(2).mean().backward()
    assert {p.grad.dtype for p in planned.parameters() if p.grad is not None} == {torch.float32, torch.bfloat16}
    assert_same_bits([p.grad for p in net.parameters()], [p.grad for p in planned.parameters()])


def test_only_the_thread_that_updates_waits_for_gradients_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    finish = FakeStreams.finish

    def noted(streams: FakeStreams, event: Any) -> None:
        waited.append(threading.current_thread().name)
        finish(streams, event)

    link = memplan.Link(1e9, 1e9)
    results = []
    for update in ("step", "backward"):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6))).train()
        optimizer, x = torch.optim.SGD(net.parameters(), lr=0.1), torch.randn(16, 64)
        settings: dict[str, Any] = {"costs": "estimate", "optimizer": optimizer, "host_budget": "1GiB", "link": link}
        floor = memplan.plan(net, x, 1 << 40, costs="estimate").floor_bytes
        memplan.apply(net, x, int(0.6 * floor), update=update, **settings)
        planned = planned_forward(net)
        assert planned is not None and planned._planner.placement.host
        with monkeypatch.context() as patch:
            patch.setattr(FakeStreams, "finish", noted)
            waited.clear()
            for _ in range(2):
                net(x).pow(2).mean().backward()
                during = [*waited]
                optimizer.step()
                optimizer.zero_grad()
        assert during
        results.append([p.detach().clone() for p in net.parameters()])
        names = {name.partition("_")[0] for name in during}
        assert ("memplan-updates" in names) == (update == "backward")
    assert_same_bits(*results)


@pytest.mark.parametrize("accumulate", [False, True])
def test_hooks_that_write_to_parameters_find_nobody_reading_them(accumulate: bool) -> None:
    """A gradient is handed over when no op reads its parameter any more: here each is also read for its input's.

    Tied weights, in two layers each, are read long after their gradient has begun.
    """

    def trained(budget: float | str | None) -> Any:
        torch.manual_seed(0)
        layers: list[Any] = [nn.Linear(16, 16, bias=False) for _ in range(22)]
        layers += layers[3:5]
        net = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))
        sample = torch.randn(8, 16)
        if budget is not None:
            memplan.apply(net, (sample,), budget, costs="estimate", accumulate=accumulate)
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(stepped)
        losses = []
        for scale in (1.0, -2.0, 0.5, 3.0):
            loss = net(scale * sample).square().sum()
            loss.backward()
            losses.append(loss.detach())
        return losses, [*net.parameters()], [p.grad for p in net.parameters()]

    def stepped(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.01)
        if not accumulate:
            parameter.grad = None

    for budget in (1.0, "min"):
        assert_same_bits(trained(budget), trained(None))
