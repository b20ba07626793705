"""The one place that says how kernels are compiled.

Cached, so that a process pays for compilation once per installation. Without the interpreter lock, so that callers may
plan in a thread. Never `fastmath`, so that plans are equal on every machine.

Kernels may be longer than a screen, because numba optimises a called kernel again for each of its callers.

Where nothing can be written (a read-only installation and no home), each process compiles for itself.

numba looks at a kernel's own file to see whether what it has compiled still holds. It does not look at the files that
the kernel's own kernels and constants come from, which are compiled into it. So a digest of those files is in the name
under which it is kept.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

from memplan.logs import log

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SOLVERS = Path(__file__).parent.parent
_IMPORT = re.compile(r"^from memplan\.solvers\.([\w.]+) import", re.MULTILINE)


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
    """Equal for equal contents of all modules of the solvers that this one imports from, and those import from."""
    digest = hashlib.sha256()
    for name in sorted(set(_IMPORT.findall(path.read_text()))):
        other = _SOLVERS.joinpath(*name.split(".")).with_suffix(".py")
        digest.update(f"{name} {digest_of_imports(other)} ".encode())
        digest.update(other.read_bytes())
    return digest.hexdigest()[:8]
