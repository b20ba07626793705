"""Islands in a trace: calls that can't be traced, and the two ops that stand for each.

A trace that fails in a call raises a `Refusal` with `MakeIslands`, which names the autograd function or the module.
`TraceLoop` then runs forward once on the sample (`runtime.trial.island_runs.py`), and traces again with what that run
has learned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.attributes.attribute_reads import AttributeReads
from memplan.capture.attributes.code_facts import NamedOn, names_by_line
from memplan.capture.attributes.named_functions import NamedFunction
from memplan.capture.attributes.named_state import is_library_code
from memplan.capture.attributes.tables import CHECKED_ELSEWHERE, attribute_tables, has_traced_tensors, state_in_short
from memplan.capture.ops.island import Island
from memplan.capture.ops.island_call import numbers_in, with_numbers
from memplan.capture.ops.island_ops import BACKWARD, FORWARD
from memplan.capture.ops.layout import Layout, Place
from memplan.capture.ops.recorded_graph import Edges
from memplan.capture.ops.ways import Calls, MakeIslands, Refusal
from memplan.capture.trace.forwards import calls_exchanged
from memplan.capture.trace.raw_trace import Autocast, modes_at
from memplan.capture.trace.source_lines import caller_frame
from memplan.torch_private import pytree

_MOST_SEEN = 8  # sizes at which an island was looked at


@dataclass(frozen=True, slots=True)
class Islands:
    """The islands of a step.

    - callables: autograd functions, paths of modules, classes of modules that forward makes, and named functions, whose
      calls are such.
    - calls: these calls, in the order in which forward makes them.
    - reasons: why each of the callables is one.
    - layers: paths of modules in them, or of them, that PyTorch checkpoints.
    """

    callables: frozenset[Any] = frozenset()
    calls: tuple[Island, ...] = ()
    reasons: Mapping[Any, str] = field(default_factory=dict)
    layers: Collection[str] = ()

    def has(self, path: str) -> bool:
        """Whether a module is an island, or within one."""
        return any(isinstance(c, str) and (path == c or path.startswith(f"{c}.")) for c in self.callables)

    def knowing(self, earlier: Islands) -> Islands:
        """These islands, which also know what runs of an earlier call showed, if it differs in sizes alone."""
        for island, other in zip(self.calls, earlier.calls):
            if _differ_in_sizes(island, other):
                seen = (s for s in (*other.known, other.seen) if s.numbers != island.seen.numbers)
                island.known = (*seen,)[-_MOST_SEEN:]
        return self

    @property
    def told(self) -> tuple[str, ...]:
        """The calls with the reason for each, in words."""
        varies = "; what it saves differs from step to step, and has room for the most seen"
        found = dict[str, None]()
        for call in self.calls:
            count = sum(f"{path}.".startswith(f"{call.called}.") for path in self.layers)
            spared = f"; PyTorch checkpoints {count} of its layers" if count > 1 else "; PyTorch checkpoints it"
            why = self.reasons.get(call.called, "it can not be traced")
            found[f"{call.title}: {why}{varies if call.varies else ''}{spared if count else ''}"] = None
        return tuple(found)


NO_ISLANDS = Islands()


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a call is given.

    - static: the arguments. In the place of a tensor, which of the tensors it is.
    - tensors: those among the arguments, each once, then the state of a module that is called.
    - given: how many tensors are arguments.
    """

    static: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]
    given: int

    @staticmethod
    def of(args: Any, kwargs: Any, state: Mapping[str, torch.Tensor] = {}, nested: bool = True) -> Arguments:
        """The arguments of a call. nested: look for tensors in containers, as autograd does not for a function."""
        leaves, spec = pytree.tree_flatten((args, kwargs)) if nested else (args, None)
        tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        static = (spec, *(TensorAt(places[id(x)]) if isinstance(x, torch.Tensor) else x for x in leaves))
        return Arguments(static, (*tensors, *state.values()), len(tensors))


class TensorAt(NamedTuple):
    """Stands for one of the tensors of a call."""

    place: int


def arguments_of(static: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> Any:
    """The arguments of a call: of a function, a list; of a module, args and kwargs. static: see `Arguments`."""
    spec, *leaves = static
    leaves = [tensors[leaf.place] if isinstance(leaf, TensorAt) else leaf for leaf in leaves]
    return leaves if spec is None else pytree.tree_unflatten(leaves, spec)


def state_given(called: Any, module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module that are given to calls of it, or of its method."""
    read = read_by(called, module)
    return {} if isinstance(called, type) else {**dict(read.named_parameters()), **dict(read.named_buffers())}


def read_by(called: Any, module: nn.Module) -> nn.Module:
    """The module that is called; or what a method, or a function, reads of it."""
    return called.part_of(module) if isinstance(called, NamedFunction) else module


class IslandsTraced:
    """The islands of one trace. Each call that is one becomes two ops."""

    def __init__(self, islands: Islands, around: Callable[[], Calls]) -> None:
        """around: gives the calls of modules that are running."""
        self._callables, self._waiting, self._around = islands.callables, iter(islands.calls), around
        self.used: dict[str, Island] = {}
        self.here: dict[str, Island] = {}  # the same ones, at the sizes of the trace
        self.given: dict[str, tuple[bool, ...]] = {}  # see `MakeIslands`
        self.unfit: set[Any] = set()
        self._states: list[tuple[Any, Callable[[], Any], Any]] = []  # Python state at each call
        self._casting: set[str] = set()  # functions that may cast parameters, as others do
        self.handed: set[NamedOn] = set()  # names that lines only hand on to islands
        self.applied: dict[Any, Calls] = {}  # functions that were traced through, with the calls around them

    def apply(self, function: Any, args: tuple[Any, ...], original: Any) -> Any:
        """What a call of an autograd function gives. See `private.functions_applied_by`."""
        if function not in self._callables:
            if function not in self.applied:
                self.applied[function] = (function, *self._around())
            return original(*args)
        return self._in_place_of(function, Arguments.of(args, {}, nested=False))

    def calls(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """A context in which calls of modules and named functions that are islands, or marked as such, are ops."""

        def traced(called: Any, module: nn.Module, original: Any, args: Any, kwargs: Any) -> Any:
            return self._in_place_of(called, Arguments.of(args, kwargs, state_given(called, module)), module)

        marked = {Opaque, *(path for path, m in model.named_modules() if path and _MARK in vars(m))}
        return calls_exchanged(model, self._callables | marked, traced)

    def _in_place_of(self, called: Any, arguments: Arguments, module: nn.Module | None = None) -> Any:
        """The fake outputs of an island, computed by its forward op."""
        name = name_of(called)
        island = next(self._waiting, None)
        if called not in self._callables:
            raise Refusal(f"{name} is marked by memplan.opaque", MakeIslands([(called, *self._around())]))
        like = module if isinstance(called, type) else None
        if island is None or not _is_call_of(island, called, arguments, like):
            raise Refusal(f"{name} can't be traced, and calls of it change", MakeIslands([(called, *self._around())]))
        here = island
        if any(map(private.is_symbolic, (*numbers_in(tuple(map(Layout.of, arguments.tensors))), *arguments.static))):
            island, here = island.sized(arguments.tensors, arguments.static)
        self.used[island.name], self.here[island.name] = island, here
        home = nn.Identity() if module is None else module
        run = called if module is None else getattr(called, "function", None)
        if has_traced_tensors(read_by(called, home), run):
            self.unfit.add(called)

        def look() -> Any:
            return state_in_short(read_by(called, home), run)

        self._states.append((called, look, look()))
        self.handed |= _handed_by(caller_frame(), arguments.static)
        autocast = Autocast.ambient(island.device.type)
        if isinstance(called, NamedFunction) and autocast.enabled and autocast.cache_enabled:
            self._casting.add(island.name)
        facts = here.forward_facts
        assert facts is not None
        further = [arguments.tensors[position] for position in island.further_uses]
        sizes = [arguments.static[place] for place in island.open]
        made = _AsOps.apply(self, here, sizes, *arguments.tensors, *further)  # type: ignore[no-untyped-call]
        found = iter(made if isinstance(made, tuple) else (made,))
        outputs = [next(found) if isinstance(output, Place) else output for output in facts.outputs]
        return pytree.tree_unflatten(outputs, facts.spec)

    def look_at(self, edges: Edges) -> None:
        """Look at what else gives gradients to arguments of islands. Raises a Refusal where sums would differ."""
        for node in edges.functions:
            if type(node)._forward_cls is not _AsOps:
                continue
            island: Island = node.island
            facts, shared = island.forward_facts, set[int]()
            assert facts is not None
            for position, (target, number) in enumerate(node.next_functions):
                if target is None or not (island.loose or island.name in self._casting):
                    continue
                count, readers = len(island.inputs), edges.into(target, number)
                i = position if position < count else island.further_uses[position - count]
                others = any(reader is not node for reader, _ in readers)
                if others and island.owners[i] is not None and island.name in self._casting:
                    raise Refusal(
                        f"{island.function} shares parameters, whose casts autocast shares too",
                        MakeIslands(unfit={island.called}),
                    )
                # If all others read it before, all gradients from within the island arrive first. So their sum is
                # made before others are added, however many they are.
                is_last = readers[0][0] is node and island.owners[i] is None
                if len(readers) > 1 and not is_last and island.loose:
                    shared.add(i)
            self.used[island.name].shared = frozenset(shared)
            if island.room is not None and any(facts.uses[i] > 1 or island.owners[i] is not None for i in shared):
                self.unfit.add(island.called)
        if self.unfit:
            raise Refusal(
                "an opaque call reads differently often what others read too", MakeIslands(unfit=frozenset(self.unfit))
            )

    def check(self) -> None:
        """Raise a Refusal if backward gives gradients to other outputs of an island than in the run of forward."""
        self.unfit |= {called for called, look, state in self._states if look() != state}
        if self.unfit:
            raise Refusal(
                "forward sets what an opaque call reads, or that returns one tensor twice",
                MakeIslands(unfit=frozenset(self.unfit)),
            )
        if self.given:
            raise Refusal("gradients arrive at other outputs of an opaque call", MakeIslands(given=dict(self.given)))


_MARK = "_memplan_opaque"


class Opaque(nn.Module):
    """A function that plans run as it is."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        functools.update_wrapper(self, function)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def opaque(thing: Callable[..., Any]) -> Any:
    """Mark a function or a module as one that a plan runs as it is, without a look into it.

        attention = memplan.opaque(my_kernels.attention)

    Each of its calls becomes two ops of the plan: one runs it, and one runs its backward through autograd. What has a
    name in a file or a class, and can't be traced, is found without a mark. Returns the module itself, or a module
    that stands for the function. Give it the tensors that it reads, and parameters that are not its own: where it
    takes one that requires grad, or that forward computes, from a closure or a list, the step runs unplanned. Apply
    it before `memplan.apply`.
    """
    marked = thing if isinstance(thing, nn.Module) else Opaque(thing)
    vars(marked)[_MARK] = True
    return marked


def refuse_reads(islands: Collection[Island], model: nn.Module, reads: AttributeReads) -> None:
    """Raise a Refusal if forward reads an attribute that an island may set: a trace has it as it was before."""
    modules = {i.called: model.get_submodule(i.module) for i in islands if i.module is not None}
    sets = {called: reads.of_what_is_set_by(m, getattr(called, "function", None)) for called, m in modules.items()}
    unfit = {called for called, names in sets.items() if names - CHECKED_ELSEWHERE}
    if unfit:
        raise Refusal("forward reads an attribute that an opaque call sets", MakeIslands(unfit=unfit))


def name_of(called: Any) -> str:
    """The name of a function or a class, or the path of a module."""
    if isinstance(called, NamedFunction):
        return f"{called.path}.{called.name}" if called.path else called.name
    return called if isinstance(called, str) else str(called.__qualname__)


def refusal_of(error: Exception, message: str, islands: IslandsTraced, around: Calls) -> Refusal:
    """The refusal for an error in a trace.

    Its way is to make an island of the autograd function that it came from, or of modules. around: these modules.
    """
    function = private.function_that_failed(error)
    if function is not None and function is not _AsOps and not is_library_code(function):
        return Refusal(message, MakeIslands([islands.applied.get(function, (function, *around))]))
    return Refusal(message, MakeIslands([around]) if around else None)


def calls_with(model: nn.Module, owner: str) -> list[Calls]:
    """Modules whose Python state has this name, or whose code names it, with those around each."""
    paths = [path for path, _ in model.named_modules() if path]
    owners = [path for path in paths if owner == path or owner.startswith((f"{path}.", f"{path}[", f"{path} "))]
    if owners:
        return [calls_around(max(owners, key=len))]
    of_code = ("class ", "globals of ", "closure")
    tables = {path: attribute_tables(model.get_submodule(path)) for path in paths}
    naming = [p for p in paths if any(n.startswith(of_code) and owner.startswith(n) for n, _ in tables[p])]
    return [calls_around(p) for p in naming if not any(other.startswith(f"{p}.") for other in naming)]


def calls_around(path: str) -> Calls:
    """The module with this path, and those around it, without the model itself."""
    names = path.split(".") if path else []
    return tuple(".".join(names[:end]) for end in range(len(names), 0, -1))


def _is_call_of(island: Island, called: Any, arguments: Arguments, like: nn.Module | None) -> bool:
    tensors, static = arguments.tensors, arguments.static
    needs = tuple(t.requires_grad and torch.is_grad_enabled() for t in tensors)
    layouts = with_numbers(tuple(map(Layout.of, tensors)), private.number_here)
    static = tuple(private.number_here(thing) for thing in static)
    if (called, layouts, needs) != (island.called, island.inputs, island.needs) or len(static) != len(island.static):
        return False
    if modes_at(island.device.type) != island.modes or (like is not None and island.attributes(like) != island.like):
        return False
    return all(map(_is_same, static, island.static))


def _is_same(thing: Any, other: Any) -> bool:
    return thing is other or (is_lasting(thing) and type(thing) is type(other) and thing == other)


def _differ_in_sizes(island: Island, other: Island) -> bool:
    """Whether islands of two calls of forward are the same but for sizes of what they are given and give."""

    def kind(of_one: Island) -> Any:
        facts = of_one.inputs, of_one.forward_facts, of_one.backward_facts
        return (
            of_one.name, of_one.called, of_one.needs, of_one.owners, of_one.writes, of_one.random, of_one.repeats,
            of_one.once, of_one.alike, of_one.loose, of_one.varies, of_one.module or of_one.like, of_one.in_place,
            of_one.modes, with_numbers(facts, lambda _: None),
        )  # fmt: skip

    if kind(island) != kind(other) or island.integers != other.integers or len(island.static) != len(other.static):
        return False
    pairs = enumerate(zip(island.static, other.static, strict=True))
    return all(place in island.integers or _is_same(a, b) for place, (a, b) in pairs)


def _handed_by(frame: FrameType | None, static: Sequence[Any]) -> set[NamedOn]:
    """Names that the line of a call reads only to pass what they name to the call.

    The contents of a list that an island appends to must not become guards, or each step would be planned anew.
    """
    if frame is None:
        return set()
    values = {**frame.f_globals, **frame.f_locals}
    on_line = names_by_line(frame.f_code).get(frame.f_lineno, {})
    given = {id(thing) for thing in static if not is_lasting(thing)}
    handed = (name for name, count in on_line.items() if count == 1 and id(values.get(name, values)) in given)
    return {NamedOn(frame.f_code, frame.f_lineno, name) for name in handed}


def is_lasting(thing: Any) -> bool:
    """Whether a thing is the same in each step if it is equal in two."""
    if isinstance(thing, tuple) and not isinstance(thing, TensorAt):
        return all(map(is_lasting, thing))
    return isinstance(
        thing, (bool, int, float, complex, str, type(None), torch.dtype, torch.device, pytree.TreeSpec, TensorAt, Enum)
    )


class _AsOps(torch.autograd.Function):
    """Writes the forward op of an island to a trace, and its backward op where backward comes to it."""

    @staticmethod
    def forward(ctx: Any, traced: IslandsTraced, island: Island, sizes: list[Any], *given: torch.Tensor) -> Any:
        facts = island.forward_facts
        assert facts is not None
        tensors = given[: len(island.inputs)]
        *results, ticket = FORWARD(island.name, list(tensors), sizes)
        sources = {("input", i): t for i, t in enumerate(tensors)} | {("result", i): t for i, t in enumerate(results)}
        places = [(p, d) for p, d in zip(facts.outputs, facts.differentiable, strict=True) if isinstance(p, Place)]
        outputs = [place.view_of(sources[place.source]) for place, _ in places]
        for position, output in island.in_place:
            of_tensors = sum(isinstance(o, Place) for o in facts.outputs[:output])
            outputs[of_tensors] = tensors[position].copy_(outputs[of_tensors])
            ctx.mark_dirty(tensors[position])
        times = Counter(map(id, outputs))  # `y, y.detach()` are one tensor here, and what is marked is marked in both
        marked = zip(outputs, places, strict=True)
        outputs = [o if d or times[id(o)] == 1 else o.detach() for o, (_, d) in marked]
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
        given = [next(handed) if isinstance(output, Place) else None for output in forward.outputs]
        pattern = tuple(g is not None for g in given)
        if pattern != backward.given:
            ctx.traced.given[island.name] = pattern
        places = [o for o, is_given in zip(forward.outputs, pattern, strict=True) if is_given]
        if len({with_numbers(place, private.number_here) for place in places}) < len(places):
            ctx.traced.unfit.add(island.called)
        autocast = Autocast.of_backward(island.device.type)
        if autocast is not None:
            mode = f"_under_{str(autocast.dtype).removeprefix('torch.')}"
            used, name = ctx.traced.used, island.name
            used[name] = dataclasses.replace(used[name], around_backward=autocast.context, backward_mode=mode)
        *results, _ = BACKWARD(island.name, given, list(ctx.saved_tensors))
        sources = {("gradient", i): g for i, g in enumerate(given) if g is not None}
        sources |= dict(zip(forward.kept, ctx.saved_tensors[1:], strict=True))
        sources |= {("result of backward", i): t for i, t in enumerate(results)}
        found = [[None if p is None else p.view_of(sources[p.source]) for p in of_one] for of_one in backward.gradients]
        waiting = iter(found)
        first = [next(waiting)[0] if needed else None for needed in island.needs]
        return None, None, None, *first, *(g for of_one in found for g in of_one[1:])
