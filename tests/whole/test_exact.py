"""Planned steps are the plain model's bits and hold the bytes that were predicted, on every model of the zoo."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.installed.planned_forward import planned_forward
from tests.support.meter import LiveMeter, profiler_peak, storage_bytes
from tests.support.zoo import MODELS, Sample, assert_same_bits, call, loss_of, run_steps, tensors_of

IN_EVERY_RUN = ("gpt2", "t5", "vit", "handmade")  # in bf16; of the others that is slow
LIKE_ANOTHER = ("unet",)  # test_architectures has a larger one
FEW, MANY = 3, 8  # budgets from the floor to the unplanned peak


def cells(*counts: int) -> list[Any]:
    """Every model in both precisions, with so many budgets; MANY are slow."""
    found = []
    for name, autocast, count in itertools.product(MODELS, (False, True), counts):
        slow = count == MANY or name in LIKE_ANOTHER or (autocast and name not in IN_EVERY_RUN)
        kind = f"{name}-{'bf16' if autocast else 'fp32'}-{count}"
        found.append(pytest.param(name, autocast, count, id=kind, marks=pytest.mark.slow if slow else ()))
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


def spread(points: tuple[memplan.Plan, ...], count: int) -> list[memplan.Plan]:
    """The fastest points at `count` budgets from the floor to the unplanned peak."""
    low, high = points[0].peak_bytes, points[-1].baseline_peak_bytes
    budgets = [low + (high - low) * i // (count - 1) for i in range(count)]
    return [[p for p in points if p.peak_bytes <= budget][-1] for budget in budgets]


def residents(net: nn.Module, sample: Sample) -> list[torch.Tensor]:
    planned = planned_forward(net)
    constants = planned.constants.values() if planned else ()
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


@pytest.mark.parametrize(("name", "autocast", "count"), cells(FEW, MANY))
def test_three_steps_are_the_plain_models_bits_at_any_budget(name: str, autocast: bool, count: int) -> None:
    net, sample = built(name)
    plain = run_steps(copy.deepcopy(net), sample, 3, autocast)
    points = curve(name, autocast, False)
    for point in spread(points, count):
        planned = copy.deepcopy(net)
        with under(autocast):
            memplan.apply(planned, sample, plan=point)
        assert_same_bits(plain, run_steps(planned, sample, 3, autocast))
    assert points[0].recomputed, "the smallest budget recomputes something, or this test shows nothing"


@pytest.mark.parametrize(("name", "autocast", "count"), cells(FEW, MANY))
def test_measured_peaks_are_the_predicted_ones_to_the_byte(name: str, autocast: bool, count: int) -> None:
    net, sample = built(name)
    loss_fn = loss_inside(sample)
    for point in spread(curve(name, autocast, True), count):
        planned = copy.deepcopy(net)
        with under(autocast):
            memplan.apply(planned, sample, plan=point, loss_fn=loss_fn)
        measured = live_peak(planned, sample, autocast), allocator_peak(planned, sample, autocast)
        assert measured == (point.live_peak_bytes, point.peak_bytes)
        assert point.problem.budget_bytes is not None
        assert measured[1] <= point.problem.budget_bytes


@pytest.mark.parametrize(("name", "autocast", "_"), cells(FEW))
def test_the_curve_is_monotone_and_never_above_eager(name: str, autocast: bool, _: int) -> None:
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
