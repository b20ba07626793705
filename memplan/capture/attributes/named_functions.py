"""Functions and methods that can be islands: the calls around a failure, as their callers look them up by name.

    class Net(nn.Module):
        def forward(self, x):
            return self.mixed(scaled(x))

has the function `scaled`, in its file, and the method `mixed`, in the class. While a step is traced, another function
is in this place. A function in a closure, in a container or in a default argument has no such place.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, FunctionType, ModuleType
from typing import Any

from torch import nn

from memplan.capture.attributes.code_facts import facts_of_code
from memplan.capture.attributes.named_state import is_library_code


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """A function that callers look up as `home.name`.

    - home: a file's module; of a method, the class.
    - path: of the module whose method it is; None for a function.
    - attributes: names that a method, and others of its class that it names, read from anything.
    """

    function: FunctionType
    home: ModuleType | type
    name: str
    path: str | None = None
    attributes: frozenset[str] = frozenset()

    def of(self, module: nn.Module, path: str) -> NamedFunction | None:
        """This method of another module. None if it is not in its class, or runs layers: these are islands apart."""
        if not isinstance(self.home, type) or not isinstance(module, self.home):
            return None
        attributes = _attributes_named(self.function, type(module))
        layers = (child for name, child in module.named_children() if name in attributes)
        if any(True for child in layers for _ in child.parameters()):
            return None
        return NamedFunction(self.function, self.home, self.name, path, attributes)

    def part_of(self, module: nn.Module) -> nn.Module:
        """A module with the attributes and members that the method names. For a function, there are none."""
        part = nn.Module()
        for key, value in vars(module).items():
            if key in self.attributes or key == "training":
                vars(part)[key] = value
        for table in ("_modules", "_parameters", "_buffers"):
            vars(part)[table] = {k: v for k, v in getattr(module, table).items() if k in self.attributes}
        return part


def functions_called(calls: Sequence[FrameType], paths: Mapping[nn.Module, str]) -> list[NamedFunction]:
    """Functions that calls have made, each to the next, the innermost first.

    - calls: the outermost first.
    - paths: of the model's modules.
    """
    found = (_named(caller, callee, paths) for caller, callee in itertools.pairwise(calls))
    return [function for function in found if function is not None][::-1]


def _named(caller: FrameType, callee: FrameType, paths: Mapping[nn.Module, str]) -> NamedFunction | None:
    code, files = callee.f_code, (str(frame.f_globals.get("__name__")) for frame in (caller, callee))
    first = callee.f_locals.get(code.co_varnames[0]) if code.co_varnames else None
    owner = first[0] if isinstance(first, tuple) and first else first  # of a wrapper with *args
    owner = owner if isinstance(owner, nn.Module) and owner in paths else None
    homes: list[Any] = [sys.modules[name] for name in files if name in sys.modules]
    for home in (*homes, *(() if owner is None else type(owner).__mro__)):
        for name in sorted((set(caller.f_code.co_names) & vars(home).keys()) - {"forward"}):
            function = vars(home)[name]
            if not isinstance(function, FunctionType) or function.__code__ is not code or is_library_code(function):
                continue
            if str(function.__globals__.get("__name__")).startswith("memplan."):  # it stands for one that is an island
                continue
            cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
            if all(callee.f_locals.get(variable) is cell.cell_contents for variable, cell in cells):
                found = NamedFunction(function, home, name)
                return found.of(owner, paths[owner]) if owner is not None and isinstance(home, type) else found
    return None


def _attributes_named(method: FunctionType, kind: type) -> frozenset[str]:
    names, pending = set[str](), [method]
    while pending:
        facts = facts_of_code(inspect.unwrap(pending.pop()).__code__)
        new = (facts.own | facts.others) - names
        names |= new
        pending += [f for f in (getattr(kind, name, None) for name in new) if isinstance(f, FunctionType)]
    return frozenset(names)
