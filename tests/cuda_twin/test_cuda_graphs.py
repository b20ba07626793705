"""Planned steps that the caller captures in a CUDA graph: PyTorch's own `CUDAGraph` on the twin of a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.problem.steering import GUARD_BYTES
from tests.cuda_twin import twin

pytestmark = [pytest.mark.twin, pytest.mark.skipif(twin.missing() is not None, reason=str(twin.missing()))]

WORK = ("kernel", "copy", "set")


@pytest.fixture(autouse=True)
def own_workspaces() -> Iterator[None]:
    """cuBLAS's workspaces for the streams of graphs go when a test ends."""
    yield
    torch._C._cuda_clearCublasWorkspaces()


class Net(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        layers = [(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.Dropout(p)) for _ in range(4)]
        self.layers = nn.ModuleList(nn.Sequential(*layer) for layer in layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def planned(budget: Any, p: float = 0.0, **options: Any) -> tuple[nn.Module, torch.Tensor]:
    """A model with a plan that has run once."""
    model, x = Net(p).cuda(), torch.randn(2048, 256, device="cuda")
    memplan.apply(model, x, budget, **options)
    for _ in range(2):
        step(model, x)
    return model, x


def step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).backward()


def captured(model: nn.Module, x: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph of a step, captured as PyTorch's documentation says."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(model, x)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).backward()
    return graph


def test_a_graph_has_the_calls_of_a_planned_step() -> None:
    model, x = planned("min")
    plan = memplan.plan_of(model)
    assert isinstance(plan, memplan.Plan) and plan.recomputed
    with twin.recorded() as calls:
        step(model, x)
    work = sum(call.kind in WORK for call in calls)
    torch.cuda.reset_peak_memory_stats()
    graph = captured(model, x)
    # Workspaces of two further streams, on two threads; the end of the arena; a few scalars of the graph.
    beside = 4 * max(plan.problem.requests.workspaces) + GUARD_BYTES + 4096
    assert torch.cuda.max_memory_allocated() <= plan.peak_bytes + beside
    gradients = [p.grad for p in model.parameters()]
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with twin.recorded() as calls:
        graph.replay()
    assert [(call.kind, call.n) for call in calls if call.kind != "alloc"] == [("graph", work)]
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    step(model, x)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # PyTorch says so of unplanned models, too
def test_forward_and_backward_can_be_two_graphs() -> None:
    """By PyTorch's own `make_graphed_callables`, which copies inputs in, and hands gradients out."""
    model, x = planned("min", grads="edges")
    with twin.recorded() as calls:
        step(model, x)
    work = sum(call.kind in WORK for call in calls)
    model.zero_grad()
    torch.cuda.make_graphed_callables(model, (x,))
    step(model, x)
    x = torch.randn_like(x)
    with twin.recorded() as calls:
        step(model, x)
    graphs = [call.n for call in calls if call.kind == "graph"]
    assert len(graphs) == 2 and sum(graphs) == work - 1  # the loss's own gradient is made outside
    assert Counter(call.kind for call in calls)["kernel"] <= 2


def test_a_graph_draws_as_many_random_numbers_as_a_step() -> None:
    model, x = planned(1.0, p=0.1)
    generator = torch.cuda.default_generators[0]
    start = generator.get_offset()
    step(model, x)
    drawn = generator.get_offset() - start
    graph = captured(model, x)
    start = generator.get_offset()
    graph.replay()
    assert generator.get_offset() - start == drawn > 0


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize(
    ("budget", "p", "options", "reason"),
    [
        ("min", 0.1, {}, "runs random ops again"),
        (0.7, 0.0, {"host_budget": "1GiB", "link": memplan.Link(1e12, 1e12)}, "copies to and from host memory"),
    ],
)
def test_steps_that_no_graph_can_take(budget: Any, p: float, options: dict[str, Any], reason: str) -> None:
    model, x = planned(budget, p, **options)
    with pytest.raises(RuntimeError, match=f"memplan: a CUDA graph can't take this step, which {reason}"):
        captured(model, x)
    with twin.recorded() as calls:
        step(model, x)
    assert Counter(call.kind for call in calls)["kernel"]
