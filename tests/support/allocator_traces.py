"""Traces of PyTorch's CUDA allocator, to hold `memplan.problem.caching_allocator` to.

    python -m tests.support.allocator_traces FOLDER      # on a machine with a CUDA device

writes new ones. Each process has its own allocator, so each trace is recorded in one.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from memplan import torch_private as private
from memplan.problem.caching_allocator import CachingAllocator, Segment, segment_bytes

NEEDS_ALLOCATOR = pytest.mark.skipif(
    hasattr(torch.cuda, "stand_in"), reason="the stand-in for a CUDA device has no caching allocator"
)
FOLDER = Path(__file__).with_name("traces")
_LIMIT_BYTES = 600 << 20
_HELD_BYTES = 400 << 20  # about what random sequences hold
_SEGMENT = 1 << 46  # addresses of an expandable segment, in the replay
_TIES_BY_ADDRESS = torch.__version__.startswith("2.11.")  # of free blocks of one size, the lowest; since, the oldest's
KINDS = [(kind, expandable) for kind in ("random", "limited", "steps") for expandable in (False, True)]
KINDS.append(("switched", False))  # segments expand from the middle on


@dataclass(frozen=True)
class Trace:
    """What the allocator was asked for, and what it did.

    - torch: the version that was recorded.
    - limit_bytes: what it was allowed to reserve.
    - events: ("alloc", bytes, stream, address, reserved bytes after it), ("free", address, reserved), ("empty",
      reserved) for `empty_cache`, ("expand", reserved) where segments expand from here on, ("refused", bytes, stream,
      reserved), ("segment", address, reserved) before the request that a segment is made for. Without these, addresses
      are those of a device where segments lie one after the other, in the order in which they were made.
    """

    torch: str
    expandable: bool
    limit_bytes: int | None
    events: list[list[Any]]

    def save(self, path: Path) -> None:
        path.write_bytes(gzip.compress(json.dumps(asdict(self), separators=(",", ":")).encode(), mtime=0))

    @staticmethod
    def load(path: Path) -> Trace:
        return Trace(**json.loads(gzip.decompress(path.read_bytes())))


class _Placed(CachingAllocator):
    """An allocator whose segments lie where a device has put them. Of free blocks of one size, the address decides."""

    def __init__(self, expandable: bool, limit_bytes: int | None) -> None:
        super().__init__(expandable, limit_bytes)
        self.places: list[int] = []

    def _place(self, size_bytes: int) -> int:
        return self.places.pop() if self.places else super()._place(size_bytes)


def new_segment(allocator: CachingAllocator, size_bytes: int) -> int:
    """The address of a new segment for large blocks. All of it is free."""
    address = allocator._end
    allocator.restore([Segment(address, 0, False, False, ((segment_bytes(size_bytes), False, ""),))])
    return address


def first_difference(trace: Trace) -> str | None:
    """Where the replay does something else than the allocator did; None where it never does."""
    allocator = _Placed(trace.expandable, trace.limit_bytes)
    for index, (kind, *what, reserved_bytes) in enumerate(trace.events):
        address = None
        if kind == "segment":
            allocator.places.append(what[0])
            continue
        if kind == "alloc":
            address = allocator.allocate(what[0], what[1])
        elif kind == "free":
            allocator.free(what[0])
        elif kind == "empty":
            allocator.empty_cache()
        elif kind == "expand":
            allocator.expandable = True
        elif allocator.allocate(what[0], what[1]):
            return f"event {index}, {kind} {what}: the replay does not refuse it"
        if allocator.reserved_bytes != reserved_bytes:
            return f"event {index}, {kind} {what}: {allocator.reserved_bytes} reserved, recorded {reserved_bytes}"
        if address is not None and address != what[2]:
            return f"event {index}, {kind} {what}: at {address}"
    return None


def record(kind: str, expandable: bool, seed: int, count: int) -> Trace:
    """A trace of this process, which must not have used its CUDA device. Its allocator's setting is `expandable`."""
    torch.cuda.init()
    limit_bytes = None
    if kind == "limited":
        whole_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(_LIMIT_BYTES / whole_bytes)
        limit_bytes = int(_LIMIT_BYTES / whole_bytes * whole_bytes)
    torch.cuda.memory._record_memory_history(max_entries=1 << 30, stacks="python", context=None)
    marks: list[tuple[int, str]] = []
    if kind == "steps":
        _steps()
    else:
        switch = count // 2 if kind == "switched" else None
        _random_requests(random.Random(seed), count, marks, 2 if kind == "limited" else 1, switch)
    (recorded,) = torch.cuda.memory._snapshot()["device_traces"]
    return Trace(str(torch.__version__), expandable, limit_bytes, _events(recorded, marks))


def _random_requests(
    rng: random.Random, count: int, marks: list[tuple[int, str]], stream_count: int, switch: int | None
) -> None:
    """Ask for blocks of many sizes and free them.

    - marks: gets the number of requests before each `empty_cache`, and before segments expand.
    - switch: when they do from then on.
    """
    streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(stream_count - 1))]
    sizes = (1, 512, 513, 4096, 100_000, 600_000, (1 << 20) - 511, 1 << 20, (1 << 20) + 1, 2 << 20, 3 << 20)
    sizes += ((10 << 20) - 1, 10 << 20, 20 << 20, 33 << 20)
    held: list[torch.Tensor] = []
    done = 0
    for number in range(count):
        if number == switch:
            private.expand_segments()
            marks.append((done, "expand"))
        if held and (sum(t.nbytes for t in held) > _HELD_BYTES or rng.random() < 0.45):
            held.pop(rng.randrange(len(held)))
        elif rng.random() < 0.01:
            torch.cuda.empty_cache()
            marks.append((done, "empty"))
            continue
        else:
            size = rng.choice(sizes) if rng.random() < 0.5 else int(2 ** rng.uniform(9, 26))
            try:
                with torch.cuda.stream(rng.choice(streams)):
                    held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                pass
        done += 1
    held.clear()


def _steps() -> None:
    """Training steps of a convolutional net, by an optimizer with state."""
    from torch import nn

    def block(width: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())

    net = nn.Sequential(nn.Conv2d(3, 48, 3), *(block(48) for _ in range(4)), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net.append(nn.Linear(48, 1000)).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    for size in (96, 96, 80, 112, 96):
        net(torch.ones(8, 3, size, size, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _events(recorded: Iterable[dict[str, Any]], marks: list[tuple[int, str]]) -> list[list[Any]]:
    """The events of a trace, from what `_record_memory_history` has recorded."""
    events: list[list[Any]] = []
    segments: list[tuple[int, int, int]] = []  # (address, bytes, address in the replay)
    streams: dict[int, int] = {}
    reserved_bytes, end, done = 0, 2 << 20, 0
    waiting = list(marks)

    backed = Counter[int]()  # bytes by the start of their segment

    def start_of(address: int) -> int:
        return next(start for start, size, _ in segments if start <= address < start + size)

    def replayed(address: int) -> int:
        return next(there + address - start for start, size, there in segments if start <= address < start + size)

    for entry in recorded:
        action, address, size = entry["action"], entry.get("addr", 0), entry["size"]
        stream = streams.setdefault(entry["stream"], len(streams))
        while waiting and waiting[0][0] == done and action not in ("segment_free", "segment_unmap", "free_requested"):
            events.append([waiting.pop(0)[1], reserved_bytes])
        if action in ("segment_alloc", "segment_map"):
            reserved_bytes += size
            own = action == "segment_alloc"
            placed = own and _TIES_BY_ADDRESS
            if placed:
                events.append(["segment", address, reserved_bytes])
            if not any(start <= address < start + length for start, length, _ in segments):
                segments.append((address, size if own else 1 << 36, address if placed else end))
                end += size if own else _SEGMENT
            backed[start_of(address)] += size
        elif action in ("segment_free", "segment_unmap"):
            reserved_bytes -= size
            backed[start_of(address)] -= size
            segments = [s for s in segments if backed[s[0]]]
        elif action == "alloc":
            events.append(["alloc", size, stream, replayed(address), reserved_bytes])
        elif action == "free_completed":
            events.append(["free", replayed(address), reserved_bytes])
        elif action == "oom":
            events.append(["refused", size, stream, reserved_bytes])
        done += action in ("alloc", "free_completed", "oom")
    return events


def record_in_a_process(kind: str, expandable: bool, seed: int, count: int, path: Path) -> None:
    """Record a trace in a process of its own, into a file."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    arguments = [str(path), kind, str(int(expandable)), str(seed), str(count)]
    subprocess.run([sys.executable, "-m", "tests.support.allocator_traces", *arguments], check=True, env=environment)


def _main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        path, kind, *numbers = arguments
        record(kind, bool(int(numbers[0])), int(numbers[1]), int(numbers[2])).save(Path(path))
        return
    for kind, expandable in KINDS:
        name = f"{kind}_{'expandable' if expandable else 'default'}.json.gz"
        record_in_a_process(kind, expandable, 0, 1500, Path(arguments[0]) / name)


if __name__ == "__main__":
    _main(sys.argv[1:])
