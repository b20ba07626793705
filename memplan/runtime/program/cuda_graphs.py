"""Planned steps that a caller captures in a CUDA graph (`torch.cuda.graph`), as any of PyTorch's work.

The graph has the step's kernels, recomputes included, in memory of its own, where the plan's peak holds. A replay runs
no Python: no check of the key, no hook.
"""

from __future__ import annotations

import torch

from memplan import torch_private as private
from memplan.problem.schedule import Offload, Prefetch, SaveRng, Schedule, Stay
from memplan.runtime.program.parameters import ParameterStore


def refuse_capture(schedule: Schedule, store: ParameterStore, device: torch.device) -> None:
    """Raise RuntimeError where a CUDA graph is captured that can't take a step, or would replay something else."""
    if not private.is_captured(device):
        return
    kinds = {type(step) for step in schedule}
    if store.gathers is not None:
        what = "gathers sharded parameters"
    elif store.updates is not None:
        what = "updates parameters while backward runs"
    elif kinds & {Offload, Prefetch, Stay}:
        what = "copies to and from host memory that other steps use, too"
    elif SaveRng in kinds:
        what = "runs random ops again, for which PyTorch puts back no generator meanwhile"
    else:
        return
    raise RuntimeError(
        f"memplan: a CUDA graph can't take this step, which {what}. Capture a step without that (a larger budget, no "
        "dropout), or train without a graph"
    )
