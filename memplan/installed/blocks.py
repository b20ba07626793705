"""Plan some blocks of a model, each by itself, so that the whole step fits a budget; the rest runs as it is.

This is for models that can't be one graph, because something happens between their blocks: an engine gathers the
parameters of each block before it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from memplan.capture.capture import refuse_without_data
from memplan.capture.key import ArgumentsKey
from memplan.capture.ops.sizes import Varying
from memplan.capture.shards import Shards
from memplan.capture.trace.call import Call, CallReader, Forward, Sample
from memplan.config import ConfigLike
from memplan.costs.libraries import most_library_bytes
from memplan.costs.optimizer import optimizer_needs
from memplan.errors import MemplanError
from memplan.fusion.fuse_step import fuse_step
from memplan.installed.planned_forward import PlannedForward, planned_forward
from memplan.logs import log
from memplan.planning.parts.plan_parts import PlannedParts, plan_parts
from memplan.planning.parts.request import AroundParts, BesideParts, PartsRequest
from memplan.planning.planner import Planner
from memplan.planning.settings import Kernels, Settings
from memplan.plans.partial_plan import PartialPlan
from memplan.problem.budgets import BudgetLike, budget_bytes_of
from memplan.problem.data import Roofline
from memplan.runtime.parts.part_step import PartStep
from memplan.runtime.parts.recompute import RecomputedStep
from memplan.runtime.program.collectives import GRADIENT, Collectives
from memplan.runtime.program.step import PlannedStep, WholeStep
from memplan.runtime.ranks.agreement import Agreement, Share
from memplan.solvers.parts.saved import solve_saved
from memplan.torch_private import part_here
from memplan.units import format_bytes


def apply_blocks(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    sample: Sample,
    budget: BudgetLike,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: bool = False,
    costs: Literal["measure", "estimate"] = "measure",
    config: ConfigLike = None,
    kernels: Kernels = "eager",
    reserved_bytes: Callable[[], int] = lambda: 0,
    group: torch.distributed.ProcessGroup | None = None,
    shards: Shards | None = None,
) -> PartialPlan:
    """Plan blocks of a model in place, so that its whole step fits a budget. Outputs and gradients stay the same bits.

    - blocks: submodules of `model`, each called once in a forward, none inside another.
    - sample, budget, optimizer, accumulate, config: as for `apply`.
    - costs: "measure" or "estimate". Kernel scratch outside of blocks is not known.
    - kernels: "eager" or "fused", as for `apply`: blocks that can't be captured keep eager kernels.
    - reserved_bytes: gives what is held beside all that the step itself makes, and that blocks do not schedule
      (gathered parameters). It is called after a first step.
    - group: the ranks that rehearse together, where blocks run collectives around them. A budget that can't be met on
      one rank is then an error on all.
    - shards: whatever has sharded the parameters by other means than DTensors, gathers them around each pass of a
      block, and takes their gradients. Ranks then agree before each call of a block that they hand its gradients over
      in one order. Where one has a batch unlike its sample, all recompute that call as a whole.

    Calls of a planned block unlike the one in the sample are recomputed as a whole. `memplan.plan_of(block)` gives its
    plan, `memplan.remove(block)` takes it off. Rehearsals run on the sample and leave nothing behind.

    Raises BudgetInfeasible, UnsupportedModel where a block is called other than once, and TypeError for names.
    """
    if not all(isinstance(block, nn.Module) for block in blocks):
        raise TypeError(f"blocks are submodules of the model, got {list(blocks)!r:.80}")
    agreement = None if group is None else Agreement.of(group)
    meet = None if agreement is None else agreement.meet
    around = AroundParts(shards, meet)

    def planned_blocks() -> PlannedParts:
        settings = Settings(
            budget, optimizer=optimizer, accumulate=accumulate, costs=costs, config=config, kernels=kernels
        )
        call = CallReader(model.forward).read_sample(sample).detached()
        refuse_without_data(call, next(model.parameters()).device)
        return plan_parts(_request(model, blocks, call, settings, reserved_bytes, around))

    with _plans_off(blocks):
        found = planned_blocks() if agreement is None else agreement.together(planned_blocks)
        planned = _planned(found, shards, None if shards is None else agreement)
    for forward in planned:
        forward.install()
    plan = found.plan
    again = [row.name for row in plan.units if row.way != "keep"]
    log.info(
        "%d of %d blocks recompute; the step is planned to peak at %s of %s",
        len(again), len(plan.units), format_bytes(plan.peak_bytes), format_bytes(plan.budget_bytes),
    )  # fmt: skip
    return plan


def _request(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    call: Call,
    settings: Settings,
    reserved_bytes: Callable[[], int],
    around: AroundParts,
) -> PartsRequest:
    """The step with these blocks, as planning in parts takes it."""
    assert settings.budget is not None
    assert not isinstance(settings.costs, Roofline)

    def beside(device: torch.device | None) -> BesideParts:
        found = _held_beside(model, settings, device)
        library_bytes = 0 if device is None else most_library_bytes(device)
        return dataclasses.replace(found, held_bytes=found.held_bytes + library_bytes + reserved_bytes())

    return PartsRequest(
        model,
        model,
        call,
        functools.partial(budget_bytes_of, settings.budget),
        reason="blocks are planned each by itself, for something may happen between them",
        blocks=blocks,
        costs=settings.costs,
        solve=functools.partial(solve_saved, config=settings.search),
        beside=beside,
        around=around,
        fuse=fuse_step if settings.kernels == "fused" else None,
    )


def _held_beside(model: nn.Module, settings: Settings, device: torch.device | None) -> BesideParts:
    """What an optimizer and earlier micro-batches hold on the device that runs the blocks.

    These are optimizer state, gradients, and what the optimizer's step allocates.
    """
    parts = [part_here(p) for p in model.parameters() if p.requires_grad]
    if device is None or any(part.device.type != device.type for part in parts):
        return BesideParts()
    optimizer = settings.optimizer
    state_bytes, update_bytes = (0, 0) if optimizer is None else optimizer_needs(optimizer, device)
    earlier_bytes = sum(part.numel() * part.element_size() for part in parts) if settings.accumulate else 0
    return BesideParts(state_bytes + earlier_bytes, update_bytes)


# -- planned blocks ---------------------------------------------------------------------------------------------------


class _BlockPlanner(Planner):
    """Makes steps for calls of a block that are unlike the one in the sample: such a call is recomputed as a whole.

    ignored: attributes of modules that change without changing what forward computes.
    """

    def __init__(self, name: str, ignored: frozenset[str] = frozenset()) -> None:
        super().__init__(Settings(accumulate=True))  # gradients of earlier steps are counted once for all blocks
        self._name, self._ignored, self._told = name, ignored, False

    def step(
        self,
        model: nn.Module,
        forward: Forward,
        sample: Sample | Call,
        known: Sequence[PlannedStep] = (),
        share: Share | None = None,
        like: WholeStep | None = None,
        varying: Varying = frozenset(),
    ) -> PlannedStep:
        call = sample if isinstance(sample, Call) else CallReader(forward).read_sample(sample)
        events = [f"{GRADIENT}of block {self._name}, recomputed"]
        arguments = ArgumentsKey(call, None, traced=False)
        return RecomputedStep(model, forward, arguments, Collectives.of(events), self._ignored)

    def join(self, *arguments: Any) -> Any:
        raise MemplanError(f"block {self._name} is planned by itself, and joins no other rank's plan")

    def step_for(self, *arguments: Any) -> Any:
        raise MemplanError(f"block {self._name} has no other plan for such gradients")

    def is_same(self, *arguments: Any) -> bool:
        return False

    def instead(self, model: nn.Module, forward: Forward, call: Call) -> Sequence[PlannedStep]:
        """A step that recomputes the call as a whole, for when another rank's batch is unlike its sample."""
        if not self._told:
            self._told = True
            log.warning(
                "a call of block %s is recomputed as a whole, because a rank's batch is unlike its sample; "
                "that may hold more than was planned",
                self._name,
            )
        return (self.step(model, forward, call),)

    def for_copy(self) -> Planner:
        """This planner, which serves copies of the block too, because it holds nothing of the block."""
        return self


def _planned(planned: PlannedParts, shards: Shards | None, agreement: Agreement | None) -> list[PlannedForward]:
    """Forwards of the blocks that do not run as they are, not installed yet.

    agreement: between ranks that have to hand gradients over in one order, call by call.
    """
    found = []
    ignored = frozenset(() if shards is None else shards.attributes)
    for row, (module, (way,)) in zip(planned.plan.units, planned.ways.items(), strict=True):
        if way == "keep":
            continue
        planner = _BlockPlanner(row.name, ignored)
        forward = PlannedForward(module, module.forward, planner, CallReader(module.forward), agreement=agreement)
        if isinstance(way, PartStep):
            forward.add(way)
        found.append(forward)
    return found


@contextlib.contextmanager
def _plans_off(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Take earlier plans off the blocks. They come back where something fails."""
    earlier = [planned for block in blocks if (planned := planned_forward(block)) is not None]
    for planned in earlier:
        planned.uninstall()
    try:
        yield
    except BaseException:
        for planned in earlier:
            planned.install()
        raise
