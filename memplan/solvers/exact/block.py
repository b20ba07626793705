"""A block as the exact search sees it: from its end, with the gradients' memory settled.

**What is solved.** The forward part runs every op once, in order. Then the backward ops run once, in the given order,
and forward ops that can run again do so anywhere between them, any number of times, in any order. Limits: bytes held
between the two parts, the forward peak, the backward peak. Least is the time of the repeated runs. Bytes are those of
`replay`, hence of `simulate`: an instance stands from its run to its last read before its op runs again.

With the order of the backward ops fixed, gradients are fixed too, so only forward values are left to decide. Seen
from the end, a forward value stands exactly where something later demands it: there is nothing to evict. A kept
generator state is one more value that each repeated run of its op reads and that no run makes.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from memplan.solvers.chain.options import LocalBlock
from memplan.solvers.orders.flat import Flags, Ints, compressed
from memplan.solvers.orders.replay import replay

TICKS = 1 << 40  # ticks in the seconds of one forward part: sums of times are exact
WORD = 63  # values whose bits one word of a node holds
MOST_VALUES = 2 * WORD


class Rows(NamedTuple):
    """Compressed rows: row i is `item[start[i]:start[i + 1]]`."""

    start: Ints
    item: Ints

    def row(self, index: int) -> Ints:
        return self.item[self.start[index] : self.start[index + 1]]

    def lists(self) -> list[list[int]]:
        return [self.item[i:j].tolist() for i, j in itertools.pairwise(self.start.tolist())]


class Reversed(NamedTuple):
    """A block as arrays, seen from its end.

    Values are those of the forward part that can be dropped, then kept generator states. Ops are those of the forward
    part. Steps are the backward ops in their order.

    - size_bytes[v]: of a value.
    - maker[v]: the op that makes it, or -1 for a generator state.
    - reads, makes, takes: rows of ops, values that a repeated run reads, makes and takes over the memory of.
    - stage_start[op]: the first stage of a repeated run. Here a run has a single stage; after `fuse` it may be several
      runs in turn.
    - stage_reads: rows of stages, values that stand beside what else is demanded.
    - stage_bytes: new memory and scratch of a stage.
    - ticks[op]: its time, one at least.
    - again[op]: it can run again.
    - parts[op]: the block's ops that it stands for, in the order of time.
    - step_reads, step_takes: rows of steps.
    - step_bytes[t]: held while step t runs, forward values left out.
    - between_bytes[t]: held just before step t, and after the last, forward values left out.
    - cut[v]: held at the boundary in any case.
    - barred[v]: gone at the boundary in any case.
    - forward_bytes[i]: held while op i runs for the first time, if nothing is saved.
    - forward_extra[i, v]: saving v would hold it on top of that.
    - cut_bytes: of all that is held at the boundary in any case.
    """

    size_bytes: Ints
    maker: Ints
    reads: Rows
    makes: Rows
    takes: Rows
    stage_start: Ints
    stage_reads: Rows
    stage_bytes: Ints
    ticks: Ints
    again: Flags
    parts: tuple[tuple[int, ...], ...]
    step_reads: Rows
    step_takes: Rows
    step_bytes: Ints
    between_bytes: Ints
    cut: Flags
    barred: Flags
    forward_bytes: Ints
    forward_extra: Flags
    cut_bytes: int


def why_unsuited(block: LocalBlock) -> str | None:
    """Why the search can't take a block; None if it can.

    Either the block has more values than a node has bits for. Or an output takes over a value of another size: a value
    outside the block, for example, has no bytes in it.
    """
    a = block.flat.arrays
    tracked, drawing = _tracked(block)
    if len(tracked) + len(drawing) > MOST_VALUES:
        return f"{len(tracked) + len(drawing)} values; {MOST_VALUES} is the most"
    for v in (v for row in block.flat.makes for v in row):
        taken_over = int(a.taken[v])
        if taken_over >= 0 and a.producer[taken_over] < a.boundary and a.size_bytes[taken_over] != a.size_bytes[v]:
            return "an output takes over a value of another size"
    return None


def _tracked(block: LocalBlock) -> tuple[list[int], list[int]]:
    """Values that forward may drop, and random ops whose generator state may be kept."""
    a = block.flat.arrays
    tracked = [v for op in range(a.boundary) for v in block.flat.makes[op] if not a.held[v]]
    return tracked, [op for op in range(a.boundary) if a.random[op] and a.rerunnable[op] and a.rng_state_bytes]


def reverse(block: LocalBlock) -> tuple[Reversed, float]:
    """The arrays of a block that the search can take (`why_unsuited`), and the seconds of one tick."""
    assert why_unsuited(block) is None
    a, flat = block.flat.arrays, block.flat
    n = a.boundary
    tracked, drawing = _tracked(block)
    index = {v: k for k, v in enumerate(tracked)}
    state = {op: len(tracked) + k for k, op in enumerate(drawing)}

    def rows(table: list[list[int]]) -> Rows:
        return Rows(*compressed(table))

    def inside(values: object) -> list[int]:
        return [index[v] for v in values if v in index]  # type: ignore[attr-defined]

    def taken(op: int) -> list[int]:
        return inside(int(a.taken[v]) for v in flat.makes[op])

    new_bytes = [sum(int(a.size_bytes[v]) for v in flat.makes[op] if not a.in_place[v]) for op in range(flat.op_count)]
    total_s = float(a.time_s[:n].sum()) or 1.0
    steps = range(n + 1, flat.op_count)
    step_bytes, between_bytes = _gradient_bytes(block, index, new_bytes)
    size = [int(a.size_bytes[v]) for v in tracked] + [a.rng_state_bytes] * len(drawing)
    maker = [int(a.producer[v]) for v in tracked] + [-1] * len(drawing)
    born = [int(a.producer[v]) for v in tracked] + drawing
    values = len(size)
    last_read = [max([b, *(op for op in range(n + 1) if v in flat.reads[op])]) for v, b in zip(tracked, born)]
    extra = np.zeros((n, values), dtype=np.bool_)
    for v in range(values):
        extra[(last_read[v] + 1 if v < len(tracked) else born[v]) :, v] = True
    cut = np.zeros(values, dtype=np.bool_)
    cut[inside(flat.reads[n])] = True
    barred = np.zeros(values, dtype=np.bool_)
    barred[: len(tracked)] = a.overwritten[tracked] if tracked else False
    leaf = np.arange(n + 1, dtype=np.int64)
    during = np.zeros(n + 1, dtype=np.int64)
    replay(a, leaf, during)
    reads = rows([inside(flat.reads[op]) + ([state[op]] if op in state else []) for op in range(n)])
    found = Reversed(
        size_bytes=np.array(size, dtype=np.int64),
        maker=np.array(maker, dtype=np.int64),
        reads=reads,
        makes=rows([inside(flat.makes[op]) for op in range(n)]),
        takes=rows([taken(op) for op in range(n)]),
        stage_start=np.arange(n + 1, dtype=np.int64),
        stage_reads=reads,
        stage_bytes=np.array(
            [new_bytes[op] + int(a.scratch_bytes[op]) + (a.rng_state_bytes if a.random[op] else 0) for op in range(n)],
            dtype=np.int64,
        ),
        ticks=np.array([max(1, round(float(a.time_s[op]) / total_s * TICKS)) for op in range(n)], dtype=np.int64),
        again=a.rerunnable[:n].copy(),
        parts=tuple((op,) for op in range(n)),
        step_reads=rows([inside(flat.reads[op]) for op in steps]),
        step_takes=rows([taken(op) for op in steps]),
        step_bytes=step_bytes,
        between_bytes=between_bytes,
        cut=cut,
        barred=barred,
        forward_bytes=during[:n].copy(),
        forward_extra=extra,
        cut_bytes=int(during[n]) - block.incoming_bytes,
    )
    return found, total_s / TICKS


def _gradient_bytes(block: LocalBlock, forward: dict[int, int], new_bytes: list[int]) -> tuple[Ints, Ints]:
    """Bytes held without forward values: while each step runs, and before each step and after the last."""
    a, flat = block.flat.arrays, block.flat
    n, end = a.boundary, flat.op_count
    last_read = {v: op for op in range(n, end) for v in flat.reads[op]}
    live = block.incoming_bytes
    live -= sum(int(a.size_bytes[v]) for v in flat.makes[n] if v not in last_read and not a.held[v])
    during, between = [], [live]
    for op in range(n + 1, end):
        live += new_bytes[op]
        during.append(live + int(a.scratch_bytes[op]))
        over = {int(a.taken[v]) for v in flat.makes[op]}
        live += sum(int(a.size_bytes[v]) for v in over if v in forward)  # from now on it is the output's
        gone = [v for v in flat.reads[op] if a.producer[v] >= n and last_read[v] == op and v not in over]
        gone += [v for v in flat.makes[op] if v not in last_read]
        live -= sum(int(a.size_bytes[v]) for v in gone if not a.held[v])
        between.append(live)
    return np.array(during, dtype=np.int64), np.array(between, dtype=np.int64)
