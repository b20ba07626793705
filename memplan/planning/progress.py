"""A line on a terminal that says how far a search is."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from memplan.solvers import Progress

_QUIET_S = 2.0  # a search that takes less says nothing
_EVERY_S = 0.2


class ProgressLine:
    """Shows progress in place, and clears the line at the end. Silent where the stream is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.terminal = stream.isatty()
        self.due_s = time.monotonic() + _QUIET_S
        self.width = 0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.width:
            self._write("")

    def show(self, progress: Progress) -> None:
        """Show the stage, how much of it is done and the gap so far."""
        if not self.terminal or time.monotonic() < self.due_s:
            return
        self.due_s = time.monotonic() + _EVERY_S
        gap = "" if progress.gap is None else f", at most {progress.gap:.1%} over the best possible"
        self._write(f"memplan: {progress.stage} {progress.done:.0%}{gap}; Ctrl-C takes the best plan so far")

    def _write(self, text: str) -> None:
        self.stream.write("\r" + text.ljust(self.width) + ("" if text else "\r"))
        self.stream.flush()
        self.width = len(text)
