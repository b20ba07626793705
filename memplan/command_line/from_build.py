"""A step from a function of the user's, `package.module:build` or `path/file.py:build`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from torch import nn

from memplan.command_line.described import Described, Wanted
from memplan.command_line.outcomes import Mistake, nearest

_T = TypeVar("_T")
_NEXT = "let it return (model, sample) or (model, sample, loss_fn), as memplan.plan takes them"


def built_step(wanted: Wanted) -> Described:
    """What the function gives. It is called with batch= and length=, where it has such parameters. Raises Mistake."""
    if wanted.changes or wanted.dtype is not None:
        raise Mistake("--set and --dtype are for configs", f"{wanted.source} makes the whole model", "leave them out")
    place, _, name = wanted.source.rpartition(":")
    before = list(sys.path)  # modules are found where the user is, and beside the file
    sys.path[:0] = [str(Path(place).resolve().parent)] if place.endswith(".py") else [str(Path.cwd())]
    try:
        module = _module(place, wanted.source)
        build = getattr(module, name, None)
        if not callable(build):
            near = nearest(name, [n for n, v in vars(module).items() if inspect.isfunction(v)])
            cause = f"the nearest names are {near}" if near else "nothing there has a name like this"
            raise Mistake(f"{wanted.source} is no function", cause, "give the name of a function behind the colon")
        asked = {"batch": wanted.batch, "length": wanted.length}
        arguments = {option: value for option, value in asked.items() if value is not None}
        takes = inspect.signature(build).parameters
        for option in (option for option in arguments if option not in takes):
            raise Mistake(
                f"--{option} does not reach {wanted.source}",
                f"the function has no parameter {option!r}",
                "give it one, or leave the option out",
            )
        given = _called(lambda: build(**arguments), f"{wanted.source} raises an error")
    finally:
        sys.path[:] = before
    if not isinstance(given, tuple) or len(given) not in (2, 3) or not isinstance(given[0], nn.Module):
        returned = f"a {type(given).__name__}"
        if isinstance(given, tuple):
            returned = f"a tuple of {', '.join(type(part).__name__ for part in given) or 'nothing'}"
        raise Mistake(f"{wanted.source} gives no model and sample", f"it returned {returned}", _NEXT)
    model, sample, *loss_fn = given
    count = sum(p.numel() for p in model.parameters())
    title = f"{type(model).__name__} of {wanted.source}, {count / 1e6:.2f}e6 parameters"
    return Described(title, model, sample, loss_fn[0] if loss_fn else None, 1, "batches")


def _module(place: str, source: str) -> ModuleType:
    if not place.endswith(".py"):
        try:
            found = importlib.util.find_spec(place)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise Mistake(
                f"there is no module {place!r}",
                "it is neither installed nor in this folder",
                "give package.module:function or path/file.py:function",
            )
        return _called(lambda: importlib.import_module(place), f"{place} can't be imported")
    path = Path(place)
    if not path.is_file():
        raise Mistake(f"there is no file {place!r}", f"{source} names it", "give path/file.py:function")

    def load() -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"memplan_build_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where classes of it are looked up
        spec.loader.exec_module(module)
        return module

    return _called(load, f"{place} can't be imported")


def _called(function: Callable[[], _T], what: str) -> _T:
    """What the function gives. What it raises becomes a Mistake, with the user's line in it."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
        frames = [f for f in frames if not f.filename.startswith("<frozen")]
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        raise Mistake(what, f"{type(error).__name__}: {error}{where}", "repair that, and try it in Python") from error
