"""The methods of a configuration: each looks at the whole problem in its own way and yields schedules as sketches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memplan.config import Config
from memplan.problem import Problem
from memplan.solvers.baselines import baselines, keep_all
from memplan.solvers.bound import needed_after
from memplan.solvers.chain import coarse_cuts, fine_cuts, make_chain
from memplan.solvers.expand import BlockOrders, expand, solved_chain
from memplan.solvers.flat import Flat, Ints
from memplan.solvers.mincut import saved_sets
from memplan.solvers.options import LocalBlock, cut_orders, kept_whole
from memplan.solvers.orders import demand_order
from memplan.solvers.replay import prune
from memplan.solvers.rotor import distinct_slots
from memplan.solvers.sketch import Sketch, sketch_of


@dataclass(frozen=True, slots=True)
class Task:
    """A problem as every method sees it. most_bytes: the peak of keeping everything; more is never needed."""

    flat: Flat
    keys: tuple[str, ...]
    most_bytes: int
    config: Config

    @classmethod
    def of(cls, problem: Problem, flat: Flat, config: Config) -> Task:
        keys = tuple(op.key or op.kind for op in problem.graph.ops)
        return cls(flat, keys, sketch_of(flat, "keep all", keep_all(flat)).peak_bytes, config)


def textbook(task: Task) -> Iterator[Sketch]:
    """Recompute every block, or sqrt(n) segments."""
    for name, order in baselines(task.flat, task.config.coarse_blocks):
        yield sketch_of(task.flat, name, order)


def rotor(task: Task) -> Iterator[Sketch]:
    """Plain Rotor: each block is kept whole or runs again whole."""
    for _, positions, slots in _chains(task):
        yield from _from_chain(task, "rotor", positions, slots, lambda block: [kept_whole(block)])


def cuts(task: Task) -> Iterator[Sketch]:
    """Saved sets of the whole step, values recomputed once and kept, or kept for a while only."""
    flat, a = task.flat, task.flat.arrays
    pinned = a.held.copy()
    for v, op in enumerate(a.producer):
        if 0 <= op < a.boundary and not a.rerunnable[op] and not a.overwritten[v]:
            pinned[v] = True
    for chosen in saved_sets(flat, needed_after(flat, a.boundary), task.config.cuts):
        saved = pinned.copy()
        saved[list(chosen.saved)] = True
        for window in (0, 8, 64, flat.op_count):
            order = demand_order(a, saved, window, 4 * flat.op_count)
            if len(order):
                yield sketch_of(flat, "minimum cut", prune(a, order))


def blocks(task: Task) -> Iterator[Sketch]:
    """Rotor over blocks with many options, at two granularities."""
    config = task.config

    def orders(block: LocalBlock) -> list[Ints]:
        return cut_orders(block, config.block_cuts)

    for name, positions, slots in _chains(task):
        yield from _from_chain(task, f"chain of {name} blocks", positions, slots, orders)


METHODS: dict[str, Callable[[Task], Iterator[Sketch]]] = {
    "textbook": textbook,
    "rotor": rotor,
    "cuts": cuts,
    "blocks": blocks,
}


def _chains(task: Task) -> list[tuple[str, tuple[int, ...], int]]:
    """Cut positions and memory sizes told apart, at two granularities."""
    config = task.config
    coarse, fine = coarse_cuts(task.flat, config.coarse_blocks), fine_cuts(task.flat, config.fine_blocks)
    found = [("coarse", coarse, config.coarse_slots), ("fine", fine, config.fine_slots)]
    return found[: 1 if fine == coarse else 2]


def _from_chain(task: Task, name: str, positions: tuple[int, ...], slots: int, orders: BlockOrders) -> Iterator[Sketch]:
    chain = make_chain(task.flat, positions)
    beyond = max(1, task.most_bytes - task.flat.arrays.base_bytes)
    solved = solved_chain(task.flat, task.keys, chain, beyond + beyond // 8, slots, orders, task.config.options)
    for m in distinct_slots(solved.front, task.config.sizes):
        yield sketch_of(task.flat, name, expand(task.flat, solved, m))
