"""Lets a model with parameters on the host run its own forward, for evaluation and `generate`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from memplan.capture.attributes.kept_memory import written_by
from memplan.capture.ops.layout import storage_key
from memplan.capture.trace.branches import as_without_modes
from memplan.runtime.host.transfers import viewed_as
from memplan.torch_private import RealOps, pytree

aten = torch.ops.aten

# Ops that take operands of one dtype, and that autocast casts operands for.
_CAST = frozenset(
    getattr(aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "convolution")
)


class FetchedWhereUsed(RealOps):
    """A context in which modules find their parameters on the device, as copies of those that are on the host.

    A copy is freed when nothing refers to it any more. A module's code finds a copy as `self.weight`, so autocast and
    code that asks for its device see the device. What is written to such a copy is written to the host as well. Where
    code gets a parameter in another way, each op that reads it gets a copy, and an op that writes to it writes to it on
    the host.

    Nothing is fetched ahead, so this is slow. It takes hardly more memory than the parameters of the largest module.
    Where gradients are recorded, parameters that require them are left on the host, because gradients of a copy would
    be lost.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], device: torch.device, model: nn.Module | None = None
    ) -> None:
        """Prepare for these parameters. model: its modules find copies; with None only ops do."""
        super().__init__()
        self._device = device
        self._model = model
        self._host = {storage_key(p) for p in parameters}
        self._copies: dict[int, torch.Tensor] = {}  # what the copy with this storage is of
        self._exchanged: list[tuple[nn.Module, dict[str, Any]]] = []
        self._around = contextlib.ExitStack()

    def __enter__(self) -> FetchedWhereUsed:
        for module in () if self._model is None else self._model.modules():
            own = module._parameters
            if any(p is not None and storage_key(p) in self._host for p in dict.values(own)):
                self._exchanged.append((module, own))
                module._parameters = _Fetching(own, self)
        self._around.enter_context(as_without_modes())
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._around.close()
        for module, own in self._exchanged:
            found = dict(dict.items(module._parameters))
            module._parameters = own
            if [*map(id, found.values())] != [*map(id, dict.values(own))]:  # forward has exchanged some
                own.clear()
                own.update(found)
        self._exchanged.clear()

    def on_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        written = list(written_by(func, args, kwargs))
        if not getattr(func, "is_view", False) and not any(storage_key(t) in self._host for t in written):
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._fetched, (args, kwargs))
            if func in _CAST:
                args = self._in_one_dtype(args)
        result = self.run_op(func, args, kwargs)
        for tensor in written:
            if (host := self._copies.get(storage_key(tensor))) is not None:
                host.untyped_storage().copy_(tensor.untyped_storage())
        return result

    def for_module(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor that a module finds in place of its parameter."""
        if storage_key(parameter) not in self._host or (torch.is_grad_enabled() and parameter.requires_grad):
            return parameter
        copy = nn.Parameter(self._fetched(parameter.detach()), parameter.requires_grad)
        storage = copy.untyped_storage()
        self._copies[storage_key(copy)] = parameter
        weakref.finalize(storage, self._copies.pop, storage_key(copy), None).atexit = False
        return copy

    def behind(self, tensor: torch.Tensor) -> torch.Tensor:
        """The parameter that a tensor is a copy of, else the tensor."""
        return self._copies.get(storage_key(tensor), tensor)

    def _fetched(self, tensor: torch.Tensor) -> torch.Tensor:
        if storage_key(tensor) not in self._host:
            return tensor
        here = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device=self._device)
        here.untyped_storage().copy_(tensor.untyped_storage())
        return viewed_as(here, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _in_one_dtype(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The operands in the lowest precision among them, or in that of autocast.

        Autocast has cast operands on the device before an op gets here, and leaves tensors on the host as they are.
        """
        dtypes = {t.dtype for t in args if isinstance(t, torch.Tensor)}
        if torch.float32 in dtypes and torch.is_autocast_enabled(self._device.type):
            dtypes.add(torch.get_autocast_dtype(self._device.type))
        if len(dtypes) < 2:
            return args
        lowest = min(dtypes, key=lambda dtype: dtype.itemsize)
        return tuple(t.to(lowest) if isinstance(t, torch.Tensor) else t for t in args)


class _Fetching(dict[str, Any]):
    """A module's parameters. Those on the host are found as copies."""

    def __init__(self, own: dict[str, Any], copies: FetchedWhereUsed) -> None:
        super().__init__(dict.items(own))
        self._copies = copies

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        return parameter if parameter is None else self._copies.for_module(parameter)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value if value is None else self._copies.behind(value))

    def items(self) -> Any:
        return ((name, self[name]) for name in [*self])

    def values(self) -> Any:
        return (self[name] for name in [*self])
