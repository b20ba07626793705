"""Fronts on disk: a second start has the plan of the first without a search, and what is damaged is searched for."""

from __future__ import annotations

import dataclasses
import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memplan
from memplan import cache
from memplan.costs import known_costs
from memplan.planning import plan_search
from memplan.solvers import Front, solve_front
from tests.support.parameters import quickly
from tests.support.zoo import MODELS, assert_same_bits, run_steps

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def searches(cost_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Front]:
    """What was searched for since the test began, which starts with nothing on disk."""
    found: list[Front] = []

    def search(*args: Any, **keywords: Any) -> Front:
        found.append(solve_front(*args, **keywords))
        return found[-1]

    monkeypatch.setattr(plan_search, "kept", cache.kept)
    monkeypatch.setattr(plan_search, "solve_front", search)
    return found


def planned(budget: Any = 0.95, **options: Any) -> memplan.Plan:
    net, sample = MODELS["handmade"](0)
    return memplan.plan(net, sample, budget, **{"costs": "estimate", **options})


@pytest.mark.parametrize(
    "options", [{}, {"host_budget": "1GiB", "link": memplan.Link(1e9, 1e9)}, {"update": "backward"}], ids=str
)
def test_a_search_is_made_once_for_all_budgets(options: Any, searches: list[Front]) -> None:
    def plans() -> list[memplan.Plan]:
        net, sample = MODELS["handmade"](0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1) if "update" in options else None
        return [
            memplan.plan(net, sample, budget, costs="estimate", optimizer=optimizer, **options)
            for budget in (1.0, 0.95)
        ]

    first = plans()
    made = len(searches)
    assert made == (1 if "host_budget" not in options else 2)
    assert plans() == first
    assert len(searches) == made


def test_a_front_that_is_read_is_the_one_that_was_found(searches: list[Front]) -> None:
    planned()
    problem = dataclasses.replace(planned().problem, budget_bytes=None)
    (found,) = searches
    again = plan_search.kept_front(problem, memplan.generate_config(), lambda: pytest.fail("searched"))
    assert len(found.points) > 5
    assert (again.points, again.keep_all, again.bound) == (found.points, found.keep_all, found.bound)


def test_measured_costs_come_from_disk_too(searches: list[Front], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_costs, "agree", lambda times_s: True)  # though the machine may be busy
    first = planned(costs="measure")
    assert planned(costs="measure") == first
    assert len(searches) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"costs": memplan.Roofline(flops_per_s=1e9)}, {"accumulate": True}, {"in_flight": 2}, {"config": "rotor"},
        {"config": memplan.generate_config(effort=0.5)}, {"surroundings": memplan.Surroundings(held_bytes=1)},
    ],
    ids=["costs", "accumulate", "in flight", "methods", "effort", "surroundings"],
)  # fmt: skip
def test_other_settings_are_searched_for(options: Any, searches: list[Front]) -> None:
    planned()
    planned(**options)
    assert len(searches) == 2


def test_other_solvers_search_again(searches: list[Front], monkeypatch: pytest.MonkeyPatch) -> None:
    planned()
    monkeypatch.setattr(plan_search, "_digest_of_solvers", lambda: "others")
    planned()
    assert len(searches) == 2


def test_a_search_that_was_stopped_is_not_kept(searches: list[Front]) -> None:
    stopped = memplan.generate_config(timeout_s=0.0)
    assert planned(1.0, config=stopped).truncated
    assert planned(1.0, config=stopped).truncated
    assert len(searches) == 2


def test_a_budget_that_was_named_as_enough_stays_enough_with_other_costs(
    searches: list[Front], cost_cache: Path
) -> None:
    """Costs that are measured anew may lead a search to a larger floor."""
    floor_bytes = planned("min").peak_bytes
    front = searches[-1]

    def worse(problem: Any, config: Any) -> Front:
        found = solve_front(problem, config)
        return dataclasses.replace(found, points=found.points[len(found.points) // 2 :])

    plan = planned(1.0, costs=memplan.Roofline(flops_per_s=1e9))
    for file in cost_cache.glob("front-*"):
        file.unlink()
    found = plan_search.kept_front(
        plan.problem, memplan.generate_config(), lambda: worse(plan.problem, memplan.Config())
    )
    assert found.floor.peak_bytes == floor_bytes == front.floor.peak_bytes
    peaks, times = [p.peak_bytes for p in found.points], [p.time_s for p in found.points]
    assert peaks == sorted(peaks) and times == sorted(times, reverse=True)
    (file,) = cost_cache.glob("least-*")
    for damaged in (b"", b"no", file.read_bytes()[:-9]):
        file.write_bytes(damaged)
        assert planned("min").peak_bytes == floor_bytes
        assert planned("min", costs=memplan.Roofline(flops_per_s=1e9)).peak_bytes == floor_bytes


def _changed(change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    return lambda data: gzip.compress(json.dumps(change(json.loads(gzip.decompress(data)))).encode())


def _orders(change: Callable[[list[int]], Any]) -> Callable[[bytes], bytes]:
    return _changed(lambda front: front | {"points": [[name, change(order)] for name, order in front["points"]]})


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "a bit": lambda data: data[:-20] + bytes([data[-20] ^ 1]) + data[-19:],
    "text": lambda data: b"a front",
    "a list": _changed(lambda front: []),
    "nothing in it": _changed(lambda front: {}),
    "of another problem": _changed(lambda front: front | {"key": "0" * 64}),
    "no points": _changed(lambda front: front | {"points": []}),
    "no lines": _changed(lambda front: front | {"lines": [1]}),
    "reversed": _orders(lambda order: order[::-1]),
    "without the first op": _orders(lambda order: order[1:]),
    "without the last op": _orders(lambda order: order[:-1]),
    "an op too many": _orders(lambda order: [*order, order[-1] + 1]),
    "an op twice": _orders(lambda order: [*order, order[-1]]),
    "no boundary": _orders(lambda order: [op for op in order if op >= 0]),
    "below the boundary": _orders(lambda order: [-2 if op < 0 else op for op in order]),
    "words": _orders(lambda order: ["first"]),
    "fractions": _orders(lambda order: [op + 0.5 for op in order]),
    "lists": _orders(lambda order: [order]),
}


@pytest.mark.parametrize("damage", quickly(DAMAGE, *list(DAMAGE)[::2]))
def test_what_is_damaged_is_searched_for_again(damage: str, searches: list[Front], cost_cache: Path) -> None:
    first = planned()
    (file,) = cost_cache.glob("front-*")
    data = file.read_bytes()
    file.write_bytes(DAMAGE[damage](data))
    assert planned() == first
    assert len(searches) == 2
    assert file.read_bytes() == data


SECOND = """
import torch
import memplan
from memplan.config import PRESETS
from memplan.planning import plan_search
from tests.conftest import QUICK
from tests.support.zoo import MODELS, run_steps

def fail(*args):
    raise AssertionError("searched")

PRESETS["auto"] = QUICK
torch.set_num_threads({threads})
plan_search.solve_front = fail
net, sample = MODELS["handmade"](0)
memplan.apply(net, sample, 0.95)
torch.save((run_steps(net, sample, 2), memplan.plan_of(net).schedule), {file!r})
"""


def test_a_second_process_reads_what_the_first_has_found(
    searches: list[Front], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_costs, "agree", lambda times_s: True)  # though the machine may be busy
    net, sample = MODELS["handmade"](0)
    memplan.apply(net, sample, 0.95)
    plan, file = memplan.plan_of(net), tmp_path / "steps"
    assert isinstance(plan, memplan.Plan) and plan.recomputed
    source = SECOND.format(threads=torch.get_num_threads(), file=str(file))
    subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=True, timeout=300)
    second, schedule = torch.load(file, weights_only=False)
    assert schedule == plan.schedule
    assert_same_bits(run_steps(net, sample, 2), second)
