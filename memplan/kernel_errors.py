"""How far loss and gradients of eager and of fused kernels are from those in float64."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from memplan import torch_private as private
from memplan.api import apply
from memplan.capture.trace.call import Call, CallReader, Sample
from memplan.planned_models import remove
from memplan.planning.settings import LossFunction
from memplan.torch_private import pytree

_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class KernelErrors:
    """Errors of one step against the same step in float64.

    Each is |x - reference| / |reference|, in Euclidean norms; for gradients over all parameters together.
    """

    eager_loss: float
    fused_loss: float
    eager_gradients: float
    fused_gradients: float


def compare_kernels(model: nn.Module, sample: Sample, *, loss_fn: LossFunction | None = None) -> KernelErrors:
    """Run one step with eager kernels, one with fused ones and one in float64, each on a copy of the model.

        errors = memplan.compare_kernels(model, batch)
        assert errors.fused_gradients < 1.1 * errors.eager_gradients

    The loss is what `loss_fn(model, *sample)` returns, as for `apply`. Without it, it is the output, its `loss`, or the
    sum of all tensors in it that require grad. Eager and fused kernels run under the autocast that is on. Random ops
    draw the same numbers in all three, as far as their kernels do in float64. Needs memory for four models.

    The model, its gradients and the generator stay as they are. Raises what `apply` raises.
    """
    with private.compiled_aside(model) as inner:
        eager, fused, double = (remove(copy.deepcopy(inner)) for _ in range(3))
    double.double()
    call = CallReader(eager.forward if loss_fn is None else functools.partial(loss_fn, eager)).read_sample(sample)
    device = next(model.parameters()).device
    apply(fused, sample, _NO_LIMIT, loss_fn=loss_fn, kernels="fused", costs="estimate")
    step = functools.partial(_step, loss_fn=loss_fn, device=device)
    with torch.autocast(device.type, enabled=False), _StaysDouble():
        exact = step(double, call.filled([t.double() if t.is_floating_point() else t for t in call.tensors]))
    of_eager, of_fused = step(eager, call), step(fused, call)
    return KernelErrors(
        _error(of_eager[:1], exact[:1]), _error(of_fused[:1], exact[:1]),
        _error(of_eager[1:], exact[1:]), _error(of_fused[1:], exact[1:]),
    )  # fmt: skip


def _step(model: nn.Module, call: Call, loss_fn: LossFunction | None, device: torch.device) -> list[torch.Tensor]:
    """Loss and gradients."""
    run: Callable[..., Any] = model if loss_fn is None else functools.partial(loss_fn, model)
    model.zero_grad()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        output = run(*call.variadic, **call.arguments)
        loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            tensors = (t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad)
            loss = torch.stack([t.sum() for t in tensors]).sum()
        loss.backward()
    return [loss.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())]


def _error(tensors: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    apart = sum(float((a.double() - b).square().sum()) for a, b in zip(tensors, exact, strict=True))
    size = sum(float(b.square().sum()) for b in exact)
    return math.sqrt(apart / size if size else apart)


class _StaysDouble(TorchFunctionMode):
    """Casts to float32 that a model writes out, for precision, give float64."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = [torch.float64 if a is torch.float32 else a for a in args]
        return func(*wide, **{k: torch.float64 if a is torch.float32 else a for k, a in (kwargs or {}).items()})
