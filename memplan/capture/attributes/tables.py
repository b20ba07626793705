"""Python attributes that forward may read or write, as tables: name, and what each attribute is.

These are the attributes of every submodule, of the objects that these refer to (configs and what hangs on them), of the
classes of both, and of parameters of subclasses; and globals, closure variables and class attributes that the model's
code names (`named_state`). For example, the model `m` with `m.config.scale = 2` has the tables ("M", vars(m)),
("config", vars(m.config)), ("class M", vars(M)).
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.attributes.code_facts import NamedTable, items_of, slots_of
from memplan.capture.attributes.named_state import NamedState, is_own

Table = Mapping[str, Any]
_T = TypeVar("_T")

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
OF_NO_PARTS = frozenset(PLAIN)  # the rows of a data set are many
CONTAINERS = (dict, list, tuple, set, frozenset, deque, np.ndarray)
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
_OF_HOOKS = "__composable_api"  # what fully_shard's hooks keep on a module: forward itself never sees it
_OF_PYTHON = ("torch.", "builtins", "collections", "abc", "typing")  # modules whose classes are taken to stay
_CODE = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)
DEEPEST = 5
ABSENT = object()


def is_plain(value: Any) -> bool:
    """Whether a value can't change in place, and equality says all about it."""
    if isinstance(value, (tuple, frozenset)):
        return all(is_plain(v) for v in value)
    return isinstance(value, PLAIN)


def attribute_tables(
    model: nn.Module, ignored: Collection[str] = (), run: Any = None, given: Sequence[Any] = ()
) -> list[tuple[str, Table]]:
    """(name, attributes) of all `attribute_owners`."""
    return tables_of_owners(attribute_owners(model, ignored, run, given))


def tables_of_owners(owners: Sequence[tuple[str, Any]]) -> list[tuple[str, Table]]:
    return [(name, owner if isinstance(owner, NamedTable) else vars(owner)) for name, owner in owners]


def attribute_owners(
    model: nn.Module, ignored: Collection[str] = (), run: Any = None, given: Sequence[Any] = ()
) -> list[tuple[str, Any]]:
    """All objects whose attributes forward may read, with unique names.

    These are submodules, plain objects behind them, the classes of both, and objects that a user's classes have;
    parameters and buffers of subclasses, and objects that these carry; tables of what code names, and objects behind
    those.

    - ignored: attributes of modules behind which nothing is looked for.
    - run: what the step calls, where it is not the model's forward alone.
    - given: arguments of the call, behind which objects are looked for as well.
    """
    found: list[tuple[str, Any]] = []
    seen = {id(module) for module in model.modules()}
    classes: dict[type, None] = {}
    for name, module in model.named_modules():
        found.append((name or type(model).__name__, module))
        classes.update(dict.fromkeys(type(module).__mro__))
        for attribute, value in vars(module).items():
            known = attribute in CHECKED_ELSEWHERE or attribute == "forward" or attribute.startswith(_OF_HOOKS)
            if not known and attribute not in ignored:
                for path, thing in _objects(value, f"{name}.{attribute}".lstrip("."), seen, DEEPEST):
                    found.append((path, thing))
                    classes.update(dict.fromkeys(type(thing).__mro__))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not (private.is_ordinary(tensor) or isinstance(tensor, private.FakeTensor)):  # packed weights have scales
            found.append((name, tensor))
            for attribute, value in vars(tensor).items():
                found += _objects(value, f"{name}.{attribute}", seen, DEEPEST)
    for index, argument in enumerate(given):
        found += _objects(argument, f"argument {index}", seen, DEEPEST)
    for title, table in NamedState(model, run).tables:
        found.append((title, table))
        for key, value in table.items():
            for path, thing in _objects(value, f"{title}: {key}", seen, DEEPEST):
                found.append((path, thing))
                classes.update(dict.fromkeys(type(thing).__mro__))
    pending = [*classes]
    while pending:
        if not f"{(kind := pending.pop()).__module__}.".startswith(_OF_PYTHON):
            title = f"class {kind.__module__}.{kind.__qualname__}"
            found.append((title, kind))
            for key, value in vars(kind).items() if is_own(kind) else ():
                held = isinstance(value, (*CONTAINERS, nn.Module)) or is_own(type(value))
                for path, thing in _objects(value, f"{title}.{key}", seen, DEEPEST) if held and key[:2] != "__" else ():
                    found.append((path, thing))
                    pending += [base for base in type(thing).__mro__ if base not in classes]
                    classes.update(dict.fromkeys(type(thing).__mro__))
    return found


def _objects(value: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """Objects with attributes of their own that are reached from an attribute, through containers too.

    Containers and tensors can be such objects: those of a user's class, and others that have attributes now.
    """
    unlooked = (*PLAIN, *_CODE, type, nn.Parameter, private.FakeTensor, np.ndarray)
    if depth == 0 or isinstance(value, unlooked) or id(value) in seen:
        return
    seen.add(id(value))
    children: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        children = [(f"{path}[{k!r}]", v) for k, v in items_of(value) if type(v) not in OF_NO_PARTS]
        children += [(f"{path} key {i}", k) for i, k in enumerate(dict.keys(value)) if type(k) not in OF_NO_PARTS]
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        children = [(f"{path}[{i}]", v) for i, v in enumerate(value) if type(v) not in OF_NO_PARTS]
    elif isinstance(value, weakref.ref):
        children = [(f"{path}()", value())]
    elif isinstance(value, nn.Module):  # one that a list hides from the model
        for name, inner in value.named_modules(prefix=path):
            if inner is value or id(inner) not in seen:
                seen.add(id(inner))
                yield name, inner
                children += [(f"{name}.{k}", v) for k, v in vars(inner).items() if k not in CHECKED_ELSEWHERE]
    elif isinstance(value, ContextVar):
        yield path, (table := NamedTable.of_context(value))
        children = [(f"{path}.get()", v) for v in table.values()]
    elif slots := slots_of(value):
        yield f"{path} (slots)", (table := NamedTable.of_slots(value, slots))
        children = [(f"{path}.{k}", v) for k, v in table.items()]
    own = None if isinstance(value, nn.Module) else getattr(value, "__dict__", None)
    if isinstance(own, dict) and (own or is_own(type(value)) or not isinstance(value, (*CONTAINERS, torch.Tensor))):
        yield path, value
        children += [(f"{path}.{k}", v) for k, v in own.items()]
    for name, child in children:
        yield from _objects(child, name, seen, depth - 1)


def held_in(model: nn.Module, kind: type[_T]) -> list[_T]:
    """Tensors or generators among the attributes of a model, and in containers there; parameters and buffers too."""
    values = (value for _, table in attribute_tables(model) for value in table.values())
    found = {id(leaf): leaf for value in values for leaf in leaves_of(value, DEEPEST) if isinstance(leaf, kind)}
    return list(found.values())


def leaves_of(value: Any, depth: int) -> Iterator[Any]:
    """A value, or the values in it where it is a container."""
    if depth == 0 or not isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        yield value
        return
    for child in dict.values(value) if isinstance(value, dict) else value:
        yield from leaves_of(child, depth - 1)


_OF_NO_CONCERN = CHECKED_ELSEWHERE | {"forward"}  # which is exchanged while the model's own forward runs


def attributes_in_short(module: nn.Module) -> tuple[Any, ...]:
    """Modes and attributes of a module and those in it, as far as they are cheap to compare."""
    return tuple((inner.training, _table_in_short(vars(inner))) for inner in module.modules())


def state_in_short(module: nn.Module, run: Any = None) -> tuple[Any, ...]:
    """Python state that the code of a module, or of `run`, may read, as far as it is cheap to compare."""
    sharded = {name for name, p in module.named_parameters() if private.is_sharded(p)}  # which are whole while it runs
    tables = attribute_tables(module, run=run)
    return tuple((name, _table_in_short(table)) for name, table in tables if name not in sharded)


def _table_in_short(table: Table) -> tuple[tuple[str, Any], ...]:
    return tuple((key, _in_short(value)) for key, value in table.items() if key not in _OF_NO_CONCERN)


def has_traced_tensors(module: nn.Module, run: Any = None) -> bool:
    """Whether the code of a module, or of `run`, may read a tensor in Python state that the trace in progress made."""
    values = (v for _, t in attribute_tables(module, run=run) for k, v in t.items() if k not in _OF_NO_CONCERN)
    return any(isinstance(leaf, private.FakeTensor) for value in values for leaf in leaves_of(value, DEEPEST))


def _in_short(value: Any) -> Any:
    """A value that does not change in place, or as much of any other value as is cheap to compare."""
    if is_plain(value):
        return value
    if isinstance(value, (list, tuple, deque)):
        return tuple(v if is_plain(v) else id(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, v if is_plain(v) else id(v)) for k, v in items_of(value))
    return (id(value), value._version) if isinstance(value, torch.Tensor) else id(value)
