"""Saved sets for schedules, from the programmes of moments that bound them.

What the programme keeps at its first moment is what a schedule near the bound keeps from the forward pass. The
programme may keep a fraction of a value. Fractions are rounded at a few shares: above the share a value counts as kept.
The sets heed later moments too, which a minimum cut at one moment does not.
"""

from __future__ import annotations

from collections.abc import Iterator

from memplan.solvers.bounds.lower_bound import Bound
from memplan.solvers.bounds.moments import asked
from memplan.solvers.orders.flat import Flags, Flat

_SHARES = (0.3, 0.7)  # how much of a value the programme has to keep for it to count as kept


def saved_of_moments(flat: Flat, bound: Bound) -> Iterator[tuple[int, Flags]]:
    """(budget in bytes, which values are kept from the forward pass), for the budgets that the bound looked at."""
    a = flat.arrays
    forward = (a.producer >= 0) & (a.producer < a.boundary) & ~a.overwritten
    pinned = a.held.copy()
    pinned[forward] |= ~a.rerunnable[a.producer[forward]]
    for guide in bound.guides:
        early = pinned | (forward & asked(flat, range(a.boundary, guide.moment + 1)))
        early[guide.values] = pinned[guide.values]
        for share in _SHARES:
            saved = early.copy()
            kept = guide.values[guide.kept > share]
            saved[kept] |= ~a.overwritten[kept]
            yield guide.budget_bytes, saved
