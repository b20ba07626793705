"""A small model with something of every kind to recompute, and a look at everything that must not change."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

import memplan
from memplan.costs.optimizer import optimizer_memory
from tests.support.zoo import assert_same_bits, bits_of, copied


class Net(nn.Module):
    """Two wide layers, batch norm and dropout: something of every kind to recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.middle, self.outer = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 8)
        self.norm, self.drop = nn.BatchNorm1d(32), nn.Dropout(0.2)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.inner(x)))
        return self.outer(torch.tanh(self.middle(self.drop(hidden))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x).pow(2).mean()


def net_and_sample(kind: type[nn.Module] = Net) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return kind().train(), torch.randn(64, 8)


def at_floor(net: nn.Module, sample: Any, **options: Any) -> nn.Module:
    floor_bytes = memplan.explore(net, sample, costs="estimate", **options)[0].floor_bytes
    return memplan.apply(net, sample, floor_bytes, costs="estimate", **options)


def pair(kind: type[nn.Module] = Net) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A plain model, its planned twin, and a sample."""
    net, sample = net_and_sample(kind)
    planned = at_floor(copy.deepcopy(net), sample)
    return net, planned, sample


def grads_of(net: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in net.named_parameters()}


def picture(net: nn.Module, sample: Any) -> dict[str, Any]:
    """All that a refusal must leave alone: contents, identities, gradients, flags, attributes, generators."""
    tensors = {**dict(net.named_parameters(remove_duplicate=False)), **dict(net.named_buffers(remove_duplicate=False))}
    return {
        "identities": {name: id(t) for name, t in tensors.items()},
        "contents": {name: bits_of(t).clone() for name, t in tensors.items() if t.device.type != "meta"},
        "versions": {name: t._version for name, t in tensors.items()},
        "grads": {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()},
        "requires_grad": {name: p.requires_grad for name, p in net.named_parameters()},
        "training": [m.training for m in net.modules()],
        "attributes": [{k: id(v) for k, v in vars(m).items()} for m in net.modules()],
        "plain": [
            {k: repr(v) for k, v in vars(m).items() if isinstance(v, (int, float, str, list, dict))}
            for m in net.modules()
        ],
        "sample": [
            copied(t) for t in (sample if isinstance(sample, tuple) else (sample,)) if isinstance(t, torch.Tensor)
        ],
        "generators": [torch.get_rng_state(), repr(random.getstate()), pickle.dumps(np.random.get_state())],
        "grad_mode": torch.is_grad_enabled(),
    }


@contextmanager
def nothing_changes(net: nn.Module, sample: Any = None) -> Iterator[None]:
    before = picture(net, sample)
    yield
    assert_same_bits(before, picture(net, sample), "state")


def optimizer_needs(
    optimizer: torch.optim.Optimizer, device: torch.device, without: Collection[torch.Tensor] = ()
) -> tuple[int, int]:
    """(bytes of its state once it has stepped, bytes that a step allocates beyond that)."""
    return optimizer_memory(optimizer, device, without)[:2]
