"""Copies to host memory: what is legal, what they hold, and that planned steps with them are the plain model's bits."""

from __future__ import annotations

import copy
import functools
import gc
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
from memplan.installed.planned_forward import planned_forward
from memplan.planning import homes
from memplan.problem.data import Graph, Link, Problem, Value
from memplan.problem.packing import pinned_bytes, place_host_copies
from memplan.problem.schedule import (
    Boundary,
    Compute,
    Drop,
    DropHost,
    Offload,
    Prefetch,
    Schedule,
    Stay,
    SurfaceGrads,
    Wait,
    schedule_of,
)
from memplan.problem.simulate import simulate
from memplan.runtime.host import transfers as engine
from memplan.runtime.host.fetch import FetchedWhereUsed
from memplan.runtime.host.streams import FakeStreams
from memplan.solvers import solve_front
from memplan.solvers.bounds.offload_bound import offload_bound_s
from memplan.solvers.offload.copies import movables_of
from memplan.solvers.offload.fit_copies import least_bytes, solve_offload
from memplan.solvers.orders.flat import flatten
from tests.conftest import QUICK as QUICK_SEARCH
from tests.solvers.test_solvers import CALM, SMALL, some_orders
from tests.support.configs import with_figures
from tests.support.meter import LiveMeter, storage_bytes
from tests.support.offloads import EarlyStreams, host_resident_bytes, place_copies, settled
from tests.support.parameters import quickly
from tests.support.random_graphs import StepBuilder, encoder_decoder_like, llama_like, random_problems, resnet_like
from tests.support.zoo import MODELS, assert_same_bits, call, loss_of, run_steps

SLOW, FAST = Link(10.0, 20.0, 0.5), Link(1e9, 1e9, 0.0)
PCIE = Link(25e9, 25e9)


def with_random_homes(problem: Problem, picks: list[bool]) -> Problem:
    """Some parameters, and the gradients of as many, live on the host."""
    graph = problem.graph
    taken = {v.reuses for v in graph.values}
    values: list[Value] = []
    for index, value in enumerate(graph.values):
        movable = value.role in ("parameter", "gradient") and value.reuses is None and index not in taken
        if movable and picks[index % len(picks)]:
            value = replace(value, home="host", held=False)
        values.append(value)
    return replace(problem, graph=replace(graph, values=tuple(values)))


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


def recounted(problem: Problem, schedule: Schedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes held on the device and on the host after every step, counted anew from sets of what is where."""
    graph = problem.graph
    size = [v.size_bytes for v in graph.values]
    resident = {i for i, v in enumerate(graph.values) if v.resident}
    device, host = set[int](), set[int]()
    states, held = 0, problem.resident_bytes
    on_device, on_host = [], []
    for step in schedule:
        match step:
            case Compute(op):
                for v in graph.ops[op].outputs:
                    taken = graph.values[v].reuses
                    if taken in device:
                        device.remove(taken)
                    elif taken is not None and (taken in graph.tangents or (taken in resident and v not in resident)):
                        held -= size[taken]
                    if v not in resident:
                        device.add(v)
            case Drop(v):
                device.remove(v)
            case Offload(v):
                host.add(v)
            case Prefetch(v) | Stay(v):
                device.add(v)
            case DropHost(v):
                host.remove(v)
            case Boundary():
                held += sum(size[t] for t in graph.tangents)
            case SurfaceGrads(values):
                if problem.frees_gradients:
                    device -= {v for v in values if graph.values[v].home != "host"}
            case _:
                pass
        name = type(step).__name__
        states += {"SaveRng": 1, "DropRng": -1}.get(name, 0)
        on_device.append(held + sum(size[v] for v in device) + states * graph.rng_state_bytes)
        on_host.append(sum(size[v] for v in host))
    return tuple(on_device), tuple(on_host)


def assert_no_overlap(graph: Graph, schedule: Schedule) -> None:
    """No two values share an address of the slab at one time."""
    memory = place_host_copies(graph, schedule)
    standing: dict[int, tuple[int, int]] = {}
    for index, step in enumerate(schedule):
        if isinstance(step, Offload) and graph.values[step.value].home == "device":
            start = memory.offsets[index]
            stop = start + graph.values[step.value].size_bytes
            assert stop <= memory.size_bytes
            assert all(stop <= a or b <= start for a, b in standing.values())
            standing[step.value] = start, stop
        elif isinstance(step, DropHost):
            del standing[step.value]


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


def most_on_host(graph: Graph, schedule: Schedule, left_out: set[int]) -> int:
    """The most bytes of offloaded values at any time."""
    held = most = 0
    for step in schedule:
        if isinstance(step, (Offload, DropHost)) and step.value not in left_out:
            held += graph.values[step.value].size_bytes * (1 if isinstance(step, Offload) else -1)
            most = max(most, held)
    return most


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


# -- running ----------------------------------------------------------------------------------------------------------


@functools.cache
def floor_of(name: str) -> int:
    return memplan.plan(*MODELS[name](0), 1.0, costs="estimate", config=QUICK_SEARCH).floor_bytes


def planned(name: str, share: float, seed: int | None, host_budget: str = "1GiB") -> tuple[torch.nn.Module, object]:
    """A model under a share of its recomputation floor, with parameters on the host where it takes that."""
    net, sample = MODELS[name](0)
    memplan.apply(net, sample, int(share * floor_of(name)), costs="estimate", host_budget=host_budget, link=PCIE)
    for step in planned_forward(net).steps:  # type: ignore[union-attr]
        step.runner.store.transfers = engine.Transfers(torch.device("cpu"), EarlyStreams(seed))  # type: ignore[union-attr]
    return net, sample


QUICK = ("gpt2", "handmade")
CELLS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]


@pytest.mark.full_search
@pytest.mark.parametrize("name", quickly(MODELS, "handmade"))
def test_three_steps_are_the_plain_models_bits(name: str) -> None:
    plain, sample = MODELS[name](0)
    expected = run_steps(plain, sample, steps=3)
    net, _ = planned(name, 0.7, None)
    plan = memplan.plan_of(net)
    assert plan is not None and plan.offloaded_bytes and host_resident_bytes(plan.problem.graph)
    start = copy.deepcopy(net.state_dict())
    transfers = planned_forward(net).steps[0].runner.store.transfers  # type: ignore[union-attr]
    for seed in (None, 0, 1):
        transfers._streams = EarlyStreams(seed)
        net.load_state_dict(start)
        assert_same_bits(expected, run_steps(net, sample, steps=3))
    assert transfers.allocations == 1
    moved = {n for n, p in net.named_parameters() if not torch.equal(p, start[n])}
    assert moved == {n for n, p in plain.named_parameters() if not torch.equal(p, start[n])}


class Pointwise(torch.nn.Module):
    """Convolutions of one pixel, over channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Conv2d(32, 32, 1) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.contiguous(memory_format=torch.channels_last)))
        return x.pow(2).sum()


def test_gradients_on_the_host_lie_as_their_kernels_made_them() -> None:
    plain, sample = Pointwise(), torch.randn(2, 32, 4, 4)
    net = copy.deepcopy(plain)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # where PyTorch takes a kernel whose strides are not those of the trace
    try:
        floor = memplan.plan(net, sample, 1.0, costs="estimate").floor_bytes
        memplan.apply(net, sample, int(0.8 * floor), costs="estimate", host_budget="1GiB", link=PCIE)
        assert host_resident_bytes(memplan.plan_of(net).problem.graph)  # type: ignore[union-attr]
        assert_same_bits(run_steps(plain, sample), run_steps(net, sample))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "handmade", "transformer"])
def test_fifty_orders_of_copies(name: str) -> None:
    plain, sample = MODELS[name](0)
    expected = run_steps(plain, sample)
    net, _ = planned(name, 0.7, None)
    start = copy.deepcopy(net.state_dict())
    for seed in range(50):
        for step in planned_forward(net).steps:  # type: ignore[union-attr]
            step.runner.store.transfers._streams = EarlyStreams(seed)  # type: ignore[union-attr]
        net.load_state_dict(start)
        assert_same_bits(expected, run_steps(net, sample))


def calls_of(net: torch.nn.Module, target: object) -> Iterator[tuple[torch.fx.GraphModule, torch.fx.Node]]:
    program = planned_forward(net).steps[0].runner.program  # type: ignore[union-attr]
    for module in (program.forward, program.backward):
        for node in list(module.graph.nodes):
            if node.target is target:
                yield module, node


def test_each_missing_wait_makes_wrong_numbers() -> None:
    plain, sample = MODELS["handmade"](0)
    expected = run_steps(plain, sample, steps=1)
    net, _ = planned("handmade", 0.7, None)
    start = copy.deepcopy(net.state_dict())
    waits = list(calls_of(net, engine.wait))
    assert waits
    for module, node in waits:
        incoming = any(n.target is engine.viewed_as for n in node.users)
        if not incoming:
            continue  # an outgoing copy that nobody waits for keeps its source: bytes show that, below
        node.target = _not_waiting
        module.recompile()
        with pytest.raises(AssertionError):
            assert_same_bits(expected, run_steps(net, sample, steps=1))
        node.target = engine.wait
        module.recompile()
        net.load_state_dict(start)
    assert_same_bits(expected, run_steps(net, sample, steps=1))


def test_parameters_that_came_to_lie_in_one_vector() -> None:
    plain, sample = MODELS["handmade"](0)
    net, _ = planned("handmade", 0.7, 0)
    for _ in range(2):
        assert_same_bits(run_steps(plain, sample, steps=1), run_steps(net, sample, steps=1))
        for model in (plain, net):
            vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach() * 0.9
            torch.nn.utils.vector_to_parameters(vector, model.parameters())
            model.zero_grad(set_to_none=True)
    assert_same_bits(run_steps(plain, sample, steps=1), run_steps(net, sample, steps=1))


def test_parameters_that_share_memory_stay_where_they_are() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    whole = torch.randn(2, 64, 64)
    for index in (0, 1):
        net[index].weight = torch.nn.Parameter(whole[index], requires_grad=False)
    net[2].weight = torch.nn.Parameter(torch.randn(80, 64)[16:])
    plain, x = copy.deepcopy(net), torch.randn(8, 64)
    options = {"costs": "estimate", "host_budget": "1MiB", "link": PCIE}
    low = memplan.explore(net, x, **options)[0]  # type: ignore[arg-type]
    memplan.apply(net, x, low.peak_bytes, **options)  # type: ignore[arg-type]
    homes = {v.name: v.home for v in memplan.plan_of(net).problem.graph.values if v.role == "parameter"}  # type: ignore[union-attr]
    assert sorted(homes.values()) == ["device", "device", "host"]
    assert_same_bits(run_steps(plain, x), run_steps(net, x))


def _not_waiting(slab: engine.Slab, ticket: engine.Ticket) -> torch.Tensor:
    return ticket.data


def test_a_copy_that_keeps_nothing_alive_makes_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, sample = MODELS["handmade"](0)
    expected = run_steps(plain, sample, steps=1)
    net, _ = planned("handmade", 0.7, None)
    monkeypatch.setattr(engine.Transfers, "_keep", lambda *arguments: None)
    with pytest.raises(AssertionError):
        assert_same_bits(expected, run_steps(net, sample, steps=1))


class CountingStreams(EarlyStreams):
    """Counts the host memory that copies use."""

    host_bytes = 0
    meter: LiveMeter

    def pinned(self, size_bytes: int) -> torch.Tensor:
        memory = super().pinned(size_bytes)
        self.meter.register(memory)  # a look at it would count it, too
        with self._lock:
            self.host_bytes += size_bytes
        weakref.finalize(memory.untyped_storage(), self._freed, size_bytes).atexit = False
        return memory

    def _freed(self, size_bytes: int) -> None:
        with self._lock:  # the last user may be the thread that updates parameters
            self.host_bytes -= size_bytes


class DeviceMeter(LiveMeter):
    """Counts what is not host memory. Parameters that live on the host are not registered."""

    def __init__(self, streams: CountingStreams, outside_bytes: int) -> None:
        super().__init__()
        self.streams, self.outside_bytes = streams, outside_bytes
        self.device_peak_bytes = 0
        streams.meter = self

    def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        device_bytes = self.live_bytes - self.streams.host_bytes - self.outside_bytes
        self.device_peak_bytes = max(self.device_peak_bytes, device_bytes)
        return out


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("share", [0.7, pytest.param(0.9, marks=pytest.mark.slow)])
def test_bytes_on_the_device_are_the_predicted_ones(name: str, share: float) -> None:
    """The most that tensors hold in a step, what is on the host left out; copies as late and as early as can be."""
    for seed in (None, 0):
        net, sample = planned(name, share, seed)
        plan = memplan.plan_of(net)
        assert plan is not None
        at_home = {v.name for v in plan.problem.graph.values if v.fetched}
        on_host = storage_bytes([p for n, p in net.named_parameters() if n in at_home])
        streams = CountingStreams(seed)
        planned_forward(net).steps[0].runner.store.transfers._streams = streams  # type: ignore[union-attr]
        with DeviceMeter(streams, on_host) as meter:
            meter.register([list(net.parameters()), list(net.buffers()), sample])
            output = call(net, sample)
            turn = plan.schedule.index(Boundary())
            assert meter.device_peak_bytes == max(live_peaks(plan)[:turn])
            slab_bytes = place_host_copies(plan.problem.graph, plan.schedule).pinned_bytes
            assert streams.host_bytes == slab_bytes <= plan.host_bytes
            if getattr(output, "loss", None) is None:
                continue  # what the loss makes outside of the model is no part of the plan
            output.loss.backward()
        assert meter.device_peak_bytes == max(live_peaks(plan))


def live_peaks(plan: memplan.Plan) -> list[int]:
    """The most that tensors hold during each step, kernel scratch left out."""
    costs = replace(plan.problem.costs, scratch_bytes=(0,) * len(plan.problem.graph.ops))
    graph = replace(plan.problem.graph, rng_state_bytes=0)
    return list(simulate(replace(plan.problem, costs=costs, graph=graph), plan.schedule).peak_bytes_at)


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("where", ["forward", "backward", "host memory"])
def test_what_goes_wrong_in_a_step_loses_no_weight(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, sample = MODELS["handmade"](0)
    net, _ = planned("handmade", 0.7, 0)
    before = copy.deepcopy(net.state_dict())
    calls = 0

    def failing(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == (1 if where == "host memory" else 3):
            raise MemoryError if where == "host memory" else Interrupted
        return original(*arguments)  # type: ignore[arg-type]

    name = "pinned" if where == "host memory" else "copy"
    original = getattr(FakeStreams, name)
    loss = loss_of(call(net, sample)) if where == "backward" else None
    if where == "host memory":
        planned_forward(net).steps[0].runner.store.transfers.slabs.clear()  # type: ignore[union-attr]
    monkeypatch.setattr(FakeStreams, name, failing)
    with pytest.raises((Interrupted, MemoryError)):
        call(net, sample) if loss is None else loss.backward()
    monkeypatch.undo()
    after = net.state_dict()
    assert list(after) == list(before)
    parameters = [n for n, _ in net.named_parameters()]
    assert all(torch.equal(after[n], before[n]) for n in parameters)
    net.load_state_dict(before)
    net.zero_grad(set_to_none=True)
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))


def test_many_steps_grow_nothing_and_two_models_do_not_meet() -> None:
    nets = [planned("handmade", 0.7, seed) for seed in (0, 1)]
    plain, sample = MODELS["handmade"](0)
    expected = run_steps(plain, sample, steps=20)
    held: list[int] = []
    for _ in range(2):
        for net, _ in nets:
            start = copy.deepcopy(net.state_dict())
            if not held:
                assert_same_bits(expected, run_steps(net, sample, steps=20))
            else:
                run_steps(net, sample, steps=20)
            net.load_state_dict(start)
            net.zero_grad(set_to_none=True)
        all_transfers = [planned_forward(net).steps[0].runner.store.transfers for net, _ in nets]  # type: ignore[union-attr]
        assert [t.allocations for t in all_transfers] == [1, 1]
        assert [len(t.slabs) for t in all_transfers] == [1, 1]
        held.append(sum(len(t._host) for t in all_transfers))
    assert held[0] == held[1] == 2


@pytest.mark.slow
def test_a_thousand_steps() -> None:
    net, sample = planned("handmade", 0.7, 0)
    transfers = planned_forward(net).steps[0].runner.store.transfers  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    for step in range(1000):
        loss_of(call(net, sample)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert transfers.allocations == 1 and len(transfers._host) == 1, step


@pytest.mark.parametrize("seed", [None, 0])
def test_fake_copies_are_done_whichever_thread_waits_for_them(seed: int | None) -> None:
    streams, source = EarlyStreams(seed), torch.ones(1 << 16, dtype=torch.uint8)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as worker:
            for _ in range(1000):
                targets = [torch.empty_like(source) for _ in range(4)]
                copies = [streams.copy("in", source, target) for target in targets]
                done = [worker.submit(streams.finish, copy) for copy in copies]
                for copy, target in zip(copies, targets, strict=True):
                    streams.wait(copy)
                    assert target.min() == 1
                for future in done:
                    future.result()
    finally:
        sys.setswitchinterval(interval)


def test_removing_the_plan_frees_host_memory() -> None:
    net, sample = planned("handmade", 0.7, 0)
    loss_of(call(net, sample)).backward()
    slab = weakref.ref(planned_forward(net).steps[0].runner.store.transfers.slabs[0])  # type: ignore[union-attr]
    assert slab() is not None
    memplan.remove(net)
    gc.collect()
    assert slab() is None


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
