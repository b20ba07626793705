"""`memplan doctor`, `warmup`, `clear-costs` and `demo`: what they say of this machine, and do on it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from memplan import jit
from memplan.command_line import doctor
from tests.command_line.conftest import Run


def test_what_the_doctor_finds(run: Run, cost_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPLAN_LOG", "info")
    (cost_cache / "costs-x.json").write_text("0123")
    facts = run("doctor", "--json").facts
    assert facts["versions"]["torch"] == importlib.metadata.version("torch")
    assert facts["caches"]["costs"] == f"4 B in {cost_cache}"
    assert facts["environment"]["MEMPLAN_LOG"] == "info"
    assert {"cpu"} <= facts["devices"].keys() and {"solvers", "fused, cpu"} <= facts["compilers"].keys()
    assert run("doctor").status == 0


def test_what_the_doctor_mends(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str, real: object = importlib.metadata.version) -> str:
        if name in ("networkx", "peft"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)  # type: ignore[operator,no-any-return]

    (tmp_path / "file").touch()
    monkeypatch.setenv("MEMPLAN_CACHE_DIR", str(tmp_path / "file" / "folder"))
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(jit, "is_on_disk", lambda kernel: False)
    remedies = run("doctor", "--json").facts["remedies"]
    assert remedies["networkx"] == "pip install networkx" and "peft" not in remedies
    assert "MEMPLAN_CACHE_DIR" in remedies["costs"] and remedies["solvers"] == "memplan warmup"


def test_a_warm_up_that_has_nothing_to_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "is_on_disk", lambda kernel: True)
    monkeypatch.setattr(doctor, "_plan_something", lambda: pytest.fail("planned"))
    assert "there is nothing to do" in run("warmup").out
    assert run("warmup", "--json").facts["compiled"] == 0


def test_a_warm_up_counts_what_is_compiled(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def plans() -> None:
        def one(x: int) -> int:
            return x + 1

        one.__module__ = "memplan.solvers.made_up"
        numba.njit(one)(1)

    monkeypatch.setattr(jit, "is_on_disk", lambda kernel: False)
    monkeypatch.setattr(doctor, "_plan_something", plans)
    facts = run("warmup", "--json").facts
    assert facts["compiled"] == 1 and facts["solvers"] > 70


def test_costs_are_forgotten(run: Run, cost_cache: Path) -> None:
    (cost_cache / "costs-x.json").touch()
    assert run("clear-costs", "--json").facts == {"removed": 1, "folder": str(cost_cache)}
    assert not list(cost_cache.iterdir())


def test_a_demo_without_transformers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = run("demo")
    assert said.status == 1 and "pip install transformers" in said.err


def child(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    command = [sys.executable, "-m", "memplan", *arguments]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=900)


def test_help_needs_no_torch() -> None:
    script = "import sys\nfrom memplan.command_line.commands import main\ntry: main(['-h'])\nexcept SystemExit: pass\n"
    script += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "False"
    assert "exit status: 0 done" in done.stdout.replace("\n", " ")


@pytest.mark.slow
def test_the_demo() -> None:
    pytest.importorskip("transformers")
    done = child("demo", "--json")
    facts = json.loads(done.stdout)
    assert done.returncode == 0 and facts["same_losses"] and facts["fits"]
    assert [run["name"] for run in facts["runs"]] == ["unplanned", "half", "floor"]


@pytest.mark.slow
def test_compilation_is_told_of_and_done_ahead(tmp_path: Path) -> None:
    """The first search says why it takes so long; after a warm-up no search compiles anything."""
    kept = {"NUMBA_CACHE_DIR": str(tmp_path / "kernels"), "MEMPLAN_LOG": ""}
    path = tmp_path / "small.py"
    path.write_text("import torch\ndef build():\n    return torch.nn.Linear(8, 8), torch.zeros(8, 8)\n")
    told = child("plan", f"{path}:build", **kept).stderr
    assert told.count("memplan: compiling the solvers, once") == 1
    first, second = (json.loads(child("warmup", "--json", **kept).stdout) for _ in range(2))
    assert first["compiled"] > 0 == second["compiled"]
    assert "compiling" not in child("plan", f"{path}:build", "--host-budget", "1GiB", "--link", "1e9", **kept).stderr
