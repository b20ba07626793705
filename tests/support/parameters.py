"""What is tried in every run, and what only with the slow tests, or where MEMPLAN_ALL_EXAMPLES is set."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest


def quickly(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Values of a parameter, or tuples of several, of which only a few run in `make test`."""
    found = []
    for value in values:
        each = value if isinstance(value, tuple) else (value,)
        found.append(pytest.param(*each, marks=() if value in quick else pytest.mark.slow))
    return found


def examples(count: int) -> int:
    """So many examples of hypothesis in `make test-full`, and fewer in other runs."""
    return count if "MEMPLAN_ALL_EXAMPLES" in os.environ else -(-count // 5)
