"""Steps that write in place, over fused groups: reads, writes and random draws keep their order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import memplan
from memplan.fusion import fuse_step
from memplan.fusion.fuse_step import GroupCompiler
from tests.support.parameters import examples
from tests.support.zoo import assert_same_bits, run_steps


@pytest.fixture(scope="module", autouse=True)
def groups_not_compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Groups run their primitives one by one: what is tried here is their order, at no compiler's expense."""

    def interpreted(function: Callable[..., Any], *rest: Any) -> Callable[[list[torch.Tensor]], Any]:
        return lambda given: function(*given)

    folder: Path = tmp_path_factory.mktemp("records")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memplan.torch_private.compiled_graph", interpreted)
        patch.setattr("memplan.torch_private.missing_compiler", lambda device: "")
        patch.setattr("memplan.torch_private.inductor_cache_dir", lambda: str(folder))
        patch.setattr(fuse_step, "_process_compiler", GroupCompiler())
        yield


class GradientHalved(torch.autograd.Function):
    """Its backward writes over the gradient that it is handed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # PyTorch takes any
        return grad.mul_(0.5)


class Written(nn.Module):
    """A program of reads and writes of buffers, of views and of activations."""

    def __init__(self, program: list[tuple[str, int]]) -> None:
        super().__init__()
        self.program = tuple(program)
        self.linears = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.norm = nn.BatchNorm1d(32)
        self.register_buffer("row", torch.ones(32))
        self.register_buffer("table", torch.ones(3, 32))
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read, h = [self.row.clone()], self.linears[0](x)
        for what, k in self.program:
            h = getattr(self, what)(h, k, read)
        return h

    def pointwise(self, h: torch.Tensor, k: int, read: list[torch.Tensor]) -> torch.Tensor:
        return torch.tanh(h * (1 + k / 8)) + read[k % len(read)]

    def linear(self, h: torch.Tensor, k: int, read: list[torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = self.linears[k % 3](torch.tanh(h))
        return out

    def weigh(self, h: torch.Tensor, k: int, read: list[torch.Tensor]) -> torch.Tensor:
        return torch.tanh(h) * read[k % len(read)]

    def read_row(self, h: torch.Tensor, k: int, read: list[torch.Tensor]) -> torch.Tensor:
        read.append(torch.clamp(self.row / 2, max=1.0) if k % 2 else self.row.sin())
        return h

    def read_table(self, h: torch.Tensor, k: int, read: list[torch.Tensor]) -> torch.Tensor:
        read.append(self.table[k % 3].cos() if k % 2 else self.table.t()[:, k % 3] * self.count)
        return h

    def read_statistics(self, h: torch.Tensor, k: int, read: list[torch.Tensor]) -> torch.Tensor:
        read.append(torch.tanh(self.norm.running_mean * 2))  # type: ignore[operator]  # it has statistics
        return h

    def write_row(self, h: torch.Tensor, k: int, read: list[torch.Tensor]) -> torch.Tensor:
        self.row.mul_(0.5).add_(h.detach().mean(0)) if k % 2 else self.row.copy_(read[k % len(read)])
        return h

    def write_table(self, h: torch.Tensor, k: int, read: list[torch.Tensor]) -> torch.Tensor:
        self.table[k % 3] = h.detach().abs().amax(0) if k % 2 else self.row
        return h

    def count_up(self, h: torch.Tensor, k: int, read: list[torch.Tensor]) -> torch.Tensor:
        read.append((self.count / 10).clamp(max=1.0))
        self.count += 1
        return h

    def normalise(self, h: torch.Tensor, k: int, read: list[torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = self.norm(h)
        return out

    def write_activation(self, h: torch.Tensor, k: int, read: list[torch.Tensor]) -> torch.Tensor:
        h = torch.tanh(h) * 2
        read.append(h.detach().cos().mean(0))
        h[:, : 4 + k].add_(1.0 + k)
        return h

    def in_place(self, h: torch.Tensor, k: int, read: list[torch.Tensor]) -> torch.Tensor:
        h = h + 1
        read.append(h.detach().sin().amax(0))
        return h.relu_() if k % 2 else h.mul_(read[0])

    def halve(self, h: torch.Tensor, k: int, read: list[torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = GradientHalved.apply(h)
        return out

    def draw(self, h: torch.Tensor, k: int, read: list[torch.Tensor]) -> torch.Tensor:
        if k % 2:
            return nn.functional.dropout(h, 0.3)
        read.append(torch.bernoulli(torch.sigmoid(h.detach().sin())).sum(0) / 16)
        return h


STEPS = tuple(name for name in vars(Written) if name not in ("forward",) and not name.startswith("__"))


def fused_as_eager(net: nn.Module, sample: torch.Tensor) -> None:
    """The fused step has equal bits at any budget, and the numbers of eager, buffers among them."""
    try:
        plain = run_steps(copy.deepcopy(net), sample, 3)
    except RuntimeError:  # of autograd: what it has saved was written over
        assume(False)
    found = []
    for budget in ("1GiB", "min"):
        planned = copy.deepcopy(net)
        memplan.apply(planned, sample, budget, kernels="fused", costs="estimate")
        found.append(run_steps(planned, sample, 3))
    assert_same_bits(*found)
    torch.testing.assert_close(found[0], plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "program",
    [
        [("count_up", 0), ("pointwise", 1), ("weigh", 1)],  # what was read before a write is used after it
        [("write_table", 1), ("read_table", 1), ("write_table", 4), ("weigh", 1)],
        [("normalise", 0), ("read_statistics", 0), ("normalise", 0), ("weigh", 1)],
        [("write_activation", 2), ("pointwise", 1), ("weigh", 1)],
        [("pointwise", 0), ("halve", 0)],  # the gradient that is handed in
    ],
)
def test_what_is_read_is_what_eager_reads(program: list[tuple[str, int]]) -> None:
    torch.manual_seed(0)
    fused_as_eager(Written(program).double(), torch.randn(16, 32, dtype=torch.float64))


class DrawsInOrder(nn.Module):
    """The second draw is ready before the first one, if what the first one reads is made in a group with `late`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = x.sin()
        drawn = torch.bernoulli(torch.sigmoid(early))
        factor = torch.rand(16, 32, dtype=x.dtype)
        late = early * self.inner(x)
        return late * drawn * factor


def test_random_numbers_are_drawn_in_order() -> None:
    torch.manual_seed(0)
    fused_as_eager(DrawsInOrder().double(), torch.randn(16, 32, dtype=torch.float64))


class OutputHalved(torch.autograd.Function):
    """Its backward writes over its own output, which the caller holds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.output = out = x.clone()
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # PyTorch takes any
        ctx.output.detach().mul_(0.5)
        return grad * ctx.output.detach()


def test_backward_that_writes_over_an_output_is_refused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = OutputHalved.apply(torch.tanh(self.inner(x)))
            return out

    for kernels in ("eager", "fused"):
        with pytest.raises(memplan.UnsupportedModel, match="backward writes to output"):
            memplan.plan(Net(), torch.randn(16, 32), "1GiB", kernels=kernels, costs="estimate")


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5)), min_size=2, max_size=12))
def test_random_programs_of_reads_and_writes(program: list[tuple[str, int]]) -> None:
    torch.manual_seed(0)
    fused_as_eager(Written(program).double(), torch.randn(16, 32, dtype=torch.float64))
