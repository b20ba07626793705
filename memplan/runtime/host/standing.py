"""Copies of frozen parameters that stay on the device between steps, and checks of whether one is stale.

With `keep_frozen=True`, users promise that nothing writes to frozen parameters behind autograd's back. Everything else
is noticed when the next step begins: another parameter in its place, other memory, a write that autograd counts. Writes
through `.data` are not counted. Those that change all of a parameter are noticed nevertheless, because a few of its
bytes are compared as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from memplan import torch_private as private
from memplan.capture.ops.layout import storage_key

_SAMPLES = 64  # words of a parameter that are compared


@dataclass(frozen=True, eq=False, slots=True)
class Contents:
    """What a parameter held at a moment.

    - version, storage, offset: its version, and where its contents lay.
    - sample: words from all over its memory.
    """

    parameter: torch.Tensor
    version: int
    storage: Any
    offset: int
    sample: list[int]

    @staticmethod
    def of(parameter: torch.Tensor) -> Contents:
        offset, storage = int(parameter.storage_offset()), private.known_storage(parameter)
        return Contents(parameter, parameter._version, storage, offset, _words(parameter))

    def is_in(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is this one, and holds what it held then as far as can be seen."""
        return (
            parameter is self.parameter
            and parameter._version == self.version
            and storage_key(parameter) == self.storage.cdata
            and int(parameter.storage_offset()) == self.offset
            and _words(parameter) == self.sample
        )


def _words(parameter: torch.Tensor) -> list[int]:
    """A few words of a parameter's memory, spread over all of it."""
    start = int(parameter.storage_offset()) * parameter.element_size()
    dtype, size_bytes = (torch.uint8, 1) if start % 8 or parameter.nbytes < 8 * _SAMPLES else (torch.int64, 8)
    count = parameter.nbytes // size_bytes
    step = max(1, count // _SAMPLES) | 1  # odd, so that rows of a matrix are read in different columns
    words = torch.empty(0, dtype=dtype, device=parameter.device)
    storage = parameter.detach().untyped_storage()
    return words.set_(storage, start // size_bytes, (-(-count // step),), (step,)).tolist()


class Standing:
    """The copies of one planned model that are on the device between two steps."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Contents, torch.Tensor]] = {}  # by the parameter's id
        self._stream: Any = None  # on which they were made

    def __len__(self) -> int:
        return len(self._copies)

    def keep(self, parameters: Iterable[torch.Tensor], stream: Any) -> None:
        """Keep the copies of these parameters as a step begins, and free all others and stale ones.

        stream: the stream that the step computes on. The allocator takes memory back as if it were used on the stream
        that it was made on. So on another stream all copies are made anew.
        """
        wanted = {id(parameter): parameter for parameter in parameters if stream == self._stream}
        self._copies = {key: copy for key, copy in self._copies.items() if key in wanted and copy[0].is_in(wanted[key])}

    def take(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The copy of a parameter, which belongs to the step from then on; None where there is none."""
        found = self._copies.pop(id(parameter), None)
        return None if found is None else found[1]

    def free(self) -> None:
        self._copies = {}

    def leave(self, copies: Iterable[tuple[Contents, torch.Tensor]], stream: Any) -> None:
        """Take copies from a step that ends. Each comes with what its parameter held when the step began.

        stream: the stream that the step computes on.
        """
        self._stream = stream
        self._copies = {
            id(contents.parameter): (contents, memory)
            for contents, memory in copies
            if contents.is_in(contents.parameter)
        }
