"""Pseudo-random numbers that are equal everywhere: the generator is in here, and its state is the caller's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memplan.solvers.numeric.jit import kernel

DrawState = NDArray[np.uint64]


@kernel
def below(state: DrawState, limit: int) -> int:
    """A pseudo-random integer from 0 to limit - 1 (xorshift64*, Marsaglia, 2003, and Vigna, 2016)."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return int((x * np.uint64(2685821657736338717)) >> np.uint64(33)) % limit
