"""Islands that save other tensors in each step, or read other ones: experts, layers that are left out."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from tests.support.island_models import (
    WIDTH,
    Block,
    Inside,
    assert_planned,
    rows,
    steps,
    twins,
    whole_plan,
)
from tests.support.meter import live_peak
from tests.support.zoo import assert_same_bits, copied, run_steps


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
