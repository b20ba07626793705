"""What forward and backward do beside ops: nothing of it is lost in a planned step, wherever it happens."""

from __future__ import annotations

import contextvars
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.capture.trace.stand_ins import MadeTensors
from memplan.torch_private import FakeTensor
from tests.support.parameters import quickly

BAG: list[Any] = []
LOCAL, CONTEXT = threading.local(), contextvars.ContextVar[Any]("aux", default=None)
COUNT = 0


class Slotted:
    __slots__ = ("aux",)


SLOTTED = Slotted()


def closure() -> tuple[Callable[[torch.Tensor], None], Callable[[], Any]]:
    kept: Any = None

    def keep(x: torch.Tensor) -> None:
        nonlocal kept
        kept = x

    return keep, lambda: kept


KEEP, KEPT = closure()


class Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        BAG.append(grad.detach().sum())
        return grad


class Scaled(torch.autograd.Function):
    scale = 1.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * Scaled.scale


class AddsToGrad(torch.autograd.Function):
    """A product that adds the gradient of its weight to `.grad` itself, as fused accumulation does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return x @ layer.weight.detach().t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,), weight = ctx.saved_tensors, ctx.layer.weight
        new = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        weight.grad = new if weight.grad is None else weight.grad.add_(new)
        return grad @ weight.detach(), None


def append_to_list(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    BAG.append(x.pow(2).mean())
    return x


def fill_slot(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    SLOTTED.aux = x.pow(2).mean()
    return x


def set_thread_local(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    LOCAL.aux = x.pow(2).mean()
    return x


def set_context(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    CONTEXT.set(x.pow(2).mean())
    return x


def keep_in_closure(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    KEEP(x.pow(2).mean())
    return x


def count_up(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    global COUNT
    COUNT += 1
    return x * COUNT


def append_in_backward(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    return Probe.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def read_in_backward(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    return Scaled.apply(x)  # type: ignore[no-any-return, no-untyped-call]


GRADIENT_SCALE = {"scale": 1.0}


def hook_that_reads(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    x = x * 1
    x.register_hook(lambda grad: grad * Scaled.scale)
    return x


def hook_that_reads_a_dict(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    x = x * 1
    x.register_hook(lambda grad: grad * GRADIENT_SCALE["scale"])
    return x


def add_to_grad(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    return AddsToGrad.apply(x, layer)  # type: ignore[no-any-return, no-untyped-call]


def call_backward(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    layer(x.detach()).pow(2).mean().backward()
    return x


def exchange_data(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    x = x * 1
    x.data = x.data.sign()
    return x


def set_memory(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    with torch.no_grad():
        y = torch.empty_like(x)
        y.set_((x.detach() * 2).contiguous())
    return x + y


HABITS = [
    append_to_list, fill_slot, set_thread_local, set_context, keep_in_closure, count_up, append_in_backward,
    read_in_backward, hook_that_reads, hook_that_reads_a_dict, add_to_grad, call_backward, exchange_data, set_memory,
]  # fmt: skip


class Habit(nn.Module):
    """A layer with a habit."""

    def __init__(self, habit: Callable[[torch.Tensor, nn.Linear], torch.Tensor], width: int) -> None:
        super().__init__()
        self.habit, self.layer = habit, nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.habit(torch.tanh(self.layer(x)), self.layer)


class Net(nn.Module):
    def __init__(self, habit: Callable[[torch.Tensor, nn.Linear], torch.Tensor] | None, width: int = 8) -> None:
        super().__init__()
        middle = nn.Tanh() if habit is None else Habit(habit, width)
        self.layers = nn.Sequential(nn.Linear(width, width), middle, nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).pow(2).mean()  # type: ignore[no-any-return]


def transformer(habit: Callable[[torch.Tensor, nn.Linear], torch.Tensor]) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    net = GPT2LMHeadModel(config)
    net.transformer.h[1].mlp = nn.Sequential(Habit(habit, 16), nn.Linear(16, 16))
    return net


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    global COUNT
    BAG.clear()
    COUNT, Scaled.scale, SLOTTED.aux, LOCAL.aux = 0, 1.0, None, None
    CONTEXT.set(None)
    KEEP(None)  # type: ignore[arg-type]
    yield
    BAG.clear()


def seen() -> list[Any]:
    """What code outside of the model finds."""
    found = [*BAG, SLOTTED.aux, LOCAL.aux, CONTEXT.get(), KEPT(), COUNT]
    assert not any(isinstance(thing, FakeTensor) for thing in found)
    return [thing.detach().clone() if isinstance(thing, torch.Tensor) else thing for thing in found]


def two_steps(net: nn.Module, sample: Any) -> list[Any]:
    """What two steps give, with what each leaves outside of the model."""
    global COUNT
    found: list[Any] = []
    COUNT = 0
    for step in range(2):
        BAG.clear()
        net.zero_grad(set_to_none=True)
        Scaled.scale = 0.5 + step
        torch.manual_seed(step)
        out = net(**sample) if isinstance(sample, dict) else net(sample)
        loss = out if isinstance(out, torch.Tensor) else out["loss"]
        if BAG and BAG[0].requires_grad:
            loss = loss + sum(BAG)
        Scaled.scale += 1  # some loops set it when they know the loss
        GRADIENT_SCALE["scale"] = Scaled.scale
        loss.backward()
        found += [loss.detach(), *seen(), *(None if p.grad is None else p.grad.clone() for p in net.parameters())]
    return found


def assert_same(plain: list[Any], planned: list[Any]) -> None:
    assert len(plain) == len(planned)
    for a, b in zip(plain, planned, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def compare(net: nn.Module, sample: Any, *, copied: bool = False, **options: Any) -> None:
    """Plan a copy of a model, and compare two of its steps with those of the model."""
    planned, before = copy.deepcopy(net), seen()
    memplan.apply(planned, sample, **{"budget": "1GiB", "costs": "estimate", **options})
    assert_same(before, seen())
    if copied:
        planned = copy.deepcopy(planned)
    plain = two_steps(net, sample)
    assert_same(plain, two_steps(planned, sample))


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
@pytest.mark.parametrize(
    "where", quickly(("plain", "floor", "fused", "offload", "copy", "transformer"), "floor", "copy")
)
def test_habits(habit: Any, where: str) -> None:
    torch.manual_seed(0)
    sample: Any = torch.randn(4, 8)
    if where == "transformer":
        ids = torch.randint(0, 32, (2, 8))
        compare(transformer(habit), {"input_ids": ids, "labels": ids, "use_cache": False})
        return
    options: dict[str, Any] = {
        "floor": {"budget": "min"}, "fused": {"kernels": "fused"}, "offload": {"host_budget": "1GiB"},
    }.get(where, {})  # fmt: skip
    compare(Net(habit), sample, copied=where == "copy", **options)


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_habits_in_a_loss_function_are_kept_or_refused(habit: Any) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return habit(model.get_submodule("layers")(x), model.get_submodule("layers.0")).pow(2).mean()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net, sample, before = Net(None), torch.randn(4, 8), seen()
    planned, refusal = copy.deepcopy(net), ""
    try:
        memplan.apply(planned, sample, "1GiB", loss_fn=loss_fn, costs="estimate")
    except memplan.UnsupportedModel as error:
        refusal = str(error)
    assert_same(before, seen())
    if refusal:
        assert "a planned step would not" in refusal
        return
    net.forward = lambda x: loss_fn(net, x)  # type: ignore[method-assign]
    assert_same(two_steps(net, sample), two_steps(planned, sample))


@pytest.mark.parametrize("nested", [False, True])
def test_containers_that_are_passed_in(nested: bool) -> None:
    class Fills(Net):
        def forward(self, x: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:  # type: ignore[override]
            (extra["inner"] if nested else extra)["aux"] = self.layers(x).mean()
            return super().forward(x)

    torch.manual_seed(0)
    net, x = Fills(None), torch.randn(4, 8)
    planned = copy.deepcopy(net)
    sample: dict[str, Any] = {"inner": {}}
    memplan.apply(planned, (x, sample), "1GiB", costs="estimate")
    assert sample == {"inner": {}}
    for one in (net, planned):
        extra: dict[str, Any] = {"inner": {}}
        (one(x, extra) + (extra["inner"] if nested else extra)["aux"]).backward()
    assert_same([p.grad for p in net.parameters()], [p.grad for p in planned.parameters()])


def test_arguments_that_forward_lets_require_grad() -> None:
    """As physics-informed nets do, to differentiate with respect to them."""

    class Physics(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.requires_grad_()
            (slope,) = torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)
            return slope.pow(2).mean() + super().forward(x)

    torch.manual_seed(0)
    net, x = Physics(None), torch.randn(4, 8)
    planned = copy.deepcopy(net)
    memplan.apply(planned, x.clone(), "min", costs="estimate")
    assert isinstance(memplan.plan_of(planned), memplan.Plan)
    for _ in range(2):
        given = []
        for one in (net, planned):
            given.append(x.clone())
            one(given[-1]).backward()
            assert given[-1].requires_grad
        assert_same([given[0].grad], [given[1].grad])
        assert_same([p.grad for p in net.parameters()], [p.grad for p in planned.parameters()])


def test_parameters_that_forward_freezes() -> None:
    class Freezes(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.layers[0].weight.requires_grad_(False)
            return super().forward(x)

    torch.manual_seed(0)
    net, x = Freezes(None), torch.randn(4, 8)
    planned = copy.deepcopy(net)
    memplan.apply(planned, x, "1GiB", costs="estimate")
    assert planned.layers[0].weight.requires_grad
    for one in (net, planned):
        one(x).backward()
    assert_same([p.grad for p in net.parameters()], [p.grad for p in planned.parameters()])


@pytest.mark.parametrize("hooks", ["compress", "save_on_cpu"])
def test_hooks_on_saved_tensors_around_a_call(hooks: str, caplog: pytest.LogCaptureFixture) -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.bfloat16() if tensor.dtype == torch.float32 else tensor

    def context() -> Any:
        if hooks == "save_on_cpu":
            return torch.autograd.graph.save_on_cpu()
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.float() if t.dtype == torch.bfloat16 else t)

    torch.manual_seed(0)
    net, x = Net(None), torch.randn(4, 8)
    planned = copy.deepcopy(net)
    memplan.apply(planned, x, "1GiB", costs="estimate")
    for one in (net, planned):
        for _ in range(2):
            with context():
                one(x).backward()
    assert_same([p.grad for p in net.parameters()], [p.grad for p in planned.parameters()])
    assert caplog.text.count("runs unplanned under hooks on saved tensors") == 1


class Rounds(torch.utils._python_dispatch.TorchDispatchMode):
    """Changes what some ops give."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.bfloat16().float() if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default) else out


@pytest.mark.parametrize("planned_inside", [False, True])
def test_dispatch_modes_see_planned_ops_as_they_run(planned_inside: bool) -> None:
    torch.manual_seed(0)
    net, x = Net(None), torch.randn(4, 8)
    planned = copy.deepcopy(net)
    if planned_inside:
        with Rounds():
            memplan.apply(planned, x, "min", costs="estimate")
    else:
        memplan.apply(planned, x, "min", costs="estimate")
    for inside in (True, False, True):
        for one in (net, planned):
            one.zero_grad()
            if inside:
                with Rounds():
                    one(x).backward()
            else:
                one(x).backward()
        assert_same([p.grad for p in net.parameters()], [p.grad for p in planned.parameters()])


def test_escaped_tensors_are_found_wherever_they_are() -> None:
    """No name leads to where they are, as in an installed package."""
    hidden: dict[str, Any] = {"list": [], "object": Slotted(), "before": 1}
    made = MadeTensors()
    with torch._subclasses.FakeTensorMode():
        tensors = [torch.ones(3) for _ in range(3)]
    made.note(tensors)
    hidden["list"] += [tensors[0], ("loss", tensors[2]), "other"]
    hidden["object"].aux = tensors[1]
    with pytest.raises(memplan.UnsupportedModel, match="leaves tensors in a"), made:
        del tensors
    assert hidden["list"] == ["other"]
    assert not hasattr(hidden["object"], "aux")


def test_tensors_that_autograds_thread_of_a_device_still_holds_have_not_escaped() -> None:
    """That thread lets go of what it ran last a moment after backward has returned."""
    made = MadeTensors()
    with torch._subclasses.FakeTensorMode():
        held = [torch.ones(3, device="cuda")]
    made.note(held)
    with made:
        threading.Timer(0.1, held.clear).start()
    with torch._subclasses.FakeTensorMode():
        held.append(torch.ones(3, device="cuda"))
    made.note(held)
    with pytest.raises(memplan.UnsupportedModel, match="leaves tensors in a list"), made:
        pass
