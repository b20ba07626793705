"""How often there is planning, from what the planner says of it, and searches that heed none before them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from unittest import mock

from memplan.planning import plan_search


class _Noted(logging.Handler):
    def __init__(self, reasons: list[str]) -> None:
        super().__init__(logging.INFO)
        self._reasons = reasons

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("planning, because"):
            self._reasons.append(record.getMessage())


@contextlib.contextmanager
def plannings() -> Iterator[list[str]]:
    """A context whose value lists why there was planning in it: each time a capture, a search, or both."""
    reasons: list[str] = []
    logger, handler = logging.getLogger("memplan"), _Noted(reasons)
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield reasons
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@contextlib.contextmanager
def searched_anew() -> Iterator[None]:
    """A context in which no search is spared by a front that was found before."""

    def nothing(name: str) -> bytes:
        raise FileNotFoundError(name)

    with mock.patch.object(plan_search, "kept", nothing):
        yield
