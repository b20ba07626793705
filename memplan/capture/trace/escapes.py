"""Tensors of a trace that outlive it: somebody holds them, and would find no tensor there after a planned step.

Forward may hand tensors over by other ways than its results: it appends them to a list of an installed package, or puts
them into an object that no attribute leads to. When a trace is over and its own references are gone, every tensor of
the trace that is still there has escaped.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from types import CellType, FrameType, ModuleType
from typing import Any

import torch

from memplan import torch_private as private
from memplan.capture.ops.ways import Never, Refusal
from memplan.errors import UnsupportedModel

_WAIT_S, _MOST_WAITS = 0.01, 50


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Keep Python's cyclic garbage collector from running.

    While a trace is made, it would go through all objects of the process again and again, and find nothing, because
    what a trace consists of stays. One full collection takes half a second where a large library is loaded.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class MadeTensors:
    """The tensors that one or several traces of a step have made. It keeps none of them alive."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[torch.Tensor]] = []

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note results of an op, or what stands for the model's tensors."""
        self._made += (weakref.ref(t) for t in tensors if isinstance(t, private.FakeTensor))

    def __enter__(self) -> MadeTensors:
        """A context for traces. No tensor of theirs may outlive it.

        Where one does, it is taken away from whoever holds it, and a Refusal is raised. Nothing that a trace consists
        of may be referred to at the end.
        """
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and not isinstance(error, UnsupportedModel):
            return
        cause: BaseException | None = error
        while cause is not None:  # their frames hold what the trace consists of
            cause.__traceback__, cause = None, cause.__cause__ or cause.__context__
        holders = self._take_back()
        if holders and error is None:
            raise Refusal(
                f"forward or backward leaves tensors in {', '.join(map(_in_words, holders[:3]))}, which a planned step "
                "would not. Return them from forward, or put them into attributes of modules",
                Never(),
            )

    def _take_back(self) -> list[Any]:
        """Take tensors that are still there away from whoever holds them. Gives the holders.

        What was made while Python's collector was off is in its youngest generation, so only that is collected. A
        tensor without a holder is in autocast's cache, in a context of the caller.
        """
        if self._there():
            gc.collect(0)
        for _ in range(_MOST_WAITS):  # autograd's thread of a device lets go of its last op after backward has returned
            if all(t.device.type == "cpu" for t in self._there()):
                break
            time.sleep(_WAIT_S)
        escaped = self._there()
        wanted: list[Any] = list(escaped)
        found, holders = list[Any](), list[Any]()
        while wanted:
            ids = {id(thing) for thing in wanted}
            known = {*map(id, (wanted, escaped, found, holders)), id(sys._getframe())}
            holders = [h for h in gc.get_referrers(*wanted) if id(h) not in known and not isinstance(h, FrameType)]
            for holder in holders:
                with contextlib.suppress(Exception):  # some containers refuse it
                    _take_from(holder, ids)
            found += holders
            wanted = [holder for holder in holders if isinstance(holder, tuple)]  # whose holders can be mended
        return found

    def _there(self) -> list[torch.Tensor]:
        return list({id(t): t for ref in self._made if (t := ref()) is not None}.values())


def _in_words(holder: Any) -> str:
    """A name for what holds a tensor: "BAG of module megablocks.moe", or its type."""
    for name, module in tuple(sys.modules.items()):
        if isinstance(module, ModuleType):
            for key, value in tuple(vars(module).items()):
                if value is holder or (isinstance(holder, dict) and _attributes(value) is holder):
                    return f"{key} of module {name}"
    return f"a {type(holder).__name__}"


def _attributes(value: Any) -> Any:
    try:
        return object.__getattribute__(value, "__dict__")  # past those of lazy modules and deprecated names
    except AttributeError:
        return None


def _take_from(holder: Any, ids: set[int]) -> None:
    """Take tensors out of a container, a closure variable, or the slots of an object."""
    if isinstance(holder, (list, deque)):
        kept = [v for v in holder if id(v) not in ids]
        holder.clear()
        holder.extend(kept)
    elif isinstance(holder, MutableMapping):
        for key in [k for k, v in holder.items() if id(v) in ids]:
            del holder[key]
    elif isinstance(holder, set):
        holder -= {v for v in holder if id(v) in ids}
    elif isinstance(holder, CellType):
        del holder.cell_contents
    else:
        for kind in type(holder).__mro__:
            for name in (slots,) if isinstance(slots := vars(kind).get("__slots__", ()), str) else slots:
                if id(getattr(holder, name, None)) in ids:
                    delattr(holder, name)
