"""What attributes were when a plan was made, to be compared before each call; and imports, whose changes stay.

Plain values and containers are compared by value, everything else (functions, tensors, objects) by identity, methods
by that of their function and object: `kernels` binds forwards anew when a model goes from `eval()` to `train()`. A plan
depends on those that its step reads (`attribute_reads`).

Python runs the code of a module once, so what it does when forward imports it must not be undone:

    def forward(self, x):
        return kernels.cross_entropy(x)  # imports kernels.nvidia, which enters itself into kernels.REGISTRY
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import operator
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import nn

from memplan import torch_private as private
from memplan.capture.attributes.attribute_reads import AttributeReads
from memplan.capture.attributes.code_facts import NamedTable, items_of
from memplan.capture.attributes.tables import ABSENT, CHECKED_ELSEWHERE, CONTAINERS, PLAIN, Table, is_plain

_MOST_COMPARED = 256  # values of a container that a global names


class Snapshot:
    """What the attributes in some tables were, except ignored ones and those that nothing reads."""

    def __init__(
        self, tables: list[tuple[str, Table]], model: nn.Module, reads: AttributeReads, ignored: Collection[str]
    ) -> None:
        unchecked = dict.fromkeys((id(vars(m)) for m in model.modules()), CHECKED_ELSEWHERE | frozenset(ignored))
        root = id(vars(model))
        unchecked[root] = unchecked.get(root, frozenset()) | {"forward"}  # the model's own is what a plan replaces
        self._entries = [_Entry(table, unchecked.get(id(table), frozenset()), reads.of(table)) for _, table in tables]
        self._titles = [title for title, _ in tables]
        self._glance: _Glance | None = None

    @property
    def unchecked(self) -> list[str]:
        """Names of what code names and is not compared, or by identity alone: large containers."""
        return [f"{title}.{key}" for title, e in zip(self._titles, self._entries) for key in sorted(e.unchecked)]

    @property
    def names(self) -> set[str]:
        """Names of all attributes that it compares."""
        return {f"{title}.{key}" for title, e in zip(self._titles, self._entries) for key in (*e.simple, *e.containers)}

    def difference(self, tables: list[tuple[str, Table]]) -> tuple[str, str] | None:
        """(name, words) of the first attribute that has changed; None where none has.

        tables: in the order of those that the snapshot was made of.
        """
        if self._glance is not None and self._glance.tables is tables and self._glance.sees_nothing_new():
            return None
        for (name, table), entry in zip(tables, self._entries, strict=True):
            key = entry.changed_key(table)
            if key is not None:
                then = entry.simple.get(key, entry.containers.get(key, ABSENT))
                text = f"{name}.{key} is {_shown(table.get(key, ABSENT))}, planned for {_shown(then)}"
                return f"{name}.{key}", text
        self._glance = _Glance(tables, self._entries)
        return None


class _Glance:
    """A quick look at tables that were just as they should be: nothing in them may be another object since then."""

    def __init__(self, tables: list[tuple[str, Table]], entries: Sequence[_Entry]) -> None:
        self.tables = tables
        of_entries = [(entry, table) for (_, table), entry in zip(tables, entries, strict=True)]
        # Lists of few objects, because a step finds none of them in the processor's cache.
        self._gets = [get for e, table in of_entries for get in itertools.repeat(table.get, len(e.simple))]
        self._keys = [key for entry, _ in of_entries for key in entry.simple]
        self._values = [get(key, ABSENT) for get, key in zip(self._gets, self._keys)]
        self._absent = [(entry.absent, table) for entry, table in of_entries if entry.absent]
        self._others = [(entry, table) for entry, table in of_entries if entry.containers or entry.absent is None]

    def sees_nothing_new(self) -> bool:
        """False where something may have changed: an equal value that is another object is new, too."""
        return (
            all(map(operator.is_, [get(k, ABSENT) for get, k in zip(self._gets, self._keys)], self._values))
            and all(itertools.starmap(frozenset.isdisjoint, self._absent))
            and all(entry.key_of_other_content(table) is None for entry, table in self._others)
        )


class _Entry:
    """What one table was: single values, and containers with what was in them.

    read: the names that matter, also where they are absent. None: all that are there, and any that is new.
    """

    def __init__(self, table: Table, ignored: frozenset[str], read: frozenset[str] | None) -> None:
        self._ignored = ignored
        self._of_class = isinstance(table, MappingProxyType)
        kept = {k: v for k, v in table.items() if k not in ignored and (read is None or k in read)}
        containers = {k: v for k, v in kept.items() if isinstance(v, CONTAINERS) and not is_plain(v)}
        self.unchecked = set[str]()
        if isinstance(table, NamedTable):  # a vocabulary would take longer to compare than the step takes
            self.unchecked = {k for k, v in containers.items() if _count(v) > _MOST_COMPARED}
            containers = {k: v for k, v in containers.items() if k not in self.unchecked}
            self.unchecked |= table.unchecked
        self.containers = {k: _frozen(v) for k, v in containers.items()}
        self.simple = {k: v for k, v in kept.items() if k not in self.containers}
        self.absent = None if read is None else frozenset(read - table.keys() - ignored)
        self._keys = frozenset(table)

    def changed_key(self, table: Table) -> str | None:
        found = map(table.get, self.simple, itertools.repeat(ABSENT))
        if not all(map(operator.is_, found, self.simple.values())):
            for key, value in self.simple.items():
                if key not in table or not is_unchanged(value, table[key]):
                    return key
        return self.key_of_other_content(table)

    def key_of_other_content(self, table: Table) -> str | None:
        """The first container that holds something else, or attribute that was not there and matters."""
        for key, frozen in self.containers.items():
            if key not in table or not is_unchanged(frozen, table[key]):
                return key
        if self.absent is not None:
            return None if self.absent.isdisjoint(table) else next(key for key in table if key in self.absent)
        if self._keys == table.keys():
            return None
        new = (key for key in table if key not in self._keys and key not in self._ignored)
        # Classes gain some that do not matter, such as caches of abstract classes.
        return next((key for key in new if not (self._of_class and key.startswith(("__", "_abc_")))), None)


def _count(container: Any) -> int:
    """How many values a container and the containers in it have, as far as that is less than too many."""
    if isinstance(container, np.ndarray):
        return container.size
    count = len(container)
    for value in dict.values(container) if isinstance(container, dict) else container:
        if count > _MOST_COMPARED:
            break
        count += _count(value) if isinstance(value, CONTAINERS) else 0
    return count


def _frozen(value: Any) -> Any:
    """A copy of a container and of the containers in it."""
    if isinstance(value, dict):
        return {k: _frozen(v) for k, v in items_of(value)}
    if isinstance(value, (list, tuple, deque)):
        return tuple(map(_frozen, value)) if isinstance(value, tuple) else list(map(_frozen, value))
    if isinstance(value, (set, frozenset)):
        return set(value)
    return value.copy() if isinstance(value, np.ndarray) else value


def is_unchanged(frozen: Any, value: Any) -> bool:
    """Whether a value has not changed since it was frozen."""
    if frozen is value:
        return True
    if isinstance(value, dict):
        now = dict(items_of(value))
        same_keys = isinstance(frozen, dict) and list(frozen) == list(now)  # in one order, too
        return same_keys and all(map(is_unchanged, frozen.values(), now.values()))
    if isinstance(value, (list, tuple, deque)):
        same_kind = isinstance(frozen, (list, tuple, deque)) and isinstance(frozen, tuple) is isinstance(value, tuple)
        return same_kind and len(frozen) == len(value) and all(map(is_unchanged, frozen, value))
    if isinstance(value, (set, frozenset)):
        return bool(frozen == value)
    if isinstance(value, np.ndarray):
        same_kind = isinstance(frozen, np.ndarray) and (frozen.dtype, frozen.shape) == (value.dtype, value.shape)
        return same_kind and bool(frozen.tobytes() == value.tobytes())
    if isinstance(value, (float, complex)):  # 0.0 and -0.0 are equal
        return type(frozen) is type(value) and repr(frozen) == repr(value)
    return isinstance(value, (*PLAIN, MethodType)) and type(frozen) is type(value) and bool(frozen == value)


def copied(container: Any) -> Any:
    """A copy of a container, with the same things in it."""
    if isinstance(container, np.ndarray):
        return container.copy()
    kind = next(k for k in (dict, set, list, deque) if isinstance(container, k))
    return dict(items_of(container)) if kind is dict else kind(container)


def _shown(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


@contextlib.contextmanager
def imports_heard(around: Callable[[], contextlib.AbstractContextManager[object]]) -> Iterator[None]:
    """A context that makes another around each import in it. Tensors that are made in an import are real ones.

    `importlib.reload` is not heard, which runs a module's code each time that forward runs.
    """
    python: Any = importlib._bootstrap
    original, imports = python._load_unlocked, False

    def load(spec: ModuleSpec) -> ModuleType:
        nonlocal imports
        outermost, imports = not imports, True
        try:
            with around() if outermost else contextlib.nullcontext(), private.outside_of_tracing():
                return original(spec)  # type: ignore[no-any-return]
        finally:
            imports = not outermost

    with private.exchanged(python, _load_unlocked=load):
        yield


@contextlib.contextmanager
def as_before(tables: Sequence[tuple[str, Table, dict[str, Any]]], containers: dict[int, Any]) -> Iterator[None]:
    """A context for an import. What it changes is noted as if it had been there before.

    - tables: (name, table of attributes, what was in it before).
    - containers: (path, container, what was in it before) by id.
    """
    were = [dict(table) for _, table, _ in tables]
    contents = {place: copied(container) for place, (_, container, _) in containers.items()}
    yield
    for (_, table, before), was in zip(tables, were, strict=True):
        for key in (*was, *(k for k in table if k not in was)):
            old, new = was.get(key, ABSENT), table.get(key, ABSENT)
            if new is old or before.get(key, ABSENT) is not old:
                continue
            if new is ABSENT:
                del before[key]
            else:
                before[key] = new
    for place, (path, container, content) in tuple(containers.items()):
        if not is_unchanged(contents[place], container) and is_unchanged(content, contents[place]):
            containers[place] = path, container, copied(container)
