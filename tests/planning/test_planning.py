"""Planning itself: it stays in the budget, leaves no trace, keeps what it measured, and counts the optimizer."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import os
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import nn

import memplan
from memplan.__main__ import main
from memplan.capture.capture import capture
from memplan.costs import bench
from memplan.costs.measure import measure
from tests.support.meter import LiveMeter, profiler_peak, storage_bytes
from tests.support.parameters import quickly
from tests.support.small import optimizer_needs
from tests.support.zoo import MODELS, assert_same_bits, copied, loss_of, run_steps, tensors_of


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("resnet50", "unet"))]
)
def test_capture_takes_no_memory_and_timing_stays_in_the_budget(
    name: str, cost_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, sample = MODELS[name](0)
    resident = [*net.parameters(), *net.buffers(), *tensors_of([sample])]
    resident_bytes = storage_bytes(resident)
    # Costs an allocator may be asked for while fakes are made: numbers, generator states, no tensors of the model.
    assert profiler_peak(lambda: capture(net, net.forward, sample), 0) < max(100_000, resident_bytes // 10)
    captured = capture(net, net.forward, sample)
    floor_bytes = memplan.plan(net, sample, 1.0).floor_bytes
    tensors = dict([*net.named_parameters(), *net.named_buffers()])
    inputs = captured.call.tensors
    monkeypatch.setenv("MEMPLAN_CACHE_DIR", str(cost_cache / "of nothing"))
    meter = LiveMeter()
    meter.register(resident)
    with meter:
        measure(
            captured.traced,
            lambda kind, name, position: inputs[position] if kind == "input" else tensors[name],
            budget_bytes=floor_bytes,
        )
    assert meter.peak_bytes <= floor_bytes


def test_an_op_that_does_not_fit_alone_is_named(cost_cache: Path) -> None:
    net, sample = MODELS["gpt2"](0)
    resident_bytes = memplan.plan(net, sample, 1.0, costs="estimate").problem.resident_bytes
    with pytest.raises(memplan.BudgetInfeasible, match=r"aten\..* in .* needs .* even alone"):
        memplan.plan(net, sample, resident_bytes + 1000)


@pytest.mark.parametrize(
    ("budget", "options"),
    quickly(
        itertools.product(("8KiB", 1), ({}, {"host_budget": "1GiB"}, {"costs": "estimate"})),
        *(("8KiB", {}), ("8KiB", {"host_budget": "1GiB"}), (1, {"costs": "estimate"})),
    ),
    ids=str,
)
def test_a_refusal_names_a_budget_that_can_be_met(budget: Any, options: Any, cost_cache: Path) -> None:
    """Also where the budget is less than what is resident."""
    net, sample = MODELS["gpt2"](0)
    with pytest.raises(memplan.BudgetInfeasible) as refused:
        memplan.apply(net, sample, budget, **options)
    floor_bytes = refused.value.floor_bytes
    assert floor_bytes is not None and f"({floor_bytes} bytes)" in str(refused.value)
    plan = memplan.plan_of(memplan.apply(net, sample, floor_bytes, **options))
    assert plan is not None and plan.peak_bytes <= floor_bytes


def test_planning_changes_nothing() -> None:
    net, sample = MODELS["handmade"](0)
    torch.manual_seed(3)
    before = copied(dict(net.state_dict())), torch.get_rng_state(), set(vars(net))
    memplan.plan(net, sample, 0.9)
    memplan.explore(net, sample)
    assert_same_bits(before[0], dict(net.state_dict()))
    assert torch.equal(before[1], torch.get_rng_state())
    assert before[2] == set(vars(net))
    assert all(p.grad is None for p in net.parameters())


def test_measured_costs_are_kept_on_disk(cost_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, sample = MODELS["handmade"](0)
    first = memplan.plan(net, sample, 0.95)
    (file,) = cost_cache.glob("costs-*.json")
    monkeypatch.setattr(torch.profiler, "profile", lambda **kwargs: pytest.fail("measured again"))
    assert memplan.plan(net, sample, 0.95).problem.costs == first.problem.costs
    monkeypatch.undo()
    monkeypatch.setenv("MEMPLAN_CACHE_DIR", str(cost_cache))
    file.write_text('{"format": 1, "facts": {"damaged')
    memplan.plan(net, sample, 0.95)  # measures again
    assert len(file.read_text()) > 1000


def test_what_other_kernels_took_does_not_count(cost_cache: Path) -> None:
    net, sample = MODELS["handmade"](0)
    memplan.plan(net, sample, 0.95)
    with torch.backends.cudnn.flags(enabled=False):
        memplan.plan(net, sample, 0.95)
    assert len(list(cost_cache.glob("costs-*.json"))) == 2


def facts_in(folder: Path) -> dict[str, list[float]]:
    (file,) = folder.glob("costs-*.json")
    return dict(json.loads(file.read_text())["facts"])


def slowed(monkeypatch: pytest.MonkeyPatch, spread: bool) -> None:
    """A busy machine: each run of an op takes a second, or each of five takes another time."""
    runs = itertools.cycle((3.0, 1.0, 2.0, 4.0, 9.0) if spread else (1.0,))
    monkeypatch.setattr(bench, "_timed", lambda *_: next(runs))


def test_costs_of_a_busy_machine_are_measured_again_until_repeats_agree(
    cost_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, sample = MODELS["handmade"](0)
    slowed(monkeypatch, spread=True)
    slow = memplan.plan(net, sample, 1.0)
    assert all(doubts == 1 for _, _, doubts, _ in facts_in(cost_cache).values())
    assert memplan.plan(net, sample, 1.0).problem.costs == slow.problem.costs  # of one process
    monkeypatch.setattr(os, "getpid", lambda: -1)  # another
    memplan.plan(net, sample, 1.0)
    assert all(doubts == 2 for _, _, doubts, _ in facts_in(cost_cache).values())
    monkeypatch.setattr(os, "getpid", lambda: -2)
    slowed(monkeypatch, spread=False)
    assert memplan.plan(net, sample, 1.0).problem.costs.time_s == (1.0,) * len(slow.problem.graph.ops)
    assert {doubts for _, _, doubts, _ in facts_in(cost_cache).values()} == {-1}
    monkeypatch.setattr(os, "getpid", lambda: -3)
    monkeypatch.setattr(torch.profiler, "profile", lambda **kwargs: pytest.fail("measured again"))
    memplan.plan(net, sample, 1.0)


def test_repeats_that_never_agree_are_measured_three_times(cost_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, sample = MODELS["handmade"](0)
    slowed(monkeypatch, spread=True)
    for process in range(-4, 0):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        memplan.plan(net, sample, 1.0)
    assert {(doubts, process) for _, _, doubts, process in facts_in(cost_cache).values()} == {(-1, -2)}


def test_costs_are_doubted_once_where_the_first_step_takes_much_less(
    cost_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    net, sample = MODELS["handmade"](0)
    for again in (False, True):
        with monkeypatch.context() as patch:
            slowed(patch, spread=False)
            memplan.apply(net, sample, 1.0)
        run_steps(net, sample)
        told = [r for r in caplog.records if "clear-costs" in r.getMessage()]
        assert len(told) == 1 + again
        assert {doubts for _, _, doubts, _ in facts_in(cost_cache).values()} == {-1 if again else 1}


def test_one_command_forgets_what_is_kept(cost_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net, sample = MODELS["handmade"](0)
    memplan.plan(net, sample, 1.0)
    assert main(["clear-costs"]) == 0
    assert [file.suffix for file in cost_cache.iterdir()] == [".lock"]
    told = capsys.readouterr().out
    assert told == f"memplan: 3 files of measured costs and plans removed from {cost_cache}\n"


def test_costs_of_earlier_versions_are_read(cost_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, sample = MODELS["handmade"](0)
    first = memplan.plan(net, sample, 1.0)
    (file,) = cost_cache.glob("costs-*.json")
    content = json.loads(file.read_text())
    content["facts"] = {key: row[:2] for key, row in content["facts"].items()}
    file.write_text(json.dumps(content))
    monkeypatch.setattr(torch.profiler, "profile", lambda **kwargs: pytest.fail("measured again"))
    assert memplan.plan(net, sample, 1.0).problem.costs == first.problem.costs


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    "adamw-foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-3, foreach=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_declared_optimizer_is_counted(name: str) -> None:
    """From the second step on, when its state is there, the whole of forward, backward and update is in the plan."""
    net, sample = MODELS["gpt2"](0)
    optimizer = OPTIMIZERS[name](net.parameters())
    memplan.apply(net, sample, 0.8, optimizer=optimizer, costs="measure")
    plan = memplan.plan_of(net)
    assert plan is not None
    net(**sample).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    meter = LiveMeter()
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    meter.register([*net.parameters(), *net.buffers(), *tensors_of([sample]), *state])
    with meter:
        output = net(**sample)
        output.loss.backward()
        optimizer.step()
    assert meter.peak_bytes <= plan.live_peak_bytes
    assert storage_bytes(state) == plan.problem.extra_resident_bytes


def test_foreseeing_the_optimizer_leaves_it_alone() -> None:
    net, sample = MODELS["gpt2"](0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = copied(dict(net.state_dict()))
    state_bytes, _ = optimizer_needs(optimizer, torch.device("cpu"))
    assert not optimizer.state
    assert_same_bits(before, dict(net.state_dict()))
    loss_of(net(**sample)).backward()
    optimizer.step()
    scheduler.step()
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    assert state_bytes == storage_bytes(state)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    net, sample = MODELS["handmade"](0)
    with pytest.raises(memplan.UnsupportedModel, match="LBFGS"):
        memplan.plan(net, sample, 1.0, optimizer=torch.optim.LBFGS(net.parameters()), costs="estimate")


def test_budgets_in_parts() -> None:
    net, sample = MODELS["gpt2"](0)
    whole = memplan.plan(net, sample, 1.0, costs="estimate")
    limit = whole.activation_peak_bytes // 2
    plan = memplan.plan(net, sample, memplan.Budget(activations=limit), costs="estimate")
    assert plan.activation_peak_bytes <= limit
    both = memplan.Budget(device=plan.floor_bytes + 1000, activations=limit)
    assert memplan.plan(net, sample, both, costs="estimate").peak_bytes <= plan.floor_bytes + 1000
    with pytest.raises(ValueError, match="no limit"):
        memplan.plan(net, sample, memplan.Budget(), costs="estimate")


def test_accumulated_gradients_are_counted() -> None:
    """With accumulate= the gradients of earlier micro-batches are there while the step runs."""
    net, sample = MODELS["gpt2"](0)
    memplan.apply(net, sample, 0.8, accumulate=True)
    plan = memplan.plan_of(net)
    assert plan is not None
    net(**sample).loss.backward()
    meter = LiveMeter()
    meter.register([*net.parameters(), *net.buffers(), *tensors_of([sample]), *(p.grad for p in net.parameters())])
    with meter:
        output = net(**sample)
        output.loss.backward()
    assert meter.peak_bytes <= plan.live_peak_bytes
    tangents = sum(plan.problem.graph.values[v].size_bytes for v in plan.problem.graph.tangents)  # freed by now
    assert meter.live_bytes == plan.timeline.live_bytes[-1] - tangents


def test_the_report_says_what_a_user_asks() -> None:
    net, sample = MODELS["gpt2"](0)
    plan = memplan.plan(net, sample, 0.5)
    text = plan.report()
    for words in ("budget", "unplanned", "lower bound", "smallest budget", "recomputed:", "transformer.h.", "AdamW"):
        assert words in text
    assert isinstance(copy.deepcopy(net), nn.Module)


@pytest.mark.parametrize("options", [{}, {"host_budget": "1GiB", "link": memplan.Link(1e9, 1e9)}], ids=str)
@pytest.mark.parametrize("kind", [pytest.param(torch.optim.AdamW, marks=pytest.mark.slow), torch.optim.SGD])
def test_the_report_says_that_no_optimizer_was_given_only_where_none_was(kind: Any, options: Any) -> None:
    net, sample = MODELS["vit"](0)
    optimizer = kind(net.parameters(), 1e-3)
    options = {"costs": "estimate", **options}
    assert "no optimizer was given" in memplan.plan(net, sample, 0.7, **options).report()
    assert "no optimizer was given" not in memplan.plan(net, sample, 0.9, optimizer=optimizer, **options).report()


def test_the_gap_is_stated_of_the_time_and_of_the_extra_time() -> None:
    plan = memplan.plan(*MODELS["gpt2"](0), 0.5)
    least_s = plan.lower_bound_s - plan.baseline_time_s
    assert least_s > 0 and plan.overhead_gap is not None
    assert plan.gap == pytest.approx((plan.time_s - plan.lower_bound_s) / plan.lower_bound_s)
    assert plan.overhead_gap == pytest.approx((plan.time_s - plan.baseline_time_s) / least_s - 1)
    assert f"the extra time is at most {plan.overhead_gap:.1%} over the least" in plan.report()
    loose = dataclasses.replace(plan, lower_bound_s=plan.baseline_time_s)
    assert loose.overhead_gap is None and "the extra time" not in loose.report()


def test_a_plan_as_a_networkx_graph() -> None:
    model, sample = MODELS["handmade"](0)
    plan = memplan.explore(model, sample, costs="estimate")[0]
    step, view = plan.problem.graph, plan.graph()
    assert nx.is_directed_acyclic_graph(view)
    assert view.number_of_nodes() == len(step.ops) + len(step.values)
    for (kind, index), (other_kind, other) in view.edges:
        if kind == "value" and other_kind == "op":
            assert index in step.ops[other].inputs
    assert any(data.get("reuses") for _, _, data in view.edges(data=True)), "the model writes in place"
    runs, times_s = (nx.get_node_attributes(view, key) for key in ("runs", "time_s"))
    assert sum(runs.values()) == len(step.ops) + len(plan.recomputed)
    assert sum(times_s[op] * runs[op] for op in runs) == pytest.approx(plan.time_s)
    decided = {node: how for node, how in view.nodes(data="decision") if how is not None}
    assert set(decided.values()) == {"keep", "recompute"}
    for node, how in decided.items():
        ((maker, _),) = [edge for edge in view.in_edges(node) if edge[0][0] == "op"]
        assert (runs[maker] > 1) == (how == "recompute")


class PutsImagesIntoText(nn.Module):
    """Rows of images in the place of some tokens, as in language models that see."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.Embedding(9, 64), nn.Linear(64, 64)

    def forward(self, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        return self.text(ids).masked_scatter((ids == 7)[..., None], self.image(images)).square().mean()


def test_scratch_is_that_of_masks_that_take_something(cost_cache: Path) -> None:
    ids = torch.zeros(4, 64, dtype=torch.int64)
    ids[:, :4] = 7
    plan = memplan.plan(PutsImagesIntoText(), (ids, torch.randn(16, 64)), 1.0)
    (index,) = (i for i, op in enumerate(plan.problem.graph.ops) if "masked_scatter_backward" in op.kind)
    given = torch.randn(4, 64, 64), (ids == 7)[..., None].expand(4, 64, 64), [16, 64]
    needed_bytes = profiler_peak(lambda: torch.ops.aten.masked_scatter_backward(*given)) - 16 * 64 * 4
    assert plan.problem.costs.scratch_bytes[index] >= needed_bytes > 0
