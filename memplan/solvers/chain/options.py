"""The options of a block: ways to run it, each with its bytes, peaks and seconds.

A block becomes a small problem of its own: its forward ops, one op that stands for everything after it (it reads the
block's part of the cut and brings the gradients that come in), and its backward ops. Saved sets come from minimum cuts;
each gives a sparse order (recompute every time) and a dense one (recompute once and keep), and `fill` makes those in
between. The kernels that account for whole steps account for these, so peaks agree with `simulate`.

Where orders come from is the caller's choice: minimum cuts (`cut_orders`) or an exact search under the peak.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from memplan.jit import kernel
from memplan.solvers.bounds.mincut import saved_sets
from memplan.solvers.chain.partition import Block
from memplan.solvers.orders.flat import Arrays, Flags, Flat, Floats, Ints, compressed
from memplan.solvers.orders.replay import fill, outcome, prune, replay
from memplan.solvers.orders.rewrites import demand_order

Row = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a block.

    Peaks leave out the block's input cut and what stands outside the block.

    - saved_bytes: held between the forward and the backward part, the block's share of the cut included.
    - forward_peak_bytes: the most held in the forward part.
    - backward_peak_bytes: the most held in the backward part, the gradients that come in included.
    - recompute_s: seconds of repeated runs in the backward part.
    - forward_s: seconds of the forward part where it has to run again.
    - backward: ops of the backward part, as indices into the block.
    """

    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    recompute_s: float
    forward_s: float
    backward: Row

    @property
    def figures(self) -> tuple[float, ...]:
        held_bytes = (self.saved_bytes, self.forward_peak_bytes, self.backward_peak_bytes)
        return (*held_bytes, self.recompute_s, self.forward_s + self.recompute_s)


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """The ways to run a block that are worth a choice.

    - options: the Pareto set.
    - leaf_peak_bytes, leaf_s: of running forward and keeping the cut alone.
    """

    options: tuple[Option, ...]
    leaf_peak_bytes: int
    leaf_s: float


@dataclass(frozen=True, slots=True)
class LocalBlock:
    """A block as a problem of its own; op `boundary` stands for everything after the block.

    - ops[i]: the step's op that local op i is (-1 for the stand-in).
    - cut: local values that cross.
    - incoming_bytes: of the gradients that come in.
    - signature: equal for blocks with the same options: of equal wiring, sizes, kernels and times to two digits.
    """

    flat: Flat
    ops: Row
    cut: frozenset[int]
    incoming_bytes: int
    signature: tuple[object, ...]


def localise(flat: Flat, block: Block, incoming: Row, last_read: Ints, keys: tuple[str, ...]) -> LocalBlock:
    """Cut a block out of the step.

    - incoming: backward values that stand when the block's backward part begins and are read then or later.
    - last_read[v]: last op that reads v.
    - keys: op keys, equal for equal kernels.
    """
    which, a = (block, incoming, keys), flat.arrays
    if which in flat.blocks:
        known: LocalBlock = flat.blocks[which]
        return known
    forward, backward = list(block.forward), list(block.backward)
    made_inside = dict.fromkeys(v for op in forward for v in flat.makes[op])
    made_after = (v for op in backward for v in flat.makes[op])
    index = {v: i for i, v in enumerate(dict.fromkeys((*made_inside, *incoming, *made_after)))}
    cut = tuple(index[v] for v in block.cut if v in index)
    reads: list[Row] = [tuple(index[v] for v in flat.reads[op] if v in index) for op in (*forward, *backward)]
    reads.insert(len(forward), cut)
    makes: list[Row] = [tuple(index[v] for v in flat.makes[op]) for op in (*forward, *backward)]
    makes.insert(len(forward), tuple(index[v] for v in incoming))
    arrays = _local_arrays(a, forward, backward, len(made_inside), incoming, reads, makes, index, last_read)
    local = Flat(arrays, tuple(reads), tuple(makes))
    given = (arrays.size_bytes, arrays.taken, arrays.held, arrays.scratch_bytes, arrays.rerunnable, arrays.random)
    times = tuple(map(_two_digits, arrays.time_s.tolist()))
    own_keys = tuple(keys[op] for op in (*forward, *backward))
    signature = (local.reads, local.makes, cut, own_keys, times, *(array.tobytes() for array in given))
    incoming_bytes = int(sum(a.size_bytes[v] for v in incoming))
    found = LocalBlock(local, (*forward, -1, *backward), frozenset(cut), incoming_bytes, signature)
    flat.blocks[which] = found
    return found


def _local_arrays(
    a: Arrays,
    forward: list[int],
    backward: list[int],
    inside: int,
    incoming: Row,
    reads: list[Row],
    makes: list[Row],
    index: dict[int, int],
    last_read: Ints,
) -> Arrays:
    chosen, stand_in = np.array(list(index), dtype=np.int64), len(forward)
    ops = np.array([*forward, 0, *backward], dtype=np.int64)
    rerunnable, random, time_s, scratch = a.rerunnable[ops], a.random[ops], a.time_s[ops], a.scratch_bytes[ops]
    rerunnable[stand_in] = random[stand_in] = False
    time_s[stand_in] = scratch[stand_in] = 0
    held, size, in_place = a.held[chosen], a.size_bytes[chosen], a.in_place[chosen]
    in_place[[index[v] for v in incoming]] = False
    producer = np.full(len(index), -1, dtype=np.int64)
    for op, row in enumerate(makes):
        for v in row:
            producer[v] = op
    end = backward[-1] + 1 if backward else 0
    # Held outputs, and what can't be made again, stand outside: free here. Gradients for later blocks stay.
    held[:inside] |= ~rerunnable[producer[:inside]] & ~a.overwritten[chosen[:inside]]
    size[:inside][held[:inside]] = 0
    if a.accumulate:
        held[inside:] &= ~a.gradient[chosen[inside:]]
    held[inside:] |= last_read[chosen[inside:]] >= end
    return Arrays(
        stand_in,
        *compressed(reads),
        *compressed(makes),
        size_bytes=size,
        taken=np.array([index.get(int(t), -1) for t in a.taken[chosen]], dtype=np.int64),
        in_place=in_place,
        held=held,
        gradient=np.zeros(len(index), dtype=np.bool_),
        awaiting_start=np.zeros(len(ops) + 1, dtype=np.int64),
        awaiting=np.zeros(0, dtype=np.int64),
        producer=producer,
        overwritten=a.overwritten[chosen],
        rerunnable=rerunnable,
        deferrable=np.zeros(len(ops), dtype=np.bool_),
        random=random,
        time_s=time_s,
        scratch_bytes=scratch,
        rng_state_bytes=a.rng_state_bytes,
    )


@lru_cache(maxsize=1 << 14)
def _two_digits(time_s: float) -> str:
    return f"{time_s:.2g}"


def block_options(block: LocalBlock, orders: Iterable[Ints], limit: int) -> BlockOptions:
    """The Pareto set of what these orders of a block come to, at most `limit` options."""
    found: dict[tuple[float, ...], Option] = {}
    for order in orders:
        option = measured(block, order)
        found.setdefault(option.figures, option)
    kept: list[Option] = []
    for option in sorted(found.values(), key=lambda option: (option.figures, len(option.backward))):
        if not any(all(x <= y for x, y in zip(k.figures, option.figures, strict=True)) for k in kept):
            kept.append(option)
    if len(kept) > limit:
        kept = [kept[i] for i in np.unique(np.round(np.linspace(0, len(kept) - 1, limit)).astype(int))]
    return BlockOptions(tuple(kept), *leaf_figures(block))


def leaf_figures(block: LocalBlock) -> tuple[int, float]:
    """`leaf_peak_bytes` and `leaf_s` of the `BlockOptions`."""
    a = block.flat.arrays
    during = np.zeros(a.boundary + 1, dtype=np.int64)
    replay(a, np.arange(a.boundary + 1), during)
    leaf_s = min(float(closure_s(a, cut_flags(block))), float(a.time_s[: a.boundary].sum()))
    return int(during[: a.boundary].max(initial=0)), leaf_s


def cut_orders(block: LocalBlock, cuts_limit: int) -> list[Ints]:
    """Orders from minimum cuts of the block. cuts_limit: most minimum cuts that are looked for."""
    a = block.flat.arrays
    needed = {
        v for op in range(a.boundary + 1, block.flat.op_count) for v in block.flat.reads[op]
        if a.producer[v] < a.boundary and not a.held[v] and v not in block.cut
    }  # fmt: skip
    free = a.held.copy()
    free[list(block.cut)] = True
    sets = saved_sets(Flat(a._replace(held=free), block.flat.reads, block.flat.makes), frozenset(needed), cuts_limit)
    limit_ops = 4 * block.flat.op_count + 64
    orders: list[Ints] = []
    for kept in dict.fromkeys(chosen.saved for chosen in sets):
        saved = free.copy()
        saved[list(kept)] = True
        ends = [prune(a, demand_order(a, saved, window, limit_ops)) for window in (0, block.flat.op_count)]
        ends = [order for order in ends if len(order)]
        orders += ends
        if len(ends) == 2 and len(ends[0]) > len(ends[1]):
            low, high = (outcome(a, order)[0] for order in ends)
            orders += [fill(a, ends[0], low + (high - low) * part // 3, 8) for part in (0, 1, 2) if high > low]
    return orders


@kernel
def closure_s(a: Arrays, wanted: Flags) -> float:
    """Seconds of the forward ops that making these values takes; changes `wanted`."""
    total = 0.0
    for op in range(a.boundary - 1, -1, -1):
        needed = False
        for e in range(a.made_start[op], a.made_start[op + 1]):
            needed = needed or (wanted[a.made[e]] and not a.held[a.made[e]])
        if needed and a.rerunnable[op]:
            total += a.time_s[op]
            for e in range(a.read_start[op], a.read_start[op + 1]):
                wanted[a.read[e]] = True
    return total


@kernel
def option_figures(a: Arrays, cut: Flags, incoming_bytes: int, order: Ints, figures: Floats) -> bool:
    """Fill in what `Option` says of an order that runs the forward part once, in turn; False for an illegal one."""
    during = np.zeros(len(order), dtype=np.int64)
    peak, _position, time_s = replay(a, order, during)
    if peak < 0:
        return False
    at = a.boundary
    while order[at] != a.boundary:
        at += 1
    wanted = cut.copy()
    made = np.zeros(len(a.size_bytes), dtype=np.bool_)
    for p in range(at + 1, len(order)):
        op = order[p]
        for e in range(a.read_start[op], a.read_start[op + 1]):
            if not made[a.read[e]] and a.producer[a.read[e]] < a.boundary:
                wanted[a.read[e]] = True
        for e in range(a.made_start[op], a.made_start[op + 1]):
            made[a.made[e]] = True
    ahead = back = 0
    for p in range(a.boundary):
        ahead = max(ahead, during[p])
    for p in range(at + 1, len(order)):
        back = max(back, during[p])
    repeated_s = max(0.0, time_s - a.time_s.sum())
    figures[0] = during[at] - incoming_bytes
    figures[1] = ahead
    figures[2] = back
    figures[3] = repeated_s
    figures[4] = repeated_s + closure_s(a, wanted)
    return True


def cut_flags(block: LocalBlock) -> Flags:
    """Which values cross right after a block."""
    cut = np.zeros(len(block.flat.arrays.size_bytes), dtype=np.bool_)
    cut[list(block.cut)] = True
    return cut


def measured(block: LocalBlock, order: Ints) -> Option:
    figures = np.empty(5)
    legal = option_figures(block.flat.arrays, cut_flags(block), block.incoming_bytes, order, figures)
    assert legal, "a block's order reads what is not there"
    stand_in = int(np.nonzero(order == block.flat.arrays.boundary)[0][0])
    return option_of_figures(figures, order[stand_in + 1 :])


def option_of_figures(figures: Floats, backward: Ints) -> Option:
    """The option with the figures that `option_figures` filled in."""
    saved, ahead, back, recompute_s, again_s = figures.tolist()
    return Option(int(saved), int(ahead), int(back), recompute_s, again_s - recompute_s, tuple(backward.tolist()))
