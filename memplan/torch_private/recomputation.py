"""Switches off what decides when a step computes and where it saves: checkpoints, compiled code, saved-tensor hooks."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointFunction

from memplan.torch_private.autograd import functions_applied_by
from memplan.torch_private.exchanged import exchanged
from memplan.torch_private.hooks import without_saved_tensor_hooks

_CHECKPOINT, _HOOKS = "checkpoint", "context of saved-tensor hooks"

_SavedHook = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class SwitchedOff:
    """What a step would have used, and how often.

    - counts: by kind, for example {"checkpoint": 4, "compiled call": 1}.
    - unknown: autograd functions that take a function, which their backward may run again. They stay on.
    """

    counts: Counter[str] = field(default_factory=Counter)
    unknown: set[str] = field(default_factory=set)


@contextlib.contextmanager
def everything_saved() -> Iterator[SwitchedOff]:
    """A context in which a step runs each operation once, by eager kernels, and saves the tensors themselves.

    Checkpoints without reentrant autograd are hooks on saved tensors too, so one hook finds them whoever calls them.
    """
    from torch._dynamo import eval_frame  # which takes a second

    off = SwitchedOff()
    was_called = eval_frame._callback_from_stance

    def push(pack: _SavedHook, unpack: _SavedHook) -> None:
        off.counts[_CHECKPOINT if _is_of_checkpoint(pack) else _HOOKS] += 1

    def call(callback: Any) -> Any:
        if callback not in (None, False):
            off.counts["compiled call"] += 1
        return was_called(callback)

    def apply(function: Any, args: tuple[Any, ...], original: Callable[..., Any]) -> Any:
        if function is CheckpointFunction:
            off.counts[_CHECKPOINT] += 1
            run, _, *given = args
            return run(*given)
        if any(callable(a) and not isinstance(a, (torch.Tensor, type)) for a in args):
            off.unknown.add(f"{function.__qualname__} takes a function")
        return original(*args)

    with without_saved_tensor_hooks() as count, torch.compiler.set_stance("force_eager"), functions_applied_by(apply):
        off.counts[_HOOKS] += count
        hooks = {"_push_saved_tensors_default_hooks": push, "_pop_saved_tensors_default_hooks": lambda: None}
        with exchanged(torch._C._autograd, **hooks), exchanged(eval_frame, _callback_from_stance=call):
            yield off


def _is_of_checkpoint(pack: _SavedHook) -> bool:
    return str(getattr(pack, "__module__", "")).startswith("torch.utils.checkpoint")


def _free(function: Any, name: str) -> Any:
    """What a function takes from around it by this name."""
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


@contextlib.contextmanager
def without_checkpoints(entered: Callable[[bool], None], left: Callable[[], None]) -> Iterator[None]:
    """A context in which checkpoints without reentrant autograd save what they run, as if they were not there.

    - entered: called where one begins to run its function, with whether it would draw the same random numbers again.
    - left: called where it ends.
    """
    autograd: Any = torch._C._autograd
    was_pushed, was_popped = autograd._push_saved_tensors_default_hooks, autograd._pop_saved_tensors_default_hooks
    are_of_checkpoints: list[bool] = []

    def push(pack: _SavedHook, unpack: _SavedHook) -> None:
        are_of_checkpoints.append(_is_of_checkpoint(pack))
        if are_of_checkpoints[-1]:
            entered(_free(_free(pack, "frame").recompute_fn, "preserve_rng_state"))
        else:
            was_pushed(pack, unpack)

    def pop() -> None:
        if are_of_checkpoints and are_of_checkpoints.pop():
            left()
        else:
            was_popped()

    hooks = {"_push_saved_tensors_default_hooks": push, "_pop_saved_tensors_default_hooks": pop}
    tags = dict(traceback.current_meta)  # which a checkpoint with policies writes to, as in a trace of Dynamo's
    with exchanged(autograd, **hooks), exchanged(traceback, current_meta=tags):
        yield
