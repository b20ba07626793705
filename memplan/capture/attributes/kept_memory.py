"""What traces and rehearsals must leave unchanged: memory that ops write to, and results that functions remember."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.ops import op_facts
from memplan.capture.ops.dataflow import written_arguments
from memplan.capture.ops.layout import storage_key
from memplan.torch_private import pytree

_Remembering = functools._lru_cache_wrapper
_DEPTH = 5  # of containers around a tensor in a result
_SKIPPED = (type, ModuleType, FunctionType, nn.Module)


class KeptMemory:
    """Copies of storages, made before ops write to them. As a context, it puts all contents back at the end.

    - written: the tensors that were given to `keep`.
    - around: for each of them, the modules that wrote to it first, the innermost first.
    """

    def __init__(self) -> None:
        self.written: list[torch.Tensor] = []
        self.around: list[tuple[Any, ...]] = []
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __enter__(self) -> KeptMemory:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def keep(self, tensor: torch.Tensor, around: tuple[Any, ...] = ()) -> None:
        """Copy a tensor's storage, unless there is a copy already. around: the modules that are running."""
        if any(tensor is known for known in self.written):
            return
        self.written.append(tensor)
        self.around.append(around)
        if (key := storage_key(tensor)) not in self._copies:
            storage = tensor.untyped_storage()
            with private.outside_of_tracing():
                self._copies[key] = storage, storage.clone()

    def undo(self) -> None:
        """Put the contents back. Version counters of tensors are not put back."""
        with private.outside_of_tracing():
            for storage, copy in self._copies.values():
                storage.copy_(copy)


class SeesWrites(private.RealOps):
    """Calls `on_write` with tensors that were there before, when ops write to them. made: keys of other memory."""

    def __init__(self, made: Iterable[int] = ()) -> None:
        super().__init__()
        self._made, self.wrote = set(made), False

    def on_write(self, tensor: torch.Tensor) -> None:
        self.wrote = True

    def on_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        hidden = [args[i] for i in op_facts.HIDDEN_WRITES.get(func, ((), 0))[0] if args[i] is not None]
        for tensor in map(private.part_here, (*written_by(func, args, kwargs), *hidden)):
            owns_memory = tensor.numel() and private.is_ordinary(private.plain(tensor))  # a wrapper has that of others
            if owns_memory and storage_key(tensor) not in self._made:
                self.on_write(tensor)
        given = memory_of((args, kwargs))
        result = self.run_op(func, args, kwargs)
        self._made |= memory_of(result).keys() - given.keys()
        return result


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an op's schema says it writes to. A higher-order op has none: the ops that it runs write."""
    found = () if isinstance(func, private.HigherOrderOperator) else written_arguments(func, args, kwargs)
    return (tensor for tensor in found if isinstance(tensor, torch.Tensor) and has_memory(tensor))


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's contents can be put back: it is neither sparse, nor meta, nor one of torch.func's."""
    return tensor.layout is torch.strided and not tensor.is_meta and not private.is_transformed(tensor)


def memory_of(things: Any) -> dict[int, Any]:
    """The memory of tensors, in containers too, by key."""
    tensors = (t for t in pytree.tree_leaves(things) if isinstance(t, torch.Tensor) and has_memory(t))
    return {storage_key(t): private.known_storage(t) for t in tensors}


@contextlib.contextmanager
def results_forgotten(model: nn.Module) -> Iterator[Callable[[], list[torch.Tensor]]]:
    """A context after which functions (`functools.cache`) forget results that were made of fake tensors in it.

    Rotary embeddings and position tables are often kept that way: the model itself would be given fakes from then on.
    Gives a function that tells these fakes, while they are there.
    """
    owners = {*model.modules(), *(kind for module in model.modules() for kind in type(module).__mro__)}
    own = {o for owner in owners for o in vars(owner).values() if type(o) is _Remembering}
    functions = own.union(_of_the_process(len(sys.modules)))
    before = [(function, function.cache_info().misses) for function in functions]

    def remembered() -> dict[_Remembering[Any], list[torch.Tensor]]:
        return {f: _fakes_in(f) for f, misses in before if f.cache_info().misses != misses}

    try:
        yield lambda: [fake for fakes in remembered().values() for fake in fakes]
    finally:
        for function in [f for f, fakes in remembered().items() if fakes]:
            function.cache_clear()


@functools.lru_cache(maxsize=1)
def _of_the_process(modules: int) -> weakref.WeakSet[_Remembering[Any]]:
    """All functions with a cache, which take a twentieth of a second to find.

    They are found as referrers of their type. A list of all objects would have tuples in it that other threads are
    making, and these can't be finished while something else holds them (SystemError).

    modules: the number of modules that are imported. With more of them there may be more functions.
    """
    return weakref.WeakSet(o for o in gc.get_referrers(_Remembering) if type(o) is _Remembering)


def _fakes_in(function: _Remembering[Any]) -> list[torch.Tensor]:
    seen, level, found = {id(function)}, list[Any]([function]), list[torch.Tensor]()
    for _ in range(_DEPTH + 1):
        found += [o for o in level if issubclass(type(o), private.FakeTensor)]
        level = [o for o in gc.get_referents(*level) if id(o) not in seen and not issubclass(type(o), _SKIPPED)]
        seen.update(map(id, level))
    return found
