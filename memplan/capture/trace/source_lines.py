"""Where in the user's code something happened."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import traceback
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from memplan import errors


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [""])[0]


_LIBRARIES = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(errors.__file__).parent) + os.sep,
    contextlib.__file__,
    "<string>",  # the wrapper that make_fx writes around what it traces
)


# Calls of modules, and of the model itself in a trace.
_MODULES, _TRACE = nn.modules.module.__file__, str(Path(__file__).with_name("trace.py"))
_RUN_FORWARD = {(_MODULES, "_call_impl"), (_MODULES, "inner"), (_TRACE, "_forward")}
_ENGINE, _FUNCTIONS = torch.autograd.graph.__file__, torch.autograd.function.__file__


def line_of(error: BaseException) -> str:
    """The innermost line outside of torch and memplan that an error passed through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_LIBRARIES)]
    return _frame_name(frames[-1]) if frames else "source line unknown"


def caller_line() -> str:
    """The innermost line outside of torch and memplan that is being executed."""
    frame = caller_frame()
    return "source line unknown" if frame is None else _frame_name(traceback.extract_stack(frame, limit=1)[-1])


def caller_frame() -> FrameType | None:
    """The innermost frame outside of torch and memplan; None where there is none."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return next(filter(_is_users, frames), None)


def calls_in_forward(error: BaseException | None = None) -> list[FrameType]:
    """The user's calls in the innermost forward in which an error was raised, or that are running, the outermost first.

    Then the first call that they make to library code. `torch.no_grad` has a function run within such a call.
    """
    if error is None:
        frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))][::-1]
    else:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    codes = [(frame.f_code.co_filename, frame.f_code.co_name) for frame in frames]
    begin = max((i + 1 for i, code in enumerate(codes) if code in _RUN_FORWARD), default=len(frames))
    users = list(itertools.takewhile(_is_users, frames[begin:]))
    return frames[begin : begin + len(users) + 1]


def _is_users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(_LIBRARIES)


def in_python_backward() -> bool:
    """Whether the backward of a user's own autograd function is being executed."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return next((name for name in files if name in (_FUNCTIONS, _ENGINE)), None) == _FUNCTIONS


def _frame_name(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno}: {(frame.line or '').strip()}"
