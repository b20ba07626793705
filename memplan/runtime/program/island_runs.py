"""Learn from one run of forward on the sample what islands return, save, cost, and change in Python.

To trace an island, the layouts of its outputs and of its saved tensors must be known. Made-up inputs would not do: a
kernel that follows pointers crashes on indices that are out of range.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memplan import torch_private as private
from memplan.capture.attributes.attributes import AttributesKept, attributes_in_short, is_plain
from memplan.capture.attributes.named_state import state_behind
from memplan.capture.ops.island import Island, IslandCost, Layout, NoIsland, Place
from memplan.capture.trace.call import Forward
from memplan.capture.trace.forwards import forwards_exchanged
from memplan.capture.trace.generators import python_generators
from memplan.capture.trace.islands import Arguments, Islands, arguments_of, is_lasting
from memplan.capture.trace.raw_trace import Autocast
from memplan.capture.trace.source_lines import caller_line
from memplan.runtime.program.rng import held_rng, restore_held_rng
from memplan.runtime.watch.meter import LiveMeter


class IslandRuns:
    """Learns about each call of some autograd functions and modules while forward runs.

    Each call runs twice more on its own inputs, and its backward runs twice on made-up gradients. Python state that
    these extra runs change is restored.
    """

    def __init__(
        self, model: nn.Module, callables: frozenset[Any], given: Mapping[str, tuple[bool, ...]], device: torch.device
    ) -> None:
        """Prepare for a run of the model's forward.

        - callables: autograd functions, and paths of modules, whose calls are islands.
        - given: which outputs get gradients, by name of a call, where these are not all that can have one.
        - device: of the plan.
        """
        self._model, self._callables, self._given, self._device = model, callables, given, device
        self._parameters, self._own = list(model.parameters()), _own_things(model)
        self._calls: list[Island] = []
        self._within = False

    @property
    def islands(self) -> Islands:
        """The islands of the run, in the order of forward."""
        return Islands(self._callables, tuple(self._calls))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A context for the run."""
        modules = {m: self._forward(path, m) for path, m in self._model.named_modules() if path in self._callables}
        with private.functions_applied_by(self._apply), forwards_exchanged(modules):
            yield

    def _apply(self, function: Any, args: tuple[Any, ...], original: Any) -> Any:
        if function not in self._callables or self._within:
            return original(*args)
        arguments = Arguments.of(args, {})
        static = arguments.static
        places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]

        def call(module: nn.Module | None, *given: torch.Tensor) -> Any:
            return original(*arguments_of(static, places, given))

        named = functools.partial(lambda *_: function, *static)  # what it reads, and what it is given
        repeats = state_behind(vars(function).get("forward")) is None
        kept = functools.partial(AttributesKept, nn.Identity(), run=named, given=static)
        return self._looked_at(function.__qualname__, None, arguments, call, lambda: original(*args), kept, repeats)

    def _forward(self, path: str, module: nn.Module) -> Forward:
        original = module.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._within:
                return original(*args, **kwargs)
            arguments = Arguments.of(args, kwargs, module)
            static, leaves = arguments.static, pytree.tree_leaves((args, kwargs))
            places = [i for i, a in enumerate(leaves) if isinstance(a, torch.Tensor)]
            names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]

            def call(module: nn.Module | None, *given: torch.Tensor) -> Any:
                assert module is not None
                own_args, own_kwargs = arguments_of(static, places, given[: len(places)])
                state = dict(zip(names, given[len(places) :], strict=True))
                with private.in_place_of_state(module, state):
                    return module.forward(*own_args, **own_kwargs)

            kept = functools.partial(AttributesKept, module, run=original)
            return self._looked_at(path, path, arguments, call, lambda: original(*args, **kwargs), kept, True)

        return forward

    def _looked_at(
        self,
        name: str,
        module: str | None,
        arguments: Arguments,
        call: Callable[..., Any],
        run: Callable[[], Any],
        kept: Callable[[], AttributesKept],
        repeats: bool,
    ) -> Any:
        """Return what the call returns in forward, and add an island for the call.

        - module: path of the module that is called; None for a function.
        - call: see `Island`.
        - run: makes the call as forward does.
        - kept: makes a context that restores the Python state which the call may change.
        - repeats: False if the code of the call reads Python state, so that the call must not run again.

        Raises NoIsland.
        """
        if any(id(a) in self._own and not is_lasting(a) for a in arguments.static):
            raise NoIsland(f"{name} is given what belongs to the model; a copy has another")
        names = {id(p): own for own, p in self._model.named_parameters()}
        owners = tuple(names.get(id(tensor)) for tensor in arguments.tensors)
        pairs = zip(arguments.tensors, owners, strict=True)
        if any(owner is None and private.attributes_set_on(tensor) for tensor, owner in pairs):
            raise NoIsland(f"{name} is given a tensor with attributes of its own")
        before, python_before, self._within = held_rng(self._device), python_generators(), True
        autocast, tensors = Autocast.ambient(self._device.type), arguments.tensors
        island = Island(
            name=f"{name} {len(self._calls)}",
            function=name,
            title=f"{name} at {caller_line()}",
            static=arguments.static,
            module=module,
            call=call,
            named=functools.partial(_plain_attributes, owners),
            inputs=tuple(map(Layout.of, tensors)),
            needs=tuple(t.requires_grad and torch.is_grad_enabled() for t in tensors),
            device=self._device,
            around=autocast.context,
            attributes=attributes_in_short,
        )
        gradients = [p.grad for p in self._parameters]
        try:
            returned = run()
            after = held_rng(self._device)
            island.random = before != after
            island.repeats = repeats and python_generators() == python_before
            try:
                with torch.no_grad(), kept() as attributes:
                    self._look(island, tensors, returned, before, attributes)
            except NoIsland:
                raise
            except Exception as error:
                raise NoIsland(f"{island.title} fails when it runs a second time: {error}") from error
            finally:
                restore_held_rng(self._device, after)
        finally:
            self._within = False
        if any(p.grad is not g for p, g in zip(self._parameters, gradients, strict=True)):
            raise NoIsland(f"the backward of {island.title} writes to .grad of parameters")
        self._calls.append(island)
        return returned

    def _look(
        self, island: Island, given: Sequence[torch.Tensor], returned: Any, state: Any, attributes: AttributesKept
    ) -> None:
        """Fill the facts and costs of an island by extra runs of the call and its backward.

        state: of the generators before the call.
        """
        tensors = [t.detach() for t in given]

        def forward() -> list[torch.Tensor]:
            restore_held_rng(self._device, state)
            return island.forward(self._model, tensors)

        with private.outside_of_tracing():
            (*results, ticket), island.forward_cost = self._twice(forward, tensors)
            island.repeats &= not attributes.changed()
            facts = island.forward_facts
            assert facts is not None
            sources = {("input", i): t for i, t in enumerate(tensors)}
            sources |= {("result", i): t for i, t in enumerate(results)}
            outputs = [p.seen_in(sources[p.source]) if isinstance(p, Place) else None for p in facts.outputs]
            island.repeats &= all(map(_same_bits, outputs, pytree.tree_leaves(returned)))
            if any(facts.differentiable):
                pairs = zip(outputs, self._given.get(island.name, facts.differentiable), strict=True)
                grads = [torch.full_like(o, 0.5) if o is not None and is_given else None for o, is_given in pairs]
                kept = [ticket, *(sources[source] for source in facts.kept)]
                _, island.backward_cost = self._twice(lambda: island.backward(grads, kept), [*grads, *kept])

    def _twice(
        self, run: Callable[[], list[torch.Tensor]], given: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor], IslandCost]:
        """Results and costs of one of the two ops, from two runs: one for memory, one for time. given: its inputs."""
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


def _plain_attributes(owners: Sequence[str | None], model: nn.Module) -> list[dict[str, Any]]:
    """Attributes of the parameters with these names, as far as no run can change them in place."""
    parameters = [None if name is None else model.get_parameter(name) for name in owners]
    named = [vars(p) if p is not None and private.is_ordinary(p) else {} for p in parameters]
    return [{key: value for key, value in table.items() if is_plain(value)} for table in named]


def _own_things(model: nn.Module) -> dict[int, Any]:
    """Modules, objects and containers that a copy of the model has copies of, by their id."""
    own: dict[int, Any] = {}
    pending: list[Any] = [model]
    while pending:
        thing = pending.pop()
        if id(thing) in own or isinstance(thing, (torch.Tensor, type, ModuleType)) or inspect.isroutine(thing):
            continue
        own[id(thing)] = thing
        if isinstance(thing, (dict, list, tuple, set, deque)):
            pending += thing.values() if isinstance(thing, dict) else thing
        elif hasattr(thing, "__dict__"):
            pending += vars(thing).values()
    return own


def _same_bits(first: torch.Tensor | None, second: Any) -> bool:
    if first is None:
        return True
    one, other = (t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (first, second))
    return torch.equal(one, other)
