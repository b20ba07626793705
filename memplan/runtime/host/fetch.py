"""Lets a model run its own forward with parameters on the host, as `generate` does, or with parts of parameters."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memplan import torch_private as private
from memplan.capture.attributes.kept_memory import written_by
from memplan.capture.ops.layout import storage_key
from memplan.capture.shards import Shards
from memplan.capture.trace.branches import as_without_modes
from memplan.runtime.host.transfers import viewed_as
from memplan.torch_private import RealOps, pytree

aten = torch.ops.aten

_STD = 0.02  # of numbers that are made up
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

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device, model: nn.Module | None = None) -> None:
        """Prepare for these parameters. model: its modules find copies; with None only ops do."""
        super().__init__()
        self._device = device
        self._model = model
        self._host = {storage_key(p) for p in tensors}
        self._copies: dict[int, torch.Tensor] = {}  # what the copy with this storage is of
        self._around = contextlib.ExitStack()

    def __enter__(self) -> FetchedWhereUsed:
        if self._model is not None:
            self._around.enter_context(_found_by(self, self._model, lambda p: storage_key(p) in self._host))
        self._around.enter_context(as_without_modes())
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._around.close()

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


class MadeUpWhereUsed:
    """A context in which modules find each sharded parameter whole, filled with random numbers.

    No other rank takes part. A parameter is whole until the call of a module in which it was found is over.
    """

    def __init__(self, model: nn.Module, shards: Shards) -> None:
        found = ((p, shards.shard(p)) for p in model.parameters())
        self._model, self._shapes = model, {id(p): shard.shape for p, shard in found if shard is not None}
        self._modules = set(model.modules())
        self._parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # for each open call of a module
        self._around = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._parts.append([])
        self._around.callback(self._put_back)
        self._around.enter_context(_found_by(self, self._model, lambda p: id(p) in self._shapes))
        self._around.callback(register_module_forward_pre_hook(self._begin_call).remove)
        self._around.callback(register_module_forward_hook(self._end_call, always_call=True).remove)

    def __exit__(self, *error: Any) -> None:
        self._around.close()

    def for_module(self, parameter: torch.Tensor) -> torch.Tensor:
        shape = self._shapes.get(id(parameter))
        if shape is not None and parameter.shape != shape:
            self._parts[-1].append((parameter, parameter.data))
            with private.outside_of_tracing():
                whole = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
                if whole.is_floating_point() and whole.itemsize > 1:
                    whole.normal_(std=_STD, generator=torch.Generator(whole.device).manual_seed(0))
            parameter.data = whole
        return parameter

    def behind(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def _begin_call(self, module: nn.Module, *_: Any) -> None:
        if module in self._modules:
            self._parts.append([])

    def _end_call(self, module: nn.Module, *_: Any) -> None:
        if module in self._modules:
            self._put_back()

    def _put_back(self) -> None:
        for parameter, part in self._parts.pop():
            parameter.data = part


@contextlib.contextmanager
def _found_by(
    finder: FetchedWhereUsed | MadeUpWhereUsed, model: nn.Module, is_elsewhere: Callable[[Any], bool]
) -> Iterator[None]:
    """A context in which modules find parameters through the finder, if some of theirs are elsewhere."""
    exchanged = list[tuple[nn.Module, dict[str, Any]]]()
    for module in model.modules():
        own = module._parameters
        if any(p is not None and is_elsewhere(p) for p in dict.values(own)):
            exchanged.append((module, own))
            module._parameters = _LookedUp(own, finder)
    try:
        yield
    finally:
        for module, own in exchanged:
            found = dict(dict.items(module._parameters))
            module._parameters = own
            if [*map(id, found.values())] != [*map(id, dict.values(own))]:  # forward has exchanged some
                own.clear()
                own.update(found)


class _LookedUp(dict[str, Any]):
    """A module's parameters, which a finder looks up."""

    def __init__(self, own: dict[str, Any], finder: FetchedWhereUsed | MadeUpWhereUsed) -> None:
        super().__init__(dict.items(own))
        self._finder = finder

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        return parameter if parameter is None else self._finder.for_module(parameter)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value if value is None else self._finder.behind(value))

    def items(self) -> Any:
        return ((name, self[name]) for name in [*self])

    def values(self) -> Any:
        return (self[name] for name in [*self])
