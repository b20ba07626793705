"""Run a program under autograd: one Function for the whole step.

Parameters are not inputs of the Function. An empty anchor tensor connects it to autograd, and each gradient is handed
over in the middle of backward, as soon as it is final. Under grads="edges" parameters are inputs, and backward returns
their gradients, so that `torch.autograd.grad` finds them.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from memplan import torch_private as private
from memplan.capture.analysis.gradients import routes_of_gradients
from memplan.capture.capture import Capture
from memplan.capture.key import switches_of_ops
from memplan.capture.ops.layout import Layout
from memplan.capture.ops.sizes import Numbers
from memplan.capture.ops.ways import MakeNoIsland, OtherResults, way_of
from memplan.capture.trace.raw_trace import Autocast
from memplan.errors import PlanMismatch
from memplan.plans.plan import Plan
from memplan.runtime.program.check import OtherBranch, refuse_capture, run_checked
from memplan.runtime.program.collectives import Collectives
from memplan.runtime.program.in_flight import ForwardStart, InFlight, Outputs, Watched, Written, apart
from memplan.runtime.program.lower import lower
from memplan.runtime.program.parameters import ParameterStore
from memplan.runtime.program.program import Program
from memplan.runtime.program.rng import held_rng, restore_held_rng
from memplan.runtime.program.tangents import Backwards, Tangents, layouts_of, planned_tangents
from memplan.runtime.watch.meter import Observer

Gradients = dict[int | str, torch.Tensor]  # by position of an input, or name of a parameter
_Context = contextlib.AbstractContextManager[Any]


class Runner:
    """A plan as programs, with the model whose parameters they read.

    - outputs: of the model. store: parameters and buffers.
    - trainable: the parameters that are inputs of the Function, under grads="edges".
    - watch: looks at the first steps. unlike: calls that would give something else in a second run.
    - arrived: the gradients with which the latest backward started. retained: some backward has kept the graph.
    - unchecked: programs whose results are compared with the traced ones in their first run.
    - waiting: forwards, for their backward. undo: leaves nothing of the latest forward, where that raised an error.

    `Recovery.attend` (installed/recovery.py) sets three more before the step runs:

    - rescue: gives gradients where this program can't.
    - before_backward: called when a backward begins, with whether it is a further one through the same forward.
    - keeps_buffers: forward can run again though it writes to buffers, because their earlier contents are kept.
    """

    rescue: Callable[[InFlight, Tangents, Exception], Gradients]
    before_backward: Callable[[bool], None]
    keeps_buffers: bool

    def __init__(
        self,
        capture: Capture,
        lowered: Callable[[], tuple[Program, ...]],
        plan: Plan,
        store: ParameterStore,
        trainable: tuple[str, ...],
    ) -> None:
        """Prepare to run a plan of a capture. lowered: gives the plan as programs, when they are first needed."""
        self._capture, self._lowered, self._plan = capture, lowered, plan
        self.store, self.trainable = store, trainable
        self._traced = traced = capture.traced
        self.outputs, self.written, self.device = Outputs.of(traced), Written.of(traced), traced.device
        self._sizes, self._steering = traced.sizes, plan.steering
        self._draws = any(op.random for op in traced.graph.ops[: traced.graph.boundary])
        self._decisions = tuple(decision.output for decision in traced.decisions)  # outputs that say which branches
        islands = traced.islands
        self._once, self._has_islands = [island for island in islands if island.once], bool(islands)
        self._routes = routes_of_gradients(traced) if islands else {}
        self.unlike = [island.title for island in islands if not island.alike]
        self._known_sizes = set() if self._sizes is None else {self._sizes.here}  # at which results are as traced
        self.watch: Observer | None = None
        self.arrived: dict[int, Layout] | None = None
        self.retained = False
        self.undo: Callable[[], None] | None = None
        self.unchecked: set[fx.GraphModule] = set()
        self.waiting: weakref.WeakSet[InFlight] = weakref.WeakSet()
        self.returned: list[tuple[Any, int]] = []  # memory of the last call's outputs, and its bytes
        self._adds = bool(self.written.in_backward)
        self.anchor = torch.empty(0, requires_grad=True, device=self.device)

    @functools.cached_property
    def programs(self) -> tuple[Program, ...]:
        """The plan, lowered. A second program serves gradients of another layout."""
        return self._lowered()

    @functools.cached_property
    def program(self) -> Program:
        return self.programs[0]

    @functools.cached_property
    def collectives(self) -> Collectives:
        events = dict.fromkeys(p.collectives for p in self.programs)  # most often those of one are those of the other
        return Collectives.of(event for of_program in events for event in of_program)

    @functools.cached_property
    def backwards(self) -> Backwards:
        """The backward programs, of which the second is for gradients of another layout."""
        variants = [traced for traced in (self._traced, self._capture.expanded) if traced is not None]
        pairs = [(planned_tangents(v), p.backward) for v, p in zip(variants, self.programs)]
        return Backwards(pairs, self.outputs.names, self._capture.options.backward)

    @functools.cached_property
    def _checked(self) -> Program:
        """The program with checks of its results, for the first run at each size."""
        return lower(self._plan.schedule, self._traced, self.program.grads, checks=True, steering=self._steering)

    @functools.cached_property
    def _constants(self) -> tuple[dict[str, torch.Tensor], ...]:
        """Constants with memory: all; those that forward or backward only reads; those of backward among these."""
        programs = [self.program.forward], self.backwards.programs
        forward, backward = ({n: t for p in some for n, t in p.named_buffers() if not t.is_meta} for some in programs)
        read = {name: tensor for name, tensor in backward.items() if name not in self.written.in_backward}
        return forward | backward, forward | read, read

    def gradients(self, state: InFlight, tangents: Tangents) -> Gradients:
        """Gradients from this program, or from the rescue where this program can't give them."""
        tangents = dict(sorted(tangents.items()))
        run = self.backwards.program_for(tangents, state.autocast, state.numbers)
        if isinstance(run, str):
            return self.rescue(state, tangents, PlanMismatch(run))
        try:
            return self._backward(state, tangents, run)
        except Exception as error:
            if not private.is_out_of_memory(error) and not isinstance(way_of(error), OtherResults):
                raise
            problem = error.with_traceback(None)  # or its frames would keep tensors alive
        return self.rescue(state, tangents, problem)

    def check_first_runs(self) -> None:
        """Compare every result with the traced one when the programs first run, for their ops were not run here yet."""
        if self._sizes is not None:
            self._known_sizes.clear()
        else:
            self.unchecked = {self.program.forward, *self.backwards.programs}

    def __call__(self, inputs: Sequence[torch.Tensor], numbers: Numbers) -> tuple[torch.Tensor, ...]:
        """The outputs of one planned forward, connected to autograd. numbers: of its sizes, where they vary."""
        self.undo, begun = None, list[InFlight]()
        parameters = [self.store[name] for name in self.trainable]
        arguments = (self.anchor, self, begun, numbers, len(inputs), *inputs, *parameters)
        outputs = _StepFunction.apply(*arguments)  # type: ignore[no-untyped-call]
        if self.outputs.inner or self.outputs.shared:
            begun[0].returned = self.outputs.returned(outputs)
        for i, position in self.program.input_outputs.items():
            given = inputs[position]
            same = given if given.requires_grad == self.outputs.requires_grad[i] else given.detach()
            outputs = (*outputs[:i], same, *outputs[i + 1 :])
        outputs = self.outputs.as_dtensors(outputs)
        own = [private.part_here(outputs[i]) for i in self.outputs.own]
        self.returned = [(private.known_storage(t), t.untyped_storage().nbytes()) for t in own]
        return outputs

    def forward(self, inputs: Sequence[torch.Tensor], numbers: Numbers) -> tuple[list[torch.Tensor], InFlight]:
        refuse_capture(self._plan.schedule, self.store, self.device)
        self.store.begin(self._constants[0])
        self.store.first_runs, self.store.wrote = {}, []
        self.store.transfers.keep(self.store[name] for name in self.program.staying)
        program = self.program
        if self._sizes is not None and numbers not in self._known_sizes:
            program = self._checked
        may_stop = self._decisions or program is not self.program or program.forward in self.unchecked  # at a check
        kept: dict[str, torch.Tensor] = {}
        if may_stop or self._has_islands:
            kept = {n: apart(self.store[n]) for n in self.written.buffers}
        elif self.keeps_buffers:
            kept = {n: self.store[n].detach().clone() for n in self.written.buffers}
        draws = (self._draws or self._has_islands) and not private.is_captured(self.device)
        start = ForwardStart(tuple(inputs), held_rng(self.device) if draws else None, kept)
        may_repeat = bool(self._once) and (self.retained or self.arrived is None)  # for gradients of other layouts
        python_state = self._state_kept() if may_repeat or (self._once and may_stop) else contextlib.ExitStack()
        arguments = [self.store, program.sizes_at(numbers), *(inputs[i] for i in program.forward_inputs)]
        in_arena: _Context = contextlib.nullcontext()
        if self._steering is not None:
            steering = self._steering if self._sizes is None or numbers == self._sizes.here else None
            gradients = [g for name in self.store if (g := self.store.parameter(name).grad) is not None]
            in_arena = self.store.arena.forward(steering, gradients)
        try:
            with self._without_autocast(), self._watched(lambda watch: watch.forward(inputs)), in_arena:
                results = self._run(program.forward, arguments)
        except BaseException as error:
            self.store.transfers.settle()
            all_kept = len(start.buffers) == len(self.written.buffers) and not self.written.for_good
            self.undo = functools.partial(self._go_back, start) if all_kept and not self._has_islands else None
            if may_run_again(error):
                if self.store.wrote:
                    raise RuntimeError(
                        f"memplan: {self.store.wrote[0]} has written to a buffer, as it did in no earlier step, and "
                        "forward has to run again from its start. Load a checkpoint; memplan.remove takes the plan off"
                    ) from error
                self._go_back(start)
                python_state.close()
            raise
        self.store.transfers.forward_reads_done()
        count = len(self.outputs.names)
        outputs, saved = results[:count], results[count:]
        # A view among the outputs must not look like one, or the caller could not edit it in place.
        outputs = [t if i in program.input_outputs else t.detach() for i, t in enumerate(outputs)]
        # Detached, for an output that holds itself through its graph would outlive its last user.
        watched = [(f"input {i}", inputs[i]) for i in program.backward_inputs]
        watched += [(f"output {self.outputs.names[i]}", outputs[i].detach()) for i in program.backward_outputs]
        read = [(f"input {i}", tensor) for i, tensor in enumerate(inputs)]
        state = Watched(program.backward_state, store=self.store)
        noted = {*program.backward_state, *self.written.buffers}
        others = [n for n in self.store if n not in noted]
        start.read.extend([Watched.of(read, self._constants[1]), state, Watched(others, store=self.store)])
        decided = [outputs[i] for i in self._decisions]
        to_watch, way = Watched.of(watched, self._constants[2]), self.store.way
        first_runs, wrote = self.store.first_runs, self.store.wrote
        waiting = InFlight(saved, to_watch, state, start, program, way, numbers, decided, first_runs, wrote)
        waiting.python_state = python_state if may_repeat else None
        self.waiting.add(waiting)
        self.store.arena.led(waiting)
        return outputs, waiting

    def backward(self, state: InFlight, tangents: Tangents) -> Gradients:
        """`gradients` without a rescue: raises PlanMismatch where backward was not planned for such gradients."""
        run = self.backwards.program_for(tangents, state.autocast, state.numbers)
        if isinstance(run, str):
            raise PlanMismatch(run)
        return self._backward(state, tangents, run)

    def _backward(self, state: InFlight, tangents: Tangents, run: fx.GraphModule) -> Gradients:
        """Run a backward program. If what forward saved is gone, forward runs again, or RuntimeError says why not."""
        if state.spent:
            if (why := self.keeps_from_repeating(state)) is not None:
                raise RuntimeError(
                    "memplan: trying to backward through a planned forward whose saved tensors are freed. A plan runs "
                    f"the forward again for that, but this one can't, because {why}. Add losses up and call backward "
                    "once, or call memplan.remove(model) to train without a plan"
                )
            return self.repeat(state, tangents, state.numbers)
        if state.program is not self.program:  # the checked program of a new size has one backward program
            run = state.program.backward
        if state.returned is not None:
            state.returned(self.outputs, tangents)
        self.store.begin(self._constants[0])
        self.store.absent, self.store.routes, self.store.first_runs = set(), self._routes, state.first_runs
        self.store.transfers.standing.free()  # another forward's, which was in flight beside this one
        if self.program.grads == "surface":
            self.store.look_for_hooks()
        arguments = [self.store, functools.partial(self._surface, state), *tangents.values(), *state.saved]
        state.spend()
        state.surfacing = self._adds
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
        state.surfacing = False
        state.first_runs.clear()
        self.store.end(state.way, self._constants[0])
        self._known_sizes.add(state.numbers)
        self.arrived = layouts_of(tangents)
        self.store.transfers.all_reads_done()
        found = zip(self.program.gradients, results, strict=True)
        return {key: gradient for key, gradient in found if not self.store.gets_none(key)}

    def _surface(self, state: InFlight, names: tuple[str, ...], gradients: tuple[torch.Tensor, ...]) -> None:
        if not state.surfaced.isdisjoint(names):
            gradients = tuple(g for n, g in zip(names, gradients, strict=True) if n not in state.surfaced)
            names = tuple(n for n in names if n not in state.surfaced)
        if names:
            state.surfacing = True
            with self.store.arena.outside():
                self.store.surface(names, gradients)
            state.surfacing = self._adds
            state.surfaced.update(names)

    def _go_back(self, start: ForwardStart) -> None:
        """Put the generator and the buffers back to their state when a forward began."""
        if start.generator is not None:
            restore_held_rng(self.device, start.generator)
        for name, tensor in start.buffers.items():
            self.store[name].data.copy_(tensor)

    def keeps_from_repeating(self, state: InFlight) -> str | None:
        """What keeps a forward from running once more with the same results, in words; None for nothing."""
        start = state.start
        once = () if state.python_state is not None else (island.title for island in self._once)
        for title in (*self.unlike, *state.wrote, *once):
            return f"{title} would give, or leave, something else"
        if self._draws and start.generator is None:
            return "it is in a CUDA graph and draws random numbers"
        if self.written.for_good:
            return "it writes to its inputs, to a constant, or puts other tensors in the place of buffers"
        if self.written.matters and not start.buffers:
            return f"it reads what it writes to ({', '.join(self.written.buffers[:3])}). on_oom='replan' keeps copies"
        changed = (watched.exchanged() or (watched.modified() or ("",))[0] for watched in start.read)
        if (name := next(filter(None, changed), None)) is not None:
            return f"{name} has been modified by an inplace operation, or exchanged, since then"
        return "its backward is handing gradients over" if state.surfacing else None

    def repeat(self, state: InFlight, tangents: Tangents, numbers: Numbers) -> Gradients:
        """Run the forward of `state` again, which another program ran first, and then its backward.

        Buffers and the generator are left as they are. Gradients that were handed over are not handed over again.
        numbers: of the forward's sizes, as this program has them.
        """
        buffers = {name: self.store[name] for name in self.written.buffers}
        present = ForwardStart((), held_rng(self.device), {n: b.detach().clone() for n, b in buffers.items()})
        with private.versions_kept(buffers.values()):  # other forwards that wait may have read them
            self._go_back(state.start)
            try:
                with self._state_kept():
                    if state.python_state is not None:
                        state.python_state.close()
                    again = self.forward(state.start.inputs, numbers)[1]
                    state.python_state = again.python_state
            finally:
                self._go_back(present)
        again.surfaced, again.autocast, again.returned = state.surfaced, state.autocast, state.returned
        try:
            return self.backward(again, tangents)
        finally:
            state.surfacing = again.surfacing

    def _state_kept(self) -> contextlib.ExitStack:
        """A context that puts Python state back which islands change."""
        stack = contextlib.ExitStack()
        for island in self._once:
            stack.enter_context(island.kept(self.store.model))
        return stack

    def takes(self, tangents: Tangents, autocast: Autocast | None, numbers: Numbers) -> bool:
        """Whether backward was made for gradients of this layout, under this autocast, at these sizes."""
        return not isinstance(self.backwards.program_for(tangents, autocast, numbers), str)

    def check_unchanged(self, state: InFlight) -> None:
        """Raise as autograd does where something that backward reads has been written to since forward."""
        if (name := state.parameters.exchanged()) is not None:
            raise RuntimeError(
                f"memplan: {name} is another tensor than it was in forward; run forward again, and keep the "
                "parameters with which it ran until backward is over"
            )
        if state.way != self.store.way:
            raise RuntimeError(
                "memplan: set_requires_gradient_sync was called between a forward and its backward, or another "
                "backward has reduced gradients; call it before forward"
            )
        if (switch := self._capture.key.changed_switch(switches_of_ops())) is not None and self._plan.recomputed:
            raise RuntimeError(
                f"memplan: {switch}, in backward, where ops that run again would run other kernels than in forward. "
                "Leave it as it is until backward is over, or plan for a budget at which nothing is recomputed"
            )
        state.watched.check()
        state.parameters.check(self.written.buffers)

    def _watched(self, phase: Callable[[Observer], _Context]) -> _Context:
        return contextlib.nullcontext() if self.watch is None or self.watch.finished else phase(self.watch)

    def _run(self, program: fx.GraphModule, arguments: list[Any]) -> Any:
        """Run one of the two programs. Its first run is checked where none of its ops was run before."""
        with private.without_function_modes():
            if program not in self.unchecked:
                return program.forward(arguments)
            self.unchecked.discard(program)
            return run_checked(program, arguments)

    def _without_autocast(self) -> _Context:
        """The captured ops are already cast; autocast must not cast them again."""
        if torch.is_autocast_enabled(self.device.type):
            return torch.autocast(self.device.type, enabled=False)
        return contextlib.nullcontext()


class _StepFunction(torch.autograd.Function):
    """One planned training step: forward and backward programs behind one autograd node."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Any, runner: Runner, begun: list[InFlight], numbers: Numbers, input_count: int, *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        """begun: gets the forward that begins here."""
        ctx.set_materialize_grads(False)
        outputs, state = runner.forward(tensors[:input_count], numbers)
        begun.append(state)
        ctx.runner, ctx.state, ctx.input_count = runner, state, input_count
        # An output that is an input itself would otherwise come back detached from it.
        pairs = zip(outputs, runner.outputs.requires_grad, strict=True)
        ctx.mark_non_differentiable(*(output for output, wanted in pairs if not wanted))
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
        runner.retained |= keeps_graph
        runner.before_backward(state.spent)
        state.autocast = Autocast.of_backward(runner.device.type)
        if not keeps_graph:  # tensors in attributes of the model hold this node, and the runner holds the model
            ctx.state = ctx.runner = None
        state.surfaced = set()
        gradients = runner.gradients(state, {i: t for i, t in enumerate(tangents) if t is not None})
        wanted = (*range(ctx.input_count), *runner.trainable)
        return (None, None, None, None, None, *(gradients.get(key) for key in wanted))


def may_run_again(error: BaseException) -> bool:
    """Whether a forward that stopped at this error may run again from its start, by another plan."""
    known = isinstance(way_of(error), (OtherResults, MakeNoIsland)) or isinstance(error, OtherBranch)
    return known or private.is_out_of_memory(error)
