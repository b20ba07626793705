"""Copies between device and host memory, in slabs of pinned memory.

A program calls `open_slab`, `offload`, `prefetch`, `wait` and their like; each is a node that can be read. One slab of
pinned host memory serves one forward and its backward. The plan says where in it a value goes. A slab is one block of
PyTorch's allocator for pinned memory, with all that this rounds its size up to, so that it may be large enough for
plans of other batches too. A block that is too small goes back to the allocator.

A copy's source and target are kept alive until the copy has been waited for, so allocators need not know about streams.
Where a step is given up half way, its copies are waited for then (`Transfers.settle`).

With `keep_frozen=True`, copies of frozen parameters stay on the device between steps, and users promise that nothing
writes to these parameters behind autograd's back. Everything else is noticed when the next step begins: another
parameter in its place, other memory, a write that autograd counts. Writes through `.data` are not counted. Those that
change all of a parameter are noticed nevertheless, because a few of its bytes are compared as well.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memplan import torch_private as private
from memplan.capture.ops.layout import storage_key
from memplan.problem.packing import pinned_bytes
from memplan.runtime.host.streams import Direction, Streams, bytes_within, streams_for

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
        """Take copies from a step that ends, each with what its parameter held as the step began. stream: of `keep`."""
        self._stream = stream
        self._copies = {id(held.parameter): (held, memory) for held, memory in copies if held.is_in(held.parameter)}


class Transfers:
    """The copies of one planned model.

    - slabs: pinned memory that no forward is using.
    - allocations: how many slabs were ever made.
    - standing: copies that stay on the device between steps.
    - collectives: results of collectives that nobody has waited for, by id.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        self.device = device
        self._streams = streams
        self.slabs: list[torch.Tensor] = []
        self.allocations = 0
        self.standing = Standing()
        self.collectives: dict[int, torch.Tensor] = {}
        self._host: set[int] = set()
        self._reads: dict[int, list[Any]] = {}  # by the address of what is read
        # Copies that nobody has waited for: event, slab of the step, source, target.
        self._kept: dict[int, tuple[Any, weakref.ref[Slab], torch.Tensor, torch.Tensor]] = {}
        self._arriving: dict[int, Any] = {}  # copies of gradients to the host that nobody has waited for, by address

    @property
    def streams(self) -> Streams:
        """The streams, made with the first copy."""
        if self._streams is None:
            self._streams = streams_for(self.device)
        return self._streams

    def open(self, size_bytes: int) -> Slab:
        """A slab for one forward and its backward. Its memory comes back once nothing refers to the slab."""
        self._settle([event for event, slab, *_ in self._kept.values() if slab() is None])  # of steps given up
        fitting = [i for i, memory in enumerate(self.slabs) if memory.numel() >= size_bytes]
        if fitting:
            memory = self.slabs.pop(min(fitting, key=lambda i: self.slabs[i].numel()))
        else:
            del self.slabs[:]  # too small for this; host memory is for one size at a time
            memory = self.pinned(pinned_bytes(size_bytes))
            self.allocations += 1
        slab = Slab(self, memory)
        weakref.finalize(slab, self.slabs.append, memory).atexit = False
        return slab

    def begin(self, slab: Slab, direction: Direction, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        """Begin a copy. Source and target are kept alive until it has been waited for."""
        event = self.streams.copy(direction, source, target)
        self._keep(slab, event, source, target)
        return Ticket(event, target)

    def _keep(self, slab: Slab, event: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        self._kept[id(event)] = event, weakref.ref(slab), source, target

    def wait(self, ticket: Ticket) -> torch.Tensor:
        """Let what is computed from here on wait for a copy. Gives its target."""
        self._settle(() if ticket.event is None else (ticket.event,))
        return ticket.data

    def read(self, parameter: torch.Tensor, ticket: Ticket) -> None:
        """Note that a copy reads a parameter that lives on the host."""
        self._reads.setdefault(parameter.data_ptr(), []).append(ticket.event)

    def reads_done(self, parameter: torch.Tensor) -> None:
        """Return when no copy reads this parameter, which lives on the host, so that it can be written to."""
        for event in self._reads.pop(parameter.data_ptr(), ()):
            self.streams.finish(event)

    def arrived(self, gradient: torch.Tensor) -> None:
        """Return when a gradient can be read, if it is on the host."""
        if self._arriving and (event := self._arriving.get(gradient.data_ptr())) is not None:
            self.streams.finish(event)

    def all_reads_done(self) -> None:
        """Return when no copy reads any parameter that lives on the host. Every gradient has arrived by then.

        The CPU may step them next, and does not wait for copies by itself.
        """
        for events in list(self._reads.values()):
            for event in events:
                self.streams.finish(event)
        self._reads.clear()
        self._arriving.clear()

    def forward_reads_done(self) -> None:
        """Return, at the end of forward, when those copies are done that its ops have waited for.

        A device that was told to wait may be far behind, and parameters may be written to next where no backward
        follows. Copies on their way to backward are left: a write to what they read is an error in backward.
        """
        for address, events in list(self._reads.items()):
            for event in events:
                if id(event) not in self._kept:
                    self.streams.finish(event)
            self._reads[address] = [event for event in events if id(event) in self._kept]

    def keep(self, parameters: Iterable[torch.Tensor]) -> None:
        """Keep copies of these parameters on the device as a step begins, and free all others and stale ones."""
        if len(self.standing):
            self.standing.keep(parameters, self.streams.computing())

    def settle(self) -> None:
        """Wait for what is running, because a step was given up, and its memory will be freed."""
        self._settle([event for event, *_ in self._kept.values()])
        while self.collectives:
            with contextlib.suppress(RuntimeError):  # another rank has failed
                private.wait_for(self.collectives.popitem()[1])

    def _settle(self, events: Sequence[Any]) -> None:
        for event in events:
            self.streams.wait(event)
            self._kept.pop(id(event), None)

    def pinned(self, size_bytes: int) -> torch.Tensor:
        memory = self.streams.pinned(size_bytes)
        storage = memory.untyped_storage()
        self._host.add(storage._cdata)
        weakref.finalize(storage, self._host.discard, storage._cdata).atexit = False
        return memory

    def is_host(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is host memory that `pinned` made."""
        return storage._cdata in self._host


@dataclass(eq=False)
class Slab:
    """Pinned host memory of one forward and its backward."""

    transfers: Transfers
    memory: torch.Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Ticket:
    """A copy.

    - event: what to wait for; None where the copy was made in the step before.
    - data: its target, as bytes.
    - stride: of what is copied, where that is a gradient.
    """

    event: Any
    data: torch.Tensor
    stride: tuple[int, ...] = ()


def open_slab(store: Any, size_bytes: int) -> Slab:
    return store.transfers.open(size_bytes)  # type: ignore[no-any-return]


def offload(slab: Slab, tensor: torch.Tensor, offset_bytes: int) -> Ticket:
    """Begin to copy the memory behind `tensor` into the slab."""
    source = _bytes_of(tensor)
    return slab.transfers.begin(slab, "out", source, slab.memory[offset_bytes : offset_bytes + source.numel()])


def offload_gradient(slab: Slab, tensor: torch.Tensor) -> Ticket:
    """Begin to copy the memory behind a gradient into host memory of its own, which outlives the step."""
    source = _bytes_of(tensor)
    ticket = slab.transfers.begin(slab, "out", source, slab.transfers.pinned(source.numel()))
    return replace(ticket, stride=tensor.stride())


def prefetch(slab: Slab, source: Ticket | torch.Tensor) -> Ticket:
    """Begin to copy an offloaded value, or a parameter that lives on the host, into new memory on the device."""
    if isinstance(source, Ticket):
        held = source.data
    else:  # it had a storage of its own when it was planned, and may lie in a larger one by now (vector_to_parameters)
        start = int(source.storage_offset()) * source.element_size()
        held = bytes_within(source.detach().untyped_storage(), start, source.nbytes)
    target = torch.empty(held.numel(), dtype=torch.uint8, device=slab.transfers.device)
    ticket = slab.transfers.begin(slab, "in", held, target)
    if isinstance(source, torch.Tensor):
        slab.transfers.read(source, ticket)
    return ticket


def contents(parameter: torch.Tensor) -> Contents:
    """A record of what a parameter holds now, to tell later whether that has changed."""
    offset, storage = int(parameter.storage_offset()), private.known_storage(parameter)
    return Contents(parameter, parameter._version, storage, offset, _words(parameter))


def stayed(slab: Slab, parameter: torch.Tensor) -> Ticket:
    """The copy of a parameter that has stayed since the step before. Where there is none, begin to fetch one."""
    memory = slab.transfers.standing.take(parameter)
    return prefetch(slab, parameter) if memory is None else Ticket(None, memory)


def leave(slab: Slab, began: Sequence[Contents], copies: Sequence[torch.Tensor]) -> None:
    """Leave copies of parameters for the next step. began: what the parameters held when this step began."""
    transfers = slab.transfers
    transfers.standing.leave(zip(began, map(_bytes_of, copies), strict=True), transfers.streams.computing())


def wait(slab: Slab, ticket: Ticket) -> torch.Tensor:
    """The target of a copy. What follows waits for the copy."""
    return slab.transfers.wait(ticket)


def on_host(
    slab: Slab, ticket: Ticket, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int] | None, offset: int
) -> torch.Tensor:
    """A gradient on the host, which the CPU can read once it has `arrived`. stride: None is that of what was copied."""
    gradient = viewed_as(ticket.data, dtype, size, ticket.stride if stride is None else stride, offset)
    slab.transfers._arriving[gradient.data_ptr()] = ticket.event
    return gradient


def viewed_as(
    memory: torch.Tensor, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """A tensor over memory that was copied as bytes. offset: in elements."""
    empty = torch.empty(0, dtype=dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), offset, tuple(size), tuple(stride))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.detach().untyped_storage()
    return bytes_within(storage, 0, storage.nbytes())
