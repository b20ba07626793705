"""Devices: settings of their kernels, their libraries, the profiler."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import tempfile
import threading
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch.amp.grad_scaler import _MultiDeviceReplicator

from memplan.errors import MemplanError

_STANDARD_ERROR = threading.Lock()  # held while it goes elsewhere


def is_captured(device: torch.device) -> bool:
    """Whether what the device's current stream is given becomes part of a CUDA graph, and does not run now."""
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class MemoryRecord:
    """A context in which PyTorch's profiler records what this thread runs, and each allocation on a CPU.

    - events: all of them in order, once the context is left. Allocations are called "[memory]".

    PyTorch has one profiler for each process: one that runs already ends.
    """

    def __init__(self) -> None:
        self.events: list[Any] = []
        self._profiler = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)

    def __enter__(self) -> MemoryRecord:
        with _without_profiler_lines():
            self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        with _without_profiler_lines():
            self._profiler.__exit__(*error)
        results = self._profiler.kineto_results
        self.events = [] if results is None else sorted(results.events(), key=lambda event: event.start_ns())

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated at a time, beyond what there was at the beginning."""
        sizes = (int(event.nbytes()) for event in self.events if event.name() == "[memory]")
        return max(accumulate(sizes, initial=0))


class BlockRecord:
    """A context in which it is recorded what PyTorch's allocator is asked for on a CUDA device.

    - events: (address, bytes) of each block in order, (address, 0) where one is freed; known once the context is left.
      Empty where that can't be recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self.events: list[tuple[int, int]] = []

    def __enter__(self) -> BlockRecord:
        self._records = pytorch_allocates() and not user_records_blocks()
        if self._records:
            torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)
        return self

    def __exit__(self, *error: Any) -> None:
        if not self._records:
            return
        traced = torch.cuda.memory._snapshot()["device_traces"][self._index]
        torch.cuda.memory._record_memory_history(None)
        sizes = {"alloc": 1, "free_completed": 0}
        self.events = [(e["addr"], e["size"] * sizes[e["action"]]) for e in traced if e["action"] in sizes]


def user_records_blocks() -> bool:
    """Whether somebody has PyTorch's allocator record what it is asked for. It keeps one record alone."""
    return pytorch_allocates() and bool(torch._C._cuda_isHistoryEnabled())


@contextlib.contextmanager
def _without_profiler_lines() -> Iterator[None]:
    """A context that hides the start and stop lines that the profiler's C++ part writes to standard error.

    What else is written there in the meantime comes out at the end.
    """
    with _STANDARD_ERROR, contextlib.ExitStack() as stack:
        try:
            kept = os.dup(2)
        except OSError:  # there is none
            yield
            return
        stack.callback(os.close, kept)
        written = stack.enter_context(tempfile.TemporaryFile())
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            written.seek(0)
            for line in written:
                if not line.startswith(b"USDT:"):
                    os.write(2, line)


_PRECISIONS = tuple((backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn"))


def float32_precisions() -> dict[str, str]:
    """How precisely kernels multiply in float32, by backend and kind of op.

    `torch.get_float32_matmul_precision` raises where the settings were used that PyTorch recommends instead
    (`torch.backends.cuda.matmul.fp32_precision`).
    """
    get = torch._C._get_fp32_precision_getter
    found = {f"float32 precision of {backend} {op}": get(backend, op) for backend, op in _PRECISIONS}
    return {what: "ieee" if value == "none" else str(value) for what, value in found.items()}


def attention_order() -> tuple[int, ...]:
    """The kernels of attention in order of preference: the first that can serve a call is taken."""
    return tuple(torch._C._get_sdp_priority_order())


# What libraries beside PyTorch's allocator say of it.
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or the machine, had no memory left. A refusal that keeps it from happening is none."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    is_pytorchs = isinstance(error, RuntimeError) and not isinstance(error, MemplanError)
    return is_pytorchs and any(words in str(error) for words in _OUT_OF_MEMORY)


def unallocated_bytes(error: BaseException) -> int:
    """What the allocator had reserved and could not use, in pieces, when it ran out of memory. 0 if it does not say."""
    found = re.search(r"([\d.]+) (bytes|KiB|MiB|GiB) is reserved by PyTorch but unallocated", str(error))
    return 0 if found is None else int(float(found[1]) * 1024 ** ("bytes", "KiB", "MiB", "GiB").index(found[2]))


def wait_for_scaler_copies() -> None:
    """Let every `GradScaler` wait for copies of its scale from a GPU to the host."""
    original = _MultiDeviceReplicator.get

    def get(replicator: Any, device: torch.device) -> torch.Tensor:
        copied = device not in replicator._per_device_tensors and device.type == "cpu"
        found = original(replicator, device)
        if copied and replicator.master.is_cuda:
            torch.cuda.current_stream(replicator.master.device).synchronize()
        return found

    _MultiDeviceReplicator.get = get  # type: ignore[assignment,method-assign]


def blas_workspace_bytes(capability: tuple[int, int] | None = None) -> int:
    """Bytes of the workspace that PyTorch gives cuBLAS, for each thread and stream.

    capability: of the CUDA device; None is the current one.
    """
    known = getattr(torch._C, "_cuda_getCublasWorkspaceSize", None)
    if known is not None and capability is None:
        return int(known())
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(1024 * int(size) * int(count) for size, count in pairs)
    major, _ = capability or torch.cuda.get_device_capability()
    return 32 << 20 if major >= 9 else (2 * 4096 + 8 * 16) << 10


def kept_by_blas(device: torch.device) -> tuple[int, int]:
    """Bytes of the workspaces that a thread keeps: of cuBLAS, and of cuBLASLt, which adds biases.

    The second is 0 where they share one. PyTorch 2.15 keeps none: it takes one for each product. Workspaces that are
    there are given back, for it takes a product to see that.
    """
    with torch.cuda.device(device), torch.no_grad():
        square = torch.zeros(8, 8, device=device)
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        before_bytes, _ = requested_bytes(device)
        torch.mm(square, square)
        blas_bytes = requested_bytes(device)[0] - before_bytes
        torch.addmm(square[0], square, square)
        return blas_bytes, requested_bytes(device)[0] - before_bytes - blas_bytes


def requested_bytes(device: torch.device) -> tuple[int, int]:
    """Bytes that tensors on a CUDA device have asked for: now, and the most since the peak was reset.

    The allocator holds more, where too little would be left of a block to split it. An allocator that does not count
    what it is asked for tells what it has given.
    """
    stats = torch.cuda.memory_stats(device)
    kind = "requested" if stats.get("requested_bytes.all.peak", 0) else "allocated"
    return stats.get(f"{kind}_bytes.all.current", 0), stats.get(f"{kind}_bytes.all.peak", 0)


def keep_busy(cycles: int) -> None:
    """Let the current CUDA device wait, so that what is launched next begins when all of it is there."""
    torch.cuda._sleep(cycles)


def segments_expand() -> bool:
    """Whether PyTorch's CUDA allocator grows its segments page by page, so that hardly anything lies between blocks."""
    if torch.cuda.get_allocator_backend() != "native":
        return False
    torch.cuda.init()
    return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])


def _allocator_settings() -> str:
    """The settings that PyTorch's CUDA allocator was last given, as PYTORCH_ALLOC_CONF has them."""
    asked = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if asked is not None:
        return str(asked())
    settings = torch.cuda.memory._snapshot()["allocator_settings"]  # PyTorch 2.11 has no function for it
    return str(settings["PYTORCH_CUDA_ALLOC_CONF"])


def reserved_before(device: torch.device, holders: dict[int, str]) -> list[tuple[Any, ...]]:
    """Segments of PyTorch's CUDA allocator, as in `Segment`: of stream 0 on the current stream, and of 2 on others.

    holders: names by address, in the order in which a process makes what they hold. A block of several has no name.

    Of free blocks of one size PyTorch (2.12 and later) takes that of the oldest segment, which it does not tell. So
    segments that don't expand get addresses here, the lower the older they seem by what they hold.

    Workspaces of cuBLAS, which come again, and cached memory go back. Memory pools of their own are left out.
    """
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    where = torch.cuda.current_device() if device.index is None else device.index, (0, 0)
    current, addresses, found = torch.cuda.current_stream(device).cuda_stream, sorted(holders), []
    ages = {name: age for age, name in enumerate(holders.values())}
    for one in torch.cuda.memory_snapshot():
        if (one["device"], tuple(one["segment_pool_id"])) == where:
            blocks = []
            for block in one["blocks"]:
                start, size = block["address"], block["size"]
                first, end = bisect_left(addresses, start), bisect_left(addresses, start + size)
                names = {holders[address] for address in addresses[first:end]}
                blocks.append((size, block["state"] != "inactive", names.pop() if len(names) == 1 else ""))
            small, stream = one["segment_type"] == "small", 0 if one["stream"] == current else 2
            found.append((one["address"], stream, small, one["is_expandable"], tuple(blocks)))
    found.sort(key=lambda one: (one[3], min(ages.get(name, len(ages)) for _, _, name in one[4]), -one[0]))
    ends = [0, *accumulate(sum(size for size, _, _ in one[4]) for one in found)]
    return [one if one[3] else (end, *one[1:]) for one, end in zip(found, ends, strict=False)]


def pytorch_allocates() -> bool:
    """Whether PyTorch's own caching allocator serves CUDA devices, and not CUDA's, or one that was put in its place."""
    backend = getattr(torch._C, "_cuda_getAllocatorBackend", None)
    return backend is not None and backend() == "native"


def can_expand_segments(device: torch.device) -> bool:
    """Whether the segments of a CUDA device expand, or `expand_segments` may make them do so.

    It may not where another allocator is set or a setting names them, and can't on all platforms and drivers.
    """
    if segments_expand():
        return True
    told = [_allocator_settings(), *(os.environ.get(f"PYTORCH_{kind}ALLOC_CONF", "") for kind in ("", "CUDA_", "HIP_"))]
    if torch.cuda.get_allocator_backend() != "native" or any("expandable_segments" in text for text in told):
        return False
    return sys.platform == "linux" and torch.version.hip is None and _maps_memory(device)


def expand_segments(expand: bool = True) -> None:
    """Let segments of PyTorch's CUDA allocator expand from now on, or not. Those that are there stay as they are."""
    others = [text for text in _allocator_settings().split(",") if text and "expandable_segments" not in text]
    torch._C._accelerator_setAllocatorSettings(",".join([*others, f"expandable_segments:{expand}"]))


class MemoryPool:
    """A pool of PyTorch's allocator on a CUDA device, for blocks of the stream that was current when it was made.

    Where the rest of the device is taken, others may have what is free in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        with torch.cuda.device(self._index):
            self._pool = torch.cuda.MemPool(use_on_oom=True)
        self._id, self._stream = self._pool.id, torch.cuda.current_stream(self._index).cuda_stream
        self._device_before = self._index
        self._held: set[int] = set()
        self._delete = torch._C._cuda_cudaCachingAllocator_raw_delete

    def __del__(self) -> None:
        for address in self.__dict__.get("_held", ()):
            self._delete(address)

    @property
    def is_of_this_stream(self) -> bool:
        """Whether the current stream is the pool's."""
        return bool(torch.cuda.current_stream(self._index).cuda_stream == self._stream)

    def extend(self, size_bytes: int) -> int:
        """The address of a new segment of this size, which is free. Raises torch.OutOfMemoryError.

        It does not expand, also if the setting says so: others get memory of a pool only from segments that do not, and
        PyTorch ends the process where one that does goes back in pieces ("cudaMalloc_count > 0").
        """
        expands = segments_expand()
        self.enter()
        try:
            if expands:
                expand_segments(False)
            address = self.allocate(size_bytes)
        finally:
            if expands:
                expand_segments()
            self.leave()
        self.free(address)
        return address

    def enter(self) -> None:
        """Let this thread's blocks come from the pool from now on."""
        self._device_before = torch._C._cuda_exchangeDevice(self._index)
        torch._C._cuda_beginAllocateCurrentThreadToPool(self._index, self._id)

    def leave(self) -> None:
        """Let this thread's blocks come from where others come from."""
        torch._C._cuda_endAllocateToPool(self._index, self._id)
        torch._C._cuda_releasePool(self._index, self._id)
        torch._C._cuda_maybeExchangeDevice(self._device_before)

    def allocate(self, size_bytes: int) -> int:
        """The address of a new block, while this thread's come from the pool."""
        address: int = torch._C._cuda_cudaCachingAllocator_raw_alloc(size_bytes, self._stream)
        self._held.add(address)
        return address

    def allocate_outside(self, size_bytes: int) -> int:
        """The address of a new block of the pool's stream, while this thread's come from where others come from."""
        with torch.cuda.device(self._index):
            return self.allocate(size_bytes)

    def free(self, address: int) -> None:
        """Free a block. Those that are left are freed with the pool."""
        self._held.remove(address)
        self._delete(address)


_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102  # of CUdevice_attribute


def _maps_memory(device: torch.device) -> bool:
    """Whether the driver maps memory into reserved addresses, which some virtual GPUs can't."""
    found = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # PyTorch has one all the same
        return True
    index = torch.cuda.current_device() if device.index is None else device.index
    failed = driver.cuDeviceGetAttribute(ctypes.byref(found), _VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, index)
    return not failed and bool(found.value)
