"""Where in the user's code something happened."""

from __future__ import annotations

import contextlib
import traceback
from pathlib import Path

import torch


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [""])[0]


_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), contextlib.__file__)


def line_of(error: BaseException) -> str:
    """The innermost line outside of torch and memplan that an error passed through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_LIBRARIES)]
    return _frame_name(frames[-1]) if frames else "source line unknown"


def caller_line() -> str:
    """The innermost line outside of torch and memplan that is being executed."""
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith(_LIBRARIES)]
    return _frame_name(frames[-1]) if frames else "source line unknown"


def _frame_name(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno}: {(frame.line or '').strip()}"
