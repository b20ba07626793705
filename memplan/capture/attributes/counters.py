"""Counters among Python attributes: forward adds to them, and reads them for nothing else.

    self.calls += 1             # a planned step does the same, and does not depend on the number

While a step is traced, a `Counting` stands for the number. It can be added to, and any other use of it raises.
"""

from __future__ import annotations

from typing import Any, NoReturn


class Counting:
    """Stands for a number in a trace.

    - by: how much has been added to it.
    - reads: other uses of it, and of all numbers that come from it. There is one such list for each number.
    """

    __slots__ = ("by", "reads")

    def __init__(self, by: int, reads: list[str]) -> None:
        self.by, self.reads = by, reads

    def __add__(self, other: Any) -> Counting:
        return Counting(self.by + other, self.reads) if type(other) is int else self._read(other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Counting:
        return Counting(self.by - other, self.reads) if type(other) is int else self._read(other)

    def _read(self, *_: Any) -> NoReturn:
        self.reads.append("read")
        raise TypeError("a number that forward counts up is read for something else, too")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int


for _name in vars(int).keys() - vars(Counting).keys() - {"__new__", "__getattribute__"}:
    setattr(Counting, _name, Counting._read)
