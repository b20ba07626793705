"""Planned steps in a slab of memory, with arithmetic: each large block has a planned place, and the bits are eager's.

The stand-in deals out a slab as PyTorch's allocator does, and fills what is freed with NaN. test_cuda_stand_in runs it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan import torch_private as private
from memplan.planning.problems import Problems
from memplan.plans.plan import Plan
from memplan.problem import reserved
from memplan.problem.data import Requests
from memplan.runtime.host.arena import StepArena
from tests.support.reserved_loops import UNet
from tests.support.zoo import assert_same_bits

pytestmark = pytest.mark.gpu
native: Any = getattr(torch.cuda, "stand_in", None)
Build = Callable[[], tuple[nn.Module, torch.Tensor]]


class BlockRecord:
    """What ops ask the stand-in for, in order."""

    events: Sequence[tuple[int, int]] = ()

    def __init__(self, device: torch.device) -> None:
        pass

    def __enter__(self) -> BlockRecord:
        native.record_blocks(True)
        return self

    def __exit__(self, *error: object) -> None:
        self.events = native.record_blocks(False)


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> list[StepArena]:
    """Plans have an arena, whether it makes PyTorch's allocator reserve less or not. Gives the arenas that are made."""
    made: list[StepArena] = []
    original = StepArena.__init__

    def noted(arena: StepArena, device: torch.device) -> None:
        original(arena, device)
        made.append(arena)

    monkeypatch.setattr(StepArena, "__init__", noted)
    monkeypatch.setattr(reserved, "_WORTH_IT", 9.0)
    monkeypatch.setattr(private, "BlockRecord", BlockRecord)
    monkeypatch.setattr(private, "segments_expand", lambda: False)
    monkeypatch.setattr(Problems, "_requests", lambda self, captured, optimizer: Requests(False))
    return made


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    layers = (nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 256)) for _ in range(4))
    return nn.Sequential(*layers), torch.randn(2048, 256)


def unet() -> tuple[nn.Module, torch.Tensor]:
    net = UNet()
    for index, up in enumerate(net.up):  # the stand-in has no transposed convolutions
        net.up[index] = nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(up.in_channels, up.out_channels, 1))
    return net, torch.randn(4, 3, 64, 64)


def gpt2() -> tuple[nn.Module, torch.Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=500, n_positions=128, n_embd=256, n_layer=3, n_head=4, bos_token_id=None, eos_token_id=None
    )
    return GPT2LMHeadModel(config), torch.randint(0, 500, (16, 128))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if x.is_floating_point():
        return model(x).square().mean()  # type: ignore[no-any-return]
    return model(input_ids=x, labels=x, use_cache=False).loss  # type: ignore[no-any-return]


@pytest.mark.parametrize(("build", "microbatches"), [(perceptron, 1), (unet, 3), (gpt2, 1)])
def test_a_step_in_one_slab_has_the_bits_of_eager(build: Build, microbatches: int, arenas: list[StepArena]) -> None:
    torch.manual_seed(0)
    model, x = build()
    plain, planned, x = model.cuda(), copy.deepcopy(model).cuda(), x.cuda()
    optimizers = [torch.optim.AdamW(net.parameters(), 1e-3) for net in (plain, planned)]
    memplan.apply(
        planned, x, "min", loss_fn=loss_of, optimizer=optimizers[1], accumulate=microbatches > 1, on_infeasible="raise"
    )
    plan = memplan.plan_of(planned)
    assert isinstance(plan, Plan) and plan.recomputed and plan.steering is not None
    for step in range(3):
        seen = []
        for net, optimizer in zip((plain, planned), optimizers, strict=True):
            torch.manual_seed(step)
            losses, slabs, outside = [], native.slabs(0), native.outside(0)
            for _ in range(microbatches):
                loss = net(x) if net is planned else loss_of(net, x)
                loss.backward()
                losses.append(loss.detach())
            if net is planned:
                assert native.slabs(0) - slabs == (step == 0)  # one allocation, and none in later steps
                assert native.outside(0) == outside
            seen.append((losses, [p.grad.clone() for p in net.parameters() if p.grad is not None]))
            optimizer.step()
            optimizer.zero_grad()
        assert_same_bits(seen[0], seen[1])
    assert_same_bits(plain.state_dict(), planned.state_dict())
    assert [arena.astray for arena in arenas] == [0]
