"""Multipliers of a programme of moments: each set of them is a lower bound, a line in the budget.

The primal-dual hybrid gradient method (Chambolle and Pock, doi:10.1007/s10851-010-0251-1) with diagonal steps (Pock and
Chambolle, doi:10.1109/ICCV.2011.6126441) and restarts at the average (Applegate et al., arXiv 2106.04756). It need not
converge: by weak duality any multipliers that are not negative bound the programme from below, with columns between 0
and `most` each at its cheaper end. So the count of rounds is fixed, and the best multipliers seen are taken.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memplan.solvers.bound_program import Program
from memplan.solvers.flat import Floats
from memplan.solvers.jit import kernel

_CHECK = 25  # rounds between two looks at the bound


class Line(NamedTuple):
    """No schedule within a budget takes less than the baseline and at_zero_s - s_per_byte * budget."""

    at_zero_s: float
    s_per_byte: float

    def at(self, budget_bytes: int) -> float:
        return self.at_zero_s - self.s_per_byte * budget_bytes


def line_of(program: Program, budget_bytes: int, rounds: int) -> Line:
    """A line under the programme's optimum at every budget, close to it at this one."""
    byte_scale = float(max(1, int(program.size_bytes.max())))
    time_scale = float(program.cost.max())
    if time_scale <= 0.0:
        return Line(0.0, 0.0)
    room = (budget_bytes - program.fixed_bytes) / byte_scale
    scaled = program._replace(cost=program.cost / time_scale)
    weight = program.size_bytes / byte_scale
    rows, prices, _point = _multipliers(scaled, weight, room.astype(np.float64), rounds)
    at_room_free, taken = _bound(scaled, weight, rows, prices)
    # What rounding may have added: a few units in the last place of each term.
    safe = at_room_free - 1e-12 * taken
    held = float((prices * (program.fixed_bytes / byte_scale)).sum())
    return Line((safe + held) * time_scale, float(prices.sum()) / byte_scale * time_scale)


def point_of(program: Program, budget_bytes: int, rounds: int) -> Floats:
    """A point near the programme's optimum, which may break rows a little: a guide for schedules, not a bound."""
    byte_scale = float(max(1, int(program.size_bytes.max())))
    time_scale = max(float(program.cost.max()), 1e-30)
    room = (budget_bytes - program.fixed_bytes) / byte_scale
    scaled = program._replace(cost=program.cost / time_scale)
    return _multipliers(scaled, program.size_bytes / byte_scale, room.astype(np.float64), rounds)[2]


@kernel
def _reduced(p: Program, weight: Floats, rows: Floats, prices: Floats, out: Floats) -> None:
    """Cost of each column less what its rows pay for it."""
    for j in range(len(out)):
        out[j] = p.cost[j]
        if p.moment[j] >= 0:
            out[j] += prices[p.moment[j]] * weight[j]
    for i in range(len(rows)):
        out[p.left[i]] -= rows[i]
        out[p.right[i]] -= rows[i]
        out[p.needs[i]] += rows[i]


@kernel
def _bound(p: Program, weight: Floats, rows: Floats, prices: Floats) -> tuple[float, float]:
    """(bound without the prices of room, sum of the terms' sizes)."""
    reduced = np.empty(len(p.cost))
    _reduced(p, weight, rows, prices, reduced)
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


@kernel
def _multipliers(p: Program, weight: Floats, room: Floats, rounds: int) -> tuple[Floats, Floats, Floats]:
    """Multipliers of rows and of room, the best of all rounds, and the last mean of the columns."""
    n, m, moments = len(p.cost), len(p.left), len(room)
    step_x = np.full(n, 1e-9)
    step_y = np.zeros(m)
    step_l = np.full(moments, 1e-9)
    for i in range(m):
        for j in (p.left[i], p.right[i], p.needs[i]):
            if j > 0:
                step_x[j] += 1.0
                step_y[i] += 1.0
    for j in range(n):
        if p.moment[j] >= 0:
            step_x[j] += weight[j]
            step_l[p.moment[j]] += weight[j]
    step_x = 1.0 / step_x
    step_x[0] = 0.0
    for i in range(m):
        step_y[i] = 1.0 / max(step_y[i], 1.0)
    step_l = 1.0 / step_l
    x = np.zeros(n)
    y = np.zeros(m)
    prices = np.zeros(moments)
    sum_x, sum_y, sum_l = np.zeros(n), np.zeros(m), np.zeros(moments)
    best_y, best_l = y.copy(), prices.copy()
    mean_x = x.copy()
    best = 0.0
    ratio = 1.0
    count = 0
    reduced = np.empty(n)
    extra = np.empty(n)
    used = np.empty(moments)
    start_x, start_y = x.copy(), y.copy()
    start_l = prices.copy()
    length = 2 * _CHECK
    for r in range(rounds):
        _reduced(p, weight, y, prices, reduced)
        used[:] = 0.0
        for j in range(n):
            new = x[j] - ratio * step_x[j] * reduced[j]
            new = min(max(new, 0.0), p.most[j])
            extra[j] = 2.0 * new - x[j]
            x[j] = new
            sum_x[j] += new
            if p.moment[j] >= 0:
                used[p.moment[j]] += extra[j] * weight[j]
        for i in range(m):
            short = p.least[i] - extra[p.left[i]] - extra[p.right[i]] + extra[p.needs[i]]
            y[i] = max(0.0, y[i] + step_y[i] / ratio * short)
            sum_y[i] += y[i]
        for k in range(moments):
            prices[k] = max(0.0, prices[k] + step_l[k] / ratio * (used[k] - room[k]))
            sum_l[k] += prices[k]
        count += 1
        if (r + 1) % _CHECK == 0:
            mean_x, mean_y, mean_l = sum_x / count, sum_y / count, sum_l / count
            now = _bound(p, weight, y, prices)[0] - (prices * room).sum()
            mean = _bound(p, weight, mean_y, mean_l)[0] - (mean_l * room).sum()
            if now > best:
                best = now
                best_y[:], best_l[:] = y, prices
            if mean > best:
                best = mean
                best_y[:], best_l[:] = mean_y, mean_l
            if count >= length:
                x = mean_x.copy()
                y, prices = mean_y, mean_l
                moved_x = np.sqrt(((x - start_x) ** 2).sum())
                moved_y = np.sqrt(((y - start_y) ** 2).sum() + ((prices - start_l) ** 2).sum())
                if moved_x > 1e-12 and moved_y > 1e-12:
                    ratio = np.exp(0.5 * np.log(moved_x / moved_y) + 0.5 * np.log(ratio))
                start_x, start_y, start_l = x.copy(), y.copy(), prices.copy()
                sum_x[:], sum_y[:], sum_l[:] = 0.0, 0.0, 0.0
                count = 0
                length += _CHECK
    return best_y, best_l, mean_x
