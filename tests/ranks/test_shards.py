"""Steps over sharded parameters in one process: what is gathered, when, and that mistakes show."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import memplan
from memplan.capture.shards import NetworkSpeed
from memplan.errors import BudgetInfeasible, IllegalSchedule, PlanMismatch, UnsupportedModel
from memplan.installed.planned_forward import planned_forward
from memplan.problem.data import GatherSpeed, Problem
from memplan.problem.schedule import Drop, Prefetch, Schedule, Wait
from memplan.problem.simulate import simulate
from memplan.runtime.host.fetch import MadeUpWhereUsed
from memplan.runtime.program.collectives import gathered
from memplan.runtime.ranks import agreement
from memplan.solvers.bounds.offload_bound import gather_bound_s
from memplan.solvers.offload.fit_copies import least_bytes
from memplan.solvers.orders.flat import flatten
from tests.ranks.cells_islands import WIDTH
from tests.ranks.cells_islands import Net as WithIslands
from tests.solvers.test_solvers import CALM, some_orders
from tests.support.fake_shards import FakeShards
from tests.support.meter import LiveMeter
from tests.support.offloads import PCIE, assert_no_overlap, host_resident_bytes, place_copies, recounted
from tests.support.random_graphs import random_problems
from tests.support.zoo import MODELS, assert_same_bits, call, copied, loss_of

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")  # in kinds of ops
SLOW, FAST = GatherSpeed(10.0, 0.5), GatherSpeed(1e9, 0.0)


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """This process is one of eight; the others are not there."""
    torch.distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("eight_ranks")
def test_speeds_of_collectives_are_found_from_two_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind that the backend lacks keeps its figure; another error ends the measuring, as on ranks that wait."""
    lacks = {"reduce_scatter": "Backend mine does not support reduce_scatter"}

    def seconds(kind: str, size_bytes: int, *_: Any) -> float:
        if kind in lacks:
            raise RuntimeError(lacks[kind])
        return {"all_gather": 0.5, "all_reduce": 0.25}[kind] + size_bytes / (1e6 if kind == "all_gather" else 1e5)

    monkeypatch.setattr(agreement, "_seconds", seconds)
    group, device = torch.distributed.group.WORLD, torch.device("cpu")
    assert group is not None
    found = agreement.measure_network(group, device)
    assert (found.all_gather.bytes_per_s, found.all_gather.latency_s) == pytest.approx((1e6, 0.5))
    assert (found.all_reduce.bytes_per_s, found.all_reduce.latency_s) == pytest.approx((1e5, 0.25))
    assert found.reduce_scatter == NetworkSpeed().reduce_scatter
    assert agreement.measure_network(group, torch.device("meta")) == NetworkSpeed()
    lacks["all_gather"] = "out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        agreement.measure_network(group, device)


@pytest.mark.usefixtures("eight_ranks")
def test_a_roofline_says_how_fast_ranks_exchange() -> None:
    """Reductions take as long as gathers; an all-reduce, of statistics in forward, twice as long for each byte."""

    class Summed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return all_reduce(super().forward(x), "sum", torch.distributed.group.WORLD)

    net, x = Summed(nn.Linear(8, 8, bias=False)), torch.randn(4, 8)
    fully_shard(net)
    speed = GatherSpeed(bytes_per_s=1e6, latency_s=0.25)
    plan = memplan.plan(net, x, 1.0, costs=memplan.Roofline(network=speed))
    times = dict(zip((op.kind for op in plan.problem.graph.ops), plan.problem.costs.time_s, strict=True))
    gathers, reductions, sums = ([t for kind, t in times.items() if name in kind] for name in COLLECTIVES)
    assert gathers == reductions == pytest.approx([0.25 + 8 * 8 * 4 / 1e6])
    assert sums == pytest.approx([0.25 + x.nbytes / 5e5])


# -- schedules --------------------------------------------------------------------------------------------------------


def with_random_shards(problem: Problem, picks: list[bool], speed: GatherSpeed) -> Problem:
    """Some parameters are sharded, and all gradients."""
    graph = problem.graph
    taken = {v.reuses for v in graph.values}
    values = []
    for index, value in enumerate(graph.values):
        movable = value.role == "parameter" and value.reuses is None and index not in taken
        if (movable and picks[index % len(picks)]) or value.role == "gradient":
            value = replace(value, home="sharded")
        values.append(value)
    return replace(problem, graph=replace(graph, values=tuple(values)), gather=speed, accumulate=True)


@CALM
@given(random_problems(), st.lists(st.booleans(), min_size=1, max_size=9), st.sampled_from([SLOW, FAST]), st.booleans())
def test_orders_with_gathers_are_legal_and_keep_the_budget(
    problem: Problem, picks: list[bool], speed: GatherSpeed, offloads: bool
) -> None:
    problem = replace(with_random_shards(problem, picks, speed), link=PCIE if offloads else None)
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
            assert gather_bound_s(problem) <= timeline.time_s * (1 + 1e-12)
            assert_no_overlap(problem.graph, schedule)


@CALM
@given(random_problems(), st.lists(st.booleans(), min_size=1, max_size=9))
def test_every_missing_step_is_refused(problem: Problem, picks: list[bool]) -> None:
    problem = with_random_shards(problem, picks, FAST)
    order = tuple(some_orders(flatten(problem))[0].tolist())
    schedule = place_copies(problem, order, least_bytes(problem, order))
    assert schedule is not None
    for index, step in enumerate(schedule):
        if isinstance(step, (Wait, Prefetch, Drop)):
            with pytest.raises(IllegalSchedule):
                simulate(problem, (*schedule[:index], *schedule[index + 1 :]))
    if any(isinstance(step, Prefetch) for step in schedule):
        with pytest.raises(IllegalSchedule, match="how fast"):
            simulate(replace(problem, gather=None), schedule)


class Block(nn.Module):
    """A perceptron beside a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Small(nn.Module):
    """Three blocks between tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.head.weight = self.embed.weight
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.blocks(self.embed(ids))).flatten(0, 1), ids.flatten())


def small(seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(seed)
    return Small().train(), torch.randint(0, 40, (4, 12))


KINDS = {"small": small, **MODELS}


# -- running ----------------------------------------------------------------------------------------------------------


def train(net: nn.Module, sample: Any, shards: FakeShards | None, steps: int = 2) -> list[Any]:
    """Losses, gradients and, at the end, parameters."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    found: list[Any] = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(call(net, sample))
        found.append(copied(loss))
        loss.backward()
        if shards is None:
            found.append({name: copied(p.grad) for name, p in net.named_parameters()})
            optimizer.step()
        else:
            with shards.shown():
                found.append({name: copied(p.grad) for name, p in net.named_parameters()})
                optimizer.step()
    if shards is None:
        return [*found, {name: copied(p) for name, p in net.named_parameters()}]
    with shards.shown():
        return [*found, {name: copied(p) for name, p in net.named_parameters()}]


def sharded(name: str, share: float, **options: Any) -> tuple[nn.Module, Any, FakeShards, memplan.Plan]:
    """A planned model whose parameters are hidden. share: where the budget is, from the floor to no plan at all."""
    net, sample = KINDS[name](0)
    shards = FakeShards(net, **options)
    whole = memplan.plan(net, sample, 1.0, costs="estimate", shards=shards)
    budget = whole.floor_bytes + int(share * (whole.baseline_peak_bytes - whole.floor_bytes))
    memplan.apply(net, sample, budget, costs="estimate", shards=shards)
    plan = memplan.plan_of(net)
    assert plan is not None
    return net, sample, shards, plan


QUICK = ("small", "gpt2")


@pytest.mark.parametrize(
    ("name", "share"),
    [
        *(("small", 0.0), ("small", 0.5), ("gpt2", 0.0), pytest.param("gpt2", 0.5, marks=pytest.mark.slow)),
        *(pytest.param(n, s, marks=pytest.mark.slow) for n in KINDS if n not in QUICK for s in (0.0, 0.5)),
    ],
)
def test_steps_are_the_plain_models_bits(name: str, share: float) -> None:
    expected = train(*KINDS[name](0), None)
    net, sample, shards, plan = sharded(name, share)
    assert_same_bits(expected, train(net, sample, shards))
    wanted = [(kind, name) for kind, name, _ in events(plan, plan.schedule)]
    assert shards.log == 2 * wanted
    assert shards.begun == 4


def events(plan: memplan.Plan, schedule: Schedule) -> Iterator[tuple[str, str, int]]:
    """("gather" or "release", name, bytes) in the order of a schedule."""
    for step in schedule:
        if isinstance(step, (Prefetch, Drop)):
            value = plan.problem.graph.values[step.value]
            if value.home == "sharded":
                yield "gather" if isinstance(step, Prefetch) else "release", value.name, value.size_bytes


def most_gathered(plan: memplan.Plan) -> tuple[int, int]:
    """The most parameters, and bytes, that are gathered at a time."""
    count = count_bytes = most = most_bytes = 0
    for kind, _, size_bytes in events(plan, plan.schedule):
        count += 1 if kind == "gather" else -1
        count_bytes += size_bytes if kind == "gather" else -size_bytes
        most, most_bytes = max(most, count), max(most_bytes, count_bytes)
    return most, most_bytes


def held_in_step(net: nn.Module, sample: Any, shards: FakeShards) -> int:
    """The most bytes that tensors alive hold in a planned step, with what the engine holds."""
    for p in net.parameters():
        p.grad = None
    gc.collect()
    meter = LiveMeter()
    meter.register([sample, list(net.buffers()), list(planned_forward(net).steps[0].capture.traced.constants.values())])  # type: ignore[union-attr]
    with meter, shards.metered():
        call(net, sample).backward()
    return shards.resident_bytes + meter.peak_bytes


@pytest.mark.parametrize("share", [0.0, pytest.param(0.3, marks=pytest.mark.slow), 1.0])
def test_what_is_gathered_is_in_the_predicted_peak(share: float) -> None:
    net, sample, shards, plan = sharded("small", share)
    for step in planned_forward(net).steps:  # type: ignore[union-attr]
        step.runner.watch = None  # type: ignore[union-attr]
    train(net, sample, shards, 1)
    assert (shards.most, shards.most_bytes) == most_gathered(plan)
    if not share:
        assert shards.most < len(shards.parameters) // 2
    assert held_in_step(net, sample, shards) == plan.live_peak_bytes


@pytest.mark.parametrize("budget", [1.0, 0.5, "min"])
def test_islands_read_parameters_that_are_gathered(budget: Any) -> None:
    """Functions, and modules with Python state; to see what they save, forward runs on made-up parameters."""
    torch.manual_seed(0)
    net, sample = WithIslands(), torch.randn(8, 16, WIDTH)
    plain = train(deepcopy(net), sample, None)
    shards = FakeShards(net)
    plan = memplan.plan_of(memplan.apply(net, sample, budget, costs="estimate", shards=shards))
    assert plan is not None and len(plan.islands) == 2
    assert all(p.numel() == 0 for p in net.parameters()) and not shards.log
    assert bool(plan.recomputed) == (budget != 1.0)
    assert_same_bits(plain, train(net, sample, shards))
    element_bytes = 4  # with which FakeShards gives parameters their shape, from the first gradient on
    assert held_in_step(net, sample, shards) - plan.live_peak_bytes in (0, element_bytes)


class ByReference(torch.autograd.Function):
    """Scales by the norm of a weight that it is not given."""

    weights: ClassVar[list[nn.Module]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.scale = float(np.linalg.norm(ByReference.weights[0].weight.detach().numpy()))
        return x * ctx.scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.scale


def test_islands_that_read_other_sharded_parameters_are_refused() -> None:
    class Net(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[2](ByReference.apply(self[0](x))).pow(2).mean()  # type: ignore[no-any-return,no-untyped-call]

    net, x = Net(*(nn.Linear(8, 8) for _ in range(3))), torch.randn(4, 8)
    ByReference.weights[:] = [net[1].requires_grad_(False)]
    assert len(memplan.plan(net, x, 1.0).islands) == 1
    with pytest.raises(UnsupportedModel, match="reads a sharded parameter that it is not given"):
        memplan.apply(net, x, 1.0, shards=FakeShards(net))


def test_made_up_parameters_are_whole_while_a_module_runs() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4, bias=False), nn.ReLU()))
    parameters = dict(net.named_parameters())
    whole, shards = list[set[str]](), FakeShards(net, stays=("0.bias",))

    def note(*_: Any) -> None:
        whole.append({name for name, p in parameters.items() if p.numel()})

    net[1][1].register_forward_hook(note)
    with MadeUpWhereUsed(net, shards):
        net(torch.randn(2, 8))
        note()
        assert net[0].weight.shape == (8, 8)  # code outside of calls finds it whole as well
        note()
        inner = list(net[1].parameters())  # found in the call around, they stay to its end
        net[1](torch.randn(2, 8))
        assert inner[0].std() > 0
        with pytest.raises(RuntimeError):
            net[1](torch.randn(2, 9))
    note()
    assert whole == [{"0.bias"}, {"0.bias"}, {"0.weight", "0.bias"}, {"0.weight", "0.bias", "1.0.weight"}, {"0.bias"}]


@pytest.mark.parametrize(
    "options", [{"stays": ("head.bias", "embed.weight", "blocks.1.up.weight")}, {"padding_bytes": 24}]
)
def test_parameters_that_stay_and_padding_are_counted(options: dict[str, Any]) -> None:
    expected = train(*small(), None)
    net, sample, shards, plan = sharded("small", 0.2, **options)
    values = {v.name: v for v in plan.problem.graph.values if v.role == "parameter"}
    for name, parameter in net.named_parameters():
        whole = shards.shard(parameter)
        assert whole is not None
        assert values[name].home == ("device" if name in shards.stays else "sharded")
        if name not in shards.stays:
            assert values[name].size_bytes == whole.gathered_bytes
    assert_same_bits(expected, train(net, sample, shards))


def test_gradients_accumulate_and_frozen_parameters_have_none() -> None:
    def run(hide: bool) -> Any:
        net, sample = small()
        next(net.parameters()).requires_grad_(False)
        shards = FakeShards(net) if hide else None
        if shards is not None:
            memplan.apply(net, sample, 0.5, costs="estimate", shards=shards)
        torch.manual_seed(0)
        losses = []
        for _ in range(3):
            loss = loss_of(call(net, sample))
            loss.backward()
            losses.append(copied(loss))
        return losses, {name: copied(p.grad) for name, p in net.named_parameters()}

    assert_same_bits(run(False), run(True))


def test_several_forwards_before_their_backwards() -> None:
    """They share what is gathered; the last one frees it."""

    def run(hide: bool) -> Any:
        net, sample = small()
        shards = FakeShards(net) if hide else None
        if shards is not None:
            memplan.apply(net, sample, 0.8, costs="estimate", shards=shards)
        torch.manual_seed(0)
        losses = [loss_of(call(net, sample)) for _ in range(2)]
        for loss in losses:
            loss.backward()
        assert shards is None or not shards.gathered
        return copied(losses), {name: copied(p.grad) for name, p in net.named_parameters()}

    assert_same_bits(run(False), run(True))


def test_a_step_that_is_given_up_lets_go_of_everything() -> None:
    net, sample, shards, _ = sharded("small", 1.0)
    loss = loss_of(call(net, sample))
    assert shards.gathered, "some are whole from forward to backward"
    del loss
    gc.collect()
    assert not shards.gathered
    assert_same_bits(train(*small(), None), train(net, sample, shards))


def test_without_grad_and_in_eval_mode_the_own_forward_runs() -> None:
    net, sample, shards, _ = sharded("small", 0.5)
    with shards.shown(), torch.no_grad():
        call(net, sample)
        call(net.eval(), sample)
    assert not shards.log


def test_gathers_find_the_function_modes_that_forward_is_called_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A default device, say; the program itself runs past them."""
    net, sample, shards, _plan = sharded("small", 0.5)
    found, gather = set[str](), shards.gather

    def noted(parameter: nn.Parameter) -> Any:
        found.add(torch.empty(0).device.type)
        return gather(parameter)

    monkeypatch.setattr(shards, "gather", noted)
    with torch.device("meta"):
        loss = loss_of(call(net, sample))
        assert torch.empty(0).is_meta
    assert found == {"meta"}
    loss.backward()


def test_a_plan_with_gathers_is_saved_and_loaded(tmp_path: Path) -> None:
    net, sample, shards, plan = sharded("small", 0.3)
    plan.save(tmp_path / "plan.json")
    loaded = memplan.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    other, _ = small()
    with pytest.raises(PlanMismatch, match="home"):
        memplan.apply(other, sample, plan=loaded)
    hidden = FakeShards(other)
    memplan.apply(other, sample, plan=loaded, shards=hidden)
    assert_same_bits(train(net, sample, shards), train(other, sample, hidden))


def test_costs_can_be_measured(cost_cache: Path) -> None:
    net, sample = small()
    shards = FakeShards(net)
    memplan.apply(net, sample, 0.5, shards=shards)
    assert_same_bits(train(*small(), None), train(net, sample, shards))


def test_values_may_be_offloaded_too() -> None:
    net, sample = small()
    shards = FakeShards(net)
    low = memplan.plan(net, sample, 1.0, costs="estimate", shards=shards).floor_bytes
    memplan.apply(net, sample, int(0.9 * low), costs="estimate", shards=shards, host_budget="1GiB", link=PCIE)
    plan = memplan.plan_of(net)
    assert plan is not None and plan.offloaded_bytes and not host_resident_bytes(plan.problem.graph)
    assert_same_bits(train(*small(), None), train(net, sample, shards))


# -- mistakes show ----------------------------------------------------------------------------------------------------


def without_waiting(session: Any, ticket: str) -> torch.Tensor:
    return session._held[ticket][0].detach()  # type: ignore[no-any-return]


def too_early(session: Any, ticket: str) -> torch.Tensor:
    whole = gathered(session, ticket)
    session._gathers.shards.gathered[ticket].fill_(float("nan"))
    return whole


@pytest.mark.parametrize("mistake", [without_waiting, too_early])
def test_a_missing_wait_or_an_early_release_shows(
    mistake: Callable[[Any, str], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the fake, which the other tests rely on."""
    monkeypatch.setattr(sys.modules["memplan.runtime.program.lower"], "gathered", mistake)
    net, sample, shards, _ = sharded("small", 0.5)
    shards.forgiving = True
    assert torch.isnan(loss_of(call(net, sample)))


def test_a_parameter_that_somebody_else_freed_is_noticed() -> None:
    net, sample, shards, _ = sharded("small", 0.5)
    arrive = shards.arrive

    def freed(parameter: nn.Parameter) -> None:
        arrive(parameter)
        parameter.data = torch.empty(0)

    shards.arrive = freed  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"has shape \(0,\) after it was gathered"):
        call(net, sample)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.steps = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        return (x @ self.weight).sum()


class Returns(Writes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (x @ self.weight).sum(), self.steps  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [Writes, Returns])
def test_parameters_that_outlive_the_gather_are_refused(kind: type[nn.Module]) -> None:
    net = kind()
    with pytest.raises(UnsupportedModel, match="it is sharded"):
        memplan.apply(net, torch.randn(4, 8), 1.0, costs="estimate", shards=FakeShards(net))


class Decides(Writes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).sum() * (2 if self.weight.sum() > 0 else 1)


def test_a_step_that_cant_be_captured_whole_is_refused_with_what_to_do() -> None:
    net = Decides()
    with pytest.raises(UnsupportedModel, match=r"depends on parameters.*(?s:.*)ZeRO stage 2"):
        memplan.apply(net, torch.randn(4, 8), 1.0, costs="estimate", shards=FakeShards(net))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"grads": "edges"}, "grads="), ({"on_oom": "replan"}, "on_oom="), ({"sample": None}, "sample")],
)
def test_what_ranks_could_not_agree_on_is_refused(arguments: dict[str, Any], message: str) -> None:
    net, sample = small()
    arguments = {"sample": sample, **arguments}
    with pytest.raises((ValueError, TypeError), match=message):
        memplan.apply(net, budget=0.5, costs="estimate", shards=FakeShards(net), **arguments)
    assert memplan.plan_of(net) is None


def test_another_kind_of_call_is_not_planned_alone() -> None:
    net, sample, shards, plan = sharded("small", 0.5)
    shorter = sample[:, :5]
    with pytest.raises(PlanMismatch, match="does not match the plan"):
        call(net, shorter)
    with pytest.raises(ValueError, match="plan on one rank"):
        memplan.prepare(net, [shorter])
    with pytest.raises(BudgetInfeasible, match="is the least"):
        memplan.apply(net, sample, plan.floor_bytes - 1, costs="estimate", shards=shards)
    assert_same_bits(train(*small(), None), train(net, sample, shards))
