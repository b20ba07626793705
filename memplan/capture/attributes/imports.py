"""What modules do when forward imports them stays: Python runs their code once, so it must not be undone.

def forward(self, x):
    return kernels.cross_entropy(x)  # imports kernels.nvidia, which enters itself into kernels.REGISTRY
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from memplan import torch_private as private
from memplan.capture.attributes.snapshot import copied, is_unchanged
from memplan.capture.attributes.tables import ABSENT, Table


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
