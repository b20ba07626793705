"""Accelerate in a test process, as if nothing had used it before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """A context in which Accelerate has no state but that its backend is gloo. The environment is put back."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    before = dict(os.environ)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_CPU", None)
    try:
        PartialState(backend="gloo")
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
