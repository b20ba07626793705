"""Parameters that are updated in backward: the bits of the plain loop, predicted bytes, and what is refused."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
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
from memplan.errors import IllegalSchedule
from memplan.installed.planned_forward import planned_forward
from memplan.problem.data import Link, Problem
from memplan.problem.schedule import Compute, SurfaceGrads, schedule_of
from memplan.problem.simulate import simulate
from memplan.solvers.bounds.offload_bound import offload_bound_s
from memplan.solvers.offload.fit_copies import least_bytes
from memplan.solvers.orders.flat import flatten
from tests.solvers.test_solvers import CALM, some_orders
from tests.support.meter import storage_bytes
from tests.support.offloads import (
    CountingStreams,
    DeviceMeter,
    host_resident_bytes,
    live_peaks,
    place_copies,
    with_random_homes,
)
from tests.support.parameters import quickly
from tests.support.random_graphs import random_problems
from tests.support.small import net_and_sample
from tests.support.zoo import MODELS, Sample, assert_same_bits, call, copied, loss_of

PCIE = Link(25e9, 25e9)
Build = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Build] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-5, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach Adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True, amsgrad=True, maximize=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def steps(net: nn.Module, sample: Sample, optimizer: torch.optim.Optimizer, count: int = 3) -> dict[str, Any]:
    """Train with a scheduler; everything that must be the same bits."""
    torch.manual_seed(7)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses = []
    for _ in range(count):
        loss = loss_of(call(net, sample))
        losses.append(copied(loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {
        "losses": losses,
        "state": {name: copied(t) for name, t in net.state_dict().items()},
        "optimizer": copied(dict(sorted(optimizer.state_dict()["state"].items()))),
        "rates": [group["lr"] for group in optimizer.param_groups],
        "rng_state": torch.get_rng_state(),
    }


def planned(net: nn.Module, sample: Sample, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    """The model at the floor of recomputation, or below with a host budget. Gives its plan."""
    alone = {"costs": "estimate", "optimizer": optimizer, "update": "backward"}
    floor = memplan.plan(net, sample, 1.0, **alone).floor_bytes
    memplan.apply(net, sample, int(0.7 * floor) if "host_budget" in options else floor, **alone, **options)
    plan = memplan.plan_of(net)
    assert plan is not None
    return plan


@pytest.fixture(params=[None, "1GiB"], ids=["device", "host"])
def host(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {} if request.param is None else {"host_budget": request.param, "link": PCIE}


@pytest.mark.parametrize("name", quickly(OPTIMIZERS, "fused AdamW", "foreach Adam", "Adafactor"))
def test_three_steps_are_the_bits_of_the_plain_loop(name: str, host: dict[str, Any]) -> None:
    plain, sample = MODELS["handmade"](0)
    net = copy.deepcopy(plain)
    start = copied(dict(net.named_parameters()))
    expected = steps(plain, sample, OPTIMIZERS[name](plain.parameters()))
    optimizer = OPTIMIZERS[name](net.parameters())
    plan = planned(net, sample, optimizer, **host)
    assert bool(host_resident_bytes(plan.problem.graph)) is bool(host)
    assert_same_bits(expected, steps(net, sample, optimizer))
    assert all(p.grad is None and not torch.equal(p, start[n]) for n, p in net.named_parameters())


def tied(dtype: torch.dtype) -> tuple[nn.Module, Sample]:
    net, sample = MODELS["gpt2"](0)  # its embedding is its head
    return net.to(dtype), sample


def frozen() -> tuple[nn.Module, Sample]:
    net, sample = MODELS["llama"](0)
    for parameter in net.model.layers[1].parameters():
        parameter.requires_grad_(False)
    return net, sample


def lora() -> tuple[nn.Module, Sample]:
    peft = pytest.importorskip("peft")
    net, sample = MODELS["llama"](0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        return peft.get_peft_model(net, config).train(), sample


CASES = {"tied": lambda: tied(torch.float32), "bfloat16": lambda: tied(torch.bfloat16), "frozen": frozen, "lora": lora}


@pytest.mark.parametrize("case", quickly(CASES, "lora"))
def test_kinds_of_models(case: str, host: dict[str, Any]) -> None:
    plain, sample = CASES[case]()
    net = copy.deepcopy(plain)
    start = copied(dict(net.named_parameters()))
    expected = steps(plain, sample, two_groups(plain))
    optimizer = two_groups(net)
    options: dict[str, Any] = {"costs": "estimate", "optimizer": optimizer, "update": "backward", **host}
    memplan.apply(net, sample, 0.5 if host else 0.75, **options)
    plan = memplan.plan_of(net)
    assert plan is not None
    assert not host or plan.offloaded_bytes
    assert_same_bits(expected, steps(net, sample, optimizer))
    moved = {n for n, p in net.named_parameters() if not torch.equal(p, start[n])}
    assert moved == {n for n, p in net.named_parameters() if p.requires_grad}
    assert all(p.grad is None for p in net.parameters())


def states(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    kept = [t for p in parameters for t in optimizer.state[p].values()]
    return [t for t in kept if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("name", quickly(OPTIMIZERS, "AdamW"))
def test_bytes_are_the_predicted_ones(name: str, host: dict[str, Any]) -> None:
    """From the second step on, when the optimizer has its state; the first, in which that is made, holds no more."""
    net, sample = MODELS["gpt2"](0)
    optimizer = OPTIMIZERS[name](net.parameters())
    plan = planned(net, sample, optimizer, **host)
    at_home = {v.name for v in plan.problem.graph.values if v.fetched}
    here = [p for n, p in net.named_parameters() if n not in at_home]
    there = [p for n, p in net.named_parameters() if n in at_home]
    for step in range(2):
        streams = CountingStreams(0)
        transfers = planned_forward(net).steps[0].runner.store.transfers  # type: ignore[union-attr]
        transfers.slabs.clear()  # so that the step's host memory is new, and counted
        transfers._streams = streams
        outside = [*there, *(states(optimizer, there) if step else [])]
        inside = [*here, *(states(optimizer, here) if step else [])]
        with DeviceMeter(streams, storage_bytes(outside)) as meter:
            meter.register([outside, inside, list(net.buffers()), sample])
            output = call(net, sample)
            output.loss.backward()
            optimizer.step()
        assert meter.device_peak_bytes <= plan.live_peak_bytes
    assert storage_bytes(states(optimizer, here)) == plan.problem.extra_resident_bytes
    assert storage_bytes(states(optimizer, there)) == plan.problem.extra_host_bytes
    assert meter.device_peak_bytes == max(live_peaks(plan))


def test_gradients_of_the_whole_model_never_exist_at_once() -> None:
    net, sample = MODELS["gpt2"](0)
    optimizer = OPTIMIZERS["SGD"](net.parameters())
    options = {"costs": "estimate", "optimizer": optimizer}
    kept = memplan.plan(net, sample, 1.0, **options)  # type: ignore[arg-type]
    freed = memplan.plan(net, sample, 1.0, update="backward", **options)  # type: ignore[arg-type]
    assert kept.problem.update_bytes and not freed.problem.update_bytes
    gradients = sum(v.size_bytes for v in kept.problem.graph.values if v.role == "gradient")
    assert freed.timeline.live_bytes[-1] == kept.timeline.live_bytes[-1] - gradients
    assert freed.baseline_peak_bytes <= kept.baseline_peak_bytes
    assert freed.floor_bytes < kept.floor_bytes


def test_what_was_updated_is_not_read_again() -> None:
    net, sample = MODELS["handmade"](0)
    optimizer = OPTIMIZERS["SGD"](net.parameters())
    plan = memplan.plan(net, sample, 1.0, costs="estimate", optimizer=optimizer, update="backward")
    values, schedule = plan.problem.graph.values, list(plan.schedule)
    surfaced = next(i for i, s in enumerate(schedule) if isinstance(s, SurfaceGrads) and values[s.values[0]].updates)
    (parameter, *_) = values[schedule[surfaced].values[0]].parameters  # type: ignore[union-attr]
    reader = next(i for i, op in enumerate(plan.problem.graph.ops) if parameter in op.inputs)
    with pytest.raises(IllegalSchedule, match="has been handed over"):
        simulate(plan.problem, (*schedule[: surfaced + 1], Compute(reader), *schedule[surfaced + 1 :]))


@CALM
@given(random_problems(), st.lists(st.booleans(), min_size=1, max_size=9), st.booleans())
def test_orders_with_updates_are_legal_and_keep_the_budget(problem: Problem, picks: list[bool], host: bool) -> None:
    """Whatever an order runs again, parameters are updated when nothing reads them any more."""
    problem = with_random_updates(replace(problem, accumulate=False), picks)
    if host:
        problem = with_random_homes(problem, picks)
    problem = replace(problem, link=PCIE)
    for order in [tuple(o.tolist()) for o in some_orders(flatten(problem))[:8]]:
        low = least_bytes(problem, order)
        for budget in (low, 2 * low):
            schedule = place_copies(problem, order, budget)
            assert schedule is not None
            assert simulate(problem, schedule).peak_bytes <= budget
        if not host:
            plain = problem.all_on_device
            timeline = simulate(problem, schedule_of(problem.graph, order))
            assert simulate(plain, schedule_of(plain.graph, order)).time_s == timeline.time_s


def test_the_cpu_updates_beside_the_step_or_after_it() -> None:
    """The lane of the CPU: updates one after the other, and the step ends with the last."""
    net, sample = MODELS["handmade"](0)
    optimizer = OPTIMIZERS["SGD"](net.parameters())
    both: dict[str, Any] = {"costs": "estimate", "optimizer": optimizer, "host_budget": "1GiB", "link": PCIE}
    low = memplan.plan(net, sample, 1.0, costs="estimate", optimizer=optimizer).floor_bytes
    for update in ("step", "backward"):
        plan = memplan.plan(net, sample, int(0.6 * low), update=update, **both)
        values = plan.problem.graph.values
        sizes = [v.size_bytes for v in values if v.role == "gradient" and v.home == "host"]
        assert len(sizes) > 1 and plan.problem.host_update_s_per_byte > 0
        without = simulate(replace(plan.problem, host_update_s_per_byte=0.0), plan.schedule)
        slow = simulate(replace(plan.problem, host_update_s_per_byte=1.0), plan.schedule)  # slower than all else
        if update == "step":
            assert slow.time_s == pytest.approx(without.time_s + sum(sizes))
        else:
            assert sum(sizes) < slow.time_s < without.time_s + sum(sizes)
        assert slow.time_s == pytest.approx(slow.stall_s + without.time_s - without.stall_s)
        assert offload_bound_s(plan.problem, plan.problem.budget_bytes or 0) <= plan.time_s


def with_random_updates(problem: Problem, picks: list[bool]) -> Problem:
    """Some gradients update a parameter each, which takes memory for a while."""
    values = list(problem.graph.values)
    parameters = [i for i, v in enumerate(values) if v.role == "parameter"]
    for index, value in enumerate(values):
        if value.role == "gradient" and parameters and picks[index % len(picks)]:
            parameter = parameters[index % len(parameters)]
            values[index] = replace(value, held=False, updates=True, parameters=(parameter,))
            values[index] = replace(values[index], update_bytes=7 * (index % 3))
    return replace(problem, graph=replace(problem.graph, values=tuple(values)))


def test_a_plan_with_updates_survives_a_file(tmp_path: Path) -> None:
    net, sample = MODELS["handmade"](0)
    optimizer = OPTIMIZERS["AdamW"](net.parameters())
    plan = planned(net, sample, optimizer)
    plan.save(tmp_path / "plan.json")
    loaded = memplan.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    memplan.apply(net, sample, plan=loaded, optimizer=optimizer, update="backward", costs="estimate")
    with pytest.raises(memplan.PlanMismatch, match="updates"):
        memplan.apply(net, sample, plan=loaded, optimizer=optimizer, costs="estimate")


def test_the_optimizer_goes_on_from_a_checkpoint() -> None:
    plain, sample = MODELS["handmade"](0)
    net = copy.deepcopy(plain)
    optimizers = [OPTIMIZERS["AdamW"](n.parameters()) for n in (plain, net)]
    memplan.apply(net, None, 1.0, optimizer=optimizers[1], update="backward", costs="estimate")
    results = []
    for model, optimizer in zip((plain, net), optimizers):
        kept = copy.deepcopy((steps(model, sample, optimizer), model.state_dict(), optimizer.state_dict()))
        steps(model, sample, optimizer)
        model.load_state_dict(kept[1])
        optimizer.load_state_dict(kept[2])
        results.append((kept[0], steps(model, sample, optimizer)))
    assert_same_bits(results[0], results[1])
    memplan.remove(net)
    loss_of(call(net, sample)).backward()
    assert all(p.grad is not None for p in net.parameters())
    assert not optimizers[1]._optimizer_step_pre_hooks


def test_what_cannot_be_honoured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    net, sample = net_and_sample()
    adam = torch.optim.AdamW(net.parameters())
    both: dict[str, Any] = {"optimizer": adam, "update": "backward", "costs": "estimate"}

    class Own(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None: ...

    for options, reason in (
        ({**both, "optimizer": None}, "needs optimizer="),
        ({**both, "accumulate": True}, "accumulated"),
        ({**both, "grads": "edges"}, "edges"),
        ({**both, "optimizer": torch.optim.LBFGS(net.parameters())}, "LBFGS"),
        ({**both, "optimizer": Own(net.parameters(), {})}, "Own"),
        ({**both, "update": "never"}, "never"),
    ):
        with pytest.raises(ValueError, match=reason):
            memplan.apply(net, sample, 1.0, **options)
    hook = next(net.parameters()).register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match="other hooks"):
        memplan.apply(net, sample, 1.0, **both)
    hook.remove()
    memplan.apply(net, sample, 1.0, **both)
    start = copied(dict(net.named_parameters()))
    with pytest.raises(RuntimeError, match="GradScaler"):
        (65536 * net(sample)).backward()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="one process alone"):
        net(sample).backward()
    monkeypatch.undo()
    assert_same_bits(start, copied(dict(net.named_parameters())))
    net(sample).backward()
    updated = copied(dict(net.named_parameters()))
    with pytest.raises(RuntimeError, match=r"second backward before optimizer.step"):
        net(sample).backward()
    with pytest.raises(RuntimeError, match="closure"):
        adam.step(lambda: 0.0)
    assert_same_bits(updated, copied(dict(net.named_parameters())))
    adam.step()
    net(sample).backward()


@pytest.mark.parametrize("change", ["reversed", "moved", "taken out"])
def test_groups_may_change_between_steps(change: str) -> None:
    """Each parameter is updated by the group that it is in by then, or not at all."""

    def trained(plan: bool) -> Any:
        torch.manual_seed(0)
        net, sample = net_and_sample()
        first, *others = net.parameters()
        slow = {"params": others, "lr": 0.01}
        optimizer = torch.optim.SGD([{"params": [first]}, slow], lr=0.1, momentum=0.9)
        if plan:
            memplan.apply(net, sample, 1.0, optimizer=optimizer, update="backward", costs="estimate")
        for step in range(4):
            net(sample).backward()
            optimizer.step()
            optimizer.zero_grad()
            groups = optimizer.param_groups
            if step == 1 and change == "reversed":
                groups.reverse()
            elif step == 1:
                groups[0]["params"].remove(first)
                groups[1]["params"] += [first] * (change == "moved")
            first.grad = None
        return copied(list(net.parameters()))

    assert_same_bits(trained(plan=True), trained(plan=False))


def test_parameters_in_one_memory_are_refused() -> None:
    torch.manual_seed(0)
    net, sample = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options: dict[str, Any] = {"optimizer": optimizer, "update": "backward", "costs": "estimate"}
    memplan.apply(net, sample, "1GiB", **options)
    net[2].weight.data = net[0].weight.data  # type: ignore[assignment]
    before = copied(list(net.parameters()))
    with pytest.raises(ValueError, match="the same memory twice"):
        net(sample).sum().backward()
    assert_same_bits(before, copied(list(net.parameters())))
    memplan.remove(net)
    with pytest.raises(ValueError, match="the same memory twice"):
        memplan.apply(net, sample, "1GiB", **options)


def test_a_failed_update_on_the_host_is_told() -> None:
    net, sample = MODELS["handmade"](0)
    optimizer = OPTIMIZERS["SGD"](net.parameters())
    planned(net, sample, optimizer, host_budget="1GiB", link=PCIE)
    before = list(net.state_dict())
    updates = planned_forward(net)._planner.placement.updates  # type: ignore[union-attr]
    updates.reads_done = failing
    with pytest.raises(MemoryError):
        loss_of(call(net, sample)).backward()
    assert list(net.state_dict()) == before


def failing(*arguments: object) -> None:
    raise MemoryError


def two_groups(net: nn.Module) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not, each with a rate of its own; scale parameters are large steps, so all move."""
    trainable = [p for p in net.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trainable if p.dim() > 1], [p for p in trainable if p.dim() < 2]
    groups = [{"params": matrices, "lr": 0.03, "weight_decay": 0.1}]
    return torch.optim.AdamW(groups + ([{"params": vectors, "lr": 0.02}] if vectors else []))


def test_the_trainer_does_not_clip_what_is_gone(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from memplan.integrations.huggingface import MemplanCallback

    callback = MemplanCallback(1.0, count_optimizer=True, update="backward")
    for norm, reason in ((1.0, "max_grad_norm"), (0.0, None)):
        args = transformers.TrainingArguments(str(tmp_path), max_grad_norm=norm, use_cpu=True, report_to=[])
        if reason is None:
            callback.on_init_end(args, transformers.TrainerState(), transformers.TrainerControl())
            continue
        with pytest.raises(ValueError, match=reason):
            callback.on_init_end(args, transformers.TrainerState(), transformers.TrainerControl())


def test_a_model_that_nobody_has_any_more_is_freed() -> None:
    net, sample = MODELS["handmade"](0)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    memplan.apply(net, sample, 1.0, optimizer=optimizer, update="backward", costs="estimate", host_budget="1GiB")
    loss_of(call(net, sample)).backward()
    optimizer.step()
    left = [weakref.ref(thing) for thing in (net, optimizer, next(net.parameters()))]
    del net, optimizer
    gc.collect()
    assert [ref() for ref in left] == [None, None, None]
