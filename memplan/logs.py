"""The logger "memplan". Its lines go where the program has log lines go, or to stderr where that says nothing of it."""

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
