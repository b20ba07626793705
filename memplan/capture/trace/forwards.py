"""Other forwards, calls, parameters and buffers in the place of those that modules have, for a while."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.attributes.named_functions import NamedFunction
from memplan.capture.trace.call import Forward

_WEIGHT_LISTS = ("_flat_weights", "_flat_weight_refs")


@contextlib.contextmanager
def forwards_exchanged(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """A context in which modules have other forwards.

    Where Dynamo looks at a call of a module, in a branch of `torch.cond` say, the module keeps the forward that it has.
    """
    with contextlib.ExitStack() as stack:
        for module, forward in forwards.items():
            stack.enter_context(private.exchanged(module, forward=_but_for_dynamo(module.forward, forward)))
        yield


def _but_for_dynamo(original: Forward, exchanged: Forward) -> Forward:
    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return (original if torch.compiler.is_dynamo_compiling() else exchanged)(*args, **kwargs)

    return forward


def calls_exchanged(
    model: nn.Module, callables: Collection[Any], instead: Callable[..., Any]
) -> contextlib.AbstractContextManager[Any]:
    """A context in which calls give what `instead(called, module, original, args, kwargs)` gives.

    - callables: paths of modules, classes of modules that are not in the model, and named functions. Of a module with
      hooks, or whose calls are compiled, the whole call is exchanged, else its forward. Autograd functions are left.
    - module: that is called, or whose method is; an empty one for a function.
    - original: makes the call as it is. args: without the module.
    """
    stack, thread = contextlib.ExitStack(), threading.get_ident()
    paths = {module: path for path, module in model.named_modules()}
    named: dict[Any, NamedFunction] = {
        (c.function, c.home, c.name, c.path): c for c in callables if isinstance(c, NamedFunction)
    }

    def by_class(kind: type) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            original = functools.partial(private.called, module)
            if module in paths or type(module) is not kind:
                return original(*args, **kwargs)
            return instead(kind, module, original, args, kwargs)

        return call

    def of_module(path: str, module: nn.Module) -> Forward:
        original = module.forward
        if is_wholly_called(module):
            original = private.compiled_call(module) or functools.partial(private.called, module)
        return lambda *args, **kwargs: instead(path, module, original, args, kwargs)

    def by_name(function: Callable[..., Any], home: Any, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            owner = args[:1] if isinstance(home, type) and args and isinstance(args[0], nn.Module) else ()
            called = named.get((function, home, name, paths.get(owner[0]) if owner else None))
            if called is None or threading.get_ident() != thread:
                return function(*args, **kwargs)
            module, original = owner[0] if owner else nn.Identity(), functools.partial(function, *owner)
            return instead(called, module, original, args[len(owner) :], kwargs)

        return _but_for_dynamo(function, call)

    modules = {m: of_module(path, m) for path, m in model.named_modules() if path in callables}
    kinds = {kind: by_class(kind) for kind in callables if isinstance(kind, type) and issubclass(kind, nn.Module)}
    wholly: dict[Any, Any] = {**{m: call for m, call in modules.items() if is_wholly_called(m)}, **kinds}
    stack.enter_context(forwards_exchanged({m: call for m, call in modules.items() if m not in wholly}))
    for home, call in wholly.items():
        stack.enter_context(private.calls_instead(home, call))
    for function, home, name in {key[:3] for key in named}:
        if vars(home).get(name) is function:  # it was, when it was found
            stack.enter_context(private.exchanged(home, **{name: by_name(function, home, name)}))
    return stack


def is_wholly_called(module: nn.Module) -> bool:
    """Whether a call of a module does more than to run its forward."""
    return bool(private.hooks_on(module)) or private.compiled_call(module) is not None


@contextlib.contextmanager
def in_place_of_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """A context with these tensors in place of the model's parameters and buffers, under all names that each has.

    `torch.func.functional_call` leaves its own in a module that is registered twice. Recurrent modules list what they
    have in forward: these lists are put back too. What the state has no name of stays.
    """
    members: list[dict[str, Any]] = [m for module in model.modules() for m in (module._parameters, module._buffers)]
    names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
    before = [(of_module, key, t) for of_module in members for key, t in of_module.items() if names.get(id(t)) in state]
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
