"""A trace or a run on the sample that leaves Python attributes as they were, and says what forward changed in them.

For example, of `self.calls += 1` it says SetValue("M", "calls", 1), and of `self.seen.append(x)` that forward changes a
list: a `Refusal` with `StateChanges`.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import nn

from memplan.capture.attributes.attribute_reads import AttributeReads
from memplan.capture.attributes.code_facts import NamedTable, items_of
from memplan.capture.attributes.named_state import GENERATORS
from memplan.capture.attributes.snapshot import as_before, copied, imports_heard, is_unchanged
from memplan.capture.attributes.tables import (
    ABSENT,
    CHECKED_ELSEWHERE,
    CONTAINERS,
    DEEPEST,
    OF_NO_PARTS,
    Table,
    attribute_owners,
    is_plain,
    leaves_of,
    tables_of_owners,
)
from memplan.capture.ops.ways import Refusal, StateChanges
from memplan.errors import or_raise

_MEMBERS = {"_modules": "submodule", "_parameters": "parameter", "_buffers": "buffer"}


class SetValue(NamedTuple):
    """What forward puts into an attribute.

    - owner: the name of the attribute table.
    - key: the attribute.
    - value: what it is set to; of a counter, what each forward adds.
    """

    owner: str
    key: str
    value: Any


class UselessTensor(torch.Tensor):
    """A tensor that raises TypeError when it is used."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError("a tensor is used that an earlier forward has left")


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """What a run of forward left in a model.

    - values: (table of attributes, members or hooks, key, value); ABSENT is nothing.
    - contents: (container, a copy of what is in it).
    - before: what was there before.
    """

    values: list[tuple[MutableMapping[Any, Any], Any, Any]]
    contents: list[tuple[Any, Any]]
    before: LeftBehind | None = None

    def put(self) -> None:
        """Put it into the model."""
        for table, key, value in self.values:
            if value is not ABSENT:
                table[key] = value
            else:
                table.pop(key, None)
        for container, content in self.contents:
            _restore(container, content)

    def put_for_good(self) -> None:
        """Put it into the model once. What forward leaves there later stays."""
        self.put()
        self.values.clear()
        self.contents.clear()

    def to_come(self) -> LeftBehind:
        """A copy that notes what the model has now, as what was there before."""
        values = [(table, key, table.get(key, ABSENT)) for table, key, _ in self.values]
        return LeftBehind(self.values, self.contents, LeftBehind(values, [(c, copied(c)) for c, _ in self.contents]))

    def settle(self, serves: Callable[[], bool]) -> bool:
        """Put it into a model that is as it was before, for good if it serves a purpose. Gives whether it does."""
        if self.before is None or not (self.values or self.contents):
            return False
        there = [(before, table.get(key, ABSENT)) for table, key, before in self.before.values]
        if not all(is_unchanged(*pair) for pair in (*there, *((b, c) for c, b in self.before.contents))):
            return False
        self.put()
        if not serves():
            self.before.put()
            return False
        self.put_for_good()
        return True

    def without(self, excluded: Callable[[torch.Tensor], bool]) -> LeftBehind:
        """All but values and contents with such tensors in them, members other than buffers, and what has gone."""

        def fits(thing: Any) -> bool:
            tensors = (t for t in leaves_of(thing, DEEPEST) if isinstance(t, torch.Tensor))
            return not (thing is ABSENT or isinstance(thing, (nn.Module, nn.Parameter)) or any(map(excluded, tensors)))

        return LeftBehind([v for v in self.values if fits(v[2])], [c for c in self.contents if fits(c[1])])


class Counting:
    """Stands for a number in a trace, which forward adds to and reads for nothing else.

        self.calls += 1             # a planned step does the same, and does not depend on the number

    It can be added to, and any other use of it raises.

    - by: how much has been added to it.
    - reads: other uses of it, and of all numbers that come from it. There is one such list for each number.
    """

    __slots__ = ("by", "reads")

    def __init__(self, by: int, reads: list[str]) -> None:
        self.by, self.reads = by, reads

    def __add__(self, other: Any) -> Counting:
        return Counting(self.by + other, self.reads) if type(other) is int else self._read(other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Counting:
        return Counting(self.by - other, self.reads) if type(other) is int else self._read(other)

    def _read(self, *_: Any) -> NoReturn:
        self.reads.append("read")
        raise TypeError("a number that forward counts up is read for something else, too")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int


for _name in vars(int).keys() - vars(Counting).keys() - {"__new__", "__getattribute__"}:
    setattr(Counting, _name, Counting._read)


class AttributesKept:
    """Puts attributes, members and hooks back after a trace, and says which of them forward changed.

    - set_anew: attributes that each run sets, to tensors of its own.
    """

    def __init__(
        self, model: nn.Module, ignored: Collection[str] = (), run: Any = None, given: Sequence[Any] = ()
    ) -> None:
        """Note what is there. ignored, run, given: as for `attribute_owners`."""
        owners = attribute_owners(model, ignored, run, given)
        self._tables = [(name, table, dict(table)) for name, table in tables_of_owners(owners)]
        self._by_name: dict[str, Any] = {name: table for name, table, _ in self._tables}
        self._of_tensors = [(vars(p), dict(vars(p))) for p in model.parameters()]
        self._classes = [(kind, dict(vars(kind))) for _, kind in owners if isinstance(kind, type)]
        self._unchecked = unchecked = (CHECKED_ELSEWHERE | frozenset(ignored)) - {"training"}

        def tables_of(*kinds: str) -> list[tuple[str, str, dict[Any, Any], dict[Any, Any]]]:
            modules = model.named_modules()
            return [(name, kind, getattr(m, kind), dict(getattr(m, kind))) for name, m in modules for kind in kinds]

        members = [kind for kind in _MEMBERS if kind not in ignored]
        self._members, self._hooks = tables_of(*members), tables_of("_forward_hooks", "_forward_pre_hooks")
        self.set_anew: tuple[SetValue, ...] = ()
        self._counted: Callable[[], bool] = bool
        self.counted_in_forward = False  # all that `counting` was told of, when forward ended
        values = ((name, value) for name, _, before in self._tables for value in before.values())
        leaves = ((name, leaf) for name, value in values for leaf in leaves_of(value, DEEPEST))
        self._generators = {id(g): (name, g, _drawn_from(g)) for name, g in leaves if isinstance(g, GENERATORS)}
        found = (pair for name, table, _ in self._tables for pair in _containers(name, table, unchecked))
        self._containers = {id(c): (path, c, copied(c)) for path, c in found}
        classes = ((kind.__name__, vars(kind), before) for kind, before in self._classes)
        self._imports = imports_heard(functools.partial(as_before, [*self._tables, *classes], self._containers))

    def __enter__(self) -> AttributesKept:
        self._imports.__enter__()
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
            if key in table and before.get(key, ABSENT) is not table[key]
            if may_be_set_anew(table, key, before.get(key, ABSENT))
        )
        return self.set_anew

    def spoil(self, thing: Any) -> None:
        """Put a thing into attributes that each run sets anew. Another trace shows whether they are read."""
        for found in self.set_anew:
            self._by_name[found.owner][found.key] = thing

    def pass_over(self, reads: AttributeReads, counters: Sequence[SetValue]) -> None:
        """Let plans not depend on what the attributes in `set_anew`, and counters, hold before a run."""
        for found in (*self.set_anew, *counters):
            reads.pass_over(self._by_name[found.owner], found.key)

    @contextlib.contextmanager
    def counting(self, counters: Sequence[SetValue]) -> Iterator[Callable[[], bool]]:
        """A context for a trace in which attributes can be added to, and not be read otherwise.

        - counters: these attributes, and how much forward adds to each.

        Gives a function that tells, once the trace is over, whether forward has added just that, and backward nothing.
        """
        tables = self._by_name
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
        return self._changes() != ()

    def changes(self) -> tuple[SetValue, ...]:
        """Attributes that now have another plain value.

        Raises a Refusal where anything else changed, because a planned step would not change it. Its way is
        `StateChanges` where a first run may have left it.
        """
        return or_raise(self._changes())

    def _changes(self) -> tuple[SetValue, ...] | Refusal:
        for name, kind, members, before in self._members:
            for key in _exchanged(members, before):
                change = "removes" if key not in members else "exchanges" if key in before else "adds"
                filled = kind == "_buffers" and before.get(key) is None
                return Refusal(
                    f"forward {change} the {_MEMBERS[kind]} {f'{name}.{key}'.lstrip('.')}; a planned step would not. "
                    "Where only the first forward does so, run it before memplan.apply",
                    StateChanges("", at_first=True) if filled else None,
                )
        for name, generator, state in self._generators.values():
            if _drawn_from(generator) != state:
                return Refusal(
                    f"forward draws from a {type(generator).__name__} of its own; a planned step would take the same "
                    "number each time. Draw it outside of forward and pass it in, or use torch's generator",
                    StateChanges(name),
                )
        for path, container, before in self._containers.values():
            if not is_unchanged(before, container):
                return Refusal(
                    f"forward changes the {type(container).__name__} {path}; a planned step would not. Return it from "
                    "forward, or keep such state in a buffer",
                    StateChanges(path, at_first=True),
                )
        changed = []
        anew = {(name, key): value for name, key, value in self.set_anew}
        for name, table, before in self._tables:
            for key, value in table.items():
                old = before.get(key, ABSENT)
                if key in self._unchecked or old is value or (old is not ABSENT and is_unchanged(old, value)):
                    continue
                if anew.get((name, key), ABSENT) is value:
                    continue
                if not is_plain(value) or isinstance(table, MappingProxyType):
                    return Refusal(
                        f"forward sets the attribute {name}.{key} to a {type(value).__name__}; a planned step would "
                        "not. Return it from forward, or keep such state in a buffer",
                        StateChanges(name, at_first=True),
                    )
                changed.append(SetValue(name, key, value))
        return tuple(changed)

    def left(self) -> LeftBehind:
        """What forward has left so far in attributes, members, and containers."""
        tables = [(table, before, self._unchecked) for _, table, before in self._tables]
        tables += [(members, before, frozenset()) for _, _, members, before in self._members]
        for kind, before in self._classes:
            names = {name for name in (*before, *vars(kind)) if not name.startswith(("__", "_abc_"))}
            tables.append((NamedTable.of_class(kind, names), before, frozenset(before) - names))
        values = [
            (table, key, table.get(key, ABSENT))
            for table, before, unchecked in tables
            if isinstance(table, MutableMapping)
            for key in _exchanged(table, before)
            if key not in unchecked
        ]
        contents = [(c, copied(c)) for _, c, before in self._containers.values() if not is_unchanged(before, c)]
        return LeftBehind(values, contents)

    def settled(self, values: Sequence[SetValue]) -> LeftBehind:
        """These values, and hooks that forward has added to submodules, as what it has left."""
        left = [(self._by_name[name], key, value) for name, key, value in values]
        left += [(hooks, k, hooks[k]) for _, _, hooks, were in self._hooks for k in hooks if k not in were]
        return LeftBehind(left, [])

    def __exit__(self, *error: Any) -> None:
        self._imports.__exit__(*error)
        self.restore()

    def restore(self) -> None:
        """Put back what there was."""
        for _, _, hooks, were in self._hooks:
            for key in [k for k in hooks if k not in were]:
                del hooks[key]
        for _, _, members, before in self._members:
            if _exchanged(members, before):
                _restore(members, before)
        for _, table, before in self._tables:
            if isinstance(table, MutableMapping):
                for key in [k for k in table if k not in before]:
                    del table[key]
                for key, value in before.items():
                    if table.get(key, ABSENT) is not value:
                        table[key] = value
        for _, generator, state in self._generators.values():
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = pickle.loads(state)
            else:
                generator.__setstate__(pickle.loads(state))  # type: ignore[union-attr]
        for table, before in self._of_tensors:
            if table != before:
                _restore(table, before)
        for kind, before in self._classes:
            for key in [k for k in vars(kind) if k not in before and not k.startswith(("__", "_abc_"))]:
                delattr(kind, key)
            for key, value in before.items():
                if vars(kind).get(key, ABSENT) is not value and not key.startswith(("__", "_abc_")):
                    setattr(kind, key, value)
        for _, container, before in self._containers.values():
            if not is_unchanged(before, container):
                _restore(container, before)


def _drawn_from(generator: Any) -> bytes:
    """The state of a generator of Python's or NumPy's own."""
    is_numpys = isinstance(generator, np.random.Generator)
    return pickle.dumps(generator.bit_generator.state if is_numpys else generator.__getstate__())


_OF_ONE_PLACE = {"place": list[int]()}  # to compare with: calls hold more references where Dynamo looks at frames


def _is_new(home: Any, key: Any) -> bool:
    """Whether a value of a container is a tensor, plain, or a container of such values that nothing else refers to."""
    if isinstance(home[key], torch.Tensor) or is_plain(home[key]):
        return True
    of_one_place = sys.getrefcount(_OF_ONE_PLACE["place"])
    if type(home[key]) not in (dict, list, tuple) or sys.getrefcount(home[key]) > of_one_place:
        return False
    children = home[key] if isinstance(home[key], dict) else range(len(home[key]))
    return all(_is_new(home[key], child) for child in children)


def _exchanged(members: Table, before: Table) -> list[str]:
    return [key for key in {**before, **members} if members.get(key, ABSENT) is not before.get(key, ABSENT)]


def _restore(container: Any, before: Any) -> None:
    if isinstance(container, np.ndarray):
        container[...] = before
        return
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(before)
    else:
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
            children = items_of(value) if isinstance(value, dict) else enumerate(value)
            pending.extend(
                (f"{path}[{k!r}]", v) for k, v in children if type(v) not in OF_NO_PARTS and isinstance(v, CONTAINERS)
            )
