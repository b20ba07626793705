"""Process groups, how long they wait for a rank, tensors sharded over ranks (DTensors), and collectives as ops."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
from collections.abc import Iterator, Sequence
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


def is_sharded(tensor: Any) -> bool:
    """Whether other ranks have parts of a tensor (a DTensor)."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_of_dtensors(types: Sequence[type]) -> bool:
    """Whether an op is on DTensors, which call other ops on the parts that are here. types: of its arguments."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and module.DTensor in types


def parallel_contexts() -> tuple[str, ...]:
    """Which of the contexts are on that change what ops on DTensors do: `loss_parallel`, `context_parallel`."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return ()
    ops, handlers = torch.ops.aten, module.DTensor._op_dispatcher._custom_op_handlers
    first = {"loss_parallel": ops._log_softmax, "context_parallel": ops._scaled_dot_product_flash_attention}
    return tuple(name for name, op in first.items() if op.default in handlers)


def part_here(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, the same object each time; any other tensor as it is."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def spec_of(tensor: torch.Tensor) -> Any:
    """Which ranks have which parts of a DTensor, and the shape of the whole; None for any other tensor."""
    return tensor._spec if is_sharded(tensor) else None  # type: ignore[attr-defined]


def with_spec(part: torch.Tensor, spec: Any) -> torch.Tensor:
    """The DTensor with this local part. It requires grad if the part does. spec: None gives the part itself."""
    if spec is None:
        return part
    tensor: Any = sys.modules["torch.distributed.tensor"].DTensor
    return tensor(part.detach(), spec, requires_grad=part.requires_grad)  # type: ignore[no-any-return]


def as_returned(part: torch.Tensor, spec: Any, arriving: Any, name: str) -> torch.Tensor:
    """The DTensor with this local part, whose gradient reaches the part.

    - arriving: how ranks split the gradient. Another raises RuntimeError.
    - name: of the DTensor, for the error.
    """
    if not part.requires_grad:
        return with_spec(part, spec)
    return _OfPart.apply(part, spec, arriving, name)  # type: ignore[no-any-return, no-untyped-call]


class _OfPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, spec: Any, arriving: Any, name: str) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.arriving, ctx.name = arriving, name
        return with_spec(part.view_as(part).requires_grad_(part.requires_grad), spec)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        if gradient is None:
            return None, None, None, None
        placements = None if ctx.arriving is None else ctx.arriving.placements
        if (arrived := spec_of(gradient).placements) != placements:
            raise RuntimeError(
                f"memplan: the gradient of the DTensor {ctx.name} arrives as {arrived}, and the plan is for "
                f"{placements}. Put the loss inside with loss_fn="
            )
        part: Any = part_here(gradient)
        return part.wait() if hasattr(part, "wait") else part, None, None, None


def is_wait(op: Any) -> bool:
    """Whether an op waits for a collective that another op has begun, or wraps its result to be waited for."""
    return str(op).startswith(("_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor"))


def completed(collective: Any, *args: Any, **kwargs: Any) -> Any:
    """What a collective gives, once it is over."""
    results = collective(*args, **kwargs)
    for result in results if isinstance(results, (list, tuple)) else (results,):
        wait_for(result)
    return results


def wait_for(result: torch.Tensor) -> None:
    """Let what is computed from here on wait for the collective that gives this tensor."""
    torch.ops._c10d_functional.wait_tensor(result)


def is_hook_of_dtensors(hook: Any) -> bool:
    """Whether a hook is one of those that `distribute_module` and `parallelize_module` put on modules."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.tensor")


def ranks_of(spec: Any) -> list[int]:
    """All ranks of the mesh of a DTensor."""
    return [int(rank) for rank in spec.mesh.mesh.flatten().tolist()]
