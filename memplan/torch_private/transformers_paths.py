"""What transformers asks while it is traced, and what it keeps while a model runs."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from memplan.torch_private.exchanged import exchanged


@contextlib.contextmanager
def not_tracing_for_transformers() -> Iterator[None]:
    """A context in which transformers runs as it does outside of a trace.

    It asks `is_tracing(tensor)`, which is true for fake tensors. It then builds other masks and repeats key/value
    heads: other kernels and other bits than the plain step.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    original: Any = getattr(module, "is_fake_tensor", None)
    owner = threading.get_ident()
    of_others = {"is_fake_tensor": lambda tensor: threading.get_ident() != owner and original(tensor)}
    with exchanged(module, **({} if original is None else of_others)):
        yield


def collects_outputs() -> bool:
    """Whether a transformers model is running with hooks that collect outputs of its submodules."""
    module = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(module, "_active_collector", None)
    return bool(collector is not None and collector.get())
