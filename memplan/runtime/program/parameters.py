"""The parameters and buffers that a program reads by name, and the way of gradients into `.grad`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memplan import torch_private as private
from memplan.runtime.host.arena import StepArena
from memplan.runtime.host.transfers import Transfers
from memplan.runtime.host.updates import UpdatesInBackward
from memplan.runtime.program.collectives import Gathers

_MOST_STORAGES = 32  # lists of them


class ParameterStore:
    """Parameters and buffers of a model by name, looked up at each use, so `load_state_dict` and `.data` just work.

    - model: the model.
    - transfers: the model's copies to and from host memory.
    - updates: the optimizer that steps in backward, where there is one.
    - arena: of the model's steps.
    - gathers: of sharded parameters, where there are any.
    - specs: of gradients that are DTensors, by parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Iterable[str],
        transfers: Transfers,
        arena: StepArena,
        updates: UpdatesInBackward | None,
        gathers: Gathers | None,
        specs: Mapping[str, Any],
    ) -> None:
        self.model, self.transfers, self.arena, self.updates = model, transfers, arena, updates
        self.gathers, self._specs = gathers, specs
        self.routes: Mapping[Any, frozenset[Any]] = {}  # of gradients in this backward: `routes_of_gradients`
        self.absent: set[tuple[str, int]] = set()  # of these routes, those by which none comes
        self._homes: dict[str, tuple[dict[str, Any], str]] = {}
        self.states: dict[str, Any] = {}  # of Python, by island that runs more than once: `StateKept`
        self.first_runs: dict[str, Any] = {}  # in this step, by island: how it gives that again
        self.wrote: list[str] = []  # in this forward, islands that wrote to what they did not write to before
        self._direct: dict[str, torch.Tensor] = {}  # parameters whose gradients need no engine in this backward
        self._landed: dict[tuple[str, ...], Callable[..., bool]] = {}  # by names: whether gradients are as they were
        self._storages: dict[tuple[int, ...], Sequence[Any]] = {}  # weak references by keys
        for name in names:
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            self._homes[name] = (module._parameters if leaf in module._parameters else module._buffers, leaf)

    def __getitem__(self, name: str) -> torch.Tensor:
        home, leaf = self._homes[name]  # as `parameter` does: this runs several times a step for each of them
        tensor: Any = home.get(leaf)
        return tensor if type(tensor) is nn.Parameter else private.part_here(tensor)

    def parameter(self, name: str) -> torch.Tensor:
        """The parameter or buffer called `name` as the model has it: a DTensor where ranks have parts of it."""
        home, leaf = self._homes[name]
        return home.get(leaf)  # type: ignore[return-value]  # not home[leaf], for which others gather a parameter

    def tensors(self, names: Iterable[str]) -> list[torch.Tensor]:
        """The parameters and buffers of these names, each as `self[name]` is."""
        found: list[Any] = [home.get(leaf) for home, leaf in map(self._homes.__getitem__, names)]
        return found if private.are_ordinary(found) else [private.part_here(tensor) for tensor in found]

    def known_storages(self, tensors: Sequence[torch.Tensor], keys: Sequence[int]) -> Sequence[Any]:
        """Weak references to the storages of parameters, most often those of an earlier step. keys: of the storages."""
        if (found := self._storages.get(tuple(keys))) is None:
            if len(self._storages) > _MOST_STORAGES:  # parameters got other memory
                self._storages.clear()
            found = self._storages[tuple(keys)] = [*map(private.known_storage, tensors)]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        home, leaf = self._homes[name]
        home[leaf] = tensor

    def is_sharded(self, name: str) -> bool:
        """Whether a name is that of a parameter that is empty between uses."""
        if self.gathers is None:
            return False
        parameter = self.parameter(name)
        return isinstance(parameter, nn.Parameter) and self.gathers.shards.shard(parameter) is not None

    @property
    def way(self) -> Any:
        """How backward reduces gradients now: `Shards.way`."""
        return None if self.gathers is None else self.gathers.shards.way

    def begin(self, constants: Mapping[str, torch.Tensor]) -> None:
        """Prepare for a planned forward or backward. constants: of its plan."""
        if self.gathers is not None:
            self.gathers.shards.begin(frozenset(map(id, constants.values())))

    def end(self, way: Any, constants: Mapping[str, torch.Tensor]) -> None:
        """Note that a planned backward is over. way: when its forward began. constants: of backward."""
        if self.gathers is not None:
            self.gathers.shards.end(way, frozenset(map(id, constants.values())))

    def gets_none(self, key: Any) -> bool:
        """Whether a parameter, an input or an island gets no gradient in this backward, because islands give none."""
        return key in self.routes and self.routes[key] <= self.absent

    def look_for_hooks(self) -> None:
        """Find, for a backward that begins, the parameters on whose autograd nodes there can be no hooks."""
        self._direct = {}
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.gathers is not None or together:  # all ranks have to hand gradients over in one order
            return
        found = [(name, home.get(leaf)) for name, (home, leaf) in self._homes.items()]
        empty = {n: p for n, p in found if type(p) is nn.Parameter and p.requires_grad and p.grad is None}
        if empty:
            alone = zip(empty.items(), private.without_accumulators([*empty.values()]), strict=True)
            self._direct = {n: p for (n, p), a in alone if a and getattr(p, "grad_dtype", p.dtype) is p.dtype}

    def surface(self, names: tuple[str, ...], gradients: tuple[torch.Tensor, ...]) -> None:
        """Put gradients into `.grad`, in this order, so that every kind of hook runs.

        That is through autograd's engine, but for those for which it would do nothing else.
        """
        if self._land_together(names, gradients):
            return
        pairs, landed = [], list[Any]()
        for name, gradient in zip(names, gradients, strict=True):
            if self.gets_none(name):
                continue
            if (parameter := self._direct.get(name)) is not None and _lands_as_it_is(parameter, gradient):
                hooks = [*(parameter._post_accumulate_grad_hooks or {}).values()]  # which autograd calls then
                if self.updates is None or hooks != [self.updates.hook]:  # which waits for it by itself
                    self.transfers.arrived(gradient)
                parameter.grad = gradient.detach()
                for hook in hooks:
                    hook(parameter)
                landed.append(parameter)
            elif (parameter := self.parameter(name)).requires_grad:
                self.transfers.arrived(gradient)
                pairs.append((parameter, private.with_spec(gradient, self._specs.get(name))))
        if len(landed) == len(names) and names not in self._landed:
            self._landed[names] = private.alike([*landed, *gradients])
        if not pairs:
            return
        # Autograd skips what was frozen since forward, too, and runs last what it saw first.
        parameters, gradients = zip(*reversed(pairs), strict=True)
        own = [] if self.gathers is None else [p for p in parameters if isinstance(p, nn.Parameter)]
        with contextlib.nullcontext() if self.gathers is None else self.gathers.shards.accepting(own):
            with torch.enable_grad():
                leaves = tuple(map(_leaf, parameters, gradients))
            private.run_backward(leaves, gradients)

    def _land_together(self, names: tuple[str, ...], gradients: tuple[torch.Tensor, ...]) -> bool:
        """Put gradients into `.grad` if all are as in an earlier backward where that was all, and have no hooks."""
        parameters: list[Any] = [self._direct.get(name) for name in names]
        if self.routes or names not in self._landed or not self._landed[names](*parameters, *gradients):
            return False
        for parameter in parameters:
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks or parameter.grad is not None:
                return False
        for parameter, gradient in zip(parameters, gradients):
            self.transfers.arrived(gradient)
            parameter.grad = gradient.detach()
        return True


def _lands_as_it_is(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether autograd's engine would take the memory of a gradient for `.grad`, and would call no hooks before."""
    return (
        parameter.grad is None
        and parameter.requires_grad
        and not parameter._backward_hooks
        and type(gradient) is torch.Tensor
        and gradient.layout is torch.strided
        and gradient.shape == parameter.shape
        and gradient.stride() == parameter.stride()
        and gradient.dtype is parameter.dtype
        and gradient.device == parameter.device
        and parameter.is_contiguous()
    )


def _leaf(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A view of a parameter, because autograd copies a gradient that is given for the leaf itself."""
    keeps_strides = 1 not in gradient.shape  # in dimensions of size 1 a view has strides of its own
    if not keeps_strides and private.is_ordinary(gradient):
        keeps_strides = gradient.view(gradient.shape).stride() == gradient.stride()
    if not keeps_strides:
        return _SameGradient.apply(parameter)  # type: ignore[no-any-return, no-untyped-call]
    return parameter.view_as(parameter)


class _SameGradient(torch.autograd.Function):
    """Hands a gradient on with its strides. A view's backward would change those of dimensions of size 1."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.detach()
