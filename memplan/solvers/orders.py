"""Orders of ops: from a set of saved values, and by splitting the life of a value.

`demand_order` runs the backward pass and recomputes what is missing on demand. `split` ends a value's life early and
computes it again before its next use. `lower` uses splits to bring an order's peak down.
"""

from __future__ import annotations

import numpy as np

from memplan.schedule import BOUNDARY
from memplan.solvers.flat import Arrays, Flags, Ints
from memplan.solvers.jit import kernel
from memplan.solvers.replay import prune, replay


@kernel
def demand_order(a: Arrays, saved: Flags, window: int, limit_ops: int) -> Ints:
    """All forward ops, then each backward op after the recomputation of what it misses.

    saved[v]: v is kept from the forward pass. A recomputed value counts as kept for the next `window` backward ops and
    is recomputed again after that. Returns an empty order where `limit_ops` would be exceeded.
    """
    ops = len(a.time_s)
    values = len(a.size_bytes)
    order = np.empty(limit_ops + 1, dtype=np.int64)
    if ops + 1 > limit_ops:
        return order[:0]
    length = 0
    for op in range(a.boundary):
        order[length] = op
        length += 1
    order[length] = BOUNDARY
    length += 1
    made_at = np.full(values, -1, dtype=np.int64)
    marked = np.zeros(a.boundary, dtype=np.bool_)
    stack = np.empty(values + 1, dtype=np.int64)
    for b in range(a.boundary, ops):
        top = 0
        for e in range(a.read_start[b], a.read_start[b + 1]):
            v = a.read[e]
            if a.producer[v] < a.boundary and not saved[v] and not (made_at[v] >= 0 and b - made_at[v] <= window):
                if not marked[a.producer[v]]:
                    marked[a.producer[v]] = True
                    stack[top] = a.producer[v]
                    top += 1
        lowest = a.boundary
        highest = -1
        while top > 0:
            top -= 1
            op = stack[top]
            lowest = min(lowest, op)
            highest = max(highest, op)
            for e in range(a.read_start[op], a.read_start[op + 1]):
                v = a.read[e]
                if not saved[v] and not (made_at[v] >= 0 and b - made_at[v] <= window):
                    if not marked[a.producer[v]]:
                        marked[a.producer[v]] = True
                        stack[top] = a.producer[v]
                        top += 1
        for op in range(lowest, highest + 1):
            if marked[op]:
                if length >= limit_ops:
                    return order[:0]
                order[length] = op
                length += 1
                marked[op] = False
                for e in range(a.made_start[op], a.made_start[op + 1]):
                    v = a.made[e]
                    made_at[v] = b
                    if a.taken[v] >= 0:
                        made_at[a.taken[v]] = -1
        if length >= limit_ops:
            return order[:0]
        order[length] = b
        length += 1
    return order[:length].copy()


@kernel
def split(a: Arrays, order: Ints, value: int, before: int) -> Ints:
    """The order with `value` computed again just before position `before`, with what that needs and is not there.

    Returns an empty order where that is impossible. The result may still be illegal where ops write in place; `replay`
    says so.
    """
    n = len(order)
    values = len(a.size_bytes)
    later = np.zeros(values, dtype=np.bool_)
    for p in range(n - 1, before - 1, -1):
        op = order[p]
        if op < 0:
            continue
        for e in range(a.made_start[op], a.made_start[op + 1]):
            later[a.made[e]] = False
        for e in range(a.read_start[op], a.read_start[op + 1]):
            later[a.read[e]] = True
    alive = np.zeros(values, dtype=np.bool_)
    for p in range(before):
        op = order[p]
        if op < 0:
            continue
        for e in range(a.made_start[op], a.made_start[op + 1]):
            v = a.made[e]
            if a.taken[v] >= 0:
                alive[a.taken[v]] = False
            alive[v] = True
    marked = np.zeros(a.boundary, dtype=np.bool_)
    stack = np.empty(a.boundary + 1, dtype=np.int64)
    if a.producer[value] < 0 or a.producer[value] >= a.boundary:
        return order[:0]
    stack[0] = a.producer[value]
    marked[stack[0]] = True
    top = 1
    count = 0
    while top > 0:
        top -= 1
        op = stack[top]
        count += 1
        if not a.rerunnable[op]:
            return order[:0]
        for e in range(a.read_start[op], a.read_start[op + 1]):
            v = a.read[e]
            there = alive[v] and (later[v] or a.held[v]) and v != value
            for f in range(a.made_start[op], a.made_start[op + 1]):
                there = there and a.taken[a.made[f]] != v
            if not there and not marked[a.producer[v]]:
                marked[a.producer[v]] = True
                stack[top] = a.producer[v]
                top += 1
    result = np.empty(n + count, dtype=np.int64)
    result[:before] = order[:before]
    length = before
    for op in range(a.boundary):
        if marked[op]:
            result[length] = op
            length += 1
    result[length:] = order[before:]
    return result


@kernel
def _live_through(a: Arrays, order: Ints, at: int) -> tuple[Ints, Ints]:
    """Values that are live at a position though its op does not touch them, largest first, and their next reads."""
    n = len(order)
    values = len(a.size_bytes)
    next_read = np.full(values, -1, dtype=np.int64)
    for p in range(n - 1, at, -1):
        op = order[p]
        if op < 0:
            continue
        for e in range(a.made_start[op], a.made_start[op + 1]):
            next_read[a.made[e]] = -1
        for e in range(a.read_start[op], a.read_start[op + 1]):
            next_read[a.read[e]] = p
    made = np.zeros(values, dtype=np.bool_)
    for p in range(at):
        op = order[p]
        if op >= 0:
            for e in range(a.made_start[op], a.made_start[op + 1]):
                made[a.made[e]] = True
    if order[at] >= 0:
        op = order[at]
        for e in range(a.made_start[op], a.made_start[op + 1]):
            made[a.made[e]] = False
        for e in range(a.read_start[op], a.read_start[op + 1]):
            made[a.read[e]] = False
    chosen = np.zeros(values, dtype=np.bool_)
    for v in range(values):
        chosen[v] = made[v] and next_read[v] >= 0 and not a.held[v] and a.producer[v] < a.boundary
    found = np.nonzero(chosen)[0]
    ranked = found[np.argsort(-a.size_bytes[found], kind="mergesort")]
    return ranked, next_read[ranked]


@kernel
def _excess(during: Ints, target_bytes: int) -> float:
    total = 0.0
    for bytes_held in during:
        if bytes_held > target_bytes:
            total += float(bytes_held - target_bytes)
    return total


@kernel
def lower(a: Arrays, order: Ints, target_bytes: int, rounds: int, width: int) -> Ints:
    """Bring the peak of an order down towards a target, one split at the highest position a round.

    A round tries the `width` largest values live through the peak and takes the split that pays the fewest seconds
    per byte of excess removed. Stops at the target, at `rounds`, or where no split helps. Where microbatches wait, as
    many that are live at the boundary are tried as well: they weigh on every position.
    """
    n = len(order)
    during = np.zeros(n, dtype=np.int64)
    peak, at, time_s = replay(a, order, during)
    excess = _excess(during, target_bytes)
    for _ in range(rounds):
        if peak <= target_bytes:
            break
        ranked, reads = _live_through(a, order, at)
        if a.others > 0:
            turn = 0
            while order[turn] >= 0:
                turn += 1
            saved, later = _live_through(a, order, turn)
            ranked = np.concatenate((saved[:width], ranked[:width]))
            reads = np.concatenate((later[:width], reads[:width]))
        best = order
        best_score = np.inf
        for i in range(min(width, len(ranked)) if a.others == 0 else len(ranked)):
            if a.size_bytes[ranked[i]] == 0:
                continue
            trial = split(a, order, ranked[i], reads[i])
            if len(trial) == 0 or len(trial) > 16 * len(a.time_s):
                continue
            trial = prune(a, trial)
            during = np.zeros(len(trial), dtype=np.int64)
            trial_peak, _at, trial_s = replay(a, trial, during)
            if trial_peak < 0 or trial_peak > peak:
                continue
            gain = excess - _excess(during, target_bytes)
            if gain <= 0.0:
                continue
            score = (trial_s - time_s) / gain
            if score < best_score:
                best = trial
                best_score = score
        if best_score == np.inf:
            break
        order = best
        during = np.zeros(len(order), dtype=np.int64)
        peak, at, time_s = replay(a, order, during)
        excess = _excess(during, target_bytes)
    return order
