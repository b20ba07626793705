"""Calls in forward that can't be traced: which these are, and the two ops that a trace has for each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from memplan import torch_private as private
from memplan.capture.attributes.named_state import is_library_code
from memplan.capture.ops.island import BACKWARD, FORWARD, Island, Layout, Place
from memplan.errors import UnsupportedModel


class OpenIsland(UnsupportedModel):
    """A step can't be traced through calls of autograd functions. A run of forward would tell what these give.

    - functions: the functions.
    - given: which outputs get gradients, by name of a call of which only another backward has been looked at.
    """

    def __init__(
        self, message: str, functions: frozenset[Any], given: Mapping[str, tuple[bool, ...]] | None = None
    ) -> None:
        super().__init__(message)
        self.functions, self.given = functions, dict(given or {})


@dataclass(frozen=True, slots=True)
class Islands:
    """What is known of the calls of a step that can't be traced.

    - functions: autograd functions whose calls are such.
    - calls: these calls, in the order in which forward makes them.
    """

    functions: frozenset[Any] = frozenset()
    calls: tuple[Island, ...] = ()


NO_ISLANDS = Islands()


class IslandsTraced:
    """The islands of one trace. Each call that is one becomes two ops."""

    def __init__(self, islands: Islands) -> None:
        self._functions, self._waiting = islands.functions, iter(islands.calls)
        self.used: dict[str, Island] = {}
        self.given: dict[str, tuple[bool, ...]] = {}  # where it is other than has been looked at

    def apply(self, function: Any, args: tuple[Any, ...], original: Any) -> Any:
        """What a call of an autograd function gives. See `private.functions_applied_by`."""
        if function not in self._functions:
            return original(*args)
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        island = next(self._waiting, None)
        if any(private.has_symbolic_shape(t) for t in tensors):
            raise private.FixedSize(f"the autograd function {function.__qualname__} runs as it is, for one size")
        if island is None or not _is_call_of(island, args, tensors):
            raise UnsupportedModel(
                f"the autograd function {function.__qualname__} can't be traced, and calls of it change"
            )
        self.used[island.name] = island
        return self.in_place_of(island, tensors)

    def in_place_of(self, island: Island, tensors: Sequence[torch.Tensor]) -> Any:
        """What a call of an island gives in a trace."""
        facts = island.forward_facts
        assert facts is not None
        made = _AsOps.apply(self, island, *tensors)  # type: ignore[no-untyped-call]
        found = iter(made if isinstance(made, tuple) else (made,))
        outputs = [next(found) if _is_place(output) else output for output in facts.outputs]
        return outputs[0] if facts.single else tuple(outputs)

    def check(self) -> None:
        """Raise OpenIsland where backward hands other gradients to a call than has been looked at."""
        if self.given:
            raise OpenIsland("gradients arrive at other outputs of an opaque call", self._functions, self.given)


def refuse_failed(error: Exception, message: str) -> UnsupportedModel:
    """The refusal for an error in a trace: OpenIsland where it came from an autograd function of a user."""
    function = private.function_that_failed(error)
    if function is None or function is _AsOps or is_library_code(function):
        return UnsupportedModel(message)
    return OpenIsland(message, frozenset({function}))


def islands_of(refusal: UnsupportedModel, applied: Collection[Any]) -> tuple[set[Any], dict[str, tuple[bool, ...]]]:
    """Functions whose calls may be why a step can't be traced, and `given` of `OpenIsland`.

    applied: those that were traced through. Any of them may have left what the refusal is about.
    """
    if isinstance(refusal, OpenIsland):
        return set(refusal.functions), refusal.given
    return {f for f in applied if not is_library_code(f)}, {}


def static_arguments(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of a call, with None in the place of tensors."""
    return tuple(None if isinstance(a, torch.Tensor) else a for a in args)


def _is_call_of(island: Island, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> bool:
    layouts, needs = tuple(map(Layout.of, tensors)), tuple(t.requires_grad and torch.is_grad_enabled() for t in tensors)
    if (layouts, needs) != (island.inputs, island.needs) or len(args) != len(island.static):
        return False
    here = zip(static_arguments(args), island.static, strict=True)
    return all(a is b or (is_lasting(a) and type(a) is type(b) and a == b) for a, b in here)


def is_lasting(thing: Any) -> bool:
    """Whether a thing is the same in each step if it is equal in two."""
    if isinstance(thing, tuple):
        return all(map(is_lasting, thing))
    return isinstance(thing, (bool, int, float, complex, str, type(None), torch.dtype, torch.device))


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
        *results, _ = BACKWARD(island.name, given, list(ctx.saved_tensors))
        sources = {("gradient", i): g for i, g in enumerate(given) if g is not None}
        sources |= dict(zip(forward.kept, ctx.saved_tensors[1:], strict=True))
        sources |= {("result of backward", i): t for i, t in enumerate(results)}
        found = iter(None if p is None else p.view_of(sources[p.source]) for p in backward.gradients)
        return None, None, *(next(found) if needed else None for needed in island.needs)
