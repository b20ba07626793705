"""What each stage of fusing brings, and its figures: all kept and floor, by dry runs, which compile nothing.

    python -m benchmarks.fusion_ablation [--models gpt2 llama ...]

Peaks are activations in MB, with all kept and at the floor; seconds are a roofline's for the step with all kept, over
those of the step that is not fused.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import memplan
from benchmarks.fused import BUILDS
from memplan.fusion import fuse_step, groups

VARIANTS: dict[str, dict[tuple[Any, str], Any]] = {
    "as it is": {},
    "without rematerialising": {(fuse_step, "rematerialise"): lambda step, units: None},
    "without writing in place": {(fuse_step, "donate"): lambda step, units: None},
    "reach 0": {(groups, "REACH"): 0},
    "reach 1": {(groups, "REACH"): 1},
    "reach 8": {(groups, "REACH"): 8},
    "40 nodes": {(groups, "MOST_NODES"): 40},
    "400 nodes": {(groups, "MOST_NODES"): 400},
    "saves under a quarter": {(fuse_step, "_SMALL"): 4},
    "saves under a 16th": {(fuse_step, "_SMALL"): 16},
    "writes over 64 KiB and more": {(groups, "_LEAST_BYTES"): 1 << 16},
}


@contextlib.contextmanager
def changed(variant: dict[tuple[Any, str], Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for (module, name), value in variant.items():
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=BUILDS, default=["gpt2", "llama", "bert", "t5", "vit"])
    for name in parser.parse_args().models:
        model, sample = BUILDS[name]()
        model.train()
        eager = memplan.explore(model, sample, costs="estimate")
        print(f"{name}: eager {_shown(eager, eager[-1].time_s)}", flush=True)
        for label, variant in VARIANTS.items():
            with changed(variant):
                points = memplan.explore(model, sample, costs="estimate", kernels="fused")
            print(f"    {label:30s} {_shown(points, eager[-1].time_s)}", flush=True)


def _shown(points: tuple[memplan.Plan, ...], eager_s: float) -> str:
    low, high = (point.activation_peak_bytes / 1e6 for point in (points[0], points[-1]))
    ops = len(points[-1].problem.graph.ops)
    return f"{high:7.2f} MB, floor {low:6.2f} MB, {points[-1].time_s / eager_s:.3f} of eager's time, {ops} ops"


if __name__ == "__main__":
    main()
