"""What is asked of planning in parts: a step, its budget, and what is around it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import nn

from memplan.capture.analysis.traced import Traced
from memplan.capture.trace.call import Call, Forward
from memplan.problem.data import Problem
from memplan.solvers import Front, solve_front

# (bytes of the unplanned peak, resident bytes, bytes of the least peak) -> the budget in bytes
LimitOf = Callable[[int, int, int], int]
Fuse = Callable[[Traced], Traced]


@dataclass(frozen=True, slots=True)
class BesideParts:
    """Bytes on the device beside what the step itself makes.

    - held_bytes: throughout (optimizer state, gradients of earlier micro-batches).
    - update_bytes: what the optimizer's step allocates for a while, after backward.
    """

    held_bytes: int = 0
    update_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PartsRequest:
    """A step to be planned in parts.

    - forward: what runs the model, with its arguments in `call`.
    - limit: gives the budget from the unplanned peak, the resident bytes and the least peak, with what is held beside.
    - reason: why the whole can't be captured.
    - costs: "measure" or "estimate".
    - solve: how parts are planned.
    - decides: parts may branch on what they compute; where a call takes another branch than on the sample, it is
      recomputed as a whole.
    - unsteady: values that change from step to step; no part may depend on them.
    - device: where parts run; None: where those that can be captured do.
    - beside: gives what is held beside the step on a device; asked once a first step has run.
    - fuse: turns a captured part into one over fused groups. Such parts always run as their programs, for other ways
      would give eager's bits. None: kernels are eager's.
    """

    model: nn.Module
    forward: Forward
    call: Call
    limit: LimitOf
    reason: str = ""
    costs: str = "measure"
    solve: Callable[[Problem], Front] = solve_front
    decides: bool = False
    unsteady: Collection[str] = ()
    device: torch.device | None = None
    beside: Callable[[torch.device | None], BesideParts] = lambda device: BesideParts()
    fuse: Fuse | None = None
