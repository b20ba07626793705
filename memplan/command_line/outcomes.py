"""What commands give, and what the exit status means."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
DONE, MISTAKEN, NO_FIT = 0, 1, 3  # 2 is argparse's own


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command has to say.

    - text: for people.
    - facts: for programs, as JSON can hold them; bytes and seconds as whole figures.
    - status: the exit status.
    """

    text: str
    facts: dict[str, Any]
    status: int = DONE


class Mistake(Exception):
    """Something that the user can put right. It is shown as what is wrong, its cause and the next step."""

    def __init__(self, what: str, cause: str, next_step: str) -> None:
        super().__init__(what)
        self.what, self.cause, self.next_step = what, cause, next_step


def nearest(name: str, names: Iterable[str]) -> str:
    """The names that are most like this one, for a message: "'llama', 'llama4'"; empty where none is."""
    by_lower = {other.lower(): other for other in names}
    found = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)
    return ", ".join(repr(by_lower[other]) for other in found)
