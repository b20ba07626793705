"""Checkpoints that forward makes itself: a plan decides what is recomputed, and they do nothing in it. Same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import memplan
from tests.support.zoo import assert_same_bits, run_steps

WIDTH, ROWS = 32, 128
again = partial(checkpoint, use_reentrant=False)


class Block(nn.Module):
    def __init__(self, drop: float = 0.1) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.second(nn.functional.gelu(self.first(x)))))


class Counting(Block):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))  # type: ignore[no-any-return]


class Layers(nn.Module):
    def __init__(self, run: Callable[..., Any], block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks, self.run = nn.ModuleList(block() for _ in range(5)), run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x.pow(2).mean()


def plainly(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x)  # type: ignore[no-any-return]


def nested(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return again(lambda y: again(block, torch.sin(y)), x)  # type: ignore[no-any-return]


def selectively(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        matrices = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if matrices else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


def wrapped() -> nn.Module:
    net = Layers(plainly)
    wrapper = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(net, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: isinstance(m, Block))
    assert any(isinstance(module, CheckpointWrapper) for module in net.modules())
    return net


@pytest.mark.parametrize("budget", [memplan.Budget(activations=0.7), "min"])
@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: Layers(again), id="dropout"),
        pytest.param(lambda: Layers(nested), id="nested"),
        pytest.param(lambda: Layers(selectively, partial(Block, 0.0)), id="selective"),
        pytest.param(lambda: Layers(partial(again, preserve_rng_state=False), partial(Block, 0.0)), id="no generator"),
        pytest.param(wrapped, id="wrapper"),
    ],
)
def test_a_plan_decides_what_is_recomputed(build: Callable[[], nn.Module], budget: Any) -> None:
    x = torch.randn(ROWS, WIDTH)
    plain, planned = build(), build()
    memplan.apply(planned, x, budget, costs="estimate")
    plan = memplan.plan_of(planned)
    assert plan is not None
    assert not plan.islands
    assert_same_bits(run_steps(plain, x, 3), run_steps(planned, x, 3))


def test_the_plan_is_that_of_the_model_without_checkpoints() -> None:
    x = torch.randn(ROWS, WIDTH)
    plans = [memplan.plan(Layers(run), x, "min", costs="estimate") for run in (plainly, again)]
    assert plans[0].peak_bytes == plans[1].peak_bytes
    assert plans[0].schedule == plans[1].schedule


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: Layers(again, Normed), "writes to a buffer"),
        (lambda: Layers(again, Counting), "sets an attribute"),
        (lambda: Layers(partial(again, preserve_rng_state=False)), "draws random numbers"),
        (lambda: Layers(partial(checkpoint, use_reentrant=True)), "use_reentrant"),
    ],
)
def test_what_would_happen_twice_runs_unplanned(build: Callable[[], nn.Module], reason: str) -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    plain, planned = build(), build()
    with pytest.raises(memplan.UnsupportedModel, match=reason):
        memplan.plan(copy.deepcopy(planned), x, "1GiB", costs="estimate")
    memplan.apply(planned, x, "1GiB", costs="estimate")
    assert memplan.plan_of(planned) is None
    assert_same_bits(run_steps(plain, x, 2), run_steps(planned, x, 2))
    assert [getattr(m, "calls", 0) for m in plain.modules()] == [getattr(m, "calls", 0) for m in planned.modules()]
