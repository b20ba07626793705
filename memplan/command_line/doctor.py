"""`memplan doctor`: what memplan finds on this machine, and what is missing; `warmup`; `clear-costs`."""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import os
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import memplan
from memplan.command_line.outcomes import Commands, Outcome
from memplan.logs import quiet, show_count
from memplan.units import format_bytes

_NEEDED = ("memplan", "torch", "numpy", "numba", "networkx")
_EXTRAS = (
    "transformers", "diffusers", "accelerate", "peft", "trl", "bitsandbytes", "deepspeed", "pytorch-lightning",
    "triton",
)  # fmt: skip
_ENVIRONMENT = ("MEMPLAN_", "NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "CXX")


@dataclass(frozen=True, slots=True)
class Found:
    """One line of the page. remedy: what mends it, where something is missing."""

    group: str
    name: str
    value: str
    remedy: str = ""


def add_doctor(commands: Commands) -> None:
    command = commands.add_parser("doctor", help="versions, devices, compilers and caches; what is missing")
    command.set_defaults(run=_doctor)


def _doctor(given: argparse.Namespace) -> Outcome:
    import torch

    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    found = [*_versions(), *_devices(devices), *_kernels(devices), *_caches()]
    found += [Found("environment", n, v) for n, v in sorted(os.environ.items()) if n.startswith(_ENVIRONMENT)]
    lines, facts = list[str](), dict[str, dict[str, str]]()
    for group, ones in itertools.groupby(found, key=lambda one: one.group):
        facts[group] = {one.name: one.value for one in ones}
        lines += [group, *(f"  {name:17} {value}" for name, value in facts[group].items()), ""]
    remedies = [f"  {one.name}: {one.remedy}" for one in found if one.remedy]
    lines += ["what to do", *remedies] if remedies else ["nothing is missing"]
    facts["remedies"] = {one.name: one.remedy for one in found if one.remedy}
    return Outcome("\n".join(lines), facts)


def _versions() -> Iterable[Found]:
    yield Found("versions", "python", platform.python_version())
    for name in (*_NEEDED, *_EXTRAS):
        try:
            yield Found("versions", name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Found("versions", name, "not installed", f"pip install {name}" if name in _NEEDED else "")


def _devices(names: Sequence[str]) -> Iterable[Found]:
    import torch

    from memplan.planning.limits import automatic_bytes

    for device in names:
        room = f"{format_bytes(automatic_bytes(torch.device(device)))} is the budget where none is given"
        name = platform.machine() if device == "cpu" else torch.cuda.get_device_name(device)
        yield Found("devices", device, f"{name}; {room}")
    if not torch.cuda.is_available():
        yield Found("devices", "cuda", "PyTorch finds no GPU; `memplan plan --gpu NAME` plans for one")


def _kernels(devices: Sequence[str]) -> Iterable[Found]:
    import torch

    from memplan import torch_private as private
    from memplan.jit import is_on_disk, kernels

    everything = kernels()
    ready = sum(is_on_disk(kernel) for kernel in everything)
    remedy = "" if ready == len(everything) else "memplan warmup"
    yield Found("compilers", "solvers", f"{ready} of {len(everything)} are compiled", remedy)
    for device in devices:
        missing = private.missing_compiler(torch.device(device))
        value = f"none: kernels='fused' needs {missing}" if missing else "kernels='fused' can be compiled"
        yield Found("compilers", f"fused, {device}", value, missing)


def _caches() -> Iterable[Found]:
    from memplan import torch_private as private
    from memplan.cache import cache_dir
    from memplan.jit import kernels

    solvers = {Path(kernel.stats.cache_path) for kernel in kernels() if kernel.stats.cache_path}
    common = Path(os.path.commonpath(solvers)) if solvers else None
    places = (
        ("costs", "MEMPLAN_CACHE_DIR", cache_dir(), cache_dir().glob("*.json")),
        ("solvers", "NUMBA_CACHE_DIR", common, (f for place in solvers for f in place.glob("*.nb[ic]"))),
        ("fused kernels", "TORCHINDUCTOR_CACHE_DIR", Path(private.inductor_cache_dir()), None),
    )
    for name, variable, place, files in places:
        remedy = f"set {variable} to a folder that can be written"
        if place is None:
            yield Found("caches", name, "there is no folder for them", remedy)
            continue
        listed = place.rglob("*") if files is None else files
        size_bytes = sum(file.stat().st_size for file in listed if file.is_file())
        there = next(folder for folder in (place, *place.parents) if folder.exists())  # in which it is or can be made
        writable = there.is_dir() and os.access(there, os.W_OK)
        value = f"{format_bytes(size_bytes)} in {place}{'' if writable else ', read-only'}"
        yield Found("caches", name, value, "" if writable else remedy)


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
