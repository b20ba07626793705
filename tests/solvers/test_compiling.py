"""memplan knows which kernels are compiled, and when one is being compiled."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numba
import pytest

from memplan.jit import is_on_disk, kernels, tell_of_compilation, watching_compilation
from memplan.problem.data import Problem
from memplan.solvers import Progress, solve_front
from memplan.solvers.front import front
from tests.support.random_graphs import llama_like


def fresh(module: str) -> None:
    """Compile a function that says that it comes from a module."""

    def one(x: int) -> int:
        return x + 1

    one.__module__ = module
    assert numba.njit(one)(1) == 2


def test_compilation_of_solvers_is_noticed() -> None:
    began: list[int] = []
    with watching_compilation(lambda: began.append(1)):
        fresh("memplan.solvers.made_up")
        assert len(began) == 1
        fresh("somebody.else")
    fresh("memplan.solvers.made_up")
    assert len(began) == 1


def test_a_search_tells_of_compilation_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(front, "_FrontSearch", Compiles)
    tell_of_compilation.cache_clear()
    for _ in range(2):
        solve_front(llama_like(1))
    (told,) = (record for record in caplog.records if record.name == "memplan")
    assert "compiling the solvers, once" in told.getMessage() and "`memplan warmup`" in told.getMessage()


class Compiles:
    """In place of a search."""

    def __init__(self, problem: Problem, config: object, tell: Progress) -> None:
        pass

    def run(self) -> None:
        fresh("memplan.solvers.made_up")


def test_a_kernel_is_on_disk_once_it_ran_from_the_present_source(tmp_path: Path) -> None:
    path = tmp_path / "made_up.py"
    path.write_text("import numba\n@numba.njit(cache=True)\ndef one(x):\n    return x + 1\n")
    first = loaded(path)
    assert not is_on_disk(first.one)
    first.one(1)
    assert is_on_disk(first.one) and is_on_disk(loaded(path).one)
    path.write_text(path.read_text().replace("x + 1", "x + 22"))
    assert not is_on_disk(loaded(path).one)


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernels_are_those_of_training_steps() -> None:
    names = {kernel.py_func.__module__ for kernel in kernels()}
    assert "memplan.solvers.orders.replay" in names and "memplan.solvers.offload.copies" in names
