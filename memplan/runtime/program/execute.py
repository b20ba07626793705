"""Run a program under autograd: one Function for the whole step, with nothing kept outside its context.

Parameters are not inputs of the Function. An empty anchor tensor connects it to autograd, and each gradient is handed
over in the middle of backward, as soon as it is final. Under grads="edges" parameters are inputs, and backward returns
their gradients, so that `torch.autograd.grad` finds them. Saved tensors live in a list that backward empties, so the
version checks that autograd would make on them are made here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from memplan import torch_private as private
from memplan.capture.analysis.traced import Traced
from memplan.capture.ops.layout import storage_key, tensors_of
from memplan.capture.ops.real_results import OtherResults
from memplan.capture.ops.sizes import Evaluation, Numbers, Sizes, TensorSizes, expressions_in
from memplan.capture.trace.raw_trace import Autocast
from memplan.errors import PlanMismatch
from memplan.problem.steering import Steering
from memplan.runtime.host.arena import StepArena
from memplan.runtime.host.transfers import Transfers
from memplan.runtime.host.updates import UpdatesInBackward
from memplan.runtime.program.check import run_checked
from memplan.runtime.program.decisions import OtherBranch
from memplan.runtime.program.gathers import Gathers
from memplan.runtime.program.lower import Program
from memplan.runtime.program.outputs import Outputs, Returned
from memplan.runtime.program.rng import held_rng, restore_held_rng
from memplan.runtime.watch.observe import Observer


class OtherTangents(PlanMismatch):
    """Backward starts from other gradients than it was captured for.

    They arrive at other outputs, in another layout, or under another autocast.
    """


@dataclass(frozen=True, slots=True)
class Written:
    """What forward writes to, of that which is there before it.

    - buffers: names of these buffers.
    - for_good: it also writes to what can't be put back: inputs, constants, buffers that it exchanges.
    - matters: forward's results depend on such a write.
    """

    buffers: tuple[str, ...] = ()
    for_good: bool = False
    matters: bool = False

    @staticmethod
    def of(traced: Traced) -> Written:
        """What the forward of a trace writes to."""
        graph, names = traced.graph, list[str]()
        for_good, versions = bool(traced.reassigned), set[int]()
        successors: dict[int | None, list[int]] = {}
        for index, value in enumerate(graph.values):
            successors.setdefault(value.reuses, []).append(index)
        for index, value in enumerate(graph.values):
            if value.resident and value.reuses is None and (later := set(_versions(successors, index))) != {index}:
                sources = [traced.residents[n] for n in traced.roots.get(index, ()) if n in traced.residents]
                for_good |= any(s.kind in ("input", "constant") for s in sources)
                names += [s.name for s in sources if s.kind in ("buffer", "parameter")]
                versions |= later
        readers = [
            op
            for op in graph.ops[: graph.boundary]
            if versions & set(op.inputs)
            and not versions.issuperset(op.outputs)
            and versions.isdisjoint(effect.new for effect in op.effects)
        ]
        return Written(tuple(dict.fromkeys(names)), for_good, bool(readers or for_good))


def _versions(successors: Mapping[int | None, Sequence[int]], value: int) -> Iterator[int]:
    """A value and those that later take over its memory.

    successors: for each value, those that take over its memory next.
    """
    yield value
    for later in successors.get(value, ()):
        yield from _versions(successors, later)


class ParameterStore:
    """Parameters and buffers of a model by name, looked up at each use, so `load_state_dict` and `.data` just work.

    - model: the model.
    - transfers: the model's copies to and from host memory.
    - updates: the optimizer that steps in backward, where there is one.
    - arena: of the model's steps.
    - gathers: of sharded parameters, where there are any.
    - specs: of gradients that are DTensors, by parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Iterable[str],
        device: torch.device,
        gathers: Gathers | None = None,
        specs: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.transfers, self._specs = model, Transfers(device), specs or {}
        self.updates: UpdatesInBackward | None = None
        self.arena = StepArena(device)
        self.gathers = gathers
        self._homes: dict[str, tuple[dict[str, Any], str]] = {}
        self._direct: dict[str, torch.Tensor] = {}  # parameters whose gradients need no engine in this backward
        for name in names:
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            home = module._parameters if leaf in module._parameters else module._buffers
            self._homes[name] = (home, leaf)

    def share(self, transfers: Transfers | None, updates: UpdatesInBackward | None) -> None:
        """Share these with the stores of the model's other steps."""
        self.transfers, self.updates = transfers or self.transfers, updates

    def __getitem__(self, name: str) -> torch.Tensor:
        home, leaf = self._homes[name]  # as `parameter` does: this runs several times a step for each of them
        tensor: Any = home.get(leaf)
        return tensor if type(tensor) is nn.Parameter else private.part_here(tensor)

    def parameter(self, name: str) -> torch.Tensor:
        """The parameter or buffer called `name` as the model has it: a DTensor where ranks have parts of it."""
        home, leaf = self._homes[name]
        return home.get(leaf)  # type: ignore[return-value]  # not home[leaf], for which others gather a parameter

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def get(self, name: str, default: torch.Tensor) -> torch.Tensor | None:
        """The tensor called `name`; `default` where the store has none of that name."""
        return self[name] if name in self._homes else default

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        home, leaf = self._homes[name]
        home[leaf] = tensor

    def is_sharded(self, name: str) -> bool:
        """Whether a name is that of a parameter that is empty between uses."""
        if self.gathers is None:
            return False
        parameter = self.parameter(name)
        return isinstance(parameter, nn.Parameter) and self.gathers.shards.shard(parameter) is not None

    def begin(self) -> None:
        """Prepare for a planned forward or backward."""
        if self.gathers is not None:
            self.gathers.shards.begin()

    def look_for_hooks(self) -> None:
        """Find, for a backward that begins, the parameters on whose autograd nodes there can be no hooks."""
        self._direct = {}
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.gathers is not None or together:  # all ranks have to hand gradients over in one order
            return
        found = {name: self[name] for name in self._homes}
        empty = {n: p for n, p in found.items() if type(p) is nn.Parameter and p.requires_grad and p.grad is None}
        if empty:
            alone = private.without_accumulators([*empty.values()])
            self._direct = {n: p for (n, p), is_alone in zip(empty.items(), alone, strict=True) if is_alone}

    def surface(self, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> None:
        """Put gradients into `.grad`, in this order, so that every kind of hook runs.

        That is through autograd's engine, but for those for which it would do nothing else.
        """
        pairs = []
        for name, gradient in zip(names, gradients, strict=True):
            parameter = self._direct.get(name)
            if parameter is not None and _lands_as_it_is(parameter, gradient):
                self._land(parameter, gradient)
            elif (parameter := self.parameter(name)).requires_grad:
                self.transfers.arrived(gradient)
                pairs.append((parameter, private.with_spec(gradient, self._specs.get(name))))
        if not pairs:
            return
        # Autograd skips what was frozen since forward, too, and runs last what it saw first.
        parameters, gradients = zip(*reversed(pairs), strict=True)
        with self._accepting(parameters):
            with torch.enable_grad():
                leaves = list(map(_leaf, parameters, gradients))
            private.run_backward(leaves, gradients)

    def _land(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Put a gradient into `.grad`, and call the hooks that autograd calls then."""
        hooks = [*(parameter._post_accumulate_grad_hooks or {}).values()]
        if self.updates is None or hooks != [self.updates.hook]:  # which waits for it by itself
            self.transfers.arrived(gradient)
        parameter.grad = gradient.detach()
        for hook in hooks:
            hook(parameter)

    def _accepting(self, parameters: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
        """A context in which parameters have the shapes of their gradients."""
        if self.gathers is None:
            return contextlib.nullcontext()
        return self.gathers.shards.accepting([p for p in parameters if isinstance(p, nn.Parameter)])


def _lands_as_it_is(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether autograd's engine would take the memory of a gradient for `.grad`, and would call no hooks before."""
    return (
        parameter.grad is None
        and parameter.requires_grad
        and not parameter._backward_hooks
        and type(gradient) is torch.Tensor
        and gradient.layout is torch.strided
        and gradient.shape == parameter.shape
        and gradient.stride() == parameter.stride()
        and gradient.dtype is parameter.dtype
        and gradient.device == parameter.device
        and parameter.is_contiguous()
    )


def _leaf(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A view of a parameter, because autograd copies a gradient that is given for the leaf itself."""
    if 1 in gradient.shape and not _keeps_strides(gradient):
        return _SameGradient.apply(parameter)  # type: ignore[no-any-return, no-untyped-call]
    return parameter.view_as(parameter)


def _keeps_strides(tensor: torch.Tensor) -> bool:
    """Whether a view in its own shape has its strides. In dimensions of size 1 a view has strides of its own."""
    return private.is_ordinary(tensor) and tensor.view(tensor.shape).stride() == tensor.stride()


class _SameGradient(torch.autograd.Function):
    """Hands a gradient on with its strides. A view's backward would change those of dimensions of size 1."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.detach()


@dataclass(frozen=True, slots=True)
class TangentLayout:
    """The layout of the gradient that arrives for one output, as backward was captured for it."""

    output: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(output: str, tangent: torch.Tensor) -> TangentLayout:
        return TangentLayout(output, tuple(tangent.shape), tuple(tangent.stride()), tangent.dtype)


@dataclass(frozen=True, slots=True)
class PlannedTangent:
    """The layout of the gradient that backward was captured for, of one output, at any sizes.

    - layout: at the sizes of the capture.
    - sizes, values: what it is at others, and what computes that; None where it does not vary.
    """

    layout: TangentLayout
    sizes: TensorSizes | None = None
    values: Evaluation | None = None

    @staticmethod
    def all_of(traced: Traced, names: Sequence[str]) -> dict[int, PlannedTangent]:
        """By position of the output, for outputs that backward starts from. names: of all outputs."""
        found = {}
        for index, output in enumerate(traced.outputs):
            if output.tangent is not None:
                node = traced.tangent_nodes[output.tangent]
                (size,) = (None,) if traced.sizes is None else traced.sizes.results.get(node.name, (None,))
                values = None if size is None else Evaluation(expressions_in(size))
                found[index] = PlannedTangent(TangentLayout.of(names[index], node.meta["val"]), size, values)
        return found

    @property
    def output(self) -> str:
        """The output's name."""
        return self.layout.output

    def at(self, numbers: Numbers) -> TangentLayout:
        """The layout at these numbers."""
        if self.sizes is None or self.values is None:
            return self.layout
        value = self.values.at(numbers)
        shape, stride = tuple(map(value, self.sizes.shape)), tuple(map(value, self.sizes.stride))
        return dataclasses.replace(self.layout, shape=shape, stride=stride)


class _Watched(NamedTuple):
    """A tensor that backward reads, as it was when forward ended.

    - what: its name, for messages.
    - storage, offset: where its contents lie.
    """

    what: str
    tensor: torch.Tensor
    version: int
    storage: Any  # None for a sharded parameter, which comes and goes
    offset: int

    @staticmethod
    def of(what: str, tensor: torch.Tensor) -> _Watched:
        return _Watched(what, tensor, tensor._version, private.known_storage(tensor), int(tensor.storage_offset()))

    @staticmethod
    def named(name: str, store: ParameterStore) -> _Watched:
        """A parameter or buffer."""
        tensor = store[name]
        watched = _Watched.of(name, tensor)
        return watched._replace(storage=None) if store.is_sharded(name) else watched

    def is_same(self, store: ParameterStore) -> bool:
        """Whether the tensor is the one that it was, with the contents that it had."""
        return store.get(self.what, self.tensor) is self.tensor and self._is_untouched()

    def _is_untouched(self) -> bool:
        tensor = self.tensor
        return tensor._version == self.version and (self.storage is None or self._is_in_place())

    def _is_in_place(self) -> bool:
        return storage_key(self.tensor) == self.storage.cdata and self.tensor.storage_offset() == self.offset

    def check(self) -> None:
        if not self._is_untouched():
            raise RuntimeError(
                f"{self.what}, which backward needs, has been modified by an inplace operation between forward and "
                f"backward: it is at version {self.tensor._version}, expected version {self.version}"
            )


@dataclass(eq=False)
class InFlight:
    """One forward that waits for its backward.

    - saved: what the forward program hands to the backward program.
    - watched: inputs and outputs, as they were when forward ended.
    - parameters: parameters and buffers, as they were when forward ended.
    - start: what it takes to run this forward once more; None where that is not kept.
    - program: which ran it.
    - numbers: of its sizes, where they vary.
    - decided: booleans that forward has branched on.
    - surfaced: parameters whose gradients backward has handed over.
    - surfacing: backward is handing gradients over right now.
    - autocast: under which backward runs; None: without autocast.
    - returned: the outputs, where their use before backward has to be checked.
    - spent: what was saved is gone, so a backward has to run forward again.
    """

    saved: list[Any]
    watched: list[_Watched]
    parameters: list[_Watched]
    start: _Start | None
    program: Program
    numbers: Numbers = ()
    decided: list[torch.Tensor] = field(default_factory=list)
    surfaced: set[str] = field(default_factory=set)
    surfacing: bool = False
    autocast: Autocast | None = None
    returned: Returned | None = None
    spent: bool = False

    def spend(self) -> None:
        """Let go of what is saved."""
        self.saved.clear()
        self.spent = True

    @property
    def saved_bytes(self) -> int:
        """Bytes that it holds for backward, beside its inputs and outputs. 0 once backward has begun."""
        held = {storage_key(t): t.untyped_storage().nbytes() for t in tensors_of(self.saved)}
        return sum(held.values()) - sum(held.get(storage_key(watched.tensor), 0) for watched in self.watched)


@dataclass(frozen=True, slots=True)
class _Start:
    """The state in which a forward began.

    - inputs: the arguments' tensors.
    - generator: states of generators, where forward draws from them.
    - buffers: copies of those that it writes to, where they are kept.
    - read: everything that forward reads and does not write to, as it was when forward ended.
    """

    inputs: tuple[torch.Tensor, ...]
    generator: Any
    buffers: dict[str, torch.Tensor]
    read: list[_Watched] = field(default_factory=list)


Gradients = dict[int | str, torch.Tensor]  # by position of an input, or name of a parameter
Rescue = Callable[[InFlight, dict[int, torch.Tensor], Exception], Gradients]


class Runner:
    """A program, with the model whose parameters it reads.

    - drops_saved: forward saves nothing, and runs again when backward begins.
    """

    drops_saved = False

    def __init__(
        self,
        program: Program,
        store: ParameterStore,
        trainable: tuple[str, ...],
        backwards: tuple[tuple[dict[int, PlannedTangent], fx.GraphModule], ...],
        outputs: Outputs,
        device: torch.device,
        draws: bool,
        written: Written,
        autocast: Autocast | None = None,
        decisions: tuple[int, ...] = (),
        sizes: Sizes | None = None,
        checked: Callable[[], Program] | None = None,
        steering: Steering | None = None,
    ) -> None:
        """Prepare to run a program.

        - program, backwards: the program, and its backward programs with the gradients that each was captured for.
        - trainable: the parameters that are inputs of the Function, under grads="edges".
        - draws: forward advances the generator.
        - written: buffers and inputs that forward writes to.
        - autocast: under which backward was captured; None: without autocast.
        - decisions: outputs that tell which branches forward takes.
        - sizes: of the step; None where it is for one size.
        - checked: gives the program with checks of its results, for the first run at each size.
        - steering: leads the step through the model's arena, at the planned sizes.
        """
        self.program = program
        self._sizes, self._checked, self._steering = sizes, checked, steering
        self._numbers_of: dict[int, Callable[[Numbers], tuple[Any, ...]]] = {}
        self._known_sizes = set() if sizes is None else {sizes.here}  # at which results are as traced
        self.store = store
        self.trainable = trainable
        self._rescue: Rescue | None = None
        self._before_backward: Callable[[bool], None] | None = None
        self.watch: Observer | None = None
        self.arrived: dict[int, TangentLayout] | None = None  # with which the latest backward started
        self.unchecked: set[fx.GraphModule] = set()
        self.waiting: weakref.WeakSet[InFlight] = weakref.WeakSet()  # forwards, for their backward
        self._keeps_buffers = False
        self.written = written
        self.device, self._draws = device, draws
        self.anchor = torch.empty(0, requires_grad=True, device=device)
        self.autocasts = {autocast}  # under which backward has these ops
        self._backwards = backwards
        self._constants = _constants(backward for _, backward in backwards)
        self._all_constants = self._constants | _constants([program.forward])
        self._layouts = backwards[0][0]
        self._outputs = outputs
        self._decisions = decisions

    def attend(
        self, rescue: Rescue, before_backward: Callable[[bool], None] | None = None, keeps_buffers: bool = False
    ) -> None:
        """Give the step a helper, from now on.

        - rescue: gives gradients where this program can't.
        - before_backward: called when a backward begins, with whether it is a further one through the same forward.
        - keeps_buffers: forward can run again though it writes to buffers, because their earlier contents are kept.
        """
        self._rescue, self._before_backward, self._keeps_buffers = rescue, before_backward, keeps_buffers

    @property
    def is_attended(self) -> bool:
        """Whether a rescue gives gradients where this program can't."""
        return self._rescue is not None

    def begin_backward(self, state: InFlight) -> None:
        """Call what is to be called when a backward begins."""
        if self._before_backward is not None:
            self._before_backward(state.spent)

    def gradients(self, state: InFlight, tangents: dict[int, torch.Tensor]) -> Gradients:
        """Gradients from this program, or from the rescue where this program can't give them."""
        tangents = dict(sorted(tangents.items()))
        try:
            return self.backward(state, tangents)
        except Exception as error:
            mends = private.is_out_of_memory(error) or isinstance(error, (OtherTangents, OtherResults))
            if self._rescue is None or not mends:
                raise
            problem = error.with_traceback(None)  # or its frames would keep tensors alive
        return self._rescue(state, tangents, problem)

    def check_first_runs(self) -> None:
        """Compare every result with the traced one when the programs first run.

        This is for programs whose ops were not run here before.
        """
        if self._sizes is not None:
            self._known_sizes.clear()
            return
        self.unchecked = {self.program.forward, *(program for _, program in self._backwards)}

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs of one planned forward, connected to autograd."""
        parameters = [self.store[name] for name in self.trainable]
        outputs = _StepFunction.apply(self.anchor, self, len(inputs), *inputs, *parameters)  # type: ignore[no-untyped-call]
        if self._outputs.inner or self._outputs.shared:
            node = next(t.grad_fn for t in outputs if t.grad_fn is not None)
            node.state.returned = self._outputs.returned(outputs)
        for i, position in self.program.input_outputs.items():
            given = inputs[position]
            same = given if given.requires_grad == self._outputs.requires_grad[i] else given.detach()
            outputs = (*outputs[:i], same, *outputs[i + 1 :])
        return tuple(outputs)

    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], InFlight]:
        self.store.begin()
        self.store.transfers.keep(self.store[name] for name in self.program.staying)
        numbers = self._numbers(inputs)
        program = self._program_for(numbers)
        start, sizes = self._start(inputs, program), self._evaluate(program, numbers)
        try:
            with self._without_autocast(), self._watched(lambda watch: watch.forward(inputs)), self._in_arena(numbers):
                results = self._run(program.forward, [self.store, sizes, *(inputs[i] for i in program.forward_inputs)])
        except BaseException as error:
            self.store.transfers.settle()
            if private.is_out_of_memory(error) or isinstance(error, (OtherResults, OtherBranch)):
                self._go_back(start)
            raise
        self.store.transfers.forward_reads_done()
        outputs = results[: program.output_count]
        saved = results[program.output_count :]
        # A view among the outputs must not look like one, or the caller could not edit it in place.
        outputs = [t if i in program.input_outputs else t.detach() for i, t in enumerate(outputs)]
        watched = [_Watched.of(f"input {i}", inputs[i]) for i in program.backward_inputs]
        # Detached, for an output that holds itself through its graph would outlive its last user.
        watched += [
            _Watched.of(f"output {self._outputs.names[i]}", outputs[i].detach()) for i in program.backward_outputs
        ]
        watched += [_Watched.of(f"constant {name}", tensor) for name, tensor in self._constants.items()]
        read = [] if start is None else [name for name in self.store if name not in self.written.buffers]
        named = {name: _Watched.named(name, self.store) for name in {*program.backward_state, *read}}
        if start is not None:
            start.read.extend(_Watched.of(f"input {i}", tensor) for i, tensor in enumerate(inputs))
            start.read.extend(named[name] for name in read)
            start.read.extend(_Watched.of(f"constant {name}", tensor) for name, tensor in self._all_constants.items())
        state = [named[name] for name in program.backward_state]
        decided = [outputs[i] for i in self._decisions]
        waiting = InFlight(saved, watched, state, start, program, numbers, decided)
        self.waiting.add(waiting)
        self.store.arena.led(waiting)
        return outputs, waiting

    def _in_arena(self, numbers: Numbers) -> contextlib.AbstractContextManager[None]:
        """A context for a forward at these sizes."""
        if self._steering is None:
            return contextlib.nullcontext()
        steering = self._steering if self._sizes is None or numbers == self._sizes.here else None
        gradients = [g for name in self.store if (g := self.store.parameter(name).grad) is not None]
        return self.store.arena.forward(steering, gradients)

    def _program_for(self, numbers: Numbers) -> Program:
        """The program, with checks of its results where it has not run at these sizes yet."""
        if self._sizes is None or numbers in self._known_sizes:
            return self.program
        assert self._checked is not None
        return self._checked()

    def _evaluate(self, program: Program, numbers: Numbers) -> tuple[Any, ...]:
        """The numbers that a program takes."""
        if id(program) not in self._numbers_of:
            self._numbers_of[id(program)] = private.evaluator([expression.text for expression in program.sizes])
        return self._numbers_of[id(program)](numbers)

    def _numbers(self, inputs: Sequence[torch.Tensor]) -> Numbers:
        return () if self._sizes is None else self._sizes.numbers(inputs)

    def backward(self, state: InFlight, tangents: dict[int, torch.Tensor]) -> Gradients:
        """Run backward from the gradients of some outputs. Raises OtherTangents where it was made for others.

        Runs forward again where what it saved is gone. Raises RuntimeError where it can't.
        """
        run = self._backward_for(tangents, state.autocast, state.numbers)
        if state.spent:
            self._check_repeats(state)
            return self.repeat(state, tangents)
        run = run if state.program is self.program else state.program.backward
        if state.returned is not None:
            self._outputs.check(state.returned, tangents)
        self.store.begin()
        self.store.transfers.standing.free()  # another forward's, which was in flight beside this one
        if self.program.grads == "surface":
            self.store.look_for_hooks()
        arguments = [self.store, functools.partial(self._surface, state), *tangents.values(), *state.saved]
        state.spend()
        updating = self.store.updates and self.store.updates.around_backward(tangents.values())
        try:
            with (
                self._without_autocast(),
                updating or contextlib.nullcontext(),
                self._watched(lambda w: w.backward()),
                contextlib.nullcontext() if self._steering is None else self.store.arena.backward(state),
            ):
                results = self._run(run, arguments)
        except BaseException:
            self.store.transfers.settle()
            raise
        for gradient in results:
            if gradient is not None:
                self.store.transfers.arrived(gradient)
        self._known_sizes.add(state.numbers)
        self.arrived = {i: TangentLayout.of(self._layouts[i].output, t) for i, t in tangents.items()}
        self.store.transfers.all_reads_done()
        return dict(zip((*self.program.input_gradients, *self.program.parameter_gradients), results, strict=True))

    def _surface(self, state: InFlight, names: tuple[str, ...], gradients: tuple[torch.Tensor, ...]) -> None:
        pairs = [(n, g) for n, g in zip(names, gradients, strict=True) if n not in state.surfaced]
        if pairs:
            state.surfacing = True
            with self.store.arena.outside():
                self.store.surface(*zip(*pairs, strict=True))
            state.surfacing = False
            state.surfaced.update(names)

    # -- running a forward again ------------------------------------------------------------------------------------

    def _start(self, inputs: Sequence[torch.Tensor], program: Program) -> _Start:
        kept: dict[str, torch.Tensor] = {}
        may_fail = program is not self.program or program.forward in self.unchecked  # for it checks what it gets
        if may_fail or self._decisions:
            kept = {n: _apart(self.store[n]) for n in self.written.buffers}
        elif self._keeps_buffers:
            kept = {n: self.store[n].detach().clone() for n in self.written.buffers}
        return _Start(tuple(inputs), held_rng(self.device) if self._draws else None, kept)

    def _go_back(self, start: _Start) -> None:
        """Put the generator and the buffers back to their state when a forward began."""
        if start.generator is not None:
            restore_held_rng(self.device, start.generator)
        for name, tensor in start.buffers.items():
            self.store[name].data.copy_(tensor)

    def repeats(self, state: InFlight) -> bool:
        """Whether the forward of `state` can run once more with the same results."""
        if state.start is None or state.surfacing or self._loses_what_it_reads(state.start):
            return False
        return all(watched.is_same(self.store) for watched in state.start.read)

    def _loses_what_it_reads(self, start: _Start) -> bool:
        return self.written.for_good or (self.written.matters and not start.buffers)

    def _check_repeats(self, state: InFlight) -> None:
        """Raise RuntimeError, with the reason, where the forward of `state` can't run again for a further backward."""
        if self.repeats(state):
            return
        if state.start is None:
            why = "its parameters are there only around its own passes"
        elif self.written.for_good:
            why = "it writes to its inputs, to a constant, or puts other tensors in the place of buffers"
        elif self._loses_what_it_reads(state.start):
            why = f"it reads what it writes to ({', '.join(self.written.buffers[:3])}). on_oom='replan' keeps copies"
        else:
            changed = (watched.what for watched in state.start.read if not watched.is_same(self.store))
            why = f"{next(changed, 'what it read')} has been modified by an inplace operation, or exchanged, since then"
        raise RuntimeError(
            "memplan: trying to backward through a planned forward whose saved tensors are freed. A plan runs the "
            f"forward again for that, but this one can't, because {why}. Add losses up and call backward once, or "
            "call memplan.remove(model) to train without a plan"
        )

    def repeat(self, state: InFlight, tangents: dict[int, torch.Tensor]) -> Gradients:
        """Run the forward of `state` again, which another program ran first, and then its backward.

        Buffers and the generator are left as they are. Gradients that were handed over are not handed over again.
        """
        assert state.start is not None
        buffers = {name: self.store[name] for name in self.written.buffers}
        present = _Start((), held_rng(self.device), {n: b.detach().clone() for n, b in buffers.items()})
        with private.versions_kept(buffers.values()):  # other forwards that wait may have read them
            self._go_back(state.start)
            try:
                again = self.forward(state.start.inputs)[1]
            finally:
                self._go_back(present)
        again.surfaced, again.autocast, again.returned = state.surfaced, state.autocast, state.returned
        try:
            return self.backward(again, tangents)
        finally:
            state.surfacing = again.surfacing

    def _backward_for(
        self, tangents: dict[int, torch.Tensor], autocast: Autocast | None, numbers: Numbers
    ) -> fx.GraphModule:
        """The backward program for gradients of this layout, under this autocast. numbers: of the forward's sizes."""
        if autocast not in self.autocasts:
            there = "outside of" if autocast is None else "under"
            raise OtherTangents(
                f"backward runs {there} autocast, unlike what was planned; its ops round otherwise there. Call "
                "backward after the context of autocast has ended, as PyTorch recommends"
            )
        for index in tangents.keys() - self._layouts.keys():
            raise OtherTangents(
                f"backward reached output {self._outputs.names[index]}, but the plan starts backward from "
                f"{', '.join(x.output for x in self._layouts.values())} alone. Put the whole loss inside with loss_fn="
            )
        for index in self._layouts.keys() - tangents.keys():
            raise OtherTangents(
                f"backward did not reach output {self._layouts[index].output}, but the plan starts backward from it. "
                "Put the loss inside with loss_fn="
            )
        layouts = {i: TangentLayout.of(self._layouts[i].output, t) for i, t in tangents.items()}
        planned = [{i: layout.at(numbers) for i, layout in of_one.items()} for of_one, _ in self._backwards]
        for expected, (_, program) in zip(planned, self._backwards, strict=True):
            if layouts == expected:
                return program
        index = next(i for i in layouts if layouts[i] != planned[0][i])
        raise OtherTangents(
            f"the gradient of output {layouts[index].output} arrives with strides {layouts[index].stride} and dtype "
            f"{layouts[index].dtype}, but was planned with strides {planned[0][index].stride} and "
            f"{planned[0][index].dtype}; eager would run other kernels on it. Put the loss inside with loss_fn="
        )

    def takes(
        self, tangents: dict[int, torch.Tensor], autocast: Autocast | None, inputs: Sequence[torch.Tensor] = ()
    ) -> bool:
        """Whether backward was made for gradients of this layout, under this autocast.

        inputs: of the forward, where sizes vary.
        """
        try:
            self._backward_for(tangents, autocast, self._numbers(inputs))
        except OtherTangents:
            return False
        return True

    def check_unchanged(self, state: InFlight) -> None:
        """Raise as autograd does where something that backward reads has been written to since forward."""
        for watched in state.parameters:
            if self.store[watched.what] is not watched.tensor:
                raise RuntimeError(
                    f"memplan: {watched.what} is another tensor than it was in forward; run forward again, and "
                    "keep the parameters with which it ran until backward is over (torch.func.functional_call does not)"
                )
        for watched in (*state.watched, *state.parameters):
            watched.check()

    @property
    def requires_grad(self) -> tuple[bool, ...]:
        return self._outputs.requires_grad

    def _watched(
        self, phase: Callable[[Observer], contextlib.AbstractContextManager[None]]
    ) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.watch is None or self.watch.finished else phase(self.watch)

    def _run(self, program: fx.GraphModule, arguments: list[Any]) -> Any:
        """Run one of the two programs. Its first run is checked where none of its ops was run before."""
        with private.without_function_modes():
            if program not in self.unchecked:
                return program.forward(arguments)
            self.unchecked.discard(program)
            return run_checked(program, arguments)

    def _without_autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The captured ops are already cast; autocast must not cast them again."""
        if torch.is_autocast_enabled(self.device.type):
            return torch.autocast(self.device.type, enabled=False)
        return contextlib.nullcontext()


class _StepFunction(torch.autograd.Function):
    """One planned training step: forward and backward programs behind one autograd node."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, runner: Runner, input_count: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        outputs, state = runner.forward(tensors[:input_count])
        if runner.drops_saved:
            state.spend()
            state.watched.clear()  # which hold outputs; what forward has read is checked before it runs again
        ctx.runner, ctx.state, ctx.input_count = runner, state, input_count
        # An output that is an input itself would otherwise come back detached from it.
        ctx.mark_non_differentiable(*(o for o, wanted in zip(outputs, runner.requires_grad, strict=True) if not wanted))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        runner, state = ctx.runner, ctx.state
        keeps_graph = private.backward_keeps_graph()
        if torch.is_grad_enabled():
            raise RuntimeError(
                "memplan: gradients of a planned step can't be differentiated again (create_graph=True, double "
                "backward). Plan with a loss_fn= that calls torch.autograd.grad(..., create_graph=True) itself, which "
                "gives the bits of eager, or call memplan.remove(model) to train without a plan"
            )
        if state is None:
            raise RuntimeError(
                "memplan: trying to backward through a planned step a second time; what it saved has been freed. "
                "Say retain_graph=True to the backward before, or add losses up and call backward once"
            )
        if keeps_graph and runner.store.updates is not None:
            raise RuntimeError(
                "memplan: update='backward' updates the parameters as backward goes, so no second backward can follow "
                "(retain_graph=True). Add losses up and call backward once, or plan without update='backward'"
            )
        if runner.program.grads == "surface" and not private.engine_reaches(ctx.next_functions[0][0]):
            raise RuntimeError(
                "memplan: torch.autograd.grad and backward(inputs=...) are not supported by a planned step that puts "
                'every gradient into .grad. Plan with grads="edges", or call loss.backward()'
            )
        runner.check_unchanged(state)
        runner.begin_backward(state)
        ctx.state, state.autocast = state if keeps_graph else None, Autocast.of_backward(runner.device.type)
        state.surfaced = set()
        gradients = runner.gradients(state, {i: t for i, t in enumerate(tangents) if t is not None})
        wanted = (*range(ctx.input_count), *runner.trainable)
        return (None, None, None, *(gradients.get(key) for key in wanted))


def _constants(programs: Iterable[fx.GraphModule]) -> dict[str, torch.Tensor]:
    """The constants of programs by name, without those of which only the layout is read."""
    named = (named for program in programs for named in program.named_buffers())
    return {name: tensor for name, tensor in named if not tensor.is_meta}


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own that does not count as the device's, because plans do not count it."""
    memory = bytearray(max(1, tensor.nbytes))
    with private.outside_of_tracing():
        flat = torch.frombuffer(memory, dtype=torch.uint8)[: tensor.nbytes]
        return flat.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
