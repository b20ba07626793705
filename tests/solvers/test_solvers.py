"""Every answer of the solvers against the accountant, and the accountants against one another."""

from __future__ import annotations

import hashlib
import itertools
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan import jit
from memplan.errors import IllegalSchedule
from memplan.jit import _tell_of_no_cache, digest_of_imports, kernel
from memplan.problem.data import Problem
from memplan.problem.schedule import BOUNDARY, Compute, SurfaceGrads, schedule_of
from memplan.problem.simulate import simulate
from memplan.solvers import solve_front
from memplan.solvers.chain.expand import baselines, expand
from memplan.solvers.chain.options import cut_orders
from memplan.solvers.chain.partition import coarse_cuts, fine_cuts, make_chain
from memplan.solvers.chain.rotor import ChainTable, distinct_slots, solve_chain
from memplan.solvers.orders.flat import Flat, Ints, flatten
from memplan.solvers.orders.replay import fill, keep_all, prune, replay
from memplan.solvers.orders.rewrites import bring_down, demand_order, events_of, split
from memplan.solvers.search.refine import exchange, search_neighbours
from tests.support.configs import lower_bound, solved_chain, with_figures
from tests.support.parameters import examples
from tests.support.random_graphs import (
    StepBuilder,
    encoder_decoder_like,
    llama_like,
    random_problems,
    resnet_like,
    unet_like,
)
from tests.support.solver_oracle import all_orders, chain_optimum, recount

pytestmark = pytest.mark.full_search  # with bounds as tight as users have
SMALL = with_figures(coarse_blocks=8, fine_blocks=12, coarse_slots=60, fine_slots=60, cuts=6, block_cuts=4, options=8,
               sizes=6, grid=8, rounds=30, width=4)  # fmt: skip
CALM = settings(max_examples=examples(60), deadline=None, derandomize=True,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])  # fmt: skip


def fast(flat: Flat, order: Ints) -> tuple[int, float]:
    peak, _position, time_s = replay(flat.arrays, order, np.zeros(len(order), dtype=np.int64))
    return int(peak), float(time_s)


def accounted(problem: Problem, order: Ints) -> tuple[int, float]:
    timeline = simulate(problem, schedule_of(problem.graph, order.tolist()))
    return timeline.peak_bytes, timeline.time_s


def test_gradients_are_handed_over_when_nothing_reads_their_parameters() -> None:
    """Each parameter is read once more after its gradient is made, and one of the last layer's long after."""
    step = replace(llama_like(3, tokens=64, width=64), accumulate=True)
    graph, boundary = step.graph, step.graph.boundary
    order = [*range(boundary), BOUNDARY, *range(boundary, len(graph.ops))]
    reader = max(i for i, op in enumerate(graph.ops) if op.kind == "mm" and op.phase == "forward")
    for runs in (order, [*order[: boundary + 60], reader, *order[boundary + 60 :]]):
        assert accounted(step, np.array(runs)) == fast(flatten(step), np.array(runs))
        schedule = schedule_of(graph, runs)
        handed_over = [(i, v) for i, s in enumerate(schedule) if isinstance(s, SurfaceGrads) for v in s.values]
        assert [v for _, v in handed_over] == sorted(graph.gradients)
        for position, gradient in handed_over:
            later = [graph.ops[s.op] for s in schedule[position:] if isinstance(s, Compute)]
            assert not any({*op.inputs} & {*graph.values[gradient].parameters} for op in later)


def improved(flat: Flat, order: Ints, limit_bytes: int, tries: int) -> tuple[Ints, int]:
    found, tried = search_neighbours(flat.arrays, order, limit_bytes, 0.0, tries, tries, np.array([1], dtype=np.uint64))
    return found, int(tried)


def some_orders(flat: Flat) -> list[Ints]:
    a = flat.arrays
    pinned = a.held.copy()
    for v, op in enumerate(a.producer):
        pinned[v] |= bool(0 <= op < a.boundary and not a.rerunnable[op] and not a.overwritten[v])
    once = keep_all(flat)
    found = [order for _name, order in baselines(flat, 4)]
    found += [order for window in (0, 2, 99) if len(order := demand_order(a, pinned, window, 400))]
    found += [bring_down(a, order, 0, 6, 3) for order in list(found)]
    found += [fill(a, order, fast(flat, once)[0], 4) for order in list(found)]
    return found + [prune(a, order) for order in found]


@CALM
@given(random_problems())
def test_fast_accountant_equals_simulate_and_oracle(problem: Problem) -> None:
    flat = flatten(problem)
    for order in some_orders(flat):
        truth = accounted(problem, order)
        assert fast(flat, order) == pytest.approx(truth)
        assert fast(flat, order)[0] == truth[0] == recount(problem, order.tolist())[0]


@CALM
@given(random_problems(), st.data())
def test_fast_accountant_refuses_what_simulate_refuses(problem: Problem, data: st.DataObject) -> None:
    flat = flatten(problem)
    order = keep_all(flat)
    for _ in range(3):
        op = data.draw(st.integers(0, problem.graph.boundary - 1))
        at = data.draw(st.integers(problem.graph.boundary, len(order) - 1))
        order = np.insert(order, at, op)
    if not all(
        flat.arrays.rerunnable[op] for op, n in zip(*np.unique(order, return_counts=True), strict=True) if n > 1
    ):
        return
    try:
        expected = accounted(problem, order)
    except IllegalSchedule:
        expected = (-1, 0.0)
    assert fast(flat, order) == pytest.approx(expected)


@CALM
@given(random_problems())
def test_front_is_legal_and_monotone_and_above_the_bound(problem: Problem) -> None:
    front = solve_front(problem, config=SMALL)
    for point in (*front.points, front.keep_all):
        timeline = simulate(problem, point.schedule)
        assert (timeline.peak_bytes, timeline.time_s) == (point.peak_bytes, point.time_s)
        assert recount(problem, point.order)[0] == point.peak_bytes
        assert front.bound.time_s(point.peak_bytes) <= point.time_s * (1 + 1e-9)
        assert front.bound.floor_bytes <= point.peak_bytes
    for left, right in itertools.pairwise(front.points):
        assert left.peak_bytes < right.peak_bytes and left.time_s > right.time_s
    assert front.best(None) is front.points[-1]
    assert front.best(front.floor.peak_bytes) is front.floor
    assert front.best(front.floor.peak_bytes - 1) is None
    assert front.points[-1].time_s <= front.keep_all.time_s
    assert front.points[-1].peak_bytes <= front.keep_all.peak_bytes


@settings(CALM, max_examples=examples(25))
@given(random_problems(most_ops=4, most_size=4))
def test_bound_holds_for_every_short_order(problem: Problem) -> None:
    bound = lower_bound(problem)
    front = solve_front(problem, config=SMALL)
    for order in all_orders(problem, 2):
        try:
            timeline = simulate(problem, schedule_of(problem.graph, order))
        except IllegalSchedule:
            continue
        assert bound.floor_bytes <= timeline.peak_bytes
        assert bound.time_s(timeline.peak_bytes) <= timeline.time_s * (1 + 1e-9)
    assert bound.time_s(front.floor.peak_bytes - 1) >= problem.baseline_time_s or front.floor.time_s > 0


@settings(CALM, max_examples=examples(10))
@given(random_problems())
def test_front_is_deterministic(problem: Problem) -> None:
    first, second = solve_front(problem, config=SMALL), solve_front(problem, config=SMALL)
    assert [p.order for p in first.points] == [p.order for p in second.points]


@CALM
@given(random_problems())
def test_chain_plans_are_legal(problem: Problem) -> None:
    flat = flatten(problem)
    keys = tuple(op.key for op in problem.graph.ops)
    most = fast(flat, keep_all(flat))[0]
    for cuts in (coarse_cuts(flat, 6), fine_cuts(flat, 12)):
        chain = make_chain(flat, cuts)
        assert [op for b in chain for op in b.forward] == list(range(problem.graph.boundary))
        backward = [op for b in reversed(chain) for op in b.backward]
        assert backward == list(range(problem.graph.boundary, len(problem.graph.ops)))
        solved = solved_chain(flat, keys, chain, 2 * most, 2 * most, lambda b: cut_orders(b, 4), 8)  # one slot a byte
        for m in distinct_slots(solved.front, 6):
            peak, time_s = accounted(problem, expand(flat, solved, m))
            replays = any(op.random for op in problem.graph.ops)  # kept generator states are not part of a table
            reruns_held = any(v.held and v.role == "activation" for v in problem.graph.values[:-1])
            if not replays and not reruns_held and not problem.frees_gradients:
                assert peak <= m + flat.arrays.base_bytes
            assert time_s <= problem.baseline_time_s + float(solved.front.seconds[m]) + 1e-3


def tables(count: int) -> st.SearchStrategy[ChainTable]:
    def build(seed: int) -> ChainTable:
        rng = np.random.default_rng(seed)
        most = 3
        own = np.triu(rng.integers(0, 3, (count, count)))
        return ChainTable(
            option_count=rng.integers(1, most + 1, count),
            saved=rng.integers(0, 4, (count, most)),
            forward_peak=rng.integers(1, 5, (count, most)),
            backward_peak=rng.integers(1, 7, (count, most)),
            cost_first=rng.integers(0, 5, (count, most)).astype(np.float64),
            cost_again=rng.integers(0, 9, (count, most)).astype(np.float64),
            width=np.ascontiguousarray(np.cumsum(own[::-1], axis=0)[::-1]),
            leaf_peak=rng.integers(0, 4, count),
            leaf_again=rng.integers(0, 5, count).astype(np.float64),
            outside_first=np.sort(rng.integers(0, 2, count)),
            outside_again=rng.integers(0, 3, count),
        )

    return st.integers(0, 2**32 - 1).map(build)


@CALM
@given(st.integers(1, 5).flatmap(tables))
def test_recurrence_equals_trying_every_move(table: ChainTable) -> None:
    front = solve_chain(table, 24)
    for m in (0, 3, 6, 9, 12, 18, 24):
        assert float(front.seconds[m]) == chain_optimum(table, m)


@CALM
@given(st.integers(1, 3).flatmap(tables), st.integers(2, 4), st.integers(0, 1))
def test_equal_blocks_share_what_is_true_of_both(table: ChainTable, times: int, first: int) -> None:
    count = len(table.option_count)
    chosen = [*([0] if first else []), *(list(range(count)) * times)]
    own = table.width[:, -1] - np.append(table.width[1:, -1], 0)
    rows = {name: getattr(table, name)[chosen] for name in table._fields if name != "width"}
    width = np.array([[own[chosen[i : c + 1]].sum() for c in range(len(chosen))] for i in range(len(chosen))])
    repeated = ChainTable(width=width, **rows)
    front = solve_chain(repeated, 20)
    if count == 1 and times > 2 and not first:
        assert len(front.opt) < len(chosen) * (len(chosen) + 1) // 2
    for m in (0, 4, 8, 14, 20):
        assert float(front.seconds[m]) == chain_optimum(repeated, m)


@pytest.mark.parametrize("seed", [211, 1895, 3365, 3969, 5057, 5783, 6379, 7187, *range(20)])
def test_equal_blocks_share_nothing_where_something_else_stands_outside_between_them(seed: int) -> None:
    """Blocks i to j equal those a period further on, but segments within i to j do not."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(5, 8))
    own = np.triu(rng.integers(0, 2, (count, count)))
    lows, highs = (0, 1, 1, 0, 0, 0, 0), (4, 5, 7, 5, 9, 4, 5)
    drawn = [rng.integers(low, high, 2 if at < 5 else None) for at, (low, high) in enumerate(zip(lows, highs))]
    rows = [np.repeat(np.asarray(one)[None], count, 0) for one in drawn]
    outside = rng.integers(0, 3, count)
    table = ChainTable(
        option_count=np.full(count, 2), saved=rows[0], forward_peak=rows[1], backward_peak=rows[2],
        cost_first=rows[3].astype(float), cost_again=rows[4].astype(float),
        width=np.ascontiguousarray(np.cumsum(own[::-1], axis=0)[::-1]), leaf_peak=rows[5],
        leaf_again=rows[6].astype(float), outside_first=np.zeros(count, np.int64),
        outside_again=outside if seed % 2 else np.sort(outside),
    )  # fmt: skip
    front = solve_chain(table, 24)
    for m in range(0, 25, 2):
        assert float(front.seconds[m]) == chain_optimum(table, m)


@CALM
@given(random_problems())
def test_fill_keeps_the_limit_and_saves_time(problem: Problem) -> None:
    flat = flatten(problem)
    for order in some_orders(flat)[:6]:
        peak, time_s = fast(flat, order)
        for limit in (peak, peak + 16, 2 * peak):
            filled = fast(flat, fill(flat.arrays, order, limit, 4))
            assert 0 < filled[0] <= limit and filled[1] <= time_s + 1e-9
            traded = fast(flat, exchange(flat.arrays, order, limit, 3, 4))
            assert 0 < traded[0] <= limit and traded[1] <= time_s + 1e-9
            found, tried = improved(flat, order, limit, 8)
            peak_bytes, found_s = accounted(problem, found)
            assert tried <= 8 and 0 < peak_bytes <= limit and found_s <= time_s + 1e-9


@pytest.mark.parametrize("build", [resnet_like, unet_like, encoder_decoder_like])
def test_leaving_out_several_runs_finds_more_than_filling(build: Callable[[], Problem]) -> None:
    problem = build()
    flat = flatten(problem)
    low = bring_down(flat.arrays, keep_all(flat), 0, 200, 6)
    peak, _time_s = fast(flat, low)
    start = fill(flat.arrays, low, peak, 8)
    found, tried = improved(flat, start, peak, 200)
    peak_bytes, time_s = accounted(problem, found)
    assert 0 < tried <= 200 and peak_bytes <= peak
    assert time_s < fast(flat, start)[1] * (1 - 1e-6)
    assert improved(flat, start, peak, 200)[0].tolist() == found.tolist()
    assert improved(flat, start, peak - 1, 200)[1] == 0


def test_fill_leaves_out_only_one_of_two_runs_that_lean_on_each_other() -> None:
    b = StepBuilder()
    x = b.forward("first", (b.value(8, "input"),), (8,), saved=())[0]
    small, large = b.forward("pair", (x,), (8, 32))
    y = b.forward("far", (small,), (8,), saved=(small, large))[0]
    z = b.forward("near", (y,), (8,), saved=(small,), parameter=b.value(8, "parameter"))[0]
    problem = b.finish(z)
    flat = flatten(problem)
    first_backward = problem.graph.boundary + 1
    order = keep_all(flat)
    reads = [p for p in range(first_backward, len(order)) if small in flat.reads[order[p]]]
    for p in reversed(reads):
        order = np.insert(order, p, 1)
    peak = fast(flat, order)[0]
    for limit in range(peak, 2 * peak, 8):
        assert fast(flat, fill(flat.arrays, order, limit, 4))[0] <= limit


def test_split_recomputes_just_before_the_next_use() -> None:
    problem = llama_like(1)
    flat = flatten(problem)
    order = keep_all(flat)
    value = next(v for op in flat.reads[problem.graph.boundary + 20 :] for v in op
                 if flat.arrays.producer[v] < problem.graph.boundary)  # fmt: skip
    at = next(p for p in range(problem.graph.boundary + 1, len(order)) if value in flat.reads[order[p]])
    longer, _idle = split(flat.arrays, order, events_of(flat.arrays, order), value, at)
    assert len(longer) > len(order) and longer[-1] == order[-1]
    assert fast(flat, longer)[1] > problem.baseline_time_s


def test_layers_alike_reach_the_floor_and_stay_near_the_bound() -> None:
    problem = llama_like(3, dropout=True)
    front = solve_front(problem, config=SMALL)
    assert front.floor.peak_bytes < 1.02 * front.bound.floor_bytes
    middle = (front.floor.peak_bytes + front.keep_all.peak_bytes) // 2
    best = front.best(middle)
    assert best is not None
    assert best.time_s < 1.05 * front.bound.time_s(middle)


@pytest.mark.parametrize("build", [resnet_like, unet_like, encoder_decoder_like])
def test_wide_cuts_beat_the_textbook(build: Callable[[], Problem]) -> None:
    problem = build()
    front = solve_front(problem, config=with_figures(SMALL, grid=16, coarse_slots=300, coarse_blocks=32))
    flat = flatten(problem)
    for _name, order in baselines(flat, 32):
        peak, time_s = accounted(problem, order)
        best = front.best(peak)
        assert best is not None and best.time_s <= time_s
    assert front.floor.peak_bytes < 0.4 * front.keep_all.peak_bytes
    middle = (front.floor.peak_bytes + front.keep_all.peak_bytes) // 2
    best = front.best(middle)
    assert best is not None and best.time_s < 1.05 * front.bound.time_s(middle)


def test_one_op_and_nothing_saved() -> None:
    b = StepBuilder()
    problem = b.finish(b.forward("loss", (b.value(8, "input"),), (8,))[0])
    front = solve_front(problem)
    assert [p.order for p in front.points] == [front.keep_all.order]
    assert front.bound.time_s(front.floor.peak_bytes) == problem.baseline_time_s


def test_what_only_the_backward_pass_reads_may_wait_for_it() -> None:
    b = StepBuilder()
    x = b.forward("embed", (b.value(8, "input"),), (64,), parameter=b.value(8, "parameter"))[0]
    mask = b.forward("mask", (x,), (4096,), time_s=5.0, differentiable=False)[0]
    y = b.forward("use", (x,), (64,), saved=(x, mask))[0]
    wide = b.forward("wide", (y,), (8192,), saved=(y,))[0]
    problem = b.finish(b.forward("loss", (wide,), (8,), saved=(wide,))[0])
    front = solve_front(problem, config=SMALL)
    best = front.best(front.keep_all.peak_bytes - 4096)
    assert best is not None and best.time_s == pytest.approx(problem.baseline_time_s)
    assert front.bound.time_s(best.peak_bytes) <= best.time_s * (1 + 1e-9)


def test_compiled_kernels_are_those_of_what_they_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top, text = tmp_path / "top.py", "from memplan.solvers.%s import (\n    a,\n)\n"
    folder = tmp_path / "solvers" / "below"
    folder.mkdir(parents=True)
    monkeypatch.setattr(jit, "_ROOT", tmp_path)

    def digest(bottom: str, own: str = "") -> str:
        top.write_text(text % "below.middle" + own)
        (folder / "middle.py").write_text(text % "below.bottom")
        (folder / "bottom.py").write_text(bottom)
        digest_of_imports.cache_clear()
        return digest_of_imports(top)

    assert digest("a = 1") == digest("a = 1", own="b = 2") != digest("a = 2")
    monkeypatch.undo()
    digest_of_imports.cache_clear()
    exchange = Path(jit.__file__).parent / "solvers" / "search" / "refine.py"
    assert digest_of_imports(exchange) != hashlib.sha256().hexdigest()[:8]
    assert fill.__qualname__ == f"fill_{digest_of_imports(Path(fill.__code__.co_filename))}"


def test_kernels_run_where_no_compiled_one_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a read-only installation without a home."""
    monkeypatch.setattr("numba.core.caching.CompileResultCacheImpl._locator_classes", [])
    _tell_of_no_cache.cache_clear()

    (tmp_path / "add.py").write_text("def add(a, b):\n    return a + b\n")
    functions = [runpy.run_path(str(tmp_path / "add.py"))["add"] for _ in range(2)]
    assert [kernel(add)(2, 3) for add in functions] == [5, 5]
    assert ["NUMBA_CACHE_DIR" in record.message for record in caplog.records if record.name == "memplan"] == [True]
