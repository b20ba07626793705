"""Steps that can't be captured whole: parts of them run planned, with the bits of the plain step, within the budget."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import memplan
from memplan.capture.capture import capture
from memplan.capture.trace.call import CallReader
from memplan.errors import BudgetInfeasible, PlanMismatch, UnsupportedModel
from memplan.planning.parts import fit_parts
from memplan.planning.parts.plan_parts import plan_parts
from memplan.planning.parts.request import LimitOf, PartsRequest
from memplan.runtime.parts.part_step import PartRunner
from memplan.runtime.parts.partial_step import PartialStep
from memplan.solvers.parts.ways import UnitChain, UnitChoice, UnitOption, UnitProblem, appraise, choose_ways, smallest
from tests.support.meter import LiveMeter
from tests.support.parameters import examples, quickly
from tests.support.zoo import assert_same_bits, call, loss_of, run_steps

Sample = Any


def plan_partially(net: nn.Module, forward: Any, found: Any, budget: int | LimitOf) -> PartialStep:
    """A step of a model that runs in parts, within bytes or what gives them."""
    found = found.detached()
    limit = budget if callable(budget) else lambda peak_bytes, resident_bytes, _: budget
    planned = plan_parts(PartsRequest(net, forward, found, limit, device=torch.device("cpu")))
    return PartialStep.of(planned.plan, planned.ways, net, forward, found)


def planned_in_parts(net: nn.Module, sample: Sample, budget: Any, whole_fails: bool = True) -> PartialStep:
    """Plan a model in parts and let its forward run the plan."""
    original = net.forward
    if whole_fails:
        with pytest.raises(UnsupportedModel):
            capture(net, original, sample)
    reader = CallReader(original)
    step = plan_partially(net, original, reader.read_sample(sample), budget)

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = reader.read(args, kwargs)
        step.check(found)
        return step.run(found)

    net.forward = forward
    return step


def at(fraction: float) -> Callable[[int, int, int], int]:
    """A budget at this part of the way from what is resident to the unplanned peak."""
    return lambda peak_bytes, resident_bytes, _: resident_bytes + int(fraction * (peak_bytes - resident_bytes))


def least_of(net: nn.Module, sample: Sample) -> int:
    with pytest.raises(BudgetInfeasible) as caught:
        plan_partially(net, net.forward, CallReader(net.forward).read_sample(sample), 1)
    assert caught.value.floor_bytes is not None
    return caught.value.floor_bytes


def live_peak(net: nn.Module, sample: Sample) -> int:
    meter = LiveMeter()
    meter.register([list(net.parameters()), list(net.buffers()), sample])
    with meter:
        loss_of(call(net, sample)).backward()
    return meter.peak_bytes


def assert_exact(net: nn.Module, plain: nn.Module, sample: Sample, step: PartialStep, steps: int = 3) -> None:
    """Bits of some steps, and a peak that keeps the budget, promised and measured."""
    assert_same_bits(run_steps(plain, sample, steps), run_steps(net, sample, steps))
    assert step.plan.peak_bytes <= step.plan.budget_bytes
    for p in net.parameters():
        p.grad = None
    assert live_peak(net, sample) <= step.plan.budget_bytes


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.back = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) * self.norm.weight  # x is read twice
        return self.drop(self.back(torch.nn.functional.gelu(self.wide(normed))))


class Branching(nn.Module):
    """Blocks with a branch on a computed number between them."""

    def __init__(self, width: int = 32, dropout: float = 0.0, tied: bool = False, again: bool = False) -> None:
        super().__init__()
        self.first, self.second = Block(width, dropout), Block(width, dropout)
        self.head = nn.Linear(width, width)
        self.again = again
        if tied:
            self.second.wide.weight = self.first.wide.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x + self.first(x)
        hidden = hidden * 2 if hidden.sum().item() > 0 else torch.tanh(hidden) + hidden
        if self.again:
            hidden = hidden + self.first(hidden)
        hidden = hidden + self.second(hidden)
        return self.head(hidden).pow(2).mean()


ALL_TRAITS = {"tied": True, "again": True, "dropout": 0.1}


def twins(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    nets = []
    for _ in range(2):
        torch.manual_seed(3)
        nets.append(build().train())
    return nets[0], nets[1]


def mixtral(experts: str) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return MixtralForCausalLM._from_config(config, experts_implementation=experts)


@pytest.mark.parametrize("experts", [pytest.param("eager", marks=pytest.mark.slow), "grouped_mm"])
def test_a_mixture_of_experts_trains_at_half_of_its_activations(experts: str) -> None:
    net, plain = twins(lambda: mixtral(experts))
    ids = torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(1))
    sample = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    step = planned_in_parts(net, sample, at(0.5), whole_fails=experts == "eager")
    assert_exact(net, plain, sample, step)
    measured = live_peak(net, sample)
    assert measured <= step.plan.peak_bytes
    assert live_peak(plain, sample) == pytest.approx(step.plan.baseline_peak_bytes, rel=0.05)
    assert "experts" in step.plan.report() or experts != "eager"


@pytest.mark.parametrize(
    ("traits", "fraction"),
    quickly(
        itertools.product(({}, {"dropout": 0.2}, {"tied": True}, {"again": True}, ALL_TRAITS), (0.0, 0.6)),
        *(({}, 0.0), ({"dropout": 0.2}, 0.6), ({"tied": True}, 0.6), (ALL_TRAITS, 0.0)),
    ),
)
def test_a_branch_on_computed_data_between_blocks(traits: dict[str, Any], fraction: float | None) -> None:
    net, plain = twins(lambda: Branching(**traits))
    sample = torch.randn(256, 32, generator=torch.Generator().manual_seed(2))
    floor_bytes = least_of(net, sample)
    budget = lambda peak_bytes, resident_bytes, _: floor_bytes + int(fraction * (peak_bytes - floor_bytes))  # noqa: E731
    step = planned_in_parts(net, sample, budget)
    assert {row.name for row in step.plan.units} >= {"first", "second"}
    assert_exact(net, plain, sample, step)


def test_the_other_branch_is_taken_without_a_new_plan() -> None:
    net, plain = twins(Branching)
    sample = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
    step = planned_in_parts(net, sample, least_of(net, sample))
    assert_same_bits(run_steps(plain, -sample), run_steps(net, -sample))
    with pytest.raises(PlanMismatch, match="argument x"):
        net(sample[:7])
    assert "forward" not in vars(net.first)
    assert step.plan.units


def test_a_hook_on_a_submodule_fires_once_a_step() -> None:
    fired: list[str] = []

    def build() -> nn.Module:
        net = nn.Sequential(Block(16), Block(16), nn.Linear(16, 4))
        net[1].register_forward_hook(lambda m, args, out: fired.append("forward"))
        net[1].wide.register_forward_hook(lambda m, args, out: out * 2)
        net[2].register_full_backward_hook(lambda m, given, made: fired.append("backward"))
        return net

    net, plain = twins(build)
    sample = torch.randn(128, 16, generator=torch.Generator().manual_seed(2))
    step = planned_in_parts(net, sample, least_of(net, sample))
    fired.clear()
    run_steps(plain, sample, steps=3)
    expected = list(fired)
    net, plain = twins(build)
    step = planned_in_parts(net, sample, least_of(net, sample))
    fired.clear()
    result = run_steps(net, sample, steps=3)
    assert fired == expected
    assert_same_bits(run_steps(plain, sample, steps=3), result)
    assert step.plan.units


class Counting(nn.Module):
    """Counts its calls in Python, which a second run of its forward would show."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(16, 16), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x).relu() * self.calls


def test_state_in_python_changes_as_in_the_plain_model() -> None:
    net, plain = twins(lambda: nn.Sequential(Block(16), Counting(), Block(16)))
    sample = torch.randn(64, 16, generator=torch.Generator().manual_seed(2))
    step = planned_in_parts(net, sample, least_of(net, sample))
    assert net[1].calls == 0
    assert_exact(net, plain, sample, step)
    assert net[1].calls == 4  # three steps, and one under the meter


class Routed(nn.Module):
    """An opaque unit: each row goes through one of two layers, and batch statistics are kept beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, 16, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(2):
            (rows,) = torch.where((x[:, 0] > 0) == bool(expert))
            chosen = torch.nn.functional.dropout(x[rows] @ self.weights[expert], 0.3).relu()
            out.index_add_(0, rows, chosen.sigmoid() * chosen)
        return out


class WithStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.norm, self.routed, self.end = nn.Linear(16, 16), nn.BatchNorm1d(16), Routed(), Block(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.start(x)).relu()
        hidden = hidden + self.routed(hidden)
        hidden = self.routed(hidden) * hidden
        return (hidden + self.end(hidden)).pow(2).mean()


def test_routing_with_dropout_and_batch_statistics() -> None:
    net, plain = twins(WithStatistics)
    sample = torch.randn(128, 16, generator=torch.Generator().manual_seed(2))
    step = planned_in_parts(net, sample, least_of(net, sample))
    ways = {(row.name, row.way) for row in step.plan.units}
    assert ("routed", "recompute") in ways
    assert_exact(net, plain, sample, step)


class Shift(nn.Module):
    """Does not save its argument, though a second run of its forward reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(16) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu((x + self.bias).sigmoid())


class Editing(nn.Module):
    """Writes in place to a part's result, and to a part's argument, after the part has run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(16), nn.Linear(16, 16), Shift()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden += x
        if hidden.sum() > 1e6:
            hidden = hidden * 2
        wide = hidden * 1.0
        scale = wide.detach().abs().sum(-1, keepdim=True)
        out = self.third(wide) + self.second(hidden) / scale
        wide.mul_(2.0)
        return (out + wide).pow(2).mean()


def test_parts_whose_tensors_are_written_to_later_run_as_they_are() -> None:
    net, plain = twins(Editing)
    sample = torch.randn(128, 16, generator=torch.Generator().manual_seed(2))
    step = planned_in_parts(net, sample, least_of(net, sample))
    assert_exact(net, plain, sample, step)
    assert "third" not in {row.name for row in step.plan.units}


class ReadAgain(nn.Module):
    """Only one branch reads a part's argument after the part, which adds several gradients of its own to that one's."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.first, self.head = nn.Linear(16, 16), Block(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.start(x)
        out = self.first(hidden)
        if x.sum() + hidden.detach().sum() * 0 > 0:
            out = out + hidden * 3 + hidden.tanh()
        return self.head(out).pow(2).mean()


@pytest.mark.parametrize("sign", [1, -1])
def test_gradients_of_an_argument_are_added_in_the_order_of_the_plain_model(sign: int) -> None:
    net, plain = twins(ReadAgain)
    sample = torch.randn(64, 16, generator=torch.Generator().manual_seed(2)).abs() * sign
    planned_in_parts(net, sample, least_of(net, sample))
    assert_same_bits(run_steps(plain, -sample), run_steps(net, -sample))
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transposed, self.conv = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return self.conv(torch.cat([self.transposed(x), skip], 1)).relu()  # type: ignore[no-any-return]


class SkipConnection(nn.Module):
    """The gradient of what is skipped to the end is a slice of one that another op reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.inner = nn.Sequential(nn.Conv2d(4, 8, 3, 2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.up = Up()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        inner = self.inner(skip.detach())
        if inner.sum().item() > 1e9:
            inner = inner * 2
        return self.up(inner, skip).pow(2).mean()  # type: ignore[no-any-return]


def test_a_part_hands_on_gradients_in_the_strides_of_eager() -> None:
    """Those of a batch of one too."""
    net, sample = SkipConnection(), torch.randn(1, 3, 16, 16)
    plain = copy.deepcopy(net)
    memplan.apply(net, sample, 1.0)
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.PartialPlan)
    assert "captured" in {unit.kind for unit in plan.units}
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))


class WithoutLoss(nn.Module):
    """Gives what a loss is taken of, after a branch on computed data; parts drop out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.end = (
            nn.Sequential(
                nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.Tanh(),
                nn.Linear(32, width),
            )
            for width in (8, 8, 5)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if hidden.sum().item() < 1e9:
            hidden = hidden + self.second(hidden)
        return self.end(hidden)  # type: ignore[no-any-return]


class Moved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by  # type: ignore[no-any-return]


LOSS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as on the sample": lambda out: out.pow(2).mean(),
    "expanded": lambda out: out.sum(),
    "transposed": lambda out: out.T.reshape(-1).pow(2).sum(),
    "a slice": lambda out: out[:, 1:3].pow(2).sum(),
}


def steps_with(net: nn.Module, sample: torch.Tensor, losses: list[str]) -> list[torch.Tensor]:
    """Gradients of one step with each of these losses, and what the generator gives at the end."""
    torch.manual_seed(3)
    found = []
    for loss in losses:
        net.zero_grad()
        LOSS[loss](net(sample)).backward()
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return [*found, torch.rand(3)]


def assert_same_gradients(net: nn.Module, plain: nn.Module, sample: torch.Tensor, losses: list[str]) -> None:
    pairs = zip(steps_with(net, sample, losses), steps_with(plain, sample, losses), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    "losses",
    quickly([*([name] for name in LOSS), [*LOSS, *LOSS]], ["expanded"], [*LOSS, *LOSS]),
    ids=[*LOSS, "all in turn"],
)
def test_gradients_of_any_layout_reach_parts(losses: list[str]) -> None:
    """A part that was planned for others runs forward once more, and is planned for these from then on."""
    net, sample = WithoutLoss(), torch.randn(64, 8)
    plain = copy.deepcopy(net)
    memplan.apply(net, sample, 0.8)
    assert {unit.kind for unit in memplan.plan_of(net).units} == {"captured"}  # type: ignore[union-attr]
    other = copy.deepcopy(net)
    assert_same_gradients(net, plain, sample, losses)
    assert_same_gradients(other, plain, sample, losses)


def test_a_part_runs_forward_again_for_such_gradients_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, sample = WithoutLoss(), torch.randn(64, 8)
    memplan.apply(net, sample, 0.8)
    again: list[int] = []
    repeat = PartRunner.repeat
    monkeypatch.setattr(PartRunner, "repeat", lambda runner, *rest: again.append(1) or repeat(runner, *rest))
    steps_with(net, sample, ["expanded"] * 3)
    assert len(again) == 1


def test_a_part_is_refused_gradients_of_other_layouts_where_its_forward_can_not_run_again() -> None:
    net, sample = WithoutLoss(), torch.randn(64, 8)
    net.end.append(Moved())
    memplan.apply(net, sample, 0.8)
    out = net(sample)
    net.get_buffer("end.7.by").add_(1)  # which backward does not read
    with pytest.raises(PlanMismatch, match="written to since"):
        out.sum().backward()


@pytest.mark.parametrize("loss", quickly(LOSS, "expanded", "a slice"))
def test_other_gradients_take_no_more_memory(loss: str) -> None:
    net, sample = WithoutLoss(), torch.randn(512, 8)
    memplan.apply(net, sample, 0.8)
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.PartialPlan)
    steps_with(net, sample, [loss])
    net.zero_grad()
    meter = LiveMeter()
    meter.register([*net.parameters(), sample])
    with meter:
        LOSS[loss](net(sample)).backward()
    slack_bytes = 2 * sample.shape[0] * 5 * 4  # the loss's own
    assert meter.peak_bytes <= plan.peak_bytes + slack_bytes


class Wide(nn.Module):
    """A block that saves much more than it takes: worth a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.drop, self.down = (
            nn.BatchNorm1d(16),
            nn.Linear(16, 64),
            nn.Dropout(0.2),
            nn.Linear(64, 16),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)))))


class Remembering(Wide):
    """Reads a buffer that it writes to, so it can't run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(0.9)
        return super().forward(x * self.scale)


class Blocks(nn.Module):
    """Counts its calls in Python, so its blocks are planned by themselves."""

    def __init__(self, block: Callable[[], nn.Module] = Wide, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks, self.calls, self.checkpointed = nn.ModuleList(block() for _ in range(4)), 0, checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.pow(2).mean()


def at_least(build: Callable[[], nn.Module]) -> memplan.PartialPlan:
    """The plan of a model at its least, once it was seen to keep its promise and to have the bits of the plain one."""
    net, plain = twins(build)
    sample = torch.randn(256, 16, generator=torch.Generator().manual_seed(2))
    memplan.apply(net, sample, "min", costs="estimate")
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.PartialPlan)
    net.zero_grad()
    assert live_peak(net, sample) <= plan.peak_bytes
    return plan


def test_captured_parts_can_do_with_what_checkpoints_hold() -> None:
    plan = at_least(Blocks)
    with_checkpoints, sample = Blocks(checkpointed=True), torch.randn(256, 16)
    assert plan.floor_bytes <= 1.1 * live_peak(with_checkpoints, sample)
    assert ("captured", "recompute") in {(row.kind, row.way) for row in plan.units}


def test_a_part_that_would_show_a_second_run_does_not_run_twice() -> None:
    assert "recompute" not in {row.way for row in at_least(lambda: Blocks(Remembering)).units}


def test_a_buffer_that_changes_after_its_part_has_run_keeps_it_from_running_twice() -> None:
    class Scaling(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = super().forward(x)
            for block in self.blocks:
                block.moved.add_(1)
            return loss

    class Scaled(Wide):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("moved", torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.moved

    assert "recompute" not in {row.way for row in at_least(lambda: Scaling(Scaled)).units}


def test_batch_statistics_are_counted_once_where_forward_runs_again() -> None:
    """For gradients of another layout, and for a second backward."""
    net, sample = WithoutLoss(), torch.randn(64, 8)
    net.end.append(nn.BatchNorm1d(5))
    plain = copy.deepcopy(net)
    memplan.apply(net, sample, "min", costs="estimate")
    for each in (net, plain):
        torch.manual_seed(3)
        for name in LOSS:
            loss = LOSS[name](each(sample))
            loss.backward(retain_graph=True)
            loss.backward()
    assert_same_bits(dict(plain.state_dict()), dict(net.state_dict()))
    assert_same_bits([p.grad for p in plain.parameters()], [p.grad for p in net.parameters()])


class OwnGenerator(nn.Module):
    """Draws from a generator of its own, which a second run of its forward would find further on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand(x.shape, generator=GENERATORS[-1])
        return torch.nn.functional.gelu(self.inner(x) * mask)


GENERATORS = [torch.Generator()]


def test_a_generator_that_belongs_to_nobody() -> None:
    net, _ = twins(lambda: nn.Sequential(Block(16), OwnGenerator(), Block(16), Counting()))
    sample = torch.randn(64, 16, generator=torch.Generator().manual_seed(2))
    state = GENERATORS[-1].get_state()
    with pytest.raises(memplan.UnsupportedModel, match="generator that is no attribute of the model"):
        planned_in_parts(net, sample, 10**9)
    assert torch.equal(state, GENERATORS[-1].get_state())


def test_under_autocast() -> None:
    net, plain = twins(lambda: Branching(tied=True, again=True, dropout=0.1))
    sample = torch.randn(128, 32, generator=torch.Generator().manual_seed(2))
    with torch.autocast("cpu", torch.bfloat16):
        planned_in_parts(net, sample, least_of(net, sample))
    assert_same_bits(run_steps(plain, sample, autocast=True), run_steps(net, sample, autocast=True))


class TiedUnderAutocast(nn.Module):
    """One weight is read as it is, and twice through a cast that autocast makes once."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(40, 32), Block(32), nn.Linear(32, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.head(self.body(self.embed(ids)))
        chosen = torch.tanh(hidden)[hidden.detach() > 0]  # a shape that depends on data
        return self.head(self.embed(ids)).float().pow(2).mean() + chosen.float().pow(2).sum()


def test_planning_in_the_middle_of_autocast_leaves_no_casts_behind() -> None:
    """Those of a rehearsal are earlier in autograd's order than the step's own, and gradients are added by that."""
    net, plain = twins(TiedUnderAutocast)
    ids = torch.randint(0, 40, (64, 8), generator=torch.Generator().manual_seed(2))
    memplan.apply(net, None, 1.0, costs="estimate")
    assert_same_bits(run_steps(net, ids, autocast=True), run_steps(plain, ids, autocast=True))
    assert isinstance(memplan.plan_of(net), memplan.PartialPlan)


def test_an_input_that_requires_grad_gets_its_gradient() -> None:
    net, plain = twins(Branching)
    sample = torch.randn(64, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
    planned_in_parts(net, sample, least_of(net, sample))
    gradients = []
    for model in (plain, net):
        sample.grad = None
        model(sample).backward()
        gradients.append(sample.grad)
    assert_same_bits(gradients[0], gradients[1])


def test_nothing_of_the_model_changes_where_it_does_not_fit() -> None:
    net, plain = twins(WithStatistics)
    sample = torch.randn(64, 16, generator=torch.Generator().manual_seed(2))
    generator = torch.get_rng_state()
    floor_bytes = least_of(net, sample)
    with pytest.raises(BudgetInfeasible, match="bytes"):
        plan_partially(net, net.forward, CallReader(net.forward).read_sample(sample), floor_bytes - 1)
    assert torch.equal(torch.get_rng_state(), generator)
    assert_same_bits(dict(plain.state_dict()), dict(net.state_dict()))
    assert all(p.grad is None for p in net.parameters())
    assert all("forward" not in vars(m) for m in net.modules())


def test_the_least_has_the_last_word_where_runs_hold_more_than_was_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    net, plain = twins(Branching)
    sample = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
    least, measured = least_of(net, sample), fit_parts.measured_peak
    limit = (least + planned_in_parts(copy.deepcopy(net), sample, at(1.0)).plan.peak_bytes) // 2

    def off(*arguments: Any) -> int:
        return peak if (peak := measured(*arguments)) <= least else limit + 1

    monkeypatch.setattr(fit_parts, "measured_peak", off)
    step = planned_in_parts(net, sample, limit)
    assert step.plan.peak_bytes == least
    assert_exact(net, plain, sample, step)


@pytest.mark.parametrize("more_bytes", [1000, 1 << 20])
def test_min_is_what_the_least_is_measured_to_hold(more_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each run holds more than was worked out: then at most what the unplanned step holds."""
    net, plain = twins(Blocks)
    sample = torch.randn(64, 16, generator=torch.Generator().manual_seed(2))
    measured, runs = fit_parts.measured_peak, list[int]()

    def more(*arguments: Any) -> int:
        runs.append(measured(*arguments) + more_bytes)
        return runs[-1]

    monkeypatch.setattr(fit_parts, "measured_peak", more)
    memplan.apply(net, sample, "min", costs="estimate")
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.PartialPlan)
    assert plan.peak_bytes == plan.budget_bytes == plan.floor_bytes == min(runs)
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))


def test_the_optimizers_step_is_in_the_peak() -> None:
    net, _plain = twins(Branching)
    sample = torch.randn(4, 32, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    memplan.apply(net, sample, 1.0, optimizer=optimizer, costs="estimate")
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.PartialPlan)
    net(sample).backward()
    optimizer.step()
    optimizer.zero_grad()
    state = [t for held in optimizer.state.values() for t in held.values()]
    meter = LiveMeter()
    meter.register([*net.parameters(), *state, sample])
    with meter:
        net(sample).backward()
        before_bytes = meter.peak_bytes
        optimizer.step()
    assert before_bytes < meter.peak_bytes <= plan.peak_bytes


def test_the_floor_that_is_named_has_the_optimizers_state_in_it() -> None:
    net, _plain = twins(Branching)
    sample = torch.randn(4, 32, generator=torch.Generator().manual_seed(2))
    options = {"optimizer": torch.optim.AdamW(net.parameters()), "costs": "estimate"}
    with pytest.raises(BudgetInfeasible) as caught:
        memplan.apply(net, sample, 1, **options)
    floor_bytes = caught.value.floor_bytes
    assert floor_bytes is not None and floor_bytes > 3 * sum(p.nbytes for p in net.parameters())
    memplan.apply(net, sample, floor_bytes, **options)
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.PartialPlan) and plan.peak_bytes == floor_bytes


def test_a_copy_of_the_model_runs_the_same_plan_on_its_own_parameters() -> None:
    net, plain = twins(Branching)
    sample = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
    found = CallReader(net.forward).read_sample(sample)
    step = plan_partially(net, net.forward, found, at(0.95))
    other = copy.deepcopy(net)
    bound = step.bound_to(other, other.forward)
    bound.run(found).backward()
    plain(sample).backward()
    gradients = [{n: p.grad for n, p in m.named_parameters()} for m in (plain, other)]
    assert_same_bits(gradients[0], gradients[1])
    assert all(p.grad is None for p in net.parameters())


sizes = st.integers(0, 30)
options = st.builds(UnitOption, st.integers(-3, 20), sizes, sizes, st.integers(0, 9).map(float))
units = st.lists(options, min_size=1, max_size=3).map(tuple)
chains = st.builds(UnitChain, st.lists(units, min_size=1, max_size=2).map(tuple), st.integers(-3, 9))
stages = st.lists(chains, min_size=1, max_size=2).map(tuple)
problems = st.builds(UnitProblem, st.lists(stages, max_size=3).map(tuple), sizes, sizes)


def every_choice(problem: UnitProblem) -> list[UnitChoice]:
    by_stage = [
        [
            (a, picks)
            for a, chain in enumerate(stage)
            for picks in itertools.product(*(range(len(u)) for u in chain.units))
        ]
        for stage in problem.stages
    ]
    return [appraise(problem, picks) for picks in itertools.product(*by_stage)]


@settings(deadline=None, max_examples=examples(200))
@given(problems, st.integers(0, 120))
def test_the_choice_is_the_fastest_of_all_that_fit(problem: UnitProblem, budget_bytes: int) -> None:
    every = every_choice(problem)
    fitting = [c for c in every if c.peak_bytes <= budget_bytes]
    found = choose_ways(problem, budget_bytes)
    assert (found is None) == (not fitting)
    if found is not None:
        assert found.peak_bytes <= budget_bytes
        assert found.time_s == min(c.time_s for c in fitting)
    assert smallest(problem).peak_bytes == min(c.peak_bytes for c in every)


class DifferentiatesItself(nn.Module):
    """Forward runs a backward pass, so that the step runs unplanned; then it does what `habit` does."""

    def __init__(self, habit: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.habit = nn.Linear(8, 8), nn.Linear(8, 8), habit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.habit(torch.tanh(self.first(x)))
        return self.last(x + torch.autograd.grad(x.pow(2).sum(), x, create_graph=True)[0])  # type: ignore[no-any-return]


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("not for training")


@pytest.mark.parametrize(
    ("habit", "reason"),
    [
        (lambda x: x.unsqueeze(0).squeeze_(0), "RuntimeError: one of the variables needed for gradient"),
        (lambda x: FailsInBackward.apply(x), "ValueError: not for training"),
    ],
    ids=["writes in place", "raises"],
)
def test_an_unplanned_step_that_fails_is_refused_with_its_error(habit: Any, reason: str) -> None:
    net, x = DifferentiatesItself(habit), torch.randn(4, 8)
    with pytest.raises(UnsupportedModel, match=f"As it is, a step on the sample fails: {reason}"):
        memplan.apply(net, x, "1GiB", costs="estimate")
    with pytest.raises(Exception, match=reason.partition(": ")[2]):  # of PyTorch alone, with no plan left
        net(x).sum().backward()
