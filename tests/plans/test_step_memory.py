"""What a step holds, tensor by tensor, adds up to the accountant's bytes at every moment, whatever the step does."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memplan
from memplan.plans.choices import choices_of, layer_tables, reason_of
from memplan.plans.step_memory import StepMemory, planned_memory, step_memory, unplanned_memory
from memplan.problem.data import Problem
from memplan.problem.lanes import spans_of
from memplan.problem.schedule import BOUNDARY, Stay, schedule_of
from memplan.problem.simulate import simulate
from memplan.solvers.offload.fit_copies import least_bytes
from memplan.solvers.orders.flat import flatten
from tests.planning.test_keep_frozen import with_lasting
from tests.planning.test_update_in_backward import with_random_updates
from tests.ranks.test_shards import FAST, with_random_shards
from tests.solvers.test_solvers import CALM, some_orders
from tests.support.offloads import PCIE, place_copies, with_random_homes
from tests.support.random_graphs import StepBuilder, random_problems
from tests.support.zoo import MODELS

HOMES = ["host", "lasting", "updated", "sharded"]


def check(memory: StepMemory) -> None:
    """Sums of what is there, one by one, at each moment. Whoever takes over memory takes all of it, at once."""
    moments = range(len(memory.schedule))
    assert tuple(sum(life.size_bytes for life in memory.at(m)) for m in moments) == memory.timeline.peak_bytes_at
    assert sum(memory.peak_by_kind().values()) == memory.timeline.peak_bytes
    waiting_bytes = (memory.problem.in_flight - 1) * memory.timeline.waiting_bytes
    after_bytes = memory.problem.bytes_after(any(isinstance(step, Stay) for step in memory.schedule))
    later_bytes = memory.timeline.live_bytes[-1] - waiting_bytes + after_bytes
    assert sum(life.size_bytes for life in memory.at(len(memory.schedule))) == later_bytes
    assert sum(life.size_bytes for life in memory.at(memory.peak_moment)) == memory.timeline.peak_bytes
    values = memory.problem.graph.values
    ends = {(life.value, life.end + 1): life.size_bytes for life in memory.lifetimes}
    for life in memory.lifetimes:
        assert 0 <= life.begin <= life.end <= len(memory.schedule)
        reuses = None if life.value is None or life.kind == "fetched" else values[life.value].reuses
        if reuses is not None:
            assert ends[reuses, life.begin] == life.size_bytes
    for choice in choices_of(memory):
        assert 0 <= choice.share <= 1 and reason_of((choice,))
    cells = [cell for table in layer_tables(memory) for row in table.rows for cell in row.cells]
    assert len(cells) == len(choices_of(memory)) + sum(v.fetched for v in memory.problem.graph.values)


@CALM
@given(random_problems(), st.integers(1, 3), st.booleans(), st.integers(0, 9))
def test_schedules_of_all_kinds(problem: Problem, in_flight: int, accumulate: bool, update_bytes: int) -> None:
    problem = replace(
        problem, in_flight=in_flight, accumulate=accumulate, update_bytes=update_bytes, extra_resident_bytes=3
    )  # fmt: skip
    for order in some_orders(flatten(problem)):
        schedule = schedule_of(problem.graph, order.tolist())
        check(step_memory(problem, schedule))


@CALM
@given(random_problems(), st.lists(st.booleans(), min_size=1, max_size=9), st.sampled_from(HOMES))
def test_copies_gathers_and_updates(problem: Problem, picks: list[bool], homes: str) -> None:
    if homes == "updated":
        problem = with_random_updates(replace(problem, accumulate=False), picks)
    if homes == "sharded":
        problem = replace(with_random_shards(problem, picks, FAST), link=PCIE)
    else:
        problem = replace(with_random_homes(problem, picks), link=PCIE)
    if homes == "lasting":
        problem = with_lasting(problem)
    for order in [tuple(o.tolist()) for o in some_orders(flatten(problem))[:6]]:
        schedule = place_copies(problem, order, least_bytes(problem, order) + 30)
        assert schedule is not None
        timeline = simulate(problem, schedule)
        check(step_memory(problem, schedule))
        begins_s, spans = spans_of(problem, schedule)
        assert max(begins_s[-1], *(span.end_s for span in spans)) == timeline.time_s
        assert len(begins_s) == len(schedule) + 1 and sorted(begins_s) == list(begins_s)
        stalls = [span.end_s - span.begin_s for span in spans if span.lane == "stall"]
        assert sum(stalls) == pytest.approx(timeline.stall_s)
        for _, lane in itertools.groupby(sorted(spans, key=lambda s: (s.lane, s.begin_s)), key=lambda s: s.lane):
            assert all(a.end_s <= b.begin_s for a, b in itertools.pairwise(lane))


@pytest.mark.parametrize("name", ["gpt2", "resnet50", "handmade"])
def test_models(name: str) -> None:
    net, sample = MODELS[name](0)
    optimizer = torch.optim.AdamW(net.parameters())
    plan = memplan.explore(net, sample, optimizer=optimizer, costs="estimate", config="rotor")[0]
    planned, unplanned = planned_memory(plan), unplanned_memory(plan)
    check(planned)
    check(unplanned)
    assert unplanned.timeline.peak_bytes == plan.baseline_peak_bytes
    assert not any(unplanned.by_kind()["recomputed"]) and any(planned.by_kind()["recomputed"])
    assert max(planned.by_kind()["kept"]) < max(unplanned.by_kind()["kept"])
    assert set(planned.by_kind()["optimizer"][:-1]) == {plan.problem.extra_resident_bytes}


def test_what_forward_leaves_for_backward_to_make_is_no_choice() -> None:
    b = StepBuilder()
    x = b.forward("embed", (b.value(8, "input"),), (64,), parameter=b.value(8, "parameter"))[0]
    mask = b.forward("mask", (x,), (4096,), differentiable=False)[0]
    problem = b.finish(b.forward("use", (x,), (64,), saved=(x, mask))[0])
    late = (0, 2, BOUNDARY, 1, *range(3, len(problem.graph.ops)))
    for order, decided in ((late, {x}), ((0, 1, 2, BOUNDARY, *late[4:]), {x, mask})):
        schedule = schedule_of(problem.graph, order)
        memory = step_memory(problem, schedule)
        check(memory)
        assert {choice.value for choice in choices_of(memory)} == decided


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).sum()


def test_everything_has_its_kind_and_its_name() -> None:
    net, sample = Chain(), torch.randn(64, 8)
    memory = planned_memory(memplan.plan(copy.deepcopy(net), sample, 1.0, costs="estimate"))
    found = {(life.kind, life.name, life.tensor) for life in memory.lifetimes}
    assert ("weights", "first.weight", "float32[32, 8]") in found
    assert ("inputs", "x", "float32[64, 8]") in found
    assert ("gradients", "gradient of parameter second.weight", "float32[4, 32]") in found
    assert ("kept", "(the model itself): relu", "float32[64, 32]") in found
    assert ("temporary", "first: addmm", "float32[64, 32]") in found
