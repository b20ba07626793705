"""What optimizers need to step parameters of which some are on a GPU and some on the host.

`GradScaler` and fused optimizers copy the scale, and whether a gradient is infinite, to each gradient's device without
waiting. From a GPU to the host the CPU would read memory that nobody has written yet, and what it then finds itself
would be overwritten: PyTorch has gradients on several GPUs in mind. And where gradients on both are infinite, fused
optimizers are told 2, and take that for none. And state stays where it was made when its parameter moves. All of it is
put right from the first time on that parameters go to the host.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memplan import torch_private as private


def step_on_both_sides(model: nn.Module) -> None:
    """Have optimizers heed that parameters of this model are on the host, until no such model is left.

    `GradScaler`s wait for what they copy to the host, fused optimizers heed it, and PyTorch's optimizers find their
    state where their parameters are.
    """
    _hear_of_steps()
    _models.add(model)


class _OnHost:
    """Models with parameters on the host. While there is one, `GradScaler`s wait for their copies."""

    def __init__(self) -> None:
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._count, self._undo = 0, _nothing

    def add(self, model: nn.Module) -> None:
        if model in self._models:
            return
        if not self._count:
            self._undo = private.wait_for_scaler_copies()
        self._models.add(model)
        self._count += 1
        weakref.finalize(model, self._let_go).atexit = False

    def _let_go(self) -> None:
        self._count -= 1
        if not self._count:
            self._undo()

    def __bool__(self) -> bool:
        return self._count > 0


def _nothing() -> None: ...


_models = _OnHost()


@functools.cache
def _hear_of_steps() -> None:
    """Hooks that stay, and do nothing while no model has parameters on the host: optimizers may be iterating over them
    when the last such model is collected."""
    register_optimizer_step_pre_hook(_scales_on_host)
    register_optimizer_step_pre_hook(_state_where_parameters_are)


def bring_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, counts: bool) -> None:
    """Move an optimizer's state of a parameter to where that is. counts: those of steps too, which kernels read; else
    they are on the CPU, wherever the parameter is."""
    state = optimizer.state.get(parameter, {})
    for key, tensor in state.items():
        if isinstance(tensor, torch.Tensor) and tensor.device.type != parameter.device.type:
            if tensor.dim() or counts or parameter.device.type == "cpu":
                state[key] = tensor.to(parameter.device)


def counts_beside(group: dict[str, Any]) -> bool:
    """Whether counts of steps are where the parameters of such a group are."""
    return bool(group.get("fused") or group.get("capturable"))


def _state_where_parameters_are(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Of PyTorch's own optimizers: others may have their state elsewhere on purpose."""
    if not _models or not type(optimizer).step.__module__.startswith("torch.optim."):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            bring_state(optimizer, parameter, counts_beside(group))


def _scales_on_host(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Give an optimizer that has parameters on the host what a `GradScaler` has left for it there, too.

    From there it goes on to a GPU in the order of what that computes. Raises ValueError where a fused optimizer would
    copy its learning rate to the host in the same way.
    """
    if not _models:
        return
    for group in optimizer.param_groups:
        rate, on_host = group.get("lr"), any(p.device.type == "cpu" for p in group["params"])
        if on_host and group.get("fused") and isinstance(rate, torch.Tensor) and rate.is_cuda:
            raise ValueError(
                "a fused optimizer reads a learning rate on a GPU too early where parameters live on the host. Give a "
                "number, or a tensor on the CPU"
            )
    given = [name for name in ("grad_scale", "found_inf") if isinstance(getattr(optimizer, name, None), torch.Tensor)]
    if given and any(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"]):
        for name in given:
            on_host = getattr(optimizer, name).cpu()
            setattr(optimizer, name, on_host.clamp(max=1) if name == "found_inf" else on_host)
