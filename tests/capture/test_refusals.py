"""What memplan refuses, in which words, and that a refusal leaves the model as it was."""

from __future__ import annotations

import copy
import functools
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.nn.functional import all_gather

import memplan
from tests.support.small import Net, net_and_sample, nothing_changes
from tests.support.zoo import assert_same_bits, copied, run_steps

# -- budgets ----------------------------------------------------------------------------------------------------------


def test_a_budget_under_the_floor_says_the_floor_and_what_it_costs() -> None:
    net, sample = net_and_sample()
    with nothing_changes(net, sample), pytest.raises(memplan.BudgetInfeasible) as caught:
        memplan.apply(net, sample, 1000, costs="estimate")
    error = caught.value
    assert isinstance(error.floor_bytes, int)
    assert str(error.floor_bytes) in str(error)
    assert f"{error.floor_overhead:+.0%} time" in str(error)
    with pytest.raises(memplan.BudgetInfeasible):
        memplan.apply(net, sample, error.floor_bytes - 1, costs="estimate")
    plain = run_steps(copy.deepcopy(net), sample)
    memplan.apply(net, sample, error.floor_bytes, costs="estimate")
    plan = memplan.plan_of(net)
    assert plan.peak_bytes <= error.floor_bytes
    assert plan.overhead == pytest.approx(error.floor_overhead)
    assert_same_bits(plain, run_steps(net, sample))


@pytest.mark.parametrize(
    "budget",
    [
        "",
        "lots",
        "8 giraffes",
        "-1GiB",
        "1e9",
        "0x10",
        "8GiB8",
        "٣GiB",
        "nan",
        "inf",
        "0",
        "0GiB",
        "0.1B",
        "1,5GiB",
        "½GiB",
    ],
)
def test_a_string_that_is_no_size(budget: str) -> None:
    net, sample = net_and_sample()
    with nothing_changes(net, sample), pytest.raises(ValueError, match="bytes"):
        memplan.apply(net, sample, budget, costs="estimate")


@pytest.mark.parametrize(
    ("budget", "error"),
    [
        (0, ValueError),
        (-5, ValueError),
        (0.0, ValueError),
        (-0.5, ValueError),
        (1.5, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (True, TypeError),
        (False, TypeError),
        (b"8GiB", TypeError),
        ([1], TypeError),
        (1j, TypeError),
        (memplan.Budget(), ValueError),
        (memplan.Budget(device=0), ValueError),
        (memplan.Budget(activations=float("nan")), ValueError),
        (memplan.Budget(device=True), TypeError),
    ],
    ids=repr,
)
def test_a_number_that_is_no_budget(budget: Any, error: type[Exception]) -> None:
    net, sample = net_and_sample()
    with nothing_changes(net, sample), pytest.raises(error, match=r"budget|Budget"):
        memplan.apply(net, sample, budget, costs="estimate")


def test_a_huge_budget_is_keep_all() -> None:
    net, sample = net_and_sample()
    memplan.apply(net, sample, "1000000TiB", costs="estimate")
    assert not memplan.plan_of(net).recomputed
    memplan.apply(net, sample, 1 << 80, costs="estimate")
    assert not memplan.plan_of(net).recomputed


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", [3, "text", {1, 2}], ids=repr)
def test_a_sample_that_is_no_sample(sample: Any) -> None:
    net, _ = net_and_sample()
    with nothing_changes(net), pytest.raises(TypeError, match="sample must be"):
        memplan.apply(net, sample, 0.5, costs="estimate")


def test_a_model_that_is_no_module() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        memplan.apply(lambda x: x, torch.ones(1), 0.5)


def test_a_sample_on_another_device() -> None:
    net, sample = net_and_sample()
    with nothing_changes(net), pytest.raises(ValueError, match=r"on the meta device .* Give one with data, on cpu"):
        memplan.apply(net, sample.to("meta"), 0.5, costs="estimate")


@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_a_kind_of_device_that_steps_are_not_planned_for(device: str) -> None:
    net, sample = net_and_sample()
    with nothing_changes(net), pytest.raises(ValueError, match=f"steps on {device} can't be planned"):
        memplan.apply(net, sample, 0.5, device=device)


def test_arguments_that_forward_does_not_take() -> None:
    net, sample = net_and_sample()
    with nothing_changes(net, sample), pytest.raises((memplan.UnsupportedModel, TypeError), match="mask"):
        memplan.apply(net, {"x": sample, "mask": sample}, 0.5, costs="estimate")


def test_a_shape_that_forward_refuses() -> None:
    net, sample = net_and_sample()
    with nothing_changes(net, sample), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        memplan.apply(net, sample[:, :3], 0.5, costs="estimate")


def test_budget_and_plan_together() -> None:
    net, sample = net_and_sample()
    plan = memplan.plan(net, sample, 1.0, costs="estimate")
    with nothing_changes(net, sample), pytest.raises(TypeError, match="not both"):
        memplan.apply(net, sample, 0.5, plan=plan)


@pytest.mark.parametrize(
    "link", ["25GB/s", 25e9, memplan.Link(0, 1e9), memplan.Link(1e9, -1e9), memplan.Link(1, 1, -1)]
)
def test_links_that_copy_nothing(link: Any) -> None:
    net, sample = net_and_sample()
    with nothing_changes(net), pytest.raises((TypeError, ValueError), match=r"link .*got.*(25|Link)"):
        memplan.apply(net, sample, 0.5, host_budget="1GiB", link=link)


def test_what_is_no_optimizer() -> None:
    net, sample = net_and_sample()
    with nothing_changes(net), pytest.raises(TypeError, match="optimizer"):
        memplan.apply(net, sample, 0.5, optimizer=torch.optim.AdamW)  # type: ignore[arg-type]


def test_the_optimizer_of_another_model(caplog: pytest.LogCaptureFixture) -> None:
    net, sample = net_and_sample()
    optimizer = torch.optim.AdamW(copy.deepcopy(net).parameters())
    with nothing_changes(net), pytest.raises(ValueError, match="none of the model's parameters"):
        memplan.apply(net, sample, 1.0, optimizer=optimizer, update="backward")
    assert not caplog.text
    memplan.apply(net, sample, 1.0, optimizer=optimizer, costs="estimate")
    assert "none of the model's parameters" in caplog.text


# -- models that can't be captured exactly ----------------------------------------------------------------------------


class DataBranch(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.features(x)
        return out.sum() if out.sum() > 0 else out.mean()  # the branch


class DataShape(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.features(x)
        return out[out.nonzero(as_tuple=True)].mean()  # the shape


class WritesIntoAnEmptyTensor(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = torch.empty(0)
        torch.mul(x.detach(), 2.0, out=extra)  # the memory
        return super().forward(x) + extra.mean()


class Resizes(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = torch.empty(0).resize_(x.shape).zero_()  # the memory
        return super().forward(x) + (extra + x).mean()


class CountOfNonzero(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x.nonzero().shape[0]


class Selected(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x[x > 0].sum()


class SeedsItself(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            noise = torch.rand_like(x)
        return super().forward(x + noise)


class RandomBranch(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.features(x)
        return out.mean() if torch.rand(()) > 0.5 else out.sum()  # the draw


class RandomBranchOfAnotherRange(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = torch.rand(1)
        number.view(()).sub_(0.5)
        return self.features(x).mean() if number < 0.0 else self.features(x).sum()  # the draw


class PythonRandom(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x).mean() * random.random()


class NumpyRandom(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x).mean() * float(np.random.rand())


class DrawsAndBranches(Net):
    """Numbers of Python and numpy, and then a branch that can't be captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.features(x).mean() * (random.random() + float(np.random.rand()))
        return out * 2 if torch.rand([]) < 0.5 else out


class Counter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class CountsInADict(Net):
    def __init__(self) -> None:
        super().__init__()
        self.log: dict[str, int] = {"calls": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log["calls"] += 1
        return super().forward(x)


class AppendsToAList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.history.append(1)
        return super().forward(x)


class KeepsATensor(Net):
    last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, self.last = self.last, self.features(x)
        return self.last.mean() if before is None else (self.last + before.detach()).mean()


class KeepsATensorInADict(Net):
    def __init__(self) -> None:
        super().__init__()
        self.log: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.features(x)
        self.log["mean"] = out.detach().mean()
        return out.mean()


class AddsASubmodule(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(8, 8)
        return self.late(self.features(x)).mean()


class ExchangesASubmodule(Net):
    def __init__(self) -> None:
        super().__init__()
        self.act: nn.Module = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.act = nn.Sigmoid()
        return self.act(self.features(x)).mean()


class ExchangesAParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = nn.Parameter(self.scale.detach() * 2)
        return (self.features(x) * self.scale).mean()


class AddsABuffer(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("late", self.made(x), persistent=False)
        return super().forward(x)

    def made(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones(8)


class AddsABufferOfData(AddsABuffer):
    def made(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach().mean(0)


class OwnGenerator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("not needed")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.features(x)
        return (out * torch.rand(out.shape, generator=self.generator)).mean()


class UsesNumpy(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x).mean() * float(x.numpy().sum())


class ParameterView(Net):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), self.outer.weight.t()


class NoGrad(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return super().forward(x)


class Foreign(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lost = [nn.Parameter(torch.ones(8))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.features(x) * self.lost[0]).mean()


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 8, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x[:, 0].abs() * 8).long()).pow(2).mean()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (DataBranch, ["depends on", "test_refusals.py", "out.sum() > 0"]),
        (DataShape, ["depends on data", "test_refusals.py", "nonzero"]),
        (WritesIntoAnEmptyTensor, ["aten.mul.out changes the memory", "test_refusals.py", "the memory"]),
        (Resizes, ["aten.resize_.default changes the memory", "test_refusals.py", "the memory"]),
        (SeedsItself, ["generator"]),
        (RandomBranch, ["random numbers", "test_refusals.py", "torch.rand"]),
        (RandomBranchOfAnotherRange, ["random numbers", "test_refusals.py", "number < 0.0"]),
        (PythonRandom, ["random"]),
        (NumpyRandom, ["random"]),
        (DrawsAndBranches, ["random numbers", "test_refusals.py", "torch.rand"]),
        (Counter, ["Counter.calls", "each time"]),
        (CountsInADict, ["log"]),
        (AppendsToAList, ["history"]),
        (KeepsATensor, ["last"]),
        (KeepsATensorInADict, ["log"]),
        (AddsASubmodule, ["adds", "submodule late", "before memplan.apply"]),
        (ExchangesASubmodule, ["exchanges", "submodule act"]),
        (ExchangesAParameter, ["exchanges", "parameter scale"]),
        (AddsABufferOfData, ["adds", "buffer late"]),
        (OwnGenerator, ["enerator"]),
        (UsesNumpy, ["numpy", "test_refusals.py"]),
        (ParameterView, ["view of parameter outer.weight", "clone"]),
        (NoGrad, ["requires grad", "no_grad"]),
        (Foreign, ["requires grad", "(8,)", "parameter"]),
        (SparseEmbedding, ["sparse=False"]),
    ],
    ids=lambda p: p.__name__ if isinstance(p, type) else "",
)
def test_models_that_cannot_be_captured_are_refused_by_name(kind: type[nn.Module], words: list[str]) -> None:
    net, sample = net_and_sample(kind)
    with nothing_changes(net, sample), pytest.raises(memplan.UnsupportedModel) as caught:
        memplan.plan(net, sample, 1.0, costs="estimate", in_flight=2)  # so that no run shows branches and caches
    assert [word for word in words if word not in str(caught.value)] == []
    assert memplan.plan_of(net) is None


def test_a_buffer_that_any_first_run_adds_serves_several_forwards_in_flight() -> None:
    net, sample = net_and_sample(AddsABuffer)
    plain, batches = copy.deepcopy(net), [torch.randn_like(sample) for _ in range(2)]
    memplan.apply(net, sample, "min", costs="estimate", in_flight=2)
    for _ in range(2):
        found = []
        for each in (plain, net):
            torch.manual_seed(1)
            losses = [each(x) for x in batches]
            for loss in reversed(losses):
                loss.backward()
            found.append((losses, [copied(p.grad) for p in each.parameters()], copied(dict(each.named_buffers()))))
        assert_same_bits(*found)


def by_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.tanh(x.detach().numpy()))


@pytest.mark.parametrize("marked", [False, True])
def test_a_function_is_an_island_as_if_it_was_marked(marked: bool) -> None:
    class CallsIt(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * by_numpy(x))

    net, sample = net_and_sample(CallsIt)
    with pytest.MonkeyPatch.context() as patched:
        if marked:
            patched.setitem(globals(), "by_numpy", memplan.opaque(by_numpy))
        plain = run_steps(copy.deepcopy(net), sample)
        memplan.apply(net, sample, "min", costs="estimate")
        assert memplan.plan_of(net).islands  # type: ignore[union-attr]
        assert_same_bits(plain, run_steps(net, sample))


def test_the_module_of_a_data_dependent_branch_is_named() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Net(), DataBranch()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](x) + self.blocks[1](x)

    net, sample = net_and_sample(Outer)
    with nothing_changes(net, sample):
        (island,) = memplan.plan(net, sample, 1.0, costs="estimate", in_flight=2).islands
    assert island.startswith("blocks.1 at ") and "module blocks.1" in island and "test_refusals.py" in island


def test_a_frozen_model() -> None:
    net, sample = net_and_sample()
    net.requires_grad_(False)
    with nothing_changes(net, sample), pytest.raises(memplan.UnsupportedModel, match="frozen"):
        memplan.apply(net, sample, 1.0, costs="estimate")


def test_a_model_without_parameters() -> None:
    net = nn.Sequential(nn.ReLU())
    with nothing_changes(net), pytest.raises(memplan.UnsupportedModel, match="neither parameters nor buffers"):
        memplan.apply(net, torch.ones(2), 1.0, costs="estimate")


def test_a_model_without_memory() -> None:
    net = Net().to("meta")
    with pytest.raises(memplan.UnsupportedModel, match="meta"):
        memplan.apply(net, torch.ones(2, 8), 1.0, costs="estimate")


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_on_submodules(register: str) -> None:
    net, sample = net_and_sample()
    handle = getattr(net.middle, register)(lambda *args: None)
    with nothing_changes(net, sample):
        (island,) = memplan.plan(net, sample, 1.0, costs="estimate").islands
    assert island.startswith("middle at ") and "module middle has " in island
    handle.remove()
    assert not memplan.plan(net, sample, 1.0, costs="estimate").islands


def test_hooks_on_submodules_added_later() -> None:
    net, sample = net_and_sample()
    memplan.apply(net, sample, 0.7, costs="estimate", on_mismatch="raise")
    handle = net.middle.register_forward_hook(lambda *args: None)
    with pytest.raises(memplan.PlanMismatch, match="hooks were added to module middle"):
        net(sample)
    handle.remove()
    net(sample).backward()


@pytest.mark.parametrize("kind", ["DataParallel", "DistributedDataParallel", "DeepSpeedEngine"])
def test_wrapped_models(kind: str) -> None:
    """Told by the names of classes: most of these can't be made without ranks."""
    net, sample = net_and_sample()
    wrapper = nn.DataParallel(net) if kind == "DataParallel" else type(kind, (nn.Sequential,), {})(net)
    with nothing_changes(net, sample), pytest.raises(memplan.UnsupportedModel, match=rf"{kind}.*model inside"):
        memplan.apply(wrapper, sample, 1.0, costs="estimate")


@pytest.mark.parametrize("how", ["function", "method"])
def test_compiled_models(how: str) -> None:
    net, sample = net_and_sample()
    compiled = functools.partial(torch.compile, backend="eager")
    planned: Any = net
    if how == "function":
        planned = compiled(net)
    else:
        net.compile(backend="eager")
    with pytest.raises(memplan.UnsupportedModel, match="compile"):
        memplan.apply(planned, sample, 1 << 30, costs="estimate")
    assert memplan.plan_of(net) is None


def test_modules_that_went_through_jit() -> None:
    net, sample = net_and_sample()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(net, torch.jit.trace(nn.Tanh(), torch.randn(2)))
    with pytest.raises(memplan.UnsupportedModel, match=r"module 1 went through torch.jit"):
        memplan.apply(model, sample, 1.0, costs="estimate")


def test_parameters_without_a_shape() -> None:
    model, sample = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)), torch.randn(2, 4)
    before = torch.get_rng_state()
    with pytest.raises(memplan.UnsupportedModel, match=r"of 1 have no shape yet. Run the model once"):
        memplan.apply(model, sample, 1.0, costs="estimate")
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        model(sample)
    memplan.apply(model, sample, 1.0, costs="estimate")


def test_the_plan_of_another_model_says_what_differs() -> None:
    net, sample = net_and_sample()
    plan = memplan.plan(net, sample, 1.0, costs="estimate")
    torch.manual_seed(0)
    other = Net()
    other.middle = nn.Linear(32, 32, bias=False)
    with nothing_changes(other, sample), pytest.raises(memplan.PlanMismatch, match=r"middle\.bias"):
        memplan.apply(other, sample, plan=plan)
    with (
        nothing_changes(net, sample),
        pytest.raises(memplan.PlanMismatch, match=r"2048 in the plan, 1024 in the model"),
    ):
        memplan.apply(net, sample[:32].clone(), plan=plan, dynamic="never")


class ReadsATensorAttribute(Net):
    def __init__(self) -> None:
        super().__init__()
        self.number = torch.tensor(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.number.item()


def test_a_number_read_from_a_tensor_attribute_is_never_stale() -> None:
    net, sample = net_and_sample(ReadsATensorAttribute)
    memplan.apply(net, sample, 1.0, costs="estimate", on_mismatch="raise")
    net(sample).backward()
    net.number.fill_(3.0)
    with pytest.raises(memplan.PlanMismatch, match=r"reads 3\.0"):
        net(sample)
    net.number.fill_(1.0)
    net(sample).backward()


class TwoHeads(nn.Module):
    """One head takes much more than the other."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.small, self.large = nn.Linear(16, 16), nn.Linear(16, 1), nn.Linear(16, 512)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x).tanh()
        return self.small(hidden), self.large(hidden).exp().log1p()


def test_a_refusal_for_several_outputs_names_the_loss_that_uses_fewer() -> None:
    net, x = TwoHeads().train(), torch.randn(64, 16)
    memplan.apply(net, x, 1.0, costs="estimate")
    floor_bytes = memplan.plan_of(net).floor_bytes
    net(x)[0].sum().backward()
    less_bytes = memplan.plan_of(net).floor_bytes
    assert less_bytes < floor_bytes
    with pytest.raises(memplan.BudgetInfeasible, match=r"gradients of 2 outputs; with loss_fn=") as refused:
        memplan.apply(net, x, less_bytes, costs="estimate")
    assert refused.value.floor_bytes == floor_bytes
    memplan.apply(net, x, floor_bytes, costs="estimate")
    net = TwoHeads().train()
    with_loss: Any = {"loss_fn": lambda model, x: model(x)[0].sum(), "costs": "estimate"}
    memplan.apply(net, x, memplan.plan(net, x, 1.0, **with_loss).floor_bytes, **with_loss)
    assert memplan.plan_of(net).peak_bytes <= floor_bytes


# -- tensors without data ---------------------------------------------------------------------------------------------


class Gathers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(all_gather(self.inner(x))).pow(2).mean()


@pytest.mark.filterwarnings("ignore:.*all_gather:FutureWarning")
def test_a_collective_that_is_no_functional_one_is_named() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(memplan.UnsupportedModel, match=r"the collective c10d.*_functional_collectives can be ops"):
            memplan.plan(Gathers(), torch.randn(4, 8), 1.0, costs="estimate")
    finally:
        torch.distributed.destroy_process_group()


class TakesTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner(x) if y is None else self.inner(x) + y.sum()


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("when", ["sample", "first batch", "later batch"])
def test_a_batch_without_data_is_refused(device: str | None, beside: bool, when: str) -> None:
    net, x = TakesTwo().train(), torch.randn(4, 8)
    batch = (x, x.to("meta")) if beside else (x.to("meta"),)
    options: Any = {"costs": "estimate", "device": device}

    def run() -> None:
        if when == "sample":
            memplan.apply(net, batch, 1.0, **options)
        else:
            memplan.apply(net, x if when == "later batch" else None, 1.0, **options)(*batch)

    with pytest.raises(ValueError, match=rf"sample {'y' if beside else 'x'}, of shape \(4, 8\), is on the meta device"):
        run()
