"""Planned steps are the plain model's bits and hold the bytes that were predicted, on every model of the zoo."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.installed.planned_forward import planned_forward
from tests.support.meter import LiveMeter, profiler_peak, storage_bytes
from tests.support.zoo import MODELS, Sample, assert_same_bits, call, loss_of, run_steps, tensors_of

IN_EVERY_RUN = ("gpt2", "handmade")  # in bf16; of the others that is slow
LIKE_ANOTHER = ("llama", "llama_eager", "bert", "resnet50", "unet")  # test_architectures has a larger U-Net
WITHOUT_LOSS = ("unet", "transformer", "handmade")
FEW, MANY = (0.0, 0.5), tuple(i / 7 for i in range(8))  # budgets as shares of the way from floor to unplanned peak


def cells(*budgets: tuple[float, ...], names: Iterable[str] = MODELS) -> list[Any]:
    """Models in both precisions, with these budgets; MANY are slow."""
    found = []
    for name, autocast, shares in itertools.product(names, (False, True), budgets):
        slow = shares == MANY or name in LIKE_ANOTHER or (autocast and name not in IN_EVERY_RUN)
        kind = f"{name}-{'bf16' if autocast else 'fp32'}-{len(shares)}"
        found.append(pytest.param(name, autocast, shares, id=kind, marks=pytest.mark.slow if slow else ()))
    return found


def with_loss(model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    return loss_of(model(*args, **kwargs))


def loss_inside(sample: Sample) -> Callable[..., torch.Tensor] | None:
    """For models without a loss of their own: the loss becomes part of the step, so that all of it is accounted for."""
    return None if isinstance(sample, dict) and "labels" in sample else with_loss


def under(autocast: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=autocast)


@cache
def built(name: str) -> tuple[nn.Module, Sample]:
    return MODELS[name](0)


def curve(name: str, autocast: bool, loss: bool) -> tuple[memplan.Plan, ...]:
    return _curve(name, autocast, loss_inside(built(name)[1]) if loss else None)


@cache
def _curve(name: str, autocast: bool, loss_fn: Callable[..., torch.Tensor] | None) -> tuple[memplan.Plan, ...]:
    net, sample = built(name)
    with under(autocast):
        return memplan.explore(net, sample, loss_fn=loss_fn)


def spread(points: tuple[memplan.Plan, ...], shares: tuple[float, ...]) -> list[memplan.Plan]:
    """The fastest points at these shares of the way from the floor to the unplanned peak."""
    low, high = points[0].peak_bytes, points[-1].baseline_peak_bytes
    budgets = [low + int((high - low) * share) for share in shares]
    return [[p for p in points if p.peak_bytes <= budget][-1] for budget in budgets]


def residents(net: nn.Module, sample: Sample) -> list[torch.Tensor]:
    planned = planned_forward(net)
    constants = planned.steps[0].capture.traced.constants.values() if planned else ()
    return [*net.parameters(), *net.buffers(), *tensors_of([sample]), *constants]


def train_once(net: nn.Module, sample: Sample, autocast: bool) -> Any:
    """One step whose output is held to the end; without gradients from before."""
    plain_loss = loss_inside(sample) if memplan.plan_of(net) is None else None
    with under(autocast):
        if plain_loss is None:
            output = call(net, sample)
        else:
            output = call(_Wrapped(net, plain_loss), sample)
    (output if isinstance(output, torch.Tensor) else output.loss).backward()
    return output


class _Wrapped:
    def __init__(self, net: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        self.net, self.loss = net, loss

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.loss(self.net, *args, **kwargs)


def live_peak(net: nn.Module, sample: Sample, autocast: bool) -> int:
    net.zero_grad()
    meter = LiveMeter()
    meter.register(residents(net, sample))
    with meter:
        output = train_once(net, sample, autocast)
    del output
    net.zero_grad()
    return meter.peak_bytes


def allocator_peak(net: nn.Module, sample: Sample, autocast: bool) -> int:
    net.zero_grad()
    resident_bytes = storage_bytes(residents(net, sample))
    return profiler_peak(lambda: train_once(net, sample, autocast), resident_bytes)


def assert_measured_as_predicted(net: nn.Module, sample: Sample, autocast: bool, plan: memplan.Plan) -> None:
    measured = live_peak(net, sample, autocast), allocator_peak(net, sample, autocast)
    assert measured == (plan.live_peak_bytes, plan.peak_bytes)
    assert plan.problem.budget_bytes is not None
    assert measured[1] <= plan.problem.budget_bytes


@pytest.mark.parametrize(("name", "autocast", "shares"), cells(FEW, MANY))
def test_steps_hold_what_is_predicted_and_are_the_plain_models_bits(
    name: str, autocast: bool, shares: tuple[float, ...]
) -> None:
    """At any budget; what they hold where the loss is the model's own."""
    net, sample = built(name)
    plain = run_steps(copy.deepcopy(net), sample, 3, autocast)
    points = curve(name, autocast, False)
    for point in spread(points, shares):
        planned = copy.deepcopy(net)
        with under(autocast):
            memplan.apply(planned, sample, plan=point)
        if name not in WITHOUT_LOSS:
            assert_measured_as_predicted(planned, sample, autocast, point)
            planned.load_state_dict(net.state_dict())
        assert_same_bits(plain, run_steps(planned, sample, 3, autocast))
    assert points[0].recomputed, "the smallest budget recomputes something, or this test shows nothing"


@pytest.mark.parametrize(("name", "autocast", "shares"), cells(FEW, MANY, names=WITHOUT_LOSS))
def test_steps_with_the_loss_inside_hold_what_is_predicted(
    name: str, autocast: bool, shares: tuple[float, ...]
) -> None:
    net, sample = built(name)
    loss_fn = loss_inside(sample)
    assert loss_fn is not None
    for point in spread(curve(name, autocast, True), shares):
        planned = copy.deepcopy(net)
        with under(autocast):
            memplan.apply(planned, sample, plan=point, loss_fn=loss_fn)
        assert_measured_as_predicted(planned, sample, autocast, point)


@pytest.mark.parametrize(("name", "autocast", "_"), cells(FEW))
def test_the_curve_is_monotone_and_never_above_eager(name: str, autocast: bool, _: tuple[float, ...]) -> None:
    net, sample = built(name)
    points = curve(name, autocast, True)
    peaks, times = [p.peak_bytes for p in points], [p.time_s for p in points]
    assert peaks == sorted(peaks)
    assert times == sorted(times, reverse=True)
    assert all(p.lower_bound_s <= p.time_s for p in points)
    plain = copy.deepcopy(net)
    assert points[-1].live_peak_bytes <= live_peak(plain, sample, autocast)
    eager_peak = allocator_peak(plain, sample, autocast)
    assert points[-1].peak_bytes <= eager_peak
    within = [p for p in points if p.peak_bytes <= eager_peak]
    assert within[-1].overhead <= 0.01
