"""One question to the exact search of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memplan.solvers.chain.options import LocalBlock
from memplan.solvers.exact.exact import BlockSearch, BlockSolution
from memplan.solvers.exact.incumbents import BlockBudget
from memplan.solvers.exact.kernel import Rules


def solve_block(
    block: LocalBlock,
    budget: BlockBudget,
    known: Iterable[Sequence[int]] = (),
    rules: Rules | None = None,
    most_nodes: int = 20_000,
) -> BlockSolution:
    """Least recomputation of a block under a budget."""
    return BlockSearch(block, rules, most_nodes).solve(budget, known)
