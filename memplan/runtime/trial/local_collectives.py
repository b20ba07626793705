"""Forward on one rank alone: what others would send is made up, so that they can do something else meanwhile."""

from __future__ import annotations

import math
from typing import Any

import torch

from memplan import torch_private as private
from memplan.capture.ops.ways import Refusal


def is_collective(func: Any) -> bool:
    """Whether an op communicates, or waits for one that does."""
    return getattr(func, "namespace", "") in ("_c10d_functional", "c10d")


class LocalCollectives(private.RealOps):
    """Collectives send nothing. Their results have the right shapes, with this rank's numbers over and over.

    Raises a Refusal for one that is no functional collective of one tensor.
    """

    def on_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not is_collective(func):
            return self.run_op(func, args, kwargs)
        given = args[0]
        known = isinstance(given, torch.Tensor) and func.namespace != "c10d"
        rows = given.shape[0] if known and given.dim() else 1
        match func.__name__.partition(".")[0] if known else "":
            case "wait_tensor" | "_wrap_tensor_autograd":
                return torch.ops.aten.alias.default(given)
            case "all_gather_into_tensor":
                rows *= args[1]
            case "reduce_scatter_tensor":
                rows //= args[2]
            case "all_to_all_single":
                rows = sum(args[1])
            case "all_reduce" | "broadcast":
                pass
            case _:
                raise Refusal(f"forward runs the collective {func}, and no other rank would join it now")
        shape = (rows, *given.shape[1:]) if given.dim() else given.shape
        flat, count = given.reshape(-1), math.prod(shape)
        return flat.repeat(-(-count // max(1, flat.numel())))[:count].view(shape)
