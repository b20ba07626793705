"""Forward imports modules while a step is traced: what they do is done once in a process, and is not undone."""

from __future__ import annotations

import copy
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memplan
from tests.support.zoo import assert_same_bits, run_steps

REGISTRY: dict[str, Any] = {}
WIDTH = 16

SOURCE = """
import torch
from torch import nn
from tests.capture.test_imports_in_forward import REGISTRY

SCALE = torch.tensor([2.0, 0.5] * 8)  # a real tensor, though it is made in the middle of a trace

def tanh(x):
    return torch.tanh(x) * SCALE

REGISTRY["tanh"] = tanh
torch.nn.Linear.kernels_were_imported = True
"""


class ByNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.from_numpy(np.tanh(x.detach().numpy()))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


class Lazy(nn.Module):
    """Imports a module when it first runs, as libraries look for kernels."""

    def __init__(self, module: str, opaque: bool) -> None:
        super().__init__()
        self.module, self.opaque = module, opaque
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        __import__(self.module)
        x = REGISTRY["tanh"](self.first(x))
        if self.opaque:
            x = ByNumpy.apply(x)  # type: ignore[no-untyped-call]
        return self.last(x).pow(2).mean()  # type: ignore[no-any-return]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that nobody has imported yet."""
    name = f"kernels_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(nn.Linear, "kernels_were_imported", False, raising=False)
    REGISTRY.clear()
    return name


@pytest.mark.parametrize("opaque", [False, True])
def test_what_an_import_does_stays(module: str, opaque: bool) -> None:
    torch.manual_seed(0)
    net, sample = Lazy(module, opaque), torch.randn(32, WIDTH)
    plain, planned = copy.deepcopy(net), net
    memplan.apply(planned, sample, "1MiB", costs="estimate")
    imported = sys.modules[module]
    assert {"tanh": imported.tanh} == REGISTRY
    assert type(imported.SCALE) is torch.Tensor
    assert nn.Linear.kernels_were_imported  # type: ignore[attr-defined]
    assert isinstance(memplan.plan_of(planned), memplan.Plan)
    assert_same_bits(run_steps(plain, sample), run_steps(planned, sample))


def test_loaders_stay_as_they_are(module: str) -> None:
    net, sample = Lazy(module, False), torch.randn(32, WIDTH)
    finders = list(sys.meta_path)
    memplan.apply(net, sample, "1MiB", costs="estimate")
    imported: ModuleType = sys.modules[module]
    assert sys.meta_path == finders
    assert type(imported.__loader__) is type(textwrap.__loader__)
    assert imported.__spec__ is not None
    assert imported.__spec__.loader is imported.__loader__
