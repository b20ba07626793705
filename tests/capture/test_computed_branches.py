"""Models that branch on booleans which they compute: planned with the branches of the sample, checked as they run."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.capture.trace.call import CallReader
from memplan.installed.planned_forward import planned_forward
from tests.support.island_models import Block
from tests.support.meter import LiveMeter
from tests.support.zoo import assert_same_bits, copied, run_steps

WIDTH = 32


class Guarded(nn.Module):
    """Two blocks with a check of what comes out of each, as libraries have it against overflow."""

    def __init__(self, norm: bool = False, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.first, self.second = Block(WIDTH, dropout), Block(WIDTH, dropout)
        self.limits = [30.0, 60.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        for block, limit in zip((self.first, self.second), self.limits):
            hidden = hidden + block(hidden)
            if (hidden.abs() > limit).any():
                hidden = hidden / limit
        return hidden.pow(2).mean()


def batch(scale: float = 1.0, seed: int = 1, rows: int = 64) -> torch.Tensor:
    return scale * torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def twins(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    net = build().train()
    return net, copy.deepcopy(net)


def applied(net: nn.Module, sample: Any, budget: Any = 0.8, **options: Any) -> nn.Module:
    return memplan.apply(net, sample, budget, **{"costs": "estimate", **options})


def plans(net: nn.Module) -> list[Any]:
    planned = planned_forward(net)
    assert planned is not None
    return [step.plan for step in planned.steps]


@pytest.mark.parametrize("norm", [False, True])
def test_every_way_through_the_model_has_eagers_bits(norm: bool) -> None:
    net, plain = twins(lambda: Guarded(norm))
    if norm:
        net.limits = plain.limits = [4.0, 4.5]  # what a norm lets through
    applied(net, batch())
    first = memplan.plan_of(net)
    assert isinstance(first, memplan.Plan) and first.overhead > 0
    for seed, scale in enumerate((1, 1, 1000, 1, 1000, 1, 0.01, 1000)):
        sample = batch(scale, seed)
        if norm:
            sample[0] *= 30 * scale
        assert_same_bits(run_steps(plain, sample, 2), run_steps(net, sample, 2))
    assert 1 < len(plans(net)) < 5 and all(isinstance(plan, memplan.Plan) for plan in plans(net))


@pytest.mark.parametrize("zeroed", [True, False])
@pytest.mark.parametrize("norm", [False, True])
def test_branches_that_change_with_the_length(norm: bool, zeroed: bool) -> None:
    """A plan for all sizes of a branch is none for the other branch, however its key fits the call."""
    net, planned = twins(lambda: Guarded(norm))
    applied(planned, batch())
    for seed, (scale, rows) in enumerate([(1, 64), (40, 48), (40, 40), (1, 40), (40, 24), (1, 24), (40, 72), (1, 72)]):
        for one in (net, planned):
            torch.manual_seed(seed)
            if zeroed:
                one.zero_grad()
            one(batch(scale, seed, rows)).backward()
        assert_same_bits([p.grad for p in net.parameters()], [p.grad for p in planned.parameters()])


def test_planning_leaves_no_trace() -> None:
    net, plain = twins(lambda: Guarded(norm=True))
    torch.manual_seed(11)
    before = torch.get_rng_state()
    applied(net, batch())
    assert torch.equal(torch.get_rng_state(), before)
    assert_same_bits(dict(plain.named_buffers()), dict(net.named_buffers()))
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_the_peak_is_the_predicted_one(scale: float) -> None:
    net, _ = twins(Guarded)
    sample = batch(scale)
    applied(net, sample)
    plan = memplan.plan_of(net)
    meter = LiveMeter()
    meter.register([list(net.parameters()), sample])
    for _ in range(2):
        for p in net.parameters():
            p.grad = None
        meter.reset_peak()
        with meter:
            net(sample).backward()
        assert meter.peak_bytes == plan.live_peak_bytes < plan.baseline_peak_bytes


class Winding(nn.Module):
    """Eight ways through it, by what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            h = block(x)
            x = x + h if (h.sum() + x[0, index] > 0) else x * 0.5 - h
        return x.pow(2).mean()


@pytest.mark.parametrize("fits", [True, False])
def test_a_model_that_takes_many_ways_runs_unplanned_where_it_fits(fits: bool) -> None:
    net, plain = twins(Winding)
    applied(net, batch(), "1GiB" if fits else 0.7)
    for seed in range(12):
        sample = batch(seed=seed)
        sample[0, :3] = torch.tensor([[-1e3, 1e3][seed >> bit & 1] for bit in range(3)])
        assert_same_bits(run_steps(plain, sample, 1), run_steps(net, sample, 1))
    assert (plans(net) == [None]) == fits


def holds(tensor: torch.Tensor) -> bool:
    """One line of source for all reads."""
    return bool(tensor)


class Checked(nn.Module):
    """Looks at its first batches more closely, and at inputs in the same line as at what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.longest = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x).tanh()
        if len(x) > self.longest:
            self.longest = len(x)
            assert holds(hidden.isfinite().all())
        if holds(x.amax() > 1e6):
            hidden = hidden * 0.5
        if holds(hidden.sum() > 1e9):
            hidden = hidden / 7
        return self.two(hidden).pow(2).mean()


@pytest.mark.parametrize("first", [32, None])
def test_answers_are_never_taken_for_those_to_other_questions(first: int | None) -> None:
    net, plain = twins(Checked)
    applied(net, None if first is None else batch(rows=first), "2MiB")
    for rows in (32, 48, 64, 64):
        assert_same_bits(run_steps(plain, batch(rows=rows), 1), run_steps(net, batch(rows=rows), 1))
    assert len(plans(net)) <= 3


class OneHot(nn.Module):
    """PyTorch's C++ reads numbers of its own when this runs, and none in a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 10), nn.Linear(10, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x)
        if not hidden.isfinite().all():
            hidden = hidden.clamp(-1, 1)
        hidden = hidden + nn.functional.one_hot(y, 10) * y.max().item()
        return nn.functional.cross_entropy(self.two(hidden), y)


def test_what_is_read_by_pytorch_itself_is_left_out() -> None:
    net, plain = twins(OneHot)
    sample = (batch(), torch.arange(64) % 10)
    applied(net, sample, "2MiB")
    for _ in range(3):
        assert_same_bits(run_steps(plain, sample, 1), run_steps(net, sample, 1))
    assert [type(plan) for plan in plans(net)] == [memplan.Plan]


class ReadsUnderInferenceMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            largest = x.max().item()
        return self.linear(x / largest).tanh().mean()


def test_numbers_are_read_under_inference_mode_too() -> None:
    net, plain = twins(ReadsUnderInferenceMode)
    x = batch()
    applied(net, x, "2MiB")
    for sample in (x, 2 * x, x):
        assert_same_bits(run_steps(plain, sample, 1), run_steps(net, sample, 1))
    assert [type(plan) for plan in plans(net)] == [memplan.Plan] * 2


class CountsClasses(nn.Module):
    """As many columns as the largest class needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh().mean() * nn.functional.one_hot(y).float().std()


def test_classes_that_one_hot_counts_are_read_as_in_eager() -> None:
    net, plain = twins(CountsClasses)
    samples = [(batch(), torch.arange(64) % classes) for classes in (10, 10, 7, 10)]
    applied(net, samples[0], "2MiB")
    for sample in samples:
        assert_same_bits(run_steps(plain, sample, 1), run_steps(net, sample, 1))
    assert [type(plan) for plan in plans(net)] == [memplan.Plan] * 2
    for model in (plain, net):
        with pytest.raises(RuntimeError, match="must be non-negative"):
            model(batch(), torch.arange(64) - 1)


class Norm(nn.Module):
    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.norm, self.linear, self.error = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.norm(self.linear(x)) + self.linear(x), 0.1)
        if (hidden.mean(0).abs() > 0.9).any():
            raise self.error("large")
        return hidden.pow(2).mean()


@pytest.mark.parametrize("error", [FloatingPointError, RuntimeError])
def test_an_error_that_forward_raises_leaves_what_it_has_written(error: type[Exception]) -> None:
    net, plain = twins(lambda: Norm(error))
    applied(net, batch(0.1), "2MiB")
    states = []
    for model in (plain, net):
        torch.manual_seed(5)
        for shift in (0.0, 5.0, 0.0, 5.0):
            with pytest.raises(error, match="large") if shift else contextlib.nullcontext() as caught:
                model(batch(0.1) + shift).backward()
            assert caught is None or caught.value.__context__ is None
        states.append([copied(dict(model.named_buffers())), torch.get_rng_state()])
    assert_same_bits(*states)
    with pytest.raises(error, match="large"):
        applied(twins(lambda: Norm(error))[0], batch(0.1) + 5.0)


class GivesUp(Guarded):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        return loss if loss.isfinite() else x.new_zeros(())


def test_a_call_with_nothing_to_train_takes_the_plan_off_no_other() -> None:
    net, plain = twins(GivesUp)
    applied(net, batch())
    plan, bad = memplan.plan_of(net), batch()
    bad[0, 0] = float("inf")
    for sample in (bad, batch(), bad, batch()):
        for model in (plain, net):
            torch.manual_seed(3)
            model(sample)
    assert memplan.plan_of(net) is plan
    assert_same_bits(run_steps(plain, batch(), 2), run_steps(net, batch(), 2))


def test_planning_fills_no_cache_of_autocast() -> None:
    net, _ = twins(lambda: Guarded(dropout=0.0))
    with torch.autocast("cpu", torch.bfloat16):
        applied(net, batch())
        for scale in (1.0, 1000.0):  # the second is planned in here
            net(batch(scale))
        weight = net.first.wide.weight
        with torch.no_grad():
            weight.mul_(2)
        found = torch.mm(weight, batch().T)  # of a cast that was kept it would be that of before
    assert len(plans(net)) == 2 and torch.equal(found, torch.mm(weight.bfloat16(), batch().T.bfloat16()))


class Raises(Guarded):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        if loss.isnan():
            raise FloatingPointError("the loss is not a number")
        return loss


def test_an_error_that_forward_raises_is_the_users() -> None:
    net, plain = twins(Raises)
    applied(net, batch())
    bad = batch()
    bad[0, 0] = float("nan")
    for _ in range(2):
        torch.manual_seed(5)
        with pytest.raises(FloatingPointError, match="not a number"):
            net(bad)
        assert_same_bits(run_steps(plain, batch(), 1), run_steps(net, batch(), 1))
    assert len(plans(net)) == 1


def test_another_branch_is_refused_where_nothing_may_be_planned() -> None:
    net, plain = twins(Guarded)
    applied(net, batch(), on_mismatch="raise")
    torch.manual_seed(5)
    with pytest.raises(memplan.PlanMismatch, match=r"value that is True, planned for False.*test_computed_branches.py"):
        net(batch(1000.0))
    assert_same_bits(run_steps(plain, batch(), 2), run_steps(net, batch(), 2))


class Written(nn.Module):
    """Writes to the boolean, and to what it was read from, after it has branched on it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x + self.block(x)
        flags = hidden.amax(0) > 10
        if flags[0]:
            hidden = hidden * 0.1
        flags.logical_not_()
        return (hidden * flags).pow(2).mean()


def test_what_was_branched_on_may_be_written_to() -> None:
    net, plain = twins(Written)
    applied(net, batch(), 0.9)
    for scale in (1.0, 1000.0, 1.0):
        assert_same_bits(run_steps(plain, batch(scale), 2), run_steps(net, batch(scale), 2))
    assert len(plans(net)) == 2


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Guarded()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body.first(x)
        if not hidden.isfinite().all():
            hidden = hidden.clamp(-1, 1)
        return {"hidden": hidden, "out": self.head(hidden)}


def test_a_loss_outside_of_the_model_from_outputs_that_no_plan_expected() -> None:
    net, plain = twins(Outputs)
    applied(net, batch(), 0.9)
    for _ in range(2):
        for model in (net, plain):
            torch.manual_seed(4)
            model.zero_grad()
            model(batch())["out"].pow(2).sum().backward()
        assert_same_bits(*({n: copied(p.grad) for n, p in m.named_parameters()} for m in (plain, net)))


@pytest.mark.parametrize("options", [{"update": "backward"}, {"host_budget": "1MiB", "device": "cpu"}])
def test_with_an_optimizer(options: dict[str, Any]) -> None:
    nets = twins(Guarded)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
    applied(nets[0], batch(), 0.8, optimizer=optimizers[0], link=memplan.Link(1e9, 1e9), **options)
    for step in range(6):
        for net, optimizer in zip(nets, optimizers):
            torch.manual_seed(step)
            net(batch([1.0, 1000.0][step % 2], step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_bits(*(dict(copied(dict(net.named_parameters()))) for net in nets))
    assert len(plans(nets[0])) == 2


def test_a_loss_function_that_looks_at_its_loss() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x)
        return out * 0.5 if out > 10 else out

    net, plain = twins(Guarded)
    applied(net, batch(), loss_fn=loss_fn)
    for scale in (1.0, 1000.0, 1.0):
        for model in (net, plain):
            torch.manual_seed(4)
            model.zero_grad()
            (net(batch(scale)) if model is net else loss_fn(plain, batch(scale))).backward()
        assert_same_bits(*({n: copied(p.grad) for n, p in m.named_parameters()} for m in (plain, net)))


def test_a_saved_plan_checks_its_branches(tmp_path: Any) -> None:
    net, plain = twins(Guarded)
    applied(net, batch())
    memplan.plan_of(net).save(tmp_path / "plan.json")
    loaded = memplan.Plan.load(tmp_path / "plan.json")
    other = memplan.apply(copy.deepcopy(plain), batch(), plan=loaded)
    for scale in (1.0, 1000.0):
        assert_same_bits(run_steps(plain, batch(scale), 2), run_steps(other, batch(scale), 2))


def test_a_plan_alone_is_that_of_apply() -> None:
    net, plain = twins(Guarded)
    alone = memplan.plan(net, batch(), 0.8, costs="estimate")
    curve = memplan.explore(net, batch(), costs="estimate")
    assert_same_bits(dict(plain.state_dict()), dict(net.state_dict()))
    applied(net, batch())
    first = memplan.plan_of(net)
    assert first is not None and not alone.islands
    assert (alone.schedule, alone.peak_bytes) == (first.schedule, first.peak_bytes)
    assert curve[0].problem.graph == first.problem.graph


def test_a_model_without_data_is_refused() -> None:
    with torch.device("meta"):
        bare = Guarded()
    with pytest.raises(memplan.UnsupportedModel, match="depends on parameters"):
        memplan.apply(bare, batch(), 1.0, costs="estimate", device="cpu", init=lambda name, tensor: None)


class WritesToItsInput(Guarded):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return super().forward(x)


def test_what_could_not_run_again_runs_unplanned() -> None:
    net, plain = twins(WritesToItsInput)
    applied(net, batch(), 1.0)
    assert memplan.plan_of(net) is None
    for scale in (1.0, 1000.0):
        assert_same_bits(run_steps(plain, batch(scale), 2), run_steps(net, batch(scale), 2))


# -- islands -----------------------------------------------------------------------------------------------------------


class Inside(nn.Module):
    """Guarded modules around one whose forward reads a number."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.scaled, self.two = Guarded(), Scaled(), Guarded()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.one(x)
        return loss + self.two(self.scaled(x, loss))


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return x * min(1.0, loss.item())


def test_branches_around_an_island() -> None:
    net, plain = twins(Inside)
    applied(net, batch(rows=256), 0.7)
    assert isinstance(memplan.plan_of(net), memplan.Plan) and memplan.plan_of(net).islands
    for scale in (1.0, 1000.0, 1.0):
        sample = batch(scale, rows=256)
        assert_same_bits(run_steps(plain, sample, 2), run_steps(net, sample, 2))
    assert len(plans(net)) == 2


class Twice(nn.Module):
    """Calls one module twice, which takes another branch each time."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.scaled = Guarded(), Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.part(x)
        return loss + self.part(self.scaled(x, loss) * 1000.0)


def test_a_module_that_takes_another_branch_in_each_call() -> None:
    net, plain = twins(Twice)
    applied(net, batch(rows=256), 1.0)
    assert isinstance(memplan.plan_of(net), memplan.Plan)
    for scale in (1.0, 1000.0, 1.0):
        sample = batch(scale, rows=256)
        assert_same_bits(run_steps(plain, sample, 2), run_steps(net, sample, 2))


class DrawsAndBranches(nn.Module):
    """Which branch it takes depends on its dropout, and on a buffer that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = nn.functional.dropout(self.body(x).tanh(), 0.5)
        if hidden.mean() + self.mean > 0:
            hidden = hidden * 2
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(), 0.9)
        return {"hidden": hidden, "out": self.head(hidden)}


def test_backward_from_outputs_that_no_plan_expected_takes_forwards_branches() -> None:
    net, plain = twins(DrawsAndBranches)
    applied(net, batch(), "2MiB")
    for step in range(8):
        for model in (plain, net):
            torch.manual_seed(step)
            model.zero_grad()
            outputs = model(batch())
            (outputs["out"] if step % 2 else outputs["hidden"]).pow(2).sum().backward()
        states = [{n: copied(p.grad) for n, p in m.named_parameters()} | {"b": copied(m.mean)} for m in (plain, net)]
        assert_same_bits(*states)


def test_the_data_of_a_call_is_not_held() -> None:
    net, _ = twins(Guarded)
    applied(net, batch())
    planned = planned_forward(net)
    assert planned is not None
    found = CallReader(net.forward).read_sample(batch(1000.0))
    net(found.tensors[0]).backward()
    assert all(step.capture.call.tensors[0].numel() == 0 for step in planned.steps)  # type: ignore[attr-defined]
