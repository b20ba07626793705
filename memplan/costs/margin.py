"""How much more than predicted a device has been seen to hold: a fraction, remembered in later processes."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import torch
from torch import nn

from memplan.cache import cache_dir
from memplan.costs.known_costs import device_name


def known_margin(model: nn.Module, device: torch.device | None = None) -> float:
    """The margin of a device: 0.05 keeps 5% of a budget free. 0 where none was needed yet.

    With device=None it is the device that the model is on.
    """
    device = device or next((p.device for p in model.parameters()), None)
    if device is None or device.type == "meta":
        return 0.0
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return min(1.0, max(0.0, float(json.loads(_path(device).read_text())["margin"])))
    return 0.0


def remember_margin(device: torch.device, margin: float) -> None:
    """Save a margin for later runs on this device."""
    with contextlib.suppress(OSError):  # a read-only home is no reason to fail
        _path(device).parent.mkdir(parents=True, exist_ok=True)
        _path(device).write_text(json.dumps({"margin": margin}))


def _path(device: torch.device) -> Path:
    return cache_dir() / f"margin-{device_name(device)}.json"
