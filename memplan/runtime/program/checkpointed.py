"""Layers that PyTorch checkpoints: in steps that run unplanned, and in islands.

    encoder.layers = ModuleList of 12 layers; forward leaves some out by chance
    -> forward saves what each layer is given, and backward runs one layer after the other again

`torch.utils.checkpoint` does so, where no plan can. It restores autocast for the second run.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memplan import torch_private as private
from memplan.capture.attributes.attributes_kept import AttributesKept
from memplan.capture.attributes.kept_memory import SeesWrites, memory_of
from memplan.capture.attributes.named_state import NamedState
from memplan.capture.attributes.tables import CHECKED_ELSEWHERE, held_in, is_plain
from memplan.capture.trace.call import Forward
from memplan.capture.trace.forwards import forwards_exchanged, in_place_of_state
from memplan.capture.trace.islands import Arguments, arguments_of
from memplan.errors import PlanMismatch
from memplan.runtime.program.rng import StateKept, held_rng, replay_all

_IGNORED = (CHECKED_ELSEWHERE | {"forward"}) - {"training"}  # attributes
States = weakref.WeakKeyDictionary[nn.Module, tuple[StateKept, bool]]  # and whether the first call has changed it
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def layers_of(model: nn.Module, depth: int = 1) -> tuple[str, ...]:
    """Paths of the modules that lists of modules hold.

    - depth: how many lists are around a layer: 2 gives the blocks of stages. Layers without lists count too.
    """

    def within(module: nn.Module, path: str, left: int) -> list[str]:
        found = list[str]()
        for name, child in module.named_children():
            at = f"{path}.{name}" if path else name
            is_layer = isinstance(module, _LISTS) and not isinstance(child, _LISTS[::2]) and may_be_checkpointed(child)
            deeper = within(child, at, left - is_layer) if left > is_layer else []
            found += deeper or ([at] if is_layer else [])
        return found

    return tuple(within(model, "", depth))


def may_be_checkpointed(module: nn.Module) -> bool:
    """Whether a module may run again in backward, as far as the user's own code tells: it names no `.data`."""
    return not NamedState(module).names_data


def noting_writes(model: nn.Module, layers: Collection[str], forward: Forward, found: set[str]) -> Forward:
    """The forward, which adds those of the layers to `found` that write to what they have not made, or set `.data`."""

    def noted(path: str, module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        before = memory_of([*module.parameters(), *module.buffers()])
        with SeesWrites() as writes:
            returned = forward(*args, **kwargs)
        exchanged = memory_of([*module.parameters(), *module.buffers()]).keys() != before.keys()
        found.update({path} if writes.wrote or exchanged else ())
        return returned

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        modules = {path: model.get_submodule(path) for path in layers}
        with forwards_exchanged({m: functools.partial(noted, p, m, m.forward) for p, m in modules.items()}):
            return forward(*args, **kwargs)

    return run


def checkpointing(model: nn.Module, layers: Collection[str], forward: Forward) -> Forward:
    """The forward, with these layers of the model checkpointed. Without layers it is the forward itself."""
    if not layers:
        return forward
    states = States()

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with layers_checkpointed(model, layers, states):
            return forward(*args, **kwargs)

    return run


def layers_checkpointed(model: nn.Module, layers: Collection[str], states: States) -> AbstractContextManager[None]:
    """A context in which the forwards of these modules are checkpointed. Hooks on them run once, as ever.

    states: of the modules, as earlier runs have noted them.
    """
    modules = [model.get_submodule(path) for path in layers]
    return forwards_exchanged({m: functools.partial(_checkpointed, m, m.forward, states) for m in modules})


def _checkpointed(module: nn.Module, forward: Callable[..., Any], states: States, /, *args: Any, **kwargs: Any) -> Any:
    """What the forward of a module returns. Its second run has the parameters of the first.

    Where modules in it have hooks, which would run twice, it runs as it is. So it does where it is given an object, a
    cache for instance, in which a second run would find what the first has left.

    Raises PlanMismatch in backward where modes or attributes of the module are no longer those of the first run, and
    where that run has changed a buffer or Python state, as earlier calls have not: another would do so once more.
    """
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    arguments, names = Arguments.of(args, kwargs, state), list(state)
    objects, once = arguments.static[1:], any(private.hooks_on(m) for m in module.modules() if m is not module)
    if once or not torch.is_grad_enabled() or any(hasattr(a, "__dict__") and not callable(a) for a in objects):
        return forward(*args, **kwargs)
    static, given, before = arguments.static, arguments.given, list[Any]()
    device = next((t.device for t in arguments.tensors if t.is_cuda), torch.device("cpu"))
    drawn = held_rng(device)
    replay: Callable[..., Any] | None = None
    changes = False

    def run(*tensors: torch.Tensor) -> Any:
        nonlocal changes, replay
        # Modes and plain attributes of the module and those in it, and which parameters get gradients.
        tables = [vars(m) for m in module.modules()]
        attributes = [(k, v) for table in tables for k, v in table.items() if k not in _IGNORED and is_plain(v)]
        before.append([*attributes, *(p.requires_grad for p in module.parameters())])
        if before[0] != before[-1] or changes:
            raise PlanMismatch(
                f"modes or attributes of a {type(module).__name__} have changed since its forward, or other state in "
                "it, and it runs again in backward. Change them after backward, or plan for a larger budget"
            )
        own_args, own_kwargs = arguments_of(static, tensors)
        call = functools.partial(forward, *own_args, **own_kwargs)
        with in_place_of_state(module, dict(zip(names, tensors[given:], strict=True))):
            if len(before) > 1:
                return replay_all(drawn, device, call if replay is None else functools.partial(replay, call))
            (state, usual), versions = states.get(module, (None, None)), [b._version for b in module.buffers()]
            if state is None or not state.begins():
                now = AttributesKept(module, _IGNORED, run=forward)
                state = StateKept(now, held_in(module, torch.Generator), torch.device("cpu"))
            returned = call()
            replay = state.replay()
            changed = state.changed(draws=True) or versions != [b._version for b in module.buffers()]
            states[module] = state, changed if usual is None else usual
            changes = changed and usual is False
            return returned

    return checkpoint(run, *arguments.tensors, use_reentrant=False, preserve_rng_state=False)
