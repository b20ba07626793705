"""Leave no trace of a step that runs to be looked at."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from memplan.capture.attributes.attributes_kept import AttributesKept
from memplan.capture.attributes.tables import own_generators
from memplan.capture.trace.call import Call
from memplan.runtime.trial.forward_writes import WritesUndone


@contextlib.contextmanager
def nothing_kept(
    model: nn.Module,
    call: Call,
    run: Callable[..., Any] | None = None,
) -> Iterator[WritesUndone]:
    """Put back what steps change: gradients, buffers, Python attributes, generators, tensors that forward writes to.

    Hooks of parameters do not run. Parameters that autocast has cast are cast anew in here and afterwards, because a
    step that shared casts with another would add gradients in another order.

    run: what is called, where it is not the model's forward alone.
    """
    writes = WritesUndone(model, call)
    leaves = [*model.parameters(), *(t for t in call.tensors if t.is_leaf)]
    gradients = [(leaf, leaf.grad, leaf.requires_grad) for leaf in leaves]
    homes = [(m._buffers, dict(m._buffers)) for m in model.modules()]
    stand_ins = {b: b.detach().clone() for b in dict.fromkeys(model.buffers())}  # the buffers are not touched at all
    devices = sorted({t.device for t in leaves if t.device.type == "cuda"}, key=str)
    # Such a hook may well be an optimizer's step.
    tables = [t for leaf in leaves for t in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks) if t]
    hooks = [(table, dict(table)) for table in tables]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    generators = [(g, g.get_state()) for g in own_generators(model)]
    torch.clear_autocast_cache()
    try:
        for leaf in leaves:
            leaf.grad = None
        for home, before in homes:
            home.update({name: b if b is None else stand_ins[b] for name, b in before.items()})
        for table, _ in hooks:
            table.clear()
        with torch.random.fork_rng(devices=devices), AttributesKept(model, run=run, given=call.leaves), writes:
            yield writes
    finally:
        torch.clear_autocast_cache()
        writes.undo()
        for table, held in hooks:
            table.update(held)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for generator, state in generators:
            generator.set_state(state)
        for home, before in homes:
            home.clear()
            home.update(before)
        for leaf, gradient, required in gradients:
            leaf.requires_grad_(required).grad = gradient
