"""Requests for the gradient of a tensor between parameters and loss: a hook on it, or `retain_grad`.

A planned step runs what its trace ran. A hook that changes the gradient is part of that. A hook that only looks at the
gradient, and a gradient that is retained, are not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from memplan import torch_private as private
from memplan.capture.trace.source_lines import caller_line
from memplan.errors import UnsupportedModel

_ONLY_WAIT = ("deepspeed", "memplan", "torch.distributed")


def only_waits(hook: Any) -> bool:
    """Whether a hook only has to know when a gradient arrives, to gather sharded parameters then."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return f"{getattr(hook, '__module__', '')}.".startswith(tuple(f"{home}." for home in _ONLY_WAIT))


def looking_refused() -> contextlib.AbstractContextManager[None]:
    """A context in which forward may put hooks on tensors that change gradients.

    Raises UnsupportedModel, from forward or its backward, for hooks that only look at gradients, and where forward
    retains a gradient.
    """
    return private.hooks_on_traced(_register, _retain)


def _register(register: Callable[..., Any], tensor: torch.Tensor, hook: Any) -> Any:
    where = caller_line()

    def hooked(gradient: Any) -> Any:
        version = gradient._version
        result = hook(gradient)
        if result is None and gradient._version == version:
            raise UnsupportedModel(
                f"forward puts a hook on a tensor, at {where}, that only looks at its gradient; a planned step would "
                "not call it"
            )
        return result

    return register(tensor, hook if only_waits(hook) else hooked)


def _retain(tensor: torch.Tensor) -> None:
    if not tensor.is_leaf:
        raise UnsupportedModel(
            f"forward retains the gradient of a tensor, at {caller_line()}; a planned step would not"
        )
