"""Learn from one run of forward on the sample what islands return, save, cost, and change in Python.

To trace an island, the layouts of its outputs and of its saved tensors must be known. Made-up inputs would not do: a
kernel that follows pointers crashes on indices that are out of range.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.attributes.attributes_kept import AttributesKept
from memplan.capture.attributes.kept_memory import KeptMemory, has_memory, memory_of, written_by
from memplan.capture.attributes.named_functions import NamedFunction
from memplan.capture.attributes.named_state import state_behind
from memplan.capture.attributes.tables import attributes_in_short, held_in, is_plain
from memplan.capture.ops import op_facts
from memplan.capture.ops.island import Island
from memplan.capture.ops.island_call import SCRATCH_MARGIN_BYTES, ForwardFacts
from memplan.capture.ops.layout import Layout, Place, Source, same_bits, storage_key, tensors_of
from memplan.capture.ops.recorded_graph import Edges, next_node
from memplan.capture.ops.ways import MakeNoIsland, Refusal
from memplan.capture.trace.call import Forward
from memplan.capture.trace.forwards import calls_exchanged, in_place_of_state, is_wholly_called
from memplan.capture.trace.generators import python_generators_kept, seed_all
from memplan.capture.trace.islands import Arguments, Islands, arguments_of, is_lasting, name_of, read_by, state_given
from memplan.capture.trace.raw_trace import Autocast, in_modes, modes_at
from memplan.capture.trace.source_lines import caller_line
from memplan.errors import UnsupportedModel
from memplan.runtime.program.checkpointed import States, layers_checkpointed, may_be_checkpointed
from memplan.runtime.program.rng import StateKept, held_rng, restore_held_rng
from memplan.runtime.trial.one_forward import is_collective
from memplan.runtime.trial.unplanned_peak import KnownGenerators, WrittenArguments, generator_states, measured_twice
from memplan.torch_private import pytree

_RUNS = 12  # of a call that draws random numbers, to see how much it saves
_MARGIN = 1.125  # more room than such runs needed


class IslandRuns(private.RealOps):
    """Learns about each call of some autograd functions and modules while forward runs.

    Each call runs several times more on its own inputs, and its backward runs twice on made-up gradients. Python state
    that these extra runs change is restored.

    - unfit: calls that can't be islands, with the reason for each.
    """

    def __init__(
        self,
        model: nn.Module,
        callables: frozenset[Any],
        given: Mapping[str, tuple[bool, ...]],
        device: torch.device,
        reasons: Mapping[Any, str],
        layers: Collection[str] = (),
        parts: Collection[nn.Parameter] = (),
    ) -> None:
        """Prepare for a run of the model's forward.

        - callables: see `Islands`.
        - given: which outputs get gradients, by name of a call, where these are not all that can have one.
        - device: of the plan.
        - reasons: why the callables are islands.
        - layers: paths of modules in islands, or of islands, that PyTorch checkpoints.
        - parts: parameters that plans gather for calls that are given them, and for no others.
        """
        super().__init__()
        self._model, self._callables, self._given, self._device = model, callables, given, device
        self._parameters, self._own = list(model.parameters()), _own_things(model)
        self._generators = held_in(model, torch.Generator)
        self._names = {id(p): n for n, p in model.named_parameters()} if parts else {}  # found later, they become whole
        self._reasons, self._layers, self._parts = reasons, layers, parts
        self._calls: list[Island] = []
        self._within = False
        # Numbers read from data, results whose shapes depend on data, writes to what forward has not made, collectives.
        self._noted = Counter[str]()
        self._hidden: set[int] = set()  # what ops write to, through `.data` too, or without a word
        self._made: dict[int, Any] = {}  # memory that forward has made
        self._inside = set[int]()  # memory that the running call is given, or has made
        self._behind: dict[int, Any] = {}  # other memory that it reads, or returns
        self._read_behind: dict[str, dict[int, Any]] = {}  # the same, by name of a call
        self._memory = KeptMemory()
        self.unfit: dict[Any, str] = {}

    @property
    def islands(self) -> Islands:
        """The islands of the run, in the order of forward."""
        calls = tuple(island for island in self._calls if island.called not in self.unfit)
        written = {storage_key(t) for t in self._memory.written}
        for island in calls:
            island.repeats = island.repeats and written.isdisjoint(self._read_behind[island.name])
        return Islands(self._callables - self.unfit.keys(), calls, self._reasons, self._layers)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        exchanged, known = calls_exchanged(self._model, self._callables, self._call), KnownGenerators(self._model)
        with private.functions_applied_by(self._apply), exchanged, self._memory, known, self:
            yield

    def on_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        for tensor in written_by(func, args, kwargs):
            self._hidden.add(storage_key(tensor))
            if storage_key(tensor) not in self._made:
                self._memory.keep(tensor)
                self._noted["writes"] += storage_key(tensor) not in {storage_key(b) for b in self._model.buffers()}
        hidden = op_facts.HIDDEN_WRITES.get(func, ((), 0))[0]
        self._hidden |= {storage_key(args[i]) for i in hidden if isinstance(args[i], torch.Tensor)}
        self._noted["collectives"] += is_collective(func)
        result = self.run_op(func, args, kwargs)
        given = memory_of((args, kwargs))
        self._note_behind(given)
        for tensor in tensors_of(result):
            if has_memory(tensor) and storage_key(tensor) not in given:
                self._made.setdefault(storage_key(tensor), private.known_storage(tensor))
                self._inside.add(storage_key(tensor))
        self._noted["reads"] += func is private.READ_SCALAR
        if func is torch.ops.aten.index.Tensor:
            self._noted["shapes"] += any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        else:
            self._noted["shapes"] += private.has_shape_of_data(func)
        return result

    def _note_behind(self, memory: Mapping[int, Any]) -> None:
        """Note what of this memory the running call is neither given nor has made. Its keys then stay its own."""
        new = {key: storage for key, storage in memory.items() if key not in self._inside and key not in self._behind}
        self._noted["parts"] += bool(new) and any(storage_key(p) in new for p in self._parts)
        self._behind.update(new)

    def _apply(self, function: Any, args: tuple[Any, ...], original: Any) -> Any:
        if function not in self._callables or self._within:
            return original(*args)
        arguments = Arguments.of(args, {}, nested=False)

        def call(module: nn.Module | None, static: tuple[Any, ...], *given: torch.Tensor) -> Any:
            return original(*arguments_of(static, given))

        named = functools.partial(function, *arguments.static)  # what it reads, and what it is given
        repeats = alike = state_behind(vars(function).get("forward")) is None
        kept = functools.partial(_state_kept, None, named, arguments.static)
        return self._looked_at(function, None, arguments, call, lambda: original(*args), kept, repeats, alike)

    def _call(self, called: Any, module: nn.Module, original: Forward, args: Any, kwargs: Any) -> Any:
        if self._within:
            return original(*args, **kwargs)
        named = called if isinstance(called, NamedFunction) else None
        path = named.path if named is not None else called if isinstance(called, str) else None
        wholly, given_state = path is None or is_wholly_called(module), state_given(called, module)
        arguments, names = Arguments.of(args, kwargs, given_state), list(given_state)
        count = arguments.given
        within = f"{path}."
        here = [p[len(within) :] for p in self._layers if f"{p}.".startswith(within)] if path == called else []
        there = {name for name, _ in module.named_modules()}
        layers, states = [p for p in here if p in there], States()

        def call(own: nn.Module | None, static: tuple[Any, ...], *given: torch.Tensor) -> Any:
            callee = module if own is None else own
            own_args, own_kwargs = arguments_of(static, given)
            before = pytree.tree_flatten((own_args, own_kwargs))
            state = dict(zip(names, given[count:], strict=True))
            with in_place_of_state(callee, state), layers_checkpointed(callee, layers, states):
                if named is None:
                    returned = (callee if wholly else callee.forward)(*own_args, **own_kwargs)
                else:
                    returned = named.function(*([] if path is None else [callee]), *own_args, **own_kwargs)
                now = {**dict(callee.named_parameters()), **dict(callee.named_buffers())}
                if any(now.get(name) is not tensor for name, tensor in state.items()):
                    raise Refusal(f"{name_of(called)} exchanges parameters or buffers")
            leaves, spec = pytree.tree_flatten((own_args, own_kwargs))
            if spec != before[1] or not all(map(operator.is_, leaves, before[0])):
                raise Refusal(f"{name_of(called)} changes a container that it is given", MakeNoIsland(called))
            return returned

        code = named.function if named is not None else original if path is None else None
        kept = functools.partial(_state_kept, path, code, ())
        if named is not None:
            repeats = alike = state_behind(code) is None
        else:
            hooks = [hook for inner in module.modules() for hook in private.hooks_on(inner)]
            repeats = not hooks and may_be_checkpointed(module)
            alike = all(state_behind(hook) is None for hook in hooks)
        run = functools.partial(original, *args, **kwargs)
        return self._looked_at(called, path, arguments, call, run, kept, repeats, alike, module)

    def _looked_at(
        self,
        called: Any,
        module: str | None,
        arguments: Arguments,
        call: Callable[..., Any],
        run: Callable[[], Any],
        kept: Callable[..., AttributesKept],
        repeats: bool,
        alike: bool,
        instance: nn.Module | None = None,
    ) -> Any:
        """Return what the call returns in forward, and add an island for the call.

        - called, module, call: see `Island`.
        - run: makes the call as forward does.
        - kept: makes a context that restores the Python state which the call may change.
        - repeats: False if hooks run with the call, or its code reads Python state: a plan must not run it again.
        - alike: False if that code, or that of hooks, reads Python state that `kept` does not restore.
        - instance: the module that is called.
        """
        name = name_of(called)
        # A unit of `fully_shard` has the whole parameters in the place of its own ones while forward runs.
        names = self._names or {id(p): own for own, p in self._model.named_parameters() if isinstance(p, nn.Parameter)}
        owners = tuple(names.get(id(tensor)) for tensor in arguments.tensors)
        before, others_before = held_rng(self._device), generator_states(self._generators)
        modes, tensors = modes_at(self._device.type), arguments.tensors
        (autocast, grad_mode), device, generators = modes, self._device, self._generators
        buffers = frozenset(() if instance is None else map(id, instance.buffers()))
        island = Island(
            name=f"{name} {len(self._calls)}",
            called=called,
            function=name,
            title=f"{name} at {caller_line()}",
            static=arguments.static,
            module=module,
            call=call,
            named=functools.partial(_plain_attributes, owners),
            owners=owners,
            buffers=frozenset(i for i, t in enumerate(tensors) if i >= arguments.given and id(t) in buffers),
            inputs=tuple(map(Layout.of, tensors)),
            needs=tuple(t.requires_grad and grad_mode for t in tensors),
            device=self._device,
            around=functools.partial(in_modes, *modes),
            modes=modes,
            attributes=lambda module: attributes_in_short(read_by(called, module)),
            like=None if instance is None else attributes_in_short(instance),
            kept=lambda model: StateKept(kept(model, "_parameters"), generators, device),
        )
        gradients, written = [p.grad for p in self._parameters], WrittenArguments(tensors, arguments.given)
        noted_before, found = Counter(self._noted), kept(self._model)
        self._inside, self._behind = set(memory_of(tensors)), {}
        first_node = next_node()
        with private.exchanged(self, _within=True):
            returned = run()
        self._note_behind(memory_of(returned))
        self._read_behind[island.name] = dict(self._behind)
        behind = self._read_behind[island.name].keys()
        buffers_now = {storage_key(b) for b in self._model.buffers() if has_memory(b)}
        after = held_rng(self._device)
        island.random = before != after
        noted = self._noted - noted_before
        drew, island.varies = generator_states(self._generators) != others_before, noted["shapes"] > 0
        island.writes = frozenset(i for i in island.buffers if storage_key(tensors[i]) in self._hidden)
        island.alike, island.once = alike and not noted["writes"], not repeats or drew
        island.loose = island.varies or drew or noted["reads"] > 0
        outputs = pytree.tree_leaves(returned)
        if isinstance(called, NamedFunction):
            island.in_place = written.returned(outputs)
        self._within = True
        try:
            if noted["collectives"] or any(map(private.is_sharded, (*tensors, *outputs))):
                raise Refusal(f"{island.title} runs collectives, or is given DTensors")
            if noted["parts"]:
                raise Refusal(f"{island.title} reads a sharded parameter that it is not given")
            is_function = isinstance(called, type) and issubclass(called, torch.autograd.Function)
            unseen = written.unseen()
            if (unseen and not is_function) or any(i >= arguments.given and owners[i] for i in written.seen):
                raise Refusal(f"{island.title} writes to its arguments")
            island.writes |= unseen  # as Liger's does, which has gradients in the place of logits, and saves them
            self._refuse(island, arguments, instance, autocast, outputs)
            edges = Edges((o for o in outputs if isinstance(o, torch.Tensor)), first_node)
            uses = {i: edges.uses(tensors[i], outputs) for i, name in enumerate(owners) if name and island.needs[i]}
            if not (behind - buffers_now).isdisjoint(self._made):
                raise Refusal(f"{island.title} reads a tensor that forward computes, and that it is not given")
            with torch.no_grad(), kept(self._model) as attributes:
                self._look(island, tensors, returned, before, attributes, uses)
                if found.changed() and not island.once:  # by the first run. Would one on other data change it again?
                    with private.outside_of_tracing(), contextlib.suppress(Exception):
                        island.saves(self._model, [t.detach() * -0.5 if t.is_floating_point() else t for t in tensors])
                    island.once = attributes.changed()
                    island.repeats = island.repeats and not island.once
            there = buffers_now | {storage_key(p) for p in self._parameters if has_memory(p)}
            island.repeats = island.repeats and behind.isdisjoint(there)
            self._calls.append(island)
        except Exception as error:
            why = "" if isinstance(error, UnsupportedModel) else "it fails when it runs a second time: "
            self.unfit.setdefault(called, f"{why}{error}")
        finally:
            self._within = False
            restore_held_rng(self._device, after)
        if any(p.grad is not g for p, g in zip(self._parameters, gradients, strict=True)):
            self.unfit.setdefault(called, f"the backward of {island.title} writes to .grad of parameters")
        return returned

    def _refuse(
        self, island: Island, arguments: Arguments, module: nn.Module | None, autocast: Autocast, outputs: Sequence[Any]
    ) -> None:
        """Raise a Refusal where a call could not be two ops, as far as its arguments and outputs tell."""
        if isinstance(island.called, NamedFunction):
            if not arguments.given or not all(map(is_lasting, arguments.static)):
                raise Refusal(f"{island.function} is given no tensor, or more than tensors, numbers and strings")
            if not all(o is None or isinstance(o, torch.Tensor) for o in outputs) or {*outputs} <= {None}:
                raise Refusal(f"{island.function} returns no tensor, or more than tensors")
            if not self._read_behind[island.name].keys().isdisjoint(map(storage_key, self._memory.written)):
                raise Refusal(f"{island.title} reads a tensor that is written to, and that it is not given")
        if any(id(a) in self._own and not is_lasting(a) for a in arguments.static):
            raise Refusal(f"{island.function} is given what belongs to the model; a copy has another")
        pairs = zip(arguments.tensors, island.owners, strict=True)
        if any(owner is None and private.attributes_set_on(tensor) for tensor, owner in pairs):
            raise Refusal(f"{island.function} is given a tensor with attributes of its own")
        if module is not None and private.collects_outputs() and private.collects(module):
            raise Refusal(f"outputs of modules in {island.function} are collected by the model around it")
        if module is None or not (autocast.enabled and autocast.cache_enabled):
            return
        inside = set(module.modules())
        others = [p for m in self._model.modules() if m not in inside for p in m._parameters.values() if p is not None]
        before = any(c.called == island.called for c in self._calls)
        if before or {id(p) for p in others} & set(map(id, module.parameters())):
            raise Refusal(f"{island.function} shares parameters, whose casts autocast shares too")

    def _look(
        self,
        island: Island,
        given: Sequence[torch.Tensor],
        returned: Any,
        state: Any,
        attributes: AttributesKept,
        uses: Mapping[int, int],
    ) -> None:
        """Fill the facts and costs of an island by extra runs of the call and its backward.

        - state: of the generators before the call.
        - uses: by position of a parameter, how many gradients it gets from the call that forward makes.
        """
        tensors = [t.detach() for t in given]

        def forward() -> list[torch.Tensor]:
            restore_held_rng(self._device, state)
            return island.forward(self._model, tensors)

        def outputs_of(results: Sequence[torch.Tensor]) -> tuple[ForwardFacts, dict[Source, torch.Tensor], list[Any]]:
            facts = island.forward_facts
            assert facts is not None
            sources: dict[Source, torch.Tensor] = {("input", i): t for i, t in enumerate(tensors)}
            sources |= {("result", i): t for i, t in enumerate(results)}
            places = (p.seen_in(sources[p.source]) if isinstance(p, Place) else None for p in facts.outputs)
            return facts, sources, list(places)

        with private.outside_of_tracing(), private.compiled_backward_repeats():
            (*results, ticket), island.forward_cost, left_bytes = measured_twice(forward, tensors, self._device)
            island.once |= (changed := attributes.changed())
            if changed and isinstance(island.called, NamedFunction):
                raise Refusal(f"{island.title} changes Python state")
            facts, sources, outputs = outputs_of(results)
            if any(0 < count < facts.uses[i] for i, count in uses.items()):
                raise Refusal(f"{island.function} uses a parameter several times, which autocast casts only once")
            pairs = zip(pytree.tree_leaves(returned), facts.differentiable, strict=True)
            if any(isinstance(o, torch.Tensor) and o.requires_grad and not d for o, d in pairs):
                raise Refusal(f"{island.title} reads a tensor that requires grad, and that it is not given")
            if island.loose and any(type(o) in (int, float) for o in facts.outputs):
                raise Refusal(f"{island.title} returns numbers that depend on data")
            island.alike &= all(
                first is None or same_bits(first, second)
                for first, second in zip(outputs, pytree.tree_leaves(returned))
            )
            island.repeats = island.alike and not island.once and not island.writes
            if (island.loose or island.varies) and any(facts.differentiable):
                del results, ticket, sources, outputs
                self._look_for_more(island, tensors, state)
                (*results, ticket), island.forward_cost, left_bytes = measured_twice(forward, tensors, self._device)
                facts, sources, outputs = outputs_of(results)
            if left_bytes > SCRATCH_MARGIN_BYTES and not island.once:
                raise Refusal(
                    f"{island.title} holds {left_bytes} bytes from forward to backward where no plan sees it, "
                    "as in a function that ctx has; hand tensors to save_for_backward"
                )
            if any(facts.differentiable):
                arriving = self._given.get(island.name, ())
                pairs = zip(outputs, arriving if len(arriving) == len(outputs) else facts.differentiable, strict=True)
                grads = [torch.full_like(o, 0.5) if o is not None and is_given else None for o, is_given in pairs]
                kept = [ticket, *(sources[source] for source in facts.kept)]
                most_bytes, dense = 0, [None if g is None else g.contiguous() for g in grads]
                for laid_out in [dense, grads][all(map(operator.is_, dense, grads)) :]:  # backward may copy either
                    island.backward_facts = None
                    run = functools.partial(island.backward, laid_out, kept)
                    _, cost, _ = measured_twice(run, [*laid_out, *kept], self._device)
                    most_bytes = max(most_bytes, cost.scratch_bytes)
                island.backward_cost = cost._replace(scratch_bytes=most_bytes)
                del kept, run
            del results, ticket, sources, outputs
            island.check_released()
            island.looked_at = True

    def _look_for_more(self, island: Island, tensors: Sequence[torch.Tensor], state: Any) -> None:
        """Run an island on other random numbers and other data, to see whether it saves other tensors then.

        If it does, it gets a buffer for them, with room for the most that was seen and a margin.
        """
        parameters = set(map(id, self._parameters))
        with python_generators_kept():
            restore_held_rng(self._device, state)
            most_bytes, alike = island.saves(self._model, tensors)
            for run in range(_RUNS):
                seed_all(run)
                changed = run % 2 and all(t.is_floating_point() or id(t) in parameters for t in tensors)
                given = [t.neg() if changed and t.is_floating_point() and t.dim() > 1 else t for t in tensors]
                with contextlib.suppress(RuntimeError, ValueError, IndexError):  # of a run on data that do not occur
                    bytes_then, then = island.saves(self._model, given)
                    most_bytes, island.varies = max(most_bytes, bytes_then), island.varies or then != alike
        if island.varies:
            island.give_room(int(_MARGIN * most_bytes))


def _state_kept(path: str | None, run: Any, given: Sequence[Any], model: nn.Module, *ignored: str) -> AttributesKept:
    """A context that puts back the Python state which a call may change: of the module with this path, or of `run`."""
    module = nn.Identity() if path is None else model.get_submodule(path)
    return AttributesKept(module, ignored, run=module.forward if run is None else run, given=given)


def _plain_attributes(owners: Sequence[str | None], model: nn.Module) -> list[dict[str, Any]]:
    """Attributes of the parameters with these names, as far as no run can change them in place.

    `_is_param` is among them: with it a view is a parameter to `isinstance(w, nn.Parameter)`.
    """
    parameters = [None if name is None else model.get_parameter(name) for name in owners]
    named = [vars(p) if p is not None and private.is_ordinary(p) else {} for p in parameters]
    plain = [{key: value for key, value in table.items() if is_plain(value)} for table in named]
    return [table if p is None else {"_is_param": True, **table} for p, table in zip(parameters, plain, strict=True)]


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
