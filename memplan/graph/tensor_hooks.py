"""Who asks for the gradient of a tensor between parameters and loss: a hook on it, or `retain_grad`.

A planned step runs what its trace ran. A hook that changes the gradient is part of that; one that only looks at it, or
a gradient that is kept, is not. And of an output from which other outputs derive, autograd sees only what is handed in
from outside, for what comes from the others is added up within the plan.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from memplan.errors import UnsupportedModel
from memplan.graph import private_api as private
from memplan.graph.source_lines import caller_line

_ONLY_WAIT = ("deepspeed", "memplan", "torch.distributed")


def only_waits(hook: Any) -> bool:
    """Whether a hook wants to know when a gradient arrives, whatever it is: sharded parameters are gathered then."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return f"{getattr(hook, '__module__', '')}.".startswith(tuple(f"{home}." for home in _ONLY_WAIT))


def looking_refused() -> contextlib.AbstractContextManager[None]:
    """Let forward be traced where the hooks that it puts on tensors change gradients. UnsupportedModel comes out of it,
    or out of its backward, where they only look at them, or where forward retains one."""
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


class Onlookers:
    """Whoever asks for the gradient of an output from which others derive. Keeps neither the output nor hooks alive."""

    def __init__(self, name: str, output: torch.Tensor) -> None:
        self._name, self._output = name, weakref.ref(output)
        self._hooks = output.register_hook(self._begin).hooks_dict_ref

    def _begin(self, gradient: torch.Tensor | None) -> None:
        """Called before all others, who would not know what to do with a gradient that is none."""
        output = self._output()
        goes_on = [] if output is None or output.grad_fn is None else [n for n, _ in output.grad_fn.next_functions if n]
        if goes_on and not any(map(private.engine_reaches, goes_on)):
            raise self._refusal("torch.autograd.grad")
        if gradient is None:
            self.check()

    def check(self) -> None:
        """Raise RuntimeError where there are any."""
        output, hooks = self._output(), self._hooks() or {}
        if output is not None and output.retains_grad:
            raise self._refusal("retain_grad()")
        if not all(only_waits(hook) for hook in hooks.values()):
            raise self._refusal("a hook")

    def _refusal(self, who: str) -> RuntimeError:
        return RuntimeError(
            f"memplan: {who} asks for the gradient of output {self._name}, from which the model computes other outputs "
            "inside of the plan, so autograd sees only the part that comes from outside. Compute those outside of the "
            "model, or call memplan.remove(model) to train without a plan"
        )
