"""One capture and a ladder of schedules for calls of every size: PyTorch's bits, peaks as predicted, few plans."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import memplan
from memplan.capture.analysis.sized import at_sizes
from memplan.capture.capture import CaptureOptions, capture
from memplan.capture.ops.sizes import varying_between
from memplan.installed.planned_forward import planned_forward
from memplan.problem.simulate import simulate
from memplan.runtime.program.step import PlannedStep
from tests.support.architectures import ARCHITECTURES
from tests.support.meter import LiveMeter
from tests.support.parameters import examples, quickly
from tests.support.zoo import MODELS, Sample, assert_same_bits, call, loss_of

LENGTHS = (64, 48, 17, 33, 10, 64, 5, 47, 3, 2)
PLENTY = 1 << 34


def with_size(sample: Sample, dim: int, before: int, now: int) -> Sample:
    """A sample with another size of one dimension, in all tensors that have it."""

    def changed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() <= dim or leaf.shape[dim] != before:
            return leaf
        return torch.cat([leaf] * -(-now // before), dim).narrow(dim, 0, now).clone()

    return pytree.tree_map(changed, sample)  # type: ignore[no-any-return]


def tensors_in(sample: Sample) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(sample) if isinstance(leaf, torch.Tensor)]


def seed_all() -> None:
    """Seed all generators that a model may draw from."""
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


def step(net: nn.Module, sample: Sample, autocast: bool = False) -> tuple[Any, ...]:
    """Loss, gradients, buffers and generator of one training step."""
    seed_all()
    net.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_of(call(net, copy.deepcopy(sample)))
    loss.backward()
    grads = {name: p.grad for name, p in net.named_parameters()}
    return loss.detach(), grads, {n: b.clone() for n, b in net.named_buffers()}, torch.get_rng_state()


def live_peak(net: nn.Module, sample: Sample, autocast: bool) -> int:
    net.zero_grad(set_to_none=True)
    planned, meter = planned_forward(net), LiveMeter()
    assert planned is not None
    meter.register([list(net.parameters()), list(net.buffers()), sample, planned.steps[0].capture.traced.constants])
    seed_all()
    with meter:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = call(net, sample)
        loss = output if isinstance(output, torch.Tensor) and output.dim() == 0 else loss_of(output)
        loss.backward()
    return meter.peak_bytes


def train_at(net: nn.Module, samples: Sequence[Sample], budget: Any, autocast: bool = False, **given: Any) -> nn.Module:
    """Train on samples of many sizes, planned and plain, and compare: bits, and the bytes held. Gives the model."""
    plain = copy.deepcopy(net)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        memplan.apply(net, samples[0], budget, config="rockmate", **given)
    for sample in samples:
        assert_same_bits(step(net, sample, autocast), step(plain, sample, autocast))
        measured = live_peak(net, sample, autocast)
        step(plain, sample, autocast)  # for its buffers
        plan = memplan.plan_of(net)
        assert isinstance(plan, memplan.Plan)
        assert plan.problem.budget_bytes is not None
        assert measured == plan.live_peak_bytes <= plan.peak_bytes <= plan.problem.budget_bytes
    return net


def whole_steps(net: nn.Module) -> list[PlannedStep]:
    planned = planned_forward(net)
    assert planned is not None
    return [s for s in planned.steps if isinstance(s, PlannedStep)]


def captures(net: nn.Module) -> int:
    return len({id(s.key) for s in whole_steps(net)})


# -- captures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", quickly(("gpt2", "llama", "bert", "t5", "handmade", "resnet50"), "handmade"))
def test_a_capture_for_all_sizes_is_that_of_each_size(name: str) -> None:
    net, sample = MODELS[name](0)
    dim = 0 if name in ("handmade", "resnet50") else 1
    size = tensors_in(sample)[0].shape[dim]
    one, other = sample, with_size(sample, dim, size, size + 3)
    shapes = [[tuple(t.shape) for t in capture(net, net.forward, s).call.tensors] for s in (one, other)]
    general = capture(net, net.forward, other, CaptureOptions(varying=varying_between(*shapes))).traced
    assert general.graph == capture(net, net.forward, other).traced.graph
    assert general.sizes is not None
    for n in (size, size + 1, size + 5):
        exact = capture(net, net.forward, with_size(sample, dim, size, n))
        numbers = general.sizes.numbers(exact.call.tensors)
        assert general.sizes.mismatch(numbers) is None
        graph = at_sizes(general, numbers).graph
        assert graph == exact.traced.graph
        assert [v.tensor for v in graph.values] == [v.tensor for v in exact.traced.graph.values]


@pytest.mark.slow
def test_peaks_at_all_sizes_are_those_of_the_accountant() -> None:
    net, sample = MODELS["gpt2"](0)
    net = train_at(net, [sample, with_size(sample, 1, 64, 40)], PLENTY)
    ladder = [s for s in whole_steps(net) if s.sized is not None]
    batch = len(tensors_in(sample)[0])
    assert len(ladder) > 2
    for rung in ladder:
        assert rung.sized is not None
        for n in (3, 40, 64):
            numbers = (n,) * len(rung.sized.numbers)
            plan = rung.sized.at(numbers)
            assert f"int64[{batch}, {n}]" in {v.tensor for v in plan.problem.graph.values}
            assert rung.sized.peak_bytes(numbers) == simulate(plan.problem, plan.schedule).peak_bytes == plan.peak_bytes


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", quickly((0.5, PLENTY), 0.5))
def test_gpt2_at_ten_lengths_takes_two_captures(budget: Any) -> None:
    net, sample = MODELS["gpt2"](0)
    net = train_at(net, [with_size(sample, 1, 64, n) for n in LENGTHS], budget)
    assert captures(net) <= 3  # the first length, all others, and one at which a dimension of one element comes about


@pytest.mark.slow
def test_short_calls_recompute_nothing_and_long_ones_fit() -> None:
    net, sample = MODELS["llama"](0)
    samples = [with_size(sample, 1, 64, n) for n in (40, 48, 56, 12, 64)]
    budget = memplan.explore(net, samples[-1])[0].peak_bytes * 11 // 10
    net = train_at(net, samples, budget)
    step(net, samples[3])
    assert memplan.plan_of(net).overhead == 0  # type: ignore[union-attr]
    step(net, samples[4])
    assert memplan.plan_of(net).overhead > 0  # type: ignore[union-attr]
    assert captures(net) == 2


def test_batches_with_running_statistics() -> None:
    net, sample = MODELS["resnet"](0)
    net = train_at(net, [with_size(sample, 0, 2, n) for n in (2, 3, 5, 2, 4, 1)], PLENTY)
    assert captures(net) <= 3


@pytest.mark.slow
def test_two_lengths_in_one_call_under_autocast() -> None:
    net, sample = MODELS["t5"](0)
    assert isinstance(sample, dict)
    samples = [
        {**sample, "input_ids": with_size(sample["input_ids"], 1, sample["input_ids"].shape[1], a),
         "labels": with_size(sample["labels"], 1, sample["labels"].shape[1], b)}
        for a, b in ((40, 20), (30, 25), (31, 7), (12, 25), (40, 20))
    ]  # fmt: skip
    net = train_at(net, samples, PLENTY, autocast=True)
    assert captures(net) == 2


def test_the_loss_is_outside_and_backward_starts_in_another_layout() -> None:
    net, sample = MODELS["gpt2"](0)
    assert isinstance(sample, dict)
    plain = copy.deepcopy(net)
    inputs = {key: value for key, value in sample.items() if key != "labels"}
    memplan.apply(net, inputs, PLENTY, config="noremat")
    for n in (64, 20, 33, 20, 50):
        given = with_size(inputs, 1, 64, n)
        results = []
        for model in (net, plain):
            torch.manual_seed(3)
            model.zero_grad()
            model(**given).logits.sum().backward()
            results.append({name: p.grad for name, p in model.named_parameters()})
        assert_same_bits(*results)
    assert captures(net) == 2


# -- what decides on another capture ----------------------------------------------------------------------------------


class Branching(nn.Module):
    """Goes another way for long inputs, in chunks for even ones, and keeps a table as long as the longest one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("table", torch.zeros(4, 8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if length > self.table.shape[0]:
            self.table = torch.arange(length, dtype=torch.float32)[:, None].expand(-1, 8) / 10
        x = self.layer(x + self.table[:length])
        if length > 12:
            x = self.other(x[:, -12:]).relu()
        if length % 2 == 0:
            x = torch.stack([chunk.sum(1) for chunk in x.chunk(2, 1)], 1)
        return x.square().mean()


def test_a_forward_that_branches_on_its_length() -> None:
    torch.manual_seed(0)
    net = Branching()
    plain = copy.deepcopy(net)
    lengths = (3, 4, 7, 9, 8, 13, 15, 16, 20, 2, 1, 30, 5, 6, 14, 31)
    memplan.apply(net, torch.randn(2, 3, 8), PLENTY, config="noremat")
    for n in lengths:
        x = torch.randn(2, n, 8)
        assert_same_bits(step(net, x), step(plain, x))


def test_a_size_that_is_turned_into_a_number_is_planned_for_each(caplog: pytest.LogCaptureFixture) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum((self.layer(x[i]).sum() for i in range(len(x))), torch.zeros(()))

    net = Counts()
    plain = copy.deepcopy(net)
    caplog.set_level(logging.INFO, "memplan")
    memplan.apply(net, torch.randn(3, 4), PLENTY, config="noremat")
    for n in (3, 4, 5):
        x = torch.randn(n, 4)
        assert_same_bits(step(net, x), step(plain, x))
    assert "each size gets a plan of its own, because PyTorch turns sizes into numbers: 4" in caplog.text
    assert "range(len(x))" in caplog.text


PIECES: dict[str, Callable[[torch.Tensor, nn.Linear], torch.Tensor]] = {
    "linear": lambda x, layer: layer(x),
    "attention": lambda x, layer: F.scaled_dot_product_attention(x[:, None], layer(x)[:, None], x[:, None])[:, 0],
    "causal": lambda x, layer: (x @ layer(x).mT).tril().softmax(-1) @ x,
    "shift": lambda x, layer: F.pad(x[:, 1:], (0, 0, 0, 1)) + layer(x),
    "halves": lambda x, layer: torch.cat([layer(h) for h in x.chunk(2, 1)], 1),
    "pool": lambda x, layer: layer(x - x.mean(1, keepdim=True)),
    "dropout": lambda x, layer: F.dropout(layer(x), 0.3),
    "norm": lambda x, layer: F.layer_norm(layer(x), (8,)),
    "scan": lambda x, layer: layer(x).cumsum(1) / x.shape[1],
    "fold": lambda x, layer: layer(x.reshape(-1, 8)).view(x.shape).transpose(0, 1).contiguous().transpose(0, 1),
    "window": lambda x, layer: layer(x[:, -5:]).sum(1, keepdim=True) + x,
    "upsample": lambda x, layer: F.interpolate(layer(x).mT, scale_factor=2.0).mT[:, ::2],
}


class Pieces(nn.Module):
    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names, self.layers = names, nn.ModuleList(nn.Linear(8, 8) for _ in names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, layer in zip(self.names, self.layers, strict=True):
            x = PIECES[name](x, layer)
        return x.square().sum() / x.shape[0]


@given(
    names=st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=4),
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 20)), min_size=3, max_size=6, unique=True),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(10), deadline=None, derandomize=True)
def test_random_models_at_random_sizes(names: list[str], sizes: list[tuple[int, int]], seed: int) -> None:
    torch.manual_seed(seed)
    net = Pieces(names)
    plain = copy.deepcopy(net)
    memplan.apply(net, torch.randn(*sizes[0], 8), PLENTY, config="noremat", costs="estimate")
    for batch, length in (*sizes, *sizes):
        x = torch.randn(batch, length, 8)
        assert_same_bits(step(net, x), step(plain, x))


def test_inputs_in_one_memory() -> None:
    """One tensor may be given twice. Where two lie in the same memory otherwise, each size has a plan of its own."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.layer(a).square().sum() + self.layer(b).sum()

    for second in (lambda x: x, lambda x: x[:, :2], lambda x: x[:, 1:], lambda x: x[:, :-1]):
        net = Two()
        plain, xs = copy.deepcopy(net), [torch.randn(2, n, 4) for n in (6, 5, 9, 4)]
        memplan.apply(net, (xs[0], second(xs[0])), PLENTY, config="noremat", costs="estimate")
        for x in (*xs, *xs):
            assert_same_bits(step_of(net, x, second(x)), step_of(plain, x, second(x)))


def step_of(net: nn.Module, *args: torch.Tensor) -> Any:
    net.zero_grad()
    loss = net(*args)
    loss.backward()
    return loss.detach(), [p.grad for p in net.parameters()]


class Chunked(nn.Module):
    """Goes over its rows in chunks, and asks for their number in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for start in range(0, x.shape[0], 16):
            end = min(start + 16, x.shape[0])
            found.append(self.outer(torch.tanh(self.inner(x[start:end]))))
        places = torch.arange(len(x)) / len(x)
        last = next(reversed(range(0, len(x), 16)))
        whole = torch.cat(found) * places[:, None]
        assert isinstance(range(0, len(x), 16), range)
        return (whole - x[last]).pow(2).sum() / len(found)


def test_loops_over_sizes() -> None:
    """A capture for each number of turns, and at the ends of chunks one for each size; the bits of plain in all."""
    torch.manual_seed(0)
    net = Chunked().train()
    plain = copy.deepcopy(net)
    memplan.apply(net, torch.randn(64, 8), PLENTY, config="noremat", costs="estimate")
    for rows in (64, 60, 52, 40, 55, 36, 60, 20, 30, 45):
        x = torch.randn(rows, 8)
        assert_same_bits(step_of(net, x), step_of(plain, x))
    assert captures(net) <= 4
    for rows in (33, 49, 17, 32, 16, 9, 3, 1, 50):
        x = torch.randn(rows, 8)
        assert_same_bits(step_of(net, x), step_of(plain, x))


class RowByRow(nn.Module):
    """Takes a step for each row, so that the number of rows decides what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(8)
        for index in range(x.shape[0]):
            state = torch.tanh(self.cell(state) + x[index])
        return state.pow(2).sum()


def test_captures_for_all_sizes_are_tried_three_times(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memplan")
    net = RowByRow().train()
    plain = copy.deepcopy(net)
    memplan.apply(net, torch.randn(9, 8), PLENTY, config="noremat", costs="estimate")
    for rows in (9, 7, 5, 8, 6, 4):
        x = torch.randn(rows, 8)
        assert_same_bits(step_of(net, x), step_of(plain, x))
    assert sum("each size gets a plan of its own" in r.getMessage() for r in caplog.records) == 3


ODD = torch.library.Library("memplan_test_any_length", "DEF")
ODD.define("odd(Tensor x) -> Tensor")


def _odd(x: torch.Tensor) -> torch.Tensor:
    """A copy that lies column by column where x has many rows, of which its fake kernel knows nothing."""
    return x.t().contiguous().t() if x.shape[0] > 8 else x.clone()


ODD.impl("odd", _odd, "CPU")
ODD.impl("odd", lambda x: torch.empty_like(x), "Meta")


def test_a_fake_kernel_that_is_wrong_about_some_sizes(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.norm(self.layer(x)) + torch.ops.memplan_test_any_length.odd.default(x)).square().sum()

    net = Odd()
    plain = copy.deepcopy(net)
    memplan.apply(net, torch.randn(3, 4), PLENTY, config="noremat")
    for n in (3, 5, 6, 12, 5, 12, 9):
        x = torch.randn(n, 4)
        assert_same_bits(step_of(net, x), step_of(plain, x))
        assert_same_bits(dict(net.named_buffers()), dict(plain.named_buffers()))
    assert "is wrong about this size" in caplog.text


# -- what users say ---------------------------------------------------------------------------------------------------


def test_a_range_is_planned_at_once_and_for_its_largest_size() -> None:
    net, sample = MODELS["gpt2"](0)
    short = with_size(sample, 1, 64, 20)
    dynamic = {"input_ids": {1: (8, 64)}, "labels": {1: (8, 64)}}
    net = train_at(net, [with_size(short, 1, 20, n) for n in (20, 9, 64, 33)], PLENTY, dynamic=dynamic)
    assert captures(net) == 1
    with pytest.raises(memplan.BudgetInfeasible):
        memplan.apply(copy.deepcopy(MODELS["gpt2"](0)[0]), short, "600KiB", config="noremat", dynamic=dynamic)


def test_whatever_may_vary() -> None:
    net, sample = MODELS["gpt2"](0)
    samples = [with_size(with_size(sample, 0, 2, b), 1, 64, n) for b, n in ((2, 64), (3, 40), (5, 33), (2, 17))]
    net = train_at(net, samples, PLENTY, dynamic="all")
    assert captures(net) == 1


def test_each_size_by_itself() -> None:
    net, sample = MODELS["gpt2"](0)
    net = train_at(net, [with_size(sample, 1, 64, n) for n in (20, 31, 12)], PLENTY, dynamic="never")
    assert captures(net) == 3


@pytest.mark.parametrize(
    ("dynamic", "error"),
    [("sometimes", ValueError), (3, TypeError), ({"x": {7: (1, 2)}}, ValueError), ({"x": {0: (5, 2)}}, ValueError)],
)
def test_a_wrong_word_is_refused(dynamic: Any, error: type[Exception]) -> None:
    net, sample = MODELS["handmade"](0)
    with pytest.raises(error, match="dynamic"):
        memplan.apply(net, {"x": sample}, PLENTY, dynamic=dynamic)


def test_samples_that_are_prepared_share_a_capture() -> None:
    net, sample = MODELS["gpt2"](0)
    memplan.apply(net, with_size(sample, 1, 64, 32), PLENTY, config="noremat")
    memplan.prepare(net, [with_size(sample, 1, 64, n) for n in (20, 64, 48)])
    assert captures(net) == 2


def test_a_call_that_can_not_fit_says_the_longest_that_does() -> None:
    net, sample = MODELS["gpt2"](0)
    samples = {n: with_size(sample, 1, 64, n) for n in (20, 24, 30, 64)}
    budget = memplan.explore(net, samples[30])[0].peak_bytes
    memplan.apply(net, samples[20], budget)
    step(net, samples[24])
    with pytest.raises(
        memplan.BudgetInfeasible, match=r"(?s)out of memory\. .*the longest that fits has .*input_ids"
    ) as caught:
        step(net, samples[64])
    assert isinstance(caught.value, RuntimeError)
    fitting = int(str(caught.value).split("input_ids of (2, ")[1].split(")")[0])
    assert 24 <= fitting < 64
    step(net, with_size(sample, 1, 64, fitting))


@pytest.mark.slow
def test_accelerate_looks_for_a_batch_that_fits() -> None:
    memory = pytest.importorskip("accelerate.utils.memory")
    net, x = MODELS["handmade"](0)
    assert isinstance(x, torch.Tensor)
    budget = memplan.explore(net, torch.randn(60, 32), costs="estimate")[0].peak_bytes
    memplan.apply(net, x, budget, costs="estimate")
    tried = []

    @memory.find_executable_batch_size(starting_batch_size=80)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        step(net, torch.randn(batch_size, 32))

    train()
    assert tried[0] == 80 > tried[-1] >= 48


def test_choosing_a_schedule_makes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call needs to know of a schedule at its sizes comes without a graph of those sizes."""
    net, sample = MODELS["gpt2"](0)
    samples = [with_size(sample, 1, 64, n) for n in (64, 40, 30, 12, 50)]
    memplan.apply(net, samples[0], PLENTY, config="rockmate")
    for batch in samples[:3]:
        step(net, batch)

    def refused(*arguments: Any) -> Any:
        raise AssertionError("a step was made at other sizes")

    monkeypatch.setattr("memplan.planning.problems.at_sizes", refused)
    for batch in samples:
        step(net, batch)


@pytest.mark.parametrize("first", quickly((64, 40), 40))
def test_a_plan_file_serves_all_sizes(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, sample = MODELS["gpt2"](0)
    memplan.plan(net, sample, 0.6, costs="estimate").save(tmp_path / "plan.json")
    plain, plan = copy.deepcopy(net), memplan.Plan.load(tmp_path / "plan.json")
    memplan.apply(net, with_size(sample, 1, 64, first), plan=plan)

    def refused(*arguments: Any) -> Any:
        raise AssertionError("there was a search")

    monkeypatch.setattr("memplan.planning.plan_search.solve_front", refused)
    overheads = {}
    for n in (first, 30, 64, 12, 50, 7):
        batch = with_size(sample, 1, 64, n)
        assert_same_bits(step(plain, batch), step(net, batch))
        now = memplan.plan_of(net)
        assert isinstance(now, memplan.Plan)
        assert now.peak_bytes <= (plan.problem.budget_bytes or 0)
        overheads[n] = now.overhead
    assert overheads[12] == 0 < overheads[64]


def test_a_plan_file_whose_budget_a_size_exceeds_is_refused() -> None:
    net, sample = MODELS["gpt2"](0)
    plan = memplan.plan(net, with_size(sample, 1, 64, 16), 0.95, costs="estimate")
    with pytest.raises(memplan.PlanMismatch, match="another training step"):
        memplan.apply(net, sample, plan=plan)


# -- other modes ------------------------------------------------------------------------------------------------------


def test_activations_are_offloaded_at_every_size() -> None:
    net, sample = MODELS["gpt2"](0)
    samples = [with_size(sample, 1, 64, n) for n in (40, 64, 24, 60, 10)]
    plain = copy.deepcopy(net)
    floor = memplan.explore(net, samples[1])[0].peak_bytes
    memplan.apply(net, samples[0], floor, config="rockmate", host_budget="64MiB", link=memplan.Link(1e10, 1e10))
    for batch in (*samples, *samples):
        assert_same_bits(step(net, batch), step(plain, batch))
        plan = memplan.plan_of(net)
        assert isinstance(plan, memplan.Plan)
        assert plan.peak_bytes <= floor


def test_the_first_steps_are_compared_at_their_own_sizes(caplog: pytest.LogCaptureFixture) -> None:
    net, sample = MODELS["gpt2"](0)
    caplog.set_level(logging.INFO, "memplan")
    dynamic = {"input_ids": {1: (8, 64)}, "labels": {1: (8, 64)}}
    memplan.apply(net, sample, PLENTY, config="noremat", dynamic=dynamic)
    for n in (64, 10, 10):
        step(net, with_size(sample, 1, 64, n))
    assert "the step peaks at" in caplog.text
    assert "more than predicted" not in caplog.text


def test_gradients_accumulate_over_sizes_and_evaluation_is_in_between() -> None:
    net, sample = MODELS["gpt2"](0)
    plain = copy.deepcopy(net)
    memplan.apply(net, sample, PLENTY, config="noremat", accumulate=True)
    results = []
    for model in (net, plain):
        torch.manual_seed(1)
        for n in (64, 40, 30, 64, 21):
            loss_of(call(model, with_size(sample, 1, 64, n))).backward()
            with torch.no_grad():
                model.eval()
                call(model, with_size(sample, 1, 64, n + 1 if n < 64 else n))
                model.train()
        results.append({name: p.grad for name, p in model.named_parameters()})
    assert_same_bits(*results)


# -- sweeps -----------------------------------------------------------------------------------------------------------


def qwen3() -> tuple[nn.Module, Sample]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).train(), language_sample()


def gemma3() -> tuple[nn.Module, Sample]:
    """Windows of 16 tokens in two layers of three."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=16, sliding_window_pattern=3,
    )  # fmt: skip
    return Gemma3ForCausalLM(config).train(), language_sample()


def language_sample() -> Sample:
    ids = torch.randint(0, 100, (2, 48))
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def built(name: str) -> tuple[nn.Module, Sample]:
    torch.manual_seed(0)
    if name in ("qwen3", "gemma3"):
        return {"qwen3": qwen3, "gemma3": gemma3}[name]()
    return MODELS[name](0) if name in ("gpt2", "resnet50") else ARCHITECTURES[name].build(0)


def of_sizes(sample: Sample, dims: tuple[int, ...]) -> list[Sample]:
    """Samples of six to ten sizes: of their length, their batch, or height and width.

    Images are not so small that a strided convolution sees a single pixel: in bfloat16, oneDNN then leaves most of the
    gradient of its weight unwritten, in plain PyTorch too, and no two steps have the same bits.
    """
    if dims == (1,):
        size = max(t.shape[1] for t in tensors_in(sample) if t.dim() == 2)
        sizes: tuple[int, ...] = (size, size * 3 // 4, 17, 9, size, 30, 12, 5, 31, size)
    else:
        size = tensors_in(sample)[0].shape[dims[0]]
        sizes = (4, 3, 2, 4, 3, 2) if dims == (0,) else (size, size // 2, size * 3 // 4, size, size // 2, size * 5 // 8)
    samples = []
    for now in sizes:
        changed = sample
        for dim in dims:
            changed = with_size(changed, dim, size, now)
        samples.append(changed)
    return samples


SWEEP = {
    "gpt2": (1,), "llama": (1,), "qwen3": (1,), "gemma2": (1,), "gemma3": (1,), "bert": (1,), "bloom": (1,),
    "modernbert": (1,), "t5": (1,), "bart": (1,), "mixtral": (1,), "mamba2": (1,), "whisper": (1,), "vit": (0,),
    "convnext": (0,), "swin": (0,), "segformer": (0,), "audio_spectrogram_transformer": (0,), "dit": (0,),
    "resnet50": (0,), "unet2d_condition": (0,),
}  # fmt: skip
NAMED = ("gpt2", "llama", "qwen3", "gemma3", "bert", "t5", "mixtral", "mamba2", "whisper", "vit", "resnet50")
CASES = [*SWEEP.items(), ("unet2d_condition", (2, 3)), ("resnet50", (2, 3))]


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("name", "dims"), CASES)
def test_architectures_at_many_sizes(name: str, dims: tuple[int, ...], autocast: bool) -> None:
    net, sample = built(name)
    train_at(net, of_sizes(sample, dims), PLENTY, autocast)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("name", "dims"), [(n, d) for n, d in CASES if n in (*NAMED, "unet2d_condition")])
def test_architectures_at_many_sizes_in_small_budgets(
    name: str, dims: tuple[int, ...], autocast: bool, share: float
) -> None:
    """share: of the way from the floor of the largest size to its unplanned peak."""
    net, sample = built(name)
    samples = of_sizes(sample, dims)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        floor, *_, top = (p.peak_bytes for p in memplan.explore(net, samples[0], costs="estimate", config="rockmate"))
    train_at(net, samples, int(floor + share * (top - floor)), autocast, costs="estimate")
