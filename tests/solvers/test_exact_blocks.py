"""The exact search over a block against slower ways to the same answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from memplan.problem.data import Costs, Graph, Problem
from memplan.solvers.chain.expand import outside_of
from memplan.solvers.chain.options import LocalBlock, localise
from memplan.solvers.chain.partition import coarse_cuts, fine_cuts, make_chain
from memplan.solvers.exact.block import why_unsuited
from memplan.solvers.exact.exact import NO_LIMIT, BlockBudget, BlockSearch, BlockSolution, option_of_order, solve_grid
from memplan.solvers.exact.whole_step import solve_step
from memplan.solvers.orders.flat import flatten, last_reads
from memplan.solvers.orders.replay import sketch_of
from tests.support.exact_blocks import solve_block
from tests.support.milp_oracle import checkmate, facts_of, shortest
from tests.support.parameters import examples
from tests.support.random_graphs import StepBuilder, llama_like, random_problems, resnet_like, unet_like

CALM = settings(max_examples=examples(60), deadline=None, derandomize=True,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])  # fmt: skip


def blocks_of(problem: Problem, most_blocks: int) -> list[LocalBlock]:
    flat = flatten(problem)
    last_read = last_reads(flat)
    chain = make_chain(flat, fine_cuts(flat, most_blocks) if most_blocks > 1 else ())
    outside = outside_of(flat, chain, last_read)
    keys = tuple(op.key for op in problem.graph.ops)
    return [localise(flat, b, outside.incoming[i], last_read, keys) for i, b in enumerate(chain)]


def range_of_budgets(block: LocalBlock) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Limits that allow little, and limits that allow all."""
    n = block.flat.arrays.boundary
    everything = option_of_order(block, np.array([*range(n), n, *range(n + 1, block.flat.op_count)]))
    facts = facts_of(block)
    least_peak = max([0, *(b + facts.bytes_of(r) for b, r in zip(facts.during, facts.step_reads, strict=True))])
    lows = (facts.bytes_of(facts.cut), 0, least_peak)
    return lows, (everything.saved_bytes, everything.forward_peak_bytes, everything.backward_peak_bytes)


@st.composite
def questions(draw: st.DrawFn, most_ops: int, most_values: int, forward: bool = True) -> tuple[LocalBlock, BlockBudget]:
    problem = draw(random_problems(most_ops=most_ops))
    block = draw(st.sampled_from(blocks_of(problem, draw(st.integers(1, 3)))))
    assume(why_unsuited(block) is None)
    assume(2 <= len(facts_of(block).size) <= most_values and len(facts_of(block).step_reads) > 0)
    low, high = range_of_budgets(block)
    limits = [a + max(0, b - a) * draw(st.integers(0, 6)) // 6 for a, b in zip(low, high, strict=True)]
    limits[1] = limits[1] if forward and draw(st.booleans()) else NO_LIMIT
    return block, BlockBudget(*limits)


def checked(block: LocalBlock, budget: BlockBudget, answer: BlockSolution) -> float:
    """Seconds of an answer whose order has been measured by the accountant."""
    if answer.order is None:
        assert math.isinf(answer.recompute_s)
        return math.inf
    option = option_of_order(block, np.array(answer.order))
    assert budget.admits(option)
    assert option.recompute_s == pytest.approx(answer.recompute_s, rel=1e-9, abs=1e-9)
    assert answer.bound_s <= answer.recompute_s
    return answer.recompute_s


@CALM
@given(questions(6, 9))
def test_equals_the_shortest_path_over_sets(question: tuple[LocalBlock, BlockBudget]) -> None:
    answer = solve_block(*question)
    assert answer.certified
    assert checked(*question, answer) == pytest.approx(shortest(*question), rel=1e-9, abs=1e-9)


def in_stages(block: LocalBlock, answer: BlockSolution) -> bool:
    """Whether an answer runs each op at most once a stage and in topological order, as the programme has to."""
    n = block.flat.arrays.boundary
    assert answer.order is not None
    backward = answer.order[answer.order.index(n) + 1 :]
    return all(left < right for left, right in itertools.pairwise(backward) if right < n and left < n)


def compared(block: LocalBlock, budget: BlockBudget) -> bool:
    """Whether HiGHS closed the programme; its seconds are never less than ours."""
    answer = solve_block(block, budget)
    seconds, closed = checkmate(block, budget)
    assert answer.bound_s <= seconds * (1 + 1e-9) + 1e-12
    if closed and answer.certified:
        found = checked(block, budget, answer)
        if answer.order is None or in_stages(block, answer):
            assert found == pytest.approx(seconds, rel=1e-6, abs=1e-12)
        else:
            assert found <= seconds * (1 + 1e-6)
    return closed


@settings(CALM, max_examples=examples(15))
@given(questions(7, 12))
def test_equals_the_programme_on_random_blocks(question: tuple[LocalBlock, BlockBudget]) -> None:
    assert compared(*question)


@pytest.mark.slow
@settings(CALM, max_examples=60)
@given(questions(12, 20))
def test_equals_the_programme_on_larger_blocks(question: tuple[LocalBlock, BlockBudget]) -> None:
    compared(*question)


@CALM
@given(random_problems(most_ops=10), st.integers(1, 3))
def test_an_unfinished_search_has_an_incumbent_and_a_bound(problem: Problem, most_nodes: int) -> None:
    for block in itertools.filterfalse(why_unsuited, blocks_of(problem, 1)):
        few, many = BlockSearch(block, most_nodes=most_nodes), BlockSearch(block)
        for budget in solve_grid(few, (), 3, 3).budgets:
            known = [few.keep_all()] if budget.admits(option_of_order(block, few.keep_all())) else []
            early, late = few.solve(budget, known), many.solve(budget)
            checked(block, budget, early)
            assert early.bound_s <= late.recompute_s * (1 + 1e-9) and late.recompute_s <= early.recompute_s * (1 + 1e-9)
            assert (early.certified or early.bound_s <= early.recompute_s) and early.nodes <= most_nodes
            assert few.solve(budget, known) == early


def test_a_layer_is_certified_over_its_grid() -> None:
    problem = llama_like(1)
    flat = flatten(problem)
    keys = tuple(op.key for op in problem.graph.ops)
    last_read = last_reads(flat)
    chain = make_chain(flat, coarse_cuts(flat, 3))
    outside = outside_of(flat, chain, last_read)
    for index, part in enumerate(chain):
        block = localise(flat, part, outside.incoming[index], last_read, keys)
        if why_unsuited(block) is None and len(part.backward):
            grid = solve_grid(BlockSearch(block), (), 4, 4)
            assert grid.certified == 1.0
            for budget, answer in zip(grid.budgets, grid.answers, strict=True):
                checked(block, budget, answer)


@settings(CALM, max_examples=examples(25))
@given(random_problems(most_ops=7), st.sampled_from([0, 1, 3, 1000]))
def test_a_grid_says_of_every_budget_what_is_true(problem: Problem, most_nodes: int) -> None:
    """Bounds and orders that budgets take over from each other, limits on the forward peak among them."""
    for block in itertools.filterfalse(why_unsuited, blocks_of(problem, 1)):
        if len(facts_of(block).size) > 9:
            continue
        forward_s = float(block.flat.arrays.time_s[: block.flat.arrays.boundary].sum())
        searched = BlockSearch(block, most_nodes=most_nodes, most_forwards=1.0)
        grid = solve_grid(searched, (), 3, 3, 2)
        for budget, answer in zip(grid.budgets, grid.answers, strict=True):
            found, least = checked(block, budget, answer), shortest(block, budget)
            assert answer.bound_s <= least * (1 + 1e-9) + 1e-12 <= found * (1 + 1e-8) + 2e-12
            if answer.certified and answer.order is not None:
                assert found == pytest.approx(least, rel=1e-9, abs=1e-9)
            elif answer.certified:
                assert least >= forward_s * (1 - 1e-9)
            else:
                assert most_nodes < 1000


@CALM
@given(random_problems(most_ops=9))
def test_a_whole_step_keeps_its_budget(problem: Problem) -> None:
    flat = flatten(problem)
    for found in solve_step(flat, 4, 4, 2000):
        if found.order is None or found.answer is None:
            continue
        sketch = sketch_of(flat, "", found.order)
        assert sketch.time_s == pytest.approx(problem.baseline_time_s + found.answer.recompute_s, rel=1e-9, abs=1e-9)
        if not problem.frees_gradients and not problem.update_bytes:
            assert 0 <= sketch.peak_bytes <= found.budget_bytes


def test_an_output_in_memory_that_it_took_over_is_held() -> None:
    """Two outputs of the model, one of them written over an activation: all eight values are there in the end."""
    step = StepBuilder()
    x, made = step.value(8, "input"), step.value(8)
    written, other, loss = step.value(8, reuses=made, held=True), step.value(8), step.value(8, held=True)
    step.op("make", (x,), (made,), random=True, recomputable=False)
    step.op("write", (made,), (written, other), random=True, recomputable=False)
    step.op("loss", (written, other), (loss,))
    grads = [step.value(8) for _ in range(4)]
    step.op("ones", (), (grads[0],), phase="backward")
    step.op("left", (grads[0], other), (grads[1],), phase="backward")
    step.op("right", (grads[0], other), (grads[2],), phase="backward")
    step.op("sum", (grads[1], grads[2]), (grads[3],), phase="backward")
    problem = Problem(Graph(tuple(step.values), tuple(step.ops), 3), Costs(tuple(step.time_s), (0,) * 7))
    flat = flatten(problem)
    for found in solve_step(flat, 3, 4, 2000):
        assert found.order is not None
        assert sketch_of(flat, "", found.order).peak_bytes <= found.budget_bytes


@pytest.mark.parametrize("build", [lambda: resnet_like((1, 1)), lambda: unet_like(1)])
def test_a_small_step_is_certified_whole(build: Callable[[], Problem]) -> None:
    problem = build()
    assert 20 <= len(problem.graph.ops) <= 100
    found = solve_step(flatten(problem), 6, 8, 2000)
    assert all(step.answer is not None and step.answer.certified for step in found)
    assert sum(step.order is not None for step in found) >= 4
