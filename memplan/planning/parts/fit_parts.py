"""The fastest choice of ways for the parts of a step that is measured to keep the budget."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from memplan.errors import BudgetInfeasible
from memplan.planning.parts.part import Parts
from memplan.planning.parts.request import PartsRequest
from memplan.runtime.parts.partial_step import Ways, run_in_parts
from memplan.runtime.parts.rehearsal import measured_peak
from memplan.runtime.watch.meter import LeavesOut
from memplan.solvers.parts.ways import UnitChoice, choose_ways, smallest
from memplan.units import format_bytes

_ROUNDS = 5  # of choosing and measuring


@dataclass(frozen=True, slots=True)
class FittedParts:
    """A choice that fits the budget.

    - ways: how each call of each part runs.
    - choice: the options that were chosen.
    - peak_bytes: the larger of what was worked out and measured, with what is held beside the step.
    - floor_bytes: the smallest peak that was worked out, with what is held beside the step.
    """

    ways: Ways
    choice: UnitChoice
    peak_bytes: int
    floor_bytes: int


def fit(request: PartsRequest, parts: Parts, limit: int, held_bytes: int, leaves_out: LeavesOut) -> FittedParts:
    """The fastest choice that is measured to keep the limit. Raises BudgetInfeasible.

    Each choice is run. Where it held more than was worked out, the next choice is made for a limit that is lower by as
    much. The last choice is the one with the least memory, because others may hold even more than was worked out. Ranks
    that rehearse together run all rounds.

    - limit: the budget in bytes.
    - held_bytes: what is held beside the step.
    - leaves_out: storages that do not count.
    """
    around = request.around
    least = smallest(parts.problem)
    choice = choose_ways(parts.problem, limit - held_bytes) or least
    ways, more_bytes = parts.ways(choice), 0
    for left in reversed(range(_ROUNDS)):
        around.wait()
        run = functools.partial(run_in_parts, ways, request.forward, request.call, ignored=around.ignored)
        measured_bytes = measured_peak(request.model, request.call, run, leaves_out, around.shards is not None)
        peak_bytes = max(choice.peak_bytes, measured_bytes) + held_bytes
        if around.meet is None and (peak_bytes <= limit or choice is least):
            break
        if peak_bytes > limit and left:
            more_bytes = max(more_bytes, measured_bytes - choice.peak_bytes)
            found = choose_ways(parts.problem, limit - held_bytes - more_bytes) if left > 1 else None
            choice = found or least
            ways = parts.ways(choice)
    if peak_bytes > limit:
        beside = f", of which {format_bytes(held_bytes)} are held beside the step itself" if held_bytes else ""
        raise BudgetInfeasible(
            f"planned in parts, the model does not fit {format_bytes(limit)}, so the step would run out of memory. "
            f"{format_bytes(peak_bytes)} ({peak_bytes} bytes) is the least{beside}. Raise the budget, or make the step "
            "smaller",
            peak_bytes,
        )
    return FittedParts(ways, choice, peak_bytes, min(peak_bytes, least.peak_bytes + held_bytes))
