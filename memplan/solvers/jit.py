"""The one place that says how kernels are compiled.

Cached, so that a process pays for compilation once per installation; without the interpreter lock, so that callers may
plan in a thread; never `fastmath`, so that plans are equal on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])


def kernel(function: _Function) -> _Function:
    """Compile a function of arrays and scalars with numba."""
    return cast(_Function, numba.njit(cache=True, nogil=True)(function))
