"""Loops in which the first run of forward, or the first of a size, does or leaves something else than later ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import memplan

LENGTHS = (16, 16, 24, 24, 16, 20)


class _Two(nn.Module):
    """Two layers over sequences, and what subclasses remember."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)
        self.first, self.size, self.longest = True, None, 1
        self.register_buffer("table", torch.ones(16))

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.narrow(torch.relu(self.wide(x)))
        return out


class ScaledByTheFirstBatch(_Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            self.table, self.first = x.detach().flatten(0, 1).std(0), False
        return self.layers(x / self.table)


class PositionsOfEachLength(_Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.size != x.shape[1]:
            self.register_buffer("table", torch.linspace(-1, 1, x.shape[1])[:, None], persistent=False)
            self.size = x.shape[1]
        return self.layers(x + self.table)


class TwiceAtFirst(_Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            self.first = False
            return self.layers(x) * 2
        return self.layers(x)


class OtherAfterAnotherLength(_Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed, self.size = self.size != x.shape[1], x.shape[1]
        out = self.layers(x)
        return out.detach() + out if changed else out


class OtherGradientAtFirst(_Two):
    """The same value, and another gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layers(x.detach() if self.first else x)
        self.first = False
        return out


class DrawsAtFirst(_Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            torch.rand(3)
            self.first = False
        return self.layers(nn.functional.dropout(x))


class OverTheLongest(_Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.longest = max(self.longest, x.shape[1])
        return self.layers(x) / self.longest**0.5


KINDS = [
    ScaledByTheFirstBatch, PositionsOfEachLength, TwiceAtFirst, OtherAfterAnotherLength, OtherGradientAtFirst,
    DrawsAtFirst, OverTheLongest,
]  # fmt: skip


def losses(make: Callable[[], nn.Module], planned: Callable[[nn.Module], object], lengths: Sequence[int]) -> list[Any]:
    torch.manual_seed(0)
    model = make()
    with torch.random.fork_rng():
        planned(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for step, length in enumerate(lengths):
        x = torch.randn(8, length, 16, generator=torch.Generator().manual_seed(step)).requires_grad_()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), x.grad.sum().item() if x.grad is not None else None))
    return [*found, *(tensor.sum().item() for tensor in model.buffers())]


@pytest.mark.parametrize("length", [16, 24])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_first_runs_are_those_of_eager(kind: Callable[[], nn.Module], length: int) -> None:
    def planned(model: nn.Module) -> None:
        before = {name: value for name, value in vars(model).items() if isinstance(value, (bool, int))}
        memplan.apply(model, torch.randn(8, length, 16).requires_grad_(), "1GiB")
        memplan.prepare(model, [torch.randn(8, 40, 16).requires_grad_()])
        assert {name: vars(model)[name] for name in before} == before, "no call has been made yet"

    assert losses(kind, planned, LENGTHS) == losses(kind, lambda model: None, LENGTHS)


def test_a_table_of_positions_is_planned() -> None:
    def planned(model: nn.Module) -> None:
        memplan.apply(model, torch.randn(8, 16, 16).requires_grad_(), "1GiB")
        assert memplan.plan_of(model) is not None

    assert losses(PositionsOfEachLength, planned, (16, 16)) == losses(PositionsOfEachLength, lambda m: None, (16, 16))


@pytest.mark.parametrize("length", [24, 32])
def test_frequencies_that_grow_with_the_longest_sequence(length: int) -> None:
    """`rope_type="dynamic"` makes frequencies anew for sequences beyond 16, and keeps the longest length."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16, initializer_range=0.2, rope_parameters=rope, use_cache=False,
    )  # fmt: skip

    def found(budget: str | None) -> list[float]:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        if budget is not None:
            ids = torch.zeros(2, length, dtype=torch.long)
            memplan.apply(model, {"input_ids": ids, "labels": ids}, budget)
        losses = []
        for step, n in enumerate((24, 24, 12, 28, 24)):
            ids = torch.randint(0, 50, (2, n), generator=torch.Generator().manual_seed(step))
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
        return losses

    assert found("1GiB") == found(None)
