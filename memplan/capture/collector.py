"""Python's cyclic garbage collector, switched off while many objects are made that stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Keep the collector from running.

    While a trace is made, it would go through all objects of the process again and again, and find nothing, because
    what a trace consists of stays. One full collection takes half a second where a large library is loaded.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
