"""From a chain to a table for the recurrence, and from the recurrence's moves to an order of ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from memplan.jit import kernel
from memplan.problem.schedule import BOUNDARY
from memplan.solvers.chain.options import BlockOptions, LocalBlock, localise
from memplan.solvers.chain.partition import Block, coarse_cuts, layer_cuts, make_chain
from memplan.solvers.chain.rotor import ChainFront, ChainTable, best_move, distinct_slots, solve_chain
from memplan.solvers.orders.flat import Flat, Ints, last_reads
from memplan.solvers.orders.replay import keep_all, prune


@dataclass(frozen=True, slots=True)
class SolvedChain:
    """A chain with its options, and the recurrence's answer for every memory size.

    - front: its `seconds[m]` are seconds of recomputation with m slots beyond the residents.
    - pieces: runs of ops that were expanded already, by the step of a plan.
    """

    chain: tuple[Block, ...]
    locals: tuple[LocalBlock, ...]
    options: tuple[BlockOptions, ...]
    table: ChainTable
    front: ChainFront
    pieces: dict[tuple[int, int], Ints] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Outside:
    """Bytes that stand outside a block, from the step's fixed parts.

    - first[i]: held outputs when block i has run for the first time.
    - grads[i]: everything held when block i's backward part begins, live gradients left out.
    - incoming[i]: backward values that stand then and are read later.
    """

    first: tuple[int, ...]
    grads: tuple[int, ...]
    incoming: tuple[tuple[int, ...], ...]


def solved_with(flat: Flat, keys: tuple[str, ...], chain: tuple[Block, ...], most_bytes: int, slots: int,
                options_of: Callable[[LocalBlock], BlockOptions]) -> SolvedChain:  # fmt: skip
    """Options of every block, then the recurrence.

    - most_bytes: beyond the residents, more is never needed.
    - slots: memory sizes told apart.
    """
    last_read = last_reads(flat)
    outside = outside_of(flat, chain, last_read)
    places = zip(chain, outside.incoming, strict=True)
    blocks = tuple(localise(flat, block, incoming, last_read, keys) for block, incoming in places)
    options = tuple(options_of(block) for block in blocks)
    table = chain_table(flat, chain, blocks, options, outside, max(1, -(-most_bytes // slots)))
    return SolvedChain(chain, blocks, options, table, solve_chain(table, slots))


def outside_of(flat: Flat, chain: tuple[Block, ...], last_read: Ints) -> Outside:
    """What stands outside each block of a chain."""
    a = flat.arrays
    first = []
    held_bytes = pinned_bytes = 0
    for op in range(a.boundary):
        for v in flat.makes[op]:
            if not a.held[v] and not a.rerunnable[op] and not a.overwritten[v] and last_read[v] >= 0:
                pinned_bytes += int(a.size_bytes[v])
    for block in chain:
        held_bytes += sum(int(a.size_bytes[v]) for op in block.forward for v in flat.makes[op] if a.held[v])
        first.append(held_bytes + pinned_bytes)
    grads: list[int] = []
    incoming: list[tuple[int, ...]] = []
    standing: list[int] = []
    surfaced = held_bytes + pinned_bytes + a.tangent_bytes
    for block in reversed(chain):
        standing = [v for v in standing if last_read[v] >= block.backward.start]
        grads.append(surfaced)
        incoming.append(tuple(standing))
        for op in block.backward:
            for v in flat.makes[op]:
                if a.held[v]:
                    surfaced += 0 if a.gradient[v] and a.accumulate else int(a.size_bytes[v])
                elif last_read[v] >= block.backward.stop:
                    standing.append(v)
    return Outside(tuple(first), tuple(grads[::-1]), tuple(incoming[::-1]))


def chain_table(flat: Flat, chain: tuple[Block, ...], blocks: Sequence[LocalBlock], options: Sequence[BlockOptions],
                outside: Outside, unit: int) -> ChainTable:  # fmt: skip
    """What the recurrence reads, in slots of `unit` bytes."""
    count = len(chain)
    most = max(len(o.options) for o in options)
    saved, ahead, back = (np.zeros((count, most), dtype=np.int64) for _ in range(3))
    cost_first, cost_again = (np.zeros((count, most), dtype=np.float64) for _ in range(2))
    for i, found in enumerate(options):
        for k, option in enumerate(found.options):
            saved[i, k] = _nearest(option.saved_bytes, unit)
            ahead[i, k] = option.forward_peak_bytes
            back[i, k] = option.backward_peak_bytes + outside.grads[i]
            cost_first[i, k] = option.recompute_s
            cost_again[i, k] = option.recompute_s + option.forward_s
    incoming, a = [b.incoming_bytes for b in blocks], flat.arrays
    block_of = np.zeros(a.boundary, dtype=np.int64)
    for index, block in enumerate(chain):
        block_of[block.forward.start : block.forward.stop] = index
    made = np.zeros((count, count), dtype=np.int64)  # bytes of each cut by the block that makes them
    for c, block in enumerate(chain):
        cut = np.array(block.cut, dtype=np.int64)
        np.add.at(made[:, c], block_of[a.producer[cut]], a.size_bytes[cut])
    return ChainTable(
        option_count=np.array([len(o.options) for o in options], dtype=np.int64),
        saved=saved,
        forward_peak=-(-ahead // unit),
        backward_peak=-(-back // unit),
        cost_first=cost_first,
        cost_again=cost_again,
        width=np.ascontiguousarray((np.cumsum(made[::-1], axis=0)[::-1] + unit // 2) // unit),
        leaf_peak=-(-np.array([o.leaf_peak_bytes for o in options], dtype=np.int64) // unit),
        leaf_again=np.array([o.leaf_s for o in options], dtype=np.float64),
        outside_first=np.array([_nearest(x, unit) for x in outside.first], dtype=np.int64),
        outside_again=np.array([_nearest(g + x, unit) for g, x in zip(outside.grads, incoming, strict=True)], np.int64),
    )


def _nearest(size_bytes: int, unit: int) -> int:
    """Slots to the nearest: a block may hold hundreds of tiny values, and the true peak is replayed afterwards."""
    return (size_bytes + unit // 2) // unit


# Steps of a plan: a block and the option by which its backward part runs, or one of these.
_FORWARD, _FORWARD_AGAIN, _LOSS = -1, -2, -3


@kernel
def _plan(t: ChainTable, front: ChainFront, slots: int) -> Ints:
    """Steps of the best plan with `slots` slots, in turn; none where no plan fits."""
    last = len(t.option_count) - 1
    ran = np.zeros(last + 1, dtype=np.bool_)
    steps = np.empty((4 * last + 8, 2), dtype=np.int64)
    count = 0
    # What is left to do: blocks from, to, and slots; or a block, -1, and the option of its backward part.
    pending = np.empty((3 * last + 8, 3), dtype=np.int64)
    pending[0, 0], pending[0, 1], pending[0, 2] = 0, last, slots
    top = 1
    while top > 0:
        top -= 1
        i, j, m = pending[top]
        if count + last + 3 > len(steps):
            longer = np.empty((2 * len(steps) + last, 2), dtype=np.int64)
            longer[:count] = steps[:count]
            steps = longer
        if j < 0:
            steps[count, 0], steps[count, 1] = i, m
            count += 1
            continue
        kind, which = best_move(t, front, i, j, m)
        if kind < 0:
            return steps[:0]
        stop = i + 1 if kind == 0 else which
        for index in range(i, stop):
            steps[count, 0], steps[count, 1] = index, _FORWARD_AGAIN if ran[index] else _FORWARD
            ran[index] = True
            count += 1
        if kind == 0:
            if i == last:
                steps[count, 0], steps[count, 1] = 0, _LOSS
                count += 1
            pending[top, 0], pending[top, 1], pending[top, 2] = i, -1, which
            width = t.saved[i, which]
        else:
            pending[top, 0], pending[top, 1], pending[top, 2] = i, stop - 1, m
            width = t.width[i, stop - 1]
        top += 1
        if stop <= j:
            pending[top, 0], pending[top, 1], pending[top, 2] = stop, j, m - width
            top += 1
    return steps[:count]


def expand(flat: Flat, solved: SolvedChain, slots: int) -> Ints:
    """The order of ops that the recurrence's best plan for `slots` slots runs. Raises ValueError if there is none."""
    steps = _plan(solved.table, solved.front, slots)
    if len(steps) == 0:
        raise ValueError(f"no plan fits {slots} slots")
    found = []
    for index, how in steps.tolist():
        if (index, how) not in solved.pieces:
            if how == _LOSS:
                ops = np.array([BOUNDARY], dtype=np.int64)
            elif how >= 0:
                ops = np.array(solved.locals[index].ops, dtype=np.int64)
                ops = ops[np.array(solved.options[index].options[how].backward, dtype=np.int64)]
            else:
                ops = np.array(solved.chain[index].forward, dtype=np.int64)
                ops = ops if how == _FORWARD else ops[flat.arrays.rerunnable[ops]]
            solved.pieces[index, how] = ops
        found.append(solved.pieces[index, how])
    return prune(flat.arrays, np.concatenate(found))


def expanded(flat: Flat, solved: SolvedChain, sizes: int) -> Iterator[Ints]:
    """Orders of the best plans for at most so many memory sizes."""
    for slots in distinct_slots(solved.front, sizes):
        yield expand(flat, solved, slots)


def baselines(flat: Flat, blocks_limit: int) -> tuple[tuple[str, Ints], ...]:
    """The textbook schedules by name. blocks_limit: most blocks of the chain that they work on.

    Either each block's forward part runs again before its backward part. Or about sqrt(n) cuts are kept, with as many
    blocks between them, and what is between runs again (Chen et al., arXiv 1604.06174).
    """
    blocks = make_chain(flat, layer_cuts(flat, coarse_cuts(flat, blocks_limit)))
    segments = max(1, round(len(blocks) ** 0.5))
    edges = [round(k * len(blocks) / segments) for k in range(segments + 1)]
    return (
        ("keep all", keep_all(flat)),
        ("recompute every block", grouped(flat, [[block] for block in blocks])),
        ("recompute sqrt(n) segments", grouped(flat, [blocks[i:j] for i, j in pairwise(edges) if j > i])),
    )


def grouped(flat: Flat, groups: Sequence[Sequence[Block]]) -> Ints:
    """Keep the cuts between groups of blocks; run a whole group again before its backward part, but for the last."""
    a = flat.arrays
    order: list[int] = [*range(a.boundary), BOUNDARY]
    for position, group in enumerate(reversed(groups)):
        if position:
            order.extend(op for block in group for op in block.forward if a.rerunnable[op])
        order.extend(op for block in reversed(group) for op in block.backward)
    return prune(a, np.array(order, dtype=np.int64))
