"""A run of forward in which calls that can't be traced are looked at: what they give, save, take, and leave behind."""

from __future__ import annotations

import functools
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.attributes.attributes import AttributesKept, attribute_tables
from memplan.capture.attributes.named_state import state_behind
from memplan.capture.ops.island import Island, IslandCost, Layout, NoIsland, Place
from memplan.capture.trace.islands import Islands, is_lasting, static_arguments
from memplan.capture.trace.raw_trace import Autocast
from memplan.capture.trace.source_lines import caller_line
from memplan.errors import UnsupportedModel
from memplan.runtime.program.rng import held_rng, restore_held_rng
from memplan.runtime.watch.meter import LiveMeter


class IslandRuns:
    """Looks at each call of some autograd functions while forward runs.

    Each such call runs twice more by itself, and its backward twice, on made-up gradients. What that leaves behind in
    Python is put back.
    """

    def __init__(
        self, model: nn.Module, functions: frozenset[Any], given: Mapping[str, tuple[bool, ...]], device: torch.device
    ) -> None:
        """Prepare for a run of the model's forward.

        - functions: whose calls are looked at.
        - given: which outputs get gradients, by name of a call, where these are not all that can have one.
        - device: of the plan.
        """
        self._parameters, self._functions, self._given = list(model.parameters()), functions, given
        self._device, self._own = device, {id(thing) for thing in _own_things(model)}
        self._calls: list[Island] = []

    @property
    def islands(self) -> Islands:
        """What the run has shown."""
        return Islands(self._functions, tuple(self._calls))

    def apply(self, function: Any, args: tuple[Any, ...], original: Any) -> Any:
        """What a call of a function gives. See `private.functions_applied_by`."""
        if function not in self._functions:
            return original(*args)
        before, python_before = held_rng(self._device), _python_generators()
        returned = original(*args)
        after, drawn = held_rng(self._device), _python_generators() != python_before
        island = self._of(function, args, original)
        island.random = before != after
        island.repeats = not drawn and state_behind(vars(function).get("forward")) is None
        named = functools.partial(lambda *_: function, *island.static)  # what it reads, and what it is given
        gradients = [p.grad for p in self._parameters]
        try:
            with (
                torch.no_grad(),
                AttributesKept(nn.Identity(), run=named, given=island.static) as attributes,
            ):
                self._look(island, args, returned, before, attributes)
        except NoIsland:
            raise
        except Exception as error:
            raise NoIsland(f"{island.title} fails when it runs a second time: {error}") from error
        finally:
            restore_held_rng(self._device, after)
        if any(p.grad is not g for p, g in zip(self._parameters, gradients, strict=True)):
            raise NoIsland(f"the backward of {island.title} writes to .grad of parameters")
        self._calls.append(island)
        return returned

    def _of(self, function: Any, args: tuple[Any, ...], original: Any) -> Island:
        tensors, static = [a for a in args if isinstance(a, torch.Tensor)], static_arguments(args)
        if any(id(a) in self._own and not is_lasting(a) for a in static):
            raise NoIsland(f"{function.__qualname__} is given what belongs to the model; a copy has another")
        places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]

        def call(*given: torch.Tensor) -> Any:
            filled = list(static)
            for place, tensor in zip(places, given, strict=True):
                filled[place] = tensor
            return original(*filled)

        autocast = Autocast.ambient(self._device.type)
        return Island(
            name=f"{function.__qualname__} {len(self._calls)}",
            function=function.__qualname__,
            title=f"{function.__qualname__} at {caller_line()}",
            static=static,
            call=call,
            inputs=tuple(map(Layout.of, tensors)),
            needs=tuple(t.requires_grad and torch.is_grad_enabled() for t in tensors),
            device=self._device,
            around=autocast.context,
        )

    def _look(
        self, island: Island, args: tuple[Any, ...], returned: Any, state: Any, attributes: AttributesKept
    ) -> None:
        """Run the call and its backward by themselves. state: of the generators, before the call."""
        tensors = [a.detach() for a in args if isinstance(a, torch.Tensor)]

        def forward() -> list[torch.Tensor]:
            restore_held_rng(self._device, state)
            return island.forward(tensors)

        with private.outside_of_tracing():
            (*results, ticket), island.forward_cost = self._twice(forward, tensors)
            island.repeats &= not _changes(attributes)
            facts = island.forward_facts
            assert facts is not None
            sources = {("input", i): t for i, t in enumerate(tensors)}
            sources |= {("result", i): t for i, t in enumerate(results)}
            outputs = [p.seen_in(sources[p.source]) if isinstance(p, Place) else None for p in facts.outputs]
            island.repeats &= all(map(_same_bits, outputs, [returned] if facts.single else returned))
            if any(facts.differentiable):
                given = zip(outputs, self._given.get(island.name, facts.differentiable), strict=True)
                grads = [torch.full_like(o, 0.5) if o is not None and is_given else None for o, is_given in given]
                kept = [ticket, *(sources[source] for source in facts.kept)]
                _, island.backward_cost = self._twice(lambda: island.backward(grads, kept), [*grads, *kept])

    def _twice(
        self, run: Callable[[], list[torch.Tensor]], given: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor], IslandCost]:
        """What one of the two ops gives, and takes. given: what it reads."""
        meter = LiveMeter()
        meter.register(given)
        before_bytes = meter.live_bytes
        with meter:
            results = run()
        made_bytes = sum(t.untyped_storage().nbytes() for t in results)
        del results
        begin = time.perf_counter()
        results = run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        time_s = time.perf_counter() - begin
        return results, IslandCost(time_s, max(0, meter.peak_bytes - before_bytes - made_bytes))


def _own_things(model: nn.Module) -> Iterator[Any]:
    """Modules, objects and containers that a copy of the model has copies of."""
    yield from model.modules()
    pending = [value for _, table in attribute_tables(model) for value in table.values()]
    while pending:
        thing = pending.pop()
        yield thing
        if isinstance(thing, (dict, list, tuple, set, deque)):
            pending += thing.values() if isinstance(thing, dict) else thing


def _changes(attributes: AttributesKept) -> bool:
    """Whether attributes are now others than they were."""
    try:
        return bool(attributes.changes())
    except UnsupportedModel:
        return True


def _python_generators() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, np.asarray(keys).tobytes(), rest


def _same_bits(first: torch.Tensor | None, second: Any) -> bool:
    if first is None:
        return True
    one, other = (t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (first, second))
    return torch.equal(one, other)
