"""What `apply` does where the environment switches plans off, so that a user sees whether a plan is to blame.

The model stays as it is. Only with a loss function it gets another forward, which returns the loss as a plan would.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memplan import torch_private as private
from memplan.logs import log

_OFF = ("", "0", "false", "no", "off")


def is_disabled() -> bool:
    """Whether `MEMPLAN_DISABLE` is set to anything but 0, false, no or off."""
    return os.environ.get("MEMPLAN_DISABLE", "").strip().lower() not in _OFF


def leave_unplanned(model: nn.Module, loss_fn: Callable[..., Any] | None, needs: str | None) -> nn.Module:
    """Give the model back without a plan, with a line in the log.

    needs: an argument of `apply` without whose effect the model can't train. Raises ValueError where there is one.
    """
    if needs is not None:
        raise ValueError(f"MEMPLAN_DISABLE is set, but a model with {needs}= trains with a plan only. Unset it")
    log.warning("MEMPLAN_DISABLE is set: %s trains without a plan", type(model).__name__)
    if loss_fn is not None:
        model.forward = UnplannedLoss(model, loss_fn)
    return model


class UnplannedLoss:
    """Stands in for `model.forward`: in training it runs `loss_fn(model, ...)`, else the model's own forward."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any]) -> None:
        self._model, self._loss_fn, self._original = model, loss_fn, model.forward
        self._training, self._own_attribute = model.training, "forward" in vars(model)
        self._is_inside = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        evaluates = self._training and not self._model.training
        if self._is_inside or evaluates or not torch.is_grad_enabled():
            return self._original(*args, **kwargs)
        with private.exchanged(self, _is_inside=True):
            return self._loss_fn(self._model, *args, **kwargs)

    def uninstall(self) -> None:
        if self._own_attribute:
            self._model.forward = self._original
        else:
            del self._model.forward
