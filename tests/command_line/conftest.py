"""The command line in this process, and small steps to plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from memplan.command_line.commands import main

SMALL_GPT2 = (
    *("gpt2", "--set", "n_layer=2", "--set", "n_embd=64", "--set", "n_head=2", "--set", "vocab_size=128"),
    *("--length", "64", "--batch", "4", "--gpu", "rtx-4090"),
)

BUILD = """
import torch
from torch import nn

def build(batch=64):
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*blocks).train(), torch.zeros(batch, 32)

def with_loss():
    model, sample = build()
    return model, sample, lambda model, x: model(x).pow(2).mean()

def broken():
    raise ArithmeticError("of the user")

def wrong():
    from torch.utils.checkpoint import checkpoint

    model, sample = build()
    drop = torch.nn.Dropout(0.5)
    unsafe = dict(use_reentrant=False, preserve_rng_state=False)
    return model, sample, lambda model, x: checkpoint(lambda x: model(drop(x + 1)), x, **unsafe).sum()

def unfit():
    return build()[0]

number = 3
"""


class Said(NamedTuple):
    """What a command said, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def facts(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        found: dict[str, Any] = json.loads(self.out)
        return found


Run = Callable[..., Said]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command."""

    def call(*arguments: object) -> Said:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        return Said(status, *capsys.readouterr())

    return call


@pytest.fixture
def builds(tmp_path: Path) -> Path:
    """A file with functions that give models, and some that don't."""
    path = tmp_path / "builds.py"
    path.write_text(BUILD)
    return path
