"""Budgets in bytes on CUDA: what PyTorch's allocator reserves for a plan fits them, where a schedule allows that."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.config import Config
from memplan.planning import choosing, plan_search, problems
from memplan.planning.choosing import fastest_reserved
from memplan.problem.data import Requests
from memplan.problem.reserved import reserved_bytes
from memplan.solvers import solve_front
from memplan.units import format_bytes
from tests.support.random_graphs import unet_like

MIB = 1 << 20


@pytest.mark.parametrize("expandable", [False, True])
def test_the_fastest_that_fits_is_taken(expandable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "_MOST_REPLAYED", 10_000)
    problem = replace(unet_like(4), requests=Requests(expandable, arena=False))
    front = solve_front(problem, Config(methods=("rotor",), points=8))
    found = {p: reserved_bytes(problem, p.schedule, expandable) for p in front.points}
    for limit_bytes in (*found.values(), front.floor.peak_bytes, front.keep_all.peak_bytes):
        chosen = fastest_reserved(problem, front, limit_bytes)
        fitting = [p for p, size_bytes in found.items() if size_bytes <= limit_bytes]
        if fitting:
            assert chosen is not None and chosen.time_s == min(p.time_s for p in fitting)
        else:
            assert chosen is None


@pytest.mark.parametrize("spare_mib", [10, 60, 300])
def test_what_an_arena_makes_fit_is_found_in_few_trials(spare_mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates 20 MiB apart, which reserve a half more than their peak, or so much more in an arena."""
    points = [SimpleNamespace(peak_bytes=(1000 + 20 * i) * MIB, schedule=i) for i in range(32)]
    trials: list[int] = []

    def reserved(problem: Any, index: int, expandable: bool, steering: Any = None) -> int:
        return points[index].peak_bytes * 3 // 2 if steering is None else points[index].peak_bytes + spare_mib * MIB

    monkeypatch.setattr(choosing, "reserved_bytes", reserved)
    monkeypatch.setattr(choosing, "steering_of", lambda problem, index, expandable: trials.append(index) or index)
    problem: Any = SimpleNamespace(requests=Requests(expandable=True))
    for limit_mib in range(1000 + spare_mib, 2000, 30):
        trials.clear()
        chosen = fastest_reserved(problem, SimpleNamespace(points=points), limit_mib * MIB)  # type: ignore[arg-type]
        fitting = [p for p in points if p.peak_bytes <= (limit_mib - spare_mib) * MIB]
        assert chosen is fitting[-1] and len(trials) <= 4


class _Wide(nn.Module):
    """Layers whose activations take mebibytes, of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            x = torch.cat((x, x[: len(x) // (index + 2)]))
        return x.square().mean()


def test_what_the_other_setting_saves_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    for expandable in (False, True):
        requests = Requests(expandable, arena=False)
        monkeypatch.setattr(problems.Problems, "_requests", lambda problems, traced, optimizer, r=requests: r)
        plans.append(memplan.plan(_Wide(), torch.rand(30_000, 64), "min", costs="estimate"))
    other_bytes = reserved_bytes(plans[0].problem, plans[0].schedule, True)
    assert other_bytes <= 0.98 * plans[0].reserved_bytes
    told = f"; {format_bytes(other_bytes)} with PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert told in plans[0].report() and told[2:] in plans[0].summary
    here = f"{format_bytes(plans[1].reserved_bytes)} by PyTorch's allocator with expandable_segments:True"
    assert f"{here}\n" in plans[1].report() and "PyTorch's allocator" not in plans[1].summary


def test_plans_for_budgets_in_bytes_fit_what_is_reserved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    net, sample = _Wide(), torch.rand(8000, 64)
    plain = memplan.plan(net, sample, "min", costs="estimate")
    monkeypatch.setattr(problems.Problems, "_requests", lambda problems, traced, optimizer: Requests())
    caplog.set_level(logging.WARNING, "memplan")
    low = memplan.plan(net, sample, "min", costs="estimate")
    assert low.peak_bytes == plain.peak_bytes < low.reserved_bytes and not caplog.records
    assert "by PyTorch's allocator" in low.report()
    for budget in range(low.reserved_bytes, 2 * low.reserved_bytes, 8 * MIB):
        plan = memplan.plan(net, sample, budget, costs="estimate")
        assert plan.reserved_bytes <= budget and not caplog.records
    tight = memplan.plan(net, sample, low.peak_bytes + 1000, costs="estimate")
    assert tight.reserved_bytes > low.peak_bytes + 1000
    assert "PyTorch's allocator reserves" in caplog.text


@pytest.mark.slow
def test_plans_with_copies_fit_what_is_reserved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expandable = Requests(expandable=True)
    monkeypatch.setattr(problems.Problems, "_requests", lambda problems, traced, optimizer: expandable)
    caplog.set_level(logging.WARNING, "memplan")
    net, sample = _Wide(), torch.rand(100_000, 64)
    most = memplan.plan(net, sample, 1 << 40, costs="estimate").peak_bytes
    fits, fits_at_once = 0, 0
    for budget in range(most // 2, most, most // 16):
        with monkeypatch.context() as patched:
            patched.setattr(plan_search, "_MOST_LOWERED", 0)
            fits_at_once += _with_copies(net, sample, budget).reserved_bytes <= budget
        caplog.clear()
        reserved = _with_copies(net, sample, budget).reserved_bytes
        assert (reserved > budget) == ("PyTorch's allocator reserves" in caplog.text)
        fits += reserved <= budget
    assert fits_at_once < fits


def _with_copies(net: nn.Module, sample: torch.Tensor, budget: int) -> memplan.Plan:
    link = memplan.Link(25e9, 25e9)
    return memplan.plan(net, sample, budget, costs="estimate", device="cpu", host_budget="1GiB", link=link)
