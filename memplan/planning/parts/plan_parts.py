"""Plan a step that is no single graph: its parts are planned, each by itself, and the rest runs eagerly.

Something that no graph has may happen between the parts. What parts save for backward adds up over forward, so plans of
parts lower that; peaks within parts do not add up. What the rest holds is measured in a rehearsal on the sample, in
which every part runs at the least memory. Then one option is chosen for each part, so that the whole fits the budget. A
run with these options is measured before they are used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.ops.layout import allocated_bytes, storage_key
from memplan.planning.parts.capture_parts import Sites, captured_units, found_sites
from memplan.planning.parts.fit_parts import Fitting
from memplan.planning.parts.measure_parts import measured_parts
from memplan.planning.parts.part import Part, Parts
from memplan.planning.parts.request import PartsRequest
from memplan.planning.parts.solve_parts import solve_units
from memplan.plans.partial_plan import PartialPlan
from memplan.runtime.parts.part_step import PartTangents
from memplan.runtime.parts.partial_step import Ways, run_in_parts
from memplan.runtime.parts.rehearsal import EditedArguments, Rehearsal, resident_tensors, timed_step
from memplan.solvers.parts.ways import appraise


@dataclass(frozen=True, slots=True)
class PlannedParts:
    """A plan, and how to run it.

    - plan: what the step will hold and cost.
    - ways: how each call of each part runs.
    """

    plan: PartialPlan
    ways: Ways


@private.without_saved_tensor_hooks()
def plan_parts(request: PartsRequest) -> PlannedParts:
    """Plan a step in parts. Runs some steps on the sample, which leave nothing behind.

    Raises BudgetInfeasible. Raises UnsupportedModel where no part can be planned either.
    """
    model, call = request.model, request.call
    rehearse = functools.partial(Rehearsal, model, request.forward, call)
    sites, blocks = found_sites(request)
    if request.fuse is not None:  # a block that is recomputed as a whole would run eager kernels
        blocks = {}
    while True:
        try:
            units = captured_units(request, rehearse, sites)
            solve_units(request, units)
            device = request.device or next((u.captured.traced.device for u in units if u.captured is not None), None)
            elsewhere = functools.partial(_is_elsewhere, device)
            parts = _measured(functools.partial(rehearse, leaves_out=elsewhere), units, blocks)
            break
        except EditedArguments as error:  # they can't run again in backward
            sites, blocks = (_without(error.modules, found) for found in (sites, blocks))
    beside = request.beside(device)
    parts, held_bytes = parts.updated(beside.update_bytes), beside.held_bytes
    keep_all = appraise(parts.problem, [(0, tuple(len(o) - 1 for o in s[0].units)) for s in parts.problem.stages])
    resident = (t for t in resident_tensors(model, call) if not elsewhere(t.untyped_storage()))
    resident_bytes = _bytes_of(resident) + held_bytes
    fitting = Fitting(request, parts, held_bytes, elsewhere)
    least = fitting.least(keep_all)
    limit = request.limit(keep_all.peak_bytes + held_bytes, resident_bytes, least.peak_bytes)
    fitted = fitting.fit(limit, least)
    run = functools.partial(run_in_parts, fitted.ways, request.forward, call)
    time_s = timed_step(model, call, run, parts.written)
    plan = PartialPlan(
        peak_bytes=fitted.peak_bytes,
        baseline_peak_bytes=keep_all.peak_bytes + held_bytes,
        budget_bytes=limit,
        resident_bytes=resident_bytes,
        floor_bytes=min(least.peak_bytes, limit),
        time_s=time_s,
        baseline_time_s=max(0.0, time_s - fitted.choice.time_s),
        units=tuple(parts.rows(fitted.choice)),
        exact="program" if any(unit.is_fused for unit in units) else "eager",
    )
    return PlannedParts(plan, fitted.ways)


def _is_elsewhere(device: torch.device | None, storage: torch.UntypedStorage) -> bool:
    """Whether a storage is on the host, and does not count."""
    return device is not None and storage.device.type != device.type


def _without(edited: Collection[nn.Module], sites: Sites) -> Sites:
    """The sites but those of modules whose arguments are edited."""
    return {module: site for module, site in sites.items() if module not in edited}


def _measured(rehearse: Callable[..., Rehearsal], units: Sequence[Part], blocks: Sites) -> Parts:
    """The parts with what each would hold. A part that gets other gradients than it was captured for is left opaque."""
    while True:
        try:
            return measured_parts(rehearse, units, blocks)
        except PartTangents as error:  # programs around it do not hand on what eager does
            for unit in units:
                if unit.module is error.module:
                    unit.give_up(str(error))


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of tensors that are there before a step."""
    storages = {storage_key(t): allocated_bytes(t.untyped_storage().nbytes(), t.device) for t in tensors}
    return sum(storages.values())
