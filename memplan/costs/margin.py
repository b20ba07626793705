"""How much more than predicted steps of a model have been seen to hold: a fraction, remembered in later processes."""

from __future__ import annotations

import contextlib
import hashlib
import json

import torch
from torch import nn

from memplan.cache import keep, kept, only_writer
from memplan.costs.known_costs import device_name

_MOST_MODELS = 1000


def known_margin(model: nn.Module, device: torch.device | None = None) -> float:
    """The margin of a model on a device: 0.05 keeps 5% of a budget free. 0 where none was needed yet.

    With device=None it is the device that the model is on.
    """
    device = device or next((p.device for p in model.parameters()), None)
    if device is None or device.type == "meta":
        return 0.0
    return _margins_in(_file_of(device)).get(_digest(model), 0.0)


def remember_margin(model: nn.Module, device: torch.device, margin: float) -> None:
    """Save a margin for later runs of such a model on this device."""
    name, model_key = _file_of(device), _digest(model)
    with only_writer(name):
        margins = _margins_in(name)
        margins.pop(model_key, None)
        latest = [*margins.items(), (model_key, margin)][-_MOST_MODELS:]
        keep(name, json.dumps({"margins": dict(latest)}).encode())


def _margins_in(name: str) -> dict[str, float]:
    """Margins by model, the latest last; none where the file is absent or damaged."""
    try:
        margins = json.loads(kept(name))["margins"]
        return {str(model_key): min(1.0, max(0.0, float(margin))) for model_key, margin in margins.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _digest(model: nn.Module) -> str:
    """Equal for models of one class with equal parameters and buffers, but for what these hold."""
    tensors, kind = [*model.named_parameters(), *model.named_buffers()], type(model)
    layout = [(name, _shape(t), str(t.dtype)) for name, t in tensors]
    return hashlib.sha256(repr((kind.__module__, kind.__qualname__, layout)).encode()).hexdigest()[:32]


def _shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    with contextlib.suppress(RuntimeError):  # lazy and nested ones have none
        return tuple(tensor.shape)
    return None


def _file_of(device: torch.device) -> str:
    return f"margin-{device_name(device)}.json"
