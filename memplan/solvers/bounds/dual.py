"""Multipliers of a programme of moments: each set of them is a lower bound, a line in the budget.

The method is the primal-dual hybrid gradient (Chambolle and Pock, doi:10.1007/s10851-010-0251-1) with diagonal steps
(Pock and Chambolle, doi:10.1109/ICCV.2011.6126441) and restarts at the average (Applegate et al., arXiv 2106.04756). It
need not converge: by weak duality any multipliers that are not negative bound the programme from below, with columns
between 0 and `most` each at its cheaper end. So the count of rounds is fixed, and the best multipliers seen are taken.
Budgets next to one another have multipliers close to one another, so a look may go on from where another one of that
programme stopped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memplan.jit import kernel
from memplan.solvers.bounds.moments import MomentProgram
from memplan.solvers.orders.flat import Floats, Ints

_CHECK = 25  # rounds between two looks at the bound
_HOPELESS = 1e6  # times what all columns cost: the room can't be kept, and multipliers would grow for ever


class BoundLine(NamedTuple):
    """A lower bound that is a line in the budget: the baseline and at_zero_s - s_per_byte * budget seconds."""

    at_zero_s: float
    s_per_byte: float

    def at(self, budget_bytes: int) -> float:
        return self.at_zero_s - self.s_per_byte * budget_bytes


class Look(NamedTuple):
    """What a look at a programme found, in the programme's own scales, and where the next one may go on.

    - rows, prices: the best multipliers of rows and of room.
    - columns: a point near the optimum, which may break rows a little: a guide for schedules, not a bound.
    - last_rows, last_prices: multipliers that go with that point.
    - ratio: of the steps of columns to those of multipliers.
    """

    rows: Floats
    prices: Floats
    columns: Floats
    last_rows: Floats
    last_prices: Floats
    ratio: float


def ascend(program: MomentProgram, budget_bytes: int, rounds: int, before: Look | None) -> tuple[BoundLine, Look]:
    """A line under the programme's optimum at every budget, close to it at this one. before: where to go on from."""
    byte_scale = float(max(1, int(program.size_bytes.max())))
    time_scale = float(program.cost.max())
    if before is None:
        rows, columns, prices = (np.zeros(len(x)) for x in (program.left, program.cost, program.fixed_bytes))
        before = Look(rows, prices, columns, rows, prices, 1.0)
    if time_scale <= 0.0:
        return BoundLine(0.0, 0.0), before
    room = (budget_bytes - program.fixed_bytes) / byte_scale
    scaled = program._replace(cost=program.cost / time_scale)
    weight = program.size_bytes / byte_scale
    steps = _steps_of(program, weight, np.arange(len(room)))
    look = Look(*_multipliers(scaled, weight, room.astype(np.float64), steps, rounds, before))
    at_room_free, taken = _bound(scaled, weight, look.rows, look.prices)
    # What rounding may have added: a few units in the last place of each term.
    safe = at_room_free - 1e-12 * taken
    held = float((look.prices * (program.fixed_bytes / byte_scale)).sum())
    return BoundLine((safe + held) * time_scale, float(look.prices.sum()) / byte_scale * time_scale), look


@kernel
def _pay(p: MomentProgram, rows: Floats, paid: Floats) -> None:
    """Add what these multipliers of rows pay for each column."""
    for i in range(len(rows)):
        paid[p.left[i]] += rows[i]
        paid[p.right[i]] += rows[i]
        paid[p.needs[i]] -= rows[i]


@kernel
def _bound(p: MomentProgram, weight: Floats, rows: Floats, prices: Floats) -> tuple[float, float]:
    """(bound without the prices of room, sum of the terms' sizes)."""
    reduced = p.cost.copy()  # less what its rows pay for each column
    for j in range(len(reduced)):
        if p.moment[j] >= 0:
            reduced[j] += prices[p.moment[j]] * weight[j]
    _pay(p, -rows, reduced)
    total = 0.0
    size = 0.0
    for i in range(len(rows)):
        total += rows[i] * p.least[i]
        size += rows[i]
    for j in range(len(reduced)):
        if reduced[j] < 0.0:
            total += reduced[j] * p.most[j]
        size += abs(reduced[j])
    return total, size


def _steps_of(p: MomentProgram, weight: Floats, moments: Ints) -> tuple[Floats, Floats, Floats, Ints, Ints]:
    """Steps of columns, rows and prices (one over what each meets), and where the columns of each moment start and end.

    The columns of a moment stand together.
    """
    terms, heavy = np.stack([p.left, p.right, p.needs], axis=1), p.moment >= 0
    columns = np.concatenate([np.arange(len(weight)), terms.ravel(), np.nonzero(heavy)[0]])
    met = np.concatenate([np.full(len(weight), 1e-9), np.ones(terms.size), weight[heavy]])
    step_x, step_y = 1.0 / np.bincount(columns, met), 1.0 / np.maximum((terms > 0).sum(axis=1), 1.0)
    step_x[0] = 0.0
    at, sizes = np.append(moments, p.moment[heavy]), np.append(np.full(len(moments), 1e-9), weight[heavy])
    start = np.searchsorted(np.maximum.accumulate(p.moment), moments)
    return step_x, step_y, 1.0 / np.bincount(at, sizes), start, start + np.bincount(at) - 1


@kernel
def _weight_of(columns: Floats, weight: Floats) -> float:
    """The sum of products, in four sums that do not wait for one another."""
    a = b = c = d = 0.0
    j = 0
    while j + 3 < len(columns):
        a += columns[j] * weight[j]
        b += columns[j + 1] * weight[j + 1]
        c += columns[j + 2] * weight[j + 2]
        d += columns[j + 3] * weight[j + 3]
        j += 4
    while j < len(columns):
        a += columns[j] * weight[j]
        j += 1
    return (a + b) + (c + d)


@kernel
def _multipliers(
    p: MomentProgram, weight: Floats, room: Floats, steps: tuple[Floats, Floats, Floats, Ints, Ints], rounds: int,
    before: Look,
) -> tuple[Floats, Floats, Floats, Floats, Floats, float]:  # fmt: skip
    """The fields of a `Look`. steps: what `_steps_of` gives."""
    n, m, moments = len(p.cost), len(p.left), len(room)
    step_x, step_y, step_l, start, stop = steps
    # No index is negative, and unsigned ones need no test for that.
    left, right, needs = p.left.astype(np.uint64), p.right.astype(np.uint64), p.needs.astype(np.uint64)
    x, y, prices = before.columns.copy(), before.last_rows.copy(), before.last_prices.copy()
    sum_x, sum_y, sum_l = np.zeros(n), np.zeros(m), np.zeros(moments)
    best_y, best_l = before.rows.copy(), before.prices.copy()
    best = _bound(p, weight, best_y, best_l)[0] - (best_l * room).sum()
    mean_x, mean_y, mean_l = x.copy(), y.copy(), prices.copy()
    hopeless = _HOPELESS * max(1.0, (p.cost * p.most).sum())
    ratio = before.ratio
    count = 0
    paid = np.zeros(n)  # what rows and prices pay for each column
    _pay(p, y, paid)
    extra = np.empty(n)
    start_x, start_y, start_l = x.copy(), y.copy(), prices.copy()
    length = 2 * _CHECK
    for r in range(rounds):
        for k in range(moments):
            for j in range(start[k], stop[k]):
                paid[j] -= prices[k] * weight[j]
        for j in range(n):
            new = x[j] - ratio * step_x[j] * (p.cost[j] - paid[j])
            new = new if new > 0.0 else 0.0
            new = new if new < p.most[j] else p.most[j]
            extra[j] = 2.0 * new - x[j]
            x[j] = new
            sum_x[j] += new
            paid[j] = 0.0
        for i in range(m):
            short = p.least[i] - extra[left[i]] - extra[right[i]] + extra[needs[i]]
            new = y[i] + step_y[i] / ratio * short
            new = new if new > 0.0 else 0.0
            y[i] = new
            sum_y[i] += new
            paid[left[i]] += new
            paid[right[i]] += new
            paid[needs[i]] -= new
        for k in range(moments):
            used = _weight_of(extra[start[k] : stop[k]], weight[start[k] : stop[k]])
            prices[k] = max(0.0, prices[k] + step_l[k] / ratio * (used - room[k]))
            sum_l[k] += prices[k]
        count += 1
        if (r + 1) % _CHECK == 0:
            mean_x, mean_y, mean_l = sum_x / count, sum_y / count, sum_l / count
            for rows, charged in ((y, prices), (mean_y, mean_l)):
                now = _bound(p, weight, rows, charged)[0] - (charged * room).sum()
                if now > best:
                    best, best_y, best_l = now, rows.copy(), charged.copy()
            if best > hopeless:
                return best_y, best_l, mean_x, np.zeros(m), np.zeros(moments), 1.0
            if count >= length:
                x, y, prices = mean_x.copy(), mean_y.copy(), mean_l.copy()
                moved_x = np.sqrt(((x - start_x) ** 2).sum())
                moved_y = np.sqrt(((y - start_y) ** 2).sum() + ((prices - start_l) ** 2).sum())
                if moved_x > 1e-12 and moved_y > 1e-12:
                    ratio = np.exp(0.5 * np.log(moved_x / moved_y) + 0.5 * np.log(ratio))
                start_x, start_y, start_l = x.copy(), y.copy(), prices.copy()
                sum_x[:], sum_y[:], sum_l[:] = 0.0, 0.0, 0.0
                paid[:] = 0.0
                _pay(p, y, paid)
                count = 0
                length += _CHECK
    return best_y, best_l, mean_x, mean_y, mean_l, ratio
