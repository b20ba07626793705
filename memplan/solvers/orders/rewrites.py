"""Orders of ops: from a set of saved values, and by splitting the life of a value.

`demand_order` runs the backward pass and recomputes what is missing on demand. `split` ends a value's life early and
computes it again before its next use. `bring_down` uses splits to bring an order's peak down.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memplan.jit import kernel
from memplan.problem.schedule import BOUNDARY
from memplan.solvers.orders.flat import Arrays, Flags, Ints
from memplan.solvers.orders.replay import prune, replay


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
        lowest = a.boundary
        highest = -1
        stack[0] = b
        top = 1
        while top > 0:
            top -= 1
            op = stack[top]
            for e in range(a.read_start[op], a.read_start[op + 1]):
                v = a.read[e]
                maker = a.producer[v]
                recent = made_at[v] >= 0 and b - made_at[v] <= window
                if maker < a.boundary and not saved[v] and not recent and not marked[maker]:
                    marked[maker] = True
                    lowest = min(lowest, maker)
                    highest = max(highest, maker)
                    stack[top] = maker
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


_READ, _GONE, _MADE = 0, 1, 2  # what happens to a value


class Events(NamedTuple):
    """What happens to each value in an order, in turn.

    - start, events: value v has events[start[v]:start[v + 1]], each 4 * position + what.
    - ran_start, ran: positions at which each op runs, likewise.
    """

    start: Ints
    events: Ints
    ran_start: Ints
    ran: Ints


@kernel
def events_of(a: Arrays, order: Ints) -> Events:
    start = np.zeros(len(a.size_bytes) + 1, dtype=np.int64)
    ran_start = np.zeros(len(a.time_s) + 1, dtype=np.int64)
    for op in order:
        if op >= 0:
            ran_start[op + 1] += 1
            for e in range(a.read_start[op], a.read_start[op + 1]):
                start[a.read[e] + 1] += 1
            for e in range(a.made_start[op], a.made_start[op + 1]):
                start[a.made[e] + 1] += 1
                if a.taken[a.made[e]] >= 0:
                    start[a.taken[a.made[e]] + 1] += 1
    start, ran_start = np.cumsum(start), np.cumsum(ran_start)
    events = np.empty(start[-1], dtype=np.int64)
    ran = np.empty(ran_start[-1], dtype=np.int64)
    next_event, next_run = start[:-1].copy(), ran_start[:-1].copy()
    for p in range(len(order)):
        op = order[p]
        if op < 0:
            continue
        ran[next_run[op]] = p
        next_run[op] += 1
        for e in range(a.read_start[op], a.read_start[op + 1]):
            events[next_event[a.read[e]]] = 4 * p + _READ
            next_event[a.read[e]] += 1
        for e in range(a.made_start[op], a.made_start[op + 1]):
            v = a.made[e]
            if a.taken[v] >= 0:
                events[next_event[a.taken[v]]] = 4 * p + _GONE
                next_event[a.taken[v]] += 1
            events[next_event[v]] = 4 * p + _MADE
            next_event[v] += 1
    return Events(start, events, ran_start, ran)


@kernel
def _around(events: Events, value: int, position: int) -> tuple[int, int]:
    """The last event of a value before a position and the first one from there on, as in `Events`; -1 for none."""
    own = events.events[events.start[value] : events.start[value + 1]]
    place = np.searchsorted(own, 4 * position)
    return own[place - 1] if place > 0 else -1, own[place] if place < len(own) else -1


@kernel
def _alive(before: int) -> bool:
    """Whether a value is there, by its last event."""
    return before >= 0 and before % 4 != _GONE


@kernel
def _read_next(after: int) -> bool:
    """Whether a value is read before it is made anew, by its next event."""
    return after >= 0 and after % 4 == _READ


@kernel
def _closure(a: Arrays, events: Events, value: int, before: int, marked: Flags) -> tuple[int, bool]:
    """Mark the ops that compute a value again before a position, with what that needs and is not there.

    Returns their number, 0 where that is impossible, and whether there may then be runs that nobody reads.
    """
    stack = np.empty(a.boundary + 1, dtype=np.int64)
    if a.producer[value] < 0 or a.producer[value] >= a.boundary:
        return 0, False
    stack[0] = a.producer[value]
    marked[stack[0]] = True
    top = 1
    count = 0
    idle = False
    while top > 0:
        top -= 1
        op = stack[top]
        count += 1
        if not a.rerunnable[op]:
            return 0, False
        idle = idle or _idle(a, events, op, before)
        for e in range(a.read_start[op], a.read_start[op + 1]):
            v = a.read[e]
            last, following = _around(events, v, before)
            there = _alive(last) and (_read_next(following) or a.held[v]) and v != value
            for f in range(a.made_start[op], a.made_start[op + 1]):
                there = there and a.taken[a.made[f]] != v
            if not there and not marked[a.producer[v]]:
                marked[a.producer[v]] = True
                stack[top] = a.producer[v]
                top += 1
    return count, idle


@kernel
def split(a: Arrays, order: Ints, events: Events, value: int, before: int) -> tuple[Ints, bool]:
    """The order with `value` computed again just before position `before`.

    What that needs and is not there is computed again, too. Also returns whether there may now be runs that nobody
    reads.

    Returns an empty order where that is impossible. The result may still be illegal where ops write in place; `replay`
    says so.
    """
    marked = np.zeros(a.boundary, dtype=np.bool_)
    count, idle = _closure(a, events, value, before, marked)
    if count == 0:
        return order[:0], False
    result = np.empty(len(order) + count, dtype=np.int64)
    result[:before] = order[:before]
    result[before : before + count] = np.nonzero(marked)[0]
    result[before + count :] = order[before:]
    return result, idle


@kernel
def promise_of(a: Arrays, events: Events, during: Ints, target_bytes: int, value: int, before: int) -> float:
    """A lower bound on the seconds that a split pays per byte of excess that it removes, where all runs are read.

    It is infinite where the split removes none, and minus infinite where this can't be told.
    """
    marked = np.zeros(a.boundary, dtype=np.bool_)
    count, idle = _closure(a, events, value, before, marked)
    if count == 0:
        return np.inf
    if idle or a.others > 0:
        return -np.inf
    added_s = 0.0
    gain = 0.0
    for op in np.nonzero(marked)[0]:
        added_s += a.time_s[op]
        for e in range(a.made_start[op], a.made_start[op + 1]):
            v = a.made[e]
            last, following = _around(events, v, before)
            if _alive(last) and _read_next(following) and not a.held[v]:
                for p in range(last // 4 + 1, before):
                    gain += float(max(0, min(during[p] - target_bytes, a.size_bytes[v])))
    return added_s / gain if gain > 0.0 else np.inf


@kernel
def _idle(a: Arrays, events: Events, op: int, before: int) -> bool:
    """Whether nobody reads, before a position where an op is to run again, what its last run there has made."""
    last = -1
    for e in range(events.ran_start[op], events.ran_start[op + 1]):
        if events.ran[e] < before:
            last = e
    if last < 0:
        return False
    if last == events.ran_start[op] and (a.random[op] or not a.deferrable[op]):
        return False
    for e in range(a.made_start[op], a.made_start[op + 1]):
        _before, following = _around(events, a.made[e], events.ran[last] + 1)
        if _read_next(following) and following < 4 * before and not a.held[a.made[e]]:
            return False
    return True


@kernel
def live_through(events: Events, by_size: Ints, at: int, most: int) -> tuple[Ints, Ints]:
    """The first of these values that are live at a position though its op does not touch them, and their next reads."""
    found, reads = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
    count = 0
    for v in by_size:
        if count == most:
            break
        last, following = _around(events, v, at)
        if last >= 0 and _read_next(following) and following // 4 > at:
            found[count], reads[count] = v, following // 4
            count += 1
    return found[:count], reads[:count]


@kernel
def excess_bytes(during: Ints, target_bytes: int) -> float:
    total = 0.0
    for bytes_held in during:
        if bytes_held > target_bytes:
            total += float(bytes_held - target_bytes)
    return total


@kernel
def bring_down(a: Arrays, order: Ints, target_bytes: int, rounds: int, width: int) -> Ints:
    """Bring the peak of an order down towards a target, one split at the highest position a round.

    A round looks at the `width` largest values live through the peak. It takes the split that pays the fewest seconds
    per byte of excess removed: splits are tried in the order of what they promise, until none that is left can do
    better. Where microbatches wait, a round looks at as many values that are live at the boundary as well: they weigh
    on every position.

    Stops at the target, after `rounds`, or where no split helps.
    """
    during = np.zeros(len(order), dtype=np.int64)
    peak, at, time_s = replay(a, order, during)
    excess = excess_bytes(during, target_bytes)
    by_size = np.nonzero(~a.held & (a.producer >= 0) & (a.producer < a.boundary) & (a.size_bytes > 0))[0]
    by_size = by_size[np.argsort(-a.size_bytes[by_size], kind="mergesort")]
    tidy = False  # whether it is certain that all runs are read
    for _ in range(rounds):
        if peak <= target_bytes:
            break
        events = events_of(a, order)
        values, reads = live_through(events, by_size, at, width)
        if a.others > 0:
            turn = 0
            while order[turn] >= 0:
                turn += 1
            saved, later = live_through(events, by_size, turn, width)
            values, reads = np.concatenate((saved, values)), np.concatenate((later, reads))
        promise = np.empty(len(values), dtype=np.float64)
        for i in range(len(values)):
            promise[i] = promise_of(a, events, during, target_bytes, values[i], reads[i]) if tidy else -np.inf
        best, best_during, best_at, best_peak, best_s = order, during, at, peak, time_s
        best_score = np.inf
        for i in np.argsort(promise, kind="mergesort"):
            if promise[i] >= best_score:
                break
            trial, idle = split(a, order, events, values[i], reads[i])
            if len(trial) == 0 or len(trial) > 16 * len(a.time_s):
                continue
            if idle or not tidy:
                trial = prune(a, trial)
            trial_during = np.zeros(len(trial), dtype=np.int64)
            trial_peak, trial_at, trial_s = replay(a, trial, trial_during)
            if trial_peak < 0 or trial_peak > peak:
                continue
            gain = excess - excess_bytes(trial_during, target_bytes)
            if gain <= 0.0:
                continue
            score = (trial_s - time_s) / gain
            if score < best_score:
                best, best_during, best_at, best_peak, best_s = trial, trial_during, trial_at, trial_peak, trial_s
                best_score = score
        if best_score == np.inf:
            break
        order, during, at, peak, time_s = best, best_during, best_at, best_peak, best_s
        excess = excess_bytes(during, target_bytes)
        tidy = True
    return order
