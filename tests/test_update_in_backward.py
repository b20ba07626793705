"""Parameters that are updated in backward: the bits of the plain loop, the bytes that were predicted, what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import IllegalSchedule
from memplan.problem import Link
from memplan.runtime import planned_forward
from memplan.runtime import transfers as engine
from memplan.schedule import Compute, Prefetch, SurfaceGrads
from memplan.simulate import simulate
from tests.meter import storage_bytes
from tests.small import net_and_sample
from tests.test_offload import CountingStreams, DeviceMeter, live_peaks
from tests.zoo import MODELS, Sample, assert_same_bits, call, copied, loss_of

PCIE = Link(25e9, 25e9)
Build = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Build] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-5, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach Adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True, amsgrad=True, maximize=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def steps(net: nn.Module, sample: Sample, optimizer: torch.optim.Optimizer, count: int = 3) -> dict[str, Any]:
    """Train with a scheduler; everything that must be the same bits."""
    torch.manual_seed(7)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses = []
    for _ in range(count):
        loss = loss_of(call(net, sample))
        losses.append(copied(loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {
        "losses": losses,
        "state": {name: copied(t) for name, t in net.state_dict().items()},
        "optimizer": copied(dict(sorted(optimizer.state_dict()["state"].items()))),
        "rates": [group["lr"] for group in optimizer.param_groups],
        "rng_state": torch.get_rng_state(),
    }


def planned(net: nn.Module, sample: Sample, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    """The model at the floor of recomputation, or below with a host budget. Gives its plan."""
    alone = {"costs": "estimate", "optimizer": optimizer, "update": "backward"}
    floor = memplan.plan(net, sample, 1.0, **alone).floor_bytes
    memplan.apply(net, sample, int(0.7 * floor) if "host_budget" in options else floor, **alone, **options)
    plan = memplan.plan_of(net)
    assert plan is not None
    return plan


@pytest.fixture(params=[None, "1GiB"], ids=["device", "host"])
def host(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {} if request.param is None else {"host_budget": request.param, "link": PCIE}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps_are_the_bits_of_the_plain_loop(name: str, host: dict[str, Any]) -> None:
    plain, sample = MODELS["handmade"](0)
    net = copy.deepcopy(plain)
    start = copied(dict(net.named_parameters()))
    expected = steps(plain, sample, OPTIMIZERS[name](plain.parameters()))
    optimizer = OPTIMIZERS[name](net.parameters())
    plan = planned(net, sample, optimizer, **host)
    assert bool(plan.problem.graph.host_resident_bytes) is bool(host)
    assert_same_bits(expected, steps(net, sample, optimizer))
    assert all(p.grad is None and not torch.equal(p, start[n]) for n, p in net.named_parameters())


def tied(dtype: torch.dtype) -> tuple[nn.Module, Sample]:
    net, sample = MODELS["gpt2"](0)  # its embedding is its head
    return net.to(dtype), sample


def frozen() -> tuple[nn.Module, Sample]:
    net, sample = MODELS["llama"](0)
    for parameter in net.model.layers[1].parameters():
        parameter.requires_grad_(False)
    return net, sample


def lora() -> tuple[nn.Module, Sample]:
    peft = pytest.importorskip("peft")
    net, sample = MODELS["llama"](0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return peft.get_peft_model(net, config).train(), sample


CASES = {"tied": lambda: tied(torch.float32), "bfloat16": lambda: tied(torch.bfloat16), "frozen": frozen, "lora": lora}


@pytest.mark.parametrize("case", CASES)
def test_kinds_of_models(case: str, host: dict[str, Any]) -> None:
    plain, sample = CASES[case]()
    net = copy.deepcopy(plain)
    start = copied(dict(net.named_parameters()))
    expected = steps(plain, sample, two_groups(plain))
    optimizer = two_groups(net)
    plan = planned(net, sample, optimizer, **host)
    assert not host or plan.offloaded_bytes
    assert_same_bits(expected, steps(net, sample, optimizer))
    moved = {n for n, p in net.named_parameters() if not torch.equal(p, start[n])}
    assert moved == {n for n, p in net.named_parameters() if p.requires_grad}
    assert all(p.grad is None for p in net.parameters())


def two_groups(net: nn.Module) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not, each with a rate of its own; scale parameters are large steps, so all move."""
    trainable = [p for p in net.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trainable if p.dim() > 1], [p for p in trainable if p.dim() < 2]
    groups = [{"params": matrices, "lr": 0.03, "weight_decay": 0.1}]
    return torch.optim.AdamW(groups + ([{"params": vectors, "lr": 0.02}] if vectors else []))
