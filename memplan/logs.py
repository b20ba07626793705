"""The logger "memplan", and a progress bar.

Log lines go where the program has them go, or to stderr where that says nothing of it.
"""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("memplan")


class _ToStderr(logging.Handler):
    """Writes what no other handler of the program does, with the logger's name in front."""

    def emit(self, record: logging.LogRecord) -> None:
        if log.handlers == [self] and not (log.propagate and logging.getLogger().handlers):
            sys.stderr.write(f"{self.format(record)}\n")


_handler = _ToStderr(logging.WARNING)
_handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
log.addHandler(_handler)


def show_count(what: str, done: int, total: int) -> None:
    """Show on a terminal how many of several things are done."""
    if sys.stderr.isatty():
        width = 30
        filled = width * done // total
        end = "\n" if done == total else ""
        sys.stderr.write(f"\rmemplan: {what} [{'#' * filled}{'.' * (width - filled)}] {done}/{total}{end}")
        sys.stderr.flush()
