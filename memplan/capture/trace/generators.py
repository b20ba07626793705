"""Random numbers while a step is traced: generators are kept as they were, and forward may not seed them itself."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from memplan.capture.trace.source_lines import caller_line
from memplan.errors import UnsupportedModel


@contextlib.contextmanager
def generator_kept(device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
        moved = random.getstate() != python_state or not _same_state(np.random.get_state(), numpy_state)
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
    if moved:
        raise UnsupportedModel(
            "forward draws from Python's random or numpy.random; a planned step would take the same number each time. "
            "Draw it outside of forward and pass it in, or use torch's generator"
        )


def seeding_itself(*args: Any, **kwargs: Any) -> None:
    raise UnsupportedModel(
        f"forward seeds the generator or sets its state, at {caller_line()}; a planned step would not. Draw the "
        "numbers outside of forward and pass them in. Where it is torch.utils.checkpoint that does so, leave that out"
    )


def _same_state(a: Any, b: Any) -> bool:
    return a[0] == b[0] and bool((a[1] == b[1]).all()) and a[2:] == b[2:]
