"""Small models with a block in the middle that tests checkpoint, compile or break, to be audited."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memplan

EXACT: dict[str, Any] = {"use_reentrant": False}
Run = Callable[..., Any]


class Block(nn.Module):
    """A layer with a dropout, which `around` runs."""

    def __init__(self, around: Callable[[Block, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(16, 16), nn.Dropout(0.4)
        self.norm: nn.Module = nn.LayerNorm(16)
        self._around = around

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.drop(torch.tanh(self.linear(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._around(self, x)


def plainly(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.body(x)


def checkpointed(**options: Any) -> Callable[[Block, torch.Tensor], torch.Tensor]:
    return lambda block, x: checkpoint(block.body, x, **(EXACT | options))


def net(around: Callable[[Block, torch.Tensor], torch.Tensor], kind: type[Block] = Block) -> nn.Module:
    """Three blocks. The one in the middle is what the tests are about."""
    torch.manual_seed(0)
    return nn.Sequential(Block(plainly), kind(around), Block(plainly)).train()


def sample() -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)


def found_in(audit: memplan.Audit, kind: str) -> list[str]:
    return [one.name for one in audit.findings if one.kind == kind]


def first_of(model: nn.Module, **given: Any) -> tuple[str, str]:
    """Kind and name of what differs first."""
    audit = memplan.audit(model, sample(), **given)
    assert not audit.exact
    assert not audit.nondeterministic
    assert str(audit).startswith("not exact: ")
    return audit.findings[0].kind, audit.findings[0].name
