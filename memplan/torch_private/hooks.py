"""Hooks of modules, of tensors and of saved tensors."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from memplan.torch_private.exchanged import exchanged
from memplan.torch_private.fakes import FakeTensor

_INSTEAD = "_compiled_call_impl"


def global_hook_tables() -> list[dict[int, Any]]:
    """The tables of hooks that every module runs."""
    home = torch.nn.modules.module
    kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    return [getattr(home, f"_global_{kind}") for kind in kinds]


def foreign_hooks(table: dict[int, Any]) -> int:
    """Number of hooks in a module's table whose work is not part of a trace."""
    return sum(not _is_traced(hook) for hook in table.values())


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks of its own whose work is not part of a trace."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(foreign_hooks(getattr(module, table)) for table in tables)


def collects(module: nn.Module) -> bool:
    """Whether a module, or one in it, has hooks whose work is part of a trace."""
    return any(inner._forward_hooks and not foreign_hooks(inner._forward_hooks) for inner in module.modules())


@contextlib.contextmanager
def calls_instead(calls: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """A context in which whole calls of modules, or of those of a class, are others, without hooks.

    `nn.Module.__call__` asks the module, then its class, for what `module.compile()` puts there.
    """
    with contextlib.ExitStack() as stack:
        for home, call in calls.items():
            stack.enter_context(exchanged(home, **{_INSTEAD: call}))
        yield


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


@contextlib.contextmanager
def on_traced(
    methods: Mapping[str, Callable[..., Any]], setters: Mapping[str, Callable[[torch.Tensor, Any], None]]
) -> Iterator[None]:
    """A context in which fake tensors have other methods, and other setters of properties, than torch.Tensor."""
    getters = {name: getattr(torch.Tensor, name).__get__ for name in setters}
    properties = {name: property(getters[name], setter) for name, setter in setters.items()}
    with exchanged(FakeTensor, **methods, **properties):
        yield


_TRANSPARENT = ("torch.utils.checkpoint", "memplan.")  # a plan may run within a checkpoint, or while it is rehearsed


def exchanges_saved_tensors() -> bool:
    """Whether the caller has hooks on what autograd saves, other than those of a checkpoint around the call."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and not str(hooks[0].__module__).startswith(_TRANSPARENT)


def called_module() -> nn.Module | None:
    """The module whose call runs the forward that asks. None if it is not `nn.Module` that calls this forward."""
    frame = sys._getframe(2)
    while (
        frame.f_globals.get("__name__", "").startswith(("torch._dynamo", "torch._compile")) and frame.f_back is not None
    ):
        frame = frame.f_back
    return frame.f_locals.get("self") if frame.f_code.co_filename == nn.modules.module.__file__ else None
