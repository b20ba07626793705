"""Steps with copies to the host: bits, bytes on the device, missing waits, errors in the middle."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import memplan
from memplan.installed.planned_forward import planned_forward
from memplan.problem.packing import place_host_copies
from memplan.problem.schedule import (
    Boundary,
)
from memplan.runtime.host import transfers as engine
from memplan.runtime.host.streams import FakeStreams
from tests.support.meter import storage_bytes
from tests.support.offloads import (
    PCIE,
    CountingStreams,
    DeviceMeter,
    EarlyStreams,
    Interrupted,
    calls_of,
    host_resident_bytes,
    live_peaks,
    planned,
)
from tests.support.parameters import quickly
from tests.support.zoo import MODELS, assert_same_bits, call, loss_of, run_steps

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
