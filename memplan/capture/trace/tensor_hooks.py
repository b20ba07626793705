"""What Python does to a tensor without an op: hooks for its gradient, `retain_grad`, `requires_grad_`, `.data = ...`.

A planned step runs what its trace ran. A hook that changes the gradient is part of that. A hook that only looks at the
gradient, a gradient that is retained, and memory that is exchanged are not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from memplan import torch_private as private
from memplan.capture.attributes.named_state import state_behind
from memplan.capture.trace.source_lines import caller_line
from memplan.errors import UnsupportedModel

_ONLY_WAIT = ("deepspeed", "memplan", "torch.distributed")


def only_waits(hook: Any) -> bool:
    """Whether a hook only has to know when a gradient arrives, to gather sharded parameters then."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return f"{getattr(hook, '__module__', '')}.".startswith(tuple(f"{home}." for home in _ONLY_WAIT))


def watching_tensors(
    note_requires_grad: Callable[[torch.Tensor], None], read_attribute: Callable[[torch.Tensor, str], Any]
) -> contextlib.AbstractContextManager[None]:
    """A context in which forward may put hooks on tensors that change gradients.

    Raises UnsupportedModel, from forward or its backward, for hooks that only look at gradients, where forward retains
    a gradient, and where it exchanges the memory of a tensor.

    - note_requires_grad: called with a tensor before forward says whether it requires grad.
    - read_attribute: called with a tensor and the name of an attribute that the tensor does not have.
    """
    method: Any = torch.Tensor.requires_grad_
    setter: Any = torch.Tensor.requires_grad
    data: Any = torch.Tensor.data

    def requires(tensor: torch.Tensor, wanted: bool = True) -> Any:
        note_requires_grad(tensor)
        return method(tensor, wanted)

    def set_requires(tensor: torch.Tensor, wanted: bool) -> None:
        note_requires_grad(tensor)
        setter.__set__(tensor, wanted)

    return private.exchanged(
        private.FakeTensor,
        register_hook=_register,
        retain_grad=_retain,
        requires_grad_=requires,
        requires_grad=property(setter.__get__, set_requires),
        data=property(data.__get__, _exchange),
        __getattr__=lambda tensor, name: read_attribute(tensor, name),
    )


def _register(tensor: torch.Tensor, hook: Any) -> Any:
    where = caller_line()
    state = None if only_waits(hook) else state_behind(hook)
    if state is not None:
        raise UnsupportedModel(
            f"forward puts a hook on a tensor, at {where}, that reads {state}, which may change between forward and "
            "backward; a planned step would not notice"
        )

    def hooked(gradient: Any) -> Any:
        version = gradient._version
        result = hook(gradient)
        if result is None and gradient._version == version:
            raise UnsupportedModel(
                f"forward puts a hook on a tensor, at {where}, that only looks at its gradient; a planned step would "
                "not call it"
            )
        return result

    register: Any = torch.Tensor.register_hook
    return register(tensor, hook if only_waits(hook) else hooked)


def _exchange(tensor: torch.Tensor, value: Any) -> None:
    raise UnsupportedModel(
        f"the memory of a tensor is exchanged (.data = ...), at {caller_line()}; a planned step would not. Write to it "
        "in place under torch.no_grad(), or compute another tensor"
    )


def _retain(tensor: torch.Tensor) -> None:
    if not tensor.is_leaf:
        raise UnsupportedModel(
            f"forward retains the gradient of a tensor, at {caller_line()}; a planned step would not"
        )
