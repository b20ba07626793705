"""Python state outside of a model that its code names: globals, closure variables, attributes of classes.

A trace runs Python once; a planned step does not run it. So what forward and backward write to such state must be
noticed, and what they read there must be compared before each call, as attributes of modules are. For example

    STEPS, LOSSES = 0, []

    def forward(self, x):
        global STEPS
        STEPS += 1
        LOSSES.append(x.mean())
        return x * SCALE[STEPS > 10]

names STEPS, LOSSES and SCALE of its file. Names are found in the bytecode of the model's methods, and of the functions,
methods and classes that these name in turn. Code of PyTorch, of the standard library and of memplan is not looked into.
Of other installed packages only numbers, flags and tensors count: their containers are caches and registries.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import numbers
import random
import sys
import threading
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.attributes.code_facts import NameChain, NamedTable, content_of, facts_of_code, slots_of

_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "memplan", "triton"})
_PACKAGES = frozenset({"site-packages", "dist-packages"})  # also the user's own, and those below a virtual environment
_METHODS = ("__init__", "__call__", "forward")  # which calls run that do not name them
_OF_FUNCTIONS = ("forward", "setup_context", "backward")
_CODE = (
    type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, staticmethod, classmethod, property,
    functools.cached_property, functools.partial,
)  # fmt: skip
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, np.ndarray, UserDict, UserList, ChainMap)
_NAMESPACES = (
    SimpleNamespace, argparse.Namespace, threading.local, threading.Event, ContextVar, torch.optim.Optimizer,
)  # fmt: skip
_NUMBERS = (numbers.Number, range, slice)  # those of NumPy too
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_GLOBALS, _DEFAULTS = "globals of ", "defaults of "
_MOST = 256  # values of a container that are looked at for functions


def is_of_library(frame: FrameType) -> bool:
    """Whether a frame runs code of PyTorch, the standard library or memplan."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES


@dataclass(slots=True)
class _Namespace:
    """Globals of one file, closure variables of one function, or attributes of one class, as far as code names them."""

    title: str
    table: Callable[[set[str]], NamedTable]
    owned: bool  # of the user's own files, not of an installed package
    held: bool  # code has these values with it, and needs no name for them
    names: set[str] = field(default_factory=set)


class NamedState:
    """What the code of a model names.

    - tables: (title, table) of each namespace with names that count.
    - sets: attributes that it assigns, of any object. catches: it may catch errors.
    - names_data: the user's own code does so with `.data` of something; autograd does not count writes through that.
    """

    def __init__(self, model: nn.Module, run: Callable[..., Any] | None = None) -> None:
        """Look for it. run: what the step calls, where it is not the model's forward alone (a loss function)."""
        self._namespaces: dict[Any, _Namespace] = {}
        self._seen: set[Any] = set()
        self._pending: list[FunctionType] = []
        self._held: list[Any] = []
        self._classes: dict[type, None] = {}
        self._homes: dict[CodeType, list[type]] = {}  # classes that have a method of this code
        self._below: dict[type, list[type]] = {}  # of the classes, those that derive from one, itself included
        self._others: set[str] = set()
        self._modules = {id(module) for module in model.modules()}
        self._behind = set[int]()  # objects whose attributes were followed
        self._objects: list[Any] = [model]
        self.sets, self.catches, self.names_data = set[str](), False, False
        for module in model.modules():
            self._add_class(type(module))
        self._of_model = set(self._classes)  # whose attributes are looked at anyway
        self._reach(run)
        while self._pending or self._objects:
            while self._objects:
                self._look_behind(self._objects.pop())
            if self._pending:
                self._look_into(self._pending.pop())
            for kind in () if self._pending or self._objects else tuple(self._classes):
                for name in self._others & vars(kind).keys():
                    if is_own(kind) or not hasattr(torch.Tensor, name):  # mostly a tensor's: x.log()
                        self._reach(vars(kind)[name])
        self.tables = list(self._tables())

    def _look_behind(self, thing: Any) -> None:
        """Follow the class of an object, what the object has, and of a module its hooks and the modules in it."""
        for one in thing.modules() if isinstance(thing, nn.Module) else (thing,):
            if id(one) not in self._behind:
                self._behind.add(id(one))
                self._held.append(one)  # which stays alive, or another could have its id
                self._add_class(type(one))
                has, slots = getattr(one, "__dict__", {}), NamedTable.of_slots(one, slots_of(one)).values()
                hooks = [h for k, t in has.items() if k.endswith("_hooks") and isinstance(t, dict) for h in t.values()]
                follows = isinstance(one, nn.Module) or is_own(type(one))
                for value in (*has.values(), *slots, *hooks) if follows else ():
                    self._reach_code(inspect.getattr_static(value, "__wrapped__", value))  # the model's, if planned

    def _tables(self) -> Iterator[tuple[str, NamedTable]]:
        titles = set[str]()
        for namespace in self._namespaces.values():
            values = dict(namespace.table(namespace.names))
            names = {name for name, value in values.items() if _counts(value, namespace.owned)}
            others = {n for n in values.keys() - names if namespace.owned and not isinstance(values[n], _CODE)}
            names |= namespace.names - values.keys()  # which code has not assigned yet
            if names or others:
                title, number = namespace.title, 1
                while title in titles:
                    number += 1
                    title = f"{namespace.title} ({number})"
                titles.add(title)
                table = namespace.table(names)
                table.unchecked, table.by_line = frozenset(others), namespace.owned and not namespace.held
                yield title, table

    def _add_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if base in self._classes or is_library_code(base):
                continue
            self._classes[base] = None
            for above in base.__mro__:
                self._below.setdefault(above, []).append(base)
            for value in vars(base).values():
                function = _function(value)
                if isinstance(function, FunctionType):
                    self._homes.setdefault(function.__code__, []).append(base)
            run = _OF_FUNCTIONS if issubclass(base, torch.autograd.Function) else _METHODS
            owned = is_own(base)
            for name, value in vars(base).items():
                special = (name in run or (owned and name.startswith("__"))) and not (
                    name == "__init__" and issubclass(base, nn.Module)
                )
                if special and isinstance(_function(value), FunctionType):
                    self._reach(value)
                elif owned and not name.startswith("__"):
                    if isinstance(value, (*_CONTAINERS, nn.Module)) or is_own(type(value)):
                        self._reach_code(value)
            if issubclass(base, torch.autograd.Function):
                self._name_attributes(base, set(vars(base)))

    def _reach(self, thing: Any) -> None:
        """Follow what is called: a function in any wrapping, an object, a class."""
        while True:
            if isinstance(thing, functools.partial):
                given = {str(i): value for i, value in enumerate(thing.args)} | thing.keywords
                self._name_held(thing, "what a partial has", given)
                thing = thing.func
            elif isinstance(thing, MethodType):
                if not isinstance(thing.__self__, type) and id(thing.__self__) not in self._modules:
                    self._name_held(thing.__self__, f"owner of {thing.__qualname__}", {"self": thing.__self__})
                thing = thing.__func__
            elif isinstance(thing, (staticmethod, classmethod)):
                thing = thing.__func__
            elif isinstance(thing, property):
                thing = thing.fget
            elif isinstance(thing, (functools.cached_property, functools.partialmethod)):
                thing = thing.func
            elif isinstance(thing, functools._lru_cache_wrapper):
                thing = thing.__wrapped__
            else:
                break
        if isinstance(thing := _function(thing), FunctionType):
            key = thing.__code__, id(thing.__globals__), tuple(map(id, thing.__closure__ or ()))
            if key not in self._seen and not is_library_code(thing):
                self._seen.add(key)
                self._pending.append(thing)
        elif isinstance(thing, type):
            self._add_class(thing)
            if is_own(thing) and thing not in self._of_model:
                self._name_attributes(thing, vars(thing).keys())
        elif not isinstance(thing, (ModuleType, BuiltinFunctionType, torch.Tensor, type(None))):
            called = callable(thing) and not is_library_code(type(thing))
            if id(thing) not in self._behind and (isinstance(thing, nn.Module) or is_own(type(thing)) or called):
                self._objects.append(thing)

    def _look_into(self, function: FunctionType) -> None:
        facts = facts_of_code(function.__code__)
        homes = tuple(self._homes.get(function.__code__, ()))
        self._others |= facts.others if homes else facts.others | facts.own
        self.sets |= facts.sets
        self.catches |= bool(facts.catches)
        owned = not _is_installed(function.__module__)
        self.names_data |= owned and "data" in facts.others | facts.own | facts.sets
        for home in homes:  # what a method names by `self` or `cls`
            if home not in self._of_model:
                self._name_attributes(home, facts.own & {name for base in home.__mro__ for name in vars(base)})
            for other in dict.fromkeys((*self._below[home], *home.__mro__)):
                if other in self._classes:
                    for name in facts.own & vars(other).keys():
                        self._reach(vars(other)[name])
        arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
        defaults = dict(zip(reversed(arguments), reversed(function.__defaults__ or ())))
        self._name_held(function, f"{_DEFAULTS}{function.__qualname__}", defaults | (function.__kwdefaults__ or {}))
        for name in vars(function):
            self._name(
                id(vars(function)), f"attributes of {function.__qualname__}",
                functools.partial(NamedTable.of_namespace, vars(function)), owned, name,
            )  # fmt: skip
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        cells.pop("__class__", None)
        for name in cells:
            self._name(
                tuple(map(id, cells.values())), f"closure of {function.__qualname__}",
                lambda names: NamedTable.of_cells({n: cells[n] for n in names}), owned, name,
            )  # fmt: skip
            self._reach_code(content_of(cells[name]))
        for name, *attributes in facts.closure:
            if name in cells:
                self._name_value(content_of(cells[name]), attributes)
        for chain in facts.globals:
            if chain[0] in function.__globals__ or chain[0] in facts.stored:  # else it is a builtin
                self._name_global(function.__globals__, chain)
        for path, *names in facts.imports:
            module = sys.modules.get(path)
            if module is not None and not is_library_code(module):
                for name in names or facts.others & vars(module).keys():
                    self._name_global(vars(module), (name,))

    def _name_global(self, namespace: dict[str, Any], chain: NameChain) -> None:
        name, *attributes = chain
        title = str(namespace.get("__name__", "?"))
        self._name(
            id(namespace), f"{_GLOBALS}{title}", functools.partial(NamedTable.of_namespace, namespace),
            not _is_installed(title), name,
        )  # fmt: skip
        self._name_value(namespace.get(name), attributes)

    def _name_held(self, key: Any, title: str, values: dict[str, Any]) -> None:
        """Name what code has with it: default arguments, the object of a bound method, arguments of a partial."""
        values = {n: v for n, v in values.items() if isinstance(v, _CONTAINERS) or callable(v) or is_own(type(v))}
        values = {n: v for n, v in values.items() if id(v) not in self._modules}
        self._held.append(key)  # which stays alive, or another could have its id
        for name, value in values.items():
            table = functools.partial(NamedTable.of_namespace, values)
            owned = is_own(type(value)) or isinstance(value, (*_CONTAINERS, nn.Module))
            self._name((id(key), title), title, table, owned, name, held=True)
            self._reach_code(value)

    def _name_attributes(self, kind: type, names: Collection[str]) -> None:
        for name in set(names) - vars(torch.autograd.Function).keys():
            home = next(base for base in kind.__mro__ if name in vars(base))
            if isinstance(known := vars(home)[name], (dict, list, tuple)):  # a registry of functions or classes
                self._reach_code(known)
            self._name(
                home, f"class {home.__module__}.{home.__qualname__} as code names it",
                functools.partial(NamedTable.of_class, home), not _is_installed(home.__module__), name,
            )  # fmt: skip

    def _name(
        self, key: Any, title: str, table: Callable[[set[str]], NamedTable], owned: bool, name: str, held: bool = False
    ) -> None:
        if not (name.startswith("__") and name.endswith("__")):
            self._namespaces.setdefault(key, _Namespace(title, table, owned, held)).names.add(name)

    def _name_value(self, value: Any, attributes: list[str]) -> None:
        """Follow what a name stands for, and the attributes that are read from it."""
        if isinstance(value, ModuleType):
            if attributes and not is_library_code(value):
                self._name_global(vars(value), tuple(attributes))
            return
        if isinstance(value, type):
            if not is_library_code(value):
                self._add_class(value)
                if value not in self._of_model:  # of `cfg = Config` any attribute may be read
                    there = {n for kind in value.__mro__ if kind is not object for n in vars(kind)}
                    read = attributes[:1] or (there if is_own(value) else ())
                    self._name_attributes(value, there.intersection(read))
            return
        self._reach_code(value)

    def _reach_code(self, value: Any, depth: int = 3) -> None:
        """Follow functions, objects, and those in containers: `ACTIVATIONS[name](x)`."""
        if isinstance(value, (dict, list, tuple)):
            for inner in list(dict.values(value) if isinstance(value, dict) else value)[:_MOST] if depth else ():
                self._reach_code(inner, depth - 1)
        elif callable(value) or not is_library_code(type(value)):
            self._reach(value)


def backward_depends_on(node: Any) -> str | None:
    """Python state that the backward of a user's autograd function depends on, in words; None where there is none.

    It may be another when backward runs than when forward did: some training loops set the scale of an auxiliary loss
    in between. A number among the globals of a file that no function there assigns is taken to stay.

    node: of the autograd graph, which is the context of the function, too.
    """
    function = type(node)._forward_cls
    if is_library_code(function):
        return next(filter(None, map(state_behind, private.formulas_of_op(function))), None)
    for name, value in vars(node).items():
        if not isinstance(value, (torch.Tensor, nn.Module, type)) and is_own(type(value)):
            return f"the {type(value).__name__} that it has as ctx.{name}"
    for name, value in vars(node).items():
        if isinstance(value, type) and is_own(value):
            return f"the class {value.__qualname__} that it has as ctx.{name}"
    return state_behind(vars(function).get("backward"))


def state_behind(code: Any) -> str | None:
    """Python state that a function reads when it runs, in words; None where it reads none that may change."""
    for title, table in NamedState(nn.Identity(), code).tables:
        for name, value in table.items():
            constant = _is_constant(value)
            if constant and title.startswith(_DEFAULTS):
                continue
            if not (constant and title.startswith(_GLOBALS)) or _is_assigned(title.removeprefix(_GLOBALS), name):
                return f"{name} ({title})"
    return None


def _is_constant(value: Any) -> bool:
    """Whether a value is plain, or a tuple of such values."""
    kinds = (bool, int, float, str, type(None), torch.dtype)
    return all(map(_is_constant, value)) if type(value) is tuple else isinstance(value, kinds)


def _is_assigned(module: str, name: str) -> bool:
    """Whether a function or method of a file assigns this global."""
    there = [*vars(sys.modules.get(module, sys)).values()]
    methods = (value for kind in there if isinstance(kind, type) for value in vars(kind).values())
    functions = (f for f in map(_function, (*there, *methods)) if isinstance(f, FunctionType))
    return any(name in facts_of_code(f.__code__).stored for f in functions)


def _counts(value: Any, owned: bool) -> bool:
    """Whether a change of a value may change what code does. Functions, classes and modules are taken to stay.

    owned: a file of the user names it. Objects of installed packages have caches, and are taken to stay, too.
    """
    if isinstance(value, (*_NUMBERS, str, torch.Tensor, torch.dtype, type(None))):
        return True
    kinds = (*_CONTAINERS, *_NAMESPACES, *GENERATORS, nn.Module)
    return owned and not isinstance(value, _CODE) and (isinstance(value, kinds) or is_own(type(value)))


def _function(value: Any) -> Any:
    """The function of a static or class method, or in whose place a trace has another; anything else as it is."""
    value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    exchanged = isinstance(value, FunctionType) and str(value.__globals__.get("__name__")).startswith("memplan.")
    return getattr(value, "__wrapped__", value) if exchanged else value


def is_library_code(thing: Any) -> bool:
    """Whether code is of PyTorch, the standard library or memplan, or no Python code."""
    module = getattr(thing, "__name__" if isinstance(thing, ModuleType) else "__module__", None)
    top = str(module or "").partition(".")[0]
    return not top or (top in _LIBRARIES and top != "__main__")


def is_own(kind: type) -> bool:
    """Whether a class is the user's own: of no library and of no installed package."""
    return not is_library_code(kind) and not _is_installed(kind.__module__)


def own_modules() -> list[ModuleType]:
    """The modules of the user's own files."""
    there = [(name, m) for name, m in [*sys.modules.items()] if isinstance(m, ModuleType)]
    return [m for name, m in there if not is_library_code(m) and not _is_installed(name)]


@functools.lru_cache(maxsize=4096)
def _is_installed(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not _PACKAGES.isdisjoint(Path(file).parts)
