"""The logger "memplan", and a progress bar.

Log lines go where the program has them go, or to stderr where that says nothing of it: warnings, and one line for each
planned model. MEMPLAN_LOG changes that: debug, info, warning, error or off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

log = logging.getLogger("memplan")

_LEVELS = {
    "debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}  # fmt: skip
_asked = _LEVELS.get(os.environ.get("MEMPLAN_LOG", "").lower())


class _ToStderr(logging.Handler):
    """Writes what no other handler of the program does, with the logger's name in front of every line."""

    def emit(self, record: logging.LogRecord) -> None:
        if log.handlers != [self] or (log.propagate and logging.getLogger().handlers):
            return
        if record.levelno >= (logging.WARNING if _asked is None else _asked) or getattr(record, "shows", False):
            for line in self.format(record).splitlines():
                sys.stderr.write(f"{log.name}: {line}\n")


log.addHandler(_ToStderr())
if _asked is not None:
    log.setLevel(_asked)


def show(text: str) -> None:
    """Log information that a user sees without asking, unless MEMPLAN_LOG, or the logger's own level, is above it."""
    if _asked is None and log.level <= logging.INFO:
        log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, text, (), None, extra={"shows": True}))
    else:
        log.info(text)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A context in which nothing is logged, because what is tried in it concerns nobody."""

    def nothing(_: logging.LogRecord) -> bool:
        return False

    log.addFilter(nothing)  # and not `disabled`, which threads would restore in another order
    try:
        yield
    finally:
        log.removeFilter(nothing)


def show_count(what: str, done: int, total: int) -> None:
    """Show on a terminal how many of several things are done."""
    if sys.stderr.isatty():
        width = 30
        filled = width * done // total
        end = "\n" if done == total else ""
        sys.stderr.write(f"\rmemplan: {what} [{'#' * filled}{'.' * (width - filled)}] {done}/{total}{end}")
        sys.stderr.flush()
