"""Gradients arrive in the order that the signature says, whatever the plan; ranks that die are noticed.

What several ranks agree on, and refuse, is in `tests/ranks/cells_agreement.py`.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import memplan
from memplan.config import PRESETS
from memplan.installed.planned_forward import planned_forward
from memplan.problem.data import Graph
from memplan.problem.schedule import Schedule, SurfaceGrads
from memplan.runtime.program.collectives import Collectives
from memplan.runtime.ranks.agreement import Ranks
from tests.ranks.spawn import cells, run_ranks
from tests.support.zoo import MODELS, call, loss_of

WITHIN_S = 120  # of starting, planning, dying and being noticed, on a busy machine


def made_order(graph: Graph) -> list[int]:
    """Gradients in the order in which the traced backward pass makes them."""
    return [v for op in graph.ops for v in op.outputs if graph.values[v].role == "gradient"]


def delivered(schedule: Schedule) -> list[int]:
    return [v for step in schedule if isinstance(step, SurfaceGrads) for v in step.values]


@pytest.mark.full_search
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ["handmade", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "unet"))])
def test_no_schedule_of_any_solver_changes_the_order_of_gradients(name: str, preset: str) -> None:
    """So ranks with other budgets, solvers or costs have equal signatures."""
    net, sample = MODELS[name](0)
    points = memplan.explore(net, sample, costs="estimate", config=preset)
    assert len(points) > 1 or preset == "noremat"
    for point in points:
        assert delivered(point.schedule) == made_order(point.problem.graph)


def test_models_share_one_gloo_group() -> None:
    """Each group has threads that wake up a hundred times a second."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        world = torch.distributed.group.WORLD
        first, second = Ranks(world), Ranks(world)
        assert first._group is second._group is not world
        assert second.messages({"rank": 0}) == [{"rank": 0}]
    finally:
        torch.distributed.destroy_process_group()


def arrivals(net: torch.nn.Module, sample: Any) -> list[str]:
    """Names of parameters in the order in which hooks see their gradients."""
    seen: list[str] = []
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
        for name, parameter in net.named_parameters()
    ]
    loss_of(call(net, sample)).backward()
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("grads", ["surface", "edges"])
@pytest.mark.parametrize(
    "name", ["handmade", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "llama", "bert"))]
)
def test_hooks_see_gradients_in_the_order_of_the_signature(name: str, grads: str) -> None:
    net, sample = MODELS[name](0)
    orders = []
    for budget in (0.9, 1 << 40):
        planned = memplan.apply(copy.deepcopy(net), sample, budget, costs="estimate", grads=grads)  # type: ignore[arg-type]
        step = planned_forward(planned).steps[0]  # type: ignore[union-attr]
        orders.append((step.collectives, arrivals(planned, sample)))
        if grads == "surface":
            assert [f"gradient {n}" for n in orders[-1][1]] == list(step.collectives.events)
    assert orders[0] == orders[1]


@pytest.mark.parametrize(
    "name", ["gpt2", "handmade", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "bert"))]
)
def test_gradients_arrive_in_the_order_of_the_plain_model(name: str) -> None:
    """Where three ranks or more sum a bucket of gradients, bits depend on the place that each has in it."""
    net, sample = MODELS[name](0)
    planned = memplan.apply(copy.deepcopy(net), sample, 0.9, costs="estimate")
    assert arrivals(planned, sample) == arrivals(net, sample)


def test_signatures_of_offload_say_which_gradients_come_late() -> None:
    """Gradients of parameters that live on the host arrive after all others."""
    torch.manual_seed(0)
    net, sample = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))).train(), torch.randn(4, 64)
    options: Any = {"costs": "estimate", "host_budget": "1GiB", "link": memplan.Link(1e9, 1e9)}
    planned = memplan.apply(copy.deepcopy(net), sample, 0.7, **options)
    plan, step = memplan.plan_of(planned), planned_forward(planned).steps[0]  # type: ignore[union-attr]
    assert plan is not None
    assert delivered(plan.schedule) != made_order(plan.problem.graph)
    assert [f"gradient {n}" for n in arrivals(planned, sample)] == list(step.collectives.events)


def test_equal_events_have_equal_digests() -> None:
    one, other = Collectives.of(["gradient a", "gradient b"]), Collectives.of(["gradient b", "gradient a"])
    assert one == Collectives.of(iter(["gradient a", "gradient b"]))
    assert one.digest != other.digest
    assert len(one.digest) == 8
    assert one.only_gradients
    assert not Collectives.of(["gather a", "gradient a"]).only_gradients


@pytest.mark.xdist_group("ranks-2-False")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if c.full else (), id=n) for n, c in cells().items() if c.alone],
)
def test_a_rank_that_dies_is_noticed_by_the_others(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, *others = run_ranks([name], cells()[name].world, Path(folder), WITHIN_S)
    assert name in first, f"the first rank did not end: {first['output']}"
    assert first[name] is None
    assert all(name not in other for other in others), "the others died"
