"""What is asked of planning in parts: a step, its budget, and what is around it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from memplan.capture.analysis.traced import Traced
from memplan.capture.shards import Shards
from memplan.capture.trace.call import Call, Forward
from memplan.problem.data import Problem
from memplan.solvers import Front, solve_front

# (bytes of the unplanned peak, resident bytes, bytes of the least peak) -> the budget in bytes
LimitOf = Callable[[int, int, int], int]
Fuse = Callable[[Traced], Traced]


@dataclass(frozen=True, slots=True)
class BesideParts:
    """Bytes on the device beside what the step itself makes.

    - held_bytes: throughout (optimizer state, gradients of earlier micro-batches, gathered parameters).
    - update_bytes: what the optimizer's step allocates for a while, after backward.
    """

    held_bytes: int = 0
    update_bytes: int = 0


@dataclass(frozen=True, slots=True)
class AroundParts:
    """What else takes part in the step while it is rehearsed: by default nothing.

    - shards: whatever has sharded the parameters, gathers them around each pass, and takes their gradients.
    - meet: a barrier for ranks that rehearse together. With it, all of them run equally many steps.
    """

    shards: Shards | None = None
    meet: Callable[[], None] | None = None

    @property
    def ignored(self) -> Collection[str]:
        """Attributes of modules that change without changing what forward computes."""
        return () if self.shards is None else self.shards.attributes

    def wait(self) -> None:
        """Wait for the other ranks that rehearse together: each may have worked by itself for long."""
        if self.meet is not None:
            self.meet()


@dataclass(frozen=True, slots=True)
class PartsRequest:
    """A step to be planned in parts.

    - forward: what runs the model, with its arguments in `call`.
    - limit: gives the budget from the unplanned peak, the resident bytes and the least peak, with what is held beside.
    - reason: why the whole can't be captured.
    - blocks: what to plan, each called once in a forward; None looks for what can be captured.
    - costs: "measure" or "estimate".
    - solve: how parts are planned.
    - decides: parts may branch on what they compute; where a call takes another branch than on the sample, it is
      recomputed as a whole.
    - unsteady: values that change from step to step; no part may depend on them.
    - device: where parts run; None: where those that can be captured do.
    - beside: gives what is held beside the step on a device; asked once a first step has run.
    - around: what else takes part in the step.
    - fuse: turns a captured part into one over fused groups. Such parts always run as their programs, for other ways
      would give eager's bits. None: kernels are eager's.
    """

    model: nn.Module
    forward: Forward
    call: Call
    limit: LimitOf
    reason: str = ""
    blocks: Sequence[nn.Module] | None = None
    costs: str = "measure"
    solve: Callable[[Problem], Front] = solve_front
    decides: bool = False
    unsteady: Collection[str] = ()
    device: torch.device | None = None
    beside: Callable[[torch.device | None], BesideParts] = lambda device: BesideParts()
    around: AroundParts = AroundParts()
    fuse: Fuse | None = None
