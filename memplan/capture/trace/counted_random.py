"""Masks of dropout as functions of a seed: ops that fused groups compute, in place of ops that draw from a generator.

A number depends on a seed and on its place in the tensor alone, by a counter-based generator (Philox; Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011), so it is the same whenever, and in whichever group, it is made.
Seeds are drawn from PyTorch's generator once a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memplan import torch_private as private

aten = torch.ops.aten

_SEEDS = 256  # drawn at once: no model so far takes more


class CountedRandom:
    """Writes random ops to a trace as functions of seeds. run: runs an op and writes it to the trace."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run, (self._draw_op, self._uniform_op) = run, private.seed_ops()
        self._seeds: dict[torch.device, tuple[torch.Tensor, int]] = {}  # and how many are used

    def instead(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The results of a random op, from a seed. None for an op that draws from the generator, or is not random."""
        if func is aten.native_dropout.default and False not in args[2:]:
            tensor, p = args[:2]
            kept = self._run(aten.ge.Scalar, self._uniform(tensor), p)
            scaled = self._run(aten.mul.Tensor, tensor, 0.0 if p == 1 else 1 / (1 - p))
            return self._run(aten.mul.Tensor, scaled, kept), kept
        if func is aten.bernoulli_.float:
            tensor, p = (*args, 0.5)[:2]
            return self._run(aten.copy_.default, tensor, self._run(aten.lt.Scalar, self._uniform(tensor), p))
        return None

    def _uniform(self, tensor: torch.Tensor) -> torch.Tensor:
        """Numbers in [0, 1), float32, in the shape of a tensor."""
        device = tensor.device
        seeds, used = self._seeds.get(device, (None, _SEEDS))
        if used == _SEEDS:
            seeds, used = self._run(self._draw_op, _SEEDS, device), 0
        assert seeds is not None
        self._seeds[device] = seeds, used + 1
        seed = self._run(aten.select.int, seeds, 0, used)
        uniform: torch.Tensor = self._run(self._uniform_op, list(tensor.shape), seed, "rand")
        return uniform
