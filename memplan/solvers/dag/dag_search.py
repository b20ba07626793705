"""Search over orders of a plain DAG (`dag_order`): down to a limit of bytes, and then to fewer seconds.

`improve_order` is a large-neighbourhood search (Shaw, 1998): it removes a few repeated runs, brings the peak back under
the limit with others, and keeps what costs no more, up to a threshold that shrinks to nothing (record-to-record travel,
Dueck, 1993).

Limits are counts of trials, one evaluated order each.
"""

from __future__ import annotations

import numpy as np

from memplan.solvers.dag.dag_order import DagArrays, excess, measure_order, moved, needed_runs, recompute, repeated
from memplan.solvers.numeric.draws import DrawState, below
from memplan.solvers.numeric.jit import kernel
from memplan.solvers.orders.flat import Ints


@kernel
def _live_through(
    a: DagArrays, order: Ints, end: Ints, at: int, intervals: int, state: DrawState
) -> tuple[Ints, Ints, Ints]:
    """Outputs retained through a position that does not touch them, best first: nodes, next reads, runs in order.

    Best is few seconds per byte, with noise, so that repeated searches look at others.
    """
    nodes = len(a.size_bytes)
    latest = np.full(nodes, -1, dtype=np.int64)
    runs = np.zeros(nodes, dtype=np.int64)
    unread = np.zeros(nodes, dtype=np.bool_)  # then a later run costs nothing: it takes the place of this one
    for p in range(len(order)):
        runs[order[p]] += 1
        if p < at:
            latest[order[p]] = p
            unread[order[p]] = True
            for e in range(a.read_start[order[p]], a.read_start[order[p] + 1]):
                unread[a.read[e]] = False
    touched = order[at]
    next_read = np.full(nodes, -1, dtype=np.int64)
    for p in range(len(order) - 1, at - 1, -1):
        for e in range(a.read_start[order[p]], a.read_start[order[p] + 1]):
            next_read[a.read[e]] = p
    found = np.empty(nodes, dtype=np.int64)
    score = np.empty(nodes, dtype=np.float64)
    count = 0
    for v in range(nodes):
        q = latest[v]
        if q < 0 or end[q] <= at or a.held[v] or v == touched or a.size_bytes[v] == 0 or next_read[v] <= at:
            continue
        if runs[v] >= intervals and not unread[v]:
            continue
        found[count] = v
        seconds = 0.0 if unread[v] else a.time_s[v]
        score[count] = (seconds + 1e-12) / a.size_bytes[v] * (0.5 + below(state, 1024) / 1024.0)
        count += 1
    ranked = found[:count][np.argsort(score[:count], kind="mergesort")]
    return ranked, next_read[ranked], latest[ranked]


@kernel
def _advanced(a: DagArrays, order: Ints, reader: int, at: int) -> Ints:
    """The order with the run at `reader` moved up to `at`; empty where one of its inputs is not there yet."""
    node = order[reader]
    for e in range(a.read_start[node], a.read_start[node + 1]):
        there = False
        for p in range(at):
            if order[p] == a.read[e]:
                there = True
                break
        if not there:
            return order[:0]
    return moved(order, reader, at)


@kernel
def repair(
    a: DagArrays, order: Ints, limit_bytes: int, most_s: float, steps: int, width: int, most_width: int,
    intervals: int, state: DrawState, trials: Ints,
) -> Ints:  # fmt: skip
    """Bring the peak under a limit: at the highest position, end the retention that costs least for what it frees.

    A step tries the `width` most promising outputs, and up to `most_width` where none of them helps.

    Stops at the limit, above `most_s` seconds, after `steps`, where nothing helps, or when trials[0] reaches trials[1].
    """
    end = np.empty(len(order), dtype=np.int64)
    during = np.empty(len(order), dtype=np.int64)
    peak, time_s = measure_order(a, order, end, during)
    trials[0] += 1
    for _ in range(steps):
        if peak <= limit_bytes or time_s > most_s or trials[0] >= trials[1]:
            break
        over = excess(during, limit_bytes)
        at = int(np.argmax(during))
        nodes, reads, made = _live_through(a, order, end, at, intervals, state)
        best = order
        best_score = np.inf
        for i in range(len(nodes)):
            if (i >= width and best_score < np.inf) or i >= most_width:
                break
            for way in range(2):
                if way == 0:
                    extend = below(state, 2) == 0
                    trial = recompute(a, order, end, during, nodes[i], reads[i], limit_bytes, intervals, extend)
                elif end[made[i]] == reads[i]:
                    trial = _advanced(a, order, reads[i], at)
                else:
                    continue
                if len(trial) == 0:
                    continue
                trial = needed_runs(a, trial)
                trial_end = np.empty(len(trial), dtype=np.int64)
                trial_during = np.empty(len(trial), dtype=np.int64)
                trial_peak, trial_s = measure_order(a, trial, trial_end, trial_during)
                trials[0] += 1
                if trial_peak < 0:
                    continue
                gain = over - excess(trial_during, limit_bytes)
                if gain <= 0.0:
                    continue
                spent_s = trial_s - time_s
                score = (spent_s + 1e-12) / gain if spent_s >= 0.0 else spent_s * gain
                if score < best_score:
                    best = trial
                    best_score = score
        if best_score == np.inf:
            break
        order = best
        end = np.empty(len(order), dtype=np.int64)
        during = np.empty(len(order), dtype=np.int64)
        peak, time_s = measure_order(a, order, end, during)
    return order


@kernel
def _random_move(a: DagArrays, order: Ints, end: Ints, state: DrawState) -> Ints:
    """A random run at another place at which it is legal and all its readers still follow it."""
    source = below(state, len(order))
    node = order[source]
    lowest = 0
    for e in range(a.read_start[node], a.read_start[node + 1]):
        u = a.read[e]
        for p in range(len(order)):
            if order[p] == u:
                lowest = max(lowest, p + 1)
                break
    highest = len(order) - 1
    for p in range(source + 1, len(order)):
        meets = order[p] == node
        for e in range(a.read_start[order[p]], a.read_start[order[p] + 1]):
            meets = meets or a.read[e] == node
        if meets:
            highest = p - 1
            break
    if lowest >= highest or lowest > source:
        return order[:0]
    way = below(state, 4)
    if way == 0:
        target = lowest
    elif way == 1:
        target = highest
    elif way == 2:
        target = lowest + below(state, highest - lowest + 1)
    else:
        target = min(max(source - 8 + below(state, 17), lowest), highest)
    if target == source:
        return order[:0]
    return moved(order, source, target)


@kernel
def reorder(a: DagArrays, order: Ints, limit_bytes: int, state: DrawState, trials: Ints) -> Ints:
    """Random moves that run nothing again, kept where the bytes above the limit do not grow; stops when all fits."""
    end = np.empty(len(order), dtype=np.int64)
    during = np.empty(len(order), dtype=np.int64)
    peak, _time_s = measure_order(a, order, end, during)
    over = excess(during, limit_bytes)
    while over > 0.0 and trials[0] < trials[1]:
        trials[0] += 1
        trial = _random_move(a, order, end, state)
        if len(trial) == 0:
            continue
        trial_end = np.empty(len(trial), dtype=np.int64)
        peak, _time_s = measure_order(a, trial, trial_end, during)
        if peak < 0:
            continue
        trial_over = excess(during, limit_bytes)
        if trial_over <= over:
            order, over, end = trial, trial_over, trial_end
    return order


@kernel
def descend(
    a: DagArrays, order: Ints, limit_bytes: int, rounds: int, width: int, intervals: int, state: DrawState, trials: Ints
) -> Ints:
    """Reorder and repair towards a limit in stages, smaller ones after a failure.

    A limit far out of reach misleads `repair`, for all that a repeated run adds is excess then.
    """
    best = order
    end = np.empty(len(order), dtype=np.int64)
    during = np.empty(len(order), dtype=np.int64)
    peak, _time_s = measure_order(a, order, end, during)
    part = 3
    nodes = len(a.size_bytes)
    for _ in range(rounds):
        if peak <= limit_bytes or trials[0] >= trials[1]:
            break
        target = peak - max((peak - limit_bytes) // part, 1)
        some = np.array([trials[0], min(trials[1], trials[0] + nodes)], dtype=np.int64)
        trial = reorder(a, best, target, state, some)
        trials[0] = some[0]
        trial = repair(a, trial, target, np.inf, 4 * nodes, width, nodes, intervals, state, trials)
        end = np.empty(len(trial), dtype=np.int64)
        during = np.empty(len(trial), dtype=np.int64)
        trial_peak, _time_s = measure_order(a, trial, end, during)
        if 0 <= trial_peak < peak:
            best = trial
            peak = trial_peak
        if trial_peak > target:
            part = min(2 * part, 256)
        elif part > 3:
            part //= 2
    return best


@kernel
def drop_repeats(a: DagArrays, order: Ints, limit_bytes: int, trials: Ints) -> Ints:
    """Take out repeated runs one at a time, those of most seconds first, as long as the peak stays under the limit."""
    found = True
    while found:
        found = False
        again = repeated(a, order)
        ranked = again[np.argsort(-a.time_s[order[again]], kind="mergesort")]
        for p in ranked:
            if trials[0] >= trials[1]:
                return order
            keep = np.ones(len(order), dtype=np.bool_)
            keep[p] = False
            trial = needed_runs(a, order[keep])
            end = np.empty(len(trial), dtype=np.int64)
            during = np.empty(len(trial), dtype=np.int64)
            peak, _time_s = measure_order(a, trial, end, during)
            trials[0] += 1
            if 0 <= peak <= limit_bytes:
                order = trial
                found = True
                break
    return order


@kernel
def _without_some(a: DagArrays, order: Ints, again: Ints, state: DrawState) -> Ints:
    """The order less a few repeated runs that stand close together."""
    start = below(state, len(again))
    count = 1 + below(state, 3)
    if below(state, 8) == 0:
        count = 1 + below(state, 24)
    keep = np.ones(len(order), dtype=np.bool_)
    for i in range(start, min(start + count, len(again))):
        keep[again[i]] = False
    return needed_runs(a, order[keep])


@kernel
def improve_order(
    a: DagArrays, order: Ints, limit_bytes: int, least_s: float, width: int, intervals: int, threshold: float,
    state: DrawState, trials: Ints,
) -> Ints:  # fmt: skip
    """The large-neighbourhood search, from an order that fits. Stops at `least_s` seconds or at trials[1].

    threshold: how much slower than the best, as a part of its overhead, an order to go on from may be at the start.
    """
    end = np.empty(len(order), dtype=np.int64)
    during = np.empty(len(order), dtype=np.int64)
    _peak, time_s = measure_order(a, order, end, during)
    area = float(during.sum()) / len(order)
    best = order
    best_s = time_s
    begun = trials[0]
    base_s = float(a.time_s.sum())
    while trials[0] < trials[1] and best_s > least_s * (1 + 1e-12):
        left = 1.0 - (trials[0] - begun) / (trials[1] - begun)
        most_s = best_s + threshold * left * (best_s - base_s)
        again = repeated(a, order)
        move = below(state, 4) == 0
        if len(again) == 0:
            break
        if move:
            trial = _random_move(a, order, end, state)
            trials[0] += 1
            if len(trial) == 0:
                continue
            trial = needed_runs(a, trial)
        else:
            trial = _without_some(a, order, again, state)
            trial = repair(a, trial, limit_bytes, most_s, 12, width, 4 * width, intervals, state, trials)
        trial_end = np.empty(len(trial), dtype=np.int64)
        trial_during = np.empty(len(trial), dtype=np.int64)
        trial_peak, trial_s = measure_order(a, trial, trial_end, trial_during)
        if trial_peak < 0 or trial_peak > limit_bytes or trial_s > most_s:
            continue
        trial_area = float(trial_during.sum()) / len(trial)
        if move and trial_area > area and below(state, 4) > 0:
            continue
        order, time_s, end, area = trial, trial_s, trial_end, trial_area
        if time_s < best_s * (1 - 1e-12):
            best, best_s = order, time_s
    return best
