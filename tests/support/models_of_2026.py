"""All models of 2026, beside the thirty of `tests.support.architectures`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from tests.support.architectures import Architecture
from tests.support.diffusion_of_2026 import DIFFUSION
from tests.support.language_of_2026 import LANGUAGE
from tests.support.seen_and_heard_of_2026 import SEEN_AND_HEARD

MODELS_OF_2026: dict[str, Architecture] = {**LANGUAGE, **SEEN_AND_HEARD, **DIFFUSION}
# Whose plain steps give other bits in a second run, unless PyTorch takes kernels that do not.
NOT_REPEATED = {"gpt_oss": "two threads add gradients of biases that several rows share, in any order"}


@contextlib.contextmanager
def repeated(name: str) -> Iterator[None]:
    """A context in which plain steps of a model give the same bits in a second run."""
    torch.use_deterministic_algorithms(name in NOT_REPEATED)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
