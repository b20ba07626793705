"""Other orders of the backward ops: which are legal, what a race of them comes to, and that they run bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memplan
from memplan.config import BACKWARD_ORDERS, Config
from memplan.planner import Planner
from memplan.plans import Plan, plan_from_bytes, plan_to_bytes
from memplan.problem import Graph, Problem
from memplan.runtime import lower
from memplan.schedule import Compute, Schedule, SurfaceGrads, schedule_of
from memplan.simulate import simulate
from memplan.solvers import Candidate, Front, Progress, lower_bound, solve_front
from memplan.solvers.backward_moves import moved
from memplan.solvers.backward_orders import backward_orders, in_order, precedence
from memplan.solvers.baselines import keep_all
from memplan.solvers.flat import flatten
from tests.conftest import QUICK
from tests.meter import LiveMeter
from tests.random_graphs import (
    StepBuilder,
    encoder_decoder_like,
    llama_like,
    random_problems,
    resnet_like,
    unet_like,
)
from tests.test_exact import residents
from tests.test_solvers import CALM, SMALL
from tests.zoo import MODELS, Sample, assert_same_bits, call, copied, loss_of, run_steps

LIGHT = Config(("textbook", "cuts"), polish=False, moments=1, cuts=6)
RACED = dataclasses.replace(SMALL, backward_orders=BACKWARD_ORDERS, order_moves=2_000)


def any_order(graph: Graph, seed: int) -> tuple[int, ...]:
    """An order drawn from those that are legal."""
    draw, left = random.Random(seed), [set(row) for row in precedence(graph)]
    order: list[int] = []
    ready = [i for i, row in enumerate(left) if not row]
    while ready:
        chosen = ready.pop(draw.randrange(len(ready)))
        order.append(chosen)
        for i, row in enumerate(left):
            if chosen in row:
                row.remove(chosen)
                if not row:
                    ready.append(i)
    return tuple(order)


def mapped(problem: Problem, order: tuple[int, ...], ops: tuple[int, ...]) -> tuple[int, ...]:
    first = problem.graph.boundary
    return tuple(op if op < first else first + order[op - first] for op in ops)


def handed_over(schedule: Schedule) -> list[int]:
    return [value for step in schedule if isinstance(step, SurfaceGrads) for value in step.values]


def late_reads(graph: Graph, schedule: Schedule) -> set[tuple[int, int]]:
    """(op, parameter) where an op reads a parameter that a hook may have changed: its gradient has been handed over."""
    owner = {f"gradient of parameter {value.name}": v for v, value in enumerate(graph.values)}
    gone: set[int] = set()
    found = set()
    for step in schedule:
        if isinstance(step, SurfaceGrads):
            gone |= {owner[name] for v in step.values if (name := graph.values[v].name) in owner}
        elif isinstance(step, Compute):
            found |= {(step.op, v) for v in graph.ops[step.op].inputs if v in gone}
    return found


# -- what is legal ----------------------------------------------------------------------------------------------------


@CALM
@given(random_problems(), st.integers(0, 1 << 20))
def test_any_order_that_keeps_the_precedence_is_legal(problem: Problem, seed: int) -> None:
    graph = problem.graph
    order = any_order(graph, seed)
    other = in_order(problem, order)
    there = tuple(keep_all(flatten(other)).tolist())
    here = mapped(problem, order, there)
    schedule = schedule_of(graph, here)
    timeline = simulate(problem, schedule)
    assert timeline == simulate(other, schedule_of(other.graph, there))
    traced = schedule_of(graph, tuple(keep_all(flatten(problem)).tolist()))
    assert handed_over(schedule) == handed_over(traced)
    assert late_reads(graph, schedule) <= late_reads(graph, traced)
    assert lower_bound(other, 2, 4).floor_bytes <= timeline.peak_bytes


@CALM
@given(random_problems())
def test_every_kind_of_order_keeps_the_precedence(problem: Problem) -> None:
    before = precedence(problem.graph)
    for kind, order in backward_orders(problem, BACKWARD_ORDERS, 500):
        assert sorted(order) == list(range(len(before))), kind
        place = {op: position for position, op in enumerate(order)}
        assert all(place[first] < place[op] for op, row in enumerate(before) for first in row), kind


def test_a_gradient_may_come_first_where_its_parameter_is_read_before_the_hand_over() -> None:
    """Weight gradients come before those of activations, but not past the hand-over of their batch."""
    graph = (problem := problem_of(Deep(), torch.randn(32, 24))).graph
    ((_, order),) = backward_orders(problem, ["weights"], 0)
    ops = [graph.ops[graph.boundary + op] for op in order]
    owner = {v: f"gradient of parameter {value.name}" for v, value in enumerate(graph.values)}
    made: set[str] = set()
    early = 0
    for op in ops:
        early += any(owner[v] in made for v in op.inputs)
        made |= {graph.values[v].name for v in op.outputs}
    assert early >= 4
    there = tuple(keep_all(flatten(in_order(problem, order))).tolist())
    assert not late_reads(graph, schedule_of(graph, mapped(problem, order, there)))


def test_nothing_passes_an_op_without_a_result() -> None:
    problem = llama_like(1)
    graph, turn = problem.graph, problem.graph.boundary + 10
    fence = dataclasses.replace(graph.ops[turn], name="fence", inputs=(), outputs=(), recomputable=False)
    before = precedence(dataclasses.replace(graph, ops=(*graph.ops[:turn], fence, *graph.ops[turn:])))
    assert before[10] == tuple(range(10)) and all(10 in row for row in before[11:])


@pytest.mark.parametrize("build", [resnet_like, unet_like, encoder_decoder_like, lambda: llama_like(2)])
def test_moving_nothing_gives_the_traced_order(build: Callable[[], Problem]) -> None:
    problem = build()
    before = precedence(problem.graph)
    assert moved(flatten(problem), before, 0) == tuple(range(len(before)))
    assert moved(flatten(problem), before, 300) == moved(flatten(problem), before, 300)


# -- the race ---------------------------------------------------------------------------------------------------------


def assert_never_worse(raced: Front, alone: Front) -> None:
    for point in alone.points:
        best = raced.best(point.peak_bytes)
        assert best is not None and best.time_s <= point.time_s
    for point in raced.points:
        timeline = simulate(point.problem, point.schedule)
        assert (timeline.peak_bytes, timeline.time_s) == pytest.approx((point.peak_bytes, point.time_s))
        assert raced.bound.time_s(point.peak_bytes) <= point.time_s * (1 + 1e-9)
        assert raced.bound.floor_bytes <= point.peak_bytes


@settings(CALM, max_examples=25)
@given(random_problems())
def test_a_race_is_never_worse_than_the_traced_order(problem: Problem) -> None:
    raced, alone = solve_front(problem, RACED), solve_front(problem, SMALL)
    assert_never_worse(raced, alone)
    assert raced.keep_all.order == alone.keep_all.order
    assert raced.traced is not None and [p.order for p in raced.traced.points] == [p.order for p in alone.points]
    assert raced.bound.floor_bytes <= alone.bound.floor_bytes


def branches() -> Problem:
    """Two branches of wide values behind one small value: traced order holds the gradients of both at once."""
    b = StepBuilder()
    x = b.forward("begin", (b.value(8, "input"),), (100,))[0]
    ends = []
    for _ in range(3):
        wide = b.forward("widen", (x,), (800,), saved=(x,))[0]
        ends.append(b.forward("narrow", (wide,), (10,), save_outputs=True)[0])
    total = b.forward("join", tuple(ends), (10,), saved=tuple(ends))[0]
    loss = b.forward("loss", (total,), (8,), saved=(total,))[0]
    problem = b.finish(loss)
    # As a trace that makes the gradients of all branches before it adds any of them up.
    graph, first = problem.graph, problem.graph.boundary
    ops = list(graph.ops[first:])
    last = {v: i for i, op in enumerate(ops) for v in op.outputs}
    depth = [0] * len(ops)
    for i, op in enumerate(ops):
        depth[i] = 1 + max((depth[last[v]] for v in op.inputs if last.get(v, i) < i), default=0)
    return in_order(problem, tuple(sorted(range(len(ops)), key=lambda i: (depth[i], i))))


def test_another_order_has_a_lower_floor() -> None:
    problem = branches()
    raced = solve_front(problem, RACED)
    assert raced.traced is not None
    assert raced.floor.peak_bytes < raced.traced.floor.peak_bytes
    assert raced.floor.peak_bytes < raced.traced.bound.floor_bytes
    assert raced.floor.solver.endswith(" order")
    assert_never_worse(raced, raced.traced)


def test_a_race_that_is_stopped_has_the_traced_order_at_least() -> None:
    problem = branches()

    def stop(progress: Progress) -> None:
        if progress.stage.endswith(" order"):
            raise KeyboardInterrupt

    stopped, alone = solve_front(problem, RACED, stop), solve_front(problem, SMALL)
    assert stopped.truncated
    assert_never_worse(stopped, alone)
    clocked = solve_front(problem, dataclasses.replace(RACED, timeout_s=0.0))
    assert clocked.truncated and clocked.points and clocked.orders == ()


# -- running ----------------------------------------------------------------------------------------------------------


def plan_in(problem: Problem, order: tuple[int, ...], share: float) -> Plan:
    """A plan with backward ops in this order, at a share of the way from its smallest peak to its largest."""
    front = solve_front(in_order(problem, order), LIGHT)
    budget = front.floor.peak_bytes + int(share * (front.keep_all.peak_bytes - front.floor.peak_bytes))
    best = front.best(budget)
    assert best is not None
    found = Candidate(problem, best.solver, mapped(problem, order, best.order), best.peak_bytes, best.time_s)
    return Plan(
        dataclasses.replace(problem, budget_bytes=budget), found.schedule, found.timeline, found.solver, 0.0,
        found.peak_bytes, found.time_s,
    )  # fmt: skip


def problem_of(net: nn.Module, sample: Sample, loss_fn: Callable[..., Any] | None = None) -> Problem:
    planner = Planner(None, loss_fn, costs="estimate")
    return planner.problem(net, planner.capture(net, net.forward, sample))


BY_MODEL = [n if n in ("gpt2", "resnet50") else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]


@pytest.mark.parametrize("name", BY_MODEL)
def test_steps_in_other_orders_are_the_plain_models_bits(name: str) -> None:
    net, sample = MODELS[name](0)
    plain = run_steps(copy.deepcopy(net), sample, 2)
    problem = problem_of(net, sample)
    for seed, share in ((1, 0.0), (2, 0.4)):
        order = any_order(problem.graph, seed)
        assert order != tuple(range(len(order)))
        plan = plan_in(problem, order, share)
        assert plan.recomputed
        planned = copy.deepcopy(net)
        memplan.apply(planned, sample, plan=plan_from_bytes(plan_to_bytes(plan)), costs="estimate")
        assert_same_bits(plain, run_steps(planned, sample, 2))


def test_other_ranks_see_the_same_collectives() -> None:
    """Names are handed over in the same order and batches, so DDP may wrap a model that runs in any order."""
    net, sample = MODELS["bert"](0)
    planner = Planner(None, costs="estimate")
    captured = planner.capture(net, net.forward, sample)
    problem = planner.problem(net, captured)
    traced = lower(schedule_of(problem.graph, tuple(keep_all(flatten(problem)).tolist())), captured.traced)
    other = lower(plan_in(problem, any_order(problem.graph, 4), 0.1).schedule, captured.traced)
    assert len(traced.collectives) > 20 and other.collectives == traced.collectives
    assert other.backward.code != traced.backward.code


@pytest.mark.parametrize("name", BY_MODEL)
def test_steps_in_other_orders_hold_what_was_predicted(name: str) -> None:
    net, sample = MODELS[name](0)

    def whole(model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        return loss_of(model(*args, **kwargs))

    problem = problem_of(net, sample, whole)
    plan = plan_in(problem, any_order(problem.graph, 3), 0.2)
    memplan.apply(net, sample, plan=plan, loss_fn=whole, costs="estimate")
    for _ in range(2):
        net.zero_grad()
        meter = LiveMeter()
        meter.register(residents(net, sample))
        with meter:
            loss = call(net, sample)
            loss.backward()
        del loss
    assert meter.peak_bytes == plan.live_peak_bytes


class Branches(nn.Module):
    """Branches of convolutions, as an Inception has them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.ways = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Linear(16, 16)) for _ in range(3)
        )
        self.head = nn.Linear(24 * 16 * 16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(torch.cat([way(x) for way in self.ways], 1).flatten(1)).square().mean()


def test_a_raced_plan_trains_with_the_plain_models_bits() -> None:
    torch.manual_seed(0)
    net, sample = Branches(), torch.randn(4, 3, 16, 16)
    config = dataclasses.replace(QUICK, backward_orders=BACKWARD_ORDERS, order_moves=5_000)
    plain = run_steps(copy.deepcopy(net), sample, 2)
    curve = memplan.explore(net, sample, costs="estimate", config=config)
    alone = memplan.explore(net, sample, costs="estimate", config=QUICK)
    assert curve[0].peak_bytes <= alone[0].peak_bytes
    for point in (curve[0], curve[len(curve) // 2]):
        assert point.lower_bound_s <= point.time_s
        planned = copy.deepcopy(net)
        memplan.apply(planned, sample, plan=point, costs="estimate")
        assert_same_bits(plain, run_steps(planned, sample, 2))
    budget = curve[0].peak_bytes
    again = memplan.plan(net, sample, budget, costs="estimate", config=config)
    assert again.schedule == curve[0].schedule and again.floor_bytes == budget


@pytest.mark.parametrize("update", ["hooks", "backward"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_parameters_that_are_updated_in_backward(update: str, seed: int) -> None:
    """What reads a parameter in backward reads it as it was in forward, whenever its gradient is made."""

    def train(net: nn.Module, planned: bool) -> Any:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if planned:
            planner = Planner(
                None, costs="estimate", update="backward" if update == "backward" else "step",
                optimizer=optimizer if update == "backward" else None,
            )  # fmt: skip
            problem = planner.problem(net, planner.capture(net, net.forward, sample))
            plan = plan_in(problem, any_order(problem.graph, seed), 0.2)
            extra: dict[str, Any] = {"update": "backward", "optimizer": optimizer} if update == "backward" else {}
            memplan.apply(net, sample, plan=plan, costs="estimate", **extra)
        if update == "hooks":
            alone = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}

            def step(parameter: torch.Tensor) -> None:
                alone[parameter].step()
                alone[parameter].zero_grad()

            for p in net.parameters():
                p.register_post_accumulate_grad_hook(step)
        losses = []
        for _ in range(3):
            loss = net(sample)
            loss.backward()
            if update == "backward":
                optimizer.step()
                optimizer.zero_grad()
            losses.append(copied(loss))
        return losses, {name: copied(p) for name, p in net.named_parameters()}

    torch.manual_seed(0)
    net = Deep()
    sample = torch.randn(32, 24)
    assert_same_bits(train(copy.deepcopy(net), False), train(copy.deepcopy(net), True))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def test_copies_are_never_slower_for_a_race() -> None:
    net, sample = MODELS["vit"](0)
    arguments: dict[str, Any] = {
        "costs": "estimate", "host_budget": "1GiB", "link": memplan.Link(2e9, 2e9), "optimizer": None,
    }  # fmt: skip
    config = dataclasses.replace(QUICK, backward_orders=("greedy", "moved"), order_moves=5_000)
    for share in (0.5, 0.7):
        alone = memplan.plan(net, sample, share, config=QUICK, **arguments)
        raced = memplan.plan(net, sample, share, config=config, **arguments)
        assert raced.time_s <= alone.time_s and raced.lower_bound_s <= alone.lower_bound_s
        planned, plain = copy.deepcopy(net), copy.deepcopy(net)
        memplan.apply(planned, sample, plan=raced, costs="estimate", host_budget="1GiB")
        assert_same_bits(run_steps(plain, sample, 1)["grads"], run_steps(planned, sample, 1)["grads"])
