"""`memplan warmup` and `memplan clear-costs`: what is kept on disk from one process to the next."""

from __future__ import annotations

import argparse
import time

import memplan
from memplan.command_line.outcomes import Commands, Outcome
from memplan.logs import quiet, show_count


def add_warmup(commands: Commands) -> None:
    command = commands.add_parser("warmup", help="compile the solvers ahead, so that the first plan does not wait")
    command.set_defaults(run=_warmup)


def add_clear_costs(commands: Commands) -> None:
    commands.add_parser(
        "clear-costs", help="forget what was measured of ops and models, and the plans made of it; plans measure anew"
    ).set_defaults(run=_clear_costs)


def _warmup(given: argparse.Namespace) -> Outcome:
    from memplan.jit import is_on_disk, kernels, watching_compilation

    began_s, everything = time.monotonic(), kernels()
    missing = [kernel for kernel in everything if not is_on_disk(kernel)]
    if not missing:
        text = f"memplan: the {len(everything)} solvers are compiled already; there is nothing to do"
        return Outcome(text, {"compiled": 0, "solvers": len(everything), "time_s": 0.0})
    done = 0

    def began() -> None:
        nonlocal done
        done += 1
        show_count("compiling the solvers", min(done, len(missing)), len(missing))

    with quiet(), watching_compilation(began):
        _plan_something()
    time_s = time.monotonic() - began_s
    return Outcome(
        f"memplan: {done} solvers compiled in {time_s:.0f} s; plans no longer wait for that",
        {"compiled": done, "solvers": len(everything), "time_s": time_s},
    )


def _plan_something() -> None:
    """Plan a small step, with copies and without, and pack blocks that need a search, which calls every solver."""
    import torch
    from torch import nn

    from memplan.problem.packing import LiveRange, pack_slab

    pack_slab([LiveRange(2, 2, 4), LiveRange(2, 2, 3), LiveRange(4, 3, 5), LiveRange(3, 1, 3)])
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)]
        model = nn.Sequential(*blocks).train()
    sample, link = torch.zeros(512, 64), memplan.Link(25e9, 25e9)
    memplan.plan(model, sample, 0.8, device="cpu", costs="estimate")
    memplan.plan(model, sample, 0.5, device="cpu", costs="estimate", host_budget="1GiB", link=link)


def _clear_costs(given: argparse.Namespace) -> Outcome:
    from memplan.cache import cache_dir, forget

    count, place = forget(), cache_dir()
    text = f"memplan: {count} files of measured costs and plans removed from {place}"
    return Outcome(text, {"removed": count, "folder": str(place)})
