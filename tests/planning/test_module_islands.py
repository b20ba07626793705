"""Modules that can't be captured run as they are, as ops of a whole plan. Where the model itself can't, nothing is.

Steps have the bits of the plain step, keep their budget, and hold what is predicted.
"""

from __future__ import annotations

import copy
import itertools
import random
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
from memplan.solvers.offload.copies import movables_of
from tests.support.meter import LiveMeter, profiler_peak, storage_bytes
from tests.support.parameters import quickly
from tests.support.zoo import assert_same_bits, call, copied, loss_of, run_steps

Sample = Any
WIDTH = 16


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.back = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) * self.norm.weight  # x is read twice
        return self.drop(self.back(torch.nn.functional.gelu(self.wide(normed))))


class Inside(nn.Module):
    """A module among blocks, with a sum around it, whose gradients autograd adds one by one."""

    def __init__(self, middle: nn.Module, width: int = WIDTH, summed: bool = True) -> None:
        super().__init__()
        self.first, self.middle, self.last = Block(width), middle, Block(width)
        self.summed = summed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        x = x + self.middle(x) if self.summed else self.middle(x)
        return (x + self.last(x)).pow(2).mean()


def twins(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    nets = []
    for _ in range(2):
        torch.manual_seed(3)
        nets.append(build().train())
    return nets[0], nets[1]


def rows(count: int = 64, width: int = WIDTH, seed: int = 2) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def live_peak(net: nn.Module, sample: Sample) -> int:
    net.zero_grad()
    meter = LiveMeter()
    meter.register([list(net.parameters()), list(net.buffers()), sample])
    with meter:
        out = call(net, sample)
        (out if isinstance(out, torch.Tensor) and out.dim() == 0 else loss_of(out)).backward()
    return meter.peak_bytes


def whole_plan(net: nn.Module) -> memplan.Plan:
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan)
    return plan


def steps(net: nn.Module, sample: Sample) -> Any:
    """What three steps leave, generators of Python and NumPy included, and which parameters got gradients."""
    random.seed(4)
    np.random.seed(4)
    found = [run_steps(net, sample, steps=1)]
    for seed in range(2):
        batch = sample * (1 + 0.2 * seed) if isinstance(sample, torch.Tensor) else sample
        found.append(run_steps(net, batch, steps=1))
        found.append({n: p.grad is None for n, p in net.named_parameters()})
    return [found, random.random(), np.random.rand()]


def assert_planned(
    build: Callable[[], nn.Module], sample: Sample, *islands: str, budget: Any = "min", exactly: bool = True
) -> tuple[nn.Module, memplan.Plan]:
    """Bits, peak and islands of a model at its least budget, and of a copy. Gives the model and its plan."""
    net, plain = twins(build)
    memplan.apply(net, sample, budget)
    plan = whole_plan(net)
    assert plan.peak_bytes < plan.baseline_peak_bytes
    assert sorted(line.partition(" at ")[0] for line in plan.islands) == sorted(islands)
    assert all(name in plan.report() for name in islands)
    other = copy.deepcopy(net)
    peak_bytes = live_peak(net, sample)
    assert peak_bytes <= plan.live_peak_bytes
    assert peak_bytes == plan.live_peak_bytes or not exactly
    expected = steps(copy.deepcopy(plain), sample)
    assert_same_bits(expected, steps(other, sample))
    return net, plan


# -- what keeps a module from being captured --------------------------------------------------------------------------


class Reads(nn.Module):
    """Reads a number that it computes, and its argument several times."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x).tanh() * self.other(x)
        return hidden * min(1.0, hidden.mean().item()) + x.sigmoid()


class Counts(nn.Module):
    """Counts its calls in Python, which a second run of its forward would show."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x).relu() * self.calls


class Appends(nn.Module):
    """Keeps numbers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = nn.Linear(WIDTH, WIDTH), list[float]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x).tanh()
        self.seen.append(float(hidden.detach().mean()))
        return hidden * (1 + len(self.seen))


SEEN: list[float] = []


class AppendsOutside(nn.Module):
    """Appends to a list that its code names, after a draw from Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(random.random())
        return self.inner(x).tanh() * SEEN[-1]


class Sorts(nn.Module):
    """Reads memory by NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        return hidden * torch.from_numpy(np.sort(hidden.detach().numpy(), 0))


class Normalises(Counts):
    """Writes to buffers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))


class Averages(nn.Module):
    """Writes to a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.average = nn.Linear(WIDTH, WIDTH), torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        self.average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return hidden.tanh() + self.average


class Matches(nn.Module):
    """Has rows matched by a module that it makes in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        (order,) = Matcher(2.0)({"rows": hidden})
        return hidden[order] * x


class Matcher(nn.Module):
    def __init__(self, power: float) -> None:
        super().__init__()
        self.power = power

    @torch.no_grad()
    def forward(self, outputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor]:
        return (torch.from_numpy(np.argsort(np.abs(outputs["rows"].numpy()).sum(1) ** self.power)),)


@pytest.mark.parametrize("summed", quickly((True, False), False))
@pytest.mark.parametrize("kind", [Reads, Counts, Appends, AppendsOutside, Sorts, Normalises])
def test_a_module_is_an_island(kind: type[nn.Module], summed: bool) -> None:
    SEEN.clear()
    exactly = kind is not AppendsOutside
    assert_planned(lambda: Inside(kind(), summed=summed), rows(), "middle", exactly=exactly)


def test_a_module_that_writes_to_a_tensor_that_is_no_buffer() -> None:
    net, plain = twins(lambda: Inside(Averages()))
    memplan.apply(net, rows(), "min", costs="estimate")
    assert whole_plan(net).islands
    assert not net.middle.average.any()
    assert_same_bits(steps(plain, rows()), steps(net, rows()))
    assert torch.equal(net.middle.average, plain.middle.average)


def test_a_module_that_forward_makes_is_an_island() -> None:
    assert_planned(lambda: Inside(Matches()), rows(), "Matcher")


def test_state_in_python_changes_once_a_step() -> None:
    net, _ = assert_planned(lambda: Inside(Counts()), rows(), "middle")
    assert net.middle.calls == 1  # under the meter, and not while it was planned
    run_steps(net, rows(), steps=3)
    assert net.middle.calls == 4


class Holds(nn.Module):
    """A container that is called, around a module that can't be an island, because it writes to its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.odd = nn.Linear(WIDTH, WIDTH), WritesToItsArgument()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        return self.odd(hidden * 1) + hidden


class WritesToItsArgument(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(1 + min(0.0, x.mean().item()))
        return x.tanh()


def test_where_a_module_can_be_no_island_the_one_around_it_is() -> None:
    assert_planned(lambda: Inside(Holds()), rows(), "middle")


class AppendsToItsArgument(Reads):
    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        hidden = super().forward(x)
        losses.append(hidden.pow(2).mean())
        return hidden


class Gives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = AppendsToItsArgument()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        return self.inner(x, losses) + sum(losses)  # type: ignore[no-any-return]


def test_a_list_that_is_given_to_a_module_has_what_it_appends() -> None:
    assert_planned(lambda: Inside(Gives()), rows(), "middle")


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.pow(2).mean()


def test_hooks_fire_once_a_step() -> None:
    fired: list[str] = []

    def build() -> nn.Module:
        net = nn.Sequential(Block(16), Block(16), Block(16), nn.Linear(16, 4), Mean())
        net[1].register_forward_hook(lambda m, args, out: fired.append("forward"))
        net[1].wide.register_forward_hook(lambda m, args, out: out * 2)
        net[2].drop.register_forward_pre_hook(lambda m, args: fired.append("drop"))
        net[3].register_full_backward_hook(lambda m, given, made: fired.append("backward"))
        net[2].back.register_full_backward_pre_hook(lambda m, given: (given[0] * 1.5,))
        return net

    net, plain = twins(build)
    run_steps(plain, rows(128), steps=3)
    expected = list(fired)
    net, plain = twins(build)
    memplan.apply(net, rows(128), "min")
    assert {line.partition(" at ")[0] for line in whole_plan(net).islands} == {"1", "2.drop", "2.back", "3"}
    assert live_peak(net, rows(128)) == whole_plan(net).peak_bytes
    fired.clear()
    result = run_steps(net, rows(128), steps=3)
    assert fired == expected
    assert_same_bits(run_steps(plain, rows(128), steps=3), result)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
def test_compiled_modules_keep_the_bits_of_compiled_code() -> None:
    def build() -> nn.Module:
        net = nn.Sequential(*(Block(16) for _ in range(4)))
        net[1].compile(backend="aot_eager")
        net[2].wide.forward = torch.compile(net[2].wide.forward, backend="aot_eager")
        net[3] = torch.compile(net[3], backend="aot_eager")
        return net

    net, plain = twins(build)
    memplan.apply(net, rows(), "min")
    plan = whole_plan(net)
    assert {line.partition(" at ")[0] for line in plan.islands} == {"1", "2.wide", "3"}
    assert_same_bits(run_steps(plain, rows()), run_steps(net, rows()))


# -- what differs from step to step -----------------------------------------------------------------------------------


class Experts(nn.Module):
    """A loop over the experts that rows are sent to. The parameters of others get no gradient in such a step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 6)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in "123456"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, WIDTH)
        weight, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for expert in chosen.unique().tolist():
            (mine,) = torch.where(chosen == expert)
            out.index_add_(0, mine, self.experts[expert](flat[mine]) * weight[mine, None])
        return out.view_as(x)


class Routed(nn.Module):
    """Each row goes through one of two layers, and reads its argument once for each."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(2):
            (mine,) = torch.where((x[:, 0].detach() > 0) == bool(expert))
            chosen = torch.nn.functional.dropout(x[mine] @ self.weights[expert], 0.3).relu()
            out.index_add_(0, mine, chosen.sigmoid() * chosen)
        return out


class Gated(nn.Module):
    """A gate reads what is routed: before that, or after."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.gate, self.routed, self.before = nn.Linear(WIDTH, 1), Routed(), before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before:
            gate = self.gate(x).sigmoid()
            return self.routed(x) * gate
        found = self.routed(x)
        return found * self.gate(x).sigmoid()


class LayerDrop(nn.Module):
    """Runs each of its blocks, or does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.drop = nn.ModuleList(Block(WIDTH) for _ in range(3)), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) >= 0.2:
                x = x + self.drop(layer(x))
        return x


class PythonLayerDrop(LayerDrop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if random.random() >= 0.2:
                x = x + self.drop(layer(x))
        return x


@pytest.mark.parametrize(
    ("kind", "summed"), [(Experts, True), (Experts, False), (LayerDrop, False), (PythonLayerDrop, False)]
)
def test_what_saves_other_tensors_in_each_step_has_room_for_the_most(kind: type[nn.Module], summed: bool) -> None:
    _, plan = assert_planned(lambda: Inside(kind(), summed=summed), rows(48), "middle", exactly=False)
    assert "what it saves differs from step to step" in plan.report()


class Reader(nn.Module):
    """Reads what an encoder made in layers that it may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand(()) >= 0.5:
                x = x + torch.tanh(layer(x + memory))
        return self.norm(x)  # type: ignore[no-any-return]


class Encoded(nn.Module):
    """An encoder, with an island of its own, whose output is read by another one alone, or by the head as well."""

    def __init__(self, by_head: bool) -> None:
        super().__init__()
        self.embed, self.before, self.routed = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Routed()
        self.after, self.reader, self.head = nn.Linear(WIDTH, WIDTH), Reader(), nn.Linear(WIDTH, 8)
        self.by_head = by_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.after(torch.tanh(self.routed(self.before(x).sin())))
        other = torch.cos(memory) if self.by_head else torch.zeros(())
        return self.head(self.reader(self.embed(x), memory) + other).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("grads", ["surface", "edges"])
def test_what_is_read_by_layers_that_are_left_out_gets_no_gradient(by_head: bool, grads: Any) -> None:
    net, plain = twins(lambda: Encoded(by_head))
    memplan.apply(net, rows(), "min", costs="estimate", grads=grads)
    assert len(whole_plan(net).islands) == 2
    found = []
    for one in (plain, net):
        torch.manual_seed(5)
        optimizer, results = torch.optim.AdamW(one.parameters(), 1e-2), list[Any]()
        for _ in range(8):
            optimizer.zero_grad()
            loss = one(rows())
            loss.backward()
            results.append(copied([loss, {n: p.grad for n, p in one.named_parameters()}]))
            optimizer.step()
        found.append([results, copied(one.state_dict())])
    assert_same_bits(*found)
    left_out = [step[1]["before.weight"] is None for step in found[0][0]]
    assert any(left_out) is not by_head and not all(left_out)


def test_a_row_of_a_batch_reaches_few_experts() -> None:
    """Others have no gradient, which is no gradient of zeros to an optimizer."""
    net, plain = twins(lambda: Inside(Experts()))
    memplan.apply(net, rows(3), "1GiB", costs="estimate", grads="edges")
    assert whole_plan(net).islands
    assert_same_bits(steps(plain, rows(3)), steps(net, rows(3)))
    assert any(p.grad is None for p in net.parameters())


def test_arguments_that_are_read_differently_often_are_those_of_the_module_around() -> None:
    """Which module that is depends on who else reads them."""
    net, plain = twins(lambda: nn.Sequential(Block(WIDTH), Routed(), Block(WIDTH)))
    memplan.apply(net, rows(), "min", costs="estimate")
    assert [line.partition(" at ")[0] for line in whole_plan(net).islands] == ["1"]
    assert_same_bits(steps(plain, rows()), steps(net, rows()))
    net, plain = twins(lambda: nn.Sequential(Block(WIDTH), Inside(Routed()), nn.Flatten(0)))
    memplan.apply(net, rows(), "1GiB", costs="estimate")
    assert [line.partition(" at ")[0] for line in whole_plan(net).islands] == ["1"]
    assert_same_bits(steps(plain, rows()), steps(net, rows()))


@pytest.mark.parametrize("before", [True, False])
def test_arguments_that_others_read_before_are_read_as_often_as_data_says(before: bool) -> None:
    """Autograd adds up the gradients of the island's reads first, then those of reads before it."""
    net, plain = twins(lambda: nn.Sequential(Block(WIDTH), Gated(before), nn.Flatten(0)))
    memplan.apply(net, rows(), "1GiB", costs="estimate")
    assert [line.partition(" at ")[0] for line in whole_plan(net).islands] == ["1.routed" if before else "1"]
    for batch in (rows(), rows(48), rows(1)):
        assert_same_bits(steps(plain, batch), steps(net, batch))


def test_more_than_there_is_room_for_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Chosen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = x > 0
            return torch.zeros_like(x).masked_scatter(mask, x[mask].exp().sin())

    net, plain = twins(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Chosen(), nn.Linear(WIDTH, 2)))
    for each in (net, plain):
        nn.init.eye_(each[0].weight)
    memplan.apply(net, rows(), "1GiB", costs="estimate")
    for batch in (rows(), rows().abs() + 1):
        assert_same_bits(run_steps(plain, batch, 1), run_steps(net, batch, 1))
    assert [r for r in caplog.records if "bytes more for backward than it did when it was planned" in r.message]


def mixtral(experts: str) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return MixtralForCausalLM._from_config(config, experts_implementation=experts)


@pytest.mark.parametrize("experts", [pytest.param("eager", marks=pytest.mark.slow), "grouped_mm"])
def test_a_mixture_of_experts_trains_at_half_of_its_activations(experts: str) -> None:
    net, plain = twins(lambda: mixtral(experts))
    ids = torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(1))
    sample = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    memplan.apply(net, sample, memplan.Budget(activations=0.5))
    plan = whole_plan(net)
    assert ("mlp" in plan.report()) or experts != "eager"
    assert_same_bits(run_steps(plain, sample, 3), run_steps(net, sample, 3))
    assert live_peak(net, sample) <= plan.peak_bytes <= plan.problem.budget_bytes


# -- marked by hand ---------------------------------------------------------------------------------------------------


def scaled_tanh(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * scale


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = memplan.opaque(nn.Linear(WIDTH, WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.function = memplan.opaque(scaled_tanh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.inner(x), self.scale)  # type: ignore[no-any-return]


def test_functions_and_modules_that_are_marked_run_as_they_are() -> None:
    _, plan = assert_planned(lambda: Inside(Marked()), rows(), "middle.inner", "middle.function")
    assert "marked by memplan.opaque" in plan.report()


LOOSE = memplan.opaque(scaled_tanh)


def test_a_marked_function_that_belongs_to_no_model() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return LOOSE(x, self.scale)  # type: ignore[no-any-return]

    assert_planned(lambda: Inside(Calls()), rows(), "Opaque")


# -- with other features ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"budget": "1GiB", "host_budget": "1GiB"},
        pytest.param({"budget": "1GiB", "kernels": "fused"}, marks=pytest.mark.slow),
        {"budget": "min", "grads": "edges"},
        {"budget": "1GiB", "accumulate": True},
        {"budget": "min", "loss_fn": lambda net, x: net(x) * 2},
    ],
    ids=["offload", "fused", "edges", "accumulate", "loss_fn"],
)
def test_other_features(options: dict[str, Any]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(Inside(Reads()), nn.Flatten(0))

    net, plain = twins(build)
    loss_fn = options.get("loss_fn")
    memplan.apply(net, rows(), costs="estimate", **options)
    whole_plan(net)
    if options.get("kernels") == "fused":  # has bits of its own
        memplan.apply(plain, rows(), "min", costs="estimate", kernels="fused")
    for _ in range(2):
        for each in (net, plain):
            each.zero_grad()
            (each(rows()) if loss_fn is None or each is net else loss_fn(each, rows())).sum().backward()
    assert_same_bits({n: p.grad for n, p in plain.named_parameters()}, {n: p.grad for n, p in net.named_parameters()})


def test_what_stands_for_the_graph_of_an_island_is_not_offloaded() -> None:
    """Backward finds that graph by the very tensor that the forward op gave, which no copy of it is."""
    net = nn.Sequential(Inside(Reads()), nn.Flatten(0))
    problem = memplan.plan(
        net, rows(), "1GiB", costs="estimate", host_budget="1GiB", link=memplan.Link(1e10, 1e10)
    ).problem
    movable, ops = movables_of(problem).movable, problem.graph.ops
    tickets = {op.outputs[-1] for op in ops if op.is_island}
    assert tickets and not movable[[*tickets]].any() and movable.any()
    assert {problem.graph.values[v].size_bytes for v in tickets} == {8}


def test_under_autocast() -> None:
    """Casts of a parameter that two modules share are shared, so neither can be an island."""
    for tied in (False, True):

        def build(tied: bool = tied) -> nn.Module:
            net = Inside(Reads())
            if tied:
                net.last.norm.weight = net.middle.one.bias
            return net

        net, plain = twins(build)
        with torch.autocast("cpu", torch.bfloat16):
            memplan.apply(net, rows(), "1GiB", costs="estimate")
        assert_same_bits(run_steps(plain, rows(), autocast=True), run_steps(net, rows(), autocast=True))
        assert isinstance(memplan.plan_of(net), memplan.Plan) is not tied


def test_one_module_that_is_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Reads()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + self.inner(x * 2).tanh()

    net, plain = twins(lambda: Inside(Twice()))
    memplan.apply(net, rows(), "min", costs="estimate")
    assert len(whole_plan(net).islands) == 1
    assert_same_bits(steps(plain, rows()), steps(net, rows()))


def test_a_tensor_that_is_given_as_several_arguments() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention(WIDTH, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x[None]
            return self.attention(x, x, x, need_weights=False)[0][0] + x[0]  # type: ignore[no-any-return]

    class Attention(nn.MultiheadAttention):
        calls = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls = self.calls + 1
            return super().forward(*args, **kwargs)

    net, plain = twins(lambda: Inside(Attends()))
    memplan.apply(net, rows(), "min", costs="estimate")
    assert [line.partition(" at ")[0] for line in whole_plan(net).islands] == ["middle.attention"]
    assert_same_bits(steps(plain, rows()), steps(net, rows()))


# -- where the model itself can't be captured -------------------------------------------------------------------------


class Branching(nn.Module):
    """Blocks with a branch on a computed number between them."""

    def __init__(self, width: int = 32, dropout: float = 0.0, tied: bool = False, again: bool = False) -> None:
        super().__init__()
        self.first, self.second = Block(width, dropout), Block(width, dropout)
        self.head = nn.Linear(width, width)
        self.again = again
        if tied:
            self.second.wide.weight = self.first.wide.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x + self.first(x)
        hidden = hidden * 2 if hidden.sum().item() > 0 else torch.tanh(hidden) + hidden
        if self.again:
            hidden = hidden + self.first(hidden)
        hidden = hidden + self.second(hidden)
        return self.head(hidden).pow(2).mean()


ALL_TRAITS = {"tied": True, "again": True, "dropout": 0.1}
TRAITS = quickly(({}, {"dropout": 0.2}, {"tied": True}, {"again": True}, ALL_TRAITS), {}, ALL_TRAITS)


class Around(nn.Module):
    """A whole model as the first of two parts."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.scale = net, nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.scale  # type: ignore[no-any-return]


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
    assert __file__ in str(caught.value)
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

    class Counted(Block):
        reads = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * max(1.0, x.detach().mean().item())

    _, plan = assert_planned(Model, rows(256), *(f"parts.{i}" for i in range(4)), exactly=False)
    assert plan.floor_bytes <= 1.2 * live_peak(Blocks(checkpointed=True), rows(256))


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
    for each in (net, copy.deepcopy(net)):
        torch.manual_seed(3)
        each.zero_grad()
        for name, again in itertools.product(losses, (False, True)):
            loss = LOSS[name](each(sample))
            loss.backward(retain_graph=again)
            if again:
                loss.backward()
        if True:
            other = copy.deepcopy(plain)
            torch.manual_seed(3)
            other.zero_grad()
            for name, again in itertools.product(losses, (False, True)):
                loss = LOSS[name](other(sample))
                loss.backward(retain_graph=again)
                if again:
                    loss.backward()
            assert_same_bits(dict(other.state_dict()), dict(each.state_dict()))
            assert_same_bits([p.grad for p in other.parameters()], [p.grad for p in each.parameters()])


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
