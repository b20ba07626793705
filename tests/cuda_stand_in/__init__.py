"""A CUDA device for machines that have none: what PyTorch and memplan do with one, with the CPU's kernels.

    make test-stand-in                            # the tests that need a device, on the stand-in
    python -m tests.cuda_stand_in examples/offload_finetune.py --device cuda

device.cpp says what is real of it. It is compiled when it is first used, which takes a C++ compiler and half a minute.
`install` makes it the CUDA device of this process; it has to come before PyTorch is imported.

What it can't show: kernels that only CUDA has and their memory, bits of a GPU, time.

STAND_IN_WORKSPACE  bytes of cuBLAS's workspace, 8 MiB unless told
STAND_IN_SEED       copies happen at random before somebody waits for them, instead of as late as they may
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

_NAME = "memplan_cuda_stand_in"
_SOURCE = Path(__file__).with_name("device.cpp")
_BUILD = Path(__file__).parent.parent.parent / "build" / "cuda_stand_in"
_COMPILER = os.environ.get("CXX", "c++")


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def missing() -> str | None:
    """Why it can't be made here."""
    if (_torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "PyTorch is a build for CUDA"
    if shutil.which(_COMPILER) is None:
        return f"there is no C++ compiler ({_COMPILER})"
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return None if headers.exists() else f"Python's headers are not installed ({headers})"


def build() -> Path:
    """The compiled device."""
    torch = _torch_folder()
    version = (torch / "version.py").read_bytes()
    digest = hashlib.sha256(_SOURCE.read_bytes() + version + sys.version.encode()).hexdigest()[:16]
    library = _BUILD / digest / f"{_NAME}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        include = (torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include"))
        command = [
            _COMPILER, "-std=c++20", "-O1", "-w", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={_NAME}",
            *(word for folder in include for word in ("-isystem", str(folder))), str(_SOURCE), f"-L{torch / 'lib'}",
            "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-o", str(unfinished),
        ]  # fmt: skip
        subprocess.run(command, check=True)
        unfinished.rename(library)
    return library


def install() -> Any:
    """Make the stand-in the CUDA device of this process. Gives the compiled module."""
    assert "torch" not in sys.modules, "PyTorch asks for its CUDA library once, when it is imported"
    library = build()
    lib = _torch_folder() / "lib"
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"):
        ctypes.CDLL(str(lib / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))
    import torch

    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None and spec.loader is not None
    device = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(device)
    if "STAND_IN_SEED" in os.environ:
        device.copy_early(int(os.environ["STAND_IN_SEED"]))
    _take_over(torch, device)
    return device


class _Generator:
    """The default generator of a device."""

    def __init__(self, native: Any, index: int) -> None:
        self._native, self._index = native, index

    def initial_seed(self) -> int:
        return int(self._native.seed(self._index))

    def get_offset(self) -> int:
        return int(self._native.offset(self._index))

    def manual_seed(self, seed: int) -> _Generator:
        self._native.set_generator(self._index, seed % (1 << 64), 0)
        return self

    def seed(self) -> int:
        seed = int.from_bytes(os.urandom(8), "little")
        self.manual_seed(seed)
        return seed

    def set_offset(self, offset: int) -> None:
        self._native.set_generator(self._index, self.initial_seed(), offset)

    def get_state(self) -> Any:
        import torch

        return torch.tensor([self.initial_seed() - (1 << 63), self.get_offset()]).view(torch.uint8).clone()

    def set_state(self, state: Any) -> None:
        import torch

        seed, offset = state.cpu().clone().view(torch.int64).tolist()
        self._native.set_generator(self._index, seed + (1 << 63), offset)


def _take_over(torch: Any, native: Any) -> None:
    """Put the stand-in where `torch.cuda` says that PyTorch was not compiled for CUDA."""
    cuda = torch.cuda

    def index_of(device: Any = None) -> int:
        if device is None:
            return int(native.current_device())
        if isinstance(device, int):
            return device if device >= 0 else int(native.current_device())
        index = torch.device(device).index
        return int(native.current_device()) if index is None else int(index)

    class Stream:
        """Streams of PyTorch itself can't be made for a device that it was not compiled for by name."""

        def __init__(self, device: Any = None, *, number: int | None = None, **_: Any) -> None:
            self.device = torch.device("cuda", index_of(device))
            self.device_index = self.device.index
            self.stream_id = native.new_stream(self.device.index) if number is None else number
            self.cuda_stream = self.stream_id

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and (self.device, self.stream_id) == (other.device, other.stream_id)

        def __hash__(self) -> int:
            return hash((self.device, self.stream_id))

        def __enter__(self) -> Stream:
            self._context = StreamContext(self)
            self._context.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self._context.__exit__(*error)

        def record_event(self, event: Any = None) -> Any:
            event = Event() if event is None else event
            event.record(self)
            return event

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def wait_stream(self, other: Stream) -> None:
            native.wait_stream(self.device_index, self.stream_id, other.device_index, other.stream_id)

        def synchronize(self) -> None:
            native.synchronize_stream(self.device_index, self.stream_id)

        def query(self) -> bool:
            return bool(native.query_stream(self.device_index, self.stream_id))

    class Event:
        def __init__(self, enable_timing: bool = False, **_: Any) -> None:
            self._event = None

        def record(self, stream: Any = None) -> None:
            stream = current_stream() if stream is None else stream
            self._event = native.record(stream.device_index, stream.stream_id)

        def wait(self, stream: Any = None) -> None:
            stream = current_stream() if stream is None else stream
            if self._event is not None:
                native.wait_event(self._event, stream.device_index, stream.stream_id)

        def synchronize(self) -> None:
            if self._event is not None:
                native.synchronize_event(self._event)

        def query(self) -> bool:
            return self._event is None or bool(native.query_event(self._event))

        def elapsed_time(self, other: Event) -> float:
            return float(native.elapsed(self._event, other._event))

    def current_stream(device: Any = None) -> Stream:
        index = index_of(device)
        return Stream(index, number=native.current_stream(index))

    class StreamContext:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            if self.stream is None:
                return
            self.device = native.current_device()
            index = self.stream.device.index
            self.before = native.current_stream(index)
            native.set_device(index)
            native.set_stream(index, self.stream.stream_id)

        def __exit__(self, *_: object) -> None:
            if self.stream is None:
                return
            native.set_stream(self.stream.device.index, self.before)
            native.set_device(self.device)

    def exchange_device(index: int) -> int:
        before = int(native.current_device())
        if index >= 0:
            native.set_device(index)
        return before

    class MemPool:
        def __init__(self, use_on_oom: bool = False) -> None:
            self.id = native.new_pool()

    generators = tuple(_Generator(native, i) for i in range(native.device_count()))

    def manual_seed(seed: int) -> None:
        generators[native.current_device()].manual_seed(int(seed))

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(int(seed))

    def memory_stats(device: Any = None) -> dict[str, int]:
        index = index_of(device)
        held = {f"{kind}_bytes.all.{when}": bytes_ for kind in ("allocated", "requested")
                for when, bytes_ in (("current", native.held(index)), ("peak", native.most(index)))}  # fmt: skip
        return held | {"allocation.all.allocated": native.made(index), "num_alloc_retries": 0, "num_ooms": 0}

    properties = types.SimpleNamespace(
        name="stand-in", major=9, minor=0, total_memory=native.total(), L2_cache_size=1 << 20, multi_processor_count=1
    )
    patches: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "_initialized": True,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": native.device_count,
        "current_device": native.current_device,
        "set_device": lambda device: native.set_device(index_of(device)),
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "synchronize": lambda device=None: native.synchronize(index_of(device)),
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "MemPool": MemPool,
        "stream": StreamContext,
        "set_stream": lambda stream: native.set_stream(stream.device.index, stream.stream_id),
        "current_stream": current_stream,
        "default_stream": lambda device=None: Stream(device, number=0),
        "memory_allocated": lambda device=None: native.held(index_of(device)),
        "max_memory_allocated": lambda device=None: native.most(index_of(device)),
        "memory_reserved": lambda device=None: native.held(index_of(device)),
        "max_memory_reserved": lambda device=None: native.most(index_of(device)),
        "reset_peak_memory_stats": lambda device=None: native.forget_most(index_of(device)),
        "memory_stats": memory_stats,
        "_snapshot": lambda device=None: {"allocator_settings": {"expandable_segments": True}},
        "empty_cache": lambda: None,
        "_sleep": lambda cycles: None,
        "init": lambda: None,
        "get_allocator_backend": lambda: "native",
        "mem_get_info": lambda device=None: (native.total() - native.held(index_of(device)), native.total()),
        "set_per_process_memory_fraction": lambda share, device=None: native.limit(index_of(device), share),
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_rng_state": lambda device="cuda": generators[index_of(device)].get_state(),
        "set_rng_state": lambda state, device="cuda": generators[index_of(device)].set_state(state),
        "default_generators": generators,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "initial_seed": lambda: generators[native.current_device()].initial_seed(),
        "seed": lambda: generators[native.current_device()].seed(),
        "seed_all": lambda: manual_seed_all(generators[0].seed()),
    }
    for name, value in patches.items():
        for home in (cuda, cuda.random, cuda.memory, cuda.streams):
            if home is cuda or hasattr(home, name):
                setattr(home, name, value)
    torch._C._cuda_getCublasWorkspaceSize = native.workspace_bytes
    torch._C._cuda_getCurrentRawStream = lambda index: native.current_stream(index)
    torch._C._cuda_clearCublasWorkspaces = native.clear_workspaces
    torch._C._cuda_exchangeDevice = torch._C._cuda_maybeExchangeDevice = exchange_device
    torch._C._cuda_beginAllocateCurrentThreadToPool = lambda index, pool: native.use_pool(pool)
    torch._C._cuda_endAllocateToPool = lambda index, pool: native.use_pool(0)
    torch._C._cuda_releasePool = lambda index, pool: None
    torch._C._cuda_cudaCachingAllocator_raw_alloc = lambda size, stream: native.allocate(size)
    torch._C._cuda_cudaCachingAllocator_raw_delete = native.free
    torch.cuda.stand_in = native

    clone = torch.UntypedStorage.clone

    def cloned(storage: Any) -> Any:
        if storage.device.type != "cuda":
            return clone(storage)
        return torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device).untyped_storage().copy_(storage)

    torch.UntypedStorage.clone = cloned
