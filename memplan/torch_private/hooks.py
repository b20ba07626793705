"""Hooks of modules and of saved tensors; checkpoints, which are such hooks, and compiled code can be switched off."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointFunction

from memplan.torch_private.autograd import functions_applied_by
from memplan.torch_private.exchanged import exchanged

_INSTEAD = "_compiled_call_impl"
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # of a module


def global_hook_tables() -> list[dict[int, Any]]:
    """The tables of hooks that every module runs."""
    return [getattr(torch.nn.modules.module, f"_global{table}") for table in HOOK_TABLES]


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Step a copy of an optimizer. Hooks on the step, of this optimizer or of all, are for the user's own alone."""
    step: Any = type(optimizer).step  # not optimizer.step: schedulers replace that on the instance
    step = step.__wrapped__ if getattr(step, "hooked", False) else step
    step(optimizer)


def waits_for_others(tensor: torch.Tensor | None) -> bool:
    """Whether a hook of `register_multi_grad_hook` is on a tensor, which may wait for gradients of other tensors."""
    hooks = None if tensor is None else tensor._backward_hooks
    homes = [getattr(hook, "__globals__", {}).get("__name__") for hook in hooks.values()] if hooks else []
    return "torch.autograd.graph" in homes


def foreign_hooks(table: dict[int, Any]) -> int:
    """Number of hooks in a module's table whose work is not part of a trace."""
    return sum(not _is_traced(hook) for hook in table.values())


def hooks_on(module: nn.Module) -> list[Any]:
    """Hooks of a module itself whose work is not part of a trace."""
    return [hook for table in HOOK_TABLES for hook in getattr(module, table).values() if not _is_traced(hook)]


def collects(module: nn.Module) -> bool:
    """Whether a module, or one in it, has hooks whose work is part of a trace."""
    return any(inner._forward_hooks and not foreign_hooks(inner._forward_hooks) for inner in module.modules())


def collects_outputs() -> bool:
    """Whether a transformers model is running with hooks that collect outputs of its submodules."""
    module = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(module, "_active_collector", None)
    return bool(collector is not None and collector.get())


def calls_instead(home: Any, call: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """A context in which whole calls of a module, or of those of a class, are others, without hooks.

    `nn.Module.__call__` asks the module, then its class, for what `module.compile()` puts there.
    """
    return exchanged(home, **{_INSTEAD: call})


def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a call of a module gives without what stands in for it."""
    return module._call_impl(*args, **kwargs)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What `module.compile()` has made of its calls; None where they run as they are."""
    return vars(module).get(_INSTEAD)


# Modules of hooks that compute a weight from others (as `torch.nn.utils.weight_norm` does), or collect outputs.
_TRACED = (
    "torch.nn.utils.weight_norm",
    "torch.nn.utils.spectral_norm",
    "torch.nn.utils.prune",
    "transformers.utils.output_capturing",
)


def _is_traced(hook: Any) -> bool:
    """Whether the work of a hook is part of a trace.

    transformers installs hooks in a model's first forward that collect hidden states for its output, and a hook that
    makes the output of embeddings require grad (`enable_input_require_grads`). memplan's own hooks may be there from a
    trace in another thread.
    """
    home, name = str(getattr(hook, "__module__", "")), str(getattr(hook, "__qualname__", ""))
    traced = home in _TRACED or home.startswith("memplan.capture.trace.")
    return traced or name.endswith(".enable_input_require_grads.<locals>.make_inputs_require_grads")


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[int]:
    """A context in which autograd saves tensors as they are, also within a checkpoint or `save_on_cpu`.

    Gives the number of contexts whose hooks are set aside.
    """
    hooks: list[Any] = []
    top: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
    while pair := top(False):
        hooks.append(pair)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield len(hooks)
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


_TRANSPARENT = ("torch.utils.checkpoint", "memplan.")  # a plan may run within a checkpoint, or while it is rehearsed


def exchanges_saved_tensors() -> bool:
    """Whether the caller has hooks on what autograd saves, other than those of a checkpoint around the call."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and not str(hooks[0].__module__).startswith(_TRANSPARENT)


def parametrizations_are_cached() -> bool:
    """Whether calls share what parametrizations compute (`torch.nn.utils.parametrize.cached`)."""
    return bool(torch.nn.utils.parametrize._cache_enabled)


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


def called_module() -> nn.Module | None:
    """The module whose call runs the forward that asks. None if it is not `nn.Module` that calls this forward."""
    frame, of_dynamo = sys._getframe(2), ("torch._dynamo", "torch._compile")
    while frame.f_globals.get("__name__", "").startswith(of_dynamo) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_locals.get("self") if frame.f_code.co_filename == nn.modules.module.__file__ else None
