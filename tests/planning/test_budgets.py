"""Budgets as people say them, and what a planned model says of itself."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.problem.budgets import parsed
from tests.support.parameters import quickly
from tests.support.zoo import MODELS

ESTIMATED: dict[str, Any] = {"costs": "estimate", "config": "rockmate"}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        *(("80%", 0.8), (" 12.5 % ", 0.125), ("0.5", 0.5), (".25", 0.25), ("1.0", 1.0), (0.5, 0.5), ("MIN", "min")),
        *(("8G", 8 * 1000**3), ("8GB", 8 * 1000**3), ("8GiB", 8 * 1024**3), ("512 M", 512 * 1000**2), (4096, 4096)),
    ],
)
def test_what_budgets_mean(given: Any, meant: Any) -> None:
    assert parsed(given) == meant
    assert type(parsed(given)) is type(meant)


@pytest.mark.parametrize("given", ["120%", "0%", "0.0", "8X", "", "-8GiB", -1, 0, 1.5, float("nan"), True, None, [1]])
def test_what_is_no_budget(given: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"budget|bytes"):
        parsed(given)


def test_the_smallest_budget() -> None:
    net, sample = MODELS["handmade"](0)
    floor = memplan.explore(net, sample, **ESTIMATED)[0]
    plan = memplan.plan(net, sample, "min", **ESTIMATED)
    assert plan.peak_bytes == plan.problem.budget_bytes == floor.peak_bytes


def test_the_smallest_budget_with_an_island() -> None:
    class Stepwise(nn.Module):
        """Takes as many steps as its input says."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in "abc")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).clamp(max=torch.rand(()).item() + 2)
            return x.pow(2).mean()

    net = nn.Sequential(Stepwise(), nn.Flatten(0)).train()
    memplan.apply(net, torch.randn(64, 32), "min", costs="estimate")
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan) and plan.islands
    assert plan.peak_bytes == plan.floor_bytes


def test_the_budget_that_the_machine_has_room_for() -> None:
    net, sample = MODELS["handmade"](0)
    whole_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    plans = [memplan.plan(net, sample, budget, **ESTIMATED) for budget in (None, "auto")]
    memplan.apply(net, sample, **ESTIMATED)
    plans.append(memplan.plan_of(net))  # type: ignore[arg-type]
    assert {plan.problem.budget_bytes for plan in plans} == {plans[0].problem.budget_bytes}
    assert 0 < (plans[0].problem.budget_bytes or 0) <= 0.9 * whole_bytes + 1


def test_a_host_budget_is_no_fraction() -> None:
    net, sample = MODELS["handmade"](0)
    for given in ("80%", 0.5, "min"):
        with pytest.raises(TypeError, match="host_budget"):
            memplan.plan(net, sample, 0.5, host_budget=given)
    with pytest.raises(ValueError, match="without host_budget"):
        memplan.plan(net, sample, "min", host_budget="1GiB")


def test_a_plan_prints_one_line() -> None:
    net, sample = MODELS["handmade"](0)
    line = repr(memplan.plan(net, sample, "min", **ESTIMATED))
    assert line.startswith("<memplan.Plan: peak ")
    assert "ops run again" in line
    assert len(line) < 160
    assert "nothing is recomputed" in repr(memplan.plan(net, sample, 1.0, **ESTIMATED))


SCRIPT = """
import torch, memplan
from torch import nn
net = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
for _ in range(2):
    memplan.apply(net, torch.randn(64, 16), "1GiB", costs="estimate")
    for rows in (64, 32):
        net.zero_grad()
        net(torch.randn(rows, 16)).sum().backward()
"""


@pytest.mark.parametrize(("level", "lines"), quickly([("", 2), ("warning", 0), ("off", 0)], ("", 2)))
def test_what_is_told_by_default(level: str, lines: int) -> None:
    """One line a planned model."""
    environ = {**os.environ, "MEMPLAN_LOG": level}
    child = subprocess.run([sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=True)
    told = [line for line in child.stderr.splitlines() if line.startswith("memplan: ") and "compiling" not in line]
    assert len(told) == lines
    assert all(line.startswith("memplan: peak ") and "; planned in " in line for line in told)


def test_more_is_told_where_that_is_asked_for() -> None:
    environ = {**os.environ, "MEMPLAN_LOG": "info"}
    child = subprocess.run([sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=True)
    assert "memplan: planning, because" in child.stderr
