"""One question to the exact search of blocks."""

from __future__ import annotations

from memplan.solvers.chain.options import LocalBlock
from memplan.solvers.exact.exact import BlockBudget, BlockSearch, BlockSolution


def solve_block(block: LocalBlock, budget: BlockBudget) -> BlockSolution:
    """Least recomputation of a block under a budget."""
    return BlockSearch(block).solve(budget)
