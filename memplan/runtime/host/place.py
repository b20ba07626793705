"""Moves parameters to where a plan has them live: on the device, or in pinned host memory."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn

from memplan.runtime.host.stepping import bring_state, counts_beside, step_on_both_sides

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
    groups = [] if optimizer is None else optimizer.param_groups
    counts = {p: counts_beside(group) for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        home = cpu if name in host else device
        parameter.data = _moved(parameter.data, home, pinned=device.type == "cuda")
        if parameter.grad is not None:
            parameter.grad = _moved(parameter.grad, home, pinned=False)
        if optimizer is not None and parameter in counts:
            bring_state(optimizer, parameter, counts[parameter])
    for name, buffer in model.named_buffers():
        if buffer.device.type != device.type:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._buffers[leaf] = buffer.to(device)


def materialise(
    model: nn.Module,
    init: Init,
    host: Collection[str],
    device: torch.device,
    optimizer: torch.optim.Optimizer | None = None,
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
