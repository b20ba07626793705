"""What code names: globals, closure variables and methods that a function may read or write, read from its bytecode.

A `NamedTable` has the values of such names, like the `__dict__` of an object. For example

    def forward(self, x):
        return helpers.scaled(x, CONFIG.scale) if self.small() else x * factor

names the globals `helpers.scaled` and `CONFIG.scale`, its own method `small`, and the closure variable `factor`.
"""

from __future__ import annotations

import dis
import functools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, fields
from types import CellType, CodeType
from typing import Any, NamedTuple

NameChain = tuple[str, ...]  # a name, and the attributes that are read from what it names: ("CONFIG", "scale")

_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"})
_CLOSURE = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "STORE_DEREF", "DELETE_DEREF", "LOAD_FROM_DICT_OR_DEREF"})
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"})
_IMPORTS = frozenset({"IMPORT_NAME", "IMPORT_FROM"})
_HANDLERS = frozenset({"PUSH_EXC_INFO", "SETUP_FINALLY", "SETUP_WITH"})  # of `try` and `with`
_BETWEEN = frozenset({"PUSH_NULL", "CACHE", "EXTENDED_ARG", "NOP", "COPY", "DUP_TOP"})


class NamedOn(NamedTuple):
    """A name on a line of a code object."""

    code: CodeType
    line: int
    name: str


@functools.lru_cache(maxsize=4096)
def names_by_line(code: CodeType) -> Mapping[int, Mapping[str, int]]:
    """Globals, closure variables and attributes that each line of a code object names, and how often it does."""
    found: dict[int, Counter[str]] = defaultdict(Counter)
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        positions = getattr(instruction, "positions", None)
        line = (positions.lineno if positions is not None else instruction.starts_line) or line
        if instruction.opname in _GLOBAL | _CLOSURE | _ATTRIBUTE | _IMPORTS:
            found[line][str(instruction.argval)] += 1
    return found


@dataclass(frozen=True, slots=True)
class CodeFacts:
    """What a function and the functions inside of it name.

    - globals, closure: with the attributes that are read from each.
    - imports: modules that the function imports itself, each with a name that it takes from there.
    - own: attributes of the first argument, which is `self` in a method.
    - others: attributes of anything else.
    - stored: globals that it assigns. sets: attributes that it assigns, of any object.
    - catches: what it has of `try` and `with`, either of which may catch errors.
    """

    globals: frozenset[NameChain]
    closure: frozenset[NameChain]
    imports: frozenset[NameChain]
    own: frozenset[str]
    others: frozenset[str]
    stored: frozenset[str]
    sets: frozenset[str]
    catches: frozenset[str]


@functools.lru_cache(maxsize=4096)
def facts_of_code(code: CodeType) -> CodeFacts:
    """What a code object names."""
    found: dict[str, set[Any]] = {one.name: set() for one in fields(CodeFacts)}
    first = code.co_varnames[:1] if code.co_argcount else ()
    kind, chain, imported = "", list[str](), ""

    def end() -> None:
        nonlocal kind
        if kind in ("globals", "closure"):
            found[kind].add(tuple(chain))
            found["others"].update(chain[1:])
            if kind == "closure" and chain[:1] == list(first) and len(chain) > 1:  # a function inside has it, too
                found["own"].add(chain[1])
        elif kind == "own" and chain:
            found["own"].add(chain[0])
            found["others"].update(chain[1:])
        kind = ""
        chain.clear()

    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if name in _BETWEEN:
            continue
        if name in _HANDLERS:
            found["catches"].add(name)
        if name == "STORE_ATTR":
            found["sets"].add(str(value))
        if name in _ATTRIBUTE and kind:
            chain.append(str(value))
            continue
        end()
        if name in _GLOBAL or name in _CLOSURE:
            kind = "globals" if name in _GLOBAL else "closure"
            chain.append(str(value))
            if name == "STORE_GLOBAL":
                found["stored"].add(str(value))
        elif name.startswith("LOAD_FAST"):
            kind = "own" if isinstance(value, str) and (value,) == first else ""
        elif name in _ATTRIBUTE:
            found["others"].add(str(value))
        elif name == "IMPORT_NAME":
            imported = str(value)
            found["imports"].add((imported,))
        elif name == "IMPORT_FROM":
            found["imports"].add((imported, str(value)))
    end()
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            facts = facts_of_code(inner)
            for name in ("globals", "closure", "imports", "stored", "sets", "catches"):
                found[name] |= getattr(facts, name)
            found["own"] |= {chain[1] for chain in facts.closure if chain[:1] == first and len(chain) > 1}
            found["others"] |= facts.own | facts.others
    return CodeFacts(**{name: frozenset(names) for name, names in found.items()})


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
