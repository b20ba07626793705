"""Configurations whose figures, which users do not turn, are others than usual."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from memplan.config import Config
from memplan.problem.data import Problem
from memplan.solvers.bounds.lower_bound import Bound, bound_of
from memplan.solvers.chain.expand import SolvedChain, solved_with
from memplan.solvers.chain.options import LocalBlock, block_options
from memplan.solvers.chain.partition import Block
from memplan.solvers.orders.flat import Flat, Ints, flatten


def with_figures(config: Config | None = None, **figures: int) -> Config:
    """The configuration with these fields of its `SearchFigures` changed."""
    config = config or Config()
    return dataclasses.replace(config, _figures=dataclasses.replace(config.figures, **figures))


def lower_bound(problem: Problem, moments: int = 10, cuts: int = 20) -> Bound:
    """Bounds of a problem, as a search finds them."""
    return bound_of(flatten(problem), problem.baseline_time_s, moments, cuts)


def solved_chain(
    flat: Flat, keys: tuple[str, ...], chain: tuple[Block, ...], most_bytes: int, slots: int,
    orders: Callable[[LocalBlock], Iterable[Ints]], limit: int,
) -> SolvedChain:  # fmt: skip
    """A chain with at most `limit` options of each block."""
    return solved_with(flat, keys, chain, most_bytes, slots, lambda block: block_options(block, orders(block), limit))
