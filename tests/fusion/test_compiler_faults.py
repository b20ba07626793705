"""Compilers that fail, crash or hang, and caches that are gone: an eager op or a clear error, never a broken model."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import nn

import memplan
from memplan.fusion import fuse_step, group_program
from memplan.fusion.fuse_step import GroupCompiler
from tests.support.zoo import assert_same_bits, run_steps

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of Inductor
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++"),
]
NO_LIMIT = 1 << 40


def net_and_sample() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 16)), torch.randn(32, 16)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is compiled yet, in this process or on disk. Gives the folder of the cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(fuse_step, "_process_compiler", GroupCompiler())
    return tmp_path / "cache"


@contextlib.contextmanager
def compiler_that(does: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A C++ compiler that tells its version, and then does something else than to compile."""
    script = folder / "g++"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*|*-dumpversion*|*-dumpmachine*) exec g++ "$@";; esac\n{does}\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with torch._inductor.config.patch({"cpp.cxx": (None, str(script))}):
        yield


@pytest.mark.parametrize(
    ("does", "told"),
    [
        pytest.param("exit 1", "CppCompileError", id="fails"),
        pytest.param("kill -9 $PPID", "crashed", id="takes its parent with it", marks=pytest.mark.slow),
        pytest.param("sleep 600", "took too long", id="hangs", marks=pytest.mark.slow),
    ],
)
def test_ops_run_as_they_are(
    does: str, told: str, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group_program, "PATIENCE_S", 40.0 if does.startswith("sleep") else 120.0)
    net, sample = net_and_sample()
    with compiler_that(does, tmp_path, monkeypatch):
        planned = memplan.apply(copy.deepcopy(net), sample, NO_LIMIT, kernels="fused", costs="estimate")
    assert memplan.plan_of(planned).exact == "eager"  # type: ignore[union-attr]
    assert_same_bits(run_steps(net, sample), run_steps(planned, sample))
    lines = [r.getMessage() for r in caplog.records if "run as they are" in r.getMessage()]
    assert lines
    assert all(told in line for line in lines)


@pytest.mark.slow
def test_a_cache_that_can_not_be_written(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.write_text("a file where the folder would be")
    net, sample = net_and_sample()
    planned = memplan.apply(copy.deepcopy(net), sample, NO_LIMIT, kernels="fused", costs="estimate")
    assert memplan.plan_of(planned).exact == "eager"  # type: ignore[union-attr]
    assert "run as they are" in caplog.text
    assert_same_bits(run_steps(net, sample), run_steps(planned, sample))


SCRIPT = """
import sys, torch, memplan
from tests.fusion.test_compiler_faults import NO_LIMIT, net_and_sample
from tests.support.zoo import run_steps
net, sample = net_and_sample()
plan = memplan.Plan.load(sys.argv[2]) if len(sys.argv) > 2 else None
budget = None if plan else NO_LIMIT
if plan:
    memplan.apply(net, sample, plan=plan)
else:
    memplan.apply(net, sample, NO_LIMIT, kernels="fused", costs="estimate")
assert memplan.plan_of(net).exact == "program"
torch.save(run_steps(net, sample), sys.argv[1])
"""


def results_elsewhere(path: Path, cache: Path, *more: str) -> Any:
    """What a training of the same model leaves in another process."""
    command = [sys.executable, "-c", SCRIPT, str(path), *more]
    threads = str(torch.get_num_threads())  # which are part of the program
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": threads}
    subprocess.run(command, env=environment, check=True, timeout=500)
    return torch.load(path, weights_only=False)


@pytest.mark.slow
def test_groups_that_draw_from_seeds_are_compiled_by_other_processes(
    fresh: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """These load Inductor's generator before they look at its ops."""
    net, sample = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Tanh(), nn.Linear(64, 16)), torch.randn(32, 16)
    memplan.apply(net, sample, NO_LIMIT, kernels="fused", random="counter", costs="estimate")
    assert memplan.plan_of(net).random == "counter"
    assert "can't be compiled" not in caplog.text


@pytest.mark.slow
def test_two_processes_compile_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda name: results_elsewhere(tmp_path / name, tmp_path / "cache"), ("a", "b")))
    assert_same_bits(*found)


@pytest.mark.slow
def test_caches_are_deleted_between_save_and_load(fresh: Path, tmp_path: Path) -> None:
    net, sample = net_and_sample()
    plan = memplan.plan(net, sample, NO_LIMIT, kernels="fused")
    plan.save(tmp_path / "plan.json")
    memplan.apply(net, sample, plan=plan)
    here = run_steps(net, sample)
    shutil.rmtree(fresh)
    assert_same_bits(here, results_elsewhere(tmp_path / "result", fresh, str(tmp_path / "plan.json")))


@pytest.mark.slow
def test_a_plan_for_another_number_of_threads_says_so() -> None:
    net, sample = net_and_sample()
    plan = memplan.plan(net, sample, NO_LIMIT, kernels="fused")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(memplan.PlanMismatch, match="another number of threads"):
            memplan.apply(net, sample, plan=plan)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("damage", ["not JSON", '{"0": 99}', '{"0": 0}', "{}"])
@pytest.mark.slow
def test_damaged_records(damage: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, sample = net_and_sample()
    planned = memplan.apply(copy.deepcopy(net), sample, NO_LIMIT, kernels="fused", costs="estimate")
    expected, exact = run_steps(planned, sample), memplan.plan_of(planned).exact  # type: ignore[union-attr]
    for record in (fresh / "memplan").glob("*.json"):
        record.write_text(damage)
    monkeypatch.setattr(fuse_step, "_process_compiler", GroupCompiler())
    again = memplan.apply(copy.deepcopy(net), sample, NO_LIMIT, kernels="fused", costs="estimate")
    assert memplan.plan_of(again).exact == exact == "program"  # type: ignore[union-attr]
    assert_same_bits(expected, run_steps(again, sample))
