"""Saved sets for schedules, from the programmes of moments that bound them.

What the programme keeps at its first moment is what a schedule near the bound keeps from the forward pass. Fractions
are rounded at a few shares. The sets heed later moments too, which a minimum cut at one moment does not.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memplan.solvers.bound import Bound, backward_bytes
from memplan.solvers.bound_dual import point_of
from memplan.solvers.bound_program import asked, program_of, step_of
from memplan.solvers.flat import Flags, Flat

_SHARES = (0.3, 0.7)  # how much of a value the programme has to keep for it to count as kept
_ROUNDS = 800


def saved_of_moments(flat: Flat, bound: Bound) -> Iterator[tuple[int, Flags]]:
    """(budget in bytes, which values are kept from the forward pass), for the budgets that the bound looked at."""
    a = flat.arrays
    step, fixed = step_of(flat), backward_bytes(flat)
    forward = (a.producer >= 0) & (a.producer < a.boundary) & ~a.overwritten
    pinned = a.held.copy()
    pinned[forward] |= ~a.rerunnable[a.producer[forward]]
    for budget_bytes, moments in bound.moments:
        program = program_of(step, moments, fixed[[1 + m - a.boundary for m in moments]])
        point = point_of(program, budget_bytes, _ROUNDS)
        columns = np.nonzero(program.moment == 0)[0]
        early = pinned | (forward & asked(flat, range(a.boundary, moments[0] + 1)))
        early[program.value[columns]] = pinned[program.value[columns]]
        for share in _SHARES:
            saved = early.copy()
            kept = program.value[columns[point[columns] > share]]
            saved[kept] |= ~a.overwritten[kept]
            yield budget_bytes, saved
