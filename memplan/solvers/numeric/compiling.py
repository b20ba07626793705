"""Which kernels are compiled, and a look at those that are being compiled."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
from collections.abc import Callable

from numba.core.dispatcher import Dispatcher
from numba.core.event import Event, Listener, install_listener
from numba.core.registry import cpu_target

from memplan.logs import show

_SOLVERS = "memplan.solvers"


class _Compilations(Listener):
    """Calls a function when a kernel of the solvers begins to be compiled, not when it is read from disk."""

    def __init__(self, began: Callable[[], None]) -> None:
        self._began = began

    def on_start(self, event: Event) -> None:
        if event.data["dispatcher"].py_func.__module__.startswith(_SOLVERS):
            self._began()

    def on_end(self, event: Event) -> None:
        pass


def watching_compilation(began: Callable[[], None]) -> contextlib.AbstractContextManager[object]:
    """A context that calls a function, in whichever thread, for each kernel that is compiled in it."""
    return install_listener("numba:compile", _Compilations(began))


@functools.cache
def tell_of_compilation() -> None:
    """Say, once in a process, why this search takes longer than others will."""
    show("compiling the solvers, once: about a minute; `memplan warmup` does it ahead")


def kernels() -> tuple[Dispatcher, ...]:
    """All kernels."""
    found: dict[int, Dispatcher] = {}
    solvers = importlib.import_module(_SOLVERS)
    for info in pkgutil.walk_packages(solvers.__path__, f"{_SOLVERS}."):
        for thing in vars(importlib.import_module(info.name)).values():
            if isinstance(thing, Dispatcher):
                found[id(thing)] = thing
    return tuple(found.values())


def is_on_disk(kernel: Dispatcher) -> bool:
    """Whether numba has compiled this kernel for this processor, from its present source.

    numba has no public way to ask.
    """
    kept = getattr(kernel._cache, "_cache_file", None)  # type: ignore[attr-defined]
    return kept is not None and any(
        processor == cpu_target.target_context.codegen().magic_tuple() for _, processor, _ in kept._load_index()
    )
