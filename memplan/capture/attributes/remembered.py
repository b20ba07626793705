"""Functions that remember their results (`functools.cache`) must not remember those of a trace.

Rotary embeddings and position tables are often kept that way. A result from a trace is a fake tensor, which the model
itself would be given from then on.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from memplan import torch_private as private

_Remembering = functools._lru_cache_wrapper
_DEPTH = 5  # of containers around a tensor in a result
_SKIPPED = (type, ModuleType, FunctionType, nn.Module)


@contextlib.contextmanager
def results_forgotten(model: nn.Module) -> Iterator[None]:
    """A context after which functions forget results that were made of fake tensors in it."""
    owners = {*model.modules(), *(kind for module in model.modules() for kind in type(module).__mro__)}
    own = {o for owner in owners for o in vars(owner).values() if type(o) is _Remembering}
    functions = own.union(_of_the_process(len(sys.modules)))
    before = [(function, function.cache_info().misses) for function in functions]
    try:
        yield
    finally:
        for function, misses in before:
            if function.cache_info().misses != misses and _remembers_fakes(function):
                function.cache_clear()


@functools.lru_cache(maxsize=1)
def _of_the_process(modules: int) -> weakref.WeakSet[_Remembering[Any]]:
    """All functions with a cache, which take a twentieth of a second to find.

    They are found as referrers of their type. A list of all objects would have tuples in it that other threads are
    making, and these can't be finished while something else holds them (SystemError).

    modules: the number of modules that are imported. With more of them there may be more functions.
    """
    return weakref.WeakSet(o for o in gc.get_referrers(_Remembering) if type(o) is _Remembering)


def _remembers_fakes(function: _Remembering[Any]) -> bool:
    seen, level = {id(function)}, [function]
    for _ in range(_DEPTH):
        if any(issubclass(type(o), private.FakeTensor) for o in level):
            return True
        found = [o for o in gc.get_referents(*level) if id(o) not in seen and not issubclass(type(o), _SKIPPED)]
        seen.update(map(id, found))
        level = found
    return any(issubclass(type(o), private.FakeTensor) for o in level)
