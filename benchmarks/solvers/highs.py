"""HiGHS on whole steps, a solver beside ours: Checkmate's programmes, joint and reduced (needs SciPy and the tests)."""

from __future__ import annotations

import math
import time
from typing import Any

from memplan.problem.data import Problem
from memplan.solvers.exact.exact import BlockBudget
from memplan.solvers.exact.whole_step import whole_step
from memplan.solvers.orders.flat import flatten

MOST_VARIABLES = 30_000  # larger programmes don't close in minutes; most of them don't fit memory
FORMS = ("reduced", "joint")


def milp_row(problem: Problem, form: str, budget_bytes: dict[str, int], limit_s: float) -> dict[str, Any]:
    """The least overhead that HiGHS finds for each budget in so many seconds, and whether it closed the programme."""
    from tests.support.milp_oracle import checkmate, joint, variables

    block = whole_step(flatten(problem))
    row: dict[str, Any] = {"variables": variables(block, form == "joint")}
    if row["variables"] > MOST_VARIABLES:
        return row
    for name, limit_bytes in budget_bytes.items():
        start = time.perf_counter()
        if form == "joint":
            seconds, closed = joint(block, limit_bytes, limit_s)
        else:
            budget = BlockBudget(limit_bytes - block.incoming_bytes, limit_bytes, limit_bytes)
            seconds, closed = checkmate(block, budget, limit_s)
        overhead = seconds / problem.baseline_time_s if seconds < math.inf else None
        row[name] = {"overhead": overhead, "closed": closed, "solve_s": time.perf_counter() - start}
    return row


def shown(row: dict[str, Any]) -> str:
    """The cells of a row of the table."""
    if row["variables"] > MOST_VARIABLES:
        return f"{row['variables']} variables: too large"
    cells = [cell for cell in row.values() if isinstance(cell, dict)]
    found = [("none" if c["overhead"] is None else f"{c['overhead']:.2%}", c["closed"]) for c in cells]
    return "  ".join(f"{overhead:>12} {'closed' if closed else 'open':>7}" for overhead, closed in found)
