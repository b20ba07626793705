"""Configurations: presets, files, what is refused; and what a search does when it is stopped."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given

import memplan
from memplan.config import METHODS, PRESETS, Config, SearchFigures
from memplan.problem.data import Problem
from memplan.solvers import Progress, solve_front
from memplan.solvers.front.front import side_by_side
from tests.solvers.test_solvers import CALM
from tests.solvers.test_solvers import SMALL as SMALLER
from tests.support.configs import with_figures
from tests.support.random_graphs import encoder_decoder_like, llama_like, random_problems, unet_like

SMALL = with_figures(SMALLER, exact_nodes=5, exact_parts=3, flat_nodes=20, flat_parts=3)

pytestmark = pytest.mark.full_search


def small(preset: str) -> Config:
    return with_figures(memplan.generate_config(preset), **dataclasses.asdict(SMALL.figures))


@CALM
@given(random_problems())
def test_auto_is_never_worse_than_any_preset(problem: Problem) -> None:
    assert_best(problem)


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(encoder_decoder_like, marks=pytest.mark.slow),
        pytest.param(unet_like, marks=pytest.mark.slow),
        lambda: llama_like(2),
    ],
)
def test_auto_is_never_worse_on_shapes_of_real_models(build: object) -> None:
    assert_best(build())  # type: ignore[operator]


def assert_best(problem: Problem) -> None:
    fronts = {preset: solve_front(problem, small(preset)) for preset in PRESETS}
    for preset, front in fronts.items():
        for left, right in itertools.pairwise(front.points):
            assert left.peak_bytes < right.peak_bytes and left.time_s > right.time_s
        for point in front.points:
            best = fronts["auto"].best(point.peak_bytes)
            assert best is not None and best.time_s <= point.time_s, preset
            assert point.timeline.peak_bytes == point.peak_bytes
            assert point.timeline.time_s == pytest.approx(point.time_s)
    assert [p.order for p in fronts["noremat"].points] == [fronts["auto"].keep_all.order]
    for point in fronts["rockmate"].points:
        best = fronts["hiremate"].best(point.peak_bytes)
        assert best is not None and best.time_s <= point.time_s


def test_a_configuration_survives_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for preset in PRESETS:
        config = memplan.generate_config(preset, effort=0.5, points=7, timeout_s=1.5)
        memplan.save_config(config, path)
        assert memplan.load_config(path) == config
    path.write_text('{"format": "memplan.config", "version": 1, "points": 3}')
    assert memplan.load_config(path) == Config(points=3)
    earlier = {"format": "memplan.config", "version": 1, "points": 3, "grid": 9, "order_moves": 9}
    path.write_text(json.dumps(earlier))
    assert memplan.load_config(path) == Config(points=3)
    path.write_text(json.dumps(earlier | {"methods": ["textbook", "cuts"]}))
    assert memplan.load_config(path) == Config(("cuts",), points=3)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"gird": 3}, ValueError, "gird"),
        ({"format": "other"}, ValueError, "not a memplan configuration"),
        ({"version": 9}, ValueError, "version 9"),
        ({"methods": "rotor"}, TypeError, "list"),
        ({"methods": ["simplex"]}, ValueError, "simplex"),
        ({"points": -1}, ValueError, "points"),
        ({"points": 1.5}, TypeError, "points"),
        ({"points": True}, TypeError, "points"),
        ({"effort": 0}, ValueError, "effort"),
        ({"effort": "much"}, TypeError, "effort"),
        ({"polish": 1}, TypeError, "polish"),
        ({"timeout_s": -1}, ValueError, "timeout_s"),
    ],
)
def test_bad_files_are_refused_by_name(
    tmp_path: Path, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"format": "memplan.config", "version": 1} | changes))
    with pytest.raises(error, match=message):
        memplan.load_config(path)


def test_more_effort_finds_no_worse_plans() -> None:
    problem = unet_like(5)
    fronts = [solve_front(problem, dataclasses.replace(SMALL, effort=effort)) for effort in (0.3, 1, 3)]
    for less, more in itertools.pairwise(fronts):
        assert more.floor.peak_bytes <= less.floor.peak_bytes
        assert len(more.points) >= len(less.points) / 2
    assert len({tuple(point.order for point in front.points) for front in fronts}) > 1
    assert Config(effort=0.001).figures.cuts == 1 and Config().figures.cuts == 20


def test_bad_names_are_refused() -> None:
    with pytest.raises(ValueError, match="checkmat"):
        memplan.generate_config("checkmat")
    with pytest.raises(TypeError, match="gird"):
        memplan.generate_config("auto", gird=3)
    with pytest.raises(TypeError, match=r"grid.*it has methods, polish, effort"):
        memplan.generate_config("auto", grid=3)  # a figure, which goes with effort
    net = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="fastest"):
        memplan.apply(net, torch.ones(1, 2), 0.9, config="fastest")
    with pytest.raises(TypeError, match="config"):
        memplan.apply(net, torch.ones(1, 2), 0.9, config=3)  # type: ignore[arg-type]


def test_every_field_is_documented() -> None:
    for kind in (Config, SearchFigures):
        words = (kind.__doc__ or "").replace(",", " ").replace(":", " ").replace(".", " ").split()
        assert [f.name for f in dataclasses.fields(kind) if f.name not in words and not f.name.startswith("_")] == []
    assert all(f'"{name}"' in (Config.__doc__ or "") for name in METHODS)


def test_a_configuration_reaches_the_plan() -> None:
    net = torch.nn.Sequential(*(layer for _ in range(6) for layer in (torch.nn.Linear(32, 32), torch.nn.GELU())))
    sample = torch.randn(512, 32)
    plan = memplan.plan(net, sample, 0.8, config="rotor", costs="estimate")
    assert plan.solver == "rotor" and not plan.truncated
    everything = memplan.plan(net, sample, 1.0, config="noremat", costs="estimate")
    assert everything.solver == "keep all"
    with pytest.raises(memplan.BudgetInfeasible):
        memplan.plan(net, sample, 0.8, config="noremat", costs="estimate")
    model = memplan.apply(net, sample, 0.8, config=memplan.generate_config("rotor"), costs="estimate")
    planned = memplan.plan_of(model)
    assert planned is not None and planned.solver == "rotor"


def test_a_search_that_is_stopped_gives_the_best_so_far() -> None:
    problem = llama_like(2)
    whole = solve_front(problem, SMALL)
    assert not whole.truncated
    for stage in ("bounds", "cuts", "blocks", "polishing"):

        def stop(progress: Progress, stage: str = stage) -> None:
            if progress.stage == stage:
                raise KeyboardInterrupt

        front = solve_front(problem, SMALL, stop)
        assert front.truncated and front.points
        for point in front.points:
            assert point.timeline.peak_bytes == point.peak_bytes
            assert front.bound.time_s(point.peak_bytes) <= point.time_s * (1 + 1e-9)
    clocked = solve_front(problem, dataclasses.replace(SMALL, timeout_s=0.0))
    assert clocked.truncated and clocked.points


def test_progress_tells_the_gap_at_the_budget() -> None:
    problem = llama_like(4)
    budget = solve_front(problem, SMALL).keep_all.peak_bytes * 6 // 10
    told: list[Progress] = []
    solve_front(dataclasses.replace(problem, budget_bytes=budget), SMALL, told.append)
    gaps = [progress.gap for progress in told if progress.gap is not None]
    assert gaps and gaps[-1] < 0.1 and all(later <= earlier for earlier, later in itertools.pairwise(gaps))
    assert {progress.stage for progress in told} == {"bounds", *METHODS, "polishing"}
    assert all(0 <= progress.done <= 1 for progress in told)


@pytest.mark.parametrize("cores", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_plans_are_the_same_on_any_number_of_threads(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = encoder_decoder_like()
    first = solve_front(problem, SMALL)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
    second = solve_front(problem, SMALL)
    assert [p.order for p in first.points] == [p.order for p in second.points]


def test_searches_side_by_side() -> None:
    found: list[list[int]] = [[], []]
    ended: list[int] = []
    side_by_side([iter(range(3)), iter(range(2))], found, time.monotonic() + 60, ended.append)
    assert found == [[0, 1, 2], [0, 1]] and sorted(ended) == [0, 1]

    def fails() -> Iterator[int]:
        yield 7
        raise ArithmeticError("of a search")

    found = [[], []]
    with pytest.raises(ArithmeticError, match="of a search"):
        side_by_side([fails(), itertools.count()], found, time.monotonic() + 60, ended.append)
    assert found[0] == [7]
    with pytest.raises(TimeoutError):
        side_by_side([itertools.count()], [[]], time.monotonic(), ended.append)
