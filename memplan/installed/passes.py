"""Calls that run without a plan in a training loop: evaluation, `generate`, log-probabilities under no_grad.

A budget is one for training steps. Such a call may hold more: logits of a whole batch, which training has in chunks.
Where the environment switches plans off (`MEMPLAN_DISABLE`), all calls run so. A warning comes for a model that trains
without its plan, because a part or a method of it is called instead of it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from memplan import torch_private as private
from memplan.capture.trace.call import tensors_inside
from memplan.errors import UnsupportedModel
from memplan.installed.beside import Voice
from memplan.logs import log
from memplan.planning.limits import Limits
from memplan.planning.placement import Placement
from memplan.plans.plan import Plan
from memplan.runtime.watch.meter import LiveMeter
from memplan.units import format_bytes

_watching: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models with a plan that has not run yet
_OFF = ("", "0", "false", "no", "off")
_LARGER = 1.1  # a call is measured if its inputs are so many times as large as those of any before it


class UnplannedPasses:
    """Measures calls that run without a plan, the first one and larger ones: also of modules beside the model.

    `generate` gives each call a longer cache than the one before. Such caches count as inputs.

    peak_bytes: the most that was on the device in one of them, with parameters, gradients and the optimizer's state. On
    CUDA a call counts where it holds more than all that ran before it.
    """

    def __init__(self, model: nn.Module, limits: Limits, placement: Placement, voice: Voice) -> None:
        self._model, self._limits, self._placement, self._voice = model, limits, placement, voice
        self._beside: list[nn.Module] = []
        self._inputs_bytes = dict[nn.Module, int]()  # of the largest, by the module that is called
        self.peak_bytes = 0

    def watch(self, module: nn.Module, plan: Callable[[], Plan | None]) -> Callable[[], None]:
        """Measure calls of a module beside the model, too. Gives a function that ends that."""
        begun: list[contextlib.ExitStack] = []

        def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
            begun.append(contextlib.ExitStack())
            begun[-1].enter_context(self.watching(plan(), module, (args, kwargs)))

        def end(*_: Any) -> None:
            if begun:
                begun.pop().close()

        self._beside.append(module)
        first = module.register_forward_pre_hook(begin, with_kwargs=True)
        hooks = first, module.register_forward_hook(end, always_call=True)

        def undo() -> None:
            self._beside.remove(module)
            for hook in hooks:
                hook.remove()

        return undo

    @contextlib.contextmanager
    def watching(self, plan: Plan | None, called: nn.Module, inputs: Any) -> Iterator[None]:
        """A context for such a call. Where it holds more than the budget, a warning says so.

        - plan: of the training step.
        - inputs: arguments of the call.
        """
        device = next((p.device for p in self._model.parameters()), torch.device("meta"))
        # On a CPU, parameters that come and go are not told from others.
        moves = bool(self._placement.host) or self._placement.gathers is not None
        countable = device.type == "cuda" or (device.type == "cpu" and not moves)
        if plan is None or not countable or private.someone_traces():
            yield
            return
        tensors = tensors_inside(inputs, set())[0]
        size_bytes = sum(t.nbytes for t in tensors)
        if size_bytes < _LARGER * self._inputs_bytes.get(called, 0):
            yield
            return
        self._inputs_bytes[called] = max(size_bytes, 1)
        if device.type == "cuda":
            before_bytes, earlier_bytes = private.requested_bytes(device)
            yield
            peak_bytes = private.requested_bytes(device)[1]
            if peak_bytes == earlier_bytes:
                return
        else:
            meter, modules = LiveMeter(), (self._model, *self._beside)
            parameters = [p for module in modules for p in module.parameters()]
            buffers = [b for module in modules for b in module.buffers()]
            meter.register([parameters, [p.grad for p in parameters], buffers, tensors])
            others_bytes = plan.problem.extra_resident_bytes
            before_bytes = meter.live_bytes + others_bytes
            with meter:
                yield
            peak_bytes = meter.peak_bytes + others_bytes
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        limit_bytes = self._limits.budget_bytes if self._limits.is_in_bytes else None
        if limit_bytes is not None and peak_bytes > limit_bytes:
            room_bytes, remedy = limit_bytes - before_bytes, f"{format_bytes(before_bytes)} are there before it begins"
            if room_bytes > 0:
                parts = -(-(peak_bytes - before_bytes) // room_bytes)
                batch = next((t.shape[0] for t in tensors if t.dim()), 1)
                way = f"in {parts} parts of its batch" if parts <= batch else "with shorter inputs"
                remedy = f"It would fit {way}"
            text = (
                f"a call without a plan (evaluation, generate, no_grad) holds {format_bytes(peak_bytes)}, over the "
                f"budget of {format_bytes(limit_bytes)}, which is for training steps. {remedy}"
            )
            self._voice.warn({"passes": text})


def is_disabled() -> bool:
    """Whether `MEMPLAN_DISABLE` is set to anything but 0, false, no or off."""
    return os.environ.get("MEMPLAN_DISABLE", "").strip().lower() not in _OFF


def leave_unplanned(model: nn.Module, loss_fn: Callable[..., Any] | None, needs: str | None) -> nn.Module:
    """Give the model back without a plan, with a line in the log, so that a user sees whether a plan is to blame.

    Only with a loss function it gets another forward, which returns the loss as a plan would.

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
