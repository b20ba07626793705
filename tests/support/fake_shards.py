"""Parameters that are hidden away between uses, as sharding does it, in one process and to the harm of mistakes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import memplan


@dataclass(eq=False)
class FakeHandle:
    """A gather that happens when it is waited for: until then the parameter has its shape, full of NaN."""

    shards: FakeShards
    parameter: nn.Parameter

    def wait(self) -> None:
        self.shards.arrive(self.parameter)


class FakeShards:
    """Hides the parameters of a model. What is gathered comes late, and what is freed is poisoned.

    padding_bytes: that a gather takes more. stays: names of parameters that are never hidden. log: ("gather" or
    "release", name) of everything asked for. most: parameters gathered at one time; most_bytes: their bytes.
    forgiving: what is freed before it has arrived shows as NaN alone.
    """

    attributes: frozenset[str] = frozenset()
    takes_gradients: bool = True
    resident_bytes = 1000
    speed = memplan.GatherSpeed(1e9, 1e-6)
    way = None

    def __init__(self, model: nn.Module, stays: Sequence[str] = (), padding_bytes: int = 0) -> None:
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.parameters = dict(model.named_parameters())
        self.stays, self.padding_bytes = frozenset(stays), padding_bytes
        self.hidden: dict[str, torch.Tensor] = {}
        self.pending: dict[str, FakeHandle] = {}
        self.gathered: dict[str, torch.Tensor] = {}
        self.log: list[tuple[str, str]] = []
        self.most = self.most_bytes = self.begun = 0
        self.forgiving = False
        self.elements = {p.dtype: torch.empty(1, dtype=p.dtype) for p in model.parameters()}
        self.hide()

    # -- what tests do ----------------------------------------------------------------------------------------------

    def hide(self) -> None:
        """Put the parameters away, as an engine does after its step."""
        assert not self.gathered and not self.pending, f"{[*self.gathered, *self.pending]} are gathered still"
        for name, parameter in self.parameters.items():
            if name not in self.stays:
                self.hidden[name] = parameter.data
                parameter.data = torch.empty(0, dtype=parameter.dtype, device="cpu")

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """All parameters are whole for as long."""
        assert not self.gathered and not self.pending
        for name, data in self.hidden.items():
            self.parameters[name].data = data
        self.hidden.clear()
        yield
        self.hide()

    @contextlib.contextmanager
    def metered(self) -> Iterator[None]:
        """What is handed over is taken off the device at once, as where gradients are reduced: nobody counts it."""
        hooks = [p.register_post_accumulate_grad_hook(_take_gradient) for p in self.parameters.values()]
        yield
        for hook in hooks:
            hook.remove()

    # -- memplan.Shards ---------------------------------------------------------------------------------------------

    def shard(self, parameter: nn.Parameter) -> memplan.Shard | None:
        name = self.names.get(id(parameter))
        if name is None:
            return None
        whole = self.hidden.get(name, parameter)
        return memplan.Shard(whole.shape, whole.numel() * whole.element_size() + self.padding_bytes, name in self.stays)

    def unplanned_because(self) -> str | None:
        return None

    def owns(self, hook: Any) -> bool:
        return False

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def begin(self, used: Collection[int] = ()) -> None:
        self.begun += 1

    def end(self, way: object, used: Collection[int]) -> None:
        pass

    def gather(self, parameter: nn.Parameter) -> FakeHandle:
        name = self.names[id(parameter)]
        assert name not in self.stays
        self.log.append(("gather", name))
        if name in self.pending:
            return self.pending[name]
        if name not in self.gathered:
            parameter.data = torch.full_like(self.hidden[name], float("nan"))
            self.pending[name] = FakeHandle(self, parameter)
            now = {**self.gathered, name: parameter.data}
            self.most = max(self.most, len(now))
            self.gathered = now
            self.most_bytes = max(self.most_bytes, sum(t.numel() * t.element_size() for t in now.values()))
        return self.pending.get(name) or FakeHandle(self, parameter)

    def arrive(self, parameter: nn.Parameter) -> None:
        name = self.names[id(parameter)]
        if self.pending.pop(name, None) is not None:
            self.gathered[name].copy_(self.hidden[name])

    def release(self, parameter: nn.Parameter) -> None:
        name = self.names[id(parameter)]
        self.log.append(("release", name))
        assert self.forgiving or name not in self.pending, f"{name} is freed before it has arrived"
        self.pending.pop(name, None)
        self.gathered.pop(name).fill_(float("nan"))
        parameter.data = torch.empty(0, dtype=parameter.dtype, device="cpu")

    @contextlib.contextmanager
    def accepting(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        kept = [p.data for p in parameters]
        for parameter in parameters:
            shard = self.shard(parameter)
            assert shard is not None
            parameter.data = self.elements[parameter.dtype].expand(shard.shape)
        yield
        for parameter, data in zip(parameters, kept, strict=True):
            parameter.data = data


def _take_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
