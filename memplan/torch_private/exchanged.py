"""Other attributes in the place of those that modules and classes have, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def exchanged(home: Any, /, **values: Any) -> Iterator[None]:
    """A context in which a module, a class or an object has other attributes: `exchanged(torch, compile=refuse)`."""
    before = {name: vars(home).get(name, _ABSENT) for name in values}
    try:
        for name, value in values.items():
            _put(home, name, value)
        yield
    finally:
        for name, value in before.items():
            _put(home, name, value)


@contextlib.contextmanager
def made_errors(*kinds: type[Exception]) -> Iterator[list[Exception]]:
    """A context that gives the errors of these kinds, and of kinds derived from them, that are made in it."""
    made = list[Exception]()
    with contextlib.ExitStack() as stack:
        for kind in kinds:

            def init(error: Exception, *given: Any, _original: Any = kind.__init__) -> None:
                made.append(error)
                _original(error, *given)

            stack.enter_context(exchanged(kind, __init__=init))
        yield made


def _put(home: Any, name: str, value: Any) -> None:
    """Set an attribute, or delete it. A `__setattr__` of the object's class is not asked."""
    if isinstance(home, type):
        delattr(home, name) if value is _ABSENT else setattr(home, name, value)
    elif value is _ABSENT:
        vars(home).pop(name, None)
    else:
        vars(home)[name] = value
