"""How kernels are compiled by numba, which are, and a look at those that are being compiled.

Cached, so that a process pays for compilation once per installation. Without the interpreter lock, so that callers may
plan in a thread. Never `fastmath`, so that plans are equal on every machine.

Kernels may be longer than a screen, because numba optimises a called kernel again for each of its callers.

Where nothing can be written (a read-only installation and no home), each process compiles for itself.

numba looks at a kernel's own file to see whether what it has compiled still holds. It does not look at the files that
the kernel's own kernels and constants come from, which are compiled into it. So a digest of those files is in the name
under which it is kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.dispatcher import Dispatcher
from numba.core.event import Event, Listener, install_listener
from numba.core.registry import cpu_target

from memplan.logs import log, show

_Function = TypeVar("_Function", bound=Callable[..., Any])
_PACKAGES = ("memplan.problem", "memplan.solvers")
_ROOT = Path(__file__).parent
_IMPORT = re.compile(r"^from memplan\.((?:jit|solvers)\b[\w.]*) import", re.MULTILINE)


def kernel(function: _Function) -> _Function:
    """Compile a function of arrays and scalars with numba."""
    function.__qualname__ += f"_{digest_of_imports(Path(function.__code__.co_filename))}"
    dispatcher = numba.njit(nogil=True)(function)
    try:
        dispatcher.enable_caching()
    except RuntimeError:
        _tell_of_no_cache()
    return cast(_Function, dispatcher)


@functools.cache
def _tell_of_no_cache() -> None:
    log.warning(
        "there is no folder to keep compiled solvers in, so each process compiles them anew, for about a "
        "minute. Set NUMBA_CACHE_DIR to one that can be written to"
    )


@functools.cache
def digest_of_imports(path: Path) -> str:
    """Equal for equal contents of this file and all solvers that a module imports from, and those import from."""
    digest = hashlib.sha256()
    for name in sorted(set(_IMPORT.findall(path.read_text()))):
        other = _ROOT.joinpath(*name.split(".")).with_suffix(".py")
        digest.update(f"{name} {digest_of_imports(other)} ".encode())
        digest.update(other.read_bytes())
    return digest.hexdigest()[:8]


class _Compilations(Listener):
    """Calls a function when a kernel of the solvers begins to be compiled, not when it is read from disk."""

    def __init__(self, began: Callable[[], None]) -> None:
        self._began = began

    def on_start(self, event: Event) -> None:
        if event.data["dispatcher"].py_func.__module__.startswith(_PACKAGES):
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
    found: dict[int, Dispatcher] = {}
    for package in map(importlib.import_module, _PACKAGES):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            things = vars(importlib.import_module(info.name)).values()
            found |= {id(thing): thing for thing in things if isinstance(thing, Dispatcher)}
    return tuple(found.values())


def is_on_disk(kernel: Dispatcher) -> bool:
    """Whether numba has compiled this kernel for this processor, from its present source.

    numba has no public way to ask.
    """
    kept = getattr(kernel._cache, "_cache_file", None)  # type: ignore[attr-defined]
    return kept is not None and any(
        processor == cpu_target.target_context.codegen().magic_tuple() for _, processor, _ in kept._load_index()
    )
