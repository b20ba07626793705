"""The hierarchy: every order legal and accounted for, children solved once, and what it gains over a chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from memplan.config import Config
from memplan.problem.data import Problem
from memplan.problem.schedule import BOUNDARY, schedule_of
from memplan.problem.simulate import simulate
from memplan.solvers.chain.expand import outside_of
from memplan.solvers.chain.hierarchy import Hierarchy, best_options, hierarchy_orders, plain_forward
from memplan.solvers.chain.options import LocalBlock, cut_orders, localise, measured
from memplan.solvers.chain.partition import coarse_cuts, fine_cuts, layer_cuts, make_chain
from memplan.solvers.front.methods import MethodTask, blocks
from memplan.solvers.orders.flat import flatten, last_reads
from memplan.solvers.orders.replay import Sketch, keep_all, pareto, sketch_of
from tests.support.configs import with_figures
from tests.support.parameters import examples
from tests.support.random_graphs import (
    encoder_decoder_like,
    llama_like,
    random_problems,
    resnet_like,
    unet_like,
)

pytestmark = pytest.mark.full_search  # with bounds as tight as users have
SMALL = with_figures(coarse_blocks=8, fine_blocks=12, coarse_slots=60, fine_slots=60, block_cuts=4, options=8, sizes=4)
CALM = settings(max_examples=examples(60), deadline=None, derandomize=True,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])  # fmt: skip
SHAPES: dict[str, Callable[[], Problem]] = {
    "unet": lambda: unet_like(4),
    "encoder-decoder": lambda: encoder_decoder_like(2),
    "llama": lambda: llama_like(3, dropout=True),
    "resnet": lambda: resnet_like((2, 2)),
}


def task_of(problem: Problem, config: Config) -> MethodTask:
    return MethodTask.of(problem, flatten(problem), config)


def sketches(task: MethodTask) -> list[Sketch]:
    found = hierarchy_orders(task.flat, task.keys, task.most_bytes, task.figures)
    return [sketch_of(task.flat, "hierarchy", order) for order in found]


def check(problem: Problem, found: list[Sketch]) -> None:
    """Each order is legal and comes to what its sketch says."""
    assert found
    for order in {sketch.order.tobytes(): sketch for sketch in found}.values():
        timeline = simulate(problem, schedule_of(problem.graph, order.order.tolist()))
        assert (timeline.peak_bytes, timeline.time_s) == (order.peak_bytes, pytest.approx(order.time_s))
        assert (order.order == BOUNDARY).sum() == 1


def time_within(task: MethodTask, found: list[Sketch], budget_bytes: int) -> float:
    everything = sketch_of(task.flat, "keep all", keep_all(task.flat))
    fitting = [s.time_s for s in pareto([everything, *found]) if s.peak_bytes <= budget_bytes]
    return fitting[-1] if fitting else float("inf")


def local_blocks(task: MethodTask, cuts: tuple[int, ...]) -> list[LocalBlock]:
    chain, last_read = make_chain(task.flat, cuts), last_reads(task.flat)
    outside = outside_of(task.flat, chain, last_read)
    return [
        localise(task.flat, block, incoming, last_read, task.keys)
        for block, incoming in zip(chain, outside.incoming, strict=True)
    ]


@CALM
@given(random_problems())
def test_orders_of_random_steps_are_legal_and_accounted_for(problem: Problem) -> None:
    check(problem, sketches(task_of(problem, SMALL)))


@pytest.mark.parametrize("shape", SHAPES)
def test_orders_of_captured_shapes_are_legal_and_accounted_for(shape: str) -> None:
    problem = SHAPES[shape]()
    check(problem, sketches(task_of(problem, SMALL)))


@pytest.mark.parametrize("shape", SHAPES)
def test_alone_it_is_no_worse_than_a_chain(shape: str) -> None:
    task = task_of(SHAPES[shape](), Config())
    ours, chain = sketches(task), list(blocks(task))
    base = task.flat.arrays.base_bytes
    for share in (0.8, 0.7, 0.6, 0.5, 0.4):
        budget_bytes = base + int(share * (task.most_bytes - base))
        assert time_within(task, ours, budget_bytes) <= time_within(task, chain, budget_bytes) * (1 + 1e-9)
    assert pareto(ours)[0].peak_bytes <= pareto(chain)[0].peak_bytes


def test_skips_made_again_lower_the_floor_of_a_deep_unet() -> None:
    task = task_of(unet_like(7), Config())
    flat, a = task.flat, task.flat.arrays
    tree = Hierarchy(task.figures)
    cuts = [(coarse_cuts(flat, n), False) for n in (96, 12, 3)]
    nested = [sketch_of(flat, "", order) for order in tree.orders(flat, task.keys, task.most_bytes, cuts)]
    ours, chain = pareto(sketches(task)), pareto(blocks(task))
    assert ours[0].peak_bytes < pareto(nested)[0].peak_bytes <= chain[0].peak_bytes
    assert ours[0].peak_bytes - a.base_bytes < 0.92 * (chain[0].peak_bytes - a.base_bytes)


def test_equal_children_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, options = list[LocalBlock](), Hierarchy.options

    def noted(self: Hierarchy, block: LocalBlock, *given: Any) -> Any:
        asked.append(block)
        return options(self, block, *given)

    monkeypatch.setattr(Hierarchy, "options", noted)
    counts = []
    for layers in (6, 12):
        task = task_of(llama_like(layers), SMALL)
        tree = Hierarchy(task.figures)
        asked.clear()
        cuts = layer_cuts(task.flat, coarse_cuts(task.flat, 1000))
        assert list(tree.orders(task.flat, task.keys, task.most_bytes, [(cuts, False)]))
        counts.append((len(asked), len(tree._known)))
    (_, solved), (asked_deep, solved_deep) = counts
    assert solved_deep == solved < asked_deep
    before = len(tree._known)
    assert list(tree.orders(task.flat, task.keys, task.most_bytes, [(cuts, False)]))
    assert len(tree._known) == before


@CALM
@given(random_problems())
def test_options_say_what_the_slow_measure_says(problem: Problem) -> None:
    task = task_of(problem, SMALL)
    for block in local_blocks(task, fine_cuts(task.flat, 4)):
        orders = cut_orders(block, 4)
        kept = best_options(block, orders, 10_000)
        truth = {measured(block, order).figures for order in orders}
        assert kept.options
        for option in kept.options:
            assert any(option.figures == pytest.approx(figures) for figures in truth)
        for figures in truth:  # nothing that was found is lost: an option is at least as good in every figure
            limits = [x * (1 + 1e-9) + 1e-12 for x in figures]
            assert any(all(x <= y for x, y in zip(o.figures, limits, strict=True)) for o in kept.options)


def test_few_options_are_the_cheapest_under_limits() -> None:
    task = task_of(unet_like(4), Config())
    block = max(local_blocks(task, coarse_cuts(task.flat, 3)), key=lambda b: b.flat.op_count)
    orders = cut_orders(block, 20)
    every, few = best_options(block, orders, 10_000).options, best_options(block, orders, 12).options
    assert len(few) <= 12 < len(every)
    assert {few_option.figures for few_option in few} <= {option.figures for option in every}
    for column in (0, 3):
        assert min(option.figures[column] for option in few) == min(option.figures[column] for option in every)


def test_a_block_goes_forward_once_in_turn() -> None:
    task = task_of(unet_like(2), SMALL)
    block = local_blocks(task, coarse_cuts(task.flat, 3))[0]
    stand_in = block.flat.arrays.boundary
    wild = np.array([0, *range(stand_in), 0, BOUNDARY, *range(stand_in, block.flat.op_count)])
    plain = plain_forward(block.flat.arrays, wild)
    assert plain.tolist() == [*range(stand_in), BOUNDARY, *range(stand_in, block.flat.op_count)]
