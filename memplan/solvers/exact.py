"""Least recomputation of a block under limits on saved bytes and peaks, with a certificate.

`solve_block` answers one question (`BlockBudget`), `solve_grid` a grid of them, each starting from what others found.
Work is limited in nodes, never in seconds, so that an answer is the same on every machine; where the limit is met, the
answer has an incumbent, a lower bound and a gap.

What exactly is solved stands in `exact_block`; how, in `exact_kernel`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from memplan.schedule import BOUNDARY
from memplan.solvers.exact_block import Rows, reverse
from memplan.solvers.exact_bound import NEVER, moments_of, network_of
from memplan.solvers.exact_kernel import Cell, Rules, Space, search, windows
from memplan.solvers.flat import Ints
from memplan.solvers.options import LocalBlock, Option
from memplan.solvers.options import measured as option_of

NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class BlockBudget:
    """Bytes saved between the two parts and the peaks of both, as in `Option`."""

    saved_bytes: int = NO_LIMIT
    forward_peak_bytes: int = NO_LIMIT
    backward_peak_bytes: int = NO_LIMIT

    def admits(self, option: Option) -> bool:
        return (
            option.saved_bytes <= self.saved_bytes
            and option.forward_peak_bytes <= self.forward_peak_bytes
            and option.backward_peak_bytes <= self.backward_peak_bytes
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """order: of the block's ops, the stand-in among them; None where none was found. recompute_s: of repeated runs,
    infinite without an order. bound_s: nothing that keeps the limits takes less. certified: the two are equal, or it
    is certain that there is no order. nodes: expanded."""

    order: tuple[int, ...] | None
    recompute_s: float
    bound_s: float
    certified: bool
    nodes: int

    @property
    def gap_s(self) -> float:
        return 0.0 if self.certified else self.recompute_s - self.bound_s


class BlockSearch:
    """One block, many questions; what does not depend on the limits is made once."""

    def __init__(self, block: LocalBlock, rules: Rules | None = None, most_nodes: int = 20_000) -> None:
        """Raises Unsuited where the search can't take the block."""
        self.block, self.rules, self.most_nodes = block, rules or Rules(), most_nodes
        self._arrays, self._tick_s = reverse(block)
        self._net = network_of(self._arrays)
        self._spaces: dict[bool, Space] = {}

    def solve(self, budget: BlockBudget, known: Iterable[Sequence[int]] = ()) -> Answer:
        """known: orders that keep the budget; the best of them is where the search starts from."""
        space = self._space(budget.forward_peak_bytes < NO_LIMIT)
        upper, incumbent = NEVER, None
        for order in known:
            ticks = self._ticks(order)
            if ticks < upper:
                upper, incumbent = ticks, tuple(order)
        found = search(space, self._cell(space, budget), self.rules, upper, self.most_nodes)
        if found.ticks < upper:
            upper, incumbent = found.ticks, self._order(found.path)
        certified = found.bound_ticks >= upper
        bound_s = found.bound_ticks * self._tick_s if found.bound_ticks < NEVER else float("inf")
        recompute_s = upper * self._tick_s if incumbent is not None else float("inf")
        return Answer(incumbent, recompute_s, bound_s, certified, found.nodes)

    def _space(self, with_forward: bool) -> Space:
        if with_forward not in self._spaces:
            self._spaces[with_forward] = Space(self._arrays, moments_of(self._arrays, with_forward), self._net)
        return self._spaces[with_forward]

    def _cell(self, space: Space, budget: BlockBudget) -> Cell:
        b = self._arrays
        room = [
            budget.backward_peak_bytes - int(b.step_bytes[t]) - sum(int(b.size_bytes[v]) for v in _row(b.step_reads, t))
            for t in range(len(b.step_bytes))
        ]
        room.append(budget.saved_bytes - b.cut_bytes)
        if budget.forward_peak_bytes < NO_LIMIT:
            room += [budget.forward_peak_bytes - int(x) for x in b.forward_bytes]
        room_bytes = np.array(room, dtype=np.int64)
        before = np.zeros(len(b.step_bytes) + 1, dtype=np.int64)
        if self.rules.windows:
            before = windows(space, room_bytes, self.rules.whole)
        limits = (budget.saved_bytes, budget.forward_peak_bytes, budget.backward_peak_bytes)
        return Cell(*limits, room_bytes, before)

    def _ticks(self, order: Sequence[int]) -> int:
        n = self.block.flat.arrays.boundary
        runs = np.bincount([op for op in order if 0 <= op < n], minlength=n)
        return int(((runs - 1) * self._arrays.ticks).sum())

    def _order(self, path: Ints) -> tuple[int, ...]:
        n = self.block.flat.arrays.boundary
        return (*range(n), BOUNDARY, n, *(int(move) if move >= 0 else n - int(move) for move in path))

    def least_saved_bytes(self) -> int:
        """Saved where the cut alone is kept."""
        return self._arrays.cut_bytes

    def least_peak_bytes(self) -> int:
        """No order has a lower backward peak: each backward op needs its operands beside the gradients."""
        b = self._arrays
        reads = [int(b.size_bytes[_row(b.step_reads, t)].sum()) for t in range(len(b.step_bytes))]
        return max([0, *(int(x) + r for x, r in zip(b.step_bytes, reads, strict=True))])

    def keep_all(self) -> tuple[int, ...]:
        """The order that repeats nothing."""
        n = self.block.flat.arrays.boundary
        return (*range(n), BOUNDARY, *range(n, self.block.flat.op_count))


@dataclass(frozen=True, slots=True)
class Grid:
    """answers: one for each budget."""

    budgets: tuple[BlockBudget, ...]
    answers: tuple[Answer, ...]

    @property
    def certified(self) -> float:
        """The share of cells whose answer is certain."""
        return sum(answer.certified for answer in self.answers) / len(self.answers)


def solve_grid(searched: BlockSearch, known: Iterable[Sequence[int]], saved_parts: int, peak_parts: int) -> Grid:
    """Budgets from the least saved bytes and backward peak to those that need no recomputation, the loosest first.

    known: orders to start from. An answer that a tighter budget admits is its answer too.
    """
    orders = {tuple(order): measured(searched.block, order) for order in (searched.keep_all(), *known)}
    everything = orders[searched.keep_all()]
    least_saved = searched.least_saved_bytes()
    least_peak = min(searched.least_peak_bytes(), everything.backward_peak_bytes)
    budgets = [
        BlockBudget(saved, NO_LIMIT, peak)
        for saved in _steps(least_saved, everything.saved_bytes, saved_parts)
        for peak in _steps(least_peak, everything.backward_peak_bytes, peak_parts)
    ]
    answers = []
    for budget in budgets:
        fitting = [order for order, option in orders.items() if budget.admits(option)]
        answers.append(searched.solve(budget, fitting))
        order = answers[-1].order
        if order is not None and order not in orders:
            orders[order] = measured(searched.block, order)
    return Grid(tuple(budgets), tuple(answers))


def measured(block: LocalBlock, order: Sequence[int]) -> Option:
    """What an order of a block comes to."""
    return option_of(block, np.array(order, dtype=np.int64))


def _steps(low: int, high: int, parts: int) -> list[int]:
    return sorted({low + (high - low) * i // max(1, parts - 1) for i in range(parts)}, reverse=True)


def _row(rows: Rows, index: int) -> Ints:
    return rows.item[rows.start[index] : rows.start[index + 1]]


def solve_block(
    block: LocalBlock,
    budget: BlockBudget,
    known: Iterable[Sequence[int]] = (),
    rules: Rules | None = None,
    most_nodes: int = 20_000,
) -> Answer:
    """Least recomputation of a block under a budget."""
    return BlockSearch(block, rules, most_nodes).solve(budget, known)
