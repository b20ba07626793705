"""Copies of real steps on the twin: each is ordered, and the host waits for none of them needlessly."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch

import memplan
from memplan.runtime.host.streams import CudaStreams
from memplan.runtime.host.transfers import Transfers
from tests.cuda_twin import twin
from tests.cuda_twin.models import loss_of, pictures, resnet50, small_llama
from tests.cuda_twin.races import races
from tests.cuda_twin.twin import Call

pytestmark = [pytest.mark.twin, pytest.mark.skipif(twin.missing() is not None, reason=str(twin.missing()))]

FAST = memplan.Roofline(500e12, 2.4e12)
OFFLOADS: dict[str, dict[str, Any]] = {
    "activations": {"budget": 0.7},
    "weights": {"budget": 0.35},
    "update": {"budget": 0.35, "update": "backward"},
    "accumulate": {"budget": 0.4, "accumulate": True},
    "frozen": {"budget": 0.45},
    "frozen and kept": {"budget": 0.6, "keep_frozen": True},
    "no offload": {"budget": 0.7, "host_budget": None},
}


class Loop:
    """A small Llama in training, offloaded."""

    def __init__(self, name: str) -> None:
        options = {"host_budget": "4GiB", **OFFLOADS[name]}
        self.batches = 2 if "accumulate" in options else 1
        self.model, self.sample = small_llama()
        if "frozen" in name:
            for parameter_name, parameter in self.model.named_parameters():
                parameter.requires_grad_("layers.3" in parameter_name)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, fused=True)
        memplan.apply(
            self.model, self.sample, options.pop("budget"), optimizer=self.optimizer, costs=FAST, on_infeasible="min",
            **options,
        )  # fmt: skip
        plan = memplan.plan_of(self.model)
        assert isinstance(plan, memplan.Plan) and bool(plan.offloaded_bytes) == (name != "no offload")
        for _ in range(3):  # what is made in the first steps is there
            self.step()

    def step(self) -> None:
        for _ in range(self.batches):
            output = self.model(**self.sample)
            output.loss.backward()
            del output
        self.optimizer.step()
        self.model.zero_grad()

    def recorded(self) -> list[Call]:
        with twin.recorded() as calls:
            self.step()
        return calls


@pytest.mark.parametrize("is_lazy", [False, True])
@pytest.mark.parametrize("name", OFFLOADS)
def test_nothing_races(name: str, is_lazy: bool) -> None:
    loop = Loop(name)
    with twin.lazy() if is_lazy else contextlib.nullcontext():
        calls = loop.recorded()
    assert races(calls) == []


PLANTED = {
    "what is fetched is not waited for": (CudaStreams, "wait", ("copy", "kernel")),
    "what is copied is freed at once": (Transfers, "_keep", ("copy", "alloc")),
    "the optimizer on the host writes before copies have read": (CudaStreams, "finish", ("copy", "write")),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_races_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop("weights")
    kind, method, pair = PLANTED[name]
    monkeypatch.setattr(kind, method, lambda *_: None)
    assert pair in {(race.earlier.kind, race.later.kind) for race in races(loop.recorded())}


# -- waits of the host ------------------------------------------------------------------------------------------------


def waits(calls: list[Call]) -> Counter[str]:
    """Waits for all that a stream or the device has to do, and memory that is asked of the driver."""
    slow = ("device_sync", "malloc", "free", "host_alloc", "host_free")
    return Counter(c.kind for c in calls if c.kind in slow or (c.kind == "stream_sync" and c.a == 0))


@pytest.mark.parametrize("name", OFFLOADS)
def test_a_steady_step_waits_for_no_more_than_the_plain_models(name: str) -> None:
    """That looks once in each forward whether its sequences are packed."""
    loop = Loop(name)
    assert waits(loop.recorded()) <= Counter({"stream_sync": loop.batches})


def test_a_steady_step_of_a_model_that_reads_nothing_does_not_wait() -> None:
    model, sample = pictures(resnet50, 16, 128, ())()
    memplan.apply(model, sample, 0.7, costs=FAST)
    for _ in range(4):
        with twin.recorded() as calls:
            loss_of(model(**sample)).backward()
            model.zero_grad()
    assert waits(calls) == Counter()
