"""Other forwards, calls, parameters and buffers in the place of those that modules have, for a while."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.trace.call import Forward

_WEIGHT_LISTS = ("_flat_weights", "_flat_weight_refs")


@contextlib.contextmanager
def forwards_exchanged(forwards: Mapping[nn.Module, Forward | None]) -> Iterator[None]:
    """A context in which modules have other forwards; None is the one of their class. All are put back at the end.

    Where Dynamo looks at a call of a module, in a branch of `torch.cond` say, the module keeps the forward that it has.
    """
    kept = [(vars(module), vars(module).get("forward")) for module in forwards]
    try:
        for module, forward in forwards.items():
            _set_forward(vars(module), forward and _but_for_dynamo(module.forward, forward))
        yield
    finally:
        for table, own in kept:
            _set_forward(table, own)


def _but_for_dynamo(original: Forward, exchanged: Forward) -> Forward:
    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return (original if torch.compiler.is_dynamo_compiling() else exchanged)(*args, **kwargs)

    return forward


def _set_forward(table: dict[str, Any], forward: Forward | None) -> None:
    if forward is None:
        table.pop("forward", None)
    else:
        table["forward"] = forward


def calls_exchanged(
    model: nn.Module, callables: Collection[Any], instead: Callable[..., Any]
) -> contextlib.AbstractContextManager[Any]:
    """A context in which calls of these modules give what `instead(called, module, original, args, kwargs)` gives.

    - callables: paths of modules, and classes of modules that are not in the model. Of a module with hooks, or whose
      calls are compiled, the whole call is exchanged, else its forward.
    - original: makes the call as it is.
    """
    stack, of_model = contextlib.ExitStack(), set(model.modules())

    def by_class(kind: type) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            original = functools.partial(private.called, module)
            if module in of_model or type(module) is not kind:
                return original(*args, **kwargs)
            return instead(kind, module, original, args, kwargs)

        return call

    def of_module(path: str, module: nn.Module) -> Forward:
        original = module.forward
        if is_wholly_called(module):
            original = private.compiled_call(module) or functools.partial(private.called, module)
        return lambda *args, **kwargs: instead(path, module, original, args, kwargs)

    modules = {m: of_module(path, m) for path, m in model.named_modules() if path in callables}
    wholly = {m: call for m, call in modules.items() if is_wholly_called(m)}
    kinds = {kind: by_class(kind) for kind in callables if isinstance(kind, type) and issubclass(kind, nn.Module)}
    stack.enter_context(forwards_exchanged({m: call for m, call in modules.items() if m not in wholly}))
    stack.enter_context(private.calls_instead({**wholly, **kinds}))
    return stack


def is_wholly_called(module: nn.Module) -> bool:
    """Whether a call of a module does more than to run its forward."""
    return private.is_hooked(module) or private.compiled_call(module) is not None


@contextlib.contextmanager
def in_place_of_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """A context with these tensors in place of the model's parameters and buffers, under all names that each has.

    `torch.func.functional_call` leaves its own in a module that is registered twice. Recurrent modules list what they
    have in forward: these lists are put back too.
    """
    members: list[dict[str, Any]] = [m for module in model.modules() for m in (module._parameters, module._buffers)]
    names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
    before = [(of_module, key, t) for of_module in members for key, t in of_module.items() if t is not None]
    tables = [vars(module) for module in model.modules() if isinstance(module, nn.RNNBase)]
    lists = [(table, {key: table[key] for key in _WEIGHT_LISTS}) for table in tables]
    for of_module, key, tensor in before:
        of_module[key] = state[names[id(tensor)]]
    try:
        yield
    finally:
        for of_module, key, tensor in before:
            of_module[key] = tensor
        for table, kept in lists:
            table.update(kept)
