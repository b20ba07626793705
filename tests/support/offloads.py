"""Copies to host memory in tests: recounted schedules, streams that copy early, meters, models planned with copies."""

from __future__ import annotations

import functools
import random
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

import memplan
from memplan.installed.planned_forward import planned_forward
from memplan.problem.data import Graph, Link, Problem, Value
from memplan.problem.packing import place_host_copies
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
)
from memplan.problem.simulate import simulate
from memplan.runtime.host import transfers as engine
from memplan.runtime.host.streams import Direction, FakeStreams
from memplan.solvers.offload.copies import Movables, movables_of
from memplan.solvers.offload.fit_copies import placements
from memplan.solvers.orders.flat import Flat, flatten
from tests.conftest import QUICK as QUICK_SEARCH
from tests.support.meter import LiveMeter
from tests.support.zoo import MODELS

SLOW, FAST = Link(10.0, 20.0, 0.5), Link(1e9, 1e9, 0.0)
PCIE = Link(25e9, 25e9)


def place_copies(problem: Problem, order: Sequence[int], budget_bytes: int) -> Schedule | None:
    """A schedule of this order that peaks within the budget on the device; None where copies can't bring it there."""
    places = settled(problem, order, budget_bytes, flatten(problem), movables_of(problem))
    return None if places is None else places.schedule()


def settled(problem: Problem, order: Sequence[int], budget_bytes: int, flat: Flat, movables: Movables) -> Any:
    """The fastest placement of copies for an order that peaks within the budget. flat, movables: of the problem."""
    found = placements(problem, order, budget_bytes, flat, movables)
    return min(found, key=lambda places: places.lanes()[0], default=None)


def host_resident_bytes(graph: Graph) -> int:
    """Bytes of parameters whose home is the host."""
    return sum(v.size_bytes for v in graph.values if v.resident and v.home == "host")


class EarlyStreams(FakeStreams):
    """Streams on a CPU some of whose copies happen early, at random. seed: None never copies early."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self._random = None if seed is None else random.Random(seed)

    def copy(self, direction: Direction, source: torch.Tensor, target: torch.Tensor) -> Any:
        copy = super().copy(direction, source, target)
        self._run_some()
        return copy

    def wait(self, event: Any) -> None:
        super().wait(event)
        self._run_some()

    def _run_some(self) -> None:
        if self._random is None:
            return
        with self._lock:
            early = [copy for copy in self._pending if self._random.random() < 0.3]
            self._pending = [copy for copy in self._pending if copy not in early]
            for copy in early:
                copy.run()


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


def most_on_host(graph: Graph, schedule: Schedule, left_out: set[int]) -> int:
    """The most bytes of offloaded values at any time."""
    held = most = 0
    for step in schedule:
        if isinstance(step, (Offload, DropHost)) and step.value not in left_out:
            held += graph.values[step.value].size_bytes * (1 if isinstance(step, Offload) else -1)
            most = max(most, held)
    return most


def calls_of(net: torch.nn.Module, target: object) -> Iterator[tuple[torch.fx.GraphModule, torch.fx.Node]]:
    program = planned_forward(net).steps[0].runner.program  # type: ignore[union-attr]
    for module in (program.forward, program.backward):
        for node in list(module.graph.nodes):
            if node.target is target:
                yield module, node


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


def live_peaks(plan: memplan.Plan) -> list[int]:
    """The most that tensors hold during each step, kernel scratch left out."""
    costs = replace(plan.problem.costs, scratch_bytes=(0,) * len(plan.problem.graph.ops))
    graph = replace(plan.problem.graph, rng_state_bytes=0)
    return list(simulate(replace(plan.problem, costs=costs, graph=graph), plan.schedule).peak_bytes_at)


class Interrupted(Exception):
    pass


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
