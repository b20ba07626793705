"""Lower bounds: never above what any order takes, whatever the moments and the multipliers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import csr_array

from benchmarks.solvers.__main__ import instances
from memplan.config import Config
from memplan.errors import IllegalSchedule
from memplan.problem.data import Costs, Graph, Op, Problem, Value
from memplan.problem.schedule import schedule_of
from memplan.problem.simulate import simulate
from memplan.solvers import solve_front
from memplan.solvers.bounds.dual import ascend
from memplan.solvers.bounds.lower_bound import backward_bytes, bound_of
from memplan.solvers.bounds.moments import MomentProgram, program_of, step_of
from memplan.solvers.front.methods import saved_of_moments
from memplan.solvers.orders.flat import Flat, flatten
from memplan.solvers.orders.replay import prune
from memplan.solvers.orders.rewrites import demand_order
from tests.support.configs import lower_bound, with_figures
from tests.support.parameters import examples, quickly
from tests.support.random_graphs import llama_like, random_problems, resnet_like, unet_like
from tests.support.solver_oracle import all_orders

pytestmark = pytest.mark.full_search  # with bounds as tight as users have
CALM = settings(
    max_examples=examples(40), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
SMALL = with_figures(Config(points=8), sizes=6, grid=10, descents=2, descent_steps=6, exchanges=10, neighbours=10)


def optimum(program: MomentProgram, budget_bytes: int) -> float:
    """The programme's least seconds, by HiGHS; infinite where nothing fits."""
    rows, count = np.arange(len(program.left)), len(program.left)
    weighed = np.nonzero(program.moment >= 0)[0]
    entries = np.concatenate([-np.ones(2 * count), np.ones(count), program.size_bytes[weighed]])
    row = np.concatenate([rows, rows, rows, count + program.moment[weighed]])
    column = np.concatenate([program.left, program.right, program.needs, weighed])
    matrix = csr_array((entries, (row, column)), shape=(count + len(program.fixed_bytes), len(program.cost)))
    limits = np.concatenate([-program.least, budget_bytes - program.fixed_bytes])
    answer = linprog(program.cost, A_ub=matrix, b_ub=limits, bounds=np.stack([0 * program.most, program.most], axis=1))
    return float("inf") if answer.status == 2 else float(answer.fun)


def some_moments(flat: Flat, draw: st.DataObject) -> tuple[int, ...]:
    backward = st.integers(flat.arrays.boundary, flat.op_count - 1)
    return tuple(sorted(draw.draw(st.sets(backward, min_size=1, max_size=4))))


def program(problem: Problem, moments: tuple[int, ...]) -> MomentProgram:
    flat = flatten(problem)
    fixed = backward_bytes(flat)
    return program_of(step_of(flat), moments, fixed[[1 + m - flat.arrays.boundary for m in moments]])


@settings(CALM, max_examples=examples(60))
@given(random_problems(most_ops=4, most_size=4), st.data())
def test_programme_and_multipliers_hold_for_every_short_order(problem: Problem, data: st.DataObject) -> None:
    flat = flatten(problem)
    moments = some_moments(flat, data)
    made = program(problem, moments)
    bound = bound_of(flat, problem.baseline_time_s, 3, 8)
    line, _ = ascend(made, data.draw(st.integers(bound.floor_bytes, bound.floor_bytes + 20)), 200, None)
    least: dict[int, float] = {}
    for order in all_orders(problem, 2):
        try:
            timeline = simulate(problem, schedule_of(problem.graph, order))
        except IllegalSchedule:
            continue
        least[timeline.peak_bytes] = min(timeline.time_s, least.get(timeline.peak_bytes, float("inf")))
    for peak_bytes, time_s in least.items():
        assert bound.floor_bytes <= peak_bytes
        assert bound.time_s(peak_bytes) <= time_s * (1 + 1e-9)
        assert problem.baseline_time_s + line.at(peak_bytes) <= time_s * (1 + 1e-9)
        assert problem.baseline_time_s + optimum(made, peak_bytes) <= time_s * (1 + 1e-7)


def holds_for_short_orders(problem: Problem, most_repeats: int = 2) -> dict[int, float]:
    """The least seconds of each peak of a legal order, after all of them were held against the bound."""
    bound = lower_bound(problem)
    least: dict[int, float] = {}
    for order in all_orders(problem, most_repeats):
        try:
            timeline = simulate(problem, schedule_of(problem.graph, order))
        except IllegalSchedule:
            continue
        assert bound.floor_bytes <= timeline.peak_bytes
        assert bound.time_s(timeline.peak_bytes) <= timeline.time_s * (1 + 1e-9)
        least[timeline.peak_bytes] = min(timeline.time_s, least.get(timeline.peak_bytes, float("inf")))
    return least


def test_a_value_that_was_overwritten_can_be_made_again_before_the_boundary() -> None:
    """wide -> thin -> thin in place; backward reads the thin one as it was. It is made again at once, and wide goes."""
    values = (
        Value("input", 1, "input"), Value("wide", 100), Value("thin", 1), Value("after", 1, reuses=2),
        Value("loss", 1, held=True), Value("big gradient", 60), Value("gradient", 1, "gradient", held=True),
    )  # fmt: skip
    ops = (
        Op("widen", "a", "forward", (0,), (1,)), Op("thin", "b", "forward", (1,), (2,)),
        Op("relu", "c", "forward", (2,), (3,)), Op("loss", "d", "forward", (3,), (4,)),
        Op("start", "e", "backward", (4,), (5,)), Op("end", "f", "backward", (2, 5), (6,)),
    )  # fmt: skip
    problem = Problem(Graph(values, ops, 4), Costs((10.0, 2.0, 1.0, 1.0, 1.0, 1.0), (0, 0, 0, 0, 0, 60)))
    least = holds_for_short_orders(problem)
    bound = lower_bound(problem)
    budget_bytes = bound.floor_bytes + 5
    cheapest = min(time_s for peak, time_s in least.items() if peak <= budget_bytes)
    assert cheapest == problem.baseline_time_s + 2.0
    first = flatten(problem).arrays.boundary
    for moments in ((first,), (first + 1,), (first, first + 1)):
        assert optimum(program(problem, moments), budget_bytes) == pytest.approx(2.0)


def test_no_held_output_still_makes_the_forward_pass_run_first() -> None:
    """Nobody holds what the forward pass makes, yet the first backward op needs all of it: the rest is recomputed."""
    count = 6
    values = [Value(f"v{i}", 10) for i in range(count)]
    ops = [Op(f"f{i}", "f", "forward", (i - 1,) if i else (), (i,)) for i in range(count)]
    for i in reversed(range(count)):
        values.append(Value(f"g{i}", 1))
        above = () if i == count - 1 else (len(values) - 2,)
        ops.append(Op(f"b{i}", "b", "backward", (i, *above), (len(values) - 1,)))
    problem = Problem(Graph(tuple(values), tuple(ops), count), Costs((1.0,) * (2 * count), (0,) * (2 * count)))
    least = holds_for_short_orders(problem)
    assert lower_bound(problem).time_s(41) > problem.baseline_time_s + 0.5
    assert min(least) < 60


def test_a_look_that_goes_on_and_on_where_nothing_fits_stays_finite() -> None:
    problem = resnet_like((1, 1))
    first = flatten(problem).arrays.boundary
    found, look = program(problem, (first, first + 2)), None
    for _ in range(100):
        line, look = ascend(found, 1, 100, look)
        assert np.isfinite([line.at_zero_s, line.s_per_byte]).all()
    assert line.at(1) > 1e3 * problem.baseline_time_s


def test_memory_of_an_input_that_is_overwritten_is_given_back() -> None:
    """The first op writes over the model's input, and what it wrote is freed: less is held than before the step."""
    values = (
        Value("input", 50, "input"), Value("scaled", 50, reuses=0), Value("small", 2), Value("loss", 1, held=True),
        Value("gradient", 20), Value("end", 1, "gradient", held=True),
    )  # fmt: skip
    ops = (
        Op("scale", "a", "forward", (0,), (1,)), Op("shrink", "b", "forward", (1,), (2,)),
        Op("loss", "c", "forward", (2,), (3,)), Op("start", "d", "backward", (2, 3), (4,)),
        Op("end", "e", "backward", (4,), (5,)),
    )  # fmt: skip
    problem = Problem(Graph(values, ops, 3), Costs((1.0,) * 5, (0,) * 5), update_bytes=3)
    assert holds_for_short_orders(problem)


@settings(CALM, max_examples=examples(40))
@given(random_problems(), st.data())
def test_every_line_stays_under_its_programme(problem: Problem, data: st.DataObject) -> None:
    flat = flatten(problem)
    moments = some_moments(flat, data)
    made = program(problem, moments)
    floor_bytes = bound_of(flat, problem.baseline_time_s, 1, 2).floor_bytes
    line, _ = ascend(made, floor_bytes + data.draw(st.integers(0, 30)), data.draw(st.integers(25, 400)), None)
    assert line.s_per_byte >= 0.0
    for budget_bytes in range(floor_bytes, floor_bytes + 40, 3):
        assert line.at(budget_bytes) <= optimum(made, budget_bytes) + 1e-7


@CALM
@given(random_problems())
def test_saved_sets_of_moments_make_legal_schedules(problem: Problem) -> None:
    flat = flatten(problem)
    for saved in saved_of_moments(flat, lower_bound(problem, 4, 8)):
        order = demand_order(flat.arrays, saved, flat.op_count, 4 * flat.op_count)
        if len(order):
            timeline = simulate(problem, schedule_of(problem.graph, prune(flat.arrays, order).tolist()))
            assert timeline.time_s >= problem.baseline_time_s * (1 - 1e-9)


@CALM
@given(random_problems())
def test_more_budget_never_lifts_the_bound(problem: Problem) -> None:
    bound = lower_bound(problem, 4, 8)
    times = [bound.time_s(b) for b in range(bound.floor_bytes - 2, bound.floor_bytes + 60)]
    assert all(left >= right for left, right in itertools.pairwise(times))
    assert times[0] == float("inf") and times[-1] >= problem.baseline_time_s
    assert bound.time_s(None) == problem.baseline_time_s


QUICK = ("convolutions", "densenet", "gpt2_one_layer", "perceptron", "t5", "unet")


@pytest.mark.parametrize("name", quickly(sorted(instances()), *QUICK))
def test_bound_is_under_every_plan(name: str) -> None:
    """The plans of a real step; the bound alone is taken at full strength."""
    problem = instances()[name]
    bound = lower_bound(problem)
    front = solve_front(problem, with_figures(replace(SMALL, methods=("cuts", "blocks")), grid=8))
    assert len(front.points) > 2
    for point in front.points:
        assert bound.floor_bytes <= point.peak_bytes
        assert bound.time_s(point.peak_bytes) <= point.time_s * (1 + 1e-9)


@pytest.mark.parametrize(
    "build",
    [lambda: llama_like(2), resnet_like, pytest.param(unet_like, marks=pytest.mark.slow)],
    ids=["llama", "resnet", "unet"],
)
def test_multipliers_come_near_the_optimum(build) -> None:  # type: ignore[no-untyped-def]
    problem = build()
    flat = flatten(problem)
    fixed = backward_bytes(flat)[1:]
    first = int(np.argmax(fixed))
    moments = tuple(sorted({flat.arrays.boundary + 1, flat.arrays.boundary + first, flat.op_count - 2}))
    made = program(problem, moments)
    bound = bound_of(flat, problem.baseline_time_s, 2, 8)
    whole = solve_front(problem, SMALL).keep_all.peak_bytes
    budget_bytes = bound.floor_bytes + (whole - bound.floor_bytes) // 3
    exact_s = optimum(made, budget_bytes)
    found_s = ascend(made, budget_bytes, 4000, None)[0].at(budget_bytes)
    assert exact_s > 0.0
    assert exact_s - 0.01 * exact_s <= found_s <= exact_s * (1 + 1e-7)
