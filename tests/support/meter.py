"""Two independent measurements of what a training step holds, in bytes.

`LiveMeter` watches tensors: exact live bytes, without what kernels take for themselves. `profiler_peak` reads the
allocator's own record: kernel scratch and saved generator states are in it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memplan.capture.trace.stand_ins import without_collections
from memplan.runtime.program import collectives, lower
from memplan.torch_private import part_here, run_in_mode
from tests.support.zoo import Sample, call, loss_of

_LETS_GO_S = 5.0  # on a loaded machine; views that a program has made meanwhile count as users, too


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


class LiveMeter(TorchDispatchMode):
    """Counts the bytes of every storage that an op returns, from then until the storage is freed.

    A storage counts once, however many tensors look at it. What lives before the step (parameters, buffers, inputs,
    constants) is handed to `register` first. On a CPU the backward pass runs on the calling thread, so it is seen.
    Tensors that are made without the dispatcher (a saved generator state) are not.

    live_bytes: held now. peak_bytes: the most held since the meter was made, or since `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes_bytes: dict[int, int] = {}
        self._counting = threading.RLock()  # the last user of a storage may be on another thread
        self.live_bytes = 0
        self.peak_bytes = 0

    def register(self, tensors: Any) -> None:
        """Count tensors (in any nesting of containers) that exist already."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor) and not (tensor._is_zerotensor() or tensor.is_meta):  # without memory
                self._see(part_here(tensor).untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = run_in_mode(func, args, kwargs)
        self.register(out)
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size_bytes = storage._cdata, storage.nbytes()
        with self._counting:
            known_bytes = self._sizes_bytes.get(key)
            if known_bytes is None:
                # The Python object lives exactly as long as the storage, whoever holds that.
                weakref.finalize(storage, self._freed, key).atexit = False
            self._sizes_bytes[key] = size_bytes
            self.live_bytes += size_bytes - (known_bytes or 0)

    def _freed(self, key: int) -> None:
        with self._counting:
            self.live_bytes -= self._sizes_bytes.pop(key)


def live_peak(net: nn.Module, sample: Sample) -> int:
    """The most that a step holds that begins without gradients, constants of its plan left out."""
    net.zero_grad()
    meter = LiveMeter()
    meter.register([*net.parameters(), *net.buffers(), sample])
    with meter:
        output = call(net, sample)
        is_loss = isinstance(output, torch.Tensor) and output.dim() == 0
        (output if is_loss else loss_of(output)).backward()
    return meter.peak_bytes


def profiler_peak(fn: Callable[[], object], resident_bytes: int = 0) -> int:
    """Peak bytes while `fn` runs: `resident_bytes`, held when it starts, plus the most that the allocator adds to it.

    What `fn` frees though it was held before must be part of `resident_bytes`. The result of `fn` is held to the end.
    """
    with (
        without_collections(),  # of tensors from before, which would count as freed
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof,
    ):
        result = fn()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    held_bytes = most_bytes = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held_bytes += event.nbytes()
        most_bytes = max(most_bytes, held_bytes)
    del result
    return resident_bytes + most_bytes


COLLECTIVES = (  # of process groups; older releases of PyTorch have the last ones in place of those before
    "allreduce", "allgather", "allreduce_coalesced", "allgather_coalesced", "reduce_scatter", "reduce", "broadcast",
    "all_gather_single", "all_gather_single_coalesced", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "_allgather_base", "_reduce_scatter_base", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced",
)  # fmt: skip


@contextlib.contextmanager
def gloo_lets_go() -> Iterator[None]:
    """Each collective is waited for at once, and until gloo's thread, too, has let go of its tensors, and of copies.

    It does so a moment after the collective is over. If it is the last one to, the allocator's record does not have
    what is freed, and everything from there on looks larger. What gloo scatters it reduces in a copy; the waiting
    thread takes its part out of that, and only there can it be seen.
    """
    kind = torch.distributed.ProcessGroup
    before = {name: vars(kind)[name] for name in COLLECTIVES if name in vars(kind)}

    def settled(collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def run(*args: Any, **kwargs: Any) -> Any:
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            users = [_users_of(t) for t in tensors]
            with _Copies(tensors) as copies:
                collective(*args, **kwargs).wait()
            end = time.monotonic() + 5
            while time.monotonic() < end and (
                copies.are_there or any(_users_of(t) > n for t, n in zip(tensors, users, strict=True))
            ):
                time.sleep(1e-5)
            return _Over()

        return run

    for name in before:
        setattr(kind, name, settled(getattr(kind, name)))
    try:
        yield
    finally:
        for name, original in before.items():
            setattr(kind, name, original)


@contextlib.contextmanager
def plans_wait_for_gloo() -> Iterator[None]:
    """In plans made here, a wait for a collective ends when gloo's thread, too, has let go of its tensors."""
    started: dict[int, list[tuple[torch.Tensor, int]]] = {}

    def noted(store: Any, collective: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        users = [(t, _users_of(t)) for t in tensors]
        result = collectives.start(store, collective, *args, **kwargs)
        started[id(result)] = users
        return result

    def settled(store: Any, result: Any, *inputs: Any) -> None:
        pairs = [*started.pop(id(result)), (result, _users_of(torch.empty(1)))]
        collectives.complete(store, result, *inputs)
        end = time.monotonic() + _LETS_GO_S
        while time.monotonic() < end and any(_users_of(t) > n for t, n in pairs):
            time.sleep(1e-5)

    with mock.patch.object(lower, "start", noted), mock.patch.object(lower, "complete", settled):
        yield


def _users_of(tensor: torch.Tensor) -> int:
    """How many have hold of a tensor, or of a view of it: gloo takes such ones."""
    return int(tensor._use_count() + torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


class _Copies(TorchDispatchMode):
    """Watches storages other than those of `given`, from when an op first returns a tensor of them."""

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._given = {t.untyped_storage()._cdata for t in given}
        self._found: list[weakref.ref[torch.UntypedStorage]] = []

    @property
    def are_there(self) -> bool:
        return any(ref() is not None for ref in self._found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = run_in_mode(func, args, kwargs)
        storages = [t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self._found += [weakref.ref(storage) for storage in storages if storage._cdata not in self._given]
        return out


class _Over(torch.distributed.Work):
    """The handle of a collective that is over."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True
