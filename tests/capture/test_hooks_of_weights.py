"""Weights that hooks of PyTorch compute before each forward: what they do is part of the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

import memplan
from tests.support.parameters import quickly
from tests.support.zoo import assert_same_bits, run_steps

WIDTH = 48


def pruned(layer: nn.Module) -> None:
    prune.random_unstructured(layer, "weight", 0.3)


def blocks(hook: Callable[[nn.Module], Any]) -> nn.Sequential:
    torch.manual_seed(1)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(5)))
    for block in net:
        hook(block[0])  # type: ignore[index]
    return net


@pytest.mark.filterwarnings("ignore:.*is deprecated in favor of:FutureWarning")
@pytest.mark.parametrize("budget", quickly((memplan.Budget(activations=0.7), "min"), "min"))
@pytest.mark.parametrize("hook", [weight_norm, spectral_norm, pruned])
def test_hooks_that_compute_weights_are_part_of_the_plan(hook: Callable[[nn.Module], Any], budget: Any) -> None:
    (net, planned), x = (blocks(hook) for _ in range(2)), torch.randn(96, WIDTH)
    memplan.apply(planned, x, budget, costs="estimate")
    plan = memplan.plan_of(planned)
    assert plan is not None
    assert not plan.islands
    assert_same_bits(run_steps(net, x, 3), run_steps(planned, x, 3))
    weights = [[block[0].weight.detach() for block in model] for model in (net, planned)]  # type: ignore[index]
    assert_same_bits(*weights)
    memplan.remove(planned)
    assert_same_bits(run_steps(net, x, 1), run_steps(planned, x, 1))
