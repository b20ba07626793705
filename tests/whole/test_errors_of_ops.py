"""Ops that are there for the error that they raise for some data: planned steps raise it too, or forward catches it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memplan
from memplan.installed.planned_forward import planned_forward
from memplan.runtime.program.step import PlannedStep

Inside = Callable[[Tensor, Tensor], Tensor]

SEEN: list[float] = []
SCALE = {"by": 1.0}


@pytest.fixture(autouse=True, scope="module")
def own_ops() -> Iterator[None]:
    """Ops of a user: one that gives nothing, one whose formula reads Python state, and one that draws by NumPy."""
    with torch.library._scoped_library("errors_of_ops", "FRAGMENT"):

        @torch.library.custom_op("errors_of_ops::check", mutates_args=())
        def check(x: Tensor) -> None:
            SEEN.append(x.max().item())
            if x.max() > 4:
                raise ValueError("too large")

        @torch.library.custom_op("errors_of_ops::scaled", mutates_args=())
        def scaled(x: Tensor) -> Tensor:
            return x * 2

        @torch.library.custom_op("errors_of_ops::scaled_before", mutates_args=())
        def scaled_before(x: Tensor) -> Tensor:
            return x * 2

        def note(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.by = SCALE["by"]

        scaled_before.register_fake(torch.empty_like)
        scaled_before.register_autograd(lambda ctx, gradient: gradient * ctx.by, setup_context=note)

        @torch.library.custom_op("errors_of_ops::noisy", mutates_args=())
        def noisy(x: Tensor) -> Tensor:
            return x + torch.from_numpy(np.random.rand(*x.shape).astype(np.float32))

        @torch.library.custom_op("errors_of_ops::count", mutates_args=())
        def count(x: Tensor) -> int:
            return int((x > 0).sum())

        @torch.library.custom_op("errors_of_ops::mean", mutates_args=())
        def mean(x: Tensor) -> float:
            return x.mean().item()

        count.register_fake(lambda x: torch.library.get_ctx().new_dynamic_size())
        mean.register_fake(lambda x: 0.5)
        check.register_fake(lambda x: None)
        scaled.register_fake(torch.empty_like)
        scaled.register_autograd(lambda ctx, gradient: gradient * SCALE["by"])
        noisy.register_fake(torch.empty_like)
        noisy.register_autograd(lambda ctx, gradient: gradient)
        yield


class Net(nn.Module):
    """Layers around a function of (hidden, classes)."""

    def __init__(self, inside: Inside, norm: bool = False) -> None:
        super().__init__()
        self.inside = inside
        self.first = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64) if norm else nn.Dropout(0.1), nn.Tanh())
        self.table, self.last = nn.Embedding(4, 16), nn.Linear(64, 16)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        x = self.last(self.first(x))
        return self.inside(x, classes) + self.table.weight.sum()


def _matrix(classes: Tensor) -> Tensor:
    """One that is singular where some class is 4."""
    return torch.diag_embed((4 - classes[:16]).float())


def cholesky(x: Tensor, classes: Tensor) -> Tensor:
    return x @ torch.linalg.cholesky(_matrix(classes))


def inverse(x: Tensor, classes: Tensor) -> Tensor:
    return x @ torch.linalg.inv(_matrix(classes))


def solved(x: Tensor, classes: Tensor) -> Tensor:
    return torch.linalg.solve(_matrix(classes), x.T).T


def one_hot(x: Tensor, classes: Tensor) -> Tensor:
    return x * F.one_hot(classes, 4).sum(-1, keepdim=True)


def asserted(x: Tensor, classes: Tensor) -> Tensor:
    torch._assert_async((classes < 4).all(), "bad class")
    return x.sin()


def checked(x: Tensor, classes: Tensor) -> Tensor:
    torch.ops.errors_of_ops.check(classes.float() + 0.5)
    return x.cos()


def looked_up(x: Tensor, classes: Tensor) -> Tensor:
    return x * torch.ones(4)[classes][:, None]


KINDS = (cholesky, inverse, solved, one_hot, asserted, checked, looked_up)
GOOD = torch.tensor([0, 1, 2, 3] * 4)
BAD = GOOD.clone()
BAD[5] = 4


def or_else(run: Inside) -> Inside:
    def inside(x: Tensor, classes: Tensor) -> Tensor:
        try:
            return run(x, classes)
        except Exception:
            return x.square()

    return inside


def trained(inside: Inside, batches: list[Tensor], budget: Any, **options: Any) -> list[Any]:
    """What each step gives: an error, or its output and gradients; and the generator's next number."""
    torch.manual_seed(0)
    model = Net(inside, **options)
    samples = torch.randn(len(batches), 16, 16)
    if budget is not None:
        memplan.apply(model, (samples[0], batches[0]), budget, on_infeasible="min")
        assert memplan.plan_of(model) is not None
    torch.manual_seed(1)
    found: list[Any] = []
    for x, classes in zip(samples, batches, strict=True):
        try:
            output = model(x, classes)
            output.square().mean().backward()
            found.append([output.detach(), *(p.grad for p in model.parameters())])
        except Exception as error:
            found.append([type(error), str(error).partition("\n")[0]])
        model.zero_grad()
        found.append([torch.rand(1)])
    return found


def assert_same(one: list[Any], other: list[Any]) -> None:
    for step, (a, b) in enumerate(zip(one, other, strict=True)):
        pairs = zip(a, b, strict=True)
        assert all(torch.equal(p, q) if isinstance(p, Tensor) else p == q for p, q in pairs), (step, a, b)


@pytest.mark.parametrize("inside", KINDS)
def test_a_planned_step_raises_what_eager_raises(inside: Inside) -> None:
    batches = [GOOD, BAD, GOOD]
    plain = trained(inside, batches, None)
    assert len(plain[2]) == 2, plain[2]  # an error
    assert_same(plain, trained(inside, batches, 0.6))


@pytest.mark.parametrize("batches", [[GOOD, BAD, GOOD], [BAD, GOOD]])
@pytest.mark.parametrize("inside", KINDS)
def test_forward_may_catch_it(inside: Inside, batches: list[Tensor]) -> None:
    plain = trained(or_else(inside), batches, None)
    assert_same(plain, trained(or_else(inside), batches, 0.6))


@pytest.mark.parametrize("caught", [True, False])
@pytest.mark.parametrize("options", [{}, {"in_flight": 2}, {"update": "backward"}], ids=str)
def test_a_loss_function_may_catch_it(options: dict[str, Any], caught: bool) -> None:
    """But where backward updates the parameters, for an unplanned one does not: the error is raised there."""

    def loss_fn(model: nn.Module, x: Tensor, classes: Tensor) -> Tensor:
        return (or_else(cholesky) if caught else cholesky)(model(x), classes).square().mean()

    def losses(planned: bool) -> list[float | str]:
        torch.manual_seed(0)
        model, found = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), list[float | str]()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        samples = torch.randn(4, 16, 16)
        if planned:
            memplan.apply(
                model, (samples[0], GOOD), 0.6, loss_fn=loss_fn, optimizer=optimizer, on_infeasible="min", **options
            )
        for x, classes in zip(samples, (GOOD, BAD, GOOD, GOOD)):
            try:
                loss = model(x, classes) if planned else loss_fn(model, x, classes)
                loss.backward()
                optimizer.step()
                found.append(loss.item())
            except Exception as error:
                found.append(str(error).partition("\n")[0])
            optimizer.zero_grad()
        return found

    plain, planned = losses(False), losses(True)
    if caught and options == {"update": "backward"}:
        assert planned[0] == plain[0] and "not positive-definite" in str(planned[1])
    else:
        assert planned == plain


def test_the_plan_is_left_for_that_call_alone(caplog: pytest.LogCaptureFixture) -> None:
    """And not where no code of the model could catch an error."""
    trained(cholesky, [GOOD, BAD, GOOD], 0.6)
    assert not [r for r in caplog.records if "call runs unplanned" in r.getMessage()]
    inside = or_else(cholesky)
    assert_same(trained(inside, [GOOD, BAD, GOOD], None), trained(inside, [GOOD, BAD, GOOD], 0.6))
    (said,) = (r.getMessage() for r in caplog.records if "call runs unplanned" in r.getMessage())
    assert said.startswith("an op of the plan raises _LinAlgError('linalg.cholesky: ")


def test_a_later_error_undoes_no_earlier_call() -> None:
    torch.manual_seed(0)
    model, x = Net(or_else(cholesky)), torch.randn(16, 16)
    memplan.apply(model, (x, GOOD), 0.6, on_infeasible="min")
    step = planned_forward(model).steps[0]
    assert isinstance(step, PlannedStep)
    model(x, BAD)
    assert step.runner.undo is not None
    model(x, GOOD)
    assert step.runner.undo is None


def test_statistics_that_forward_has_updated_are_not_updated_twice() -> None:
    """They are not kept for the case that an op fails, so the error is raised where forward would catch it."""
    plain, planned = (trained(or_else(cholesky), [GOOD, BAD, GOOD], b, norm=True) for b in (None, 0.6))
    assert planned[2][0] is torch.linalg.LinAlgError
    assert_same(plain[:2], planned[:2])
    assert_same(trained(cholesky, [GOOD, BAD, GOOD], None, norm=True), planned)


def test_numbers_of_numpy_are_not_drawn_twice() -> None:
    """A step with an op of a user raises, for nobody knows what else such an op does."""

    def inside(x: Tensor, classes: Tensor) -> Tensor:
        x = torch.ops.errors_of_ops.noisy(x)
        try:
            return looked_up(x, classes)
        except IndexError:
            return x

    plain, planned = [], list[Any]()
    for budget, found in ((None, plain), (0.6, planned)):
        np.random.seed(4)
        found += trained(inside, [GOOD, BAD, GOOD], budget)[-2:]
    assert_same(plain, planned)


def test_an_op_that_gives_nothing_runs_once_in_each_step() -> None:
    torch.manual_seed(0)
    model, x = Net(checked), torch.randn(16, 16)
    memplan.apply(model, (x, GOOD), "min")
    SEEN.clear()
    for step in range(3):
        model(x, GOOD - step).square().mean().backward()
        model.zero_grad()
    assert SEEN == [3.5, 2.5, 1.5]


@pytest.mark.parametrize("kind", ["scaled", "scaled_before"])
def test_the_formula_of_an_op_may_read_python_state(kind: str) -> None:
    def gradients(planned: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = Net(lambda x, _: getattr(torch.ops.errors_of_ops, kind)(x)), torch.randn(16, 16)
        SCALE["by"], found = 1.0, list[Tensor]()
        if planned:
            memplan.apply(model, (x, GOOD), 0.6, on_infeasible="min")
        torch.manual_seed(1)
        for factor in (1.0, 3.0, 2.0):
            output = model(x, GOOD)
            SCALE["by"] = factor
            output.square().mean().backward()
            found += [p.grad for p in model.parameters() if p.grad is not None]
            model.zero_grad()
        return found

    assert all(map(torch.equal, gradients(False), gradients(True)))


@pytest.mark.parametrize("kind", ["count", "mean"])
def test_numbers_that_an_op_gives_are_those_of_each_step(kind: str) -> None:
    """A trace has those of its fake kernel."""

    def outputs(planned: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = Net(lambda x, _: x * getattr(torch.ops.errors_of_ops, kind)(x)), torch.randn(3, 16, 16)
        if planned:
            memplan.apply(model, (x[0], GOOD), 0.6, on_infeasible="min")
        torch.manual_seed(1)
        return [model(one, GOOD).detach() for one in x]

    assert all(map(torch.equal, outputs(False), outputs(True)))


def _number_read(x: Tensor) -> Tensor:
    return x * x.abs().max().item()


def _shape_of_data(x: Tensor) -> Tensor:
    return x * x[x > 0].sum()


def _branch(x: Tensor) -> Tensor:
    return x * 2 if bool(x.sum() > 0) else x * 3


@pytest.mark.parametrize("inside", [_number_read, _shape_of_data, _branch])
@pytest.mark.parametrize("kind", [Exception, RuntimeError])
def test_forward_does_not_catch_what_only_a_trace_raises(inside: Callable[[Tensor], Tensor], kind: type) -> None:
    def tried(x: Tensor, _: Tensor) -> Tensor:
        try:
            return inside(x)
        except kind:
            return x

    torch.manual_seed(0)
    model, x = Net(tried).eval(), torch.randn(3, 16, 16)
    plain = [model(one, GOOD).detach() for one in x]
    memplan.apply(model.train(), (x[0], GOOD), 0.6, on_infeasible="min")
    model.first[1].eval()
    assert all(torch.equal(a, model(b, GOOD)) for a, b in zip(plain, x))


def test_planning_leaves_numpy_s_generator_as_it_is() -> None:
    model = Net(lambda x, _: torch.ops.errors_of_ops.noisy(x))
    np.random.seed(3)
    before = np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    place = np.random.get_state()[2]  # type: ignore[index]
    memplan.apply(model, (torch.randn(16, 16), GOOD), 0.6, on_infeasible="min")
    state = np.random.get_state()
    assert (state[1] == before).all() and state[2] == place  # type: ignore[index]
