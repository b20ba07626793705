"""Process groups, and how long they wait for a rank."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

from memplan.torch_private.exchanged import exchanged


def reduces_on_cpu(group: torch.distributed.ProcessGroup) -> bool:
    """Whether the ranks of a group can run collectives of tensors on the CPU."""
    return any(device.type == "cpu" for device in group._device_types)


def _backends_of(group: torch.distributed.ProcessGroup) -> list[Any]:
    """Backends of a process group that say how long they wait for a rank."""
    backends = [group._get_backend(device) for device in group._device_types]
    return [b for b in backends if getattr(b, "options", None) is not None]


def gloo_group(group: torch.distributed.ProcessGroup) -> torch.distributed.ProcessGroup:
    """A gloo group of the ranks of a group, which waits as long for one. All must ask for it the first time."""
    ranks = torch.distributed.get_process_group_ranks(group)
    timeout = max((backend.options._timeout for backend in _backends_of(group)), default=None)
    name, groups = f"memplan, {timeout}", torch.distributed.distributed_c10d._world.pg_map
    own = (g for g in groups if g.group_desc == name and torch.distributed.get_process_group_ranks(g) == ranks)
    # Only its members have to make it, and no collective of theirs can get between its messages.
    return next(own, None) or torch.distributed.new_group(
        ranks, timeout=timeout, backend="gloo", use_local_synchronization=True, group_desc=name
    )


@contextlib.contextmanager
def waits_end_within(seconds: float, but: torch.distributed.ProcessGroup) -> Iterator[None]:
    """A context in which waiting for other ranks fails after these seconds, in all groups of this process but one.

    It is for collectives and for the rendezvous store. Calls that have a timeout of their own, or none, fail at once in
    this thread: messages to one rank, monitored barriers, new groups.
    """
    most = timedelta(seconds=seconds)
    c10d = torch.distributed.distributed_c10d
    backends = [backend for group in c10d._world.pg_map if group is not but for backend in _backends_of(group)]
    before = [(backend._set_default_timeout, backend.options._timeout) for backend in backends]
    store: Any = c10d._get_default_store()
    before.append((store.set_timeout, store.timeout))
    kind: Any = torch.distributed.ProcessGroup
    places: list[tuple[Any, str]] = [(c10d, "_new_group_with_tag")]
    places += [(kind, name) for name in ("send", "recv", "recv_anysource", "monitored_barrier", "split_group")]
    try:
        with contextlib.ExitStack() as patches:
            for place, name in places:
                patches.enter_context(_refused_here(place, name))
            for set_timeout, timeout in before:
                with contextlib.suppress(RuntimeError):  # of a kind that has none to set
                    set_timeout(min(timeout, most))
            yield
    finally:
        for set_timeout, timeout in before:
            with contextlib.suppress(RuntimeError):
                set_timeout(timeout)


def _refused_here(place: Any, name: str) -> contextlib.AbstractContextManager[None]:
    """A context in which a function of a module or a class raises RuntimeError when this thread calls it."""
    thread, call = threading.get_ident(), getattr(place, name)

    @functools.wraps(call)
    def refused(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            raise RuntimeError(f"{name} may wait without a timeout of ours")
        return call(*args, **kwargs)

    return exchanged(place, **{name: refused})


def is_timeout(error: RuntimeError) -> bool:
    """Whether a collective was given up because another rank did not come."""
    return re.search("timed out|timeout", str(error), re.IGNORECASE) is not None
