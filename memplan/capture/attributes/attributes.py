"""Python attributes that forward may read or write: what they were, whether they changed, and a way to put them back.

These are the attributes of every submodule, of the objects that these refer to (configs and what hangs on them), of the
classes of both, and of parameters of subclasses; and globals, closure variables and class attributes that the model's
code names (`named_state`). Plain values and containers are compared by value, everything else (functions, tensors,
objects) by identity. A plan depends on those that its step reads (`attribute_reads`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.attributes.attribute_reads import AttributeReads
from memplan.capture.attributes.counters import Counting
from memplan.capture.attributes.named_state import GENERATORS, NamedState, NamedTable, slots_of
from memplan.errors import UnsupportedModel

Table = Mapping[str, Any]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_OF_NO_PARTS = frozenset(_PLAIN)  # the rows of a data set are many
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, np.ndarray)
# Attributes of every nn.Module that say nothing about what forward computes, or are checked by other means.
CHECKED_ELSEWHERE = frozenset(
    {
        "training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook",
        "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
        "_flat_weights", "_flat_weight_refs",  # a recurrent module's list of its own parameters
    }
)  # fmt: skip
_MEMBERS = {"_modules": "submodule", "_parameters": "parameter", "_buffers": "buffer"}
_OF_HOOKS = "__composable_api"  # what fully_shard's hooks keep on a module: forward itself never sees it
_NEVER_COPIED = (type, FunctionType, BuiltinFunctionType, ModuleType)  # by copy.deepcopy
_CODE = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)
_DEEPEST = 5
_MOST_COMPARED = 256  # values of a container that a global names
_ABSENT = object()


class SetValue(NamedTuple):
    """What forward puts into an attribute.

    - owner: the name of the attribute table.
    - key: the attribute.
    - value: what it is set to.
    """

    owner: str
    key: str
    value: Any


def is_plain(value: Any) -> bool:
    """Whether a value can't change in place, and equality says all about it."""
    if isinstance(value, (tuple, frozenset)):
        return all(is_plain(v) for v in value)
    return isinstance(value, _PLAIN)


def attribute_tables(
    model: nn.Module, ignored: Collection[str] = (), run: Any = None, given: Sequence[Any] = ()
) -> list[tuple[str, Table]]:
    """(name, attributes) of all `attribute_owners`."""
    owners = attribute_owners(model, ignored, run, given)
    return [(name, owner if isinstance(owner, NamedTable) else vars(owner)) for name, owner in owners]


def attribute_owners(
    model: nn.Module, ignored: Collection[str] = (), run: Any = None, given: Sequence[Any] = ()
) -> list[tuple[str, Any]]:
    """All objects whose attributes forward may read, with unique names.

    These are submodules, plain objects behind them, and the classes of both; parameters and buffers of subclasses, and
    objects that these carry; tables of what code names, and objects behind those.

    - ignored: attributes of modules behind which nothing is looked for.
    - run: what the step calls, where it is not the model's forward alone.
    - given: arguments of the call, behind which objects are looked for as well.
    """
    found: list[tuple[str, Any]] = []
    seen: set[int] = set()
    classes: dict[type, None] = {}
    for name, module in model.named_modules():
        found.append((name or type(model).__name__, module))
        classes.update(dict.fromkeys(type(module).__mro__))
        for attribute, value in vars(module).items():
            known = attribute in CHECKED_ELSEWHERE or attribute == "forward" or attribute.startswith(_OF_HOOKS)
            if not known and attribute not in ignored:
                for path, thing in _objects(value, f"{name}.{attribute}".lstrip("."), seen, _DEEPEST):
                    found.append((path, thing))
                    classes.update(dict.fromkeys(type(thing).__mro__))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not (private.is_ordinary(tensor) or isinstance(tensor, private.FakeTensor)):  # packed weights have scales
            found.append((name, tensor))
            for attribute, value in vars(tensor).items():
                found += _objects(value, f"{name}.{attribute}", seen, _DEEPEST)
    for index, argument in enumerate(given):
        found += _objects(argument, f"argument {index}", seen, _DEEPEST)
    for title, table in NamedState(model, run).tables:
        found.append((title, table))
        for key, value in table.items():
            for path, thing in _objects(value, f"{title}: {key}", seen, _DEEPEST):
                found.append((path, thing))
                classes.update(dict.fromkeys(type(thing).__mro__))
    found += [
        (f"class {c.__module__}.{c.__qualname__}", c)
        for c in classes
        if not c.__module__.startswith(("torch.", "builtins", "collections", "abc", "typing"))
    ]
    return found


def _objects(value: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """Objects with attributes of their own that are reached from an attribute, through containers too."""
    if depth == 0 or isinstance(value, (*_PLAIN, nn.Module, type, torch.Tensor, np.ndarray)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        children = [(f"{path}[{k!r}]", v) for k, v in value.items() if type(v) not in _OF_NO_PARTS]
    elif isinstance(value, (list, tuple, deque)):
        children = [(f"{path}[{i}]", v) for i, v in enumerate(value) if type(v) not in _OF_NO_PARTS]
    elif isinstance(value, ContextVar):
        table = NamedTable.of_context(value)
        yield path, table
        children = [(f"{path}.get()", v) for v in table.values()]
    elif not isinstance(value, _CODE) and (slots := slots_of(value)):
        table = NamedTable.of_slots(value, slots)
        yield f"{path} (slots)", table
        if isinstance(getattr(value, "__dict__", None), dict):
            yield path, value
        children = [(f"{path}.{k}", v) for k, v in (*table.items(), *getattr(value, "__dict__", {}).items())]
    elif not isinstance(value, _CODE) and isinstance(getattr(value, "__dict__", None), dict):
        yield path, value
        children = [(f"{path}.{k}", v) for k, v in vars(value).items()]
    else:
        return
    for name, child in children:
        yield from _objects(child, name, seen, depth - 1)


def own_generators(model: nn.Module) -> list[torch.Generator]:
    """Random generators among the attributes of a model, and in containers there."""
    return list({id(g): g for g in _held(model) if isinstance(g, torch.Generator)}.values())


def held_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Tensors among the attributes of a model, and in containers there; parameters and buffers too."""
    return list({id(t): t for t in _held(model) if isinstance(t, torch.Tensor)}.values())


def _held(model: nn.Module) -> list[Any]:
    return [leaf for _, table in attribute_tables(model) for v in table.values() for leaf in _leaves(v, _DEEPEST)]


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    """A value, or the values in it where it is a container."""
    if depth == 0 or not isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        yield value
        return
    for child in value.values() if isinstance(value, dict) else value:
        yield from _leaves(child, depth - 1)


_OF_NO_CONCERN = CHECKED_ELSEWHERE | {"forward"}  # which is exchanged while the model's own forward runs


def attributes_in_short(module: nn.Module) -> tuple[Any, ...]:
    """Modes and attributes of a module and those in it, as far as they are cheap to compare."""
    return tuple(
        (inner.training, tuple((k, _in_short(v)) for k, v in vars(inner).items() if k not in _OF_NO_CONCERN))
        for inner in module.modules()
    )


def state_in_short(module: nn.Module, run: Any = None) -> tuple[Any, ...]:
    """Python state that the code of a module, or of `run`, may read, as far as it is cheap to compare."""
    return tuple(
        (name, tuple((k, _in_short(v)) for k, v in table.items() if k not in _OF_NO_CONCERN))
        for name, table in attribute_tables(module, run=run)
    )


def has_traced_tensors(module: nn.Module, run: Any = None) -> bool:
    """Whether the code of a module, or of `run`, may read a tensor in Python state that the trace in progress made."""
    values = (v for _, t in attribute_tables(module, run=run) for k, v in t.items() if k not in _OF_NO_CONCERN)
    return any(isinstance(leaf, private.FakeTensor) for value in values for leaf in _leaves(value, _DEEPEST))


def _in_short(value: Any) -> Any:
    """A value that does not change in place, or as much of any other value as is cheap to compare."""
    if is_plain(value):
        return value
    if isinstance(value, (list, tuple, deque)):
        return tuple(v if is_plain(v) else id(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, v if is_plain(v) else id(v)) for k, v in value.items())
    return (id(value), value._version) if isinstance(value, torch.Tensor) else id(value)


class Snapshot:
    """What the attributes in some tables were, except ignored ones and those that nothing reads."""

    def __init__(
        self,
        tables: list[tuple[str, Table]],
        model: nn.Module,
        reads: AttributeReads,
        ignored: Collection[str] = (),
    ) -> None:
        of_modules = {id(vars(module)) for module in model.modules()}
        root, unchecked = vars(model), CHECKED_ELSEWHERE | frozenset(ignored)
        self._entries = [
            _Entry(
                table,
                # The model's own `forward` is what a plan replaces.
                unchecked | ({"forward"} if table is root else set()) if id(table) in of_modules else frozenset(),
                reads.of(table),
            )
            for _, table in tables
        ]
        self._titles = [title for title, _ in tables]
        self._glance: _Glance | None = None

    @property
    def unchecked(self) -> list[str]:
        """Names of what code names and is not compared, or by identity alone: large containers."""
        return [
            f"{title}.{key}" for title, entry in zip(self._titles, self._entries) for key in sorted(entry.unchecked)
        ]

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
                text = f"{name}.{key} is {_shown(table.get(key, _ABSENT))}, planned for {_shown(entry.value(key))}"
                return f"{name}.{key}", text
        self._glance = _Glance(tables, self._entries)
        return None

    def adapted(self, tables: list[tuple[str, Table]]) -> Snapshot:
        """The snapshot for a copy of the model: with the copy's own objects, and plain values as they were."""
        other = copy.copy(self)
        other._glance = None
        other._entries = [entry.adapted(table) for (_, table), entry in zip(tables, self._entries, strict=True)]
        return other


class _Glance:
    """A quick look at tables that were just as they should be: nothing in them may be another object since then."""

    def __init__(self, tables: list[tuple[str, Table]], entries: Sequence[_Entry]) -> None:
        self.tables = tables
        of_entries = [(entry, table) for (_, table), entry in zip(tables, entries, strict=True)]
        self._places = [(table.get, key) for entry, table in of_entries for key in entry.simple]
        self._values = [get(key, _ABSENT) for get, key in self._places]
        self._absent = [(entry.absent, table) for entry, table in of_entries if entry.absent]
        self._others = [(entry, table) for entry, table in of_entries if entry.containers or entry.absent is None]

    def sees_nothing_new(self) -> bool:
        """False where something may have changed: an equal value that is another object is new, too."""
        return (
            all(map(operator.is_, [get(key, _ABSENT) for get, key in self._places], self._values))
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
        containers = {k: v for k, v in kept.items() if isinstance(v, _CONTAINERS) and not is_plain(v)}
        self.unchecked = set[str]()
        if isinstance(table, NamedTable):  # a vocabulary would take longer to compare than the step takes
            self.unchecked = {k for k, v in containers.items() if _count(v) > _MOST_COMPARED}
            containers = {k: v for k, v in containers.items() if k not in self.unchecked}
            self.unchecked |= table.unchecked
        self.containers = {k: _frozen(v) for k, v in containers.items()}
        self.simple = {k: v for k, v in kept.items() if k not in self.containers}
        self.absent = None if read is None else frozenset(read - table.keys() - ignored)
        self._keys = frozenset(table)

    def adapted(self, table: Table) -> _Entry:
        other = copy.copy(self)
        other.simple = {k: _adapted(v, table.get(k, _ABSENT)) for k, v in self.simple.items()}
        other.containers = {k: _adapted(v, table.get(k)) for k, v in self.containers.items()}
        return other

    def changed_key(self, table: Table) -> str | None:
        found = map(table.get, self.simple, itertools.repeat(_ABSENT))
        if not all(map(operator.is_, found, self.simple.values())):
            for key, value in self.simple.items():
                if key not in table or not _same(value, table[key]):
                    return key
        return self.key_of_other_content(table)

    def key_of_other_content(self, table: Table) -> str | None:
        """The first container that holds something else, or attribute that was not there and matters."""
        for key, frozen in self.containers.items():
            if key not in table or not _same(frozen, table[key]):
                return key
        if self.absent is not None:
            return None if self.absent.isdisjoint(table) else next(key for key in table if key in self.absent)
        if self._keys == table.keys():
            return None
        return next((key for key in table if key not in self._keys and self._matters(key)), None)

    def _matters(self, key: str) -> bool:
        """Whether a new attribute may matter. Classes gain some that do not, such as caches of abstract classes."""
        return key not in self._ignored and not (self._of_class and key.startswith(("__", "_abc_")))

    def value(self, key: str) -> Any:
        return self.simple.get(key, self.containers.get(key, _ABSENT))


def _count(container: Any) -> int:
    """How many values a container and the containers in it have, as far as that is less than too many."""
    if isinstance(container, np.ndarray):
        return container.size
    count = len(container)
    for value in container.values() if isinstance(container, dict) else container:
        if count > _MOST_COMPARED:
            break
        count += _count(value) if isinstance(value, _CONTAINERS) else 0
    return count


def _frozen(value: Any) -> Any:
    """A copy of a container and of the containers in it."""
    if isinstance(value, dict):
        return {k: _frozen(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [_frozen(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return set(value)
    return value.copy() if isinstance(value, np.ndarray) else value


def _adapted(frozen: Any, value: Any) -> Any:
    """A frozen container, with the objects of a copy of the model."""
    if isinstance(frozen, dict) and isinstance(value, dict):
        return {k: _adapted(v, value.get(k)) for k, v in frozen.items()}
    if isinstance(frozen, list) and isinstance(value, (list, tuple, deque)) and len(frozen) == len(value):
        return [_adapted(v, w) for v, w in zip(frozen, value, strict=True)]
    if isinstance(frozen, torch.Tensor):
        equal = isinstance(value, torch.Tensor) and value.shape == frozen.shape and value.dtype == frozen.dtype
        return value if equal and torch.equal(value, frozen) else frozen
    if is_plain(frozen) or isinstance(frozen, (dict, list, set, np.ndarray, Enum, *_NEVER_COPIED)):
        return frozen
    return value if type(value) is type(frozen) else frozen


def _same(frozen: Any, value: Any) -> bool:
    """Whether a value has not changed since it was frozen."""
    if frozen is value:
        return True
    if isinstance(value, dict):
        return (
            isinstance(frozen, dict)
            and frozen.keys() == value.keys()
            and all(_same(v, value[k]) for k, v in frozen.items())
        )
    if isinstance(value, (list, tuple, deque)):
        return isinstance(frozen, (list, tuple, deque)) and len(frozen) == len(value) and all(map(_same, frozen, value))
    if isinstance(value, (set, frozenset)):
        return bool(frozen == value)
    if isinstance(value, np.ndarray):
        same_kind = isinstance(frozen, np.ndarray) and (frozen.dtype, frozen.shape) == (value.dtype, value.shape)
        return same_kind and bool(frozen.tobytes() == value.tobytes())
    if isinstance(value, (float, complex)):  # 0.0 and -0.0 are equal
        return type(frozen) is type(value) and repr(frozen) == repr(value)
    return isinstance(value, _PLAIN) and type(frozen) is type(value) and bool(frozen == value)


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


class ChangesState(UnsupportedModel):
    """The step depends on Python state that changes. owner: whose state that is, by name of the module or table."""

    def __init__(self, message: str, owner: str = "") -> None:
        super().__init__(message)
        self.owner = owner


class UselessTensor(torch.Tensor):
    """A tensor that raises TypeError when it is used."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError("a tensor is used that an earlier forward has left")


class SetsAttribute(ChangesState):
    """Forward leaves something in a Python attribute, or in a buffer that was None, that a planned step would not.

    Perhaps only its first run does.
    """


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """What a run of forward left in a model.

    - values: (table of attributes or buffers, key, value).
    - contents: (container, a copy of what is in it).
    """

    values: list[tuple[MutableMapping[str, Any], str, Any]]
    contents: list[tuple[Any, Any]]

    def put(self) -> None:
        """Put it into the model."""
        for table, key, value in self.values:
            table[key] = value
        for container, content in self.contents:
            _restore(container, content)

    def put_once(self) -> None:
        """Put it into the model now, and forget it, so that what forward leaves there later stays."""
        self.put()
        self.values.clear()
        self.contents.clear()

    def without(self, excluded: Callable[[torch.Tensor], bool]) -> LeftBehind:
        """All but values and contents with such tensors in them."""

        def fits(thing: Any) -> bool:
            return not any(isinstance(t, torch.Tensor) and excluded(t) for t in _leaves(thing, _DEEPEST))

        return LeftBehind([v for v in self.values if fits(v[2])], [c for c in self.contents if fits(c[1])])


class AddedHook(NamedTuple):
    """A hook that forward itself registers on a submodule."""

    module: str
    table: str
    key: int
    hook: Any


class AttributesKept:
    """Puts attributes, members and hooks back after a trace, and says which of them forward changed.

    - added_hooks: hooks that forward added; set once the trace is over.
    - set_anew: attributes that each run sets, to tensors of its own.
    """

    def __init__(
        self, model: nn.Module, ignored: Collection[str] = (), run: Any = None, given: Sequence[Any] = ()
    ) -> None:
        """Note what is there. ignored, run, given: as for `attribute_owners`."""
        self._tables = [(name, table, dict(table)) for name, table in attribute_tables(model, ignored, run, given)]
        self._of_tensors = [(vars(p), dict(vars(p))) for p in model.parameters()]
        kinds = {kind for module in model.modules() for kind in type(module).__mro__ if kind.__module__ != "builtins"}
        self._classes = [(kind, dict(vars(kind))) for kind in kinds if not kind.__module__.startswith("torch.")]
        self._unchecked = unchecked = (CHECKED_ELSEWHERE | frozenset(ignored)) - {"training"}
        self._members = [
            (name, kind, getattr(m, kind), dict(getattr(m, kind)))
            for name, m in model.named_modules()
            for kind in _MEMBERS
        ]
        self._hooks = [
            (name, kind, getattr(m, kind), dict(getattr(m, kind)))
            for name, m in model.named_modules()
            for kind in ("_forward_hooks", "_forward_pre_hooks")
        ]
        self.added_hooks: tuple[AddedHook, ...] = ()
        self.set_anew: tuple[SetValue, ...] = ()
        self._counted: Callable[[], bool] = bool
        self.counted_in_forward = False  # all that `counting` was told of, when forward ended
        generators = {
            id(leaf): (name, leaf, _drawn_from(leaf))
            for name, _, before in self._tables
            for value in before.values()
            for leaf in _leaves(value, _DEEPEST)
            if isinstance(leaf, GENERATORS)
        }
        self._generators = [*generators.values()]
        self._containers = {
            id(c): (path, c, _copied(c))
            for name, table, _ in self._tables
            for path, c in _containers(name, table, unchecked)
        }

    def __enter__(self) -> AttributesKept:
        return self

    def look(self, reads: AttributeReads) -> Sequence[SetValue]:
        """Note as `set_anew` what forward has set to tensors, or containers of them. Other runs may not read it before.

        Names that were read before they were set are among them where they had a tensor, or None, and got a tensor: one
        that is only compared with None may be set anew all the same.

        reads: what forward has asked for.
        """

        def may_be_set_anew(table: Table, key: str, old: Any) -> bool:
            if key not in reads.set_first(table):
                return isinstance(table[key], torch.Tensor) and (old is None or isinstance(old, torch.Tensor))
            return not is_plain(table[key]) and _is_new(table, key)

        self.counted_in_forward = self._counted()
        self.set_anew = tuple(
            SetValue(name, key, table[key])
            for name, table, before in self._tables
            if not isinstance(table, NamedTable)
            for key in sorted((reads.of(table) or frozenset()) - self._unchecked)
            if key in table and before.get(key, _ABSENT) is not table[key]
            if may_be_set_anew(table, key, before.get(key, _ABSENT))
        )
        return self.set_anew

    def spoil(self, thing: Any) -> None:
        """Put a thing into attributes that each run sets anew. Another trace shows whether they are read."""
        tables = {name: table for name, table, _ in self._tables}
        for found in self.set_anew:
            tables[found.owner][found.key] = thing  # type: ignore[index]

    def pass_over(self, reads: AttributeReads, counters: Sequence[SetValue]) -> None:
        """Let plans not depend on what the attributes in `set_anew`, and counters, hold before a run."""
        tables = {name: table for name, table, _ in self._tables}
        for found in (*self.set_anew, *counters):
            reads.pass_over(tables[found.owner], found.key)

    @contextlib.contextmanager
    def counting(self, counters: Sequence[SetValue]) -> Iterator[Callable[[], bool]]:
        """A context for a trace in which attributes can be added to, and not be read otherwise.

        - counters: these attributes, and how much forward adds to each.

        Gives a function that tells, once the trace is over, whether forward has added just that, and backward nothing.
        """
        tables: dict[str, Any] = {name: table for name, table, _ in self._tables}
        numbers = [tables[owner][key] for owner, key, _ in counters]
        reads = [list[str]() for _ in counters]
        for (owner, key, _), heard in zip(counters, reads, strict=True):
            tables[owner][key] = Counting(0, heard)

        def as_told() -> bool:
            return all(
                type(number) is Counting and number.reads is heard and not heard and number.by == by
                for (owner, key, by), heard in zip(counters, reads, strict=True)
                for number in [tables[owner].get(key)]
            )

        self._counted = as_told
        try:
            yield lambda: self.counted_in_forward and as_told()
        finally:
            self._counted = bool
            for (owner, key, _), number in zip(counters, numbers, strict=True):
                tables[owner][key] = number

    def counters(self, first: Sequence[SetValue], second: Sequence[SetValue]) -> tuple[SetValue, ...]:
        """Attributes that look like counters, and how much forward adds to each; empty where other attributes differ.

        first, second: `changes` after a run, and after two.
        """
        tables = {name: (table, before) for name, table, before in self._tables}
        found = list[SetValue]()
        if [c[:2] for c in first] != [c[:2] for c in second]:
            return ()
        for (owner, key, one), (_, _, two) in zip(first, second, strict=True):
            table, before = tables[owner]
            number = before.get(key)
            if one == two and type(one) is type(two):
                continue
            is_counted = type(number) is type(one) is type(two) is int and two - one == one - number
            if not is_counted or isinstance(table, (MappingProxyType, NamedTable)):
                return ()
            found.append(SetValue(owner, key, two - one))
        return tuple(found)

    def changed(self) -> bool:
        """Whether anything is now another than it was."""
        try:
            return bool(self.changes())
        except UnsupportedModel:
            return True

    def changes(self) -> tuple[SetValue, ...]:
        """Attributes that now have another plain value.

        Raises UnsupportedModel where anything else changed, because a planned step would not change it. It is a
        SetsAttribute where a first run may have left it.
        """
        for name, kind, members, before in self._members:
            for key in _exchanged(members, before):
                change = "removes" if key not in members else "exchanges" if key in before else "adds"
                filled = kind == "_buffers" and before.get(key) is None
                raise (SetsAttribute if filled else UnsupportedModel)(
                    f"forward {change} the {_MEMBERS[kind]} {f'{name}.{key}'.lstrip('.')}; a planned step would not. "
                    "Where only the first forward does so, run it before memplan.apply"
                )
        for name, generator, state in self._generators:
            if _drawn_from(generator) != state:
                raise ChangesState(
                    f"forward draws from a {type(generator).__name__} of its own; a planned step would take the same "
                    "number each time. Draw it outside of forward and pass it in, or use torch's generator",
                    name,
                )
        for path, container, before in self._containers.values():
            if not _same(before, container):
                raise SetsAttribute(
                    f"forward changes the {type(container).__name__} {path}; a planned step would not. Return it from "
                    "forward, or keep such state in a buffer",
                    path,
                )
        changed = []
        anew = {(name, key): value for name, key, value in self.set_anew}
        for name, table, before in self._tables:
            for key, value in table.items():
                old = before.get(key, _ABSENT)
                if key in self._unchecked or old is value or (old is not _ABSENT and _same(old, value)):
                    continue
                if anew.get((name, key), _ABSENT) is value:
                    continue
                if not is_plain(value) or isinstance(table, MappingProxyType):
                    raise SetsAttribute(
                        f"forward sets the attribute {name}.{key} to a {type(value).__name__}; a planned step would "
                        "not. Return it from forward, or keep such state in a buffer",
                        name,
                    )
                changed.append(SetValue(name, key, value))
        return tuple(changed)

    def left(self) -> LeftBehind:
        """What forward has left in attributes so far, and in buffers that were None."""
        values = [
            (table, key, value)
            for _, table, before in self._tables
            if isinstance(table, MutableMapping)
            for key, value in table.items()
            if key not in self._unchecked and before.get(key, _ABSENT) is not value
        ]
        values += [
            (members, key, value)
            for _, kind, members, before in self._members
            if kind == "_buffers"
            for key, value in members.items()
            if value is not None and before.get(key) is None
        ]
        return LeftBehind(
            values, [(c, _copied(c)) for _, c, before in self._containers.values() if not _same(before, c)]
        )

    def __exit__(self, *error: object) -> None:
        self.added_hooks = tuple(
            AddedHook(name, kind, key, hook)
            for name, kind, table, before in self._hooks
            for key, hook in table.items()
            if key not in before
        )
        for added in self.added_hooks:
            next(table for name, kind, table, _ in self._hooks if (name, kind) == added[:2]).pop(added.key)
        for _, _, members, before in self._members:
            if _exchanged(members, before):
                _restore(members, before)
        for _, table, before in self._tables:
            if isinstance(table, MutableMapping):
                for key in [k for k in table if k not in before]:
                    del table[key]
                for key, value in before.items():
                    if table.get(key, _ABSENT) is not value:
                        table[key] = value
        for _, generator, state in self._generators:
            _put_back(generator, state)
        for table, before in self._of_tensors:
            if table != before:
                table.clear()
                table.update(before)
        for kind, before in self._classes:
            for key in [k for k in vars(kind) if k not in before and not k.startswith(("__", "_abc_"))]:
                delattr(kind, key)
            for key, value in before.items():
                if vars(kind).get(key, _ABSENT) is not value and not key.startswith(("__", "_abc_")):
                    setattr(kind, key, value)
        for _, container, before in self._containers.values():
            if not _same(before, container):
                _restore(container, before)


def _drawn_from(generator: Any) -> bytes:
    """The state of a generator of Python's or NumPy's own."""
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return pickle.dumps(generator.get_state(legacy=False))
    return pickle.dumps(generator.bit_generator.state)


def _put_back(generator: Any, state: bytes) -> None:
    """Set a generator's state, as `_drawn_from` gave it."""
    if isinstance(generator, random.Random):
        generator.setstate(pickle.loads(state))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(pickle.loads(state))
    else:
        generator.bit_generator.state = pickle.loads(state)


def _references(value: Any) -> int:
    return sys.getrefcount(value)


_OF_ONE_PLACE = {"place": list[int]()}  # to compare with: calls hold more references where Dynamo looks at frames


def _is_new(home: Any, key: Any) -> bool:
    """Whether a value of a container is a tensor, plain, or a container of such values that nothing else refers to."""
    if isinstance(home[key], torch.Tensor) or is_plain(home[key]):
        return True
    if type(home[key]) not in (dict, list, tuple) or _references(home[key]) > _references(_OF_ONE_PLACE["place"]):
        return False
    children = home[key] if isinstance(home[key], dict) else range(len(home[key]))
    return all(_is_new(home[key], child) for child in children)


def _exchanged(members: Table, before: Table) -> list[str]:
    return [key for key in {**before, **members} if members.get(key, _ABSENT) is not before.get(key, _ABSENT)]


def _restore(container: Any, before: Any) -> None:
    if isinstance(container, np.ndarray):
        container[...] = before
    elif isinstance(container, (dict, set)):
        container.clear()
        container.update(before)
    else:
        container.clear()
        container.extend(before)


def _containers(name: str, table: Table, unchecked: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """(path, container) of containers among attributes that can change in place, and of those inside containers."""
    pending = [(f"{name}.{k}", v) for k, v in table.items() if k not in unchecked]
    seen: set[int] = set()
    while pending:
        path, value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (dict, list, set, deque, np.ndarray)):
            yield path, value
        if isinstance(value, (dict, list, tuple, deque)):
            children = value.items() if isinstance(value, dict) else enumerate(value)
            pending.extend(
                (f"{path}[{k!r}]", v) for k, v in children if type(v) not in _OF_NO_PARTS and isinstance(v, _CONTAINERS)
            )


def _copied(container: Any) -> Any:
    if isinstance(container, np.ndarray):
        return container.copy()
    kind = next(k for k in (dict, set, list, deque) if isinstance(container, k))
    return kind(container)
