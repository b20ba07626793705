"""Copies to host memory: what is legal, what they hold, and that planned steps with them are the plain model's bits."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memplan
from benchmarks.gpu import steps
from benchmarks.offload import step_of
from memplan.config import Config
from memplan.errors import IllegalSchedule
from memplan.planning import homes
from memplan.problem.data import Link, Problem
from memplan.problem.packing import pinned_bytes, place_host_copies
from memplan.problem.schedule import (
    Boundary,
    Compute,
    Drop,
    DropHost,
    Offload,
    Prefetch,
    Wait,
    schedule_of,
)
from memplan.problem.simulate import simulate
from memplan.runtime.host.fetch import FetchedWhereUsed
from memplan.solvers import solve_front
from memplan.solvers.bounds.offload_bound import offload_bound_s
from memplan.solvers.offload.copies import movables_of
from memplan.solvers.offload.fit_copies import least_bytes, solve_offload
from memplan.solvers.orders.flat import flatten
from tests.solvers.test_solvers import CALM, SMALL, some_orders
from tests.support.configs import with_figures
from tests.support.offloads import (
    FAST,
    PCIE,
    SLOW,
    assert_no_overlap,
    host_resident_bytes,
    most_on_host,
    place_copies,
    planned,
    recounted,
    settled,
    with_random_homes,
)
from tests.support.random_graphs import StepBuilder, encoder_decoder_like, llama_like, random_problems, resnet_like
from tests.support.zoo import MODELS, assert_same_bits, call, loss_of, run_steps


@CALM
@given(random_problems(), st.lists(st.booleans(), min_size=1, max_size=9), st.sampled_from([SLOW, FAST]))
def test_orders_with_copies_are_legal_and_keep_the_budget(problem: Problem, picks: list[bool], link: Link) -> None:
    problem = replace(with_random_homes(problem, picks), link=link)
    for order in [tuple(o.tolist()) for o in some_orders(flatten(problem))[:8]]:
        low = least_bytes(problem, order)
        everything = place_copies(problem, order, 1 << 60)
        assert everything is not None
        high = simulate(problem, everything).peak_bytes
        assert place_copies(problem, order, low - 1) is None
        for budget in (low, (low + high) // 2, high):
            schedule = place_copies(problem, order, budget)
            assert schedule is not None
            timeline = simulate(problem, schedule)
            assert timeline.peak_bytes <= budget
            assert recounted(problem, schedule) == (timeline.live_bytes, timeline.host_bytes)
            ran = sum(problem.costs.time_s[op] for op in order if op >= 0)
            assert timeline.time_s == pytest.approx(ran + timeline.stall_s)
            assert_no_overlap(problem.graph, schedule)


@CALM
@given(
    random_problems(), st.lists(st.booleans(), min_size=1, max_size=9), st.sampled_from([SLOW, FAST, Link(2.0, 2.0)])
)
def test_the_search_counts_what_the_accountant_counts(problem: Problem, picks: list[bool], link: Link) -> None:
    """Kernels say the seconds and the host memory that `simulate` says; no schedule is faster than the bound."""
    problem = replace(with_random_homes(problem, picks), link=link, host_update_s_per_byte=0.01)
    flat, movables = flatten(problem), movables_of(problem)
    gradients = {i for i, v in enumerate(problem.graph.values) if v.role == "gradient" and v.home == "host"}
    for order in [tuple(o.tolist()) for o in some_orders(flat)[:8]]:
        low = least_bytes(problem, order)
        for budget in (low, low + 24, low + 100, 1 << 60):
            places = settled(problem, order, budget, flat, movables)
            assert places is not None
            schedule = places.schedule()
            timeline = simulate(problem, schedule)
            time_s, host_peak_bytes = places.lanes()
            assert time_s == pytest.approx(timeline.time_s, rel=1e-9)
            assert host_peak_bytes == most_on_host(problem.graph, schedule, gradients)
            assert offload_bound_s(problem, budget) <= timeline.time_s * (1 + 1e-9)


@pytest.mark.full_search
def test_pinned_blocks_count_as_what_they_take() -> None:
    """Blocks are rounded up to powers of two, and a host budget holds with that."""
    assert [pinned_bytes(n) for n in (0, 1, 2, 3, 512, 513, (33 << 30) + 1)] == [0, 1, 2, 4, 512, 1024, 64 << 30]
    problem = replace(llama_like(2), link=PCIE)
    front = solve_front(problem, SMALL)
    budget = front.floor.peak_bytes
    free = solve_offload(problem, front.points, budget, 1 << 60)
    assert free is not None
    slab = place_host_copies(problem.graph, free.schedule)
    assert slab.size_bytes < slab.pinned_bytes < 2 * slab.size_bytes
    tight = solve_offload(problem, front.points, budget, slab.pinned_bytes - 1)
    assert tight is not None and tight.timeline.time_s >= free.timeline.time_s
    assert place_host_copies(problem.graph, tight.schedule).pinned_bytes < slab.pinned_bytes


@CALM
@given(random_problems(), st.lists(st.booleans(), min_size=1, max_size=9))
def test_every_missing_step_is_refused(problem: Problem, picks: list[bool]) -> None:
    problem = replace(with_random_homes(problem, picks), link=FAST)
    order = tuple(some_orders(flatten(problem))[0].tolist())
    schedule = place_copies(problem, order, least_bytes(problem, order))
    assert schedule is not None
    for index, step in enumerate(schedule):
        if isinstance(step, (Wait, Offload, Prefetch, DropHost)):
            with pytest.raises(IllegalSchedule):
                simulate(problem, (*schedule[:index], *schedule[index + 1 :]))


def test_without_a_link_nothing_is_copied() -> None:
    problem = llama_like(1)
    order = solve_front(problem, SMALL).keep_all.order
    schedule = place_copies(replace(problem, link=PCIE), order, 1 << 60)
    assert schedule == schedule_of(problem.graph, order)
    copied = place_copies(replace(problem, link=PCIE), order, solve_front(problem, SMALL).keep_all.peak_bytes - 1)
    assert copied is not None
    with pytest.raises(IllegalSchedule, match="no link"):
        simulate(problem, copied)


def test_time_is_that_of_the_lanes() -> None:
    """Two values go out one after the other while ops run, and come back one after the other."""
    b = StepBuilder()
    x = b.value(8, "input")
    first = b.forward("a", (x,), (100,), saved=())[0]
    second = b.forward("b", (first,), (100,), saved=(first,))[0]
    third = b.forward("c", (second,), (100,), saved=(second,), time_s=10.0)[0]
    problem = replace(b.finish(third), link=Link(50.0, 25.0, 0.25))
    order = solve_front(problem, SMALL).keep_all.order
    schedule = list(schedule_of(problem.graph, order))
    at = schedule.index(Compute(2))
    schedule[at:at] = [Offload(first), Offload(second)]  # 2.25 s each, from 2 s on
    plain = simulate(replace(problem, link=None), schedule_of(problem.graph, order))
    back = next(i for i, s in enumerate(schedule) if isinstance(s, Compute) and first in problem.graph.ops[s.op].inputs
                and problem.graph.ops[s.op].phase == "backward")  # fmt: skip
    boundary = schedule.index(Boundary())
    assert boundary < back
    schedule[boundary:boundary] = [Wait(first), Drop(first), Wait(second)]
    back += 3
    schedule[back:back] = [Prefetch(first), Wait(first), DropHost(first), DropHost(second)]
    timeline = simulate(problem, tuple(schedule))
    assert timeline.stall_s == pytest.approx(4.25)  # out is hidden behind 10 s; 100 bytes back take 4.25 s
    assert timeline.time_s == pytest.approx(plain.time_s + 4.25)
    assert timeline.host_peak_bytes == 200


@pytest.mark.parametrize(
    "build", [lambda: llama_like(4), pytest.param(encoder_decoder_like, marks=pytest.mark.slow), resnet_like]
)
def test_offload_is_never_worse_than_recomputation_alone(build: object) -> None:
    problem = build()  # type: ignore[operator]
    front = solve_front(problem, SMALL)
    linked = replace(problem, link=PCIE)
    for share in (0.2, 0.4, 0.7, 1.0):
        low, high = front.floor.peak_bytes, front.keep_all.peak_bytes
        budget = low + int(share * (high - low))
        alone, found = front.best(budget), solve_offload(linked, front.points, budget, 1 << 60)
        assert alone is not None and found is not None
        assert found.timeline.time_s <= alone.time_s * (1 + 1e-12)
        assert offload_bound_s(linked, budget) <= found.timeline.time_s * (1 + 1e-12)
        nothing = solve_offload(linked, front.points, budget, 0)
        assert nothing is not None and nothing.timeline.time_s <= alone.time_s * (1 + 1e-12)
        assert nothing.timeline.host_peak_bytes == 0


@pytest.mark.slow
def test_a_long_step_is_planned_from_few_orders() -> None:
    """96 layers from a coarse front: near the bound at 25 GB/s, which no link of that speed beats."""
    problem = step_of(96)
    front = solve_front(problem, with_figures(Config(("blocks",), polish=False), moments=1))
    base_s, resident = problem.baseline_time_s, problem.resident_bytes
    budget = resident + (front.keep_all.peak_bytes - resident) // 4
    linked = replace(problem, link=PCIE)
    found, bound_s = solve_offload(linked, front.points, budget, 1 << 60), offload_bound_s(linked, budget)
    assert found is not None and bound_s <= found.timeline.time_s <= 1.05 * bound_s
    assert bound_s / base_s - 1 > 0.05


def test_a_plan_with_copies_survives_a_file(tmp_path: Path) -> None:
    plain, sample = MODELS["handmade"](0)
    expected = run_steps(plain, sample)
    first, _ = planned("handmade", 0.7, None)
    plan = memplan.plan_of(first)
    assert plan is not None
    plan.save(tmp_path / "plan.json")
    loaded = memplan.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    net, _ = MODELS["handmade"](0)
    memplan.apply(net, sample, plan=loaded, costs="estimate")
    assert_same_bits(expected, run_steps(net, sample))


def test_the_optimizer_state_counts_where_it_lives() -> None:
    net, sample = MODELS["handmade"](0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    whole = memplan.plan(net, sample, 1.0, costs="estimate", optimizer=optimizer)
    plan = memplan.plan(net, sample, 0.4, costs="estimate", optimizer=optimizer, host_budget="1GiB", link=PCIE)
    problem = plan.problem
    assert problem.extra_host_bytes and host_resident_bytes(problem.graph)
    states = whole.problem.extra_resident_bytes
    assert problem.extra_resident_bytes + problem.extra_host_bytes == states
    assert plan.baseline_peak_bytes == whole.baseline_peak_bytes
    with pytest.raises(memplan.BudgetInfeasible, match="on the host"):
        memplan.plan(net, sample, 0.4, costs="estimate", optimizer=optimizer, host_budget=1000, link=PCIE)


def test_a_model_on_the_meta_device_is_planned_for_a_card() -> None:
    net, sample = MODELS["handmade"](0)
    here = memplan.plan(net, sample, 0.6, costs="estimate", host_budget="1GiB", link=PCIE)
    there = memplan.plan(net.to("meta"), sample, 0.6, costs="estimate", host_budget="1GiB", link=PCIE, device="cpu")
    assert there.problem == here.problem and there.schedule == here.schedule
    fast = memplan.Roofline(3e14, 2e12, 5e-6)
    card = memplan.plan(net, sample, 0.6, costs=fast, host_budget="1GiB", link=PCIE, device="cpu")
    assert card.baseline_time_s < here.baseline_time_s
    with pytest.raises(ValueError, match="Roofline"):
        memplan.plan(net, sample, 0.6, device="cpu")
    with pytest.raises(memplan.UnsupportedModel, match="init="):
        memplan.apply(net, sample, 1.0, costs=fast, device="cpu")


@pytest.mark.parametrize("name", ["handmade", "gpt2"])
def test_a_model_on_the_meta_device_is_made_where_it_will_live(name: str) -> None:
    """No parameter exists twice; an optimizer that was made before goes on with those that are there then."""
    plain, sample = MODELS[name](0)
    tensors = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    low = memplan.plan(plain, sample, 1.0, costs="estimate").floor_bytes
    net = copy.deepcopy(plain).to("meta")
    if name == "gpt2":
        net.tie_weights()  # moving took them apart
    made: list[str] = []

    def init(name: str, tensor: torch.Tensor) -> None:
        made.append(name)
        tensor.copy_(tensors[name])

    optimizers = [torch.optim.AdamW(n.parameters(), lr=1e-3) for n in (plain, net)]
    memplan.apply(
        net, sample, int(0.8 * low), costs="estimate", optimizer=optimizers[1], device="cpu", host_budget="1GiB",
        link=PCIE, init=init,
    )  # fmt: skip
    assert sorted(made) == sorted(tensors)
    assert not any(t.is_meta for t in (*net.parameters(), *net.buffers()))
    for _ in range(2):
        for model, optimizer in zip((plain, net), optimizers):
            torch.manual_seed(1)
            loss_of(call(model, sample)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_bits(plain.state_dict(), net.state_dict())
    assert all(a is b for a, b in zip(net.parameters(), optimizers[1].param_groups[0]["params"]))


@pytest.mark.parametrize("name", ["handmade", *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS)])
def test_a_host_budget_never_makes_a_step_slower(name: str) -> None:
    net, sample = MODELS[name](0)
    optimizer = torch.optim.AdamW(net.parameters())
    options = {"costs": "estimate", "optimizer": optimizer}
    floor = memplan.plan(net, sample, 1.0, **options).floor_bytes  # type: ignore[arg-type]
    for budget in (floor, int(1.1 * floor), 0.95):
        alone = memplan.plan(net, sample, budget, **options)  # type: ignore[arg-type]
        for host, link in (("1GiB", PCIE), ("1GiB", Link(1e6, 1e6)), (1, PCIE)):
            plan = memplan.plan(net, sample, budget, host_budget=host, link=link, **options)  # type: ignore[arg-type]
            assert plan.time_s <= alone.time_s
            assert plan.problem.budget_bytes == alone.problem.budget_bytes
            assert plan.lower_bound_s <= plan.time_s


@pytest.mark.parametrize("preset", ["auto", "offmate"])
def test_presets_offload_where_that_is_faster(preset: str) -> None:
    net, sample = MODELS["handmade"](0)
    options = {"costs": "estimate", "optimizer": torch.optim.AdamW(net.parameters()), "config": preset}
    floor = memplan.plan(net, sample, 1.0, **options).floor_bytes  # type: ignore[arg-type]
    alone = memplan.plan(net, sample, floor, **options)  # type: ignore[arg-type]
    plan = memplan.plan(net, sample, floor, host_budget="1GiB", link=PCIE, **options)  # type: ignore[arg-type]
    assert plan.offloaded_bytes and plan.time_s < alone.time_s
    plan = memplan.plan(net, sample, int(0.7 * floor), host_budget="1GiB", link=PCIE, **options)  # type: ignore[arg-type]
    assert host_resident_bytes(plan.problem.graph) and plan.problem.extra_host_bytes


def test_the_curve_goes_on_below_what_recomputation_reaches() -> None:
    plain, sample = MODELS["handmade"](0)
    expected = run_steps(plain, sample)
    net, _ = MODELS["handmade"](0)
    alone = memplan.explore(net, sample, costs="estimate")
    points = memplan.explore(net, sample, costs="estimate", host_budget="1GiB", link=PCIE)
    assert points[0].peak_bytes < alone[0].peak_bytes and points[-1].time_s == alone[-1].time_s
    assert points[0].offloaded_bytes and host_resident_bytes(points[0].problem.graph)
    peaks, times = [p.peak_bytes for p in points], [p.time_s for p in points]
    assert peaks == sorted(set(peaks)) and times == sorted(set(times), reverse=True)
    for point in points:
        assert point.lower_bound_s <= point.time_s and point.host_bytes <= 1 << 30
        known = [p.time_s for p in alone if p.peak_bytes <= point.peak_bytes]
        assert point.time_s <= min(known, default=float("inf"))
    memplan.apply(net, sample, plan=points[0], costs="estimate")
    assert_same_bits(expected, run_steps(net, sample))


def test_evaluation_fetches_parameters_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, sample = MODELS["handmade"](0)
    net, _ = planned("handmade", 0.7, None)
    fetched = 0
    original = FetchedWhereUsed._fetched

    def counted(self: FetchedWhereUsed, tensor: torch.Tensor) -> torch.Tensor:
        nonlocal fetched
        copy = original(self, tensor)
        fetched += copy is not tensor
        return copy

    monkeypatch.setattr(FetchedWhereUsed, "_fetched", counted)
    for model in (plain, net):
        model.eval()
    with torch.no_grad():
        expected = call(plain, sample)
        assert_same_bits(expected, call(net, sample))
    assert fetched >= len([p for p in memplan.plan_of(net).problem.graph.values if p.fetched])  # type: ignore[union-attr]
    assert_same_bits(loss_of(call(plain, sample)), loss_of(call(net, sample)))
    for model in (plain, net):
        model.train()
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))


def test_a_larger_batch_moves_more_parameters_to_the_host() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    plain = copy.deepcopy(net)
    small, large = torch.randn(8, 64), torch.randn(96, 64)
    resident = memplan.plan(net, small, 1.0, costs="estimate").problem.resident_bytes
    memplan.apply(net, small, int(1.6 * resident), costs="estimate", host_budget="1MiB", link=PCIE)
    first = memplan.plan_of(net)
    assert first is not None
    before = host_resident_bytes(first.problem.graph)
    for batch in (small, large, small):
        assert_same_bits(run_steps(plain, batch), run_steps(net, batch))
    after = memplan.plan_of(net)
    assert after is not None and host_resident_bytes(after.problem.graph) > before
    assert after.peak_bytes <= int(1.6 * resident)


def test_no_more_lives_on_the_host_than_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares between the coarse ones are tried: what lives on the host is slow to fetch and to update."""
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(12)))
    optimizer = torch.optim.AdamW(net.parameters())
    found = []
    for rounds in (homes._ROUNDS, 0):
        monkeypatch.setattr(homes, "_ROUNDS", rounds)
        options = {"costs": "estimate", "optimizer": optimizer, "host_budget": "1GiB", "link": PCIE}
        found.append(memplan.plan(net, torch.randn(8, 64), 0.7, **options))  # type: ignore[arg-type]
    finer, coarse = found
    assert finer.time_s < coarse.time_s
    assert 0 < host_resident_bytes(finer.problem.graph) < host_resident_bytes(coarse.problem.graph)


class Loop(torch.nn.Module):
    """Branches on a number that it computes, between layers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return self.outer(y * 2 if y.sum().item() > 0 else y).pow(2).sum()


class AroundLoop(torch.nn.Module):
    """Layers whose activations can wait on the host while the loop runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        self.loop = Loop(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.loop(x)  # type: ignore[no-any-return]


def test_a_step_that_runs_unplanned_does_not_offload(caplog: pytest.LogCaptureFixture) -> None:
    net, sample = Loop(), torch.randn(256, 16)
    planned = copy.deepcopy(net)
    memplan.apply(planned, sample, 1.0, costs="estimate", host_budget="1GiB")
    assert memplan.plan_of(planned) is None
    assert "calls like this one run unplanned" in caplog.text
    assert_same_bits(run_steps(net, sample), run_steps(planned, sample))
    with pytest.raises(memplan.BudgetInfeasible, match="can only run unplanned"):
        memplan.apply(copy.deepcopy(net), sample, 0.5, costs="estimate", host_budget="1GiB")
    optimizer = torch.optim.SGD(net.parameters())
    with pytest.raises(memplan.UnsupportedModel, match="update='backward' a step has to be planned"):
        memplan.apply(net, sample, 1.0, costs="estimate", optimizer=optimizer, update="backward")


def test_steps_offload_around_islands() -> None:
    torch.manual_seed(0)
    net, sample = AroundLoop(), torch.randn(512, 64)
    planned = copy.deepcopy(net)
    memplan.apply(planned, sample, 0.7, costs="estimate", host_budget="1GiB", link=Link(1e12, 1e12))
    plan = memplan.plan_of(planned)
    assert plan is not None
    assert plan.islands
    assert plan.offloaded_bytes
    assert plan.peak_bytes < plan.baseline_peak_bytes
    assert_same_bits(run_steps(net, sample), run_steps(planned, sample))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers renames checkpointing
def test_the_benchmark_on_a_device_runs_on_the_cpu() -> None:
    """Each rival trains, and memplan's steps and checkpointing's are the numbers of the plain ones."""
    ways = ("plain", "checkpointing", "host-optimizer", "plan:0.95", "offload:0.5", "backward:0.5")
    rows = [steps.measure("tiny", way, float(way.partition(":")[2] or 1), None, 1) for way in ways]
    assert len({str(row["losses"]) for row in rows}) == 1 and not any("failed" in row for row in rows)
    assert len({row["gradients"] for row in rows if row["way"] not in ("host-optimizer", "backward:0.5")}) == 1
    assert all(row["predicted"]["host_bytes"] for row in rows[-2:])
