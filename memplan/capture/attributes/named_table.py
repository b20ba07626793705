"""A table of attributes that is no `__dict__`: slots, a context variable, globals that code names."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterable, Iterator, MutableMapping
from contextvars import ContextVar
from types import CellType
from typing import Any

_ABSENT = object()


def items_of(held: dict[Any, Any]) -> ItemsView[Any, Any]:
    """The items that a dict itself holds. A subclass may make others when it is asked: transformers' lazy tables do."""
    return (OrderedDict if isinstance(held, OrderedDict) else dict).items(held)


class NamedTable(MutableMapping[str, Any]):
    """Some names of a namespace, as they are now. It is what `vars()` is for an object, restricted to these names.

    - get: gives the value of a name, or its second argument where there is none.
    - unchecked: further names, of objects that are not compared.
    - by_line: a name counts only if a line that runs has it, and a file of the user does.
    """

    def __init__(
        self, names: Iterable[str], get: Callable[..., Any], put: Callable[..., object], delete: Callable[[str], object]
    ) -> None:
        self.names, self._put, self._delete = frozenset(names), put, delete
        self.unchecked: frozenset[str] = frozenset()
        self.by_line = False
        self.get = get  # type: ignore[method-assign]  # itself, because a step asks for each name before each call

    def __getitem__(self, name: str) -> Any:
        value = self.get(name, _ABSENT) if name in self.names else _ABSENT
        if value is _ABSENT:
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        self._put(name, value)

    def __delitem__(self, name: str) -> None:
        self._delete(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in sorted(self.names) if self.get(name, _ABSENT) is not _ABSENT)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @staticmethod
    def of_namespace(namespace: dict[str, Any], names: Iterable[str]) -> NamedTable:
        """Globals of a file."""
        return NamedTable(names, namespace.get, namespace.__setitem__, namespace.__delitem__)

    @staticmethod
    def of_class(kind: type, names: Iterable[str]) -> NamedTable:
        """Attributes that a class itself has."""
        return NamedTable(names, vars(kind).get, functools.partial(setattr, kind), functools.partial(delattr, kind))

    @staticmethod
    def of_slots(owner: Any, names: Iterable[str]) -> NamedTable:
        """Values in the slots of an object."""
        return NamedTable(
            names, functools.partial(getattr, owner), functools.partial(setattr, owner),
            functools.partial(delattr, owner),
        )  # fmt: skip

    @staticmethod
    def of_cells(cells: dict[str, CellType]) -> NamedTable:
        """Closure variables of a function."""

        def put(name: str, value: Any) -> None:
            cells[name].cell_contents = value

        def delete(name: str) -> None:
            del cells[name].cell_contents

        return NamedTable(cells, lambda name, default=None: content_of(cells[name], default), put, delete)

    @staticmethod
    def of_context(variable: ContextVar[Any]) -> NamedTable:
        """The value of a context variable, which can't be deleted: traces and rehearsals run in a copied context."""
        return NamedTable(
            ["value"], lambda _, default=None: variable.get(default), lambda _, value: variable.set(value),
            lambda _: variable.set(None),
        )  # fmt: skip


def content_of(cell: CellType, default: Any = None) -> Any:
    """The value of a closure variable; `default` where it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return default


def slots_of(value: Any) -> tuple[str, ...]:
    """Names of the slots of an object of a class written in Python."""
    named = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    slots = (name for of_kind in named for name in ([of_kind] if isinstance(of_kind, str) else of_kind))
    return tuple(dict.fromkeys(name for name in slots if not name.startswith("__")))
