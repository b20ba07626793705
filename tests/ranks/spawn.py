"""Ranks on this machine: one spawn for each world size runs all cells of that size, over gloo.

A cell is a function of no arguments that every rank runs, in a process group of the world. It gives None, or what is
wrong. Modules listed in `MODULES` have them in their `CELLS`. Run as a program, this file is one rank.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "tests.ranks.cells_ddp",
    "tests.ranks.cells_agreement",
    "tests.ranks.cells_zero3",
    "tests.ranks.cells_planning_alone",
    "tests.ranks.cells_deepspeed",
    "tests.ranks.cells_deepspeed_host",
    "tests.ranks.cells_deepspeed_loops",
    "tests.ranks.cells_fsdp_loops",
    "tests.ranks.cells_deepspeed_sections",
    "tests.ranks.cells_pipelines",
    "tests.ranks.cells_offload",
    "tests.ranks.cells_sharded",
    "tests.ranks.cells_accumulated",
    "tests.ranks.cells_torchtitan",
    "tests.ranks.cells_islands",
    "tests.ranks.cells_models",
    "tests.ranks.cells_fused",
)


class Cell(NamedTuple):
    """run: what each rank does. world: ranks that it takes. full: run by `make test-full` alone.

    needs: packages, some of a version ("torch>=2.13"), and programs. alone: takes a spawn of its own, for ranks end in
    it.
    """

    run: Callable[[], str | None]
    world: int = 2
    full: bool = False
    needs: tuple[str, ...] = ()
    alone: bool = False


Findings = list[dict[str, str | None]]  # by rank: what each cell found


@functools.cache
def cells() -> dict[str, Cell]:
    """All cells by name, which begins with that of their module."""
    found: dict[str, Cell] = {}
    for name in MODULES:
        table: Mapping[str, Cell] = importlib.import_module(name).CELLS
        found |= {f"{name.rpartition('cells_')[2]}: {cell}": value for cell, value in table.items()}
    return found


def run_ranks(names: Sequence[str], world: int, folder: Path, timeout_s: float) -> Findings:
    """Each rank's findings. A cell that a rank did not finish is missing there; "output" has what it printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    common |= {
        "MEMPLAN_CACHE_DIR": str(folder),
        "OMP_NUM_THREADS": "1",
        "LOCAL_WORLD_SIZE": str(world),
        "ACCELERATE_USE_CPU": "true",
    }
    (folder / "cells.json").write_text(json.dumps(list(names)))
    logs = [folder / f"output-{rank}.txt" for rank in range(world)]
    ranks = []
    for rank, log in enumerate(logs):
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-m", "tests.ranks.spawn", str(folder)]
        with log.open("w") as output:
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT))
    end = time.monotonic() + timeout_s
    try:
        for process in ranks:
            process.wait(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    findings: Findings = []
    for rank, log in enumerate(logs):
        lines = (folder / f"findings-{rank}.jsonl").read_text().splitlines() if _began(folder, rank) else []
        findings.append(dict(json.loads(line) for line in lines) | {"output": log.read_text()[-5000:]})
    return findings


def _began(folder: Path, rank: int) -> bool:
    return (folder / f"findings-{rank}.jsonl").exists()


def _be_a_rank(folder: Path) -> None:
    import torch

    from memplan.config import PRESETS
    from memplan.solvers.bounds import lower_bound
    from tests.conftest import QUICK, QUICK_BOUND
    from tests.support.plannings import searched_anew

    PRESETS["auto"] = QUICK
    for figure, value in QUICK_BOUND.items():
        setattr(lower_bound, figure, value)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    wanted: list[str] = json.loads((folder / "cells.json").read_text())
    table: dict[str, Any] = cells()
    if any("deepspeed" in table[name].needs for name in wanted):
        import deepspeed.ops

        # An all-reduce for inference, which no cell calls, would be compiled for a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with (folder / f"findings-{rank}.jsonl").open("w") as findings, searched_anew():
        for name in wanted:
            gc.collect()
            gc.freeze()  # what modules have made when they were imported, as in tests/conftest.py
            start = time.monotonic()
            try:
                found = table[name].run()
            except Exception:
                found = traceback.format_exc()
            print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
            findings.write(json.dumps([name, found]) + "\n")
            findings.flush()
            torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _be_a_rank(Path(sys.argv[1]))
