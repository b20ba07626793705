"""Planned training on several gloo ranks is the plain distributed training, bit for bit: the cells beside this file."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from packaging.version import Version

from tests.ranks.spawn import Cell, Findings, cells, run_ranks

TIMEOUT_S = {False: 1500, True: 5000}  # of all cells of one world size; True: with those of the full matrix


def parameters() -> list[object]:
    """One for each cell. All run in one test process (`--dist loadfile`), where one spawn serves a world size."""
    found = []
    for name, cell in cells().items():
        if cell.alone:
            continue
        marks = [pytest.mark.slow] if cell.full else []
        marks += [pytest.mark.deepspeed] if "deepspeed" in cell.needs else []
        found.append(pytest.param(name, id=name, marks=marks))
    return found


@functools.cache
def findings(world: int, full: bool) -> Findings:
    together = {n: cell for n, cell in cells().items() if not cell.alone and not missing(cell)}
    names = [n for n, cell in together.items() if (cell.world, cell.full) == (world, full)]
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(names, world, Path(folder), TIMEOUT_S[full])


def missing(cell: Cell) -> list[str]:
    """Packages and programs that the cell needs and that are not there, or too old."""
    return [need for need in cell.needs if not _there(*need.split(">="))]


def _there(name: str, least: str = "") -> bool:
    if least:
        return Version(importlib.metadata.version(name)) >= Version(least)
    return importlib.util.find_spec(name) is not None or shutil.which(name) is not None


@pytest.mark.parametrize("name", parameters())
def test_cell(name: str) -> None:
    cell = cells()[name]
    if missing(cell):
        pytest.skip(f"needs {', '.join(missing(cell))}")
    found = findings(cell.world, cell.full)
    unfinished = [rank for rank, table in enumerate(found) if name not in table]
    texts = "\n".join(f"rank {rank}:{os.linesep}{found[rank]['output']}" for rank in unfinished)
    assert not unfinished, f"ranks {unfinished} did not finish. {texts}"
    assert [table[name] for table in found] == [None] * cell.world
