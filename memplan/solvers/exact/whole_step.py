"""A whole step as one block: one limit for everything, exact where the step is small."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from memplan.solvers.chain.options import LocalBlock, cut_orders
from memplan.solvers.chain.options import measured as option_of
from memplan.solvers.exact.block import why_unsuited
from memplan.solvers.exact.exact import BlockBudget, BlockSearch, BlockSolution, improved, option_of_order
from memplan.solvers.orders.flat import Flat, Ints, compressed
from memplan.solvers.orders.replay import keep_all

_TRIES = 4


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """The best order found for one budget of a whole step.

    Ops that may wait for the backward pass run once before it here. So `prune` may make an order take less time than
    the certificate says.

    - budget_bytes: peak of the whole step.
    - order: of the step's ops, None where none was found.
    - answer: what the search says; None where the step is too large for it.
    """

    budget_bytes: int
    order: Ints | None
    answer: BlockSolution | None


def whole_step(flat: Flat) -> LocalBlock:
    """The step as a block that nothing follows; its peaks are those of the step, residents included."""
    a, n = flat.arrays, flat.arrays.boundary
    stays = a.in_place & ((a.taken < 0) | a.held[a.taken])  # in memory that is there throughout
    held = [v for op in range(n) for v in flat.makes[op] if a.held[v] and not stays[v]]
    incoming = a.base_bytes + a.tangent_bytes + int(a.size_bytes[held].sum())
    tangents = len(a.size_bytes)
    reads = (*flat.reads[:n], (), *flat.reads[n:])
    makes = (*flat.makes[:n], (tangents,), *flat.makes[n:])
    read_start, read = compressed(reads)
    made_start, made = compressed(makes)
    arrays = a._replace(
        read_start=read_start,
        read=read,
        made_start=made_start,
        made=made,
        size_bytes=np.append(a.size_bytes, a.tangent_bytes),
        taken=np.append(a.taken, -1),
        in_place=np.append(a.in_place, False),
        held=np.append(a.held & ~(a.gradient & a.accumulate), True),
        gradient=np.zeros(tangents + 1, dtype=np.bool_),
        awaiting_start=np.zeros(flat.op_count + 2, dtype=np.int64),
        awaiting=a.awaiting[:0],
        producer=np.append(np.where(a.producer >= n, a.producer + 1, a.producer), n),
        overwritten=np.append(a.overwritten, False),
        rerunnable=np.insert(a.rerunnable, n, False),
        deferrable=np.zeros(flat.op_count + 1, dtype=np.bool_),
        random=np.insert(a.random, n, False),
        time_s=np.insert(a.time_s, n, 0.0),
        scratch_bytes=np.insert(a.scratch_bytes, n, 0),
        tangent_bytes=0,
        accumulate=False,
        update_bytes=0,
        others=0,
    )
    return LocalBlock(Flat(arrays, reads, makes), (*range(n), -1, *range(n, flat.op_count)), frozenset(), incoming, ())


def solve_step(flat: Flat, parts: int, cuts: int, most_nodes: int) -> list[StepAnswer]:
    """Answers for budgets from the least that a step may need to what keeping everything takes, the loosest first.

    A step that the search can't take has incumbents alone.
    """
    block, n = whole_step(flat), flat.arrays.boundary
    searched = None if why_unsuited(block) else BlockSearch(block, most_nodes=most_nodes)
    everything = tuple(keep_all(block.flat).tolist())
    starts = [everything, *(tuple(order.tolist()) for order in cut_orders(block, cuts))]
    orders = {order: option_of_order(block, order) for order in starts}
    peaks = [max(option.forward_peak_bytes, option.backward_peak_bytes) for option in orders.values()]
    low = searched.least_peak_bytes() if searched else min(peaks) * 3 // 4
    high, most_saved = peaks[0], orders[everything].saved_bytes
    # Where microbatches wait both limits count, and a coarser grid of either is searched.
    side = max(2, math.isqrt(parts))
    limits = [
        (low + (high - low) * part // (side - 1), most_saved * share // side)
        for part in range(side - 1, -1, -1)
        for share in range(side, -1, -1)
    ]
    if flat.arrays.others == 0:
        limits = [(low + (high - low) * part // max(1, parts - 1), high) for part in range(parts - 1, -1, -1)]
    answers = []
    for limit, saved in limits:  # on the peak, and on what is saved
        budget = BlockBudget(min(saved, limit - block.incoming_bytes), limit, limit)
        for better in improved(block, budget, orders, _TRIES):
            orders.setdefault(tuple(better.tolist()), option_of(block, better))
        fitting = [order for order, option in orders.items() if budget.admits(option)]
        answer = searched.solve(budget, fitting) if searched else None
        if answer and answer.order and answer.order not in orders:
            orders[answer.order] = option_of_order(block, answer.order)
        best = answer.order if answer else min(fitting, key=lambda order: orders[order].recompute_s, default=None)
        order = None if best is None else np.array([op - (op > n) for op in best if op != n], dtype=np.int64)
        answers.append(StepAnswer(limit, order, answer))
    return answers
