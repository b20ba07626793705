"""Blocks with fewer values, and tables over sets of values, against slower ways to the same answer."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.solvers.__main__ import instances
from benchmarks.solvers.blocks import distinct_blocks
from memplan.problem.data import Problem
from memplan.solvers.chain.options import LocalBlock, cut_orders
from memplan.solvers.exact import table as exact_table
from memplan.solvers.exact.block import reverse, why_unsuited
from memplan.solvers.exact.exact import NO_LIMIT, BlockBudget, BlockSearch, solve_grid
from memplan.solvers.exact.fuse import fused
from memplan.solvers.exact.space import NEVER, space_of
from memplan.solvers.exact.table import table_of
from memplan.solvers.exact.whole_step import whole_step
from memplan.solvers.orders.flat import flatten
from tests.solvers.test_exact_blocks import CALM, blocks_of, checked, questions, range_of_budgets
from tests.support.exact_blocks import solve_block
from tests.support.milp_oracle import facts_of, shortest
from tests.support.parameters import examples
from tests.support.random_graphs import StepBuilder

SIZES = (1, 8, 128, 128, 256)  # small values beside large ones, some of a size


@st.composite
def pointwise(draw: st.DrawFn, most_ops: int) -> Problem:
    """Steps of many ops of which few inputs are saved, with masks that are drawn in place."""
    b = StepBuilder()
    current = [b.value(128, "input")]
    for _ in range(draw(st.integers(2, most_ops))):
        time_s, scratch = float(draw(st.integers(1, 20))), draw(st.sampled_from([0, 0, 4, 128]))
        size = draw(st.sampled_from(SIZES))
        if draw(st.integers(0, 4)) == 0:
            (empty,) = b.forward("empty", (), (size,), differentiable=False)
            (mask,) = b.forward("draw", (empty,), (size,), in_place=empty, random=True, time_s=time_s,
                                differentiable=False)  # fmt: skip
            current.append(mask)
            continue
        near = current[-3:] if draw(st.integers(0, 3)) else current
        inputs = tuple(draw(st.lists(st.sampled_from(near), min_size=1, max_size=2, unique=True)))
        saved = inputs[:1] if draw(st.integers(0, 3)) == 0 and b.values[inputs[0]].role == "activation" else ()
        current += b.forward("op", inputs, (size,), saved=saved, save_outputs=draw(st.integers(0, 5)) == 0,
                             time_s=time_s, scratch_bytes=scratch)  # fmt: skip
    (loss,) = b.forward("loss", tuple(current[-2:]), (8,), saved=tuple(current[-1:]))
    return b.finish(loss, tangent=True, rng_state_bytes=16, time_factor=2.0)


@st.composite
def limited(draw: st.DrawFn, most_ops: int, most_values: int) -> tuple[LocalBlock, BlockBudget]:
    block = draw(st.sampled_from(blocks_of(draw(pointwise(most_ops)), 1)))
    assume(why_unsuited(block) is None)
    assume(2 <= len(facts_of(block).size) <= most_values and len(facts_of(block).step_reads) > 0)
    low, high = range_of_budgets(block)
    limits = [a + max(0, b - a) * draw(st.integers(0, 16)) // 16 for a, b in zip(low, high, strict=True)]
    limits[1] = limits[1] if draw(st.integers(0, 2)) == 0 else NO_LIMIT
    return block, BlockBudget(*limits)


@settings(CALM, max_examples=examples(150))
@given(limited(8, 10))
def test_fused_blocks_have_the_least_time_of_the_shortest_path(question: tuple[LocalBlock, BlockBudget]) -> None:
    answer = solve_block(*question)
    assert answer.certified
    assert checked(*question, answer) == pytest.approx(shortest(*question), rel=1e-9, abs=1e-9)


@settings(CALM, max_examples=examples(60))
@given(limited(16, 24))
def test_fused_blocks_have_the_least_time_of_larger_blocks(question: tuple[LocalBlock, BlockBudget]) -> None:
    with_fewer = solve_block(*question)
    block, budget = question
    searched = BlockSearch(block)
    del searched._blocks[1:]  # those with fewer values
    whole = searched.solve(budget)
    assert with_fewer.bound_s <= whole.recompute_s * (1 + 1e-9) and whole.bound_s <= with_fewer.recompute_s * (1 + 1e-9)
    if with_fewer.certified and whole.certified:
        assert checked(*question, with_fewer) == pytest.approx(checked(*question, whole), rel=1e-9, abs=1e-9)


@CALM
@given(questions(6, 9), st.integers(1, 9))
def test_a_table_is_a_bound_and_exact_where_it_has_all_values(
    question: tuple[LocalBlock, BlockBudget], bits: int
) -> None:
    block, budget = question
    b, tick_s = reverse(block)
    limits = np.array([budget.saved_bytes, budget.forward_peak_bytes, budget.backward_peak_bytes])
    least = shortest(block, budget)
    for most_nodes in ((len(b.step_bytes) + 1) << bits, 1 << 20):
        table, _places = table_of(b, space_of(b, budget.forward_peak_bytes < NO_LIMIT), limits, most_nodes)
        found = math.inf if table[-1, 0] >= NEVER else float(table[-1, 0]) * tick_s
        assert found <= least * (1 + 1e-9)
    assert found == pytest.approx(least, rel=1e-9, abs=1e-9)


def test_a_table_reads_only_what_has_been_written_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an op reads that can't run again is out of reach."""
    step = StepBuilder()
    (first,) = step.forward("first", (step.value(8, "input"),), (8,))
    (once,) = step.forward("once", (first,), (8,), save_outputs=True, recomputable=False)
    (last,) = step.forward("last", (once,), (8,))
    b, _tick_s = reverse(whole_step(flatten(step.finish(last, tangent=True))))
    space, limits = space_of(b, False), np.full(3, NO_LIMIT)
    assert not b.again.all()

    class Filled:
        """numpy, with memory in which something was before."""

        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        def empty(self, shape: Any, dtype: Any) -> Any:
            return np.full(shape, -(1 << 60), dtype=dtype)

    table, parcels = table_of(b, space, limits, 1 << 10)
    monkeypatch.setattr(exact_table, "np", Filled())
    monkeypatch.setattr(exact_table, "least_of_sets", exact_table.least_of_sets.py_func)  # type: ignore[attr-defined]
    filled, _parcels = table_of(b, space, limits, 1 << 10)
    for after, reach in enumerate(exact_table._within_reach(space, parcels).tolist()):
        sets = [demand for demand in range(table.shape[1]) if demand & ~reach == 0]
        assert table[after, sets].tolist() == filled[after, sets].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
def test_runs_are_joined_only_where_nothing_is_lost(beside: bool) -> None:
    """One value between two ops, with operands and outputs smaller and larger than it, at every kind of budget."""
    for sizes in itertools.product((8, 128, 256), repeat=3):
        for scratch, keeps, late in itertools.product((0, 256), (False, True), (False, True)):
            b = StepBuilder()
            given_ = b.value(512, "input")
            (x,) = b.forward("first", (given_,), (sizes[0],), time_s=9.0)
            (u,) = b.forward("second", (given_,), (128,), time_s=7.0) if beside else (x,)
            (v,) = b.forward("maker", (x,), (sizes[1],), saved=(x,) if keeps else (), time_s=5.0, scratch_bytes=scratch)
            reads = (v, u) if beside else (v,)
            (y,) = b.forward("reader", reads, (sizes[2],), time_s=3.0)
            (z,) = b.forward("last", (y,), (64,), saved=(y,), scratch_bytes=256 if late else 0)
            (loss,) = b.forward("loss", (z, y), (8,), saved=(y,))
            block = only_block(b, loss)
            low, high = range_of_budgets(block)
            for saved, peak in itertools.product(range(2), range(4)):
                budget = BlockBudget(
                    low[0] + max(0, high[0] - low[0]) * saved // 2, NO_LIMIT, low[2] + (high[2] - low[2]) * peak // 4
                )
                answer = solve_block(block, budget)
                assert answer.certified
                assert checked(block, budget, answer) == pytest.approx(shortest(block, budget), rel=1e-9, abs=1e-9)


def only_block(b: StepBuilder, output: int) -> LocalBlock:
    (block,) = blocks_of(b.finish(output, tangent=True, rng_state_bytes=16), 1)
    return block


def test_a_chain_is_one_run() -> None:
    """Tanh of a polynomial: its backward op reads the start and the end."""
    b = StepBuilder()
    (x,) = b.forward("linear", (b.value(512, "input"),), (256,), time_s=9.0)
    (cube,) = b.forward("pow", (x,), (256,), saved=(x,))
    (scaled,) = b.forward("mul", (cube,), (256,))
    (total,) = b.forward("add", (x, scaled), (256,))
    (curve,) = b.forward("tanh", (total,), (256,), save_outputs=True)
    (loss,) = b.forward("loss", (curve,), (8,))
    block = only_block(b, loss)
    whole, _tick_s = reverse(block)
    assert [parts for parts in fused(whole).parts if len(parts) > 1] == [(1, 2, 3, 4)]
    assert len(whole.size_bytes) - len(fused(whole).size_bytes) == 3


def test_a_mask_is_drawn_in_one_run() -> None:
    b = StepBuilder()
    (x,) = b.forward("linear", (b.value(512, "input"),), (256,), time_s=9.0)
    (empty,) = b.forward("empty", (), (256,), differentiable=False)
    (mask,) = b.forward("draw", (empty,), (256,), in_place=empty, random=True, differentiable=False)
    (scaled,) = b.forward("div", (mask,), (256,), in_place=mask, differentiable=False)
    (y,) = b.forward("mul", (x, scaled), (256,), saved=(scaled,))
    (loss,) = b.forward("loss", (y,), (8,))
    whole, _tick_s = reverse(only_block(b, loss))
    assert (1, 2, 3) in fused(whole).parts


def test_what_two_ops_read_stays() -> None:
    b = StepBuilder()
    (x,) = b.forward("linear", (b.value(512, "input"),), (256,), time_s=9.0)
    (left,) = b.forward("sin", (x,), (256,), save_outputs=True)
    (right,) = b.forward("cos", (x,), (256,), save_outputs=True)
    (loss,) = b.forward("loss", (left, right), (8,))
    whole, _tick_s = reverse(only_block(b, loss))
    assert all(len(parts) == 1 for parts in fused(whole).parts)


def test_a_value_is_held_where_its_operands_are_larger() -> None:
    """The value is made while its operand is there, and read when that is gone and another one is there."""
    b = StepBuilder()
    given_ = b.value(512, "input")
    (x,) = b.forward("first", (given_,), (256,), time_s=9.0)
    (u,) = b.forward("second", (given_,), (256,), time_s=7.0)
    (v,) = b.forward("maker", (x,), (16,), time_s=5.0)
    (y,) = b.forward("reader", (v, u), (16,), time_s=3.0)
    (z,) = b.forward("third", (y,), (64,), saved=(y,))
    (w,) = b.forward("wide", (z,), (64,), scratch_bytes=512)
    (loss,) = b.forward("loss", (w, x, u), (8,), saved=(x, u))
    block = only_block(b, loss)
    assert all(len(parts) == 1 for parts in fused(reverse(block)[0]).parts)
    low, high = range_of_budgets(block)
    for saved, peak in itertools.product(range(4), range(8)):
        limits = [low[i] + max(0, high[i] - low[i]) * part // 8 for i, part in ((0, saved), (2, peak))]
        budget = BlockBudget(limits[0], NO_LIMIT, limits[1])
        answer = solve_block(block, budget)
        assert checked(block, budget, answer) == pytest.approx(shortest(block, budget), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("name", "ops"), [("gpt2", 36), ("bert", 32), ("llama", 34)])
def test_layers_of_captured_models_are_certified(name: str, ops: int) -> None:
    """All three are a layer as `Config.exact_ops` cuts it; the nodes are those of `benchmarks.solvers.blocks`."""
    (block,) = [x for x in distinct_blocks(instances()[name], 45) if x.flat.arrays.boundary == ops]
    searched = BlockSearch(block, most_nodes=10_000, most_forwards=1.0)
    grid = solve_grid(searched, [tuple(order.tolist()) for order in cut_orders(block, 8)], 5, 5, 2)
    assert len(grid.answers) == 35 and grid.certified == 1.0
    assert sum(answer.nodes for answer in grid.answers) <= 35 * 10_000
    for budget, answer in zip(grid.budgets, grid.answers, strict=True):
        checked(block, budget, answer)
