"""Search over the retention intervals of a plain DAG: kernels on orders of nodes.

An order lists runs of nodes, first ones and repeated ones. A run's output is retained from the run to its last read
before the node runs again, so an order with at most C runs of each node is a choice of at most C retention intervals
for each (Bartan et al., "Moccasin", arXiv 2304.14463, who hand the same space to a constraint solver). Any order in
which every node follows the first runs of its inputs is legal, which makes moves cheap: insert a run, remove a repeated
run, move a run. `improve` is a large-neighbourhood search (Shaw, 1998): it removes a few repeated runs, brings
the peak back under the limit with others, and keeps what costs no more, up to a threshold that shrinks to nothing
(record-to-record travel, Dueck, 1993).

Node indices are a topological order. Limits are counts of trials, one evaluated order each; the generator of random
numbers is in here, so that results are equal everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memplan.solvers.flat import Flags, Flat, Floats, Ints
from memplan.solvers.jit import kernel

State = NDArray[np.uint64]


class DagArrays(NamedTuple):
    """A DAG in compressed rows: node i reads `read[read_start[i]:read_start[i + 1]]`.

    size_bytes, time_s: of each node's output, and of one run. held[i]: the output stays once made, so i runs once.
    """

    read_start: Ints
    read: Ints
    size_bytes: Ints
    time_s: Floats
    held: Flags


def dag_arrays(flat: Flat) -> DagArrays:
    """What the kernels below read of a flattened DAG, whose op i makes value i and nothing else."""
    a = flat.arrays
    return DagArrays(a.read_start, a.read, a.size_bytes, a.time_s, a.held)


@kernel
def _below(state: State, limit: int) -> int:
    """A pseudo-random integer from 0 to limit - 1 (xorshift64*, Marsaglia, 2003, and Vigna, 2016)."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return int((x * np.uint64(2685821657736338717)) >> np.uint64(33)) % limit


@kernel
def measure(a: DagArrays, order: Ints, end: Ints, during: Ints) -> tuple[int, float]:
    """(peak bytes, seconds) of an order; (-1, 0.0) where it reads what was never made, or runs a held node twice.

    Fills end[p], the last position to which the output of run p is retained, and during[p], the bytes held there.
    """
    n = len(order)
    latest = np.full(len(a.size_bytes), -1, dtype=np.int64)
    change = np.zeros(n + 1, dtype=np.int64)
    time_s = 0.0
    for p in range(n):
        node = order[p]
        for e in range(a.read_start[node], a.read_start[node + 1]):
            source = latest[a.read[e]]
            if source < 0:
                return -1, 0.0
            end[source] = p
        if a.held[node] and latest[node] >= 0:
            return -1, 0.0
        latest[node] = p
        end[p] = p
        time_s += a.time_s[node]
    for p in range(n):
        node = order[p]
        if a.held[node]:
            end[p] = n - 1
        change[p] += a.size_bytes[node]
        change[end[p] + 1] -= a.size_bytes[node]
    live = 0
    peak = 0
    for p in range(n):
        live += change[p]
        during[p] = live
        peak = max(peak, live)
    return peak, time_s


@kernel
def needed_runs(a: DagArrays, order: Ints) -> Ints:
    """The order without runs that nobody reads; every node that ran still runs once."""
    n = len(order)
    nodes = len(a.size_bytes)
    first = np.full(nodes, -1, dtype=np.int64)
    for p in range(n - 1, -1, -1):
        first[order[p]] = p
    keep = np.zeros(n, dtype=np.bool_)
    later = np.zeros(nodes, dtype=np.bool_)
    runs = np.zeros(nodes, dtype=np.bool_)
    for p in range(n - 1, -1, -1):
        node = order[p]
        if (a.held[node] and p != first[node]) or not (later[node] or (p == first[node] and not runs[node])):
            continue
        keep[p] = True
        runs[node] = True
        later[node] = False
        for e in range(a.read_start[node], a.read_start[node + 1]):
            later[a.read[e]] = True
    return order[keep]


@kernel
def excess(during: Ints, limit_bytes: int) -> float:
    """Bytes above a limit, added up over positions."""
    total = 0.0
    for held_bytes in during:
        if held_bytes > limit_bytes:
            total += float(held_bytes - limit_bytes)
    return total


@kernel
def recompute(
    a: DagArrays, order: Ints, end: Ints, during: Ints, node: int, before: int, limit_bytes: int, intervals: int,
    extend: bool,
) -> Ints:  # fmt: skip
    """The order with `node` run again just before a position, so that its output need not be retained up to there.

    An input that is gone by then is run again as well, or, where `extend` is set and it fits, or where the input has
    all its intervals, retained for longer.
    """
    nodes = len(a.size_bytes)
    latest = np.full(nodes, -1, dtype=np.int64)
    runs = np.zeros(nodes, dtype=np.int64)
    for p in range(before):
        latest[order[p]] = p
        runs[order[p]] += 1
    for p in range(before, len(order)):
        runs[order[p]] += 1
    marked = np.zeros(node + 1, dtype=np.bool_)
    marked[node] = True
    count = 0
    # Inputs have smaller indices, so one sweep downwards closes the set.
    for x in range(node, -1, -1):
        if not marked[x]:
            continue
        count += 1
        for e in range(a.read_start[x], a.read_start[x + 1]):
            u = a.read[e]
            stop = end[latest[u]]
            if stop >= before or marked[u] or a.held[u]:
                continue
            retain = runs[u] >= intervals
            if extend and not retain:
                retain = True
                for q in range(stop + 1, before):
                    if during[q] + a.size_bytes[u] > limit_bytes:
                        retain = False
                        break
            if not retain:
                marked[u] = True
    longer = np.empty(len(order) + count, dtype=np.int64)
    longer[:before] = order[:before]
    at = before
    for x in range(node + 1):
        if marked[x]:
            longer[at] = x
            at += 1
    longer[at:] = order[before:]
    return longer


@kernel
def _moved(order: Ints, source: int, target: int) -> Ints:
    """The order with the run at `source` standing at `target`."""
    result = order.copy()
    node = order[source]
    if target < source:
        result[target + 1 : source + 1] = order[target:source]
    else:
        result[source:target] = order[source + 1 : target + 1]
    result[target] = node
    return result


@kernel
def _live_through(
    a: DagArrays, order: Ints, end: Ints, at: int, intervals: int, state: State
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
        score[count] = (seconds + 1e-12) / a.size_bytes[v] * (0.5 + _below(state, 1024) / 1024.0)
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
    return _moved(order, reader, at)


@kernel
def repair(
    a: DagArrays, order: Ints, limit_bytes: int, most_s: float, steps: int, width: int, most_width: int,
    intervals: int, state: State, trials: Ints,
) -> Ints:  # fmt: skip
    """Bring the peak under a limit: at the highest position, end the retention that costs least for what it frees.

    A step tries the `width` most promising outputs, and up to `most_width` where none of them helps. Stops at the
    limit, above `most_s` seconds, after `steps`, where nothing helps, or when trials[0] reaches trials[1].
    """
    end = np.empty(len(order), dtype=np.int64)
    during = np.empty(len(order), dtype=np.int64)
    peak, time_s = measure(a, order, end, during)
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
                    extend = _below(state, 2) == 0
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
                trial_peak, trial_s = measure(a, trial, trial_end, trial_during)
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
        peak, time_s = measure(a, order, end, during)
    return order


@kernel
def _random_move(a: DagArrays, order: Ints, end: Ints, state: State) -> Ints:
    """A random run at another place at which it is legal and all its readers still follow it."""
    source = _below(state, len(order))
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
    way = _below(state, 4)
    if way == 0:
        target = lowest
    elif way == 1:
        target = highest
    elif way == 2:
        target = lowest + _below(state, highest - lowest + 1)
    else:
        target = min(max(source - 8 + _below(state, 17), lowest), highest)
    if target == source:
        return order[:0]
    return _moved(order, source, target)


@kernel
def reorder(a: DagArrays, order: Ints, limit_bytes: int, state: State, trials: Ints) -> Ints:
    """Random moves that run nothing again, kept where the bytes above the limit do not grow; stops when all fits."""
    end = np.empty(len(order), dtype=np.int64)
    during = np.empty(len(order), dtype=np.int64)
    peak, _time_s = measure(a, order, end, during)
    over = excess(during, limit_bytes)
    while over > 0.0 and trials[0] < trials[1]:
        trials[0] += 1
        trial = _random_move(a, order, end, state)
        if len(trial) == 0:
            continue
        trial_end = np.empty(len(trial), dtype=np.int64)
        peak, _time_s = measure(a, trial, trial_end, during)
        if peak < 0:
            continue
        trial_over = excess(during, limit_bytes)
        if trial_over <= over:
            order, over, end = trial, trial_over, trial_end
    return order


@kernel
def descend(
    a: DagArrays, order: Ints, limit_bytes: int, rounds: int, width: int, intervals: int, state: State, trials: Ints
) -> Ints:
    """Reorder and repair towards a limit in stages, smaller ones after a failure.

    A limit far out of reach misleads `repair`, for all that a repeated run adds is excess then.
    """
    best = order
    end = np.empty(len(order), dtype=np.int64)
    during = np.empty(len(order), dtype=np.int64)
    peak, _time_s = measure(a, order, end, during)
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
        trial_peak, _time_s = measure(a, trial, end, during)
        if 0 <= trial_peak < peak:
            best = trial
            peak = trial_peak
        if trial_peak > target:
            part = min(2 * part, 256)
        elif part > 3:
            part //= 2
    return best


@kernel
def repeated(a: DagArrays, order: Ints) -> Ints:
    """Positions of runs that are not their node's first."""
    seen = np.zeros(len(a.size_bytes), dtype=np.bool_)
    again = np.zeros(len(order), dtype=np.bool_)
    for p in range(len(order)):
        again[p] = seen[order[p]]
        seen[order[p]] = True
    return np.nonzero(again)[0]


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
            peak, _time_s = measure(a, trial, end, during)
            trials[0] += 1
            if 0 <= peak <= limit_bytes:
                order = trial
                found = True
                break
    return order


@kernel
def _without_some(a: DagArrays, order: Ints, again: Ints, state: State) -> Ints:
    """The order less a few repeated runs that stand close together."""
    start = _below(state, len(again))
    count = 1 + _below(state, 3)
    if _below(state, 8) == 0:
        count = 1 + _below(state, 24)
    keep = np.ones(len(order), dtype=np.bool_)
    for i in range(start, min(start + count, len(again))):
        keep[again[i]] = False
    return needed_runs(a, order[keep])


@kernel
def improve(
    a: DagArrays, order: Ints, limit_bytes: int, least_s: float, width: int, intervals: int, threshold: float,
    state: State, trials: Ints,
) -> Ints:  # fmt: skip
    """The large-neighbourhood search, from an order that fits. Stops at `least_s` seconds or at trials[1].

    threshold: how much slower than the best, as a part of its overhead, an order to go on from may be at the start.
    """
    end = np.empty(len(order), dtype=np.int64)
    during = np.empty(len(order), dtype=np.int64)
    _peak, time_s = measure(a, order, end, during)
    area = float(during.sum()) / len(order)
    best = order
    best_s = time_s
    begun = trials[0]
    base_s = float(a.time_s.sum())
    while trials[0] < trials[1] and best_s > least_s * (1 + 1e-12):
        left = 1.0 - (trials[0] - begun) / (trials[1] - begun)
        most_s = best_s + threshold * left * (best_s - base_s)
        again = repeated(a, order)
        move = _below(state, 4) == 0
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
        trial_peak, trial_s = measure(a, trial, trial_end, trial_during)
        if trial_peak < 0 or trial_peak > limit_bytes or trial_s > most_s:
            continue
        trial_area = float(trial_during.sum()) / len(trial)
        if move and trial_area > area and _below(state, 4) > 0:
            continue
        order, time_s, end, area = trial, trial_s, trial_end, trial_area
        if time_s < best_s * (1 - 1e-12):
            best, best_s = order, time_s
    return best


@kernel
def greedy_order(a: DagArrays, readers: Ints) -> Ints:
    """Every node once: of the nodes that can run, always the one after which the fewest bytes are added.

    readers[i]: nodes that read i.
    """
    nodes = len(a.size_bytes)
    left = readers.copy()
    waits = np.zeros(nodes, dtype=np.int64)
    for v in range(nodes):
        waits[v] = a.read_start[v + 1] - a.read_start[v]
    done = np.zeros(nodes, dtype=np.bool_)
    order = np.empty(nodes, dtype=np.int64)
    for p in range(nodes):
        best = -1
        best_bytes = 0
        for v in range(nodes):
            if done[v] or waits[v] > 0:
                continue
            added = a.size_bytes[v] if left[v] > 0 or a.held[v] else 0
            for e in range(a.read_start[v], a.read_start[v + 1]):
                if left[a.read[e]] == 1 and not a.held[a.read[e]]:
                    added -= a.size_bytes[a.read[e]]
            if best < 0 or added < best_bytes:
                best = v
                best_bytes = added
        order[p] = best
        done[best] = True
        for e in range(a.read_start[best], a.read_start[best + 1]):
            left[a.read[e]] -= 1
        for v in range(best + 1, nodes):
            for e in range(a.read_start[v], a.read_start[v + 1]):
                if a.read[e] == best:
                    waits[v] -= 1
    return order
