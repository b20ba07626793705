"""What PyTorch computes while a dispatch mode is on, as in a trace, against what it computes without one.

Dispatch logs can't tell: they are modes themselves. A new branch in a new PyTorch shows here as other bits.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import memplan
from memplan import torch_private as private
from memplan.capture.ops.layout import strides_that_matter
from memplan.capture.trace.branches import as_without_modes
from memplan.runtime.host.fetch import FetchedWhereUsed
from tests.support.branch_cases import CASES, REFUSED, Case, Draw, ignoring
from tests.support.small import at_floor
from tests.support.zoo import assert_same_bits, first_difference, run_steps


class Transparent(TorchDispatchMode):
    """Does nothing but be there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def results(case: Case) -> list[Any]:
    """Outputs and gradients of a case, with strides."""
    torch.manual_seed(0)
    draw = Draw()
    outputs = [t for t in pytree.tree_leaves(case(draw)) if isinstance(t, torch.Tensor)]
    starts = [t for t in outputs if t.requires_grad]
    tangents = [torch.randn(t.shape, dtype=t.dtype) for t in starts]
    grads = torch.autograd.grad(starts, draw.leaves, tangents, allow_unused=True) if starts else ()
    return [(t, strides_that_matter(t.shape, t.stride())) for t in (*outputs, *grads) if t is not None]


def watched(case: Case) -> list[Any]:
    """The same as a trace runs it."""
    with as_without_modes(), Transparent():
        return results(case)


@pytest.mark.filterwarnings("ignore")  # some layers tell of slow paths and of what will change
def test_a_dispatch_mode_changes_no_bits() -> None:
    differences = {name: first_difference(results(case), watched(case), "result") for name, case in CASES.items()}
    assert {name: d for name, d in differences.items() if d is not None} == {}


def test_a_dispatch_mode_would_change_bits() -> None:
    """Else the test above could not fail."""
    for name in ("max of all", "weighted and smoothed", "bce of two dtypes", "ormqr", "svdvals of an input"):
        with Transparent():
            got = results(CASES[name])
        assert first_difference(results(CASES[name]), got, "result") is not None, name


def test_a_forward_that_fetches_parameters_takes_the_way_of_eager() -> None:
    for name in ("one and batch", "weighted and smoothed", "svdvals of an input"):
        with FetchedWhereUsed([], torch.device("cpu")):
            got = results(CASES[name])
        assert_same_bits(results(CASES[name]), got, name)


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_data_is_refused(name: str) -> None:
    results(REFUSED[name])
    with pytest.raises(memplan.UnsupportedModel, match=r"branch_cases\.py:\d+"):
        watched(REFUSED[name])


# -- planned steps ---------------------------------------------------------------------------------------------------

Head = Callable[["Headed", torch.Tensor, torch.Tensor], torch.Tensor]


class Headed(nn.Module):
    """Layers that can be planned, and a loss of their output and the input."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 24))
        self.value = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("graph", torch.randn(1, 24, 64))
        self.register_buffer("weight", torch.rand(24))
        self.register_buffer("target", ignoring(torch.randint(0, 24, (33,))))
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self, self.body(x), x)


HEADS: dict[str, Head] = {
    "max": lambda m, y, x: -y.max(),
    "median": lambda m, y, x: y.median() * -y.sum(),
    "product of a batch and a matrix": lambda m, y, x: torch.tanh(y.view(11, 3, 24) @ m.graph).sum(),
    "weighted and smoothed": lambda m, y, x: F.cross_entropy(y, m.target, m.weight, label_smoothing=0.1),
    "bce of two dtypes": lambda m, y, x: F.binary_cross_entropy_with_logits(y[:, :16], torch.sigmoid(x).double()),
    "values of an input": lambda m, y, x: y.sum() * torch.linalg.svdvals(x).sum(),
    "ormqr": lambda m, y, x: torch.tanh(torch.ormqr(y[:5, :5].mT, y[6, :5], y[7:12, :5])).sum(),
    "prod of an input": lambda m, y, x: y.sum() * x.prod(1).sum(),
    "prod without gradients": lambda m, y, x: y.sum() * y.detach().prod(1).sum(),
    "prod that nobody reads": lambda m, y, x: y.sum() + 0 * y.cumprod(1).detach().sum(),
    "gradient inside of forward": lambda m, y, x: (
        torch.autograd.grad(torch.tanh(y).max(), y, create_graph=True)[0] * y
    ).sum(),
}
HEADS_IN_PART: dict[str, Head] = {
    "prod": lambda m, y, x: y.prod(1).sum(),
    "prod with a zero": lambda m, y, x: F.relu(y).prod(),
    "cumprod": lambda m, y, x: (1 - torch.sigmoid(y)).cumprod(1).sum(),
    "masked_fill": lambda m, y, x: torch.tanh(y.masked_fill(y > 0, m.value)).sum(),
}


def headed(head: Head) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    net = Headed(head)
    return net, copy.deepcopy(net), torch.randn(33, 16)


@pytest.mark.parametrize("name", HEADS)
def test_planned_steps_take_the_way_of_eager(name: str) -> None:
    plain, net, x = headed(HEADS[name])
    at_floor(net, x)
    assert isinstance(memplan.plan_of(net), memplan.Plan)
    assert_same_bits(run_steps(plain, x), run_steps(net, x))


@pytest.mark.parametrize("name", HEADS_IN_PART)
def test_what_is_refused_in_backward_runs_unplanned(name: str) -> None:
    plain, net, x = headed(HEADS_IN_PART[name])
    with pytest.raises(memplan.BudgetInfeasible, match=r"test_branches\.py") as infeasible:
        memplan.apply(net, x, 1, costs="estimate")
    memplan.apply(net, x, infeasible.value.floor_bytes, costs="estimate")
    assert memplan.plan_of(net) is None
    assert_same_bits(run_steps(plain, x), run_steps(net, x))


AUTOCAST_INSIDE: dict[str, Head] = {
    "bilinear": lambda m, y, x: (
        F.bilinear(y.float(), y.float(), m.graph.view(4, 24, 16)[:, :, :1].expand(4, 24, 24)).float().sum()
    ),
    "affine_grid": lambda m, y, x: F.affine_grid(
        y[:, :6].float().reshape(33, 2, 3), [33, 1, 4, 4], align_corners=False
    ).sum(),
    "pinv": lambda m, y, x: torch.linalg.pinv(x).sum() * y.sum(),
}


@pytest.mark.parametrize("name", AUTOCAST_INSIDE)
def test_kernels_that_autocast_reaches_inside_run_unplanned_or_with_autocast_off(name: str) -> None:
    plain, net, x = headed(AUTOCAST_INSIDE[name])
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(memplan.BudgetInfeasible, match="autocast") as infeasible:
            memplan.apply(net, x, 1, costs="estimate")
        memplan.apply(net, x, infeasible.value.floor_bytes, costs="estimate")
    assert memplan.plan_of(net) is None
    assert_same_bits(run_steps(plain, x, autocast=True), run_steps(net, x, autocast=True))

    def off(m: Headed, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return AUTOCAST_INSIDE[name](m, y.float(), x)

    plain, net, x = headed(off)
    with torch.autocast("cpu", torch.bfloat16):
        memplan.apply(net, x, 1.0, costs="estimate")
    assert isinstance(memplan.plan_of(net), memplan.Plan)
    assert_same_bits(run_steps(plain, x, autocast=True), run_steps(net, x, autocast=True))


@pytest.mark.parametrize("ignore_index", [-100, 0])
def test_scratch_of_selected_weights_does_not_depend_on_data(ignore_index: int) -> None:
    """It is measured on made-up data."""
    peaks = []
    for target in (torch.zeros(999, dtype=torch.int64), torch.full((999,), 3)):
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:
            torch.ops.memplan.sum_of_weights(torch.rand(24), target, ignore_index)
        sizes = [e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        peaks.append(max(accumulate(sizes)))
    assert peaks[0] == peaks[1]


def test_the_sum_of_selected_weights_draws_nothing() -> None:
    """Though it is no op of PyTorch's, and random is what nobody knows anything of."""
    _plain, net, x = headed(HEADS["weighted and smoothed"])
    ops = memplan.plan(net, x, 1.0, costs="estimate").problem.graph.ops
    assert [op.random for op in ops if op.kind == "memplan.sum_of_weights.default"] == [False]


def test_threads_that_are_the_first_at_once_make_the_ops_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would refuse a second kernel for an op."""
    ops, made = private.InPlaceOf({}), []

    def slow(*kind: str) -> Any:
        made.append(kind)
        time.sleep(0.05)
        return SimpleNamespace(fallback=lambda *_: None)

    def enter() -> None:
        with ops.active():
            pass

    monkeypatch.setattr(torch.library, "Library", slow)
    threads = [threading.Thread(target=enter) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [("_", "IMPL"), ("aten", "IMPL")]


# -- sums in place ----------------------------------------------------------------------------------------------------


class Sums(nn.Module):
    """Of a linear layer's bias, of attention's mask, of gradients: where no mode looks on, eager has all in place."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x.transpose(0, 1)).view(4, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.1).transpose(1, 2).reshape(4, 6, 16)
        return self.out(torch.tanh(mixed) * mixed.sigmoid()).pow(2).mean()


def sums_of(step: Callable[[], Any]) -> tuple[int, int]:
    """(out of place, in place), as they are when nobody watches a first step."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        step()
    counts = {event.key: event.count for event in profiler.key_averages()}
    return counts.get("aten::add", 0), counts.get("aten::add_", 0)


def test_sums_are_in_place_as_in_eager() -> None:
    torch.manual_seed(0)
    plain, sample = Sums(), (torch.randn(6, 4, 16), torch.randn(6, 6))
    net = memplan.apply(copy.deepcopy(plain), sample, 1.0, costs="estimate", grads="edges")
    steps = (lambda model=model: torch.autograd.grad(model(*sample), model.parameters()) for model in (plain, net))
    assert [sums_of(step) for step in steps] == [(0, 3), (0, 3)]
    plain, net = copy.deepcopy(plain), at_floor(copy.deepcopy(plain), sample)
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))


class Twice(nn.Module):
    """Adds to what something else reads before, and what can't be made again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.register_buffer("shift", torch.randn(256, 64))
        self.register_buffer("count", torch.zeros(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for _ in range(3):
            self.count.add_(1.0)
            hidden = x @ self.weight - self.count
            double, shifted = hidden * 2.0, hidden + self.shift
            total = total + torch.cos(double).mean() + torch.cos(shifted).mean()
            x = torch.sin(double)
        return total


def test_what_others_read_may_be_kept_instead_of_the_sum() -> None:
    """Both results can be had again from one tensor, which a sum in place would have written over."""
    net, sample = Twice(), torch.randn(256, 64)
    front = memplan.explore(net, sample, costs="estimate")
    sizes = [v.size_bytes for v in front[0].problem.graph.values if v.role == "activation"]
    assert front[-1].peak_bytes - front[0].peak_bytes >= 3 * max(sizes)
