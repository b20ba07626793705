"""Least recomputation of a block under limits on saved bytes and peaks, with a certificate.

`solve_block` answers one question (`BlockBudget`), `solve_orders` tries several orders of the backward ops, and
`exact_options` puts a grid of questions and keeps the Pareto set. Work is limited in nodes, never in seconds, so that
an answer is the same on every machine; where the limit is met, the answer has an incumbent, a lower bound and a gap.

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
        """Raises TooLarge where a block has more values than the search can tell apart."""
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
            before = windows(space, room_bytes)
        limits = (budget.saved_bytes, budget.forward_peak_bytes, budget.backward_peak_bytes)
        return Cell(*limits, room_bytes, before)

    def _ticks(self, order: Sequence[int]) -> int:
        n = self.block.flat.arrays.boundary
        runs = np.bincount([op for op in order if 0 <= op < n], minlength=n)
        return int(((runs - 1) * self._arrays.ticks).sum())

    def _order(self, path: Ints) -> tuple[int, ...]:
        n = self.block.flat.arrays.boundary
        return (*range(n), BOUNDARY, n, *(int(move) if move >= 0 else n - int(move) for move in path))


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
