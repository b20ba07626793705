"""Dispatch modes, function modes and autocast."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C import DispatchKey, DispatchKeySet, _get_function_stack_at, _len_torch_function_stack
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch.overrides import _pop_mode, _push_mode
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from memplan.torch_private.distributed import is_of_dtensors

_P = ParamSpec("_P")

_T = TypeVar("_T")

# Dispatch keys that are looked at before any other where a thread asks for them, and that nothing but a test of PyTorch
# uses: they let a composite op be seen wherever it is called from, before autocast and autograd.
_FIRST_KEY, _SECOND_KEY = "TESTING_ONLY_GenericMode", "TESTING_ONLY_GenericWrapper"


class InPlaceOf:
    """Functions that run in place of aten ops, in a thread, while `active`.

    - functions: by op. Ops that they call are the original ones.
    - inner: ops that they call are exchanged too; none of them may call its own. Such functions run within the others.

    There may be one of each kind. PyTorch knows of the functions from the first use on.
    """

    def __init__(self, functions: dict[Any, Callable[..., Any]], inner: bool = False) -> None:
        self._functions, self._inner = functions, inner
        self._key_name = _SECOND_KEY if inner else _FIRST_KEY
        self._key = torch._C._dispatch_key_parse(self._key_name)
        self._libraries: list[torch.library.Library] = []
        self._registering = threading.Lock()  # PyTorch takes a kernel for an op but once

    def _once(self, function: Callable[..., Any]) -> Callable[..., Any]:
        keys = torch._C.DispatchKeySet(self._key)

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return function(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """A context in which the functions run in place of the ops."""
        with self._registering:
            if not self._libraries:
                every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
                every.fallback(torch.library.fallthrough_kernel, self._key_name)
                for op, function in self._functions.items():
                    aten.impl(op, function if self._inner else self._once(function), self._key_name)
                self._libraries = [every, aten]
        for operator_on_functions in tuple(torch._ops._higher_order_ops.values()):
            operator_on_functions.fallthrough(self._key)
        with torch._C._IncludeDispatchKeyGuard(self._key):
            yield


# A context in which ops take their arguments as they are, on any device.
without_autocast = torch._C._DisableAutocast

# A context in which ops on the meta device are not part of the trace.
without_modes = torch._C._DisableTorchDispatch


def function_modes() -> tuple[str, ...]:
    """Names of the TorchFunctionModes that are on. A default device does not count: devices are in the trace."""
    kinds = [type(_get_function_stack_at(i)) for i in range(_len_torch_function_stack())]
    return tuple(kind.__qualname__ for kind in kinds if kind is not DeviceContext)


_PUT_ASIDE = threading.local()


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """A context in which Python functions of torch run past TorchFunctionModes, as ops do.

    What those modes change is in the trace already.
    """
    modes = [_pop_mode() for _ in range(_len_torch_function_stack())]
    before, _PUT_ASIDE.modes = getattr(_PUT_ASIDE, "modes", ()), modes
    try:
        yield
    finally:
        _PUT_ASIDE.modes = before
        for mode in reversed(modes):
            _push_mode(mode)


def with_function_modes(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap a function that programs call and that runs others' code, so that it runs under the modes put aside."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        modes = getattr(_PUT_ASIDE, "modes", ())
        for mode in reversed(modes):
            _push_mode(mode)
        try:
            return function(*args, **kwargs)
        finally:
            for _ in modes:
                _pop_mode()

    return call


def autocast_knows(op: str, device_type: str) -> bool:
    """Whether autocast has a rule for an op of aten."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", f"Autocast{device_type.upper()}")


_LAZY = functools.reduce(
    operator.or_, map(DispatchKeySet, (DispatchKey.Conjugate, DispatchKey.Negative, DispatchKey.ZeroTensor))
)


def run_in_mode(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run an op in the handler of a dispatch mode as it runs without the mode.

    A thread in such a handler excludes the dispatch keys that resolve lazy conjugates and negatives. Kernels that make
    such tensors and go on with them, as `linalg_pinv` does with complex ones, would give wrong numbers.
    """
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude - _LAZY):
        return func(*args, **(kwargs or {}))


class RealOps(TorchDispatchMode):
    """A dispatch mode for a model that runs with real data. Its handler is `on_op(func, args, kwargs)`.

    An op on DTensors comes to the handler as the ops on the parts that are here, and the collectives between them.
    A higher-order op (`torch.cond`, `scan`) comes to the handler as an op, and so do the ops that it runs. Such ops run
    through Dynamo, and compiled functions may run too. Under other modes Dynamo would skip their code, and go on to
    skip it for good.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch leaves it without annotations

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def on_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented if is_of_dtensors(types) else self.on_op(func, args, kwargs or {})

    def run_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op in the handler as it runs without the mode."""
        if isinstance(func, HigherOrderOperator):
            args, kwargs = pytree.tree_map_only(_FUNCTIONS, self._seen, (args, kwargs))
        return run_in_mode(func, args, kwargs)

    def _seen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose ops come to the handler, when an op of this mode calls it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            TorchDispatchMode.__enter__(self)
            try:
                return function(*args, **kwargs)
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)

        return call


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, torch.nn.Module)  # and no ops of PyTorch
