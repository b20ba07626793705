"""Budgets, and what they come to in bytes: memory is rounded up, budgets down."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memplan.units import parse_bytes


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one training step, in parts; None is no limit.

    - device: peak bytes on the device, everything included (an int, "8GiB", or a fraction of the unplanned peak).
    - activations: peak bytes less parameters, buffers and inputs (what the literature calls activation memory).
    - host: bytes of pinned host memory to which values may be offloaded; None forbids it.
    """

    device: int | float | str | None = None
    activations: int | float | str | None = None
    host: int | str | None = None


BudgetLike = int | float | str | Budget

SMALLEST = "min"
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*%\s*", re.ASCII)
_FRACTION = re.compile(r"\s*(?:0?\.\d+|1\.0*)\s*", re.ASCII)


def budget_bytes_of(budget: BudgetLike, unplanned_bytes: int, resident_bytes: int, floor_bytes: int = 0) -> int:
    """Bytes of a budget, rounded down. floor_bytes: what "min" is."""
    if not isinstance(budget, Budget):
        return floor_bytes if parsed(budget) == SMALLEST else bytes_of_limit(budget, unplanned_bytes)
    limits = []
    if budget.device is not None:
        limits.append(bytes_of_limit(budget.device, unplanned_bytes))
    if budget.activations is not None:
        limits.append(resident_bytes + bytes_of_limit(budget.activations, unplanned_bytes - resident_bytes))
    if not limits:
        raise ValueError("the Budget sets no limit; give device= or activations=")
    return min(limits)


def bytes_of_limit(budget: int | float | str, whole_bytes: int) -> int:
    """Bytes of one limit; a fraction is one of `whole_bytes`. Raises TypeError, ValueError."""
    limit = parsed(budget)
    if isinstance(limit, str):
        raise ValueError(f"{limit!r} is a budget of a whole step, not of a part of it")
    return int(limit * whole_bytes) if isinstance(limit, float) else limit


def parsed(budget: int | float | str) -> int | float | str:
    """A limit as a number: bytes as an int, a fraction as a float, or "min". Raises TypeError, ValueError.

    "80%" and "0.8" are fractions, as 0.8 is; "8GiB", "8GB" and "8G" are bytes.
    """
    if isinstance(budget, str):
        if budget.strip().lower() == SMALLEST:
            return SMALLEST
        percent = _PERCENT.fullmatch(budget)
        if percent is not None:
            return _fraction(float(percent[1]) / 100, budget)
        return _fraction(float(budget), budget) if _FRACTION.fullmatch(budget) else parse_bytes(budget)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(
            "a budget is an int, a str such as '8GiB', '80%', 'min' or 'auto', a float in (0, 1] or a Budget, got "
            f"{budget!r}"
        )
    if isinstance(budget, float):
        return _fraction(budget, budget)
    if budget <= 0:
        raise ValueError(f"a budget must be more than 0 bytes, got {budget}")
    return budget


def _fraction(value: float, given: object) -> float:
    if not 0 < value <= 1:
        raise ValueError(f"a budget given as a fraction is one of the unplanned peak, in (0, 1], got {given!r}")
    return value


def device_bytes(budget: BudgetLike) -> int | None:
    """The limit on the device where it is given in bytes, else None; checks the rest of the budget too."""
    budget_bytes_of(budget, 1 << 62, 0)
    device = budget.device if isinstance(budget, Budget) else budget
    limit = None if device is None else parsed(device)
    return limit if isinstance(limit, int) else None
