"""Other attributes in the place of those that modules and classes have, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def exchanged(home: Any, **values: Any) -> Iterator[None]:
    """A context in which a module or a class has other attributes: `exchanged(torch, compile=refuse)`."""
    before = {name: vars(home).get(name, _ABSENT) for name in values}
    try:
        for name, value in values.items():
            setattr(home, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                delattr(home, name)
            else:
                setattr(home, name, value)
