"""What budgets come to in bytes: memory is rounded up, budgets down."""

from __future__ import annotations

from memplan.problem.data import Budget
from memplan.units import parse_bytes

BudgetLike = int | float | str | Budget


def budget_bytes_of(budget: BudgetLike, unplanned_bytes: int, resident_bytes: int) -> int:
    """Bytes of a budget, rounded down."""
    if not isinstance(budget, Budget):
        return limit_bytes(budget, unplanned_bytes)
    limits = []
    if budget.device is not None:
        limits.append(limit_bytes(budget.device, unplanned_bytes))
    if budget.activations is not None:
        limits.append(resident_bytes + limit_bytes(budget.activations, unplanned_bytes - resident_bytes))
    if not limits:
        raise ValueError("the Budget sets no limit; give device= or activations=")
    return min(limits)


def limit_bytes(budget: int | float | str, whole_bytes: int) -> int:
    """Bytes of one limit; a fraction is one of `whole_bytes`. Raises TypeError, ValueError."""
    if isinstance(budget, str):
        return parse_bytes(budget)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(f"a budget is an int, a str such as '8GiB', a float in (0, 1] or a Budget, got {budget!r}")
    if isinstance(budget, float):
        if not 0 < budget <= 1:
            raise ValueError(f"a budget given as a float is a fraction of the unplanned peak in (0, 1], got {budget}")
        return int(budget * whole_bytes)
    if budget <= 0:
        raise ValueError(f"a budget must be more than 0 bytes, got {budget}")
    return budget


def device_bytes(budget: BudgetLike) -> int | None:
    """The limit on the device where it is given in bytes, else None; checks the rest of the budget too."""
    budget_bytes_of(budget, 1 << 62, 0)
    device = budget.device if isinstance(budget, Budget) else budget
    return None if device is None or isinstance(device, float) else limit_bytes(device, 0)
