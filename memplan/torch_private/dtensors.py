"""DTensors, which are tensors sharded over ranks, and collectives as ops."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch


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
    """Whether an op waits for a collective that another op has begun."""
    return str(op).startswith("_c10d_functional.wait_tensor")


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
