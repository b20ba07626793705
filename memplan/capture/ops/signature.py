"""Which calls do equal work: the kind of an op, and a hash of everything that its cost depends on."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import fx

from memplan.capture.ops.layout import storage_key
from memplan.torch_private import OpOverload, pytree


def op_kind(target: Any) -> str:
    """The name of an aten overload ("aten.mm.default"), or of one of memplan's own functions."""
    return str(target) if isinstance(target, OpOverload) else f"memplan.{target.__name__}"


def signature(target: Any, args: Any, kwargs: Any, results: Any = None) -> str:
    """A short hash, equal for calls of one kernel with equal shapes, strides, dtypes, devices and settings.

    results: the traced ones, which may have been found to be others since, or to lie in larger memory.
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
        given = [n.meta.get("val") if isinstance(n, fx.Node) else n for n in pytree.tree_leaves((args, kwargs))]
        own = {storage_key(t) for t in pytree.tree_leaves(given) if _has_memory(t)}
        new = [t for t in pytree.tree_leaves(results) if _has_memory(t) and storage_key(t) not in own]
        text += f"|{shown(results)}|{[str(t.untyped_storage().nbytes()) for t in new]}"
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _has_memory(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor) and thing.layout is torch.strided and thing.device.type != "meta"
