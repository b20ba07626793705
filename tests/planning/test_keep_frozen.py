"""Copies of frozen parameters that stay on the device between steps: the plain model's bits, predicted bytes, and that
no stale copy is ever read."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memplan
from memplan.config import Config
from memplan.errors import IllegalSchedule
from memplan.installed.planned_forward import planned_forward
from memplan.planning.placement import Placement
from memplan.planning.settings import Settings
from memplan.problem.data import Link, Problem
from memplan.problem.schedule import Prefetch, Stay
from memplan.problem.simulate import simulate
from memplan.runtime.host import transfers as engine
from memplan.runtime.host.streams import FakeStreams
from memplan.runtime.host.transfers import Contents
from memplan.solvers.bounds.offload_bound import offload_bound_s
from memplan.solvers.offload.copies import movables_of
from memplan.solvers.offload.fit_copies import least_bytes, placements
from memplan.solvers.orders.flat import flatten
from tests.solvers.test_solvers import CALM, some_orders
from tests.support.meter import storage_bytes
from tests.support.offloads import (
    FAST,
    SLOW,
    CountingStreams,
    DeviceMeter,
    EarlyStreams,
    live_peaks,
    most_on_host,
    recounted,
    with_random_homes,
)
from tests.support.random_graphs import random_problems
from tests.support.zoo import Sample, assert_same_bits, copied

LINK = Link(1e8, 1e8)
QUICK = Config(("rotor",), polish=False)
OPTIONS: dict[str, Any] = {"costs": "estimate", "config": QUICK, "host_budget": "1MiB", "link": LINK}


def with_lasting(problem: Problem) -> Problem:
    """Nothing writes between steps to parameters that live on the host."""
    values = (replace(v, lasting=v.role == "parameter" and v.home == "host") for v in problem.graph.values)
    return replace(problem, graph=replace(problem.graph, values=tuple(values)))


@CALM
@given(random_problems(), st.lists(st.booleans(), min_size=1, max_size=9), st.sampled_from([SLOW, FAST]))
def test_what_stays_is_counted_by_search_and_accountant_alike(problem: Problem, picks: list[bool], link: Link) -> None:
    problem = with_lasting(replace(with_random_homes(problem, picks), link=link, host_update_s_per_byte=0.01))
    flat, movables = flatten(problem), movables_of(problem)
    gradients = {i for i, v in enumerate(problem.graph.values) if v.role == "gradient" and v.home == "host"}
    for order in [tuple(o.tolist()) for o in some_orders(flat)[:4]]:
        low = least_bytes(problem, order)
        for budget in (low, low + 60, 1 << 40):
            for places in placements(problem, order, budget, flat, movables):
                schedule = places.schedule()
                timeline = simulate(problem, schedule)
                time_s, host_peak_bytes = places.lanes()
                assert timeline.peak_bytes <= budget
                assert time_s == pytest.approx(timeline.time_s, rel=1e-9)
                assert host_peak_bytes == most_on_host(problem.graph, schedule, gradients)
                assert offload_bound_s(problem, budget) <= timeline.time_s * (1 + 1e-9)
                assert recounted(problem, schedule) == (timeline.live_bytes, timeline.host_bytes)
                staying = {step.value for step in schedule if isinstance(step, Stay)}
                assert staying == set(places.staying.tolist())
            for index in range(len(staying)):  # without one, it is read before anybody fetches it, or never freed
                with pytest.raises(IllegalSchedule):
                    simulate(problem, (*schedule[:index], *schedule[index + 1 :]))


def test_what_stays_leaves_room_for_the_next_batch_and_the_optimizer() -> None:
    problem = with_lasting(staying_problem())
    order = tuple(some_orders(flatten(problem))[0].tolist())
    flat, movables = flatten(problem), movables_of(problem)
    for update_bytes in (0, 10_000):
        later = replace(problem, update_bytes=update_bytes)
        for places in placements(later, order, 1 << 40, flat, movables):
            schedule = places.schedule()
            stays_bytes = sum(problem.graph.values[s.value].size_bytes for s in schedule if isinstance(s, Stay))
            timeline = simulate(later, schedule)
            if stays_bytes:
                after_bytes = timeline.live_bytes[-1] + max(update_bytes, problem.graph.input_bytes)
                assert timeline.peak_bytes == max(*timeline.peak_bytes_at, after_bytes)


def staying_problem() -> Problem:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
    for layer in (net[1], net[2]):
        layer.requires_grad_(False)
    plan = memplan.plan(net, torch.randn(64, 16), 1.0, costs="estimate", config=QUICK)
    graph = plan.problem.graph
    frozen = [v.role == "parameter" and v.name.endswith(("1.weight", "2.weight")) for v in graph.values]
    values = tuple(replace(v, home="host") if moves else v for v, moves in zip(graph.values, frozen, strict=True))
    return replace(plan.problem, link=LINK, graph=replace(graph, values=values))


def test_an_illegal_stay_is_refused() -> None:
    problem = with_lasting(staying_problem())
    order = tuple(some_orders(flatten(problem))[0].tolist())
    *_, places = placements(problem, order, 1 << 40, flatten(problem), movables_of(problem))
    schedule = places.schedule()
    stay = next(step for step in schedule if isinstance(step, Stay))
    for wrong in ((stay, *schedule), (*schedule[:5], stay, *schedule[5:])):
        with pytest.raises(IllegalSchedule, match="there already"):
            simulate(problem, wrong)
    plain = replace(problem, graph=replace(problem.graph, values=tuple(
        replace(v, lasting=False) for v in problem.graph.values)))  # fmt: skip
    for other in (plain, replace(problem, in_flight=2)):
        with pytest.raises(IllegalSchedule, match="can't stay"):
            simulate(other, schedule)


# -- running ----------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """Frozen layers, each with a small adapter that trains, and dropout."""

    def __init__(self, width: int = 32, layers: int = 6) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(width, 2, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(2, width, bias=False) for _ in range(layers))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for frozen, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = nn.functional.dropout(torch.tanh(frozen(x) + up(down(x))), 0.1, self.training)
        return x.pow(2).sum()


@functools.cache
def plan_below_the_floor() -> memplan.Plan:
    """A plan that copies are the bottleneck of, at three quarters of what recomputing alone needs."""
    net, sample = Adapted(), torch.zeros(24, 32)
    low = memplan.plan(net, sample, 1.0, costs="estimate", config=QUICK).floor_bytes
    plan = memplan.plan(net, sample, low * 3 // 4, **OPTIONS, keep_frozen=True)
    assert plan.staying_bytes
    return plan


def pair(seed: int | None = None) -> tuple[Adapted, Adapted, torch.Tensor]:
    """A plain model, an equal one that is planned and keeps frozen parameters, and a batch."""
    torch.manual_seed(0)
    plain, sample = Adapted(), torch.randn(24, 32)
    net = copy.deepcopy(plain)
    memplan.apply(net, sample, plan=plan_below_the_floor(), costs="estimate", config=QUICK, keep_frozen=True)
    transfers_of(net)._streams = EarlyStreams(seed)
    return plain, net, sample


def beginning(fetches: list[int]) -> Callable[..., None]:
    """What makes a slab, and notes that a step begins."""
    original = engine.Slab.__init__

    def begin(self: engine.Slab, *arguments: Any) -> None:
        fetches.append(0)
        original(self, *arguments)

    return begin


def transfers_of(net: nn.Module) -> engine.Transfers:
    planned = planned_forward(net)
    assert planned is not None
    return planned.steps[0].runner.store.transfers  # type: ignore[no-any-return,union-attr]


def train(
    net: nn.Module, sample: torch.Tensor, steps: int = 4, between: Callable[[Any, int], object] = lambda net, step: None
) -> dict[str, Any]:
    """Some steps; everything that must be the same bits. between: what a user does after each."""
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for step in range(steps):
        loss = net(sample)
        losses.append(copied(loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(copied(between(net, step)))
    state = {name: copied(t) for name, t in net.state_dict().items()}
    return {"losses": losses, "state": state, "rng_state": torch.get_rng_state()}


@pytest.mark.parametrize("seed", [None, 0, pytest.param(1, marks=pytest.mark.slow)])
def test_steps_are_the_plain_models_bits_and_fetch_what_was_predicted(
    seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, net, sample = pair(seed)
    plan = memplan.plan_of(net)
    assert plan is not None
    fetches: list[int] = []
    original = engine.Transfers.read

    def counted(self: engine.Transfers, parameter: torch.Tensor, ticket: engine.Ticket) -> None:
        fetches[-1] += parameter.nbytes
        original(self, parameter, ticket)

    monkeypatch.setattr(engine.Transfers, "read", counted)
    expected = train(plain, sample)
    monkeypatch.setattr(engine.Slab, "__init__", beginning(fetches))
    assert_same_bits(expected, train(net, sample))
    values = plan.problem.graph.values
    steady = sum(
        values[s.value].size_bytes for s in plan.schedule if isinstance(s, Prefetch) and values[s.value].fetched
    )
    assert fetches == [steady + plan.staying_bytes, steady, steady, steady]


@pytest.mark.parametrize(
    "options",
    [{"update": "backward"}, {"accumulate": True}, {"grads": "edges"}],
    ids=lambda options: next(iter(options)),
)
def test_other_ways_to_train_keep_them_too(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain, sample = Adapted(), torch.randn(24, 32)
    net = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in (plain, net)]
    budget = plan_below_the_floor().problem.budget_bytes
    memplan.apply(net, sample, budget, **OPTIONS, **options, optimizer=optimizers[1], keep_frozen=True)
    plan = memplan.plan_of(net)
    assert plan is not None and plan.staying_bytes
    transfers_of(net)._streams = EarlyStreams(0)
    found: list[list[Any]] = [[], []]
    for model, optimizer, losses in zip((plain, net), optimizers, found, strict=True):
        torch.manual_seed(7)
        for _ in range(3):
            for batch in (sample, sample * 0.5)[: 2 if "accumulate" in options else 1]:
                loss = model(batch)
                losses.append(copied(loss))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_bits(*found)
    assert_same_bits(plain.state_dict(), net.state_dict())


@pytest.mark.parametrize("seed", [None, 0])
def test_bytes_on_the_device_are_the_predicted_ones(seed: int | None) -> None:
    """In the first step, which fetches what will stay, in later ones, and between them."""
    _, net, sample = pair(seed)
    plan = memplan.plan_of(net)
    assert plan is not None
    at_home = {v.name for v in plan.problem.graph.values if v.fetched}
    on_host = storage_bytes([p for n, p in net.named_parameters() if n in at_home])
    transfers_of(net)._streams = streams = CountingStreams(seed)
    with DeviceMeter(streams, on_host) as meter:
        meter.register([list(net.parameters()), list(net.buffers()), sample])
        for _ in range(3):
            before = meter.live_bytes - streams.host_bytes - on_host
            net(sample).backward()
            assert meter.device_peak_bytes == max(live_peaks(plan))
            meter.device_peak_bytes = 0
            net.zero_grad()
        standing_bytes = meter.live_bytes - streams.host_bytes - on_host
        assert standing_bytes == before == plan.problem.resident_bytes + plan.staying_bytes
        memplan.remove(net)
        assert meter.live_bytes - streams.host_bytes - on_host == plan.problem.resident_bytes


def in_place(net: Adapted, step: int) -> None:
    with torch.no_grad():
        net.frozen[0].weight[3, 4] += 1.0


def load(net: Adapted, step: int) -> None:
    net.load_state_dict({name: t * 0.9 for name, t in net.state_dict().items()})


def load_assigned(net: Adapted, step: int) -> None:
    net.load_state_dict({name: t * 0.9 for name, t in net.state_dict().items()}, assign=True)
    net.frozen.requires_grad_(False)


def through_data(net: Adapted, step: int) -> None:
    for parameter in net.parameters():
        parameter.data.mul_(0.9)


def other_data(net: Adapted, step: int) -> None:
    for parameter in net.frozen.parameters():
        changed = parameter.data.clone()
        changed.view(-1)[5] += 1.0
        parameter.data = changed


def other_parameter(net: Adapted, step: int) -> None:
    for layer in net.frozen:
        layer.weight = nn.Parameter(layer.weight.detach() * 0.9, requires_grad=False)  # type: ignore[operator]


def evaluated_merged(net: Adapted, step: int) -> torch.Tensor:
    """As peft merges adapters for an evaluation and takes them out again, which changes rounding."""
    sample, merged = torch.ones(2, 32), [(up.weight @ down.weight).detach() for up, down in zip(net.up, net.down)]
    for layer, delta in zip(net.frozen, merged, strict=True):
        layer.weight.data += delta  # type: ignore[operator]
    net.eval()
    with torch.no_grad():
        loss = net(sample)
    net.train()
    for layer, delta in zip(net.frozen, merged, strict=True):
        layer.weight.data -= delta  # type: ignore[operator]
    return loss  # type: ignore[no-any-return]


def one_vector(net: Adapted, step: int) -> None:
    vector = torch.nn.utils.parameters_to_vector(net.parameters()).detach() * 0.9
    torch.nn.utils.vector_to_parameters(vector, net.parameters())


SAME_PARAMETER = [one_vector, in_place, load, through_data, other_data]
CHANGES = [*SAME_PARAMETER, other_parameter, load_assigned, evaluated_merged]


@pytest.mark.parametrize("change", CHANGES)
def test_no_stale_copy_is_read(change: Callable[[Any, int], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """And where nobody looks whether copies are stale, the numbers are wrong."""
    plain, net, sample = pair(0)
    start = copy.deepcopy(plain.state_dict())
    expected = train(plain, sample, between=change)
    assert_same_bits(expected, train(net, sample, between=change))
    if change in SAME_PARAMETER:
        net.load_state_dict(start)
        monkeypatch.setattr(Contents, "is_in", lambda self, parameter: True)
        with pytest.raises(AssertionError):
            assert_same_bits(expected, train(net, sample, between=change))


def test_a_write_in_the_middle_of_backward_is_noticed() -> None:
    """The copy on the device is what the parameter was before."""

    def hook(net: Adapted) -> Callable[[torch.Tensor], None]:
        def write(gradient: torch.Tensor) -> None:
            with torch.no_grad():
                net.frozen[0].weight.view(-1)[5] += 1

        return write

    plain, net, sample = pair(0)
    for model in (plain, net):
        model.up[5].weight.register_hook(hook(model))
    assert "frozen.0.weight" in planned_forward(net).steps[0].runner.program.staying  # type: ignore[union-attr]
    net(sample).backward()
    assert copies_of(net)
    assert not any(contents.parameter is net.frozen[0].weight for contents, _ in copies_of(net))
    plain(sample).backward()
    for model in (plain, net):
        model.zero_grad()
    assert_same_bits(train(plain, sample), train(net, sample))


def copies_of(net: nn.Module) -> list[tuple[Contents, torch.Tensor]]:
    return list(transfers_of(net).standing._copies.values())


def test_what_stays_is_freed_when_something_else_runs() -> None:
    plain, net, sample = pair()
    net(sample).backward()
    assert copies_of(net)
    with torch.no_grad():
        assert_same_bits(plain.eval()(sample), net.eval()(sample))
    assert not copies_of(net)
    plain.train(), net.train()
    net(sample).backward()
    net.zero_grad()
    assert copies_of(net)
    net(sample)  # no backward: it has taken them
    assert not copies_of(net)
    net(sample).backward()
    first = memplan.plan_of(net)
    net(sample[:20]).backward()  # a plan of its own, with what stays for it alone
    second = memplan.plan_of(net)
    assert first is not None and second is not None and first != second
    assert sum(memory.numel() for _, memory in copies_of(net)) == second.staying_bytes
    net.zero_grad()
    assert_same_bits(train(plain, sample[:20]), train(net, sample[:20]))
    transfers = transfers_of(net)
    memplan.remove(net)
    assert not len(transfers.standing)


def test_on_another_stream_copies_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, net, sample = pair(0)
    net(sample).backward()
    transfers, stream = transfers_of(net), object()
    monkeypatch.setattr(FakeStreams, "computing", lambda self: stream)
    transfers.keep(net.parameters())
    assert not copies_of(net)
    net.zero_grad()
    assert_same_bits(train(plain, sample), train(net, sample))
    kept = copies_of(net)
    transfers.keep(net.parameters())
    assert kept and copies_of(net) == kept


def test_two_forwards_before_a_backward() -> None:
    plain, net, sample = pair(0)
    for model in (plain, net):
        torch.manual_seed(3)
        for _ in range(2):
            losses = [model(sample), model(sample * 0.5)]
            for loss in losses:
                loss.backward()
    gradients = [{n: copied(p.grad) for n, p in m.named_parameters() if p.grad is not None} for m in (plain, net)]
    assert_same_bits(*gradients)


def test_many_steps_grow_nothing() -> None:
    _, net, sample = pair(0)
    counts = []
    for _ in range(5):
        net(sample).backward()
        net.zero_grad()
        gc.collect()
        counts.append(sum(type(thing) is torch.Tensor for thing in gc.get_objects()))
    staying = planned_forward(net).steps[0].runner.program.staying  # type: ignore[union-attr]
    assert len(set(counts[2:])) == 1 and len(copies_of(net)) == len(staying)
    assert transfers_of(net).allocations == 1


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("where", [1, 3, 12, 20])
def test_an_interrupted_step_leaves_no_half_made_copy(where: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, net, sample = pair(0)
    start = copy.deepcopy(plain.state_dict())
    calls, original = 0, FakeStreams.copy

    def failing(self: FakeStreams, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == where:
            raise Interrupted
        return original(self, *arguments)

    monkeypatch.setattr(FakeStreams, "copy", failing)
    with pytest.raises(Interrupted):
        train(net, sample)
    monkeypatch.undo()
    net.zero_grad()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.requires_grad:  # not the frozen ones, of which copies may still be good
                parameter.copy_(start[name])
    assert_same_bits(train(plain, sample), train(net, sample))


def test_a_plan_that_keeps_frozen_parameters_survives_a_file(tmp_path: Path) -> None:
    plain, net, sample = pair()
    plan = memplan.plan_of(net)
    assert plan is not None and "stays" in plan.report()
    plan.save(tmp_path / "plan.json")
    loaded = memplan.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    memplan.remove(net)
    with pytest.raises(memplan.PlanMismatch, match="keep_frozen=True"):
        memplan.apply(net, sample, plan=loaded, costs="estimate")
    memplan.apply(net, sample, plan=loaded, costs="estimate", keep_frozen=True)
    assert_same_bits(train(plain, sample), train(net, sample))


def test_a_parameter_that_is_trained_or_shares_memory_with_one_does_not_stay() -> None:
    plain, net, sample = pair()
    memplan.remove(net)
    memplan.apply(net, sample, plan_below_the_floor().problem.budget_bytes, **OPTIONS, keep_frozen=True)
    for model in (plain, net):
        model.frozen[0].requires_grad_(True)
    assert_same_bits(train(plain, sample), train(net, sample))
    plan = memplan.plan_of(net)
    assert plan is not None
    lasting = {v.name for v in plan.problem.graph.values if v.lasting}
    assert lasting and not any("frozen.0" in name for name in lasting)
    tied = copy.deepcopy(plain)
    tied.frozen[1].weight = nn.Parameter(tied.frozen[0].weight.data, requires_grad=False)  # type: ignore[arg-type]
    lasting = Placement(tied, Settings(1 << 20, keep_frozen=True)).lasting()
    assert "frozen.1.weight" not in lasting and "frozen.2.weight" in lasting


def test_without_asking_nothing_stays() -> None:
    _, net, sample = pair()
    plan = memplan.plan_of(net)
    assert plan is not None
    budget = plan.problem.budget_bytes
    assert budget is not None
    memplan.remove(net)
    without = memplan.plan(net, sample, budget, **OPTIONS)
    assert not without.staying_bytes and without.time_s > plan.time_s
    with pytest.raises(ValueError, match="in_flight"):
        memplan.apply(net, sample, budget, in_flight=2, keep_frozen=True, **OPTIONS)


def test_an_adapter_of_peft_that_is_merged_and_taken_out_again_is_noticed() -> None:
    peft = pytest.importorskip("peft")
    from tests.support.zoo import MODELS, call, loss_of

    def adapted() -> tuple[Any, Sample]:
        net, sample = MODELS["llama"](0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            torch.manual_seed(0)
            return peft.get_peft_model(net, config).train(), sample

    def steps(net: Any) -> list[Any]:
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
        found = []
        for step in range(4):
            loss = loss_of(call(net, sample))
            found.append(copied(loss))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:  # what merging leaves behind, with no evaluation in between
                net.merge_adapter()
                net.unmerge_adapter()
        return found

    (plain, sample), (net, _) = adapted(), adapted()
    low = memplan.plan(net, sample, 1.0, costs="estimate", config=QUICK).floor_bytes
    memplan.apply(
        net, sample, int(0.7 * low), costs="estimate", config=QUICK, host_budget="1GiB", link=LINK, keep_frozen=True
    )
    plan = memplan.plan_of(net)
    assert plan is not None and plan.staying_bytes
    assert_same_bits(steps(plain), steps(net))
