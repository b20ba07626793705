"""Updates parameters in the middle of backward, each as its gradient arrives, with the user's own optimizer.

A hook on each parameter steps a copy of the optimizer that shares its state and settings and has only that parameter.
The gradient is freed then, so the user's `optimizer.step()` finds none, and just ends the step.

Parameters on the device are updated there, in the order of the ops. Those on the host are updated on a thread of their
own, while the device computes. Backward returns when that is done.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from memplan import torch_private as private

_SCALED = 1.0  # a loss whose gradient is more than this was multiplied by a GradScaler


def refuse_update_in_backward(optimizer: torch.optim.Optimizer | None, accumulate: bool, grads: str) -> None:
    """Raise ValueError, with the reason, where parameters can't be updated one by one as their gradients arrive."""
    if optimizer is None:
        raise ValueError("update='backward' needs optimizer=, which does the updating")
    if accumulate:
        raise ValueError(
            "update='backward' uses each gradient up at once, so nothing can be accumulated over several batches. "
            "Leave accumulate=True out, or update='backward'"
        )
    if grads != "surface":
        raise ValueError("update='backward' takes gradients as they surface; leave grads='edges' out")
    step = type(optimizer).step
    if isinstance(optimizer, torch.optim.LBFGS) or not step.__module__.startswith("torch.optim."):
        raise ValueError(
            "update='backward' needs an optimizer that updates each parameter by itself, and memplan knows that only "
            f"of those in torch.optim (but LBFGS), not of {type(optimizer).__module__}.{type(optimizer).__qualname__}. "
            "Give the optimizer that it wraps, or leave update='backward' out"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("update='backward' can't differentiate through the update; set differentiable=False")


class UpdatesInBackward:
    """The hooks on one model's parameters that step one optimizer.

    - parameters: those that it updates.
    - host: parameters that live on the host.
    - reads_done: returns when no copy reads such a parameter.
    - arrived: returns when a gradient on the host can be read.
    - hook: what is called when a parameter has its gradient; None before it is on.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.host: Collection[nn.Parameter] = ()
        self.reads_done: Callable[[torch.Tensor], None] = lambda parameter: None
        self.arrived: Callable[[torch.Tensor], None] = lambda gradient: None
        self.hook: Callable[[torch.Tensor], None] | None = None
        self._optimizer = optimizer
        self._groups = self._groups_now()
        self.parameters = [p for p in model.parameters() if p.requires_grad and p in self._groups]
        if any(p._post_accumulate_grad_hooks for p in self.parameters):
            raise ValueError(
                "update='backward' frees each gradient, but other hooks take gradients as they arrive (an optimizer in "
                "backward, ZeRO). Remove those, or leave update='backward' out"
            )
        self._refuse_one_memory()
        self._handles: list[Any] = []
        self._updated: set[nn.Parameter] = set()
        self._worker: ThreadPoolExecutor | None = None
        self._begun = False
        self._running: list[Future[None]] | None = None  # None: nobody waits for a thread

    def _refuse_one_memory(self) -> None:
        addresses = [private.part_here(p).data_ptr() for p in self.parameters if p.nbytes]
        if len({*addresses}) < len(addresses):
            raise ValueError(
                "update='backward' would update the same memory twice in a step: several parameters share it "
                "(a.data = b.data). Tie them (a = b), or leave update='backward' out"
            )

    def _groups_now(self) -> dict[torch.Tensor, dict[str, Any]]:
        return {p: group for group in self._optimizer.param_groups for p in group["params"]}

    def install(self) -> None:
        if self._handles:
            return
        this = weakref.ref(self)  # hooks of a parameter are out of the garbage collector's sight

        def arrived(parameter: torch.Tensor) -> None:
            updates = this()
            if updates is not None:
                updates._arrived(parameter)

        self.hook = arrived
        trainable = [p for p in self.parameters if p.requires_grad]
        self._handles = [p.register_post_accumulate_grad_hook(arrived) for p in trainable]
        self._handles.append(self._optimizer.register_step_pre_hook(self._stepped))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._updated = [], set()
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    @contextlib.contextmanager
    def around_backward(self, tangents: Iterable[torch.Tensor]) -> Iterator[None]:
        """A context for a planned backward pass. Updates of parameters on the host run beside it and end with it.

        tangents: the gradients that the pass starts from.
        """
        self._refuse(tangents)
        self._refuse_one_memory()
        self._running, self._groups = [], self._groups_now()
        try:
            yield
        finally:
            running, self._running = self._running, None
            failures = [future.exception() for future in running]
        if (failure := next(filter(None, failures), None)) is not None:
            raise failure

    def _refuse(self, tangents: Iterable[torch.Tensor]) -> None:
        if self._updated:
            raise RuntimeError(
                "memplan: a second backward before optimizer.step(). With update='backward' each backward updates the "
                "parameters, so gradients can't be accumulated; call optimizer.step() after each (it ends the step), "
                "also after one that was interrupted"
            )
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            if torch.distributed.get_world_size() > 1:
                raise RuntimeError(
                    "memplan: update='backward' would update with the gradients of one process alone, before DDP or "
                    "ZeRO have summed them. Plan without it"
                )
        first, self._begun = not self._begun, True  # reading a number from a device waits for it
        if first and any(t.numel() == 1 and t.item() > _SCALED for t in tangents):
            raise RuntimeError(
                "memplan: the loss arrives multiplied by more than 1, as a GradScaler does it, and update='backward' "
                "can neither undo that nor skip a step. Train in bfloat16 without a scaler, or plan without it; a "
                "factor of your own belongs into the model or loss_fn"
            )

    def _arrived(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter in self._updated:
            self._refuse(())
        self._updated.add(parameter)
        if self._running is None:
            self._groups = self._groups_now()
        if parameter not in self._groups:  # taken out of the optimizer
            return
        gradient, parameter.grad = parameter.grad, None
        if self._running is None or parameter not in self.host:
            self._update(parameter, gradient)
            return
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "memplan-updates")
        self._running.append(self._worker.submit(self._update, parameter, gradient, beside=True))

    def _update(self, parameter: nn.Parameter, gradient: torch.Tensor | None, beside: bool = False) -> None:
        """Do to this parameter what `optimizer.step()` would do. beside: copies may still read the parameter."""
        if beside:
            self.reads_done(parameter)
        if gradient is not None:
            self.arrived(gradient)
        optimizer = self._optimizer
        view = object.__new__(type(optimizer))
        view.__dict__.update(optimizer.__dict__)  # the state is shared
        view.param_groups = [{**self._groups[parameter], "params": [parameter]}]
        parameter.grad = gradient
        try:
            private.step_without_hooks(view)
        finally:
            parameter.grad = None

    def _stepped(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs before the user's `optimizer.step()`."""
        if len(args) > 1 or kwargs.get("closure") is not None:
            raise RuntimeError("memplan: with update='backward' optimizer.step() takes no closure; call it without one")
        self._updated.clear()
