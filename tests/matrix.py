"""Runs every cell of tests/cells_*.py once and writes what it found as a table.

python -m tests.matrix docs/distributed_matrix.md
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch

from tests.ranks import Cell, cells, run_ranks
from tests.test_distributed import missing

TIMEOUT_S = 3000


def batches() -> list[list[str]]:
    """Names of cells that share a spawn: those of one module and world size. Cells in which ranks end are tests."""
    shared: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name, cell in cells().items():
        if not cell.alone:
            shared[name.partition(":")[0], cell.world].append(name)
    return list(shared.values())


def row(name: str, cell: Cell, found: list[dict[str, str | None]]) -> str:
    unfinished = [rank for rank, table in enumerate(found) if name not in table]
    wrong = [f"rank {rank}: {table[name]}" for rank, table in enumerate(found) if table.get(name)]
    result = f"ranks {unfinished} did not finish" if unfinished else "; ".join(wrong) or "as it should be"
    return f"| {name} | {cell.world} | {result.strip().splitlines()[-1]} |"


def main(path: Path, modules: list[str]) -> int:
    """modules: names of cells' modules, without "cells_"; empty is all of them."""
    start_s, rows = time.monotonic(), []
    for names in batches():
        if modules and names[0].partition(":")[0] not in modules:
            continue
        table = {name: cells()[name] for name in names}
        absent = sorted({thing for cell in table.values() for thing in missing(cell)})
        if absent:
            rows += [f"| {name} | {cell.world} | not run: needs {', '.join(absent)} |" for name, cell in table.items()]
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(names, table[names[0]].world, Path(folder), TIMEOUT_S)
        rows += [row(name, cell, found) for name, cell in table.items()]
        command = " ".join(["python -m tests.matrix", str(path), *modules])
        path.write_text(
            "# Cells of several ranks\n\n"
            f"`{command}`: {len(rows)} cells, torch {torch.__version__}, gloo, "
            f"{time.monotonic() - start_s:.0f} s. A cell compares a planned run with the same run without "
            "memplan bit for bit, or checks what its name says.\n\n| cell | ranks | found |\n|---|---|---|\n"
            + "\n".join(rows)
            + "\n"
        )
        print(f"{names[0].partition(':')[0]}, {table[names[0]].world} ranks: done", flush=True)
    return 0 if all(r.endswith("| as it should be |") for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
