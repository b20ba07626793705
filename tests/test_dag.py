"""Plain DAGs: every plan against the accountant, brute force, and a mixed-integer program."""

from __future__ import annotations

import heapq
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from benchmarks.solve_dag import INSTANCES, chain, instances, layered, sqrt_segments, unet
from memplan.errors import BudgetInfeasible, IllegalSchedule
from memplan.schedule import Compute, Drop
from memplan.solvers import solve_dag
from memplan.solvers import dag_search as search
from memplan.solvers.dag import DagLimits, DagNode, DagPlan, DagProblem, account
from memplan.solvers.dag_bound import floor_bytes, lower_bound_s, relations_of
from memplan.solvers.dag_exact import best_order
from memplan.solvers.flat import Flat

ROOT = Path(__file__).resolve().parent.parent
SMALL = DagLimits(trials=3000, moments=3, cuts=6)
SEARCH = replace(SMALL, exact_nodes=0)  # the search alone
CALM = settings(max_examples=60, deadline=None, derandomize=True,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])  # fmt: skip


@st.composite
def dags(draw: st.DrawFn, most_nodes: int = 9) -> DagProblem:
    """A small DAG with zero sizes and zero seconds now and then, several sinks, and held outputs."""
    nodes: list[DagNode] = []
    for index in range(draw(st.integers(1, most_nodes))):
        inputs = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        held = draw(st.integers(0, 5)) == 0
        nodes.append(
            DagNode(f"n{index}", draw(st.integers(0, 5)), draw(st.integers(0, 6)), tuple(sorted(inputs)), held)
        )
    return DagProblem(tuple(nodes))


def plain_peak(problem: DagProblem) -> int:
    return account(problem, range(len(problem.nodes))).peak_bytes


def budgets(problem: DagProblem) -> list[int]:
    """From nothing fits to everything does."""
    most = max(1, plain_peak(problem))
    return sorted({max(1, most * k // 6) for k in range(2, 7)})


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
    from memplan.solvers.dag import _Task

    return _Task.of(problem, 1, SMALL).flat


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


@settings(CALM, max_examples=150)
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


@settings(CALM, max_examples=25)
@given(dags(most_nodes=6))
def test_no_plan_is_slower_than_checkmate(problem: DagProblem) -> None:
    for budget in budgets(problem)[1::2]:
        least_s = checkmate(problem, budget)
        plan = solved(problem, budget)
        if plan is None:
            assert math.isinf(least_s)
        else:
            assert plan.time_s <= least_s * (1 + 1e-6) + 1e-6
