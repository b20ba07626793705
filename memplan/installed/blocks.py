"""Plan some blocks of a model, each by itself, so that the whole step fits a budget; the rest runs as it is.

For models that can't be one graph, because something happens between their blocks: `fully_shard` gathers the parameters
of each block before it runs. What blocks save adds up over forward, and is what they have to give; peaks within them do
not add up. The step is rehearsed on the sample with every block at the least memory, and one choice for each block then
makes the whole fit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplan.capture.capture import refuse_without_data
from memplan.capture.key import ArgumentsKey
from memplan.capture.probe import Site
from memplan.capture.shards import Shards
from memplan.capture.trace.call import Call, CallReader, Forward, Sample
from memplan.config import ConfigLike, config_of
from memplan.costs.libraries import most_library_bytes
from memplan.costs.optimizer import optimizer_needs
from memplan.errors import BudgetInfeasible, MemplanError, UnsupportedModel
from memplan.installed.planned_forward import PlannedForward, planned_forward
from memplan.logs import log
from memplan.planning.parts.partial import resident_bytes_of, rows_of
from memplan.planning.parts.parts import (
    Part,
    Parts,
    WholeParameters,
    capture_unit,
    measured_parts,
    shares_parameters,
    solve_units,
)
from memplan.planning.planner import Planner
from memplan.planning.settings import Settings
from memplan.plans.partial_plan import PartialPlan
from memplan.plans.plan import Plan
from memplan.problem.budgets import BudgetLike, budget_bytes_of
from memplan.runtime.parts.part_runners import UnitStep, recomputed
from memplan.runtime.parts.rehearsal import Rehearsal, measured_peak, resident_tensors
from memplan.runtime.program.collectives import GRADIENT, Collectives
from memplan.runtime.program.step import PlannedStep
from memplan.runtime.ranks.agreement import Agreement, Share
from memplan.runtime.watch.meter import LeavesOut
from memplan.solvers import Candidate
from memplan.solvers.parts.saved import solve_saved
from memplan.solvers.parts.ways import UnitChoice, appraise, choose_ways, smallest
from memplan.torch_private import part_here
from memplan.units import format_bytes

# Rounds of choosing and measuring: fixed numbers, for ranks rehearse together.
_ROUNDS = 3  # of choosing, the last of which is for the least where nothing else fits
_ROUNDS_WITH_SHARDS = 5  # whoever gathers does so ahead of use, and other choices make for other moments


def apply_blocks(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    sample: Sample,
    budget: BudgetLike,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: bool = False,
    costs: str = "measure",
    config: ConfigLike = None,
    whole: WholeParameters = contextlib.nullcontext,
    reserved_bytes: Callable[[], int] = lambda: 0,
    leaves_out: LeavesOut | None = None,
    group: torch.distributed.ProcessGroup | None = None,
    shards: Shards | None = None,
) -> PartialPlan:
    """Plan blocks of a model in place, so that its whole step fits a budget. Outputs and gradients stay the same bits.

    blocks: submodules of `model`, each called once in a forward, none inside another. sample, budget, optimizer,
    accumulate, config: as for `apply`. costs: "measure" or "estimate". Kernel scratch outside of blocks is not known.
    whole: has the parameters of a block there for as long, where they are only while it runs. reserved_bytes: what is
    held beside all that the step itself makes, and not for blocks to schedule (gathered parameters); asked after a
    first step. leaves_out: storages that it covers. group: the ranks that rehearse together, where blocks run
    collectives around them: what can't be met on one is then raised on all. shards: who has sharded the parameters by
    other means than DTensors, has them whole around each pass of a block, and takes their gradients. Ranks then agree
    before each call of a block that they hand its gradients over in one order: where one has another batch than its
    sample, all recompute that call as a whole.

    Calls of a planned block unlike the one in the sample are recomputed as a whole. `memplan.plan_of(block)` gives
    its plan, `memplan.remove(block)` takes it off. Rehearses on the sample, of which nothing stays.

    Raises BudgetInfeasible, and UnsupportedModel where a block is called other than once.
    """
    agreement = None if group is None else Agreement.of(group)
    rehearsed = functools.partial(
        _rehearsed, model, blocks, sample, budget, optimizer, accumulate, costs, config, whole, reserved_bytes,
        leaves_out, shards, agreement,
    )  # fmt: skip
    with _plans_off(blocks):
        plan, units, ways = rehearsed() if agreement is None else agreement.together(rehearsed)
        planned = _planned(units, ways, None if shards is None else agreement)
    for forward in planned:
        forward.install()
    again = [row.name for row in plan.units if row.way != "keep"]
    log.info(
        "%d of %d blocks recompute; the step is planned to peak at %s of %s",
        len(again), len(units), format_bytes(plan.peak_bytes), format_bytes(plan.budget_bytes),
    )  # fmt: skip
    return plan


def _rehearsed(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    sample: Sample,
    budget: BudgetLike,
    optimizer: torch.optim.Optimizer | None,
    accumulate: bool,
    costs: str,
    config: ConfigLike,
    whole: WholeParameters,
    reserved_bytes: Callable[[], int],
    leaves_out: LeavesOut | None,
    shards: Shards | None,
    agreement: Agreement | None,
) -> tuple[PartialPlan, list[Part], list[Candidate | str]]:
    """The plan, and how each block runs. Runs as many steps on every rank."""
    call = CallReader(model.forward).read_sample(sample).detached()
    refuse_without_data(call, next(model.parameters()).device)
    rehearse = functools.partial(Rehearsal, model, model, call, takes_gradients=shards is not None)

    def meet() -> None:
        """Ranks may have been busy for long, each by itself."""
        if agreement is not None:
            agreement.meet()

    if whole is not contextlib.nullcontext:
        whole = functools.partial(_after, meet, whole)
    units = _units(model, blocks, rehearse(metered=False), whole, shards)
    meet()
    solve_units(units, costs, functools.partial(solve_saved, config=config_of(config)), whole)
    device = next((unit.captured.traced.device for unit in units if unit.captured is not None), None)

    def elsewhere(storage: torch.UntypedStorage) -> bool:
        on_host = device is not None and storage.device.type != device.type
        return on_host or (leaves_out is not None and leaves_out(storage))

    held_bytes, update_bytes = _held_beside(model, optimizer, accumulate, device)
    meet()
    parts = measured_parts(functools.partial(rehearse, leaves_out=elsewhere), units, {})
    parts = parts.updated(update_bytes)
    resident = [t for t in resident_tensors(model, call) if not elsewhere(t.untyped_storage())]
    resident_bytes = resident_bytes_of(resident)
    beside_bytes = reserved_bytes() + held_bytes + (0 if device is None else most_library_bytes(device))
    everything = appraise(parts.problem, [(0, (len(s[0].units[0]) - 1,)) for s in parts.problem.stages])
    least = smallest(parts.problem)
    limit = budget_bytes_of(budget, everything.peak_bytes + beside_bytes, resident_bytes + beside_bytes)
    excess_bytes, fits = 0, True
    for left in reversed(range(_ROUNDS if shards is None else _ROUNDS_WITH_SHARDS)):
        found = choose_ways(parts.problem, limit - beside_bytes - excess_bytes) if left or fits else None
        choice = found or least  # which has the last word, for other choices may be farther from what was worked out
        ways = [u.ways[options[0]] for u, (_, options) in zip(units, choice.picks, strict=True)]
        if shards is not None:
            ways = [_in_one_order(u, way) for u, way in zip(units, ways, strict=True)]
        with _exchanged(units, ways, None if shards is None else agreement):
            meet()
            run = functools.partial(_called, model, call)
            peak_bytes = measured_peak(model, call, run, elsewhere, takes_gradients=shards is not None)
        fits = peak_bytes + beside_bytes <= limit
        if not fits:
            excess_bytes = peak_bytes - choice.peak_bytes  # more than worked out, and more than allowed for until now
    peak_bytes = max(choice.peak_bytes, peak_bytes) + beside_bytes
    if peak_bytes > limit:
        raise BudgetInfeasible(
            f"with its blocks planned the model does not fit {format_bytes(limit)}; {format_bytes(peak_bytes)} "
            f"({peak_bytes} bytes) is the least, of which {format_bytes(beside_bytes)} are gathered parameters and "
            "optimizer state. Raise the budget, or use a smaller batch",
            peak_bytes,
        )
    plan = _summary(parts, choice, everything, peak_bytes, limit, resident_bytes, beside_bytes, least)
    return plan, units, ways


def _after(
    meet: Callable[[], None], whole: WholeParameters, block: nn.Module
) -> contextlib.AbstractContextManager[Any]:
    """The parameters of a block, gathered once all ranks are there."""
    meet()
    return whole(block)


def _called(model: nn.Module, call: Call) -> Any:
    return model(*call.variadic, **call.arguments)


def _units(
    model: nn.Module, blocks: Sequence[nn.Module], rehearsal: Rehearsal, whole: WholeParameters, shards: Shards | None
) -> list[Part]:
    """The blocks as parts of the step, captured with the arguments that a first forward hands them."""
    names = {module: name for name, module in model.named_modules()}
    strangers = [type(block).__name__ for block in blocks if block not in names]
    if strangers:
        raise ValueError(f"blocks must be submodules of the model; a {strangers[0]} is not")
    rehearsal.run(dict.fromkeys(blocks, ()))
    visited = [visit.module for visit in rehearsal.visits]
    for block in blocks:
        if visited.count(block) != 1:
            raise UnsupportedModel(
                f"block {names[block]} is called {visited.count(block)} times in a forward of {type(model).__name__}; "
                "each block has to be called once, by the model's forward. Leave it out of the blocks"
            )
    reason = "blocks are planned each by itself, for something may happen between them"
    fixed = shards is not None or whole is not contextlib.nullcontext  # parameters come and go around its passes
    units = [
        Part(v.module, Site(names[v.module], "captured", reason), v, shards=shards, fixed=fixed)
        for v in rehearsal.visits
    ]
    for unit in units:
        with whole(unit.module):
            capture_unit(unit, shares_parameters(model, unit.module))
    return units


def _held_beside(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, accumulate: bool, device: torch.device | None
) -> tuple[int, int]:
    """Bytes of optimizer state and gradients of earlier micro-batches, and what the optimizer's step allocates, where
    they are on the device that runs the blocks."""
    parts = [part_here(p) for p in model.parameters() if p.requires_grad]
    if device is None or any(part.device.type != device.type for part in parts):
        return 0, 0
    state_bytes, update_bytes = (0, 0) if optimizer is None else optimizer_needs(optimizer, device)
    earlier_bytes = sum(part.numel() * part.element_size() for part in parts) if accumulate else 0
    return state_bytes + earlier_bytes, update_bytes


def _summary(
    parts: Parts,
    choice: UnitChoice,
    everything: UnitChoice,
    peak_bytes: int,
    limit: int,
    resident_bytes: int,
    beside_bytes: int,
    least: UnitChoice,
) -> PartialPlan:
    baseline_s = sum(p.problem.baseline_time_s for s in parts.stages for p in s.units if p.problem is not None)
    return PartialPlan(
        peak_bytes=peak_bytes,
        baseline_peak_bytes=everything.peak_bytes + beside_bytes,
        budget_bytes=limit,
        resident_bytes=resident_bytes + beside_bytes,
        floor_bytes=min(peak_bytes, least.peak_bytes + beside_bytes),
        time_s=baseline_s + choice.time_s,
        baseline_time_s=baseline_s,
        units=tuple(rows_of(parts, choice)),
    )


# -- planned blocks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockStep:
    """The call of a block that was planned. provisional: never, for it is planned in full."""

    plan: Plan
    unit: UnitStep
    collectives: Collectives
    provisional: bool = False

    def mismatch(self, call: Call) -> str | None:
        """What keeps this step from serving a call, in words."""
        return self.unit.key.mismatch(call)

    def settle(self, model: nn.Module) -> None:
        """There is nothing that an eager forward would not do itself."""

    def run(self, call: Call) -> Any:
        """What the block's forward would return."""
        return self.unit.run(call)

    def bound_to(self, model: nn.Module, forward: Callable[..., Any]) -> BlockStep:
        """This step for a copy of the block."""
        return dataclasses.replace(self, unit=self.unit.bound_to(model))


@dataclass(frozen=True, slots=True)
class RecomputedStep:
    """Calls of a block that run again in backward as a whole, which holds as little as can be.

    ignored: attributes of modules that change without changing what forward computes.
    """

    model: nn.Module
    forward: Callable[..., Any]
    arguments: ArgumentsKey
    collectives: Collectives
    ignored: frozenset[str] = frozenset()
    plan: None = None
    provisional: bool = False

    def mismatch(self, call: Call) -> str | None:
        """What keeps this step from serving a call, in words."""
        return self.arguments.mismatch(call)

    def settle(self, model: nn.Module) -> None:
        """There is nothing that an eager forward would not do itself."""

    def run(self, call: Call) -> Any:
        """What the block's forward returns."""
        arguments = call.variadic, call.arguments
        return recomputed(self.model, self.forward, -1, *arguments, ignored=self.ignored)

    def bound_to(self, model: nn.Module, forward: Callable[..., Any]) -> RecomputedStep:
        """This step for a copy of the block, which has this forward of its own."""
        return dataclasses.replace(self, model=model, forward=forward)


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
        """Any call can be recomputed as a whole, as ranks do whose batch is unlike their sample."""
        if not self._told:
            self._told = True
            log.warning(
                "a call of block %s is recomputed as a whole, because a rank's batch is unlike its sample; "
                "that may hold more than was planned",
                self._name,
            )
        return (self.step(model, forward, call),)

    def for_copy(self) -> Planner:
        """It knows nothing of the block itself."""
        return self


def _in_one_order(unit: Part, way: Candidate | str) -> Candidate | str:
    """The way, or one that hands gradients over in the order of other ranks, whatever way those choose.

    That is the order of the program for what is captured, else autograd's. Buckets are reduced in it.
    """
    if unit.front is None:
        return "recompute"
    return unit.front.keep_all if way == "keep" else way


def _planned(
    units: Sequence[Part], ways: Sequence[Candidate | str], agreement: Agreement | None
) -> list[PlannedForward]:
    """Forwards of the blocks that run otherwise than without a plan, not installed yet.

    agreement: between ranks that have to hand gradients over in one order, call by call.
    """
    found = []
    for unit, way in zip(units, ways, strict=True):
        if way == "keep":
            continue
        module = unit.module
        planner = _BlockPlanner(unit.site.name, frozenset(() if unit.shards is None else unit.shards.attributes))
        planned = PlannedForward(module, module.forward, planner, CallReader(module.forward), agreement=agreement)
        if isinstance(way, Candidate):
            step = unit.step(way)
            planned.add(BlockStep(_plan_of(unit, way), step, Collectives.of(step.program.collectives)))
        found.append(planned)
    return found


def _plan_of(unit: Part, way: Candidate) -> Plan:
    """The way as a plan of the block alone."""
    assert unit.front is not None
    assert unit.problem is not None
    return Plan(
        unit.problem, way.schedule, way.timeline, way.solver, unit.problem.baseline_time_s,
        min(c.peak_bytes for c in unit.front.points), max(c.time_s for c in unit.front.points), unit.front.truncated,
    )  # fmt: skip


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


@contextlib.contextmanager
def _exchanged(units: Sequence[Part], ways: Sequence[Candidate | str], agreement: Agreement | None) -> Iterator[None]:
    """The blocks are planned for as long."""
    planned = _planned(units, ways, agreement)
    for forward in planned:
        forward.install()
    try:
        yield
    finally:
        for forward in planned:
            forward.uninstall()
