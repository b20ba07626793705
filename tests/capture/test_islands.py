"""Autograd functions that can't be traced are two ops of a whole plan, with the bits, floors and peaks of plain ops."""

from __future__ import annotations

import copy
import ctypes
import random
import types
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import memplan
from memplan.installed.planned_forward import planned_forward
from tests.support.meter import live_peak
from tests.support.parameters import quickly

SEEN: list[torch.Tensor] = []
WIDTH = 32


class Tanh(torch.autograd.Function):
    """Reads memory by NumPy, and saves its result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.from_numpy(np.tanh(x.detach().numpy()))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return torch.from_numpy(grad.numpy() * (1 - y.numpy() ** 2))


class Pointers(torch.autograd.Function):
    """Goes through pointers, and saves an input and a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        y = torch.empty_like(x)
        ctypes.memmove(y.data_ptr(), x.data_ptr(), x.numel() * x.element_size())
        ctx.save_for_backward(x)
        ctx.factor = factor
        return y.mul_(y).mul_(factor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * x * (2 * ctx.factor), None


class Several(torch.autograd.Function):
    """Has several outputs, of which one has no gradient, and one is a view of an argument; a weight is one of these."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> tuple[Any, ...]:
        x.data_ptr()
        mask = x > 0
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(x[:, 1:], weight)
        return x * weight, mask, None, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, product: torch.Tensor, mask: Any, nothing: Any, same: torch.Tensor) -> tuple[Any, ...]:
        most, weight = ctx.saved_tensors
        padded = torch.nn.functional.pad(most, (1, 0))
        return product * weight + same, (product * padded).sum(0)


class InContext(torch.autograd.Function):
    """Keeps a tensor as an attribute of its context, and does not use one of its arguments."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.mask = inputs[0] > 0

    @staticmethod
    def forward(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x.data_ptr()
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.mask, None


SHARED = [torch.ones(4 * WIDTH)]


class InContainers(torch.autograd.Function):
    """Keeps tensors in a list, a dict, tuples, an object, and arrays; and one in a list that others hold too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.from_numpy(np.tanh(x.detach().numpy()))
        ctx.rows, ctx.table = [y * y, 1.0], {"x": x.exp(), "pair": (x.cos(), ("more", x.sin()))}
        ctx.state = types.SimpleNamespace(found=[x.square()], shared=SHARED)
        ctx.most = x.max(0)  # a named tuple of PyTorch
        ctx.arrays = (x + 1).numpy().reshape(-1)[3:], np.sqrt(np.abs(x.numpy()))
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (square, one), (cos, (_, sin)) = ctx.rows, ctx.table["pair"]
        for factor in (
            ctx.table["x"],
            cos,
            sin,
            ctx.state.found[0],
            ctx.state.shared[0],
            torch.from_numpy(ctx.arrays[1]),
        ):
            grad = grad * factor
        return grad * (one - square) * float(ctx.arrays[0].sum()) + ctx.most.values


class Dropout(torch.autograd.Function):
    """Draws random numbers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand_like(x) > x.numpy().min() / 100 + 0.5
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0]


class Once(torch.autograd.Function):
    """Appends to a list in forward and in backward, so it must not run again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(x.detach().sum())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        SEEN.append(grad.sum())
        return grad


class Noise(torch.autograd.Function):
    """Draws from Python's generator, whose state no plan puts back, so it must not run again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.factor = random.random()
        return torch.from_numpy(x.detach().numpy() * np.float32(ctx.factor))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(grad.numpy() * np.float32(ctx.factor))


BOUND = Tanh.apply  # as libraries do when they are imported


def tanh(block: Block, x: torch.Tensor) -> torch.Tensor:
    return BOUND(x)  # type: ignore[no-any-return,no-untyped-call]


def pointers(block: Block, x: torch.Tensor) -> torch.Tensor:
    return Pointers.apply(x, 0.5)  # type: ignore[no-any-return,no-untyped-call]


def several(block: Block, x: torch.Tensor) -> torch.Tensor:
    product, mask, nothing, same = Several.apply(x, block.weight)  # type: ignore[no-untyped-call]
    assert nothing is None
    return product * mask + same  # type: ignore[no-any-return]


def one_of_several(block: Block, x: torch.Tensor) -> torch.Tensor:
    return Several.apply(x, block.weight)[0]  # type: ignore[no-any-return,no-untyped-call]


def in_context(block: Block, x: torch.Tensor) -> torch.Tensor:
    return InContext.apply(x, block.weight)  # type: ignore[no-any-return,no-untyped-call]


def in_containers(block: Block, x: torch.Tensor) -> torch.Tensor:
    return InContainers.apply(x)  # type: ignore[no-any-return,no-untyped-call]


def dropout(block: Block, x: torch.Tensor) -> torch.Tensor:
    return Dropout.apply(x)  # type: ignore[no-any-return,no-untyped-call]


def once(block: Block, x: torch.Tensor) -> torch.Tensor:
    return Once.apply(x)  # type: ignore[no-any-return,no-untyped-call]


def noise(block: Block, x: torch.Tensor) -> torch.Tensor:
    return Noise.apply(x)  # type: ignore[no-any-return,no-untyped-call]


def plain(block: Block, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


HABITS = [tanh, pointers, several, one_of_several, in_context, in_containers, dropout, once, noise]


class Block(nn.Module):
    def __init__(self, habit: Callable[[Block, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.habit, self.norm = habit, nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(4 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.habit(self, self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, habit: Callable[[Block, torch.Tensor], torch.Tensor], depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(habit) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def net(habit: Callable[[Block, torch.Tensor], torch.Tensor], depth: int = 4) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Net(habit, depth), torch.randn(128, WIDTH)


def two_steps(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Losses, parameters and what functions have appended, of two steps with an optimizer."""
    SEEN.clear()
    torch.manual_seed(1)
    random.seed(1)
    optimizer, found = torch.optim.AdamW(model.parameters(), 0.01), []
    for _ in range(2):
        loss = model(x)
        loss.backward()
        found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach() for p in model.parameters()), *SEEN]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def assert_same(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert len(first) == len(second)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_bits_and_peaks(habit: Any) -> None:
    """At the floor, half way to the plain peak, and with offload."""
    model, x = net(habit)
    plain, half_bytes = two_steps(copy.deepcopy(model), x), 0
    for budget in ("min", None, "1GiB"):
        planned = copy.deepcopy(model)
        host_budget = budget if budget == "1GiB" else None
        memplan.apply(planned, x, budget or half_bytes, host_budget=host_budget, costs="estimate")
        plan = memplan.plan_of(planned)
        assert isinstance(plan, memplan.Plan)
        assert_same(plain, two_steps(planned, x))
        half_bytes = (plan.peak_bytes + plan.baseline_peak_bytes) // 2
        if habit is not once:  # which keeps tensors for ever
            assert live_peak(planned, x) <= plan.live_peak_bytes
    assert isinstance(SHARED[0], torch.Tensor)


def test_the_floor_is_that_of_plain_ops() -> None:
    floors = []
    for habit in (plain, tanh):
        model, x = net(habit)
        memplan.apply(model, x, "min")
        plan = memplan.plan_of(model)
        assert plan is not None
        floors.append(plan.peak_bytes)
    assert floors[1] <= 1.01 * floors[0]


@pytest.mark.parametrize("habit", [once, noise], ids=lambda habit: habit.__name__)
def test_what_leaves_traces_in_python_runs_once(habit: Any) -> None:
    model, x = net(habit)
    memplan.apply(model, x, "min")
    plan = memplan.plan_of(model)
    assert plan is not None
    graph = plan.problem.graph
    assert not any(op.recomputable for op in graph.ops if op.kind.startswith("memplan.island"))


@pytest.mark.parametrize(
    "habit", quickly((tanh, several, dropout, once), several, dropout), ids=lambda habit: habit.__name__
)
def test_fused_kernels_around_islands(habit: Any) -> None:
    model, x = net(habit)
    steps = []
    for budget in ("1GiB", "min"):
        planned = copy.deepcopy(model)
        memplan.apply(planned, x, budget, costs="estimate", kernels="fused")
        assert isinstance(memplan.plan_of(planned), memplan.Plan)
        steps.append(two_steps(planned, x))
    assert_same(*steps)


class Recurrent(nn.Module):
    """Runs through oneDNN where that has a kernel for it, whose workspace no trace knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4 * WIDTH, 4 * WIDTH, batch_first=True, dropout=0.5, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.view(8, -1, 4 * WIDTH))[0].reshape(x.shape)  # type: ignore[no-any-return]


class Branches(nn.Module):
    """A higher-order op, whose branches have parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4 * WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: self.one(t).tanh(), lambda t: self.other(t).sin(), (x,))  # type: ignore[no-any-return]


class Compiled(nn.Module):
    """Calls a compiled function, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.randn(4 * WIDTH)), 0
        self.function = torch.compile(lambda t, w: torch.nn.functional.silu(t * w), backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
@pytest.mark.parametrize("kind", [Recurrent, Branches, Compiled], ids=lambda kind: kind.__name__)
def test_modules(kind: Any) -> None:
    def inner(block: Block, x: torch.Tensor) -> torch.Tensor:
        return block.get_submodule("inner")(x)  # type: ignore[no-any-return]

    model, x = net(inner, depth=2)
    for block in model.blocks:  # type: ignore[union-attr]
        block.inner = kind()
    planned = copy.deepcopy(model)
    memplan.apply(planned, x, "min")
    plan = memplan.plan_of(planned)
    assert isinstance(plan, memplan.Plan)
    assert plan.peak_bytes < plan.baseline_peak_bytes
    copied, plain = copy.deepcopy(planned), two_steps(model, x)
    assert_same(plain, two_steps(copied, x))
    assert_same(plain, two_steps(planned, x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
def test_a_module_that_changes_between_forward_and_backward() -> None:
    class Scaled(Compiled):
        scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.function(x, self.weight) * self.scale  # type: ignore[no-any-return]

    def inner(block: Block, x: torch.Tensor) -> torch.Tensor:
        return block.get_submodule("inner")(x)  # type: ignore[no-any-return]

    model, x = net(inner, depth=3)
    for block in model.blocks:  # type: ignore[union-attr]
        block.inner = Scaled()
    memplan.apply(model, x, "min")
    assert isinstance(memplan.plan_of(model), memplan.Plan)
    for scale in (1.0, 2.0):
        for block in model.blocks:  # type: ignore[union-attr]
            block.inner.scale = scale
        model(x).backward()
        model.zero_grad()
    loss = model(x)
    for block in model.blocks:  # type: ignore[union-attr]
        block.inner.scale = 3.0
    with pytest.raises(memplan.PlanMismatch, match="have changed since its forward"):
        loss.backward()


def test_two_forwards_before_their_backwards() -> None:
    model, x = net(tanh)
    planned = copy.deepcopy(model)
    memplan.apply(planned, x, "min", costs="estimate", in_flight=2)
    for each in (model, planned):
        first, second = each(x), each(2 * x)
        second.backward()
        first.backward()
    assert_same(gradients(model), gradients(planned))


def test_a_second_backward() -> None:
    model, x = net(tanh)
    planned = copy.deepcopy(model)
    memplan.apply(planned, x, "min", costs="estimate")
    for each in (model, planned):
        loss = each(x)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(gradients(model), gradients(planned))


def test_other_lengths() -> None:
    model, x = net(tanh)
    planned = copy.deepcopy(model)
    memplan.apply(planned, x, "1GiB", costs="estimate")
    for length in (128, 96, 64):
        assert_same(two_steps(model, x[:length]), two_steps(planned, x[:length]))
        assert isinstance(memplan.plan_of(planned), memplan.Plan)


class Product(torch.autograd.Function):
    """Multiplies matrices in backward, which autocast casts for."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x.data_ptr()
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return torch.nn.functional.linear(grad, w.diag()), (x * grad).sum(0)


def test_backward_under_autocast() -> None:
    def product(block: Block, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x.float(), block.weight)  # type: ignore[no-any-return,no-untyped-call]

    model, x = net(product)
    planned = copy.deepcopy(model)
    memplan.apply(planned, x, "1GiB", costs="estimate")
    for each in (model, planned):
        for _ in range(2):
            each.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                each(x).backward()
    assert isinstance(memplan.plan_of(planned), memplan.Plan)
    assert_same(gradients(model), gradients(planned))


def test_under_autocast() -> None:
    class Dtypes(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            x.data_ptr()
            ctx.save_for_backward(x, w)
            return torch.nn.functional.linear(x, w.diag())

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, w = ctx.saved_tensors
            return grad * w, torch.nn.functional.linear(grad.t(), x.t()).diagonal().to(w.dtype)

    def dtypes(block: Block, x: torch.Tensor) -> torch.Tensor:
        return Dtypes.apply(x, block.weight)  # type: ignore[no-any-return,no-untyped-call]

    model, x = net(dtypes)
    planned = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        memplan.apply(planned, x, "min", costs="estimate")
    assert isinstance(memplan.plan_of(planned), memplan.Plan)
    for each in (model, planned):
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(x)
        loss.backward()
    assert_same(gradients(model), gradients(planned))


class Probe(torch.autograd.Function):
    """Appends gradients to a list that it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.seen.append(grad.sum())
        return grad, None


@pytest.mark.parametrize("reads", [False, True])
def test_a_list_that_is_handed_to_a_function(reads: bool) -> None:
    def probe(block: Block, x: torch.Tensor) -> torch.Tensor:
        if reads:
            x = x * (1 + len(SEEN))
        return Probe.apply(x.tanh(), SEEN)  # type: ignore[no-any-return,no-untyped-call]

    model, x = net(probe, depth=1)
    planned = copy.deepcopy(model)
    memplan.apply(planned, x, "1GiB", costs="estimate")
    found = []
    for each in (model, planned):
        SEEN.clear()
        losses: list[torch.Tensor] = []
        for _ in range(4):
            losses.append(each(x))
            losses[-1].backward()
        found.append(
            [*(loss.detach() for loss in losses), *SEEN, *(p.grad for p in each.parameters() if p.grad is not None)]
        )
        each.zero_grad()
    assert_same(*found)
    if not reads:
        assert len(planned_forward(planned).steps) <= 2  # type: ignore[union-attr]  # one more where gradients are there


class Alternating(torch.autograd.Function):
    """Gives another number of saved tensors from call to call."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.data_ptr()
        Alternating.calls += 1
        ctx.save_for_backward(*([x.exp()] * (1 + Alternating.calls % 2)))
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0]


class Fails(torch.autograd.Function):
    """Fails in its second run on the same data."""

    seen: ClassVar[set[float]] = set()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = float(x.numpy().sum())
        if total in Fails.seen:
            raise RuntimeError("a second time")
        Fails.seen.add(total)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Writes(torch.autograd.Function):
    """Writes to its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.data_ptr()
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


@pytest.mark.parametrize("function", [Alternating, Writes], ids=lambda f: f.__name__)
def test_what_is_no_island_is_left_as_it_is(function: Any) -> None:
    def habit(block: Block, x: torch.Tensor) -> torch.Tensor:
        return function.apply(x * 1)  # type: ignore[no-any-return]

    model, x = net(habit)
    planned = copy.deepcopy(model)
    memplan.apply(planned, x, "1GiB", costs="estimate")
    Alternating.calls = 0
    plain = two_steps(model, x)
    Alternating.calls = 0
    assert_same(plain, two_steps(planned, x))


def test_a_function_that_fails_in_its_second_run_is_told_of() -> None:
    def fails(block: Block, x: torch.Tensor) -> torch.Tensor:
        return Fails.apply(x)  # type: ignore[no-any-return,no-untyped-call]

    model, x = net(fails)
    with pytest.raises(memplan.UnsupportedModel, match="a second time"):
        memplan.plan(model, x, "1GiB", costs="estimate")


class InClosure(torch.autograd.Function):
    """Has a tensor in a function that its context has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.from_numpy(np.tanh(x.detach().numpy()))
        slope = 1 - y * y
        ctx.slopes = lambda grad: grad * slope
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return ctx.slopes(grad)  # type: ignore[no-any-return]


def test_what_a_function_holds_where_no_plan_sees_it_is_told_of() -> None:
    model, x = net(lambda block, x: InClosure.apply(x))  # type: ignore[no-any-return,no-untyped-call]
    with pytest.raises(memplan.UnsupportedModel, match="from forward to backward where no plan sees it"):
        memplan.plan(model, x, "1GiB", costs="estimate")


class NonZero(torch.autograd.Function):
    """Saves as many numbers as are positive."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.data_ptr()
        ctx.save_for_backward(x[x > 0], x > 0)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        positive, mask = ctx.saved_tensors
        return torch.zeros_like(grad).masked_scatter(mask, grad[mask] * positive.sign())


def test_what_saves_as_much_as_data_say() -> None:
    def non_zero(block: Block, x: torch.Tensor) -> torch.Tensor:
        return NonZero.apply(x)  # type: ignore[no-any-return,no-untyped-call]

    model, x = net(non_zero)
    planned = copy.deepcopy(model)
    memplan.apply(planned, x, "1GiB", costs="estimate")
    assert_same(two_steps(model, x), two_steps(planned, x))
    assert isinstance(memplan.plan_of(planned), memplan.Plan)
