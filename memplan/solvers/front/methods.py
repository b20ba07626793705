"""The methods of a configuration: each looks at the whole problem in its own way and yields schedules as sketches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from memplan.config import Config, SearchFigures
from memplan.problem.data import Problem
from memplan.solvers.bounds.lower_bound import Bound, needed_after
from memplan.solvers.bounds.mincut import saved_sets
from memplan.solvers.bounds.moments import asked
from memplan.solvers.chain.expand import expanded, solved_with
from memplan.solvers.chain.hierarchy import hierarchy_orders
from memplan.solvers.chain.options import BlockOptions, LocalBlock, block_options, cut_orders
from memplan.solvers.chain.partition import coarse_cuts, crossing_bytes, fine_cuts, make_chain
from memplan.solvers.exact.exact import exact_orders
from memplan.solvers.exact.whole_step import solve_step
from memplan.solvers.orders.flat import Arrays, Flags, Flat, Ints
from memplan.solvers.orders.replay import Sketch, keep_all, prune, sketch_of
from memplan.solvers.orders.rewrites import demand_order

_EXACT_WORK = 100_000  # cap on the ops of blocks that are searched, times ops: in long steps hardly a plan gains by it

BlockOrders = Callable[[LocalBlock], Iterable[Ints]]
_SHARES = (0.3, 0.7)  # how much of a value a programme of moments has to keep for it to count as kept


@dataclass(frozen=True, slots=True)
class MethodTask:
    """A problem as every method sees it.

    - keys: of its ops, equal for equal kernels.
    - most_bytes: the peak of keeping everything, with no microbatch waiting; more is never needed.
    """

    flat: Flat
    keys: tuple[str, ...]
    most_bytes: int
    figures: SearchFigures
    bound: Bound

    @classmethod
    def of(cls, problem: Problem, flat: Flat, config: Config) -> MethodTask:
        keys = tuple(op.key or op.kind for op in problem.graph.ops)
        most_bytes = sketch_of(flat.alone, "keep all", keep_all(flat)).peak_bytes
        return cls(flat, keys, most_bytes, config.figures, Bound(problem.baseline_time_s, 0, ()))


def rotor(task: MethodTask) -> Iterator[Sketch]:
    """Plain Rotor: each block is kept whole or runs again whole."""
    for _, positions, slots in _chains(task):
        yield from _from_chain(task, "rotor", positions, slots, lambda block: [keep_all(block.flat)])


def cuts(task: MethodTask) -> Iterator[Sketch]:
    """Schedules from minimum cuts over the whole step.

    A cut says what is saved. The rest is recomputed once and kept, or kept for a while only.
    """
    chosen = saved_sets(task.flat, needed_after(task.flat, task.flat.arrays.boundary), task.figures.cuts)
    yield from _from_saved(task, "minimum cut", [cut.saved for cut in chosen])


def moments(task: MethodTask) -> Iterator[Sketch]:
    """Schedules that keep what is best for the moments that the lower bound found to matter most."""
    yield from _from_saved(task, "moments", saved_of_moments(task.flat, task.bound))


def saved_of_moments(flat: Flat, bound: Bound) -> Iterator[Flags]:
    """Which values are kept from the forward pass, for the budgets that the bound looked at.

    What the bound's programme keeps at its first moment is what a schedule near the bound keeps from the forward pass.
    The programme may keep a fraction of a value. Fractions are rounded at a few shares: above the share a value counts
    as kept. The sets heed later moments too, which a minimum cut at one moment does not.
    """
    a = flat.arrays
    pinned = _pinned(a)
    for guide in bound.guides:
        early = pinned | (~a.overwritten & asked(flat, range(a.boundary, guide.moment + 1)))
        early[guide.values] = pinned[guide.values]
        for share in _SHARES:
            saved = early.copy()
            kept = guide.values[guide.kept > share]
            saved[kept] |= ~a.overwritten[kept]
            yield saved


def blocks(task: MethodTask) -> Iterator[Sketch]:
    """Rotor over blocks with many options, at two granularities."""
    for name, positions, slots in _chains(task):
        name = f"chain of {name} blocks"
        yield from _from_chain(task, name, positions, slots, lambda block: cut_orders(block, task.figures.block_cuts))


def exact(task: MethodTask) -> Iterator[Sketch]:
    """Rotor over blocks with options from an exact search as well, at up to three granularities."""
    figures = task.figures
    work = [min(figures.exact_work, _EXACT_WORK // task.flat.op_count)]

    def orders(block: LocalBlock) -> list[Ints]:
        cut = cut_orders(block, figures.block_cuts)
        work[0] -= block.flat.op_count
        return [*cut, *exact_orders(block, cut, figures.exact_parts, figures.exact_nodes if work[0] >= 0 else 0)]

    chains = _chains(task)
    layers = merged_cuts(task.flat, chains[0][1], figures.exact_ops)
    if layers not in [positions for _, positions, _ in chains]:
        chains.insert(1, ("large", layers, figures.coarse_slots))
    for name, positions, slots in chains:
        yield from _from_chain(task, f"chain of {name} exact blocks", positions, slots, orders, 2 * figures.options)


def flat(task: MethodTask) -> Iterator[Sketch]:
    """The whole step as one block: exact where it is small, local search at each of a few budgets where it is not."""
    figures, a, ops = task.figures, task.flat.arrays, task.flat.op_count
    parts = min(figures.flat_parts, max(2, figures.flat_work // ops))
    nodes = min(figures.flat_nodes, figures.flat_nodes * 64**2 // ops**2)  # a node of a long step takes longer
    for found in solve_step(task.flat, parts, figures.block_cuts, nodes):
        if found.order is not None:
            yield sketch_of(task.flat, "whole step", prune(a, found.order))


def hierarchy(task: MethodTask) -> Iterator[Sketch]:
    """Rotor over blocks that are chains of blocks themselves."""
    for order in hierarchy_orders(task.flat, task.keys, task.most_bytes, task.figures):
        yield sketch_of(task.flat, "hierarchy", order)


_ALL = (rotor, cuts, blocks, exact, flat, moments, hierarchy)
METHODS: dict[str, Callable[[MethodTask], Iterator[Sketch]]] = {method.__name__: method for method in _ALL}
# What is found in like ways, and is refined together.
FAMILIES = (("rotor", "cuts", "blocks"), ("exact", "flat"), ("moments",), ("hierarchy",))


def _from_saved(task: MethodTask, name: str, sets: Iterable[Collection[int]]) -> Iterator[Sketch]:
    """Schedules that keep these forward values: what is missing is recomputed and kept, or kept for a while only."""
    flat, a = task.flat, task.flat.arrays
    pinned = _pinned(a)
    for kept in sets:
        saved = pinned.copy()
        saved[list(kept)] = True
        for window in (0, 8, 64, flat.op_count):
            order = demand_order(a, saved, window, 4 * flat.op_count)
            if len(order):
                yield sketch_of(flat, name, prune(a, order))


def _pinned(a: Arrays) -> Flags:
    """Values that stay in any case: somebody holds them, or they can't be made again."""
    forward = (a.producer >= 0) & (a.producer < a.boundary) & ~a.overwritten
    pinned = a.held.copy()
    pinned[forward] |= ~a.rerunnable[a.producer[forward]]
    return pinned


def _chains(task: MethodTask) -> list[tuple[str, tuple[int, ...], int]]:
    """Cut positions and memory sizes told apart, at two granularities."""
    figures = task.figures
    coarse, fine = coarse_cuts(task.flat, figures.coarse_blocks), fine_cuts(task.flat, figures.fine_blocks)
    found = [("coarse", coarse, figures.coarse_slots), ("fine", fine, figures.fine_slots)]
    return found[: 1 if fine == coarse else 2]


def merged_cuts(flat: Flat, cuts: tuple[int, ...], most_ops: int) -> tuple[int, ...]:
    """The narrower of these cuts: the widest go first, as long as no block has more than `most_ops` forward ops."""
    crossing = crossing_bytes(flat)
    kept = [0, *cuts, flat.arrays.boundary]
    for position in sorted(cuts, key=lambda p: (-crossing[p], p)):
        at = kept.index(position)
        if kept[at + 1] - kept[at - 1] <= most_ops:
            del kept[at]
    return tuple(kept[1:-1])


def _from_chain(task: MethodTask, name: str, positions: tuple[int, ...], slots: int,
                orders: BlockOrders, options: int | None = None) -> Iterator[Sketch]:  # fmt: skip
    known = dict[tuple[object, ...], BlockOptions]()

    def options_of(block: LocalBlock) -> BlockOptions:
        if block.signature not in known:
            known[block.signature] = block_options(block, orders(block), options or task.figures.options)
        return known[block.signature]

    beyond, chain = max(1, task.most_bytes - task.flat.arrays.base_bytes), make_chain(task.flat, positions)
    solved = solved_with(task.flat, task.keys, chain, beyond + beyond // 8, slots, options_of)
    for order in expanded(task.flat, solved, task.figures.sizes):
        yield sketch_of(task.flat, name, order)
