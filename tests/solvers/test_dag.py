"""Plain DAGs: every plan against the accountant, brute force, and a mixed-integer program."""

from __future__ import annotations

import heapq
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from benchmarks.solve_dag import INSTANCES, chain, instances, layered, sqrt_segments, unet
from memplan.errors import BudgetInfeasible, IllegalSchedule
from memplan.problem.schedule import Compute, Drop
from memplan.solvers import solve_dag
from memplan.solvers.dag.dag_bound import floor_bytes, lower_bound_s, relations_of
from memplan.solvers.dag.dag_exact import best_order
from memplan.solvers.dag.dag_order import DagArrays, dag_arrays, measure_order, needed_runs
from memplan.solvers.dag.dag_problem import DagNode, DagPlan, DagProblem, account, dag_as_problem
from memplan.solvers.dag.solve_dag import DagLimits
from memplan.solvers.orders.flat import Flat, flatten
from tests.support.parameters import examples

SMALL = DagLimits(trials=3000, moments=3, cuts=6)
SEARCH = replace(SMALL, exact_nodes=0)  # the search alone
CALM = settings(max_examples=examples(60), deadline=None, derandomize=True,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])  # fmt: skip


def dags(most_nodes: int = 9) -> st.SearchStrategy[DagProblem]:
    """Small DAGs: lines with reads from far back, as a training step has, and branches; few sinks and held outputs."""
    return st.integers(0, 2**32 - 1).map(lambda seed: small_dag(seed, most_nodes))


def small_dag(seed: int, most_nodes: int) -> DagProblem:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, most_nodes + 1)) if rng.random() < 0.2 else most_nodes
    mirrored = rng.random() < 0.7
    in_line = 0.9 if rng.random() < 0.6 else 0.4
    nodes: list[DagNode] = []
    for index in range(count):
        inputs = {index - 1} if index and rng.random() < in_line else set()
        if mirrored and 2 * index >= count:
            inputs.add(count - 1 - index)
        elif index and rng.random() < 0.3:
            inputs.add(int(rng.integers(0, index)))
        size_bytes = int(rng.integers(0, 7)) if rng.random() < 0.7 else 4
        time_s, held = int(rng.integers(0, 6)), bool(rng.random() < 0.05)
        nodes.append(DagNode(f"n{index}", time_s, size_bytes, tuple(sorted(inputs - {index})), held))
    return DagProblem(tuple(nodes))


def plain_peak(problem: DagProblem) -> int:
    return account(problem, range(len(problem.nodes))).peak_bytes


def budgets(problem: DagProblem) -> list[int]:
    """From one below the floor, where nothing fits, to where everything does."""
    flat = flat_of(problem)
    low, high = floor_bytes(flat, relations_of(flat)), plain_peak(problem)
    return sorted({b for b in (low - 1, low, low + 1, (low + high) // 2, high - 1, high) if b > 0})


def solved(problem: DagProblem, budget: int, limits: DagLimits = SMALL) -> DagPlan | None:
    try:
        return solve_dag(problem, budget, limits)
    except BudgetInfeasible:
        return None


def check(problem: DagProblem, plan: DagPlan) -> None:
    """Replay the steps without any of memplan's code, and hold the plan to what comes out."""
    live: set[int] = set()
    ran: list[int] = []
    peak = 0
    for step in plan.steps:
        if isinstance(step, Compute):
            assert set(problem.nodes[step.op].inputs) <= live
            assert not (problem.nodes[step.op].held and step.op in live)
            live.add(step.op)
            ran.append(step.op)
            peak = max(peak, sum(problem.nodes[v].size_bytes for v in live))
        else:
            assert isinstance(step, Drop)
            assert not problem.nodes[step.value].held
            live.remove(step.value)
    assert live == {v for v, node in enumerate(problem.nodes) if node.held}
    assert set(ran) == set(range(len(problem.nodes)))
    assert tuple(ran) == plan.order
    assert peak == plan.peak_bytes <= plan.budget_bytes
    assert plan.time_s == pytest.approx(sum(problem.nodes[v].time_s for v in ran))
    timeline = account(problem, plan.order)
    assert (timeline.peak_bytes, timeline.time_s) == (plan.peak_bytes, plan.time_s)
    assert problem.baseline_s <= plan.lower_bound_s * (1 + 1e-9)
    assert plan.lower_bound_s <= plan.time_s
    assert plan.gap >= 0


def optimum(problem: DagProblem, budget: int) -> float:
    """Least seconds over every sequence of runs and single drops: Dijkstra over (what has run, what is live)."""
    nodes = problem.nodes
    everything = frozenset(range(len(nodes)))
    start = (frozenset[int](), frozenset[int]())
    best = {start: 0.0}
    waiting: list[tuple[float, int, tuple[frozenset[int], frozenset[int]]]] = [(0.0, 0, start)]
    tickets = itertools.count(1)
    while waiting:
        time_s, _ticket, (done, live) = heapq.heappop(waiting)
        if time_s > best[done, live]:
            continue
        if done == everything:
            return time_s
        used = sum(nodes[v].size_bytes for v in live)
        moves = [(time_s, (done, live - {v})) for v in live if not nodes[v].held]
        for v, node in enumerate(nodes):
            if v not in live and set(node.inputs) <= live and used + node.size_bytes <= budget:
                moves.append((time_s + node.time_s, (done | {v}, live | {v})))
        for reached_s, state in moves:
            if reached_s < best.get(state, math.inf):
                best[state] = reached_s
                heapq.heappush(waiting, (reached_s, next(tickets), state))
    return math.inf


def checkmate(problem: DagProblem, budget: int) -> float:
    """Least seconds with first runs in the given order and each node once a stage at most: Checkmate's program.

    Jain et al., arXiv 1910.02653: run[t, i] in stage t, whose new node is t; kept[t, i] from stage t - 1 into t; a drop
    right after run k of stage t is linearised by its products, here one binary alive[t, k, i] for each.
    """
    n = len(problem.nodes)
    sizes = [node.size_bytes for node in problem.nodes]
    index: dict[tuple[object, ...], int] = {}
    for t in range(n):
        for i in range(t + 1):
            index["run", t, i] = len(index)
            index["kept", t, i] = len(index)
            for k in range(t + 1):
                index["alive", t, k, i] = len(index)  # i is live while slot k of stage t runs
    rows: list[tuple[dict[int, float], float, float]] = []

    def row(low: float, high: float, *terms: tuple[float, tuple[object, ...]]) -> None:
        found: dict[int, float] = {}
        for factor, key in terms:
            if key in index:
                found[index[key]] = found.get(index[key], 0.0) + factor
        rows.append((found, low, high))

    for t in range(n):
        row(1, 1, (1, ("run", t, t)))
        row(0, 0, (1, ("kept", t, t)))
        for i in range(t):
            if t:
                row(-np.inf, 0, (1, ("kept", t, i)), (-1, ("alive", t - 1, t - 1, i)))
            if problem.nodes[i].held:
                row(1, 1, (1, ("kept", t, i)))
        for i in range(t + 1):
            for k in range(t + 1):
                before = ("kept", t, i) if k == 0 else ("alive", t, k - 1, i)
                made = [(-1.0, ("run", t, i))] if k == i else []
                row(-np.inf, 0, (1, ("alive", t, k, i)), (-1, before), *made)
                if k == i:
                    row(0, np.inf, (1, ("alive", t, k, i)), (-1, ("run", t, i)))
                if problem.nodes[i].held and k >= i:
                    row(1, 1, (1, ("alive", t, k, i)))
                if i in problem.nodes[k].inputs:
                    row(0, np.inf, (1, ("alive", t, k, i)), (-1, ("run", t, k)))
        for k in range(t + 1):
            row(-np.inf, budget, *((float(sizes[i]), ("alive", t, k, i)) for i in range(t + 1)))
    matrix = np.zeros((len(rows), len(index)))
    for r, (found, _low, _high) in enumerate(rows):
        for column, factor in found.items():
            matrix[r, column] = factor
    cost = np.zeros(len(index))
    for t in range(n):
        for i in range(t + 1):
            cost[index["run", t, i]] = problem.nodes[i].time_s
    limits = LinearConstraint(matrix, [low for _, low, _ in rows], [high for _, _, high in rows])
    answer = milp(cost, constraints=limits, integrality=np.ones(len(index)), bounds=Bounds(0, 1))
    assert answer.status in (0, 2), answer.message
    return float(answer.fun) if answer.status == 0 else math.inf


def flat_of(problem: DagProblem) -> Flat:
    return flatten(dag_as_problem(problem))


def arrays_of(problem: DagProblem) -> DagArrays:
    return dag_arrays(flat_of(problem))


@CALM
@given(dags(most_nodes=6))
def test_small_plans_are_legal_and_equal_brute_force(problem: DagProblem) -> None:
    for budget in budgets(problem):
        plan = solved(problem, budget)
        least_s = optimum(problem, budget)
        assert (plan is None) == math.isinf(least_s)
        if plan is not None:
            check(problem, plan)
            assert plan.certified
            assert plan.time_s == pytest.approx(least_s)


@CALM
@given(dags(most_nodes=6))
def test_search_alone_is_never_beaten_where_certified(problem: DagProblem) -> None:
    for budget in budgets(problem):
        plan = solved(problem, budget, SEARCH)
        if plan is not None:
            check(problem, plan)
            least_s = optimum(problem, budget)
            assert plan.lower_bound_s <= least_s * (1 + 1e-9) <= plan.time_s * (1 + 2e-9)
            assert not plan.certified or plan.time_s == pytest.approx(least_s)


@settings(CALM, max_examples=examples(150))
@given(dags(most_nodes=7), st.integers(1, 4), st.integers(2, 12))
def test_bounds_hold_for_every_sequence(problem: DagProblem, moments: int, cuts: int) -> None:
    flat = flat_of(problem)
    relations = relations_of(flat)
    for budget in budgets(problem):
        least_s = optimum(problem, budget)
        if math.isfinite(least_s):
            assert floor_bytes(flat, relations) <= budget
            assert lower_bound_s(flat, relations, budget, moments, cuts) <= least_s * (1 + 1e-9) + 1e-12
        for expansions in (0, 2, 8):
            exact = best_order(flat, relations, budget, expansions)
            assert exact.bound_s <= least_s * (1 + 1e-9)


@settings(CALM, max_examples=examples(25))
@given(dags(most_nodes=6))
def test_no_plan_is_slower_than_checkmate(problem: DagProblem) -> None:
    for budget in budgets(problem)[1::2]:
        least_s = checkmate(problem, budget)
        plan = solved(problem, budget)
        if plan is None:
            assert math.isinf(least_s)
        else:
            assert plan.time_s <= least_s * (1 + 1e-6) + 1e-6


def test_search_alone_nearly_always_finds_the_optimum() -> None:
    harder = reached = feasible = known = 0
    for seed in range(60):
        problem = small_dag(seed, 8)
        for budget in budgets(problem):
            least_s = optimum(problem, budget)
            plan = solved(problem, budget, SEARCH)
            if math.isinf(least_s):
                assert plan is None
                continue
            feasible += 1
            known += plan is not None
            if least_s > problem.baseline_s:
                harder += 1
                reached += plan is not None and plan.time_s <= least_s * (1 + 1e-9)
    assert harder >= 50
    assert known >= 0.97 * feasible
    assert reached >= 0.9 * harder


@CALM
@given(dags(most_nodes=9), st.integers(0, 2**32 - 1))
def test_fast_accountant_equals_simulate(problem: DagProblem, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = arrays_of(problem)
    order = list(range(len(problem.nodes)))
    for _ in range(6):
        order.insert(int(rng.integers(0, len(order) + 1)), int(rng.integers(0, len(problem.nodes))))
    given_order = np.array(order, dtype=np.int64)
    for tried in (given_order, needed_runs(arrays, given_order)):
        end, during = np.empty(len(tried), dtype=np.int64), np.empty(len(tried), dtype=np.int64)
        peak, time_s = measure_order(arrays, tried, end, during)
        again = [v for v in tried.tolist() if problem.nodes[v].held]
        if len(set(again)) < len(again):
            assert peak == -1  # not made by the search, though the accountant takes it
            continue
        try:
            timeline = account(problem, tried.tolist())
        except IllegalSchedule:
            assert peak == -1
        else:
            assert (peak, time_s) == (timeline.peak_bytes, pytest.approx(timeline.time_s))


@CALM
@given(dags(most_nodes=9))
def test_more_budget_never_costs_time_where_solved_exactly(problem: DagProblem) -> None:
    found = [plan for budget in budgets(problem) if (plan := solved(problem, budget)) is not None]
    for tight, loose in itertools.pairwise(found):
        assert loose.time_s <= tight.time_s * (1 + 1e-9)
        assert loose.lower_bound_s <= tight.lower_bound_s * (1 + 1e-9)


@pytest.mark.parametrize("problem", [layered(60, 5), chain(24, 6), unet(3, 1, 1 << 12)], ids=lambda p: p.name)
def test_more_budget_never_costs_time_from_the_plan_before(problem: DagProblem) -> None:
    plan = None
    for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        budget = int(share * plain_peak(problem))
        try:
            found = solve_dag(problem, budget, SEARCH, start=plan)
        except BudgetInfeasible:
            assert plan is None
            continue
        check(problem, found)
        assert plan is None or found.time_s <= plan.time_s
        plan = found
    assert plan is not None and plan.overhead == 0.0 and plan.certified


@settings(CALM, max_examples=examples(15))
@given(dags(most_nodes=9))
def test_plans_are_deterministic_and_keep_their_limits(problem: DagProblem) -> None:
    limits = replace(SEARCH, trials=500, intervals=2)
    for budget in budgets(problem):
        plan = solved(problem, budget, limits)
        assert plan == solved(problem, budget, limits)
        if plan is not None:
            assert plan.trials <= 500 + 8 * len(problem.nodes)
            assert max(plan.order.count(v) for v in plan.order) <= 2


def test_no_node_runs_more_often_than_it_has_intervals() -> None:
    problem = DagProblem(tuple(replace(node, size_bytes=4) for node in chain(24, 1).nodes))
    runs = {}
    for intervals, share in ((2, 0.5), (6, 0.25)):
        budget = int(share * plain_peak(problem))
        plan = solve_dag(problem, budget, replace(SEARCH, trials=20_000, intervals=intervals))
        check(problem, plan)
        runs[intervals] = max(plan.order.count(v) for v in plan.order)
        assert runs[intervals] <= intervals
    assert runs[6] > 2


def test_a_chain_and_a_unet_stay_near_the_bound() -> None:
    for problem, most in ((chain(40, 7), 0.02), (unet(4, 2, 1 << 16), 0.02)):
        for share in (0.8, 0.5):
            plan = solve_dag(problem, int(share * plain_peak(problem)), replace(SEARCH, trials=20_000, moments=6))
            check(problem, plan)
            assert plan.overhead > 0.01
            assert plan.gap < most
            segments = account(problem, sqrt_segments(problem))
            assert plan.overhead < segments.time_s / problem.baseline_s - 1


def test_what_has_not_run_yet_costs_the_bound_nothing() -> None:
    # While w runs beside p, a does not fit and has to run again; y may wait, however many seconds it takes.
    nodes = [DagNode("a", 1, 4), DagNode("p", 1, 7, (0,)), DagNode("w", 1, 1, (1,)), DagNode("y", 100, 4)]
    problem = DagProblem((*nodes, DagNode("z", 1, 1, (0, 2, 3))))
    flat = flat_of(problem)
    assert optimum(problem, 11) == 105
    assert lower_bound_s(flat, relations_of(flat), 11, 3, 10) <= 105
    assert optimum(problem, 12) == 104


def test_windows_add_up_beyond_one_moment() -> None:
    problem = DagProblem(tuple(replace(node, size_bytes=4) for node in chain(60, 3).nodes))
    flat = flat_of(problem)
    relations = relations_of(flat)
    budget = floor_bytes(flat, relations)  # what one backward node takes: the forward nodes run again and again
    one = lower_bound_s(flat, relations, budget, 1, 10)
    many = lower_bound_s(flat, relations, budget, 16, 10)
    assert one > 1.2 * problem.baseline_s and many > 2 * problem.baseline_s


def test_a_thousand_nodes_within_twenty_thousand_trials() -> None:
    problem = DagProblem.from_json((INSTANCES / "layered_1000.json").read_text())
    budget = int(0.8 * plain_peak(problem))
    plan = solve_dag(problem, budget, DagLimits(trials=20_000, moments=2))
    check(problem, plan)
    assert len(problem.nodes) == 1000
    assert plan.trials <= 20_000 + 6000  # a step of a repair is finished
    assert plan.overhead < 0.03


def test_a_proof_that_nothing_fits() -> None:
    nodes = [DagNode(f"n{i}", 1.0, 4, (i - 1,) if i else ()) for i in range(3)]
    with pytest.raises(BudgetInfeasible, match=r"no order fits 7 B \(7 bytes\).*takes 8 B") as caught:
        solve_dag(DagProblem(tuple(nodes)), 7)
    assert caught.value.floor_bytes == 8 == solve_dag(DagProblem(tuple(nodes)), 8).peak_bytes
    # Both y and z, made one after the other, need x; w needs both, so all three stand while the second is made.
    pair = [DagNode("x", 1, 4), DagNode("y", 1, 4, (0,)), DagNode("z", 1, 4, (0,)), DagNode("w", 1, 1, (1, 2))]
    problem = DagProblem(tuple(pair))
    flat = flat_of(problem)
    assert floor_bytes(flat, relations_of(flat)) == 9 and math.isinf(optimum(problem, 9))
    with pytest.raises(BudgetInfeasible, match=r"no order fits 9 B .* the lowest peak known is 12 B") as caught:
        solve_dag(problem, 9)
    assert caught.value.floor_bytes == 12 and caught.value.floor_overhead == 0.0


def test_budgets_and_limits_are_checked() -> None:
    problem = DagProblem((DagNode("a", 1.0, 8),))
    with pytest.raises(ValueError, match="more than 0 bytes"):
        solve_dag(problem, 0)
    with pytest.raises(ValueError, match="trials must be at least 1"):
        DagLimits(trials=0)
    plan = solve_dag(problem, 8)
    assert plan.certified and plan.steps == (Compute(0), Drop(0))
    with pytest.raises(IllegalSchedule):
        solve_dag(DagProblem((DagNode("a", 1.0, 8), DagNode("b", 1.0, 8))), 8, start=plan)


def test_nothing_takes_time() -> None:
    problem = DagProblem(tuple(DagNode(f"n{i}", 0, 8, tuple(range(i))) for i in range(20)))
    plan = solve_dag(problem, plain_peak(problem), SEARCH)
    assert plan.certified and plan.overhead == plan.gap == 0.0


@CALM
@given(dags())
def test_json_round_trip(problem: DagProblem) -> None:
    assert DagProblem.from_json(problem.to_json()) == problem
    plan = solve_dag(problem, max(1, plain_peak(problem)), SMALL)
    told = json.loads(plan.to_json())
    assert told["format"] == "memplan.dag-plan/1" and told["certified"] is True
    assert [tuple(step) for step in told["steps"]] == [
        ("compute", step.op) if isinstance(step, Compute) else ("drop", step.value) for step in plan.steps
    ]


def node_with(**fields: object) -> str:
    first = {"name": "a", "time_s": 1.0, "size_bytes": 8}
    second = {"name": "b", "time_s": 1.0, "size_bytes": 8, "inputs": [0]} | fields
    return json.dumps({"format": "memplan.dag/1", "nodes": [first, {k: v for k, v in second.items() if v is not None}]})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", 'expected an object with "format": "memplan.dag/1", got \'list\''),
        ('{"format": "memplan.dag/2", "nodes": []}', "got 'memplan.dag/2'"),
        ('{"format": "memplan.dag/1"}', "lacks nodes"),
        ('{"format": "memplan.dag/1", "nodes": []}', "at least one node"),
        ('{"format": "memplan.dag/1", "nodes": {}}', '"nodes" must be a list'),
        ('{"format": "memplan.dag/1", "nodes": [3]}', "node 0 must be an object, got int"),
        ('{"format": "memplan.dag/1", "nodes": [], "name": 3}', '"name" of the problem must be text'),
        ('{"format": "memplan.dag/1", "nodes": [], "ops": 3}', "unknown fields: ops"),
        (node_with(time_s=None), "node 1 lacks time_s"),
        (node_with(cost=3), "node 1 has unknown fields: cost"),
        (node_with(time_s=-1), r"time_s of node 1 \('b'\) must be a finite number of seconds, 0 or more, got -1"),
        (node_with(time_s=math.inf), "time_s of node 1 .* got inf"),
        (node_with(time_s=math.nan), "time_s of node 1 .* got nan"),
        (node_with(time_s="1"), "time_s of node 1 .* got '1'"),
        (node_with(size_bytes=1.5), "size_bytes of node 1 .* whole number of bytes, 0 or more, got 1.5"),
        (node_with(size_bytes=True), "size_bytes of node 1 .* got True"),
        (node_with(size_bytes=1 << 63), r"more than 2\*\*62"),
        (node_with(inputs=[1]), "node 1 .* reads 1, but inputs are indices of earlier nodes, 0 to 0"),
        (node_with(inputs=[-1]), "reads -1"),
        (node_with(inputs=["a"]), "reads 'a'"),
        (node_with(inputs=[0, 0]), "lists an input twice"),
        (node_with(inputs=3), '"inputs" of node 1 must be a list'),
        (node_with(held=1), "held of node 1 .* true or false, got 1"),
        (node_with(name=3), "the name of node 1 must be text, got 3"),
    ],
)
def test_bad_json_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DagProblem.from_json(text)


@pytest.mark.parametrize("name", sorted(instances()))
def test_committed_instances_are_what_their_seeds_give(name: str) -> None:
    assert DagProblem.from_json((INSTANCES / f"{name}.json").read_text()) == instances()[name]
