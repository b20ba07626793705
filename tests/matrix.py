"""Runs every cell of tests/ranks/cells_*.py once and writes what it found as a table.

python -m tests.matrix docs/distributed_matrix.md [module or cell ...]

With names of modules (without "cells_"), or parts of cells' names that have spaces in them, only those cells run, and
the table keeps what it has of others.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch

from tests.ranks.spawn import Cell, cells, run_ranks
from tests.ranks.test_distributed import missing

TIMEOUT_S = 3000


def batches(words: list[str]) -> list[list[str]]:
    """Names of cells that share a spawn: those of one module and world size. Cells in which ranks end are tests."""
    shared: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name, cell in cells().items():
        module = name.partition(":")[0]
        if not cell.alone and (not words or any(word == module or (" " in word and word in name) for word in words)):
            shared[module, cell.world].append(name)
    return list(shared.values())


def known(path: Path) -> dict[str, str]:
    """Rows of a table that is there already, by name, of cells that there still are."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("|")}
    return {name: rows[name] for name in cells() if name in rows}


def row(name: str, cell: Cell, found: list[dict[str, str | None]]) -> str:
    unfinished = [rank for rank, table in enumerate(found) if name not in table]
    wrong = [f"rank {rank}: {table[name]}" for rank, table in enumerate(found) if table.get(name)]
    result = f"ranks {unfinished} did not finish" if unfinished else "; ".join(wrong) or "as it should be"
    return f"| {name} | {cell.world} | {result.strip().splitlines()[-1]} |"


def main(path: Path, words: list[str]) -> int:
    """words: what to run; empty is all of them."""
    rows = known(path) if words else {}
    for names in batches(words):
        table = {name: cells()[name] for name in names}
        absent = sorted({thing for cell in table.values() for thing in missing(cell)})
        if absent:
            rows |= {n: f"| {n} | {cell.world} | not run: needs {', '.join(absent)} |" for n, cell in table.items()}
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(names, table[names[0]].world, Path(folder), TIMEOUT_S)
        rows |= {name: row(name, cell, found) for name, cell in table.items()}
        path.write_text(
            "# Cells of several ranks\n\n"
            f"`python -m tests.matrix {path}`: {len(rows)} of {len(cells())} cells, torch {torch.__version__}, gloo. A "
            "cell compares a planned run with the same run without memplan bit for bit, or checks what its name says."
            f"{' Rows are of several runs: the last one was of a part of the cells.' if words else ''}\n\n"
            "| cell | ranks | found |\n|---|---|---|\n"
            + "\n".join(rows[name] for name in cells() if name in rows)
            + "\n"
        )
        print(f"{names[0].partition(':')[0]}, {table[names[0]].world} ranks: done", flush=True)
    return 0 if all(r.endswith("| as it should be |") for r in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
