"""A part of a model that runs again in backward as a whole: what eager PyTorch calls checkpointing.

It builds the same autograd graph as the plain forward, so gradients are added in the same order. What the graph saves
is recomputed when backward first asks for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from memplan.capture.attributes.attributes import attributes_in_short
from memplan.capture.trace.call import Forward
from memplan.capture.trace.generators import python_generators


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
) -> Any:
    """`forward(*args, **kwargs)` of a module, saving only its arguments and the generator's state.

    observer: called at reruns, in a rehearsal.

    Raises RuntimeError in backward where an argument has been written to since forward began. In a real step, without
    an observer, also where the module has changed.
    """
    given = tensors_in((args, kwargs))
    versions = [t._version for t in given]
    before = _state_of(module)
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
        if observer is NOBODY and (drew or _state_of(module) != before):
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


def _state_of(module: nn.Module) -> tuple[Any, ...]:
    """What a forward may depend on: tensors with their versions, modes, and attributes that are cheap to compare."""
    tensors = tuple((id(t), t._version) for t in (*module.parameters(), *module.buffers()))
    return tensors, attributes_in_short(module)
