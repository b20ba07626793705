"""Plan a step that can't be captured whole: its largest parts that can be are planned, the rest runs eagerly.

What the rest holds is measured in a rehearsal on the sample, in which every part runs at the least memory; one choice
for each part then makes the whole fit the budget, and a run of that choice is measured before anybody relies on it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.capture import model_device
from memplan.capture.key import ArgumentsKey, ModesKey
from memplan.capture.ops.layout import allocated_bytes, storage_key
from memplan.capture.probe import forwards_exchanged
from memplan.capture.trace.call import Call, Forward
from memplan.config import Config
from memplan.errors import BudgetInfeasible, PlanMismatch
from memplan.logs import log
from memplan.planning.parts.parts import Parts, parts_of
from memplan.plans.partial_plan import PartialPlan, UnitRow
from memplan.runtime.parts.part_runners import UnitCalls, UnitStep
from memplan.runtime.parts.rehearsal import measured_peak, resident_tensors, timed_step
from memplan.runtime.program.collectives import GRADIENT, Collectives
from memplan.solvers.parts.ways import UnitChoice, appraise, choose_ways, smallest
from memplan.units import format_bytes

Ways = Mapping[nn.Module, tuple[UnitStep | str, ...]]
Refused = Callable[[nn.Module, str], None]
LimitOf = Callable[[int, int], int]  # (bytes of the unplanned peak, resident bytes) -> the budget in bytes

_ROUNDS = 5  # of choosing again where a run held more than was worked out


@dataclass(eq=False)
class PartialStep:
    """A step of which units run planned. provisional: always False, for it is planned in full.

    strict: a call that its plan does not serve is refused, for other ranks rely on the order of its gradients.
    """

    plan: PartialPlan
    ways: Ways
    model: nn.Module
    forward: Forward
    arguments: ArgumentsKey
    modes: ModesKey
    provisional: bool = False
    strict: bool = False
    _told: set[str] = field(default_factory=set)

    @functools.cached_property
    def collectives(self) -> Collectives:
        """Which parts run as programs, for those hand their gradients over all at once."""
        names = {m: n for n, m in self.model.named_modules()}
        programs = [
            f"{names[module]} (call {index})"
            for module, of_module in self.ways.items()
            for index, way in enumerate(of_module)
            if isinstance(way, UnitStep)
        ]
        return Collectives.of([f"{GRADIENT}of a step planned in parts", *(f"{GRADIENT}of {p}" for p in programs)])

    def mismatch(self, call: Call) -> str | None:
        """What keeps this step from serving a call, in words; the data in its arguments may be any."""
        return self.arguments.mismatch(call) or self.modes.mismatch()

    def check(self, call: Call) -> None:
        """Raise PlanMismatch where the step does not serve a call."""
        problem = self.mismatch(call)
        if problem:
            raise PlanMismatch(f"this call does not match the plan: {problem}")

    def settle(self, model: nn.Module) -> None:
        """There is nothing that an eager forward would not do itself."""

    def run(self, call: Call) -> Any:
        """What the model's forward returns."""
        return _run(self.ways, self.forward, call, self._tell)

    def bound_to(self, model: nn.Module, forward: Forward) -> PartialStep:
        """This step for a copy of the model, which has this forward of its own."""
        names = {m: n for n, m in self.model.named_modules()}
        ways = {
            other: tuple(w.bound_to(other) if isinstance(w, UnitStep) else w for w in of_module)
            for module, of_module in self.ways.items()
            for other in (model.get_submodule(names[module]),)
        }
        return PartialStep(
            self.plan, ways, model, forward, self.arguments, self.modes.rebound(model), strict=self.strict
        )

    def _tell(self, module: nn.Module, problem: str) -> None:
        name = next(n for n, m in self.model.named_modules() if m is module)
        if self.strict:
            raise PlanMismatch(
                f"the plan of a call of {name} does not hold: {problem}. Other ranks rely on the order in which its "
                "gradients arrive, so it can't run in another way. Plan without group= where no collective follows "
                "that order (DistributedDataParallel)"
            )
        if name not in self._told:
            self._told.add(name)
            log.warning("a call of %s is recomputed as a whole, because its plan does not hold: %s", name, problem)


def _run(ways: Ways, forward: Forward, call: Call, refused: Refused = lambda module, problem: None) -> Any:
    with forwards_exchanged(UnitCalls(ways, refused).forwards()):
        return forward(*call.variadic, **call.arguments)


@private.without_saved_tensor_hooks()
def plan_partially(
    model: nn.Module,
    forward: Forward,
    call: Call,
    budget: int | LimitOf,
    *,
    reason: str = "",
    costs: str = "measure",
    config: Config | None = None,
    extra_resident_bytes: int = 0,
    update_bytes: int = 0,
    decides: bool = False,
) -> PartialStep:
    """Plan a call of a model that can't be captured whole.

    forward: the model's own. budget: bytes, or what gives them from the unplanned peak and what is resident. reason:
    why the whole can't be captured. costs: "measure" or "estimate". config: how units are planned.
    extra_resident_bytes: held throughout beside the model (optimizer state, gradients of earlier micro-batches).
    update_bytes: what the optimizer's step allocates for a while, after backward. decides: units may branch on what
    they compute; where such a call takes another branch than on the sample, it is recomputed as a whole.

    Runs some steps on `call`, of which nothing stays. Raises BudgetInfeasible, and UnsupportedModel where no part can
    be planned either.
    """
    call = call.detached()
    parts = parts_of(model, forward, call, reason, costs, config, decides).updated(update_bytes)
    problem = parts.problem
    keep_all = appraise(problem, [(0, tuple(len(o) - 1 for o in stage[0].units)) for stage in problem.stages])
    least = smallest(problem)
    resident_bytes = resident_bytes_of(resident_tensors(model, call))
    if isinstance(budget, int):
        limit = budget
    else:
        limit = budget(keep_all.peak_bytes + extra_resident_bytes, resident_bytes + extra_resident_bytes)
    ways, choice, peak_bytes = _fitting(model, forward, call, parts, limit, least, extra_resident_bytes)
    time_s = timed_step(model, call, lambda: _run(ways, forward, call), parts.written)
    plan = PartialPlan(
        peak_bytes=peak_bytes,
        baseline_peak_bytes=keep_all.peak_bytes + extra_resident_bytes,
        budget_bytes=limit,
        resident_bytes=resident_bytes + extra_resident_bytes,
        floor_bytes=least.peak_bytes + extra_resident_bytes,
        time_s=time_s,
        baseline_time_s=max(0.0, time_s - choice.time_s),
        units=tuple(rows_of(parts, choice)),
    )
    arguments = ArgumentsKey(call, None, traced=False)
    return PartialStep(plan, ways, model, forward, arguments, ModesKey(model, model_device(model).type))


def resident_bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of tensors that are there before a step."""
    storages = {storage_key(t): allocated_bytes(t.untyped_storage().nbytes(), t.device) for t in tensors}
    return sum(storages.values())


def _fitting(
    model: nn.Module, forward: Forward, call: Call, parts: Parts, limit: int, least: UnitChoice, extra_bytes: int
) -> tuple[Ways, UnitChoice, int]:
    """The fastest choice of which a run keeps the limit, and its peak, with what is held beside. Raises
    BudgetInfeasible."""
    excess_bytes, peak_bytes = extra_bytes, 0
    for left in reversed(range(_ROUNDS)):
        found = choose_ways(parts.problem, limit - excess_bytes) if left else None
        choice = found or least  # which has the last word, for other choices may be farther from what was worked out
        ways = _ways(parts, choice)
        measured_bytes = measured_peak(model, call, functools.partial(_run, ways, forward, call))
        peak_bytes = max(choice.peak_bytes, measured_bytes) + extra_bytes
        if peak_bytes <= limit:
            return ways, choice, peak_bytes
        if choice is least:
            break
        excess_bytes += peak_bytes - limit
    raise BudgetInfeasible(
        f"planned in parts, the model does not fit {format_bytes(limit)}; {format_bytes(peak_bytes)} ({peak_bytes} "
        "bytes) is the least. Raise the budget, or use a smaller batch",
        peak_bytes,
    )


def _ways(parts: Parts, choice: UnitChoice) -> Ways:
    """How each call of each unit and block runs."""
    ways: dict[nn.Module, tuple[UnitStep | str, ...]] = {}
    for stage, (alternative, options) in zip(parts.stages, choice.picks, strict=True):
        chosen = dict(zip(map(id, stage.running(alternative)), options, strict=True))
        for part in stage.all:
            way = part.ways[chosen[id(part)]] if id(part) in chosen else "keep"
            ways[part.module] = (*ways.get(part.module, ()), way if isinstance(way, str) else part.step(way))
    return ways


def rows_of(parts: Parts, choice: UnitChoice) -> Iterator[UnitRow]:
    """What each call of a unit and block does."""
    for stage, (alternative, options) in zip(parts.stages, choice.picks, strict=True):
        for part, option in zip(stage.running(alternative), options, strict=True):
            way, figures = part.ways[option], part.options[option]
            yield UnitRow(
                part.site.name,
                "captured" if part.captured is not None else part.site.kind,
                way if isinstance(way, str) else "planned",
                figures.extra_bytes,
                max(0.0, figures.time_s),
                part.site.reason,
            )
