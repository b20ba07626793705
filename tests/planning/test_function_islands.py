"""Functions and methods that can't be traced run as they are, as ops of a whole plan: no module around them has to.

Steps have the bits of the plain step, and leave the same in generators, at the least budget and half way to it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memplan
from memplan.problem.schedule import Compute
from tests.planning import functions_elsewhere
from tests.planning.functions_elsewhere import tanh_by_numpy as by_another_name
from tests.support.parameters import quickly
from tests.support.plannings import plannings
from tests.support.zoo import assert_same_bits, run_steps

WIDTH, ROWS = 32, 64
CALLS = [0]
OUTSIDE = nn.Parameter(torch.full((WIDTH,), 0.5))


def by_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.tanh(x.detach().numpy()))


class Net(nn.Module):
    """Layers, and in the middle what `mixed` does, in the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.after = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.embed = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.before:
            x = torch.relu(layer(x)) * torch.sigmoid(x)
        x = self.mixed(x)
        for layer in self.after:
            x = torch.relu(layer(x)) * torch.sigmoid(x)
        return x.pow(2).mean()

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return x * by_numpy(x)


def steps(net: nn.Module, sample: torch.Tensor) -> Any:
    random.seed(4)
    np.random.seed(4)
    return [run_steps(net, sample, 3), random.random(), np.random.rand()]


def assert_bits(
    kind: Callable[[], nn.Module], *islands: str, sample: torch.Tensor | None = None, **options: Any
) -> memplan.Plan:
    """Bits at the floor and half way, and the islands of both plans. Gives the plan at the floor."""
    torch.manual_seed(3)
    net, x = kind().train(), torch.randn(ROWS, WIDTH) if sample is None else sample
    plain, plans = steps(copy.deepcopy(net), x), []
    for budget in ("min", memplan.Budget(activations=0.85)):
        planned = copy.deepcopy(net)
        memplan.apply(planned, x, budget, costs="estimate", **options)
        assert_same_bits(plain, steps(planned, x))
        plan = memplan.plan_of(planned)
        assert isinstance(plan, memplan.Plan)
        assert [line.partition(" at ")[0] for line in plan.islands] == list(islands)
        plans.append(plan)
    assert plans[0].peak_bytes < plans[0].baseline_peak_bytes
    return plans[0]


def assert_unplanned(kind: Callable[[], nn.Module], reason: str) -> None:
    torch.manual_seed(3)
    net, x = kind().train(), torch.randn(ROWS, WIDTH)
    plain = steps(copy.deepcopy(net), x)
    with pytest.raises(memplan.UnsupportedModel, match=reason):
        memplan.plan(copy.deepcopy(net), x, 1.0, costs="estimate")
    memplan.apply(net, x, "min", costs="estimate")
    assert memplan.plan_of(net) is None
    assert_same_bits(plain, steps(net, x))


# -- functions --------------------------------------------------------------------------------------------------------


def test_a_function_of_the_file() -> None:
    assert_bits(Net, "by_numpy")


class Differentiable(Net):
    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return scaled_by_numpy(x, 0.5, bias=self.embed)


def scaled_by_numpy(x: torch.Tensor, least: float, bias: torch.Tensor) -> torch.Tensor:
    factor = max(least, float(np.abs(x.detach().numpy()).mean()))
    return (x * factor + bias) * x.sigmoid()


def test_a_function_whose_result_has_gradients() -> None:
    """x is read twice. What `mixed` reads is given: a parameter is an argument like any other."""
    assert_bits(Differentiable, "scaled_by_numpy")


class Elsewhere(Net):
    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return x * by_another_name(x) + functions_elsewhere.tanh_by_numpy(x) + functions_elsewhere.twice_by_numpy(x)


def test_a_function_with_several_callers_under_several_names() -> None:
    assert_bits(Elsewhere, "by_another_name", "tanh_by_numpy", "tanh_by_numpy")  # one for each line


def halved(x: torch.Tensor, times: int) -> torch.Tensor:
    return by_numpy(x) if times == 0 else halved(0.5 * x, times - 1)


def as_often(x: torch.Tensor, times: int) -> torch.Tensor:
    return torch.tensor(float(x.detach().numpy().mean())) * x if times == 0 else as_often(0.5 * x, times - 1)


class Recursive(Net):
    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return as_often(x, 3) + halved(x, 2)


def test_a_function_that_calls_itself() -> None:
    assert_bits(Recursive, "as_often", "by_numpy")


@torch.no_grad()
def chosen(x: torch.Tensor, least: float | None = None) -> torch.Tensor:
    return torch.from_numpy(np.argsort(x.numpy()[:, 0]))


@torch.no_grad()
def scores(x: torch.Tensor) -> torch.Tensor:
    return x.mean(1, keepdim=True)


class Decorated(Net):
    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return x[chosen(x)] * scores(x)


def test_a_function_that_is_decorated() -> None:
    """All functions under `torch.no_grad` run the same code."""
    assert_bits(Decorated, "chosen")


def branching(x: torch.Tensor) -> torch.Tensor:
    if torch.rand(()) < 0.5:
        return x * 2
    return x * torch.rand(x.shape[1])


class Branching(Net):
    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return branching(x)


def test_a_function_that_branches_on_a_random_number() -> None:
    assert_bits(Branching, "branching")


class Inner(Net):
    """The module that calls the function is traced."""

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * by_numpy(x)

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(self.Layer(WIDTH, WIDTH), self.Layer(WIDTH, WIDTH))

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def test_a_function_in_a_module() -> None:
    plan = assert_bits(Inner, "by_numpy")
    assert sum(op.layer.startswith("inner.") for op in plan.problem.graph.ops) > 4


# -- methods ----------------------------------------------------------------------------------------------------------


class Masks(Net):
    """Puts a parameter of its own in the place of rows that NumPy's generator chooses, as SpecAugment does."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        first = x[0] * 1.5
        x = self.masked(x)
        return x * first

    def masked(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.tensor(spans(x.shape[0]))
        x[rows] = self.embed.to(x.dtype)
        return x


def spans(rows: int) -> Any:
    return np.random.rand(rows) < 0.3


def test_a_method_that_writes_a_parameter_to_its_argument() -> None:
    assert_bits(Masks, "masked")


class MasksWithin(Masks):
    """The method is that of a module, of which there are two, and nothing but the parameter that it reads is given."""

    class Layer(Masks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.masked(self.before[0](x))  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(self.Layer(), self.Layer())

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def test_a_method_of_several_modules() -> None:
    plan = assert_bits(MasksWithin, "inner.0.masked", "inner.1.masked")
    names = {value.name for op in plan.problem.graph.ops if "island" in op.kind for value in values_of(plan, op)}
    assert {name for name in names if name.startswith("inner.")} == {"inner.0.embed", "inner.1.embed"}


def values_of(plan: memplan.Plan, op: Any) -> list[Any]:
    return [plan.problem.graph.values[value] for value in op.inputs]


class Gathers(Net):
    """Writes to its argument and returns that beside another tensor, which has no gradient."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        view = x[:, :2]
        x, order = self.sorted(x)
        return x * order[:, None] + view.sum(1, keepdim=True)

    def sorted(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = torch.from_numpy(np.argsort(x.detach().numpy()[:, 0]).astype(np.float32))
        return x.mul_(self.embed), order


def test_views_of_an_argument_have_what_a_method_writes_to_it() -> None:
    assert_bits(Gathers, "sorted")


class Updates(Net):
    """Writes to a buffer that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(torch.from_numpy(x.detach().numpy().mean(0)), alpha=0.1)  # type: ignore[operator, union-attr]
        return x - self.mean.clone()  # type: ignore[operator]


class Later(Masks):
    """Others write to what the method has written to, which is a view."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        self.halved(x[:, :4])
        x = self.masked(x)
        x.mul_(3)
        x[0] = 0
        return x

    def halved(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(float(np.random.rand()))


class Above(Masks):
    def masked(self, x: torch.Tensor) -> torch.Tensor:
        return super().masked(x * 1) + super().masked(x * 2)


@pytest.mark.parametrize(
    ("kind", "islands"), [(Updates, ["mixed"]), (Later, ["halved", "masked"]), (Above, ["masked"])]
)
def test_writes_of_methods(kind: type[Net], islands: list[str]) -> None:
    assert_bits(kind, *islands)


class Notes(Net):
    """Forward, and a framework between forward and backward, set attributes that the method does not read."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        self.before_it = x.mean()
        x = self.scaled(x)
        self.after_it = x.mean()
        wide = torch.cat([x] * 16, 1).tanh()
        return (wide * wide.sigmoid())[:, :WIDTH]

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x * self.embed * factor_of(x)] * 4).sigmoid()[: x.shape[0]]


def test_attributes_that_a_method_does_not_read() -> None:
    torch.manual_seed(3)
    net, x = Notes(), torch.randn(ROWS, WIDTH)
    plain = copy.deepcopy(net)
    memplan.apply(net, x, "min", costs="estimate")
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan)
    assert plan.islands[0].startswith("scaled at ")
    kinds = [plan.problem.graph.ops[step.op].kind for step in plan.schedule if isinstance(step, Compute)]
    assert kinds.count("memplan.island_scaled") == 2, "it runs again"
    for each in (net, plain):
        loss = each(x)
        each.framework = object()
        loss.backward()
    assert_same_bits({n: p.grad for n, p in plain.named_parameters()}, {n: p.grad for n, p in net.named_parameters()})
    assert_same_bits([plain.before_it, plain.after_it], [net.before_it, net.after_it])


class Renamed(Net):
    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * getattr(self, "em" + "bed") * float(x.detach().numpy().mean())


def test_a_parameter_that_a_method_does_not_name() -> None:
    assert_unplanned(Renamed, "reads a tensor that requires grad, and that it is not given")


class RunsLayers(Net):
    """A method that runs layers is none: PyTorch can checkpoint these, where the module runs as it is."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return self.after[0](x) * float(x.detach().numpy().mean())  # type: ignore[no-any-return]


def test_a_method_that_runs_layers() -> None:
    assert_unplanned(RunsLayers, "can't be traced")


# -- what can be none -------------------------------------------------------------------------------------------------


def factor_of(x: torch.Tensor) -> float:
    return float(x.detach().numpy().mean())


def with_losses(x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
    losses.append(x.pow(2).mean() * factor_of(x))
    return x * 2


def adds_to(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    total.add_(factor_of(x))
    return x * 2


def normalised(x: torch.Tensor) -> torch.Tensor:
    memory = x.detach().numpy()
    memory /= np.abs(memory).max() + 1
    return x * 2


class ByNumpy(Net):
    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return normalised(x * 1) * x


class Factor(Net):
    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return x * factor_of(x)


class Losses(Net):
    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        return with_losses(x, losses) + sum(losses)


class Adds(Net):
    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        return adds_to(x, total) * total


class Local(Net):
    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(np.tanh(x.detach().numpy()))

        return x * inner(x)


@pytest.mark.parametrize("kind", [Factor, Losses, Adds, ByNumpy, Local])
def test_the_call_around_a_function_that_can_be_none(kind: type[Net]) -> None:
    """It returns a number, changes a list or a tensor that it is given, be it by NumPy, or has no name in a file."""
    assert_bits(kind, "mixed")


class Counts(Net):
    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return counted(x) * CALLS[0]


def counted(x: torch.Tensor) -> torch.Tensor:
    CALLS[0] += 1
    return x * by_numpy(x)


class Behind(Net):
    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return with_outside(x)


def with_outside(x: torch.Tensor) -> torch.Tensor:
    return x * OUTSIDE * factor_of(x)


class Top(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * factor_of(x)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Behind, "with_outside at .* reads a tensor that requires grad, and that it is not given"),
        (Top, "factor_of returns no tensor, or more than tensors"),
    ],
)
def test_what_is_no_island(kind: type[Net], reason: str) -> None:
    assert_unplanned(kind, reason)


def test_a_function_that_changes_python_state() -> None:
    CALLS[0] = 0
    torch.manual_seed(3)
    plain, x = Counts(), torch.randn(ROWS, WIDTH)
    planned = copy.deepcopy(plain)
    expected = run_steps(plain, x, 3)
    CALLS[0] = 0
    memplan.apply(planned, x, "min", costs="estimate")
    assert_same_bits(expected, run_steps(planned, x, 3))


class Shares(Net):
    """Under autocast a weight is cast once for all its uses."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return projected(x, self.after[0].weight)


def projected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight) * factor_of(x.float())


class Own(Net):
    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return self.projected(x)

    def projected(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, torch.outer(self.embed, self.embed)) * factor_of(x.float())


@pytest.mark.parametrize(("kind", "is_planned"), [(Shares, False), (Own, True)])
def test_under_autocast(kind: type[Net], is_planned: bool) -> None:
    torch.manual_seed(3)
    net, x = kind(), torch.randn(ROWS, WIDTH)
    plain = run_steps(copy.deepcopy(net), x, autocast=True)
    with torch.autocast("cpu", torch.bfloat16):
        memplan.apply(net, x, "min", costs="estimate")
    assert (memplan.plan_of(net) is not None) == is_planned
    assert_same_bits(plain, run_steps(net, x, autocast=True))


# -- with other features, and in models of transformers ---------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"budget": "150KiB", "host_budget": "1MiB"},
        {"budget": "min", "grads": "edges"},
        {"budget": "min", "on_oom": "replan"},
        {"budget": "1GiB", "accumulate": True},
    ],
    ids=["offload", "edges", "replan", "accumulate"],
)
def test_other_features(options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    net, x = Masks(), torch.randn(ROWS, WIDTH)
    plain = steps(copy.deepcopy(net), x)
    memplan.apply(net, x, costs="estimate", **options)
    assert isinstance(memplan.plan_of(net), memplan.Plan)
    assert_same_bits(plain, steps(net, x))


def test_a_plan_from_a_file(tmp_path: Path) -> None:
    torch.manual_seed(3)
    net, x = Masks(), torch.randn(ROWS, WIDTH)
    plain, other = steps(copy.deepcopy(net), x), copy.deepcopy(net)
    memplan.apply(net, x, "min", costs="estimate")
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan)
    plan.save(tmp_path / "plan.json")
    memplan.apply(other, x, plan=memplan.Plan.load(tmp_path / "plan.json"))
    assert_same_bits(plain, steps(other, x))


def test_the_curve_bounds_and_plans_ahead() -> None:
    torch.manual_seed(3)
    net, x = Masks(), torch.randn(ROWS, WIDTH)
    plain = copy.deepcopy(net)
    curve = memplan.explore(net, x, costs="estimate")
    assert len(curve) > 1 and all(plan.islands for plan in curve)
    assert [p.peak_bytes for p in curve] == sorted(p.peak_bytes for p in curve)
    assert [p.time_s for p in curve] == sorted((p.time_s for p in curve), reverse=True)
    assert all(0 < p.lower_bound_s <= p.time_s and p.gap >= 0 and p.floor_bytes <= p.peak_bytes for p in curve)
    middle = curve[len(curve) // 2]
    memplan.apply(net, x, plan=middle)
    (ahead,) = memplan.prepare(net, [x[:48]])
    assert ahead is not None and ahead.islands
    with plannings() as reasons:
        for rows in (ROWS, 48):
            assert_same_bits(steps(plain, x[:rows]), steps(net, x[:rows]))
    assert not reasons


def test_other_lengths() -> None:
    torch.manual_seed(3)
    net = Masks()
    plain = copy.deepcopy(net)
    memplan.apply(net, torch.randn(ROWS, WIDTH), "200KiB", costs="estimate")
    for rows in (ROWS, 48, 80, 96):
        x = torch.randn(rows, WIDTH)
        assert_same_bits(steps(plain, x), steps(net, x))


def speech(name: str, **changes: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, mask_time_prob=0.3, mask_time_length=2,
        mask_feature_prob=0.2, mask_feature_length=2, layerdrop=0.0, **changes,
    )  # fmt: skip
    net: nn.Module = getattr(transformers, f"{name}ForCTC")(config)
    return net.train()


@pytest.mark.parametrize("name", quickly(("Wav2Vec2", "Hubert"), "Wav2Vec2"))
def test_speech_models_mask_spans(name: str) -> None:
    torch.manual_seed(3)
    net, sample = speech(name), {"input_values": torch.randn(2, 2000), "labels": torch.randint(1, 32, (2, 4))}
    assert_bits(lambda: net, f"{name.lower()}._mask_hidden_states", sample=sample)  # type: ignore[arg-type]


class _Overwrites(torch.autograd.Function):
    """Has other numbers in the memory of its input, which autograd does not see, and saves them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = x * 1.0
        x.detach().numpy()[...] *= 3
        ctx.save_for_backward(x.detach())
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x


class _Overwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(_Overwrites.apply(torch.exp(0.1 * layer(x))))  # type: ignore[no-untyped-call]
        return x.sum()


@pytest.mark.parametrize("budget", [1.0, "min"])
def test_what_an_autograd_function_puts_into_its_input_stays(budget: float | str) -> None:
    torch.manual_seed(0)
    plain, x = _Overwritten(), torch.randn(64, 16)
    planned = copy.deepcopy(plain)
    memplan.apply(planned, x, budget, costs="estimate")
    assert memplan.plan_of(planned) is not None
    for _ in range(2):
        assert_same_bits(run_steps(plain, (x,), steps=1), run_steps(planned, (x,), steps=1))


_KERNELS: dict[str, Any] = {}
_SCALES: dict[str, float] = {}


class _ByMean(torch.autograd.Function):
    """Reads a number from its input, and finds its kernel in a table, which it fills, as what is compiled late does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        _KERNELS.setdefault("inner", np.tanh)
        ctx.scale = 2.0 if x.sum().item() > 0 else 3.0
        return torch.from_numpy(x.detach().numpy() * ctx.scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.scale  # type: ignore[no-any-return]


class Dispatches(Net):
    """Looks for what runs in a table, which a first run fills."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        if "outer" not in _KERNELS:
            _KERNELS["outer"] = _ByMean.apply
        return _KERNELS["outer"](x)  # type: ignore[no-any-return]


class Calibrates(Net):
    """Keeps a number of the first batch for all later ones."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        if "scale" not in _SCALES:
            _SCALES["scale"] = float(x.detach().abs().mean())
        return _ByMean.apply(x) * _SCALES["scale"]  # type: ignore[no-any-return, no-untyped-call]


def test_tables_that_a_first_run_fills_are_no_matter_of_islands() -> None:
    for budget in ("min", 1.0):
        torch.manual_seed(3)
        net, x = Dispatches().train(), torch.randn(ROWS, WIDTH)
        plain = copy.deepcopy(net)
        _KERNELS.clear()
        memplan.apply(net, x, budget, costs="estimate")
        assert not _KERNELS  # nothing has run yet
        plan = memplan.plan_of(net)
        assert plan is not None and [line.partition(" at ")[0] for line in plan.islands] == ["_ByMean"]
        planned = steps(net, x)
        assert set(_KERNELS) == {"outer", "inner"}
        assert_same_bits(steps(plain, x), planned)


def test_a_number_of_the_first_batch_that_forward_keeps() -> None:
    torch.manual_seed(3)
    net, batches = Calibrates().train(), [torch.randn(ROWS, WIDTH) for _ in range(3)]
    plain = copy.deepcopy(net)
    _SCALES.clear()
    memplan.apply(net, batches[0], 0.9, costs="estimate")
    found = []
    for each in (net, plain):
        _SCALES.clear()
        found.append([steps(each, x) for x in reversed(batches)])
    assert_same_bits(*found)
