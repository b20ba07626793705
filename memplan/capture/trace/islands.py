"""Islands in a trace: calls that can't be traced, and the two ops that stand for each.

A trace that fails in a call raises `OpenIsland`, which names the autograd function or the module. `Capturing` then runs
forward once on the sample (`runtime/program/island_runs.py`), and traces again with what that run has learned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memplan import torch_private as private
from memplan.capture.attributes.code_facts import NamedOn, names_by_line
from memplan.capture.attributes.named_state import is_library_code
from memplan.capture.ops.island import BACKWARD, FORWARD, Island, Layout, Place
from memplan.capture.trace.call import Forward
from memplan.capture.trace.raw_trace import Autocast
from memplan.capture.trace.source_lines import caller_frame
from memplan.errors import UnsupportedModel


class OpenIsland(UnsupportedModel):
    """A step can't be traced through some calls. With a run of forward on the sample these calls could be islands.

    - callables: autograd functions, and paths of modules.
    - given: by name of an island, which of its outputs get gradients, if the run had others get gradients.
    """

    def __init__(
        self, message: str, callables: Collection[Any], given: Mapping[str, tuple[bool, ...]] | None = None
    ) -> None:
        super().__init__(message)
        self.callables, self.given = frozenset(callables), dict(given or {})


class CompiledCode(OpenIsland):
    """Forward calls code that went through torch.compile.

    Such code must not even run while a step is looked at: from then on PyTorch would run it without what was compiled.
    """


@dataclass(frozen=True, slots=True)
class Islands:
    """The islands of a step.

    - callables: autograd functions, and paths of modules, whose calls are such.
    - calls: these calls, in the order in which forward makes them.
    """

    callables: frozenset[Any] = frozenset()
    calls: tuple[Island, ...] = ()


NO_ISLANDS = Islands()


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a call is given.

    - static: the arguments, with None in the place of tensors.
    - tensors: those among the arguments, then parameters and buffers of a module that is called.
    """

    static: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]

    @staticmethod
    def of(args: Any, kwargs: Any, module: nn.Module | None = None) -> Arguments:
        """The arguments of a call. In those of a function, autograd looks for tensors in no container."""
        leaves, spec = (args, None) if module is None else pytree.tree_flatten((args, kwargs))
        static = (spec, *(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves))
        state = () if module is None else (t for _, t in (*module.named_parameters(), *module.named_buffers()))
        return Arguments(static, (*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), *state))


def arguments_of(static: tuple[Any, ...], places: Sequence[int], tensors: Sequence[torch.Tensor]) -> Any:
    """The arguments of a call: of a function, a list; of a module, args and kwargs.

    static: see `Arguments`. places, tensors: what stands where there.
    """
    spec, *leaves = static
    for place, tensor in zip(places, tensors, strict=True):
        leaves[place] = tensor
    return leaves if spec is None else pytree.tree_unflatten(leaves, spec)


class IslandsTraced:
    """The islands of one trace. Each call that is one becomes two ops."""

    def __init__(self, islands: Islands) -> None:
        self._callables, self._waiting = islands.callables, iter(islands.calls)
        self.used: dict[str, Island] = {}
        self.given: dict[str, tuple[bool, ...]] = {}  # see `OpenIsland`
        self.handed: set[NamedOn] = set()  # names that lines only hand on to islands

    def apply(self, function: Any, args: tuple[Any, ...], original: Any) -> Any:
        """What a call of an autograd function gives. See `private.functions_applied_by`."""
        if function not in self._callables:
            return original(*args)
        return self._in_place_of(function.__qualname__, Arguments.of(args, {}))

    def forwards(self, model: nn.Module) -> dict[nn.Module, Forward]:
        """Forwards for modules that are islands."""

        def forward_of(path: str, module: nn.Module) -> Forward:
            return lambda *args, **kwargs: self._in_place_of(path, Arguments.of(args, kwargs, module))

        return {m: forward_of(path, m) for path, m in model.named_modules() if path in self._callables}

    def _in_place_of(self, name: str, arguments: Arguments) -> Any:
        """The fake outputs of an island, computed by its forward op."""
        island = next(self._waiting, None)
        if any(private.has_symbolic_shape(t) for t in arguments.tensors):
            raise private.FixedSize(f"{name} runs as it is, for one size")
        if island is None or not _is_call_of(island, arguments):
            raise OpenIsland(f"{name} can't be traced, and calls of it change", self._callables)
        self.used[island.name] = island
        self.handed |= _handed_by(caller_frame(), arguments.static)
        facts = island.forward_facts
        assert facts is not None
        made = _AsOps.apply(self, island, *arguments.tensors)  # type: ignore[no-untyped-call]
        found = iter(made if isinstance(made, tuple) else (made,))
        outputs = [next(found) if _is_place(output) else output for output in facts.outputs]
        return pytree.tree_unflatten(outputs, facts.spec)

    def check(self) -> None:
        """Raise OpenIsland if backward gives gradients to other outputs of an island than in the run of forward."""
        if self.given:
            raise OpenIsland("gradients arrive at other outputs of an opaque call", self._callables, self.given)


def refuse_failed(error: Exception, message: str, module: str = "") -> UnsupportedModel:
    """The refusal for an error in a trace: OpenIsland where it came from an autograd function, or from a module.

    module: path of the one that could run as it is.
    """
    function = private.function_that_failed(error)
    if function is not None and function is not _AsOps and not is_library_code(function):
        return OpenIsland(message, {function})
    return OpenIsland(message, {module}) if module else UnsupportedModel(message)


def islands_of(refusal: UnsupportedModel, applied: Collection[Any]) -> tuple[set[Any], dict[str, tuple[bool, ...]]]:
    """Candidates for islands after a refusal, and `given` of `OpenIsland`.

    applied: functions that were traced through. Any of them may have the side effect that the refusal is about.
    """
    if isinstance(refusal, OpenIsland):
        return set(refusal.callables), refusal.given
    return {f for f in applied if not is_library_code(f)}, {}


def _is_call_of(island: Island, arguments: Arguments) -> bool:
    tensors, static = arguments.tensors, arguments.static
    layouts, needs = tuple(map(Layout.of, tensors)), tuple(t.requires_grad and torch.is_grad_enabled() for t in tensors)
    if (layouts, needs) != (island.inputs, island.needs) or len(static) != len(island.static):
        return False
    here = zip(static, island.static, strict=True)
    return all(a is b or (is_lasting(a) and type(a) is type(b) and a == b) for a, b in here)


def _handed_by(frame: FrameType | None, static: Sequence[Any]) -> set[NamedOn]:
    """Names that the line of a call reads only to pass what they name to the call.

    The contents of a list that an island appends to must not become guards, or each step would be planned anew.
    """
    if frame is None:
        return set()
    values = {**frame.f_globals, **frame.f_locals}
    on_line = names_by_line(frame.f_code).get(frame.f_lineno, {})
    return {
        NamedOn(frame.f_code, frame.f_lineno, name)
        for name, count in on_line.items()
        if count == 1 and any(values.get(name, values) is thing for thing in static if not is_lasting(thing))
    }


def is_lasting(thing: Any) -> bool:
    """Whether a thing is the same in each step if it is equal in two."""
    if isinstance(thing, tuple):
        return all(map(is_lasting, thing))
    return isinstance(thing, (bool, int, float, complex, str, type(None), torch.dtype, torch.device, pytree.TreeSpec))


def _is_place(output: Any) -> TypeGuard[Place]:
    return isinstance(output, Place)


class _AsOps(torch.autograd.Function):
    """Writes the forward op of an island to a trace, and its backward op where backward comes to it."""

    @staticmethod
    def forward(ctx: Any, traced: IslandsTraced, island: Island, *tensors: torch.Tensor) -> Any:
        facts = island.forward_facts
        assert facts is not None
        *results, ticket = FORWARD(island.name, list(tensors))
        sources = {("input", i): t for i, t in enumerate(tensors)} | {("result", i): t for i, t in enumerate(results)}
        places = [(p, d) for p, d in zip(facts.outputs, facts.differentiable, strict=True) if _is_place(p)]
        outputs = [place.view_of(sources[place.source]) for place, _ in places]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o, (_, d) in zip(outputs, places, strict=True) if not d))
        ctx.traced, ctx.island = traced, island
        ctx.save_for_backward(ticket, *(sources[source] for source in facts.kept))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        island: Island = ctx.island
        forward, backward = island.forward_facts, island.backward_facts
        assert forward is not None
        assert backward is not None
        handed = iter(grads)
        given = [next(handed) if _is_place(output) else None for output in forward.outputs]
        pattern = tuple(g is not None for g in given)
        if pattern != backward.given:
            ctx.traced.given[island.name] = pattern
        autocast = Autocast.of_backward(island.device.type)
        if autocast is not None:
            mode = f"_under_{str(autocast.dtype).removeprefix('torch.')}"
            ctx.traced.used[island.name] = dataclasses.replace(
                island, around_backward=autocast.context, backward_mode=mode
            )
        *results, _ = BACKWARD(island.name, given, list(ctx.saved_tensors))
        sources = {("gradient", i): g for i, g in enumerate(given) if g is not None}
        sources |= dict(zip(forward.kept, ctx.saved_tensors[1:], strict=True))
        sources |= {("result of backward", i): t for i, t in enumerate(results)}
        found = iter(None if p is None else p.view_of(sources[p.source]) for p in backward.gradients)
        return None, None, *(next(found) if needed else None for needed in island.needs)
