"""The parameters and buffers that a program reads by name, and the way of gradients into `.grad`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.ops.layout import storage_key
from memplan.runtime.host.arena import StepArena
from memplan.runtime.host.transfers import Transfers
from memplan.runtime.host.updates import UpdatesInBackward
from memplan.runtime.program.collectives import Gathers


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
        self._storages: dict[int, Any] = {}  # weak references by key
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
        return [tensor if type(tensor) is nn.Parameter else private.part_here(tensor) for tensor in found]

    def known_storage(self, tensor: torch.Tensor) -> Any:
        """A weak reference to the storage of a parameter, most often that of an earlier step."""
        key = storage_key(tensor)
        if key not in self._storages:
            if len(self._storages) > len(self._homes):  # parameters got other memory
                self._storages.clear()
            self._storages[key] = private.known_storage(tensor)
        return self._storages[key]

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
            alone = private.without_accumulators([*empty.values()])
            self._direct = {n: p for (n, p), is_alone in zip(empty.items(), alone, strict=True) if is_alone}

    def surface(self, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> None:
        """Put gradients into `.grad`, in this order, so that every kind of hook runs.

        That is through autograd's engine, but for those for which it would do nothing else.
        """
        pairs = []
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
            elif (parameter := self.parameter(name)).requires_grad:
                self.transfers.arrived(gradient)
                pairs.append((parameter, private.with_spec(gradient, self._specs.get(name))))
        if not pairs:
            return
        # Autograd skips what was frozen since forward, too, and runs last what it saw first.
        parameters, gradients = zip(*reversed(pairs), strict=True)
        own = [] if self.gathers is None else [p for p in parameters if isinstance(p, nn.Parameter)]
        with contextlib.nullcontext() if self.gathers is None else self.gathers.shards.accepting(own):
            with torch.enable_grad():
                leaves = tuple(map(_leaf, parameters, gradients))
            private.run_backward(leaves, gradients)


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
        and gradient.dtype is getattr(parameter, "grad_dtype", parameter.dtype)  # or None
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
