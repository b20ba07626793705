"""The largest size at which a step fits, from few plans."""

from __future__ import annotations

from collections.abc import Callable

from memplan.errors import BudgetInfeasible
from memplan.plans.plan import Plan

PlanAt = Callable[[int], Plan | BudgetInfeasible]  # the plan at a size, or the refusal

_TRIES = 8
_EVEN = ((1024, 64), (128, 16), (32, 4))  # sizes from the first on are multiples of the second
_GROWTH = 8  # a size that is planned next is at most so many times as large as one that fits
_CLOSE = 0.9  # a size that fits is as good as one that is larger by less


def largest_that_fits(
    plan_at: PlanAt, limit_bytes: int, most: int, floors: dict[int, int] | None = None
) -> tuple[int, Plan] | None:
    """The largest size up to `most` at which a plan was found, with the plan. None where none was found.

    Smallest peaks grow about linearly with batches, and a little faster with lengths. So each try is where the line
    through those of the largest size that fits and the smallest that does not meets the limit.

    floors: smallest peaks in bytes that are known beforehand, by size. Those of all tries are added to it.
    """
    floors, best = {} if floors is None else floors, None
    for _ in range(_TRIES):
        size = _even(min(most, _next(floors, limit_bytes)))
        if size in floors or (best is not None and size * _CLOSE < best[0]):
            break
        found = plan_at(size)
        if isinstance(found, BudgetInfeasible):
            floors[size] = max(found.floor_bytes, limit_bytes + 1)
        else:
            floors[size], best = min(found.floor_bytes, limit_bytes), (size, found)
    return best


def _next(floors: dict[int, int], limit_bytes: int) -> int:
    """The size to try next."""
    fit = sorted(size for size, floor in floors.items() if floor <= limit_bytes)
    over = sorted(size for size, floor in floors.items() if floor > limit_bytes)
    if not floors:
        return 1
    if len(floors) == 1:
        return 2 * fit[0] if fit else max(1, over[0] // 2)
    low, high = (fit[-1], over[0]) if fit and over else (over[0], over[1]) if over else (fit[-2], fit[-1])
    slope = max(1.0, (floors[high] - floors[low]) / (high - low))
    size = int((low + (limit_bytes - floors[low]) / slope) * 0.99)
    return max(1, min(size, over[0] - 1 if over else _GROWTH * fit[-1]))


def _even(size: int) -> int:
    """The size, rounded down to what kernels like."""
    unit = next((unit for least, unit in _EVEN if size >= least), 1)
    return size - size % unit
