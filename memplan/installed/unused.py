"""Notices a planned model that trains without its plan, because a part or a method of it is called instead of it."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from memplan.errors import UnsupportedModel
from memplan.logs import log

_watching: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models with a plan that has not run yet


def watch_optimizers(model: nn.Module) -> None:
    """Warn once where an optimizer steps with gradients of a model whose plan has not run by then."""
    _hear_of_steps()
    _watching.add(model)


def end_watch(model: nn.Module) -> None:
    """Stop watching, because the plan runs or is taken off."""
    _watching.discard(model)


@functools.cache
def _hear_of_steps() -> None:
    """Register one hook, which stays.

    Optimizers may be iterating over their hooks when a plan ends or its model is collected.
    """

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for model in list(_watching):
            own = {id(p) for p in model.parameters() if p.grad is not None}
            if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                continue
            end_watch(model)
            kind = type(model).__name__
            if any(base.__name__ == "LightningModule" for base in type(model).__mro__):  # it calls training_step
                raise UnsupportedModel(
                    f"{kind} trains without its plan: Lightning calls training_step, and that does not call forward, "
                    f"for which the plan is. Call self(...) in training_step, or {_advice(model)}"
                )
            log.warning(
                "%s trains without its plan, for its forward has not run yet in train mode with gradients. Call "
                "the model itself, and not a method or a part of it, or apply memplan to the part that is called",
                kind,
            )

    register_optimizer_step_post_hook(stepped)


def refuse_without_forward(model: nn.Module) -> None:
    """Raise UnsupportedModel for a LightningModule that has no forward of its own."""
    owner = next((kind.__name__ for kind in type(model).__mro__ if "forward" in vars(kind)), None)
    if owner == "LightningModule" and "forward" not in vars(model):
        raise UnsupportedModel(
            f"{type(model).__name__} has no forward of its own, which is what is planned; Lightning calls "
            f"training_step. Give it one that training_step calls, or {_advice(model)}"
        )


def _advice(model: nn.Module) -> str:
    parts = [name for name, part in model.named_children() if any(p.requires_grad for p in part.parameters())]
    part = parts[0] if parts else "network"
    others = f" (its parts are {', '.join(parts)})" if len(parts) > 1 else ""
    return f"apply memplan to the network in it: memplan.apply(module.{part}, None, budget){others}"
