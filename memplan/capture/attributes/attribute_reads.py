"""Which Python attributes a forward and its backward read or set: others may change without changing the step.

A model in a training framework has counters, logs, metrics and the framework itself among its attributes, and these
change with every step. So reads and sets are noted: for the time of a trace, the classes of such objects get a
`__getattribute__` and a `__setattr__` that note them. What an attribute held does not matter where the step does not
read it, or sets it first. One that it sets has to be set again where other code has put it back.

Of names in the user's own files, those count that a line that runs has: a log that only debugging fills is none.

All attributes count of these: classes; tensors; objects whose class has a `__getattribute__` of its own (the configs of
transformers) or can't be given one; objects that are asked for all attributes at once (`vars()`, a copy). Not noted are
reads through `object.__getattribute__`, and what a function that caches its results has read before.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.attributes.code_facts import NamedOn, NamedTable, names_by_line
from memplan.capture.attributes.named_state import NamedState, is_of_library
from memplan.capture.ops.ways import Never, Refusal

_IN_ALL = "__dict__"
_OF_MODULES = frozenset(  # these look for parameters, buffers and submodules there
    getattr(nn.Module, name).__code__
    for name in ("__getattr__", "__setattr__", "__delattr__", "register_buffer", "register_parameter", "add_module")
)
_MEMBERS = {"_parameters", "_buffers", "_modules"}  # which these read
_ROOTS = (object, dict, list, tuple, set, frozenset, deque, defaultdict)  # all look for names alike

_lock = threading.RLock()
_listening: dict[type, tuple[Any, int]] = {}  # classes: a `__setattr__` of their own, how many want to know of objects
_heard: dict[int, list[_Names]] = {}  # by object, for each of those


class _Names:
    """Names of one object's attributes.

    - asked: read or set.
    - set_first: set before they were read.
    """

    def __init__(self) -> None:
        self.asked, self.set_first = set[str](), set[str]()


class AttributeReads:
    """The names of attributes that are read or set while it listens, by object. It keeps the objects alive."""

    def __init__(self, owners: Sequence[Any]) -> None:
        self._owners = [owner for owner in owners if _tells(owner)]
        self._names = {id(owner): _Names() for owner in self._owners}
        self._tables = {id(vars(owner)): self._names[id(owner)] for owner in self._owners}
        tables = [owner for owner in owners if isinstance(owner, NamedTable) and owner.by_line]
        self._by_line = frozenset(name for table in tables for name in table.names)
        self._run: set[NamedOn] | None = set() if tables else None  # on lines that ran; None where that is not known
        self._of_no_concern: set[NamedOn] = set()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """A context in which reads and sets are noted, by any thread."""
        with _lock:
            kinds = {kind for kind in {type(owner) for owner in self._owners} if _begin(kind)}
            for owner in self._owners:
                if type(owner) not in kinds:
                    self._names[id(owner)].asked.add(_IN_ALL)
                _heard.setdefault(id(owner), []).append(self._names[id(owner)])
        try:
            with self._following_lines():
                yield
        finally:
            with _lock:
                for key, names in self._names.items():
                    _heard[key] = [others for others in _heard[key] if others is not names]
                    if not _heard[key]:
                        del _heard[key]
                for kind in kinds:
                    _end(kind)

    @contextlib.contextmanager
    def _following_lines(self) -> Iterator[None]:
        """A context in which names on lines that run are noted, in functions that have such names.

        A debugger or a meter of coverage goes first. Where there is a GPU, backward runs on threads of its own.
        """
        if self._run is None or sys.gettrace() is not None or torch.cuda.is_available():
            self._run = None
            yield
            return
        run = self._run
        followed: dict[int, tuple[CodeType, Any]] = {}  # by function (its code is slow to hash): what follows its lines

        def enter(frame: FrameType, event: str, argument: Any) -> Any:
            known = followed.get(id(frame.f_code))
            if known is None:
                known = frame.f_code, None if is_of_library(frame) else following(frame.f_code)
                followed[id(frame.f_code)] = known
            return known[1]

        def following(code: CodeType) -> Any:
            counting = ((number, self._by_line & names.keys()) for number, names in names_by_line(code).items())
            new = {number: [NamedOn(code, number, name) for name in names] for number, names in counting if names}

            def line(frame: FrameType, event: str, argument: Any) -> Any:
                run.update(new.pop(frame.f_lineno, ()))
                return line

            return line if new else None

        of_threads = threading.gettrace()
        sys.settrace(enter)
        threading.settrace(enter)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(of_threads)

    def of(self, table: Mapping[str, Any]) -> frozenset[str] | None:
        """Names that were read or set of the object with these attributes; None where that may be any of them."""
        if isinstance(table, NamedTable):
            if self._run is None or not table.by_line:
                return table.names
            return table.names & {named.name for named in self._run - self._of_no_concern}
        names = self._tables.get(id(table))
        if names is None or any(n.startswith("__") and n.endswith("__") and n != "__class__" for n in names.asked):
            return None  # a read of `__dict__`, say, leaves open which attributes are read next
        return frozenset(names.asked | (_MEMBERS if names.asked and "_modules" in table else set()))

    def set_first(self, table: Mapping[str, Any]) -> frozenset[str]:
        """Names that were set of the object with these attributes, and not read before."""
        known = id(table) in self._tables and self.of(table) is not None
        return frozenset(self._tables[id(table)].set_first) if known else frozenset()

    def of_what_is_set_by(self, module: nn.Module, method: Any = None) -> set[str]:
        """Names that were read of modules in this one, and that their code, or a method alone, may set."""
        sets, found = NamedState(module if method is None else nn.Identity(), method).sets, set[str]()
        for inner in module.modules():
            read = self.of(vars(inner))
            found |= sets & (vars(inner).keys() if read is None else read)
        return found

    def pass_over_names(self, named: Iterable[NamedOn]) -> None:
        """Forget names on lines that only hand on what they stand for, because what it holds does not matter."""
        self._of_no_concern.update(named)

    def pass_over(self, table: Mapping[str, Any], name: str) -> None:
        """Forget that this attribute was asked for, because what it held before does not matter."""
        if (names := self._tables.get(id(table))) is not None:
            names.asked.discard(name)


def _tells(owner: Any) -> bool:
    own = (vars(kind).get("__getattribute__", _getattribute) for kind in type(owner).__mro__ if kind not in _ROOTS)
    return not isinstance(owner, (type, torch.Tensor, NamedTable)) and all(way is _getattribute for way in own)


def _getattribute(self: Any, name: str) -> Any:
    asking = _heard.get(id(self))
    if asking is not None and name == _IN_ALL:
        reader = sys._getframe(1)
        if reader.f_code in _OF_MODULES or str(reader.f_globals.get("__name__")).startswith("memplan."):
            asking = None
    for names in asking or ():
        names.asked.add(name)
    value = object.__getattribute__(self, name)
    is_iterator = isinstance(value, Iterator) and not isinstance(value, (io.IOBase, *weakref.ProxyTypes))
    if asking and is_iterator and private.someone_traces():
        raise Refusal(
            f"forward reads {type(self).__name__}.{name}, an iterator, which nobody can put back after a trace, and "
            "which a planned step would not advance. Take its next item outside of the model, and pass that in",
            Never(),
        )
    return value


def _noting_sets(original: Any) -> Any:
    def __setattr__(self: Any, name: str, value: Any) -> None:
        for names in _heard.get(id(self), ()):
            if name not in names.asked:
                names.set_first.add(name)
            names.asked.add(name)
        original(self, name, value)

    return __setattr__


def _begin(kind: type) -> bool:
    own, count = _listening.get(kind, (vars(kind).get("__setattr__"), 0))
    if not count:
        try:
            type.__setattr__(kind, "__setattr__", _noting_sets(kind.__setattr__))
            type.__setattr__(kind, "__getattribute__", _getattribute)
        except TypeError:  # a class of C++
            return False
    _listening[kind] = own, count + 1
    return True


def _end(kind: type) -> None:
    own, count = _listening.pop(kind)
    if count > 1:
        _listening[kind] = own, count - 1
        return
    type.__delattr__(kind, "__getattribute__")
    if own is None:
        type.__delattr__(kind, "__setattr__")
    else:
        type.__setattr__(kind, "__setattr__", own)
