"""Leave no trace of a step that runs to be looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.attributes.attributes_kept import AttributesKept
from memplan.capture.attributes.kept_memory import KeptMemory, memory_of, written_by
from memplan.capture.attributes.tables import held_in
from memplan.capture.ops import op_facts
from memplan.capture.ops.edges import Edges
from memplan.capture.ops.layout import storage_key
from memplan.capture.trace.call import Call
from memplan.capture.trace.generators import python_generators_kept


@contextlib.contextmanager
def nothing_kept(model: nn.Module, call: Call, run: Callable[..., Any]) -> Iterator[WritesUndone]:
    """Put back what steps change: gradients, buffers, Python attributes, generators, tensors that forward writes to.

    Hooks of parameters do not run. Parameters that autocast has cast are cast anew in here and afterwards, because a
    step that shared casts with another would add gradients in another order.

    run: what is called.
    """
    leaves = [*model.parameters(), *(t for t in call.tensors if t.is_leaf)]
    homes = [(m._buffers, dict(m._buffers)) for m in model.modules()]
    stand_ins = {b: b.detach().clone() for b in dict.fromkeys(model.buffers())}  # the buffers are not touched at all
    writes = WritesUndone(model, stand_ins.values())
    devices = sorted({t.device for t in leaves if t.device.type == "cuda"}, key=str)
    with contextlib.ExitStack() as stack:  # it puts things back in the reverse order
        for leaf in leaves:
            _set_aside(leaf, stack)
            stack.callback(leaf.requires_grad_, leaf.requires_grad)
        for home, before in homes:
            stack.callback(home.update, before)
            stack.callback(home.clear)
            home.update({name: b if b is None else stand_ins[b] for name, b in before.items()})
        for generator in held_in(model, torch.Generator):
            stack.callback(generator.set_state, generator.get_state())
        stack.callback(writes.undo)
        stack.callback(torch.clear_autocast_cache)
        torch.clear_autocast_cache()
        kept = AttributesKept(model, run=run)
        with python_generators_kept(), torch.random.fork_rng(devices=devices), kept, writes:
            yield writes


def _set_aside(leaf: torch.Tensor, stack: contextlib.ExitStack) -> None:
    """Take a leaf's gradient and hooks away until the stack closes. A hook may well be an optimizer's step."""
    stack.callback(setattr, leaf, "grad", leaf.grad)
    for table in filter(None, (leaf._backward_hooks, leaf._post_accumulate_grad_hooks)):
        stack.callback(table.update, dict(table))
        table.clear()
    leaf.grad = None


class WritesUndone(private.RealOps):
    """Undoes writes to memory that was there before: of parameters, arguments, tensors in attributes, lists, closures.

    Copies memory as soon as an op is about to write to it; `undo` puts it back. made: tensors that are the run's own.
    Parameters whose `.data` was exchanged get theirs back too, except sharded ones, which come and go.
    """

    def __init__(self, model: nn.Module, made: Iterable[torch.Tensor]) -> None:
        super().__init__()
        parameters = [private.part_here(p) for p in model.parameters()]
        self._data = [(p, p.data, storage_key(p)) for p in parameters if p.numel()]
        self._made, self.memory = set(memory_of(list(made))), KeptMemory()

    def on_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        hidden = [args[i] for i in op_facts.HIDDEN_WRITES.get(func, ((), 0))[0] if args[i] is not None]
        for tensor in map(private.part_here, (*written_by(func, args, kwargs), *hidden)):
            owns_memory = tensor.numel() and private.is_ordinary(private.plain(tensor))  # a wrapper has that of others
            if owns_memory and storage_key(tensor) not in self._made:
                self.memory.keep(tensor)
        given = memory_of((args, kwargs))
        result = self.run_op(func, args, kwargs)
        self._made |= memory_of(result).keys() - given.keys()
        return result

    def undo(self) -> None:
        for parameter, data, key in self._data:
            if storage_key(parameter) != key and parameter.shape == data.shape:
                parameter.data = data
        self.memory.undo()


class OtherLeaves(contextlib.ExitStack):
    """Tensors that get gradients though they are no parameters or arguments: a list may hold them, or a closure.

    As a context, it puts their gradients back, and keeps their hooks from running. found: those known so far.
    """

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._known = set(map(id, known))
        self.found: list[torch.Tensor] = []

    def look_behind(self, starts: Sequence[torch.Tensor]) -> None:
        """Find those to which backward from these outputs gives gradients, and take what they have aside."""
        for leaf in [node.variable for node in Edges(starts).leaves if hasattr(node, "variable")]:
            if id(leaf) not in self._known:
                self._known.add(id(leaf))
                self.found.append(leaf)
                _set_aside(leaf, self)
