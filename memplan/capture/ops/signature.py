"""Which calls do equal work: the kind of an op, and a hash of everything that its cost depends on."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import fx

from memplan.torch_private import OpOverload


def op_kind(target: Any) -> str:
    """The name of an aten overload ("aten.mm.default"), or of one of memplan's own functions."""
    return str(target) if isinstance(target, OpOverload) else f"memplan.{target.__name__}"


def signature(target: Any, args: Any, kwargs: Any, results: Any = None) -> str:
    """A short hash, equal for calls of one kernel with equal shapes, strides, dtypes, devices and settings.

    results: the traced ones, which may have been found to be others since.
    """

    def shown(argument: Any) -> Any:
        t = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
        if isinstance(t, torch.Tensor):
            return f"{t.dtype}{tuple(t.shape)}{tuple(t.stride())}{t.device.type}"
        if isinstance(argument, fx.Node):
            return argument.name
        if isinstance(argument, torch.device):  # ranks with equal steps have devices of other numbers
            return argument.type
        if isinstance(argument, (list, tuple)):
            return [shown(a) for a in argument]
        return repr(argument)

    text = f"{op_kind(target)}|{[shown(a) for a in args]}|{sorted((k, str(shown(v))) for k, v in kwargs.items())}"
    if results is not None:
        text += f"|{shown(results)}"
    return hashlib.sha256(text.encode()).hexdigest()[:20]
