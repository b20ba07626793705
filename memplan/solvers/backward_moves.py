"""A local search for an order of the backward ops in which tight budgets cost less.

Two neighbouring stretches of ops change places, where no op of the second needs one of the first, as long as a score
gets no worse (a little worse at first: threshold accepting, Dueck and Scheuer, 1990). The score looks at every op at a
few budgets. What backward holds there, what the op reads, and what others have read before and will read again
has to be there; of what the rest of backward reads, as much as does not fit has to be recomputed, and the cheapest by
seconds per byte goes first. The most that an op asks for counts, and the mean over all; an order whose largest op
needs more than in traced order is fined.

That is no bound and no plan, but an evaluation takes microseconds, and orders that it likes are then judged by the
bound and searched in earnest. It misleads where values are recomputed together: GPT-2's bound at 0.35 of the
activations rises from 15.0 to 15.6%. Without the fine, and what stays between its first and its last read, GPT-2's
floor rose as well, by a tenth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from memplan.solvers.bound import backward_bytes, needed_bytes
from memplan.solvers.draws import State, below
from memplan.solvers.flat import Flags, Flat, Floats, Ints, compressed
from memplan.solvers.jit import kernel

_SHARES = (0.6, 0.45, 0.35, 0.3)  # budgets looked at, as shares of the most that is held
_LONGEST = 8  # ops of a stretch
_HEAT = 0.01  # of the traced order's score: how much worse than the best an order may be at first
_FINE = 10.0  # of the score for each share by which the largest op needs more


class Backward(NamedTuple):
    """The backward pass in compressed rows: op i reads `read[read_start[i]:read_start[i + 1]]`, and so on; and has to
    come after `before[before_start[i]:before_start[i + 1]]`.

    reads: ops that read each value. forward[v]: v is made by the forward pass and can be freed. new[v]: v adds to what
    is held where it is made. held[v]: and never leaves. leaves[v]: it does as soon as it is made (a gradient that
    somebody takes). rank: of forward values by the seconds that a byte of them takes to make again, -1 for those that
    have to stay; s_per_byte: by rank. start_bytes: held when backward begins, without forward values.
    """

    before_start: Ints
    before: Ints
    read_start: Ints
    read: Ints
    made_start: Ints
    made: Ints
    reads: Ints
    size_bytes: Ints
    taken: Ints
    scratch_bytes: Ints
    forward: Flags
    new: Flags
    held: Flags
    leaves: Flags
    rank: Ints
    s_per_byte: Floats
    start_bytes: int


def moved(flat: Flat, before: Sequence[Sequence[int]], tries: int) -> tuple[int, ...]:
    """The order that the score likes best on the way from the traced one. before: what has to run before each op."""
    b = _backward(flat, before)
    once = np.arange(len(before), dtype=np.int64)
    base_bytes = flat.arrays.base_bytes
    peak_bytes = int((_held(b, once) + needed_bytes(flat)).max()) if len(once) else base_bytes
    budgets = np.array([base_bytes + int(share * (peak_bytes - base_bytes)) for share in _SHARES], dtype=np.int64)
    order = _moved(b, once, budgets, tries, np.array([1], dtype=np.uint64))
    return tuple(order.tolist())


def _backward(flat: Flat, before: Sequence[Sequence[int]]) -> Backward:
    a, first = flat.arrays, flat.arrays.boundary
    before_start, before_ops = compressed(before)
    read_start, read = compressed(flat.reads[first:])
    made_start, made = compressed(flat.makes[first:])
    reads = np.bincount(read, minlength=len(a.size_bytes)).astype(np.int64)
    by_forward = (a.producer >= 0) & (a.producer < first)
    forward = by_forward & ~a.held
    rank, s_per_byte = np.full(len(a.size_bytes), -1, dtype=np.int64), np.zeros(len(a.size_bytes), dtype=np.float64)
    for v in np.nonzero(forward & (reads > 0) & (a.size_bytes > 0))[0]:
        if a.rerunnable[a.producer[v]]:
            made_bytes = sum(int(a.size_bytes[w]) for w in flat.makes[a.producer[v]])
            s_per_byte[v] = a.time_s[a.producer[v]] / made_bytes
            rank[v] = 0
    ranked = np.nonzero(rank == 0)[0]
    ranked = ranked[np.argsort(s_per_byte[ranked], kind="stable")]
    rank[ranked] = np.arange(len(ranked))
    over_forward = (a.taken >= 0) & by_forward[a.taken]  # its memory is not that of anything counted before
    return Backward(
        before_start, before_ops, read_start, read, made_start, made, reads, a.size_bytes, a.taken,
        a.scratch_bytes[first:].copy(), forward, ~a.in_place | over_forward, a.held, a.gradient & a.accumulate, rank,
        s_per_byte[ranked], int(backward_bytes(flat)[0]),
    )  # fmt: skip


@kernel
def _held(b: Backward, order: Ints) -> Ints:
    """What backward itself holds at each position: `bound.backward_bytes` of any order."""
    left = b.reads.copy()
    found = np.empty(len(order), dtype=np.int64)
    live = b.start_bytes
    for p in range(len(order)):
        op = order[p]
        for e in range(b.made_start[op], b.made_start[op + 1]):
            if b.new[b.made[e]]:
                live += b.size_bytes[b.made[e]]
        found[p] = live + b.scratch_bytes[op]
        for e in range(b.made_start[op], b.made_start[op + 1]):
            v = b.made[e]
            if (left[v] == 0 and not b.held[v]) or b.leaves[v]:
                live -= b.size_bytes[v]
        for e in range(b.read_start[op], b.read_start[op + 1]):
            v = b.read[e]
            left[v] -= 1
            if left[v] == 0 and not b.forward[v] and not b.held[v] and not _takes(b, op, v):
                live -= b.size_bytes[v]
    return found


@kernel
def _takes(b: Backward, op: int, value: int) -> bool:
    """Whether an op writes over a value."""
    found = False
    for e in range(b.made_start[op], b.made_start[op + 1]):
        found = found or b.taken[b.made[e]] == value
    return found


@kernel
def _score(b: Backward, order: Ints, budgets: Ints) -> tuple[float, int]:
    """Seconds, added up over the budgets, and the bytes of the largest op with its operands."""
    held = _held(b, order)
    ranks = len(b.s_per_byte)
    tree_bytes, tree_s = np.zeros(ranks + 1, dtype=np.int64), np.zeros(ranks + 1, dtype=np.float64)  # Fenwick trees
    top = 1
    while top * 2 <= ranks:
        top *= 2
    most_s, all_s = np.zeros(len(budgets), dtype=np.float64), 0.0
    left = b.reads.copy()
    needed, largest = 0, 0
    for p in range(len(order) - 1, -1, -1):
        op = order[p]
        operands = 0
        for e in range(b.read_start[op], b.read_start[op + 1]):
            v = b.read[e]
            if b.forward[v]:
                operands += b.size_bytes[v]
                needed += b.size_bytes[v] if left[v] == b.reads[v] else 0
                left[v] -= 1
        largest = max(largest, held[p] + operands)
        for i in range(len(budgets)):
            excess = held[p] + needed - budgets[i]
            if excess > 0:
                cost_s = _cheapest_s(b, tree_bytes, tree_s, top, excess)
                most_s[i] = max(most_s[i], cost_s)
                all_s += cost_s
        for e in range(b.read_start[op], b.read_start[op + 1]):
            v = b.read[e]
            if left[v] == 0 and b.rank[v] >= 0:  # nobody has read it before, so it need not be there before
                _add(tree_bytes, tree_s, b.rank[v], b.size_bytes[v], b.s_per_byte[b.rank[v]])
    return most_s.sum() + all_s / len(order), largest


@kernel
def _add(tree_bytes: Ints, tree_s: Floats, rank: int, size_bytes: int, s_per_byte: float) -> None:
    node = rank + 1
    while node < len(tree_bytes):
        tree_bytes[node] += size_bytes
        tree_s[node] += size_bytes * s_per_byte
        node += node & -node


@kernel
def _cheapest_s(b: Backward, tree_bytes: Ints, tree_s: Floats, top: int, excess_bytes: int) -> float:
    """Seconds to make so many bytes again, the cheapest of those that are in the trees."""
    ranks = len(b.s_per_byte)
    if ranks == 0:
        return 0.0
    node, cost_s, step = 0, 0.0, top
    while step > 0:
        if node + step <= ranks and tree_bytes[node + step] < excess_bytes:
            node += step
            excess_bytes -= tree_bytes[node]
            cost_s += tree_s[node]
        step //= 2
    return cost_s + float(excess_bytes) * float(b.s_per_byte[min(node, ranks - 1)])


@kernel
def _moved(b: Backward, order: Ints, budgets: Ints, tries: int, state: State) -> Ints:
    first_s, first_bytes = _score(b, order, budgets)
    best, best_s = order.copy(), first_s
    marked = np.full(len(order), -1, dtype=np.int64)
    for tried in range(tries):
        before, after = 1 + below(state, int(_LONGEST)), 1 + below(state, int(_LONGEST))
        single = below(state, 4)  # half of the time one of the two is a single op
        before, after = 1 if single == 0 else before, 1 if single == 1 else after
        start = below(state, len(order))
        middle, end = start + before, start + before + after
        if end > len(order) or not _may_swap(b, order, start, middle, end, marked, tried):
            continue
        trial = order.copy()
        trial[start : start + after] = order[middle:end]
        trial[start + after : end] = order[start:middle]
        trial_s, largest = _score(b, trial, budgets)
        trial_s *= 1.0 + _FINE * max(0, largest - first_bytes) / first_bytes
        if trial_s <= best_s + _HEAT * first_s * (1.0 - tried / tries):
            order = trial
            if trial_s < best_s:
                best, best_s = trial, trial_s
    return best


@kernel
def _may_swap(b: Backward, order: Ints, start: int, middle: int, end: int, marked: Ints, mark: int) -> bool:
    """Whether no op of the second stretch has to come after one of the first."""
    for p in range(start, middle):
        marked[order[p]] = mark
    for p in range(middle, end):
        for e in range(b.before_start[order[p]], b.before_start[order[p] + 1]):
            if marked[b.before[e]] == mark:
                return False
    return True
