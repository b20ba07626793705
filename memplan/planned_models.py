"""The public functions for a model that has a plan: look at the plan, run parts of the model, take the plan off."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from memplan.installed.passes import UnplannedLoss, is_disabled
from memplan.installed.planned_forward import planned_forward
from memplan.plans.plan import Plan
from memplan.plans.plan_text import loop_text


def refuse_no_module(model: nn.Module) -> None:
    """Raise TypeError for what is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that the model ran last, or will run first. None where it has none."""
    refuse_no_module(model)
    planned = planned_forward(model)
    return None if planned is None else planned.plan


def report(model: nn.Module) -> str | None:
    """What each part of a planned model's training loop holds, then the report of the plan that it ran last.

    The parts are the step, `optimizer.step()`, and calls without a plan, of which the first and larger ones are
    measured: those of the model, and of modules beside it that `watch` names. None where the model has no plan.
    """
    refuse_no_module(model)
    planned = planned_forward(model)
    if planned is None or planned.plan is None:
        return None
    return loop_text(planned.plan, planned.recovery.grown_bytes, planned.passes.peak_bytes)


def grown_bytes(model: nn.Module) -> int | None:
    """The most bytes that a planned model's first step was measured to hold beyond those that were there before it.

    On a CPU, kernel scratch is not measured. None before that step is over, and without a plan.
    """
    refuse_no_module(model)
    planned = planned_forward(model)
    return None if planned is None else planned.recovery.grown_bytes


def watch(model: nn.Module, beside: nn.Module) -> None:
    """Measure calls of a module beside a planned model too, for `report` and for the warning of calls over the budget.

        memplan.watch(student, teacher)

    On a CPU the module's parameters and buffers count in each measured call; on CUDA all that is on the device counts.
    `remove` ends it. Raises ValueError where the model has no plan.
    """
    refuse_no_module(beside)
    planned = planned_forward(model)
    on_remove(model, (lambda: None) if planned is None else planned.passes.watch(beside, lambda: planned.plan))


def remove(model: nn.Module) -> nn.Module:
    """Take the plan off the model and off submodules of it, and put the original forwards back.

    A model without a plan stays as it is. Parameters that live on the host stay there; `model.to(device)` brings them
    back, and the next `optimizer.step()` brings back its state.
    """
    refuse_no_module(model)
    for module in model.modules():
        planned = planned_forward(module)
        if planned is not None:
            planned.uninstall()
            for undo in reversed(planned.undo):
                undo()
            planned.warn_of_host()
        if isinstance(forward := vars(module).get("forward"), UnplannedLoss):
            forward.uninstall()
    return model


@contextlib.contextmanager
def fetching(model: nn.Module) -> Iterator[None]:
    """Run parts of a planned model by themselves, without gradients, though parameters live on the host.

    The model itself needs no help in eval mode and under no_grad. This is for code that calls submodules of it, as
    `generate` of encoder-decoder models does. Within this context they find their parameters on the device, each copy
    for as long as it is used. What is written in place to such a copy is written to the host as well; assigning to
    `.data` is lost.

    Raises ValueError where the model has no plan.
    """
    planned = planned_forward(model)
    if planned is None and not is_disabled():
        raise ValueError("the model is not planned; call memplan.apply(model, sample, budget) first")
    with torch.no_grad(), contextlib.nullcontext() if planned is None else planned.fetching():
        yield


def on_remove(model: nn.Module, undo: Callable[[], None]) -> None:
    """Let `remove` call `undo` once the plan is off, so that what an integration has put around the model goes with it.

    Raises ValueError where the model has no plan.
    """
    planned = planned_forward(model)
    if planned is not None:
        planned.undo.append(undo)
    elif not is_disabled():
        raise ValueError("the model is not planned; call memplan.apply(model, sample, budget) first")
