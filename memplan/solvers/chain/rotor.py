"""Rotor with options over a chain with wide cuts: one table gives the best plan of every memory size.

Herrmann et al., arXiv 1911.13214 (Rotor); Zhao et al., arXiv 2307.01236 (several options per block).

```
OPT(i, j, m) = min of
  save:  min_k  cost_k + OPT(i + 1, j, m - saved_k)
              if m >= max(forward_peak_k + outside(i, j), backward_peak_k + outside_backward_i, saved_k)
  leaf:  min_{i < c <= j}  sum_{l in [i, c)} again_l + OPT(c, j, m - width(i, c - 1)) + OPT(i, c - 1, m)
              if m >= max_{l in [i, c)} leaf_peak_l + width(i, l - 1) + outside(i, j)
```

m excludes what lies before block i (cut i - 1 and everything saved further up) and includes everything else. Segments
that end at the loss run their ops for the first time, so going forward there costs nothing extra: costs are seconds of
recomputation alone. Two published implementations disagree with each other in what `outside` is. Here the caller states
it for each segment, in bytes that truly stand there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memplan.jit import kernel
from memplan.solvers.orders.flat import Floats, Ints

Costs32 = NDArray[np.float32]


class ChainTable(NamedTuple):
    """What the recurrence reads, in slots and seconds; L blocks, at most K options each.

    - option_count[L]: options of each block.
    - saved[L, K], forward_peak[L, K], backward_peak[L, K]: slots; backward_peak includes what stands outside.
    - cost_first[L, K], cost_again[L, K]: seconds of recomputation where the block's forward part runs for the first
      time, and where it runs again.
    - width[L, L]: width[i, c] is the slots of cut c that cut i - 1 does not hold.
    - leaf_peak[L], leaf_again[L]: of running a block forward and keeping its cut alone.
    - outside_first[L]: slots that stand outside while block i runs for the first time.
    - outside_again[L]: slots that stand outside while any block runs forward again in a segment that ends at j.
    """

    option_count: Ints
    saved: Ints
    forward_peak: Ints
    backward_peak: Ints
    cost_first: Floats
    cost_again: Floats
    width: Ints
    leaf_peak: Ints
    leaf_again: Floats
    outside_first: Ints
    outside_again: Ints


@kernel
def _save_move(t: ChainTable, i: int, j: int, k: int) -> tuple[int, float]:
    """Least memory at which option k of block i may be taken in the segment (i, j), and its seconds."""
    last = len(t.option_count) - 1
    outside = t.outside_first[i] if j == last else t.outside_again[j]
    low = max(t.forward_peak[i, k] + outside, t.backward_peak[i, k], t.saved[i, k])
    return low, t.cost_first[i, k] if j == last else t.cost_again[i, k]


class ChainFront(NamedTuple):
    """The recurrence's answer.

    - segment[i, j]: the row of blocks i..j. Segments of equal blocks share a row.
    - opt[segment[i, j], m]: least seconds of recomputation for blocks i..j with m slots; infinite where m is too
      little.
    """

    segment: Ints
    opt: Costs32

    @property
    def seconds(self) -> Costs32:
        """Least seconds of recomputation of the whole chain, for every memory size."""
        seconds: Costs32 = self.opt[self.segment[0, -1]]
        return seconds


@kernel
def _same_blocks(t: ChainTable, i: int, other: int) -> bool:
    """Whether two blocks have the same options and the same outside."""
    if t.option_count[i] != t.option_count[other] or t.outside_first[i] != t.outside_first[other]:
        return False
    if t.leaf_peak[i] != t.leaf_peak[other] or t.leaf_again[i] != t.leaf_again[other]:
        return False
    for k in range(t.option_count[i]):
        same = t.saved[i, k] == t.saved[other, k] and t.forward_peak[i, k] == t.forward_peak[other, k]
        same = same and t.backward_peak[i, k] == t.backward_peak[other, k]
        if not same or t.cost_first[i, k] != t.cost_first[other, k] or t.cost_again[i, k] != t.cost_again[other, k]:
            return False
    return True


@kernel
def _shared_rows(t: ChainTable) -> tuple[Ints, int]:
    """segment[i, j] and the number of rows: a segment that equals the one a period further on has its row."""
    count = len(t.option_count)
    period = 1  # the distance at which the most blocks have an equal one
    most = 0
    for distance in range(1, count // 2 + 1):
        equal = 0
        for i in range(count - distance):
            if _same_blocks(t, i, i + distance):
                equal += 1
        if equal > most:
            period = distance
            most = equal
    segment = np.full((count, count), -1, dtype=np.int64)
    same = np.zeros(count, dtype=np.bool_)
    for i in range(count - period):
        same[i] = _same_blocks(t, i, i + period)
    rows = 0
    for i in range(count - 1, -1, -1):
        alike = True  # blocks i..j equal those a period further on, with cuts and outside; so do all segments in i..j
        for j in range(i, count):
            further = j + period
            alike = alike and further < count - 1 and same[j] and t.outside_again[j] == t.outside_again[further]
            alike = alike and t.width[i, j] == t.width[min(i + period, count - 1), min(further, count - 1)]
            alike = alike and (i == j or segment[i + 1, j] == segment[i + 1 + period, further])
            if alike:
                segment[i, j] = segment[i + period, further]
            else:
                segment[i, j] = rows
                rows += 1
    return segment, rows


@kernel
def solve_chain(t: ChainTable, slots: int) -> ChainFront:
    """The least seconds of every segment for every memory size up to `slots`."""
    count = len(t.option_count)
    last = count - 1
    segment, rows = _shared_rows(t)
    opt = np.full((rows, slots + 1), np.inf, dtype=np.float32)
    least = np.full(rows, -1, dtype=np.int64)  # the least memory of a row, -1 where it is not made yet
    for i in range(count - 1, -1, -1):  # in this order half of what is read was made just now
        for j in range(i, count):
            if least[segment[i, j]] >= 0:
                continue
            row = opt[segment[i, j]]
            for k in range(t.option_count[i]):
                low, cost = _save_move(t, i, j, k)
                if i == j:
                    if low <= slots:
                        row[low] = min(row[low], np.float32(cost))
                    continue
                saved = t.saved[i, k]
                rest = segment[i + 1, j]
                low = max(low, least[rest] + saved)
                if low <= slots:
                    _relax(row[low:], opt[rest, low - saved :], np.float32(cost))
            if i == j:
                for m in range(1, slots + 1):
                    row[m] = min(row[m], row[m - 1])
            low = 0
            cost = 0.0
            for c in range(i + 1, j + 1):
                at = c - 1
                outside = t.outside_first[at] if j == last else t.outside_again[j]
                low = max(low, t.leaf_peak[at] + outside + (t.width[i, at - 1] if at > i else 0))
                cost += 0.0 if j == last else t.leaf_again[at]
                width = t.width[i, c - 1]
                right, left = segment[c, j], segment[i, c - 1]
                start = max(low, width + least[right], least[left])
                if low > slots:
                    break
                if start <= slots:
                    _relax_two(row[start:], opt[right, start - width :], opt[left, start:], np.float32(cost))
            least[segment[i, j]] = slots + 1
            for m in range(slots + 1):
                if row[m] < np.inf:
                    least[segment[i, j]] = m
                    break
    return ChainFront(segment, opt)


@kernel
def _relax(row: Costs32, rest: Costs32, cost: np.float32) -> None:
    for m in range(len(row)):
        row[m] = min(row[m], cost + rest[m])


@kernel
def _relax_two(row: Costs32, right: Costs32, left: Costs32, cost: np.float32) -> None:
    for m in range(len(row)):
        row[m] = min(row[m], cost + right[m] + left[m])


@kernel
def best_move(t: ChainTable, front: ChainFront, i: int, j: int, m: int) -> tuple[int, int]:
    """(0, option) or (1, stop) of the best move for blocks i..j with m slots; (-1, -1) where there is none."""
    segment, opt = front.segment, front.opt
    last = len(t.option_count) - 1
    best = np.float32(np.inf)
    kind = -1
    which = -1
    for k in range(t.option_count[i]):
        low, cost = _save_move(t, i, j, k)
        if low > m:
            continue
        total = np.float32(cost)
        if i < j:
            total = np.float32(cost) + opt[segment[i + 1, j], m - t.saved[i, k]]
        if total < best:
            best, kind, which = total, 0, k
    low = 0
    cost = 0.0
    for c in range(i + 1, j + 1):
        at = c - 1
        outside = t.outside_first[at] if j == last else t.outside_again[j]
        low = max(low, t.leaf_peak[at] + outside + (t.width[i, at - 1] if at > i else 0))
        cost += 0.0 if j == last else t.leaf_again[at]
        if max(low, t.width[i, at]) > m:
            break
        total = np.float32(cost) + opt[segment[c, j], m - t.width[i, at]] + opt[segment[i, at], m]
        if total < best:
            best, kind, which = total, 1, c
    return kind, which


def distinct_slots(front: ChainFront, limit: int) -> tuple[int, ...]:
    """At most `limit` memory sizes at which the whole chain's least seconds change, the extremes among them."""
    row = front.seconds
    before = np.minimum.accumulate(np.concatenate([[np.inf], row[:-1]]))
    steps = np.nonzero(row < before)[0]
    if len(steps) > limit:
        steps = steps[np.unique(np.round(np.linspace(0, len(steps) - 1, limit)).astype(int))]
    return tuple(steps.tolist())
