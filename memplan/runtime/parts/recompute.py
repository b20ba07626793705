"""A part of a model that runs again in backward as a whole: what eager PyTorch calls checkpointing.

It builds the same autograd graph as the plain forward, so gradients are added in the same order. What the graph saves
is recomputed when backward first asks for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from memplan.capture.attributes.attributes import attributes_in_short
from memplan.capture.key import ArgumentsKey
from memplan.capture.trace.call import Call, Forward
from memplan.capture.trace.generators import python_generators
from memplan.runtime.program.collectives import Collectives


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class UnitObserver:
    """Called when passes of units begin and end. This one does nothing.

    phase: as for `Event`; "rerun" is a unit's forward that runs again in its backward.
    """

    def begin(self, index: int, phase: str) -> None: ...

    def end(self, index: int, phase: str) -> None: ...


NOBODY = UnitObserver()


def recomputed(
    module: nn.Module,
    forward: Forward,
    index: int,
    args: Any,
    kwargs: Any,
    observer: UnitObserver = NOBODY,
    ignored: Collection[str] = (),
) -> Any:
    """`forward(*args, **kwargs)` of a module, saving only its arguments and the generator's state.

    - observer: called at reruns, in a rehearsal.
    - ignored: attributes of modules that change without changing what forward computes.

    Raises RuntimeError in backward where an argument has been written to since forward began. In a real step, without
    an observer, also where the module has changed.
    """
    given = tensors_in((args, kwargs))
    versions = [t._version for t in given]
    before = _state_of(module, ignored)
    runs, drew = 0, False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal runs
        runs += 1
        nonlocal drew
        if runs == 1:
            generators = python_generators()
            try:
                return forward(*args, **kwargs)
            finally:
                drew = python_generators() != generators
        if [t._version for t in given] != versions:
            raise RuntimeError(
                "memplan: an argument of a part of the model that is recomputed in backward has been modified by an "
                "inplace operation since forward. Call memplan.remove(model) to train without a plan"
            )
        if observer is NOBODY and (drew or _state_of(module, ignored) != before):
            what = "random of Python or numpy" if drew else "parameters, buffers, modes or attributes"
            raise RuntimeError(
                f"memplan: {what} of a {type(module).__name__} that is recomputed in backward have changed since its "
                "forward began, so it can't run again as it did. Call "
                "memplan.remove(model) to train without a plan"
            )
        observer.begin(index, "rerun")
        forward(*args, **kwargs)  # for what it saves; its results are let go
        observer.end(index, "rerun")
        return None

    return checkpoint(run, *args, use_reentrant=False, **kwargs)


def _state_of(module: nn.Module, ignored: Collection[str]) -> tuple[Any, ...]:
    """What a forward may depend on: tensors with their versions, modes, and attributes that are cheap to compare."""
    tensors = tuple((id(t), t._version) for t in (*module.parameters(), *module.buffers()))
    return tensors, attributes_in_short(module, ignored)


@dataclass(frozen=True, slots=True)
class RecomputedStep:
    """Calls of a module that run again in backward as a whole, which saves as little as possible.

    - ignored: attributes of modules that change without changing what forward computes.
    - provisional: never, because there is nothing to plan.
    """

    module: nn.Module
    forward: Forward
    arguments: ArgumentsKey
    collectives: Collectives
    ignored: frozenset[str] = frozenset()
    plan: None = None
    provisional: bool = False

    def mismatch(self, call: Call) -> str | None:
        """What keeps this step from serving a call, in words."""
        return self.arguments.mismatch(call)

    def settle(self, model: nn.Module) -> None:
        """Does nothing: the module's forward sets all by itself."""

    def run(self, call: Call) -> Any:
        """What the module's forward returns."""
        return recomputed(self.module, self.forward, -1, call.variadic, call.arguments, ignored=self.ignored)

    def bound_to(self, model: nn.Module, forward: Callable[..., Any]) -> RecomputedStep:
        """This step for a copy of the module, which has this forward of its own."""
        return dataclasses.replace(self, module=model, forward=forward)
