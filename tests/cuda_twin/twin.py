"""The twin of a CUDA device, as Python sees it: its record of calls, and what can be set."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(sys.prefix) / "lib/cuda_twin"
KINDS = (
    "malloc", "free", "kernel", "copy", "set", "record", "wait", "event_sync", "event_query", "stream_sync",
    "stream_query", "device_sync", "host_alloc", "host_free", "map", "unmap", "graph",
    "alloc", "free_requested", "free_completed", "op", "read", "write",
)  # fmt: skip


class Call(NamedTuple):
    """One entry of the record.

    - kind: one of KINDS. The last six are PyTorch's own: its caching allocator, its ops, and their memory.
    - stream: the number of the stream; 0 is the default stream.
    - op: the number of the PyTorch op that ran, 0 for none.
    - a, b: copy: addresses of target and source. record, wait, event_sync, event_query: a is the event. Queries: b is 1
      for work that has ended. stream_sync: a is 1 for a copy that itself waits. kernel, op: a is the number of its
      name. read, write: a is the address, b is 1 on the device. Others: a is the address.
    - n: bytes. graph: how many calls the graph has that is launched.
    """

    kind: str
    stream: int
    op: int
    a: int
    b: int
    n: int


class _Entry(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("op", "a", "b", "n")] + [
        (name, ctypes.c_uint32) for name in ("kind", "stream")
    ]


@cache
def _device() -> Any:
    library = ctypes.CDLL(str(FOLDER / "libcudart.so.13"))
    library.twin_record.restype = ctypes.POINTER(_Entry)
    library.twin_record_size.restype = library.twin_notes.restype = ctypes.c_uint64
    library.twin_name.restype = ctypes.c_char_p
    library.twin_set_total.argtypes = [ctypes.c_uint64]
    return library


@cache
def _track() -> None:
    import torch

    torch.cuda.init()
    ctypes.CDLL(str(FOLDER / "tracker.so")).twin_track()


def missing() -> str | None:
    """Why this Python has no twin, None if it has one."""
    return None if (FOLDER / "tracker.so").exists() else "this Python's CUDA device is no twin: make test-twin"


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Record what is called meanwhile. The list is filled when the context ends.

    It begins with blocks that the caching allocator has given out before, as if on the default stream.
    """
    import torch

    _track()
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    calls = [Call("alloc", 0, 0, b["address"], 0, b["size"]) for b in blocks if b["state"] == "active_allocated"]
    _device().twin_set_recording(1)
    try:
        yield calls
    finally:
        _device().twin_set_recording(0)
        entries = _device().twin_record()
        for at in range(_device().twin_record_size()):
            e = entries[at]
            calls.append(Call(KINDS[e.kind], e.stream, e.op, e.a, e.b, e.n))


@contextmanager
def lazy() -> Iterator[None]:
    """Let work end when somebody waits for it, and not earlier."""
    _device().twin_set_lazy(1)
    try:
        yield
    finally:
        _device().twin_set_lazy(0)


def set_memory(size_bytes: int) -> None:
    """Let the device have this much memory, the context's 520 MiB included."""
    _device().twin_set_total(size_bytes)


def name_of(call: Call) -> str:
    """The name of a kernel or of an op, empty for other calls."""
    name: bytes = _device().twin_name(ctypes.c_uint64(call.a)) if call.kind in ("kernel", "op") else b""
    return name.decode()


def notes() -> dict[str, int]:
    """How often functions were called that no source of the twin defines."""
    name, found = ctypes.c_char_p(), {}
    while times := _device().twin_notes(ctypes.byref(name), ctypes.c_uint64(len(found))):
        found[(name.value or b"").decode()] = times
    return found
