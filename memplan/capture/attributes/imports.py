"""What modules do when forward imports them stays: Python runs their code once, so it must not be undone.

def forward(self, x):
    return kernels.cross_entropy(x)  # imports kernels.nvidia, which enters itself into kernels.REGISTRY
"""

from __future__ import annotations

import contextlib
import importlib.abc
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from memplan import torch_private as private
from memplan.capture.attributes.snapshot import copied, is_unchanged
from memplan.capture.attributes.tables import ABSENT, Table


class ImportsHeard(importlib.abc.MetaPathFinder):
    """A context that makes another around each import in it. Tensors that are made in an import are real ones."""

    def __init__(self, around: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        self.around, self.imports = around, False

    def __enter__(self) -> ImportsHeard:
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """What the finders after this one find, with a loader that all open contexts hear.

        Nothing for `importlib.reload` (target), which runs a module's code each time that forward runs.
        """
        heard = [finder for finder in sys.meta_path if isinstance(finder, ImportsHeard)]
        if target is not None or heard[0] is not self:  # the first has asked all finders
            return None
        after = sys.meta_path[sys.meta_path.index(self) + 1 :]
        others = (f for f in after if hasattr(f, "find_spec") and not isinstance(f, ImportsHeard))
        spec = next((s for f in others if (s := f.find_spec(fullname, path, target)) is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module") and not self.imports:
            spec.loader = _HeardLoader(spec.loader, heard)
        return spec


class _HeardLoader(importlib.abc.Loader):
    """Loads a module as another loader does, which the module has for its own from then on."""

    def __init__(self, loader: Any, heard: Sequence[ImportsHeard]) -> None:
        self._loader, self._heard = loader, heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # for code that only looks for a module

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        spec.loader = self._loader
        created: ModuleType | None = self._loader.create_module(spec)
        spec.loader = self
        return created

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        if self._heard[0].imports:
            self._loader.exec_module(module)
            return
        self._heard[0].imports = True
        try:
            with contextlib.ExitStack() as stack:
                for heard in self._heard:
                    stack.enter_context(heard.around())
                stack.enter_context(private.outside_of_tracing())
                self._loader.exec_module(module)
        finally:
            self._heard[0].imports = False


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
