"""Gradient scaling where gradients are on a GPU and on the host.

`GradScaler` and fused optimizers copy the scale, and whether a gradient is infinite, to each gradient's device without
waiting. From a GPU to the host the CPU would read memory that nobody has written yet, and what it then finds itself
would be overwritten: PyTorch has gradients on several GPUs in mind. And where gradients on both are infinite, fused
optimizers are told 2, and take that for none. Both is put right from the first time on that parameters go to the host.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memplan.graph import private_api as private


@functools.cache
def wait_for_scales_on_host() -> None:
    """Have all `GradScaler`s of this process wait for what they copy to the host, and fused optimizers heed it."""
    private.wait_for_scaler_copies()
    register_optimizer_step_pre_hook(_scales_on_host)


def _scales_on_host(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Give an optimizer that has parameters on the host what a `GradScaler` has left for it there, too.

    From there it goes on to a GPU in the order of what that computes. Raises ValueError where a fused optimizer would
    copy its learning rate to the host in the same way.
    """
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
