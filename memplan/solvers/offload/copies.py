"""Which values leave the device between two uses, and when their copies run: kernels for one order of ops.

`find_gaps` lists the gaps of an order. `evict` closes some so that a budget is kept. `settle` says from when to when a
closed gap's value is away, and `lanes` what that comes to in seconds and host memory, as `simulate` would count it.
`fit_copies` says which rules these follow, and why. All is about one microbatch by itself; `limits` are the bytes that
it may hold at each position.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from memplan.jit import kernel
from memplan.problem.data import Problem
from memplan.solvers.orders.flat import Flags, Floats, Ints, compressed

_GATHER = 1


class Movables(NamedTuple):
    """What kernels read of a problem.

    Compressed rows: op i reads `read[read_start[i]:read_start[i + 1]]`, and makes values likewise.

    - taken[v]: the value whose memory v takes over, -1 where there is none.
    - movable[v]: v may be away between two uses.
    - fetched[v]: v lives elsewhere.
    - lasting[v]: v lives elsewhere, and a copy of it may stay on the device between steps.
    - leaves[v]: v is a gradient that ends on the host.
    - resident[v]: no run makes v.
    - out_s, in_s: seconds of a copy to the host, and of one back or a gather.
    - lane[v]: 1 for gathers.
    - outputs: read at the boundary.
    - time_s: of ops.
    """

    read_start: Ints
    read: Ints
    made_start: Ints
    made: Ints
    taken: Ints
    size_bytes: Ints
    movable: Flags
    fetched: Flags
    lasting: Flags
    leaves: Flags
    resident: Flags
    out_s: Floats
    in_s: Floats
    lane: Ints
    outputs: Ints
    time_s: Floats


class Gaps(NamedTuple):
    """Gaps between two uses of values, by positions in an order.

    - value: whose gap it is.
    - start: position of the use before, -1 at the start of the step.
    - stop: position of the use after, one past the last position where there is none.
    - made: position of the run that made what leaves, -1 where none did.
    - copies: whether leaving takes a copy (the value is not on the host yet).
    - closed: whether the value is away.
    - gone: the first position at which it need not be there any more.
    - back: the position from which it is there again.
    """

    value: Ints
    start: Ints
    stop: Ints
    made: Ints
    copies: Flags
    closed: Flags
    gone: Ints
    back: Ints


def movables_of(problem: Problem) -> Movables:
    """Lower a problem for these kernels."""
    values, ops, link, gather = problem.graph.values, problem.graph.ops, problem.link, problem.gather
    size_bytes = np.array([v.size_bytes for v in values], dtype=np.int64)
    sharded = np.array([v.home == "sharded" for v in values], dtype=np.bool_)
    fetched = np.array([v.fetched for v in values], dtype=np.bool_)
    objects = {op.outputs[-1] for op in ops if op.is_island}  # these stand for Python objects, as no copies of them do
    out_s, in_s = np.zeros(len(values)), np.zeros(len(values))
    if link is not None:
        out_s = link.latency_s + size_bytes / link.to_host_bytes_per_s
        in_s = link.latency_s + size_bytes / link.to_device_bytes_per_s
    if gather is not None:
        in_s = np.where(sharded, gather.latency_s + size_bytes / gather.bytes_per_s, in_s)
    return Movables(
        *compressed([tuple(dict.fromkeys(op.inputs)) for op in ops]), *compressed([op.outputs for op in ops]),
        taken=np.array([-1 if v.reuses is None else v.reuses for v in values], dtype=np.int64),
        size_bytes=size_bytes,
        movable=(fetched | (link is not None)) & [not v.held and i not in objects for i, v in enumerate(values)],
        fetched=fetched,
        lasting=np.array([v.lasting and problem.in_flight == 1 for v in values], dtype=np.bool_),
        leaves=np.array([v.home == "host" and not v.fetched for v in values], dtype=np.bool_),
        resident=np.array([v.resident for v in values], dtype=np.bool_),
        out_s=out_s, in_s=in_s, lane=np.where(sharded, _GATHER, 0),
        outputs=np.array(problem.graph.outputs, dtype=np.int64),
        time_s=np.array(problem.costs.time_s, dtype=np.float64),
    )  # fmt: skip


@kernel
def find_gaps(m: Movables, order: Ints, least_bytes: int, held: Ints, staying: Ints) -> Gaps:
    """The gaps of all values of more than `least_bytes`.

    Those before the first and after the last use of what lives elsewhere are closed already.

    - held: bytes at each position without what lives elsewhere, and with gradients up to their last use. On return
      these values count, too.
    - staying: of what lives elsewhere, what is there when the step begins. It is used once more by the end of the step.
    """
    end, values = len(order), len(m.size_bytes)
    most = 2 * values + len(staying)
    stays = np.zeros(values, dtype=np.bool_)
    stays[staying] = True
    for p in range(end):
        op = order[p]
        if op < 0:
            most += len(m.outputs)
        else:
            most += m.read_start[op + 1] - m.read_start[op] + m.made_start[op + 1] - m.made_start[op]
    value = np.empty(most, dtype=np.int64)
    start = np.empty(most, dtype=np.int64)
    stop = np.empty(most, dtype=np.int64)
    made = np.empty(most, dtype=np.int64)
    closed = np.zeros(most, dtype=np.bool_)
    last = np.full(values, -1, dtype=np.int64)
    made_at = np.full(values, -1, dtype=np.int64)
    touched = np.empty(most, dtype=np.int64)
    count = 0
    for p in range(end):
        op = order[p]
        touches = 0
        if op < 0:
            for v in m.outputs:
                touched[touches] = v
                touches += 1
        else:
            for e in range(m.read_start[op], m.read_start[op + 1]):
                touched[touches] = m.read[e]
                touches += 1
            for e in range(m.made_start[op], m.made_start[op + 1]):
                if m.taken[m.made[e]] >= 0:
                    touched[touches] = m.taken[m.made[e]]
                    touches += 1
        if p == end - 1:
            for v in staying:
                touched[touches] = v
                touches += 1
        for k in range(touches):
            v = touched[k]
            first = last[v] < 0
            if first and not m.fetched[v]:
                continue  # it is there throughout
            if first and stays[v]:
                last[v] = p
                continue
            if first or (p > last[v] + 1 and m.movable[v] and m.size_bytes[v] > least_bytes):
                value[count], start[count], stop[count], made[count] = v, last[v], p, made_at[v]
                closed[count] = first
                count += 1
            last[v] = p
        if op >= 0:
            for e in range(m.made_start[op], m.made_start[op + 1]):
                v = m.made[e]
                if not m.resident[v]:
                    last[v] = made_at[v] = p
    for v in range(values):
        if stays[v]:
            held += m.size_bytes[v]
        elif last[v] >= 0 and (m.fetched[v] or m.leaves[v]):
            value[count], start[count], stop[count], made[count] = v, last[v], end, made_at[v]
            closed[count] = m.fetched[v]
            count += 1
            if m.fetched[v]:
                held += m.size_bytes[v]
            else:  # a gradient: it stays until it is copied out
                held[last[v] + 1 :] += m.size_bytes[v]
    value, start, stop, made, closed = value[:count], start[:count], stop[:count], made[:count], closed[:count]
    gone = np.full(count, -1, dtype=np.int64)
    for g in range(count):
        if closed[g]:
            gone[g] = start[g] + 1
            held[gone[g] : stop[g]] -= m.size_bytes[value[g]]
    return Gaps(value, start, stop, made, ~m.fetched[value], closed, gone, stop.copy())


@kernel
def _close(m: Movables, gaps: Gaps, g: int, position: int, held: Ints) -> None:
    """Let a value be away from a position to its next use; from the start of the gap on where leaving is free."""
    gaps.gone[g] = position if gaps.copies[g] else gaps.start[g] + 1
    gaps.closed[g] = True
    held[gaps.gone[g] : gaps.stop[g]] -= m.size_bytes[gaps.value[g]]


@kernel
def evict(m: Movables, gaps: Gaps, limits: Ints, held: Ints) -> bool:
    """Close gaps until nothing is over its limit, those of next uses farthest away first. False where that fails."""
    end = len(held)
    by_start = np.argsort(gaps.start, kind="mergesort")
    heap = [(0, 0, 0, 0)]
    heap.pop()
    waiting = 0
    for p in range(end):
        while waiting < len(by_start) and gaps.start[by_start[waiting]] < p:
            g = by_start[waiting]
            if not gaps.closed[g]:
                v = gaps.value[g]
                heappush(heap, (-gaps.stop[g], -m.size_bytes[v], v, g))
            waiting += 1
        while held[p] > limits[p]:
            if len(heap) == 0 or -heap[0][0] <= p:
                return False
            _close(m, gaps, heappop(heap)[3], p, held)
    for g in range(len(gaps.value)):
        if gaps.stop[g] == end and not gaps.closed[g]:  # a gradient that nobody had to make room for
            _close(m, gaps, g, end, held)
    return True


@kernel
def close_all(m: Movables, gaps: Gaps, held: Ints) -> None:
    """Let every value be away between any two uses."""
    for g in range(len(gaps.value)):
        if not gaps.closed[g]:
            _close(m, gaps, g, gaps.start[g] + 1, held)


@kernel
def _sorted(gaps: Gaps, first: Ints, then: Ints) -> Ints:
    """Closed gaps by two keys."""
    closed = np.nonzero(gaps.closed)[0]
    closed = closed[np.argsort(then[closed], kind="mergesort")]
    return closed[np.argsort(first[closed], kind="mergesort")]


@kernel
def settle(m: Movables, gaps: Gaps, begin_s: Floats, limits: Ints, held: Ints) -> None:
    """Say from when to when each value is away. begin_s: of each position, and the end of the last."""
    by_start = _sorted(gaps, gaps.start, gaps.value)
    copied = np.full(len(m.size_bytes), -1, dtype=np.int64)
    for g in by_start:  # a value that leaves a second time is on the host already
        v = gaps.value[g]
        if gaps.copies[g] and copied[v] == gaps.made[g]:
            gaps.copies[g] = False
            held[gaps.start[g] + 1 : gaps.gone[g]] -= m.size_bytes[v]
            gaps.gone[g] = gaps.start[g] + 1
        elif gaps.copies[g]:
            copied[v] = gaps.made[g]
    free_s = 0.0
    for g in by_start:  # values go as soon as their copy is done, which may be before their room is needed
        if gaps.copies[g]:
            v = gaps.value[g]
            free_s = max(free_s, begin_s[gaps.start[g] + 1]) + m.out_s[v]
            done = np.searchsorted(begin_s, free_s)
            gone = max(gaps.start[g] + 1, min(done, gaps.gone[g]))
            held[gone : gaps.gone[g]] -= m.size_bytes[v]
            gaps.gone[g] = gone
    # Begin to fetch as late as keeps nobody waiting, or else as early as there is room.
    end = len(held)
    by_stop = _sorted(gaps, gaps.stop, gaps.value)
    wanted = np.zeros(len(gaps.value), dtype=np.int64)
    lane_s = np.full(2, np.inf)
    for g in by_stop[::-1]:
        if gaps.stop[g] < end:
            v = gaps.value[g]
            lane = m.lane[v]
            lane_s[lane] = min(lane_s[lane], begin_s[gaps.stop[g]]) - m.in_s[v]
            wanted[g] = max(0, np.searchsorted(begin_s, lane_s[lane], side="right") - 1)
    earliest = 0
    for g in by_stop:
        if gaps.stop[g] < end:
            size_bytes = m.size_bytes[gaps.value[g]]
            start = max(wanted[g], gaps.gone[g], earliest)
            back = gaps.stop[g]
            while back > start and held[back - 1] + size_bytes <= limits[back - 1]:
                back -= 1
            held[back : gaps.stop[g]] += size_bytes
            gaps.back[g] = back
            earliest = back


@kernel
def _last_of_each(m: Movables, gaps: Gaps) -> Flags:
    """Whether a closed gap is the last of what one run made."""
    latest = np.full(len(m.size_bytes), -1, dtype=np.int64)
    found = gaps.closed.copy()
    for g in _sorted(gaps, gaps.start, gaps.stop):
        before = latest[gaps.value[g]]
        if before >= 0 and gaps.made[before] == gaps.made[g]:
            found[before] = False
        latest[gaps.value[g]] = g
    return found


@kernel
def lanes(
    m: Movables, order: Ints, gaps: Gaps, read_to: Ints, update_s_per_byte: float, in_flight: int
) -> tuple[float, int]:
    """Seconds of the step with these copies, and the most host memory that they hold beside gradients.

    - read_to[v]: where v is a gradient with which a parameter is updated in backward, the position after which nothing
      reads that parameter; -1 elsewhere.
    - update_s_per_byte: seconds that the CPU takes to update parameters, for each byte of their gradients.
    - in_flight: microbatches that go forward one after the other, then backward. The seconds are those of each on the
      average, the host memory that of one.
    """
    end, turn = len(order), np.nonzero(order < 0)[0][0]
    by_stop = _sorted(gaps, gaps.stop, gaps.value)
    last = _last_of_each(m, gaps)
    updated_at = np.maximum(gaps.gone, read_to[gaps.value] + 1)
    leaving = by_stop[np.argsort(gaps.gone[by_stop], kind="mergesort")]
    updating = by_stop[np.argsort(updated_at[by_stop], kind="mergesort")]
    coming = by_stop[np.argsort(gaps.back[by_stop], kind="mergesort")]
    going = by_stop[np.argsort(gaps.start[by_stop], kind="mergesort")]
    ready_s = np.zeros((in_flight, len(gaps.value)))
    in_free_s = np.zeros(2)
    out_free_s = updated_s = now_s = 0.0
    host = host_peak = 0
    first_sent = 0
    while first_sent < len(going) and gaps.start[going[first_sent]] < 0:
        first_sent += 1
    reached = (0, 0, 0, 0, first_sent)
    for half in range(2):
        begun = reached
        for turns in range(in_flight):
            left, updates, fetches, waits, sent = begun
            for p in range(0 if half == 0 else turn + 1, turn + 1 if half == 0 else end + 1):
                while left < len(leaving) and gaps.gone[leaving[left]] <= p:
                    if gaps.copies[leaving[left]]:
                        now_s = max(now_s, ready_s[turns, leaving[left]])
                    left += 1
                while updates < len(updating) and updated_at[updating[updates]] <= p:
                    g = updating[updates]
                    v = gaps.value[g]
                    if gaps.copies[g] and m.leaves[v] and read_to[v] >= 0:
                        updated_s = max(now_s, updated_s) + m.size_bytes[v] * update_s_per_byte
                    updates += 1
                while fetches < len(coming) and gaps.back[coming[fetches]] <= p:
                    g = coming[fetches]
                    lane = m.lane[gaps.value[g]]
                    if gaps.stop[g] < end:
                        in_free_s[lane] = max(now_s, in_free_s[lane]) + m.in_s[gaps.value[g]]
                        ready_s[turns, g] = in_free_s[lane]
                    fetches += 1
                while waits < len(by_stop) and gaps.stop[by_stop[waits]] <= p:
                    g = by_stop[waits]
                    v = gaps.value[g]
                    if gaps.stop[g] < end:
                        now_s = max(now_s, ready_s[turns, g])
                        if turns == 0 and last[g] and not m.fetched[v] and not m.leaves[v]:
                            host -= m.size_bytes[v]
                    waits += 1
                if p < end and order[p] >= 0:
                    now_s += m.time_s[order[p]]
                while sent < len(going) and gaps.start[going[sent]] <= p:
                    g = going[sent]
                    v = gaps.value[g]
                    if gaps.copies[g]:
                        out_free_s = max(now_s, out_free_s) + m.out_s[v]
                        ready_s[turns, g] = out_free_s
                        if turns == 0 and not m.leaves[v]:
                            host += m.size_bytes[v]
                            host_peak = max(host_peak, host)
                    sent += 1
            reached = (left, updates, fetches, waits, sent)
    now_s = max(now_s, updated_s)
    for v in range(len(m.leaves)):
        if m.leaves[v] and read_to[v] < 0:
            now_s += in_flight * m.size_bytes[v] * update_s_per_byte
    return now_s / in_flight, host_peak
