"""A call that no plan serves gets a plan of its own and the plain bits; what can't be planned runs as it is."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.costs.known_costs import known_margin, remember_margin
from memplan.installed import choice
from memplan.installed.planned_forward import planned_forward
from memplan.planning import plan_search
from memplan.runtime.program.step import PlannedStep, UnplannedStep
from memplan.units import format_bytes, parse_bytes
from tests.capture.test_key import MODEL_CHANGES, SURROUNDINGS, Keyed, outcome, smallest_plan
from tests.support.meter import LiveMeter
from tests.support.parameters import quickly
from tests.support.zoo import MODELS, Sample, assert_same_bits, call, run_steps


def planned_twin(net: nn.Module, sample: Sample, budget: Any = 0.7, **options: Any) -> nn.Module:
    return memplan.apply(copy.deepcopy(net), sample, budget, costs="estimate", **options)


def kinds(net: nn.Module) -> list[type]:
    planned = planned_forward(net)
    assert planned is not None
    return [type(step) for step in planned.steps]


# -- every change that the key notices --------------------------------------------------------------------------------


def plain_and_planned() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    net, sample = Keyed().train(), torch.randn(64, 8)
    planned = memplan.apply(copy.deepcopy(net), sample, smallest_plan().floor_bytes + 4096, costs="estimate")
    return net, planned, sample


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow) if number % 5 else n  # a fifth of them by default
        for number, n in enumerate(MODEL_CHANGES)
        if n != "parameter-dtype"  # which eager refuses too
    ],
)
def test_a_changed_model_gives_the_plain_models_bits(name: str) -> None:
    plain, planned, sample = plain_and_planned()
    change, _ = MODEL_CHANGES[name]
    results = []
    for net in (plain, planned):
        torch.manual_seed(2)  # some changes draw new weights
        with change(net):
            results.append([outcome(net, lambda net=net: net(sample)) for _ in range(3)])
        results[-1].append(outcome(net, lambda net=net: net(sample)))
    assert_same_bits(*results)
    assert PlannedStep in kinds(planned)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("name", quickly(SURROUNDINGS, "autocast", "deterministic", "math-only", "default-dtype"))
def test_changed_surroundings_give_the_plain_models_bits(name: str) -> None:
    plain, planned, sample = plain_and_planned()
    change, _ = SURROUNDINGS[name]
    results = []
    for net in (plain, planned):
        with change(net):
            results.append([outcome(net, lambda net=net: net(sample)) for _ in range(2)])
        results[-1].append(outcome(net, lambda net=net: net(sample)))
    assert_same_bits(*results)


CALLS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "shorter": lambda net, x: net(x[:32].clone()),
    "strides": lambda net, x: net(x.t().contiguous().t()),
    "requires-grad": lambda net, x: net(x.clone().requires_grad_()),
    "number": lambda net, x: net(x, False),
    "keyword": lambda net, x: net(x, factor=2.0),
    "twice-the-same": lambda net, x: net(x, other=x[:, :8]),
    "two-tensors": lambda net, x: net(x, other=x.clone()),
}


def test_changed_arguments_give_the_plain_models_bits() -> None:
    plain, planned, sample = plain_and_planned()
    for name in [*CALLS, *reversed(CALLS)]:
        run = CALLS[name]
        results = [outcome(net, lambda net=net, run=run: run(net, sample)) for net in (plain, planned)]
        assert_same_bits(*results, name)


# -- models of libraries ----------------------------------------------------------------------------------------------


def with_changes(name: str) -> list[tuple[str, Callable[[Any], None], Sample]]:
    """(what, change of the model, sample of the calls after it) one after another."""
    _, sample = MODELS[name](0)
    assert isinstance(sample, dict)
    full, padded = torch.ones(2, 64, dtype=torch.long), torch.ones(2, 64, dtype=torch.long)
    padded[1, 40:] = 0

    def nothing(net: Any) -> None: ...
    def one_in_eval(net: Any) -> None:
        next(m for m in net.modules() if isinstance(m, nn.Dropout)).eval()

    def other_dropout(net: Any) -> None:
        for module in net.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3

    return [
        ("items", nothing, {**sample, "num_items_in_batch": 7}),
        ("other items", nothing, {**sample, "num_items_in_batch": 9}),
        ("items as a tensor", nothing, {**sample, "num_items_in_batch": torch.tensor(11)}),
        ("full mask", nothing, {**sample, "attention_mask": full}),
        ("padded mask", nothing, {**sample, "attention_mask": padded}),
        ("one in eval", one_in_eval, sample),
        ("other dropout", other_dropout, sample),
        ("full mask again", nothing, {**sample, "attention_mask": full}),
        ("hidden states", nothing, {**sample, "output_hidden_states": True}),
    ]


@pytest.mark.parametrize(
    ("wanted", "plans"),
    [(("items", "full mask", "padded mask", "other dropout", "full mask again"), 3), (None, 5)],
    ids=["some", "all"],
)
@pytest.mark.slow
def test_a_library_model_through_many_changes(
    wanted: tuple[str, ...] | None, plans: int, plans_made: Callable[[], int]
) -> None:
    net, sample = MODELS["gpt2"](0)
    planned = planned_twin(net, sample)
    for what, change, changed in with_changes("gpt2"):
        if wanted is not None and what not in wanted:
            continue
        for each in (net, planned):
            change(each)
        assert_same_bits(run_steps(net, changed, 2), run_steps(planned, changed, 2), what)
    assert plans_made() > plans
    assert set(kinds(planned)) == {PlannedStep}


@pytest.mark.slow
def test_channels_last() -> None:
    net, sample = MODELS["resnet50"](0)
    planned = planned_twin(net, sample, 1.0)
    last = {k: v.contiguous(memory_format=torch.channels_last) if v.dim() == 4 else v for k, v in sample.items()}
    assert_same_bits(run_steps(net, last, 2), run_steps(planned, last, 2), "inputs")
    for each in (net, planned):
        each.to(memory_format=torch.channels_last)
    assert_same_bits(run_steps(net, last, 2), run_steps(planned, last, 2), "inputs and weights")


# -- changing batches -------------------------------------------------------------------------------------------------


def lengths(sample: dict[str, Any], length: int) -> dict[str, Any]:
    return {k: v[:, :length].clone() if isinstance(v, torch.Tensor) else v for k, v in sample.items()}


def test_a_short_last_batch_is_planned_at_sight_and_kept(plans_made: Callable[[], int]) -> None:
    net, sample = MODELS["llama"](0)
    assert isinstance(sample, dict)
    planned = planned_twin(net, sample, 0.6)
    counts = []
    for length in (64, 48, 64, 48, 64, 48, 64):
        batch = lengths(sample, length)
        assert_same_bits(run_steps(net, batch, 1), run_steps(planned, batch, 1), f"length {length}")
        counts.append(plans_made())
    assert counts[:3] == [0, 1, 1]
    assert counts[3] in (1, 2), "a provisional plan is replaced once"
    assert counts[3:] == [counts[3]] * 4


def test_plans_of_other_shapes_keep_the_first_budget() -> None:
    net, sample = MODELS["llama"](0)
    assert isinstance(sample, dict)
    planned = planned_twin(net, lengths(sample, 48), 0.8)
    budget_bytes = memplan.plan_of(planned).problem.budget_bytes
    for length in (56, 56, 40, 48):
        batch = lengths(sample, length)
        run_steps(planned, batch, 2)
        planned.zero_grad()
        with LiveMeter() as meter:
            meter.register([list(planned.parameters()), list(planned.buffers()), batch])
            out = planned(**batch)
            out.loss.backward()
        plan = memplan.plan_of(planned)
        assert plan.problem.budget_bytes == budget_bytes
        assert meter.peak_bytes <= plan.live_peak_bytes <= budget_bytes
        planned.zero_grad()
        del out


def test_a_batch_that_can_not_fit_is_refused_with_its_floor() -> None:
    net, sample = MODELS["llama"](0)
    assert isinstance(sample, dict)
    floor_bytes = memplan.explore(net, lengths(sample, 16), costs="estimate")[0].floor_bytes
    planned = planned_twin(net, lengths(sample, 16), floor_bytes)
    with pytest.raises(memplan.BudgetInfeasible) as refusal:
        planned(**sample)
    assert refusal.value.floor_bytes > floor_bytes
    batch = lengths(sample, 16)
    assert_same_bits(run_steps(net, batch, 1), run_steps(planned, batch, 1))


def test_prepare_plans_a_ladder_ahead(plans_made: Callable[[], int]) -> None:
    net, sample = MODELS["llama"](0)
    assert isinstance(sample, dict)
    ladder = [lengths(sample, n) for n in (16, 64, 32)]
    planned = planned_twin(net, ladder[1], 0.7)
    plans = memplan.prepare(planned, ladder)
    assert plans[0].peak_bytes < plans[2].peak_bytes <= plans[1].peak_bytes
    for batch in ladder * 2:
        assert_same_bits(run_steps(net, batch, 1), run_steps(planned, batch, 1))
    assert plans_made() == 0
    with pytest.raises(ValueError, match="not planned yet"):
        memplan.prepare(net, ladder)


def test_the_first_call_can_be_the_sample() -> None:
    net, sample = MODELS["gpt2"](0)
    planned = memplan.apply(copy.deepcopy(net), None, 0.6, costs="estimate")
    assert memplan.plan_of(planned) is None
    assert_same_bits(run_steps(net, sample, 3), run_steps(planned, sample, 3))
    assert memplan.plan_of(planned).recomputed


def test_numbers_that_change_with_every_batch_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    net, sample = Keyed().train(), torch.randn(64, 8)
    planned = planned_twin(net, sample, 1.0)
    for number in range(14):
        planned(sample, factor=float(number))
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert "factor" in warning
    assert "as tensors" in warning


def test_plans_that_are_kept_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, sample = Keyed().train(), torch.randn(64, 8)
    planned = planned_twin(net, sample, 1.0)
    (step,) = planned_forward(planned).steps  # type: ignore[union-attr]
    monkeypatch.setattr(choice, "_MOST_KEPT_BYTES", 3 * step.kept_bytes)
    for number in range(2, 8):
        for one in (net, planned):
            one.zero_grad()
            torch.manual_seed(number)
            one(sample, factor=float(number)).sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), planned.parameters()))  # type: ignore[arg-type]
    assert len(planned_forward(planned).steps) == 3  # type: ignore[union-attr]


# -- what backward asks for -------------------------------------------------------------------------------------------


class Outputs(nn.Module):
    """Returns what a loss outside is made of."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 6)
        self.middle: nn.Module = nn.BatchNorm1d(64) if batch_norm else nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.middle(self.first(x)))
        return self.second(hidden), hidden


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "one output": lambda a, b: a.pow(2).mean(),
    "the other": lambda a, b: b.pow(3).mean(),
    "both": lambda a, b: a.pow(2).mean() + b.exp().mean(),
    "transposed": lambda a, b: (a.t() @ b).pow(2).mean(),
    "summed": lambda a, b: a.sum() + b.sum(),
    "a row": lambda a, b: a[0].sum(),
}


@pytest.mark.parametrize(
    ("grads", "batch_norm"),
    [
        ("surface", True),
        ("edges", False),
        pytest.param("surface", False, marks=pytest.mark.slow),
        pytest.param("edges", True, marks=pytest.mark.slow),
    ],
)
def test_any_loss_outside(grads: str, batch_norm: bool) -> None:
    torch.manual_seed(0)
    net, sample = Outputs(batch_norm), torch.randn(64, 8)
    planned = planned_twin(net, sample, 200_000, grads=grads)
    for name in [*LOSSES, *LOSSES]:
        results = [outcome(each, lambda each=each, name=name: LOSSES[name](*each(sample))) for each in (net, planned)]
        assert_same_bits(*results, name)


# -- hooks and Python state -------------------------------------------------------------------------------------------


def test_a_module_with_a_hook_added_later_is_an_island() -> None:
    net, sample = MODELS["gpt2"](0)
    planned = planned_twin(net, sample, 1.0)
    calls: list[int] = []
    handles = [each.transformer.h[1].register_forward_hook(lambda *args: calls.append(1)) for each in (net, planned)]
    assert_same_bits(run_steps(net, sample, 2), run_steps(planned, sample, 2))
    assert len(calls) == 4
    assert kinds(planned)[0] is PlannedStep
    assert [told.partition(" at ")[0] for told in memplan.plan_of(planned).islands] == ["transformer.h.1"]
    for handle in handles:
        handle.remove()
    assert_same_bits(run_steps(net, sample, 2), run_steps(planned, sample, 2))
    assert kinds(planned)[0] is PlannedStep
    assert not memplan.plan_of(planned).islands


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.noise = nn.Linear(8, 8), nn.Linear(8, 8), 0.5

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.last(self.first(x).tanh())
        return {"loss": y.logsumexp(1).mean(), "logits": y}


def _doubled(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out * 2


def _noisy(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    module.calls = getattr(module, "calls", 0) + 1
    return out + torch.zeros_like(out).uniform_(-0.5, 0.5)


@pytest.mark.parametrize("hook", [_doubled, _noisy])
def test_a_loss_outside_of_a_model_whose_hooks_read_no_state(hook: Callable[..., Any]) -> None:
    net, x = WithLoss(), torch.randn(4, 8)
    net.first.register_forward_hook(hook)
    planned, results = planned_twin(net, x, "1GiB"), []
    for each in (net, planned):
        torch.manual_seed(0)
        for _ in range(3):
            each(x)["logits"].square().sum().backward()
        results.append(({n: p.grad for n, p in each.named_parameters()}, getattr(each.first, "calls", 0)))
    assert_same_bits(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert kinds(planned)[0] is PlannedStep


def test_a_hook_that_appends_to_a_list_runs_once_a_step() -> None:
    calls: list[int] = []
    net, x = WithLoss(), torch.randn(4, 8)
    net.first.register_forward_hook(lambda *args: calls.append(1))
    memplan.apply(net, x, "1GiB", costs="estimate")
    calls.clear()
    with pytest.raises(memplan.PlanMismatch, match="Forward can't run again"):
        net(x)["logits"].sum().backward()
    assert calls == [1]


class BranchesLater(Outputs):
    """Takes a branch on a computed number once it is told to."""

    branches = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = sum(output.pow(2).mean() for output in super().forward(x))
        return loss * 2 if self.branches and loss.item() > 0 else loss


def test_what_can_not_be_captured_any_more_runs_unplanned_where_that_fits(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    net, sample = BranchesLater(), torch.randn(64, 8)
    planned = planned_twin(net, sample, 200_000)
    for branches, kind in ((False, PlannedStep), (True, UnplannedStep), (False, PlannedStep)):
        net.branches = planned.branches = branches
        assert_same_bits(run_steps(net, sample, 2), run_steps(planned, sample, 2))
        assert kinds(planned)[0] is kind
    assert sum("run unplanned" in r.message for r in caplog.records) == 1


# -- measured against predicted ---------------------------------------------------------------------------------------


def test_one_line_compares_measured_with_predicted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memplan")
    net, sample = MODELS["gpt2"](0)
    planned = memplan.apply(net, sample, 0.7)
    live_bytes = memplan.plan_of(planned).live_peak_bytes
    run_steps(planned, sample, 4)
    (line,) = [r.args for r in caplog.records if r.message.startswith("the step peaks")]
    assert line[2] == format_bytes(live_bytes)
    assert abs(parse_bytes(line[0].replace(" ", "")) - live_bytes) < 0.002 * live_bytes
    warnings = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert not [message for message in warnings if "machine was busy" not in message]


@pytest.mark.usefixtures("cost_cache")
def test_a_step_that_holds_more_than_predicted_teaches_a_margin(caplog: pytest.LogCaptureFixture) -> None:
    net, sample = MODELS["gpt2"](0)
    planned = memplan.apply(net, sample, 0.7)
    held: list[torch.Tensor] = []
    hooked = planned.transformer.h[0].ln_1.weight
    handle = hooked.register_post_accumulate_grad_hook(lambda p: held.append(torch.ones(1 << 20)))
    run_steps(planned, sample, 2)
    handle.remove()
    assert sum("more than predicted" in r.message for r in caplog.records) == 1
    run_steps(planned, sample, 1)
    assert keeps_a_margin(planned)
    fresh, _ = MODELS["gpt2"](0)
    memplan.apply(fresh, sample, 0.95)
    assert keeps_a_margin(fresh), "the margin is remembered for such models"
    other, sample = MODELS["handmade"](0)
    memplan.apply(other, sample, 0.95)
    assert planned_forward(other).choice.planner.limits.margin == 0.0, "and for no others"


class Routed(nn.Module):
    """Experts that a router chooses between. Each makes for a while 64 times what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, found = self.router(x).argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            where = (chosen == index).nonzero().flatten()
            found = found.index_add(0, where, expert(x[where]).repeat(1, 64).view(-1, 64, 8).sum(1))
        return found


@pytest.mark.usefixtures("cost_cache")
@pytest.mark.parametrize("shares", [False, True])
def test_later_steps_of_routed_experts_are_compared_too(shares: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A warning says what they hold, once; plans stay. shares: ranks share the plan of a sharded model."""
    torch.manual_seed(0)
    routed, x = Routed(), torch.randn(256, 8)
    net = memplan.apply(nn.Sequential(nn.Linear(8, 8), routed, nn.Linear(8, 8)), x, 1.0)
    planned_forward(net).choice.sharded = shares
    chosen = routed.router(net[0](x)).argmax(-1)
    run_steps(net, x, 2)
    assert "more than predicted" not in caplog.text
    run_steps(net, x[chosen == 0][:1].expand(256, 8).clone(), 6)  # all to one of the experts
    assert sum("more than predicted; plans keep no margin" in r.message for r in caplog.records) == 1
    assert planned_forward(net).choice.planner.limits.margin == 0
    run_steps(net, x[:100], 2)  # a plan of its own, whose first step is compared as well
    assert memplan.plan_of(net).problem.graph.values  # and no plan was forgotten
    assert len(planned_forward(net).steps) == 2
    caplog.clear()
    small = x[chosen == 0][:1].expand(100, 8).clone()
    run_steps(net, small, 1)
    two_at_once = [net(small), net(small)]
    for output in two_at_once:
        output.sum().backward()
    assert "more than predicted" not in caplog.text


def test_margins_are_those_of_models(cost_cache: Path) -> None:
    class Wider(nn.Linear):
        pass

    device = torch.device("cpu")
    models = [nn.Linear(2, 2), nn.Linear(2, 3), nn.Linear(2, 2, dtype=torch.bfloat16), Wider(2, 2), nn.LazyLinear(2)]
    for index, model in enumerate(models):
        assert known_margin(model) == 0.0
        remember_margin(model, device, index / 100)
    remember_margin(models[1], device, 0.5)
    assert [known_margin(model) for model in models] == [0.0, 0.5, 0.02, 0.03, 0.04]
    assert known_margin(nn.Linear(2, 3)) == 0.5
    (file,) = cost_cache.glob("margin-*.json")
    for damaged in ('{"margins": {"x": "y"}}', '{"margins": 3}', '{"margin": 0.2}', "{"):
        file.write_text(damaged)
        assert known_margin(models[1]) == 0.0
    remember_margin(models[1], device, 0.5)
    assert known_margin(models[1]) == 0.5


# -- out of memory ----------------------------------------------------------------------------------------------------


def running_a_program() -> bool:
    """Whether an op is one of a planned program, and not of autograd that it hands a gradient to."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "run_backward":
        if (
            type(frame.f_locals.get("self")).__name__ in ("Forward", "Backward")
            or frame.f_code.co_name == "run_checked"
        ):
            return True
        frame = frame.f_back
    return False


class NoMemory(torch.utils._python_dispatch.TorchDispatchMode):
    """The device has no memory left at one op of a planned program, and at the first op of each of some later runs."""

    def __init__(self, at: int, further: int = 0, words: str = "tried to allocate 1 GiB") -> None:
        super().__init__()
        self.left, self._further, self._words = at, further, words

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if running_a_program():
            self.left -= 1
            if self.left == 0 or (self.left < 0 and self._further):
                self._further -= self.left < 0
                raise torch.OutOfMemoryError(f"device out of memory: {self._words}")
        return func(*args, **(kwargs or {}))


def ops_of_a_step(net: nn.Module, sample: Sample) -> int:
    counter, before = NoMemory(0), copy.deepcopy(net.state_dict())
    with counter:
        run_steps(net, sample, 1)
    net.load_state_dict(before)
    return -counter.left


def keeps_a_margin(net: nn.Module) -> bool:
    plan = memplan.plan_of(net)
    return plan.peak_bytes <= max(plan.problem.budget_bytes / 1.05, plan.floor_bytes)


@pytest.mark.usefixtures("cost_cache")
@pytest.mark.parametrize(
    ("name", "grads", "part", "further"),
    [
        *(("handmade", "surface", part, 1) for part in (0.1, 0.45, 0.8)),
        *(("handmade", "surface", part, 0) for part in (0.1, 0.8)),
        *(pytest.param("gpt2", "surface", part, 5, marks=pytest.mark.slow) for part in (0.1, 0.8)),
        ("handmade", "edges", 0.45, 1),
        pytest.param("gpt2", "edges", 0.45, 1, marks=pytest.mark.slow),
        *(pytest.param("gpt2", "surface", part, 1, marks=pytest.mark.slow) for part in (0.1, 0.45, 0.8)),
        pytest.param("resnet50", "surface", 0.45, 1, marks=pytest.mark.slow),
    ],
)
def test_out_of_memory_is_planned_around_and_nothing_is_lost(name: str, grads: str, part: float, further: int) -> None:
    net, sample = MODELS[name](0)
    planned = planned_twin(net, sample, 0.9, on_oom="replan", grads=grads)
    peak_bytes = memplan.plan_of(planned).peak_bytes
    assert_same_bits(run_steps(net, sample, 1), run_steps(planned, sample, 1), "the first step, which is checked")
    count = ops_of_a_step(planned, sample)
    assert count > 30
    expected = run_steps(net, sample, 2)
    with NoMemory(int(count * part), further) as fault:
        got = run_steps(planned, sample, 2)
    assert fault.left < 0
    assert_same_bits(expected, got)
    if not further:
        assert memplan.plan_of(planned).peak_bytes == peak_bytes, "it ran again as it was"
        return
    assert keeps_a_margin(planned)
    assert memplan.plan_of(planned).peak_bytes < peak_bytes
    assert f"less a margin of {memplan.plan_of(planned).margin:.1%}" in memplan.plan_of(planned).summary
    fresh, _ = MODELS[name](0)
    memplan.apply(fresh, sample, 0.95, costs="estimate")
    assert not memplan.plan_of(fresh).margin, "a later process may find more memory"


@pytest.mark.usefixtures("cost_cache")
@pytest.mark.parametrize("part", [0.1, 0.8])
def test_out_of_memory_is_planned_around_until_no_plan_is_smaller(part: float) -> None:
    net, sample = MODELS["handmade"](0)
    planned = planned_twin(net, sample, 0.9, on_oom="replan")
    assert_same_bits(run_steps(net, sample, 1), run_steps(planned, sample, 1), "the first step, which is checked")
    plan = memplan.plan_of(planned)
    count = ops_of_a_step(planned, sample)
    with pytest.raises(torch.OutOfMemoryError, match="the least"), NoMemory(int(count * part), 99):
        run_steps(planned, sample, 1)
    if part > 0.5:
        call(net, sample)  # forward has run
    planned.zero_grad()
    net.zero_grad()
    assert_same_bits(run_steps(net, sample, 1), run_steps(planned, sample, 1))
    assert memplan.plan_of(planned).peak_bytes == plan.floor_bytes


@pytest.mark.usefixtures("cost_cache")
def test_what_the_allocator_could_not_use_is_the_margin() -> None:
    net, sample = MODELS["handmade"](0)
    planned = planned_twin(net, sample, 0.95, on_oom="replan")
    run_steps(planned, sample, 1)
    plan = memplan.plan_of(planned)
    pieces = (plan.peak_bytes - plan.floor_bytes) // 2
    words = f"and {pieces / 1024:.2f} KiB is reserved by PyTorch but unallocated"
    with NoMemory(20, 1, words):
        run_steps(planned, sample, 1)
    assert plan.floor_bytes <= memplan.plan_of(planned).peak_bytes <= plan.peak_bytes - pieces + 1024


@pytest.mark.usefixtures("cost_cache")
@pytest.mark.parametrize("part", [0.3, 0.8])
def test_out_of_memory_comes_with_advice(part: float) -> None:
    net, sample = MODELS["gpt2"](0)
    planned = planned_twin(net, sample, 0.8)
    assert_same_bits(run_steps(net, sample, 1), run_steps(planned, sample, 1), "the first step, which is checked")
    count = ops_of_a_step(planned, sample)
    advice = r"tried to allocate(.|\n)*predicted peak(.|\n)*on_oom"
    with pytest.raises(torch.OutOfMemoryError, match=advice), NoMemory(int(count * part)):
        run_steps(planned, sample, 1)
    planned.zero_grad()
    net.zero_grad()
    assert_same_bits(run_steps(net, sample, 1), run_steps(planned, sample, 1))


def test_what_goes_with_the_plan_is_undone_once() -> None:
    net, sample = MODELS["gpt2"](0)
    undone: list[str] = []
    with pytest.raises(ValueError, match="not planned"):
        memplan.on_remove(net, lambda: undone.append("never"))
    memplan.apply(net, sample, 0.7, costs="estimate")
    memplan.on_remove(net, lambda: undone.append("first"))
    memplan.apply(net, sample, 0.6, costs="estimate")  # takes the place of the other plan, which is not removed
    memplan.on_remove(net, lambda: undone.append("second"))
    assert not undone
    memplan.remove(memplan.remove(net))
    assert undone == ["second", "first"]


class TakesAnything(nn.Module):
    """It may tell arguments by position from those by name, and its loss needs one output of two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 64)

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = args or (kwargs["x"], kwargs["y"])
        return self.first(x).exp() * y, self.second(x)


def test_arguments_passed_in_another_way_are_told_of_and_not_searched_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[int] = []
    solve = plan_search.solve_front
    monkeypatch.setattr(plan_search, "solve_front", lambda *args: (searched.append(1), solve(*args))[1])
    plain, (x, y) = TakesAnything().train(), torch.randn(2, 16, 8)
    net = memplan.apply(copy.deepcopy(plain), (x, y), 1.0, costs="estimate")
    for run in ({"x": x, "y": y}, {"x": x, "y": y}, {"x": x, "y": y}, None, None):
        for each in (plain, net):
            each.zero_grad()
            (each(x, y) if run is None else each(**run))[0].sum().backward()
        assert_same_bits([p.grad for p in plain.parameters()], [p.grad for p in net.parameters()])
    assert len(searched) == 2  # for all outputs, and for the one from which backward starts
    told = [r.getMessage() for r in caplog.records if "in another way" in r.getMessage()]
    assert len(told) == 1 and "now as x, y" in told[0]
