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
    """A choice that was run.

    - ways: how each call of each part runs.
    - choice: the options that were chosen.
    - peak_bytes: the larger of what was worked out and measured, with what is held beside the step.
    """

    ways: Ways
    choice: UnitChoice
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Fitting:
    """Runs choices of ways for the parts of a step.

    - held_bytes: what is held beside the step.
    - leaves_out: storages that do not count.
    """

    request: PartsRequest
    parts: Parts
    held_bytes: int
    leaves_out: LeavesOut

    def least(self, keep_all: UnitChoice) -> FittedParts:
        """The choice that is measured to hold the least.

        It is the one of which least was worked out, or the one that keeps all, should that be measured to hold less.
        """
        least = self._run(smallest(self.parts.problem))
        if least.peak_bytes <= keep_all.peak_bytes + self.held_bytes:
            return least
        return min(least, self._run(keep_all), key=lambda fitted: fitted.peak_bytes)

    def fit(self, limit: int, least: FittedParts) -> FittedParts:
        """The fastest choice that is measured to keep the limit. Raises BudgetInfeasible.

        Each choice is run. Where it held more than was worked out, the next choice is made for a limit that is lower by
        as much.

        - limit: the budget in bytes.
        - least: the choice that is measured to hold the least.
        """
        more_bytes = 0
        for _ in range(_ROUNDS):
            choice = choose_ways(self.parts.problem, limit - self.held_bytes - more_bytes)
            if choice is None:
                break
            found = self._run(choice)
            if found.peak_bytes <= limit:
                return found
            more_bytes = max(more_bytes, found.peak_bytes - self.held_bytes - found.choice.peak_bytes)
        if least.peak_bytes <= limit:
            return least
        held_bytes, peak_bytes = self.held_bytes, least.peak_bytes
        beside = f", of which {format_bytes(held_bytes)} are held beside the step itself" if held_bytes else ""
        raise BudgetInfeasible(
            f"planned in parts, the model does not fit {format_bytes(limit)}, so the step would run out of memory. "
            f"{format_bytes(peak_bytes)} ({peak_bytes} bytes) is the least{beside}. Raise the budget, or make the step "
            "smaller",
            peak_bytes,
        )

    def _run(self, choice: UnitChoice) -> FittedParts:
        request, ways = self.request, self.parts.ways(choice)
        run = functools.partial(run_in_parts, ways, request.forward, request.call)
        measured_bytes = measured_peak(request.model, request.call, run, self.leaves_out)
        return FittedParts(ways, choice, max(choice.peak_bytes, measured_bytes) + self.held_bytes)
