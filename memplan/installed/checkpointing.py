"""Gradient checkpointing that a model has on already: a plan decides what is recomputed, so it is off beside one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from memplan.logs import log


@contextlib.contextmanager
def checkpointing_off(model: nn.Module, for_good: bool = False) -> Iterator[Callable[[], None]]:
    """A context in which no module checkpoints by its own flag `gradient_checkpointing`, as models of transformers do.

    Its value is a function that switches it on again, which happens at the end, or only after an error where it is off
    for good. The log then has a line of it.
    """
    modules: list[Any] = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]

    def switch(on: bool) -> None:
        for module in modules:
            module.gradient_checkpointing = on

    switch(False)
    with contextlib.ExitStack() as stack:
        stack.callback(switch, True)
        yield lambda: switch(True)
        if for_good:
            stack.pop_all()
    if modules and for_good:
        log.warning("gradient checkpointing is switched off, for the plan decides what is recomputed")
