"""Which function of PyTorch runs an op in a program."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import memplan
from memplan.problem.schedule import Compute
from memplan.runtime.program.bindings import binding
from memplan.runtime.program.execute import Runner
from tests.support.meter import LiveMeter
from tests.support.parameters import quickly
from tests.support.small import at_floor, pair
from tests.support.zoo import MODELS, assert_same_bits, call, loss_of, run_steps

aten = torch.ops.aten


def node(tensor: torch.Tensor) -> fx.Node:
    placeholder = fx.Graph().placeholder("x")
    placeholder.meta["val"] = tensor
    return placeholder


X, ONE = node(torch.empty(4, 4, device="meta")), node(torch.empty((), device="meta"))
ON_CPU = {"dtype": torch.float32, "device": torch.device("cpu")}

CASES: list[tuple[Any, tuple[Any, ...], dict[str, Any], Callable[..., Any] | None]] = [
    (aten.mm.default, (X, X), {}, torch.mm),
    (aten.add.Tensor, (X, ONE), {}, torch.add),
    (aten.add_.Tensor, (X, X), {}, torch.Tensor.add_),
    (aten.sum.dim_IntList, (X, [0], True), {}, torch.sum),
    (aten.clone.default, (X,), {"memory_format": torch.contiguous_format}, torch.clone),
    (aten.empty_strided.default, ([2, 2], [2, 1]), ON_CPU, torch.empty_strided),
    (aten.silu.default, (X,), {}, torch._C._nn.silu),
    # Python would pick an op of another name, or of no name, or none.
    (aten.mul.Scalar, (X, 2.0), {}, None),
    (aten.div_.Scalar, (X, 2.0), {}, None),
    (aten.tanh_backward.default, (X, X), {}, None),
    (aten.native_layer_norm_backward.default, (X, X, [4], X, X, X, X, [True] * 3), {}, None),
    (torch.ops.memplan.sum_of_weights.default, (X, X, -100), {}, None),
    (torch.as_strided, (X, [2, 2], [1, 1], 0), {}, None),
    # A default device would move them.
    (aten.ones.default, ([2, 2],), {}, None),
    (aten.scalar_tensor.default, (2.0,), {"dtype": torch.float32}, None),
    # There is no such device, and nothing asks for one.
    (aten.empty_strided.default, ([2, 2], [2, 1]), {**ON_CPU, "device": torch.device("xpu")}, None),
]


@pytest.mark.parametrize(("target", "args", "kwargs", "function"), CASES)
@pytest.mark.parametrize("autocast", [False, True])
def test_an_op_runs_by_the_function_that_runs_just_this_op(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], function: Callable[..., Any] | None, autocast: bool
) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), LiveMeter():
        assert binding(target, args, kwargs) is (target if function is None else function)


class Log(TorchDispatchMode):
    """The names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "name", quickly(("gpt2", "llama_eager", "resnet50", "unet", "handmade"), "llama_eager", "handmade")
)
def test_programs_dispatch_the_ops_of_their_schedule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, sample = MODELS[name](0)
    memplan.apply(net, sample, 0.9, costs="estimate")
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan)
    log, run = Log(), Runner._run

    def logged(runner: Runner, program: fx.GraphModule, arguments: list[Any]) -> Any:
        with log:
            return run(runner, program, arguments)

    monkeypatch.setattr(Runner, "_run", logged)
    loss_of(call(net, sample)).backward()
    kinds = [plan.problem.graph.ops[step.op].kind for step in plan.schedule if isinstance(step, Compute)]
    planned = [kind for kind in kinds if kind.startswith("aten.")]
    assert [name for name in log.names if name in planned] == planned


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_a_default_device_moves_nothing_that_a_planned_step_makes(default: str) -> None:
    plain, planned, sample = pair()
    with torch.device(default):
        assert_same_bits(run_steps(plain, sample), run_steps(planned, sample))


class Doubling(TorchFunctionMode):
    """Takes products twice."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.mm else result


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.mm(torch.tanh(torch.mm(x, self.weight)), self.weight)).mean()


def test_what_a_function_mode_does_is_done_once() -> None:
    """It is in the trace; another mode, or none, is another step."""
    plain, net, sample = pair(Product)
    for mode in (Doubling(), contextlib.nullcontext(), Doubling()):
        with mode:
            assert_same_bits(run_steps(plain, sample), run_steps(net, sample))


def test_a_function_that_somebody_exchanges_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After programs were made with the original."""
    plain, _net, sample = pair(Product)
    original = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: original(a, b) * 2)
    net = at_floor(copy.deepcopy(plain), sample)
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))


class Sharing(nn.Module):
    """Two layers read one activation, of which each makes the same view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x.view(2, 4, 4))
        return sum(torch.sin(layer(x)) for layer in self.layers).mean()  # type: ignore[union-attr]


def test_views_are_made_once() -> None:
    plain, sample = Sharing(), torch.randn(8, 4)
    net = memplan.apply(copy.deepcopy(plain), sample, 1.0, costs="estimate")
    program = net.forward.steps[0].runner.program
    for side in (program.forward, program.backward):
        views = [n for n in side.graph.nodes if n.target in (torch.as_strided, torch.t)]
        assert len({(n.target, str(n.args)) for n in views}) == len(views)
        assert all(n.args[0].target is not n.target for n in views), "w.t().t() is w"
    assert torch.t in [n.target for n in program.forward.graph.nodes]
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))
