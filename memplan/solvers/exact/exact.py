"""Least recomputation of a block under limits on saved bytes and peaks, with a certificate.

`BlockSearch` answers one question (`BlockBudget`), `solve_grid` a grid of them, each starting from what others found.
Incumbents come from minimum cuts and local search (`improved`), the certificate from branch and bound. Work is
limited in nodes, never in seconds, so that an answer is the same on every machine. Where the limit is met, the answer
has an incumbent, a lower bound and a gap.

What exactly is solved stands in `block`. How it is solved stands in `kernel`: with fewer values (`fuse`), bounds of
moments (`moment_bound`) and a table over sets of large values (`table`). A certificate has no tolerance.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memplan.problem.schedule import BOUNDARY
from memplan.solvers.chain.options import LocalBlock, Option
from memplan.solvers.chain.options import measured as option_of
from memplan.solvers.exact.block import Reversed, reverse, why_unsuited
from memplan.solvers.exact.fuse import fused
from memplan.solvers.exact.kernel import SearchResult, search
from memplan.solvers.exact.moment_bound import least_after, windows
from memplan.solvers.exact.space import NEVER, Cell, Space, barring, space_of
from memplan.solvers.exact.table import NO_TABLE, table_of
from memplan.solvers.orders.flat import Arrays, Ints
from memplan.solvers.orders.replay import fill, keep_all, outcome
from memplan.solvers.orders.rewrites import bring_down
from memplan.solvers.search.refine import exchange

_MOST_S = float("inf")
_MOST_FORWARDS = 1.0  # options that repeat more are left to the chain, which can run whole blocks again
_LEAST_OPS = 4  # smaller blocks have no options but those from minimum cuts
_TRIES = 4  # incumbents that local search starts from, for each budget
_SWEEP_LABELS = 96  # of whole-valued sweeps over windows of steps
_BOUNDARY_LABELS = 8192  # of the one at the boundary
_FREE = 5  # values of no more than this power of two less than the largest are free at first
_MOST_BOUNDED = 100  # nodes that are bounded by moments, where there is a table as well
_SHARES = (0.125, 1.0, 8.0, 64.0)  # of the nodes for each budget, what one may take at a look


@dataclass(frozen=True, slots=True)
class BlockSolution:
    """The answer for one budget of a block.

    - order: of the block's ops, the stand-in among them; None where none was found.
    - recompute_s: seconds of repeated runs, infinite without an order.
    - bound_s: nothing that keeps the limits takes less.
    - certified: the two are equal, or it is certain that no order takes less than what was asked for.
    - nodes: expanded in the search.
    """

    order: tuple[int, ...] | None
    recompute_s: float
    bound_s: float
    certified: bool
    nodes: int


class BlockSearch:
    """One block, many questions; what does not depend on the limits is made once."""

    def __init__(self, block: LocalBlock, most_nodes: int = 20_000, most_forwards: float | None = None) -> None:
        """Prepare the search of a block that it can take (`why_unsuited`).

        most_forwards: orders that repeat more than so many forward parts, in seconds, are of no interest. The search
        then answers as if there were none.
        """
        self.block, self.most_nodes = block, most_nodes
        self._whole, self._tick_s = reverse(block)
        free_bytes = int(self._whole.size_bytes.max(initial=0)) >> _FREE
        # Each bounds those before it from below, and has less to decide.
        self._blocks = [self._whole, fused(self._whole), fused(self._whole, free_bytes)]
        self._most_ticks = NEVER if most_forwards is None else int(most_forwards * int(self._whole.ticks.sum()))
        self._spaces: dict[tuple[int, bool], Space] = {}
        self._cells: dict[tuple[int, BlockBudget], tuple[Space, Cell]] = {}
        self._ticks_of: dict[tuple[int, ...], int] = {}  # what orders repeat; each is known for many budgets

    def solve(
        self,
        budget: BlockBudget,
        known: Iterable[Sequence[int]] = (),
        bound_s: float = 0.0,
        most_nodes: int | None = None,
    ) -> BlockSolution:
        """Least recomputation under a budget.

        - known: orders that keep the budget. The search starts from the best of them.
        - bound_s: a lower bound that is known to hold for this budget.
        - most_nodes: instead of the search's own.
        """
        most_nodes = self.most_nodes if most_nodes is None else most_nodes
        upper, incumbent = self._most_ticks, None
        for order in known:
            ticks = self._ticks(tuple(order))
            if ticks < upper:
                upper, incumbent = ticks, tuple(order)
        least = NEVER if bound_s == float("inf") else round(bound_s / self._tick_s)
        n, nodes = self.block.flat.arrays.boundary, 0
        for b in reversed(self._blocks):
            found = self._found(b, budget, upper, least, most_nodes - nodes)
            nodes += found.nodes
            least = found.bound_ticks
            if found.ticks >= upper:
                break
            moves = itertools.chain.from_iterable(b.parts[m] if m >= 0 else (n - m,) for m in found.path.tolist())
            order = (*range(n), BOUNDARY, n, *moves)
            if b is self._whole or budget.admits(option_of_order(self.block, order)):
                upper, incumbent = found.ticks, order
                break
        certified = found.bound_ticks >= upper
        least_s = found.bound_ticks * self._tick_s if found.bound_ticks < NEVER else float("inf")
        recompute_s = upper * self._tick_s if incumbent is not None else float("inf")
        return BlockSolution(incumbent, recompute_s, min(least_s, recompute_s), certified, nodes)

    def _found(self, b: Reversed, budget: BlockBudget, upper: int, bound_ticks: int, most_nodes: int) -> SearchResult:
        """The search's answer for `b`, which is the block itself, or one that bounds it from below."""
        nothing = np.empty(0, dtype=np.int64)
        if upper <= bound_ticks or most_nodes == 0:
            return SearchResult(NEVER, min(upper, bound_ticks), nothing, 0)
        if len(b.step_bytes) == 0:  # nothing is demanded, so nothing has to be saved
            forward_fits = self.least_forward_bytes() <= budget.forward_peak_bytes
            fits = self.least_saved_bytes() <= budget.saved_bytes and forward_fits
            return SearchResult(0 if fits else NEVER, 0 if fits else NEVER, nothing, 0)
        space, cell = self._cell(b, budget, upper)
        if cell.before[-1] >= upper:
            return SearchResult(NEVER, upper, nothing, 0)
        table, places = table_of(b, space, cell.limits, most_nodes)
        cell = cell._replace(table=table, places=places)
        most_bounded = _MOST_BOUNDED if len(table) else most_nodes
        ticks, least, path, nodes = search(space, cell, upper, most_nodes, most_bounded)
        return SearchResult(int(ticks), max(int(least), min(bound_ticks, int(ticks), upper)), path, int(nodes))

    def _cell(self, b: Reversed, budget: BlockBudget, upper: int) -> tuple[Space, Cell]:
        """What the search needs for a budget, without a table."""
        which, with_forward = (id(b), budget), budget.forward_peak_bytes < NO_LIMIT
        if which in self._cells:
            return self._cells[which]
        if (id(b), with_forward) not in self._spaces:
            self._spaces[id(b), with_forward] = space_of(b, with_forward)
        steps = len(b.step_bytes)
        room = [budget.backward_peak_bytes - needed_bytes for needed_bytes in _bytes_of_steps(b)]
        room.append(budget.saved_bytes - b.cut_bytes)
        if with_forward:
            room += [budget.forward_peak_bytes - int(x) for x in b.forward_bytes]
        room_bytes = np.array(room, dtype=np.int64)
        space = barring(self._spaces[id(b), with_forward], room_bytes)
        before, price = windows(space, room_bytes, _SWEEP_LABELS, upper)
        if before[-1] < upper:
            low, high = space.needed[0, steps]
            least = least_after(space.ops, space.weight[steps], low, high, room_bytes[steps], upper, _BOUNDARY_LABELS)
            before[-1] = max(int(before[-1]), int(least))
        limits = np.array((budget.saved_bytes, budget.forward_peak_bytes, budget.backward_peak_bytes), dtype=np.int64)
        self._cells[which] = space, Cell(limits, room_bytes, before, price, *NO_TABLE)
        return self._cells[which]

    def _ticks(self, order: tuple[int, ...]) -> int:
        if order not in self._ticks_of:
            n = self.block.flat.arrays.boundary
            runs = np.bincount([op for op in order if 0 <= op < n], minlength=n)
            self._ticks_of[order] = int(((runs - 1) * self._whole.ticks).sum())
        return self._ticks_of[order]

    def seconds(self, order: tuple[int, ...]) -> float:
        """Seconds of what an order repeats."""
        return self._ticks(order) * self._tick_s

    @property
    def most_s(self) -> float:
        """Orders that repeat so many seconds or more are of no interest."""
        return _MOST_S if self._most_ticks == NEVER else self._most_ticks * self._tick_s

    def least_saved_bytes(self) -> int:
        """Bytes saved where the cut alone is kept."""
        return self._whole.cut_bytes

    def least_peak_bytes(self) -> int:
        """A lower bound on the backward peak: each backward op needs its operands beside the gradients."""
        return max([0, *_bytes_of_steps(self._whole)])

    def least_forward_bytes(self) -> int:
        """The forward peak where the cut alone is kept."""
        return int(max([0, *self._whole.forward_bytes]))

    def keep_all(self) -> tuple[int, ...]:
        """The order that repeats nothing."""
        return tuple(keep_all(self.block.flat).tolist())


@dataclass(frozen=True, slots=True)
class Grid:
    """Budgets of a block, and an answer for each."""

    budgets: tuple[BlockBudget, ...]
    answers: tuple[BlockSolution, ...]

    @property
    def certified(self) -> float:
        """The share of cells whose answer is certain."""
        return sum(answer.certified for answer in self.answers) / len(self.answers)


def solve_grid(searched: BlockSearch, known: Iterable[Sequence[int]], saved_parts: int, peak_parts: int,
               forward_parts: int = 0) -> Grid:  # fmt: skip
    """Answers for budgets from the least saved bytes and peaks to those that need no recomputation.

    Local search goes over all budgets first, the loosest first; what it finds for one starts it on the next. Then
    branch and bound closes the budgets, and an answer for one says something of others: an order that keeps a tighter
    budget keeps this one too, and a lower bound of a looser budget is one of this one too. Nodes that some budgets
    leave are for others.

    - known: orders to start from.
    - saved_parts, peak_parts: limits on saved bytes and on the backward peak.
    - forward_parts: limits on the forward peak, which the other budgets leave free.
    """
    block, everything = searched.block, option_of_order(searched.block, searched.keep_all())
    orders = {tuple(order): option_of_order(block, order) for order in (searched.keep_all(), *known)}
    least_peak = min(searched.least_peak_bytes(), everything.backward_peak_bytes)
    saved_steps = _steps(searched.least_saved_bytes(), everything.saved_bytes, saved_parts)
    peak_steps = _steps(least_peak, everything.backward_peak_bytes, peak_parts)
    budgets = [BlockBudget(saved, NO_LIMIT, peak) for saved in saved_steps for peak in peak_steps]
    if forward_parts and everything.forward_peak_bytes > everything.saved_bytes:  # else forward peaks at the boundary
        least_forward = min(searched.least_forward_bytes(), everything.forward_peak_bytes)
        ahead = _steps(least_forward, everything.forward_peak_bytes, forward_parts + 1)[1:]
        budgets += [BlockBudget(saved, peak, everything.backward_peak_bytes) for saved in saved_steps for peak in ahead]
    budgets = list(dict.fromkeys(budgets))
    for budget in budgets:
        for better in improved(block, budget, orders, _TRIES):
            orders.setdefault(tuple(better.tolist()), option_of(block, better))
    closing = _Closing(searched, budgets, orders)
    for share in _SHARES:
        closing.look(int(share * searched.most_nodes))
    return Grid(tuple(budgets), tuple(closing.answer(budget) for budget in budgets))


class _Closing:
    """Budgets on the way to certain answers; what is found for one counts for the others."""

    def __init__(self, search: BlockSearch, budgets: list[BlockBudget], orders: dict[tuple[int, ...], Option]) -> None:
        self.searched, self.budgets = search, budgets
        self.left = search.most_nodes * len(budgets)
        self.best: dict[BlockBudget, tuple[float, tuple[int, ...] | None]] = dict.fromkeys(budgets, (_MOST_S, None))
        self.found: dict[BlockBudget, BlockSolution] = {}
        for order, option in orders.items():
            self._enter(order, option)

    def _enter(self, order: tuple[int, ...], option: Option) -> None:
        recompute_s = self.searched.seconds(order)
        for budget in self.budgets:
            if recompute_s < min(self.best[budget][0], self.searched.most_s) and budget.admits(option):
                self.best[budget] = recompute_s, order

    def answer(self, budget: BlockBudget) -> BlockSolution:
        """What is known of a budget."""
        own = self.found.get(budget, BlockSolution(None, _MOST_S, 0.0, False, 0))
        if own.certified:
            return own
        recompute_s, order = self.best[budget]
        bound_s = max([own.bound_s, *(a.bound_s for looser, a in self.found.items() if budget.within(looser))])
        certified = bound_s >= min(recompute_s, self.searched.most_s)
        return BlockSolution(order, recompute_s, min(bound_s, recompute_s), certified, own.nodes)

    def look(self, most_nodes: int) -> None:
        """Search each budget that is open, within so many nodes.

        From the second look on, a budget waits for a looser one that is open and has the same order so far.
        """
        for budget in self.budgets:
            answer = self.answer(budget)
            waits = budget in self.found and any(
                looser != budget and budget.within(looser) and self.best[looser] == self.best[budget]
                for looser, known in self.found.items()
                if not known.certified
            )
            if not answer.certified and self.left and not waits:
                known = [answer.order] if answer.order else []
                before = answer.nodes
                answer = self.searched.solve(budget, known, answer.bound_s, min(self.left, most_nodes))
                self.left -= answer.nodes
                answer = dataclasses.replace(answer, nodes=before + answer.nodes)
                if answer.order is not None and answer.recompute_s < self.best[budget][0]:
                    self._enter(answer.order, option_of_order(self.searched.block, answer.order))
            self.found[budget] = answer


def exact_orders(block: LocalBlock, known: Iterable[Ints], parts: int, most_nodes: int) -> list[Ints]:
    """The orders of a grid of budgets for a block.

    There are none where the search can't take the block, or has nothing to decide.
    """
    a = block.flat.arrays
    if a.boundary < _LEAST_OPS or block.flat.op_count - a.boundary < 2 or why_unsuited(block):
        return []
    searched = BlockSearch(block, most_nodes=most_nodes, most_forwards=_MOST_FORWARDS)
    grid = solve_grid(searched, (tuple(order.tolist()) for order in known), parts, parts, parts // 2)
    orders = dict.fromkeys(answer.order for answer in grid.answers if answer.order is not None)
    return [np.array(order, dtype=np.int64) for order in orders]


def option_of_order(block: LocalBlock, order: Sequence[int]) -> Option:
    return option_of(block, np.array(order, dtype=np.int64))


def _steps(low: int, high: int, parts: int) -> list[int]:
    return sorted({low + (high - low) * i // max(1, parts - 1) for i in range(parts)}, reverse=True)


def _bytes_of_steps(b: Reversed) -> list[int]:
    """What each step needs: its operands beside what no choice changes."""
    return [int(x) + int(b.size_bytes[b.step_reads.row(t)].sum()) for t, x in enumerate(b.step_bytes)]


NO_LIMIT = 1 << 60
_FREE = 1 << 50  # stands for no limit where bytes are added up
_ROUNDS, _FILLS, _EXCHANGES, _WIDTH = 100, 8, 30, 6  # effort of each start


class BlockBudget(NamedTuple):
    """Bytes saved between the two parts and the peaks of both, as in `Option`."""

    saved_bytes: int = NO_LIMIT
    forward_peak_bytes: int = NO_LIMIT
    backward_peak_bytes: int = NO_LIMIT

    def admits(self, option: Option) -> bool:
        return all(map(operator.le, option.figures[:3], self))

    def within(self, other: BlockBudget) -> bool:
        """Whether every option within these limits is within the other's."""
        return all(map(operator.le, self, other))


def limited(block: LocalBlock, budget: BlockBudget) -> tuple[Arrays, int]:
    """Arrays whose orders peak within the returned limit just where they keep the budget."""
    a = block.flat.arrays
    limit = min(budget.backward_peak_bytes, _FREE)
    scratch = a.scratch_bytes.copy()
    scratch[: a.boundary] += limit - min(budget.forward_peak_bytes, 2 * _FREE)
    scratch[a.boundary] = limit - min(budget.saved_bytes, 2 * _FREE) - block.incoming_bytes
    return a._replace(scratch_bytes=scratch), limit


def improved(block: LocalBlock, budget: BlockBudget, known: Mapping[tuple[int, ...], Option], tries: int) -> list[Ints]:
    """Orders that keep the budget, from the most promising `tries` of those known; the best of them comes last.

    known: orders and what they come to.
    """
    a, limit = limited(block, budget)
    total_s = float(a.time_s.sum())

    def score(option: Option) -> float:
        over = max(
            0,
            option.saved_bytes - budget.saved_bytes,
            option.forward_peak_bytes - budget.forward_peak_bytes,
            option.backward_peak_bytes - limit,
        )
        return option.recompute_s + 3 * over / max(1, abs(limit)) * total_s

    found: list[tuple[float, Ints]] = []
    for start in sorted(known, key=lambda start: score(known[start]))[:tries]:
        order = np.array(start, dtype=np.int64)
        trial = fill(a, bring_down(a, order, limit, _ROUNDS, _WIDTH), limit, _FILLS)
        peak, time_s = outcome(a, trial)
        if peak <= limit and _forward_once(a, trial):
            found.append((time_s, trial))
    if not found:
        return []
    best = min(found, key=lambda entry: entry[0])[1]
    better = exchange(a, best, limit, _EXCHANGES, _WIDTH)
    return [best, better] if _forward_once(a, better) else [best]


def _forward_once(a: Arrays, order: Ints) -> bool:
    """Whether the forward part runs every op once, in order: a block's options have nothing else."""
    n = a.boundary
    return len(order) > n + 1 and order[n] == BOUNDARY and order[n + 1] == n and bool((order[:n] == np.arange(n)).all())
