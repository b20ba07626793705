"""Models around islands, and models that can't be captured themselves: bits, bytes, and what is left untouched."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memplan
from memplan.errors import BudgetInfeasible
from memplan.installed.planned_forward import planned_forward
from tests.support.island_models import (
    WIDTH,
    Around,
    Block,
    Branching,
    Inside,
    Normalises,
    assert_planned,
    rows,
    steps,
    twins,
    whole_plan,
)
from tests.support.meter import LiveMeter, live_peak, profiler_peak, storage_bytes
from tests.support.parameters import quickly
from tests.support.zoo import assert_same_bits, run_steps

ALL_TRAITS = {"tied": True, "again": True, "dropout": 0.1}
TRAITS = quickly(({}, {"dropout": 0.2}, {"tied": True}, {"again": True}, ALL_TRAITS), {}, ALL_TRAITS)


@pytest.mark.parametrize("traits", TRAITS)
def test_a_branch_on_a_computed_number_within_a_model(traits: dict[str, Any]) -> None:
    net, plain = twins(lambda: Around(Branching(**traits)))
    memplan.apply(net, rows(256, 32), "min")
    assert whole_plan(net).islands
    assert live_peak(net, rows(256, 32)) <= whole_plan(net).peak_bytes
    for sample in (rows(256, 32), -rows(256, 32)):
        assert_same_bits(run_steps(plain, sample), run_steps(net, sample))


@pytest.mark.parametrize("traits", TRAITS)
def test_a_branch_of_the_model_itself(traits: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """The step runs unplanned where it fits, else the error says where it is, why, and what it takes."""
    net, plain = twins(lambda: Branching(**traits))
    sample = rows(256, 32)
    with pytest.raises(
        BudgetInfeasible, match=r"only run unplanned.*reads a number that depends on parameters"
    ) as caught:
        memplan.apply(net, sample, 0.9)
    assert inspect.getfile(Branching) in str(caught.value)
    floor_bytes = caught.value.floor_bytes
    assert live_peak(plain, sample) == floor_bytes
    plain.zero_grad()
    with pytest.raises(BudgetInfeasible):
        memplan.apply(net, sample, floor_bytes - 1)
    memplan.apply(net, sample, floor_bytes)
    assert memplan.plan_of(net) is None
    assert [r for r in caplog.records if r.message.startswith("calls like this one run unplanned, at ")]
    for batch in (sample, -sample):
        assert_same_bits(run_steps(plain, batch), run_steps(net, batch))
    assert len(planned_forward(net).steps) == 1  # type: ignore[union-attr]


class Blocks(nn.Module):
    """Counts its calls in Python."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks, self.calls, self.checkpointed = nn.ModuleList(Block(16) for _ in range(4)), 0, checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return x.pow(2).mean()


def test_a_model_within_can_do_with_what_checkpoints_hold() -> None:
    """Where its blocks can, though all of it is one island."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Counted(16) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = x + part(x)
            return x.pow(2).mean()

    class Variadic(Model):
        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            return super().forward(*given)

    class Counted(Block):
        reads = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * max(1.0, x.detach().mean().item())

    islands = [f"parts.{i}" for i in range(4)]
    plans = [assert_planned(model, rows(256), *islands, exactly=False)[1] for model in (Model, Variadic)]
    assert plans[0].floor_bytes == plans[1].floor_bytes <= 1.2 * live_peak(Blocks(checkpointed=True), rows(256))


@pytest.mark.parametrize("traits", TRAITS[:1])
def test_the_optimizers_step_is_in_the_peak(traits: dict[str, Any]) -> None:
    net, _plain = twins(Branching)
    sample = rows(4, 32)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    with pytest.raises(BudgetInfeasible) as caught:
        memplan.apply(net, sample, 1, optimizer=optimizer)
    peak_bytes = caught.value.floor_bytes
    assert peak_bytes > 3 * sum(p.nbytes for p in net.parameters())
    memplan.apply(net, sample, peak_bytes, optimizer=optimizer)
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
    assert before_bytes < meter.peak_bytes <= peak_bytes


def test_nothing_of_the_model_changes_where_it_does_not_fit() -> None:
    net, plain = twins(lambda: Inside(Normalises()))
    generator = torch.get_rng_state()
    with pytest.raises(BudgetInfeasible, match="bytes"):
        memplan.apply(net, rows(), 1)
    assert torch.equal(torch.get_rng_state(), generator)
    assert net.middle.calls == 0
    assert_same_bits(dict(plain.state_dict()), dict(net.state_dict()))
    assert all(p.grad is None for p in net.parameters())
    assert all("forward" not in vars(m) and "_compiled_call_impl" not in vars(m) for m in net.modules())


class OwnGenerator(nn.Module):
    """Draws from a generator that nobody finds, and a second run of its forward would find further on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand(x.shape, generator=globals()["GENERATORS"][-1])  # which no code names
        return torch.nn.functional.gelu(self.inner(x) * mask)


GENERATORS = [torch.Generator()]


@pytest.mark.parametrize("inside", [True, False])
def test_a_generator_that_belongs_to_nobody(inside: bool) -> None:
    net, _ = twins(lambda: nn.Sequential(Block(16), OwnGenerator(), Block(16)) if inside else OwnGenerator())
    state = GENERATORS[-1].get_state()
    with pytest.raises(memplan.UnsupportedModel, match="generator that is no attribute of the model"):
        memplan.apply(net, rows(), 10**9)
    assert torch.equal(state, GENERATORS[-1].get_state())


class WithGenerator(OwnGenerator):
    """Has a generator, and reads memory by NumPy. A draw may change nothing but the generator."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.generator, self.reads = torch.Generator().manual_seed(5), reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand(x.shape, generator=self.generator)
        hidden = torch.nn.functional.gelu(self.inner(x)) * float(np.mean(x.detach().numpy()))
        return hidden * mask if self.reads else hidden

    def __deepcopy__(self, memo: Any) -> WithGenerator:  # which PyTorch does not define for a generator
        twin = WithGenerator(self.reads)
        twin.load_state_dict(self.state_dict())
        return twin


@pytest.mark.parametrize("reads", [True, False])
def test_a_generator_that_is_an_attribute_of_an_island(reads: bool) -> None:
    net, plain = twins(lambda: nn.Sequential(Block(16), WithGenerator(reads), Block(16)))
    memplan.apply(net, rows(), "min", costs="estimate")
    assert whole_plan(net).islands
    assert_same_bits(steps(plain, rows()), steps(net, rows()))
    states = [each[1].generator.get_state() for each in (plain, net)]
    assert torch.equal(*states)


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
    """Casts of a run on the sample come before the step's own in autograd's order, in which gradients are added."""
    net, plain = twins(TiedUnderAutocast)
    ids = torch.randint(0, 40, (64, 8), generator=torch.Generator().manual_seed(2))
    memplan.apply(net, None, 1.0, costs="estimate")
    assert_same_bits(run_steps(net, ids, autocast=True), run_steps(plain, ids, autocast=True))
    assert memplan.plan_of(net) is None


def test_an_input_that_requires_grad_gets_its_gradient() -> None:
    for build in (Branching, lambda: Around(Branching())):
        net, plain = twins(build)
        sample = rows(64, 32).requires_grad_()
        memplan.apply(net, sample, "1GiB", costs="estimate")
        gradients = []
        for model in (plain, net):
            sample.grad = None
            model(sample).backward()
            gradients.append(sample.grad)
        assert_same_bits(gradients[0], gradients[1])


class SkipConnection(nn.Module):
    """The gradient of what is skipped to the end is a slice of one that another op reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.inner = nn.Sequential(nn.Conv2d(4, 8, 3, 2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.transposed, self.conv = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        inner = self.inner(skip.detach())
        if inner.sum().item() > 1e9:
            inner = inner * 2
        return self.conv(torch.cat([self.transposed(inner), skip], 1)).relu().pow(2).mean()  # type: ignore[no-any-return]


def test_gradients_in_the_strides_of_eager() -> None:
    """Those of a batch of one too."""
    sample = torch.randn(1, 3, 16, 16)
    net, plain = twins(lambda: Around(SkipConnection()))
    memplan.apply(net, sample, 1.0)
    assert whole_plan(net).islands
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))


class WithoutLoss(nn.Module):
    """Gives what a loss is taken of, after a branch on computed data; parts drop out, and keep statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.end = (
            nn.Sequential(
                nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.Tanh(),
                nn.Linear(32, width),
            )
            for width in (8, 8, 5)
        )  # fmt: skip
        self.middle = BranchesWithin(self.second)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.end(self.middle(self.first(x))))  # type: ignore[no-any-return]


class BranchesWithin(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x) if x.sum().item() < 1e9 else x


LOSS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as on the sample": lambda out: out.pow(2).mean(),
    "expanded": lambda out: out.sum(),
    "transposed": lambda out: out.T.reshape(-1).pow(2).sum(),
    "a slice": lambda out: out[:, 1:3].pow(2).sum(),
}


@pytest.mark.parametrize(
    "losses",
    quickly([*([name] for name in LOSS), [*LOSS, *LOSS]], ["expanded"], [*LOSS, *LOSS]),
    ids=str,
)
def test_gradients_of_any_layout_and_second_backwards(losses: list[str]) -> None:
    net, sample = WithoutLoss(), torch.randn(64, 8)
    plain = copy.deepcopy(net)
    memplan.apply(net, sample, "min", costs="estimate")
    assert whole_plan(net).islands
    for planned in (net, copy.deepcopy(net)):
        other = copy.deepcopy(plain)
        for each in (planned, other):
            torch.manual_seed(3)
            each.zero_grad()
            for name, again in itertools.product(losses, (False, True)):
                loss = LOSS[name](each(sample))
                loss.backward(retain_graph=again)
                if again:
                    loss.backward()
        assert_same_bits(dict(other.state_dict()), dict(planned.state_dict()))
        assert_same_bits([p.grad for p in other.parameters()], [p.grad for p in planned.parameters()])


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_backward_that_copies_what_arrives_holds_what_is_foreseen(batch_first: bool) -> None:
    """oneDNN's LSTM is an island. The gradient of its transposed output arrives in another layout than that has."""
    torch.manual_seed(0)
    net, x = Inside(Recurrent(batch_first)), torch.randn(32, 100, WIDTH)
    plain = copy.deepcopy(net)
    memplan.apply(net, x, "min")
    assert_same_bits(run_steps(plain, x), run_steps(net, x))
    net.zero_grad()

    def step() -> torch.Tensor:
        loss = net(x)
        loss.backward()
        return loss  # type: ignore[no-any-return]

    plan = memplan.plan_of(net)
    assert plan is not None and plan.islands
    assert profiler_peak(step, storage_bytes([*net.parameters(), x])) <= plan.peak_bytes


class Recurrent(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=batch_first) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[0] + x
        return x
