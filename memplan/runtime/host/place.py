"""Moves parameters to where a plan has them live: on the device, or in pinned host memory.

Optimizers then step parameters of which some are on a GPU and some on the host. `GradScaler` and fused optimizers are
made for gradients on several GPUs:

- They copy the scale, and whether a gradient is infinite, to each gradient's device without waiting. From a GPU to the
  host, the CPU would then read memory that is not written yet, and what it writes there itself would be overwritten.
- Where gradients on both sides are infinite, fused optimizers are told 2, which they take for none.

Also, state stays where it was made when its parameter moves. All of this is put right as soon as parameters go to the
host.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memplan import torch_private as private

Init = Callable[[str, torch.Tensor], None]


def place(
    model: nn.Module, host: Collection[str], device: torch.device, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Move parameters of these names to the host and all else to the device, with gradients and optimizer state.

    They stay the same `nn.Parameter` objects, so an optimizer that was made before goes on with them. What is in its
    place already is not touched.
    """
    cpu = torch.device("cpu")
    if host and device.type == "cuda":
        step_on_both_sides(model)
    for name, parameter in model.named_parameters():
        home = cpu if name in host else device
        parameter.data = _moved(parameter.data, home, pinned=device.type == "cuda")
        if parameter.grad is not None:
            parameter.grad = _moved(parameter.grad, home, pinned=False)
    if optimizer is not None:
        bring_states(optimizer, set(model.parameters()))
    for name, buffer in model.named_buffers():
        if buffer.device.type != device.type:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._buffers[leaf] = buffer.to(device)
    if host and device.type == "cuda":
        torch.cuda.empty_cache()  # of what has moved, and what plans count on


def materialise(
    model: nn.Module, init: Init, host: Collection[str], device: torch.device, optimizer: torch.optim.Optimizer | None
) -> None:
    """Make parameters and buffers that are on the meta device where they will live, and let `init` fill each.

    A parameter on the meta device can't become a real one, so new ones are put into the optimizer.
    """
    made: dict[torch.Tensor, torch.Tensor] = {}
    for path, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for leaf, tensor in table.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in made:
                    name = f"{path}.{leaf}" if path else leaf
                    home = torch.device("cpu") if name in host else device
                    real = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=home)
                    with torch.no_grad():
                        init(name, real)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(real, tensor.requires_grad) if is_parameter else real
                table[leaf] = made[tensor]
    for group in () if optimizer is None else optimizer.param_groups:
        group["params"] = [made.get(p, p) for p in group["params"]]


def _moved(tensor: torch.Tensor, home: torch.device, pinned: bool) -> torch.Tensor:
    moved = tensor if tensor.device.type == home.type else tensor.to(home)
    if pinned and home.type == "cpu" and moved.untyped_storage().nbytes() != moved.numel() * moved.element_size():
        moved = moved.clone()  # a look at a part of something larger would be copied with all of it
    return moved.pin_memory() if pinned and home.type == "cpu" and not moved.is_pinned() else moved


def step_on_both_sides(model: nn.Module) -> None:
    """Let optimizers step parameters of this model that are on the host.

    Until no such model is left, fused optimizers get what `GradScaler`s copy on the host, and PyTorch's optimizers find
    their state where their parameters are. `GradScaler`s wait for what they copy to the host from now on.
    """
    _hear_of_steps()
    _models.add(model)


_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # with parameters on the host


@functools.cache
def _hear_of_steps() -> None:
    """Patch `GradScaler`, and register hooks, which stay, and do nothing while no model has parameters on the host.

    Optimizers may be iterating over their hooks when the last such model is collected.
    """
    private.wait_for_scaler_copies()
    register_optimizer_step_pre_hook(_scales_on_host)
    register_optimizer_step_pre_hook(_state_where_parameters_are)


def bring_states(optimizer: torch.optim.Optimizer, parameters: set[Any]) -> None:
    """Move an optimizer's state of these parameters to where each of them is.

    Counts of steps move too where kernels read them; else they are on the CPU, wherever their parameter is.
    """
    for group in optimizer.param_groups:
        counts = group.get("fused") or group.get("capturable")
        for parameter in parameters.intersection(group["params"]):
            state = optimizer.state.get(parameter, {})
            for key, tensor in state.items():
                if isinstance(tensor, torch.Tensor) and tensor.device.type != parameter.device.type:
                    if tensor.dim() or counts or parameter.device.type == "cpu":
                        state[key] = tensor.to(parameter.device)


def _state_where_parameters_are(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Move state to its parameters, in PyTorch's own optimizers. Others may keep it elsewhere on purpose."""
    if not _models or not type(optimizer).step.__module__.startswith("torch.optim."):
        return
    bring_states(optimizer, {p for group in optimizer.param_groups for p in group["params"]})


def _scales_on_host(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Give an optimizer with parameters on the host the figures of a `GradScaler` there.

    From the host they go on to a GPU in the order of its stream. Raises ValueError where a fused optimizer would copy
    its learning rate to the host without waiting.
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
