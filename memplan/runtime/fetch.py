"""Lets a model whose parameters live partly on the host run its own forward: evaluation, `generate`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from memplan.graph.branches import as_without_modes
from memplan.graph.layout import storage_key
from memplan.graph.private_api import TorchDispatchMode, run_in_mode

aten = torch.ops.aten

# Ops that take operands of one dtype, and that autocast casts operands for.
_CAST = frozenset(
    getattr(aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "convolution")
)


class FetchedWhereUsed(TorchDispatchMode):
    """Gives each op that reads one of these host tensors a copy on the device, which is freed when the op is done.

    Views of them stay views, and an op that writes to one writes to it on the host. Nothing is fetched ahead, so this
    is slow, and it takes no more memory than the largest parameter. Autocast for the device casts what is there before
    an op gets here, and leaves tensors on the host alone; so what is fetched is cast as the op's other operands were.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch leaves it without annotations
        self._device = device
        self._host = {storage_key(p) for p in parameters}
        self._around = contextlib.ExitStack()

    def __enter__(self) -> FetchedWhereUsed:
        self._around.enter_context(as_without_modes())
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._around.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func.is_view and not func._schema.is_mutable:
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._fetched, (args, kwargs))
            if func in _CAST:
                args = _in_one_dtype(args)
        return run_in_mode(func, args, kwargs)

    def _fetched(self, tensor: torch.Tensor) -> torch.Tensor:
        if storage_key(tensor) not in self._host:
            return tensor
        here = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device=self._device)
        here.untyped_storage().copy_(tensor.untyped_storage())
        empty = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return empty.set_(here.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _in_one_dtype(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands in the lowest precision that there is among them."""
    dtypes = {t.dtype for t in args if isinstance(t, torch.Tensor)}
    if len(dtypes) < 2:
        return args
    lowest = min(dtypes, key=lambda dtype: dtype.itemsize)
    return tuple(t.to(lowest) if isinstance(t, torch.Tensor) else t for t in args)
