"""Trace one eager training step on fake tensors: the aten ops of the forward and of `torch.autograd.grad`, in order.

What eager runs is what is in the graph. AOTAutograd's joint graph is not: it traces the backward under autocast,
rewrites dropout, casts a shared weight once per use and sums tied gradients in another order. A trace has dispatch
modes on, though, which PyTorch's C++ asks for in places: `branches` has eager's way traced, or refuses.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from memplan import torch_private as private
from memplan.capture.attributes.attributes import SetValue
from memplan.capture.attributes.kept_memory import KeptMemory, written_by
from memplan.capture.ops import op_facts
from memplan.capture.ops.dataflow import answer_to_any_draw, evaluate, nodes_behind
from memplan.capture.ops.layout import dense_layout, storage_key, strided_parts, strides_that_matter, tensors_of
from memplan.capture.ops.real_outputs import corrected_outputs
from memplan.capture.ops.real_results import with_noted_results
from memplan.capture.trace.branches import as_without_modes
from memplan.capture.trace.call import Call, OutputTemplate
from memplan.capture.trace.edges import Edges, leaves_behind
from memplan.capture.trace.memo import Memo
from memplan.capture.trace.raw_trace import (
    Answer,
    AttributeRead,
    Autocast,
    Decision,
    PartSurroundings,
    RawTrace,
    ScalarRead,
)
from memplan.capture.trace.remembered import results_forgotten
from memplan.capture.trace.source_lines import (
    caller_line,
    first_line,
    in_python_backward,
    line_of,
    lines_within,
    stack_depth,
)
from memplan.capture.trace.sums import is_odd
from memplan.capture.trace.tensor_hooks import looking_refused
from memplan.errors import NothingToTrain, UnsupportedModel

_OTHER_READS = "forward reads other values from tensors in a trace than when it runs"


class OpenBranch(UnsupportedModel):
    """Forward branches on a boolean that it computes from parameters; a run of it would tell which way it goes."""


class CompiledCode(UnsupportedModel):
    """Forward calls what went through torch.compile. It must not even run while a step is looked at: from then on
    PyTorch would run it without its compiled code."""


@dataclass(slots=True)
class _TraceNotes:
    """What the traced function notes down while it runs.

    seen: what forward read from tensors before: all of it where the inputs' data is not at hand (`blind`), else the
    booleans of a run. answers: what the trace has read so far. decided: booleans whose values were taken from `seen`,
    with these and where forward branches on them. in_place, odd_sums: see `sums`. additions: how many
    there were in backward.
    """

    names: dict[nn.Module, str]
    sources: dict[str, torch.Tensor]  # placeholder name -> the real tensor that a scalar read may look at
    parameter_count: int
    stack: list[str] = field(default_factory=list)
    spans: list[tuple[int, str]] = field(default_factory=list)
    reads: list[ScalarRead] = field(default_factory=list)
    attribute_reads: list[AttributeRead] = field(default_factory=list)
    boundary: fx.Node | None = None
    template: OutputTemplate | None = None
    requires_grad: tuple[bool, ...] = ()
    tangent_nodes: dict[int, fx.Node] = field(default_factory=dict)
    node_names: tuple[str, ...] = ()
    reassigned: dict[str, int] = field(default_factory=dict)
    arrivals: list[str] = field(default_factory=list)
    summed: tuple[str, ...] = ()
    inner: dict[int, bool] = field(default_factory=dict)
    seen: Iterator[Answer] | None = None
    blind: bool = False
    answers: list[Answer] = field(default_factory=list)
    forward_reads: int = 0
    decided: list[tuple[torch.Tensor, bool, str]] = field(default_factory=list)
    in_place: frozenset[int] = frozenset()
    additions: int = 0
    odd_sums: list[tuple[int, fx.Node, fx.Node]] = field(default_factory=list)
    decisions: tuple[Decision, ...] = ()

    def end_forward(self, template: OutputTemplate) -> None:
        """Note where the trace stands when forward has returned."""
        nodes = private.tracer_graph().nodes
        self.forward_reads = len(self.answers)
        if self.seen is not None and not self.blind and next(self.seen, None) is not None:
            raise UnsupportedModel(_OTHER_READS)
        self.decisions = tuple(
            Decision(template.add(tensor, f"branch at {where}"), value, where) for tensor, value, where in self.decided
        )
        self.template = template
        self.requires_grad = tuple(t.requires_grad for t in template.tensors)
        self.boundary = next(iter(reversed(nodes)))
        self.node_names = tuple(n.name for n in nodes)
        self.stack.clear()

    @contextlib.contextmanager
    def noting_arrivals(self, leaves: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Note the order in which autograd hands over gradients. Hooks that stayed would keep the trace for ever."""

        def note(name: str, gradient: torch.Tensor) -> None:
            self.arrivals.append(name)

        hooks = [leaf.register_hook(functools.partial(note, name)) for name, leaf in leaves.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def next_seen(self, tensor: torch.Tensor, place: tuple[tuple[str, int], ...]) -> Answer | None:
        """What was read here before; None where nobody has said. Raises UnsupportedModel where it was not read then."""
        if self.seen is None or not (self.blind or (tensor.dtype is torch.bool and self.template is None)):
            return None
        answer = next(self.seen, None)
        if answer is None or answer.place != place:
            raise UnsupportedModel(f"{_OTHER_READS}, at {caller_line()}")
        return answer

    @property
    def where(self) -> str:
        return self.stack[-1] if self.stack else ""

    def place(self, line: str) -> str:
        """Where in the model a source line is being executed."""
        return f"{self.where} at {line}" if self.where else f"at {line}"


def trace_step(
    model: nn.Module,
    call: Call,
    run: Callable[..., Any],
    autocast: Autocast,
    device: torch.device,
    expanded: bool = False,
    around: PartSurroundings | None = None,
    shapes: Mapping[str, torch.Size] | None = None,
    memo: Memo | None = None,
    moves_inputs: bool = True,
    memory: KeptMemory | None = None,
    backward: Autocast | None = None,
    seen: Sequence[Answer] | None = None,
    in_place: frozenset[int] = frozenset(),
    left: Callable[[], Sequence[SetValue]] = tuple,
) -> RawTrace:
    """Trace `run(*args, **kwargs)` and its backward. Nothing of the model, the sample or the generator changes.

    expanded: the gradients handed in are one number expanded to the output's shape, as `out.sum().backward()` gives.
    around: the call is part of a larger step. Gradients of its inputs then go on as they are; each must have the layout
    of its input. shapes: of parameters that are empty between uses, by name. memo: that of other
    traces under the same switches. moves_inputs: the call's tensors stand for ones that are on the device. memory: puts
    back, once the caller says so, what forward writes to of tensors that are neither parameters, buffers nor inputs.
    backward: the autocast under which backward runs; None is none. seen: what forward read from tensors when it ran on
    this call, in order: the trace takes the same branches. in_place: numbers of additions in backward that eager makes
    in place, as `sums` tells from an earlier trace. left: what forward has set attributes to, asked for
    when it is over; the tensors in it are outputs.

    Raises UnsupportedModel with the module and the source line where the step can't be traced exactly, OpenBranch where
    it could be with `seen`.
    """
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    for name, tensor in (*parameters.items(), *buffers.items(), *zip(call.names, call.tensors, strict=True)):
        if len(strided_parts(tensor)) > 1:
            raise UnsupportedModel(f"{name} is a sparse tensor, which ops on can't be traced")
    inputs = (*call.tensors, *(call.tensors[p] for p, _ in (around.further_uses() if around else ())))
    differentiated = [n for n, p in parameters.items() if p.requires_grad]
    session = _TraceNotes({m: n for n, m in model.named_modules()}, {}, len(parameters), in_place=in_place)
    if around is not None and around.answers:
        session.seen, session.blind = iter(around.answers), True
    elif seen is not None:
        session.seen = (answer for answer in seen if isinstance(answer.value, bool))

    def step(
        params: Sequence[torch.Tensor], bufs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> tuple[Any, Any]:
        _note_placeholders(session, [*buffers.values(), *inputs])
        leaves = {
            name: p.detach().requires_grad_() if parameters[name].requires_grad else p.detach()
            for name, p in zip(parameters, params, strict=True)
        }
        for name, leaf in leaves.items():
            _take_attributes(leaf, parameters[name])
        given = [
            t.detach().requires_grad_() if real.requires_grad else t for t, real in zip(tensors, inputs, strict=True)
        ]
        wanted = [leaves[n] for n in differentiated] + [t for t in given[: len(call.tensors)] if t.requires_grad]

        def forward_and_backward(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            buffers_before, leaves_before = dict(model.named_buffers()), dict(model.named_parameters())
            memory_before = {name: storage_key(t) for name, t in (*leaves_before.items(), *buffers_before.items())}
            with autocast.context():
                output = run(*args, **kwargs)
            for name, leaf in model.named_parameters():
                if leaf is not leaves_before.get(name, leaf):
                    raise UnsupportedModel(f"forward exchanges the parameter {name}; a planned step would not")
            for name, tensor in (*leaves_before.items(), *buffers_before.items()):
                if storage_key(tensor) != memory_before[name]:
                    raise UnsupportedModel(
                        f"forward exchanges the memory of {name}; a planned step would not. Write to {name} in place "
                        "under torch.no_grad() instead of setting its .data"
                    )
            template = OutputTemplate(output, shared_objects(model))
            for found in left():
                template.add_attribute(*found)
            if template.out_of_reach:
                raise UnsupportedModel(
                    f"forward returns {', '.join(template.out_of_reach)} with tensors in it, which a planned step "
                    "would return again and again. Return the tensors"
                )
            for name, tensor in model.named_buffers():
                if name in buffers_before and tensor is not buffers_before[name]:
                    session.reassigned[name] = template.add(tensor, f"buffer {name}")
            session.end_forward(template)
            chosen, tangents = _tangents(session, expanded, around)
            starts = [template.tensors[i] for i in chosen]
            own = {name: leaves[name] for name in differentiated}
            edges = Edges(starts)
            session.summed = tuple(name for name, leaf in own.items() if len(edges.to(leaf)) > 1)
            session.inner = _inner(session, edges)
            grads: list[torch.Tensor | None]
            with session.noting_arrivals(own), backward.context() if backward else contextlib.nullcontext():
                if around is None or around.whole:
                    grads = list(torch.autograd.grad(starts, wanted, tangents, allow_unused=True))
                else:
                    grads = _grads_in_part(starts, wanted, tangents, around, given, own)
            return list(template.tensors), grads

        args, kwargs = call.with_tensors(given[: len(call.tensors)])
        state = {**leaves, **dict(zip(buffers, bufs, strict=True))}
        with private.seeding_refused(_seeds_itself), _in_place_of_state(model, state):
            return forward_and_backward(*args, **kwargs)

    fake_inputs = [_stand_in(t, device) if moves_inputs else t.detach() for t in inputs]
    state = [private.plain(t) for t in (*parameters.values(), *buffers.values())]
    for index, name in enumerate(parameters):
        if shapes and name in shapes:
            state[index] = torch.empty(shapes[name], dtype=state[index].dtype, device="meta")
    if any(t.device.type != device.type for t in state):  # on the host, or on the meta device
        state, fake_inputs = private.fakes_on(device, state, fake_inputs)
    args = (state[: len(parameters)], state[len(parameters) :], fake_inputs)
    with contextlib.ExitStack() as stack:
        stack.enter_context(private.TRACING)
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(private.not_tracing_for_transformers())
        stack.enter_context(_generator_kept(device))
        stack.enter_context(_module_stack(session))
        stack.enter_context(as_without_modes())
        stack.enter_context(looking_refused())
        stack.enter_context(results_forgotten(model))
        memory = memory or stack.enter_context(KeptMemory())
        try:
            graph_module = private.trace_with_fakes(_under(_OpWatch(session, memo or Memo(), memory), step), *args)
        except UnsupportedModel:
            raise
        except private.DATA_DEPENDENT_ERRORS as error:
            raise UnsupportedModel(_data_dependent(session, error)) from error
        except (KeyboardInterrupt, MemoryError):
            raise
        except Exception as error:
            if private.is_call_of_compiled_code(error):
                raise CompiledCode(
                    f"forward calls a function that went through torch.compile: module "
                    f"{session.where or '(the model itself)'}, {line_of(error)}. A plan is made of the ops that eager "
                    "PyTorch runs; leave torch.compile out"
                ) from error
            raise UnsupportedModel(
                f"the training step can't be traced: {type(error).__name__}: {first_line(error)}\n"
                f"  in module {session.where or '(the model itself)'!s}, {line_of(error)}"
            ) from error
    return _finish(graph_module, session, parameters, buffers, input_names(call, around), inputs, differentiated)


def input_names(call: Call, around: PartSurroundings | None) -> tuple[str, ...]:
    """Names of the inputs of a trace: those of the call, and one for each further use."""
    further = around.further_uses() if around else ()
    return (*call.names, *(f"{call.names[position]} (use {use})" for position, use in further))


def _inner(session: _TraceNotes, edges: Edges) -> dict[int, bool]:
    """The outputs from which others derive, and whether one that backward starts from does. edges: behind those."""
    assert session.template is not None
    tensors = {i: t for i, t in enumerate(session.template.tensors) if t.grad_fn is not None}
    of_all = Edges(tensors.values())
    return {i: bool(edges.to(tensor)) for i, tensor in tensors.items() if of_all.to(tensor)}


def _grads_in_part(
    starts: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor],
    around: PartSurroundings,
    given: Sequence[torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
) -> list[torch.Tensor | None]:
    """Gradients of `wanted` and of further uses, each as autograd hands it on. Raises UnsupportedModel."""
    edges = Edges(starts)
    for name, leaf in parameters.items():
        if len(edges.to(leaf)) > 1:
            raise UnsupportedModel(
                f"parameter {name} is used more than once in here; were it used elsewhere too, its gradients would be "
                "added in another order"
            )
    by_use: dict[int, list[torch.Tensor]] = {}
    for position, count in around.uses.items():
        if len(edges.to(given[position])) != count:
            raise UnsupportedModel(f"the number of uses of argument {position} is another than in the eager step")
        by_use[position] = edges.divert(given[position])
    grads: list[torch.Tensor | None] = list(torch.autograd.grad(starts, wanted, tangents, allow_unused=True))
    for position, found in by_use.items():
        if len(found) != around.uses[position]:
            raise UnsupportedModel(f"not every use of argument {position} gives a gradient")
        index = next(i for i, t in enumerate(wanted) if t is given[position])
        grads[index] = found[0]
    grads += [by_use[position][use - 1] for position, use in around.further_uses()]
    inputs = [t for t in given if t.requires_grad]
    for leaf, grad in zip(inputs, grads[len(grads) - len(inputs) :], strict=True):
        if grad is not None and (
            grad.dtype != leaf.dtype
            or strides_that_matter(grad.shape, grad.stride()) != strides_that_matter(grad.shape, dense_layout(leaf)[1])
        ):
            raise UnsupportedModel(
                f"the gradient of an argument of shape {tuple(leaf.shape)} has strides {grad.stride()}, which a "
                "planned part of a step would not hand on"
            )
    return grads


def _take_attributes(leaf: torch.Tensor, parameter: nn.Parameter) -> None:
    """What a parameter of a subclass carries (the scales of packed weights) is read from its stand-in."""
    if not private.is_ordinary(parameter):
        vars(leaf).update({key: value for key, value in vars(parameter).items() if key not in vars(leaf)})


@contextlib.contextmanager
def _in_place_of_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Tensors in place of the model's parameters and buffers, by name, under all names that these go by.

    `torch.func.functional_call` leaves its own in a module that is registered twice.
    """
    members: list[dict[str, Any]] = [m for module in model.modules() for m in (module._parameters, module._buffers)]
    names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
    before = [(of_module, key, t) for of_module in members for key, t in of_module.items() if t is not None]
    for of_module, key, tensor in before:
        of_module[key] = state[names[id(tensor)]]
    try:
        yield
    finally:
        for of_module, key, tensor in before:
            of_module[key] = tensor


def _tangents(
    session: _TraceNotes, expanded: bool, around: PartSurroundings | None
) -> tuple[list[int], list[torch.Tensor]]:
    """The outputs that backward starts from, and a stand-in for the gradient of each that the caller will hand in."""
    assert session.template is not None
    if around is None:
        chosen = differentiated_outputs(session.template, session.requires_grad)
    else:
        chosen = sorted(around.tangents)
        if not all(i < len(session.requires_grad) and session.requires_grad[i] for i in chosen):
            raise UnsupportedModel("backward starts from an output that does not require grad")
    tangents = []
    for index in chosen:
        output = session.template.tensors[index].detach()
        if around is not None:
            layout = around.tangents[index]
            tangents.append(output.new_empty_strided(layout.shape, layout.stride, dtype=layout.dtype))
        elif expanded:
            tangents.append(output.new_empty_strided(output.shape, [0] * output.dim()))
        else:
            tangents.append(torch.empty_like(output))
        node = private.tracer_node(tangents[-1])
        assert node is not None
        session.tangent_nodes[index] = node
    return chosen, tangents


def _stand_in(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The sample's tensor as it will be on the planned device."""
    tensor = tensor.detach()
    return tensor if tensor.device.type == device.type else tensor.to(device)


def _under(mode: private.TorchDispatchMode, step: Callable[..., Any]) -> Callable[..., Any]:
    def inner(*args: Any) -> Any:
        with mode:
            return step(*args)

    return inner


def _note_placeholders(session: _TraceNotes, real: Sequence[torch.Tensor]) -> None:
    placeholders = [n for n in private.tracer_graph().nodes if n.op == "placeholder"]
    session.sources = {n.name: t for n, t in zip(placeholders[session.parameter_count :], real, strict=True)}


def shared_objects(model: nn.Module) -> list[Any]:
    """Objects that belong to the model and that an output may refer to (its config): never copied."""
    held = (v for m in model.modules() for v in vars(m).values())
    return [model, *(v for v in held if hasattr(v, "__dict__") and not isinstance(v, torch.Tensor))]


def differentiated_outputs(template: OutputTemplate, requires_grad: Sequence[bool]) -> list[int]:
    """Outputs that backward is taken to start from: the loss where there is one, else everything differentiable.

    The loss is the output called "loss", or the only differentiable scalar if it depends on all that the others depend
    on: a temperature, or what a router is to be balanced by, does not. Of what forward leaves in attributes, scalars
    are taken to be terms of a loss outside, where the model does not return one itself.
    """
    everything = [i for i, wanted in enumerate(requires_grad) if wanted]
    able = [i for i in everything if i < template.returned]
    terms = [i for i in everything if i >= template.returned and template.tensors[i].dim() == 0]
    if not able:
        able, terms = terms or everything, []
    if not able:
        raise NothingToTrain(
            "no output of the model depends on a parameter or input that requires grad; there is nothing to plan. "
            "Is the model frozen, or does forward run under no_grad?"
        )
    named = [i for i in able if template.names[i].strip(".[]'\"") == "loss"]
    if named:
        return named[:1]
    scalars = [i for i in able if template.tensors[i].dim() == 0]
    if len(scalars) != 1:
        return able + terms
    behind = leaves_behind(template.tensors[scalars[0]])
    return scalars if all(leaves_behind(template.tensors[i]) <= behind for i in able) else able + terms


@contextlib.contextmanager
def _generator_kept(device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
        moved = random.getstate() != python_state or not _same_state(np.random.get_state(), numpy_state)
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
    if moved:
        raise UnsupportedModel(
            "forward draws from Python's random or numpy.random; a planned step would take the same number each time. "
            "Draw it outside of forward and pass it in, or use torch's generator"
        )


def _seeds_itself(*args: Any, **kwargs: Any) -> None:
    raise UnsupportedModel(
        f"forward seeds the generator or sets its state, at {caller_line()}; a planned step would not. Draw the "
        "numbers outside of forward and pass them in. Where it is torch.utils.checkpoint that does so, leave that out"
    )


def _same_state(a: Any, b: Any) -> bool:
    return a[0] == b[0] and bool((a[1] == b[1]).all()) and a[2:] == b[2:]


@contextlib.contextmanager
def _module_stack(session: _TraceNotes) -> Iterator[None]:
    """Note which module runs while each node is written."""

    def enter(module: nn.Module, args: Any) -> None:
        if module in session.names:
            session.stack.append(session.names[module])
            session.spans.append((len(private.tracer_graph().nodes), session.where))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if module in session.names and session.stack:
            session.stack.pop()
            session.spans.append((len(private.tracer_graph().nodes), session.where))

    handles = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _OpWatch(private.TorchDispatchMode):
    """Sees each op of the trace first.

    Corrects what fake kernels get wrong, and answers forward's questions to tensor data that derives from the inputs
    alone, noting each for the guards.
    """

    def __init__(self, session: _TraceNotes, memo: Memo, memory: KeptMemory) -> None:
        """memory: of real tensors that forward writes to; they are neither parameters, buffers nor arguments."""
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch leaves it without annotations
        self._session, self._memo, self._memory = session, memo, memory
        self._views: list[torch.Tensor] = []  # of real tensors

    def __enter__(self) -> _OpWatch:
        self._recording, self._depth = private.Recording(), stack_depth()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look_at_writes(func, args, kwargs or {})
        if func is private.READ_DEVICE and isinstance(args[0], private.FakeTensor):
            return args[0].device
        if func is private.READ_SCALAR:
            node = private.tracer_node(args[0])
            if node is not None or not isinstance(args[0], private.FakeTensor):
                place = lines_within(self._depth)
                seen = self._session.next_seen(args[0], place)
                value = self._read_attribute(args[0]) if node is None else self._read(args[0], node, seen)
                self._session.answers.append(Answer(value, place))
                return value
        outputs = self._memo.run(
            self._recording, func, args, kwargs or {}, lambda: self._trace(func, args, kwargs or {})
        )
        if func is torch.ops.aten.add.Tensor and self._session.template is not None:
            outputs = self._summed(outputs, *args, **(kwargs or {}))
        if any(result.alias_info is not None for result in func._schema.returns):
            if isinstance(args[0], torch.Tensor) and not isinstance(args[0], private.FakeTensor):
                self._views += [t for t in tensors_of(outputs) if isinstance(t, private.FakeTensor)]
        return outputs

    def _summed(self, total: torch.Tensor, first: Any, second: Any, alpha: Any = 1) -> torch.Tensor:
        """What an addition in backward gives, with the strides that it has in place where eager makes it so."""
        number, self._session.additions = self._session.additions, self._session.additions + 1
        tensors = isinstance(first, private.FakeTensor) and isinstance(second, private.FakeTensor)
        if alpha != 1 or not tensors or first._is_view() or not is_odd(first, second, total) or in_python_backward():
            return total
        if number in self._session.in_place:
            return private.with_layout(total, stride=first.stride())
        nodes = private.tracer_node(total), private.tracer_node(first)
        if nodes[0] is not None and nodes[1] is not None:
            self._session.odd_sums.append((number, nodes[0], nodes[1]))
        return total

    def _look_at_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep what ops write to of real tensors, for ops on such alone do run. Refuses to lose a write."""
        for tensor in written_by(func, args, kwargs):
            if not isinstance(tensor, private.FakeTensor):
                self._memory.keep(tensor)
            elif any(storage_key(view) == storage_key(tensor) for view in self._views):
                raise UnsupportedModel(
                    f"forward writes to a view of a tensor that is no buffer (.data, .detach(), a slice), in module "
                    f"{self._session.where or '(the model itself)'}, at {caller_line()}; a planned step would not. "
                    "Register the tensor as a buffer"
                )

    def _trace(self, func: Any, args: Any, kwargs: Any) -> Any:
        outputs = func(*args, **kwargs)
        if torch.Tag.dynamic_output_shape in func.tags and private.has_symbolic_shape(outputs):
            raise UnsupportedModel(
                f"the shape of a result depends on data: {func} in module "
                f"{self._session.where or '(the model itself)'}, at {caller_line()}. Compute it outside of the "
                "model and pass it in, or use operations whose result shapes are fixed, such as torch.where"
            )
        return with_noted_results(func, args, kwargs, corrected_outputs(func, args, outputs))

    def _read_attribute(self, tensor: torch.Tensor) -> Any:
        """A number read from a tensor that is a plain attribute of a module."""
        where = self._session.place(caller_line())
        for module, path in self._session.names.items():
            for key, held in vars(module).items():
                if held is tensor:
                    value = tensor.item()
                    self._session.attribute_reads.append(AttributeRead(path, key, value, where))
                    return value
        raise UnsupportedModel(
            f"forward reads a number from a tensor that is neither an argument, nor a buffer, nor an attribute: module "
            f"{where}. Register the tensor as a buffer"
        )

    def _read(self, tensor: torch.Tensor, node: fx.Node, seen: Answer | None) -> Any:
        closure = nodes_behind(node, list(private.tracer_graph().nodes))
        certain = answer_to_any_draw(closure)
        if certain is not None:
            return certain
        source = caller_line()
        if any(n.op == "placeholder" and n.name not in self._session.sources for n in closure):
            return self._decide(tensor, source, seen)
        for n in closure:
            if n.op == "call_function" and op_facts.draws_random_numbers(n.target, n.args, n.kwargs):
                raise UnsupportedModel(
                    f"control flow depends on random numbers: module {self._session.where or '(the model itself)'}, "
                    f"at {source}. Draw them outside of the model and pass them in"
                )
        attributes = private.tracer_constants()
        if seen is not None and self._session.blind:
            value = seen.value
        else:
            value = evaluate(closure, node, self._session.sources, attributes).item()
            if seen is not None and seen.value != value:
                raise UnsupportedModel(f"{_OTHER_READS}, at {source}")
        self._session.reads.append(ScalarRead(node, value, self._session.place(source)))
        return value

    def _decide(self, tensor: torch.Tensor, source: str, seen: Answer | None) -> bool:
        """The branch that forward took when it ran. What it depends on is kept, apart from what is written later."""
        branches = tensor.dtype is torch.bool and self._session.template is None
        if seen is None or not branches:
            raise (OpenBranch if branches else UnsupportedModel)(
                f"control flow depends on computed data: module {self._session.where or '(the model itself)'} "
                f"reads a number that depends on parameters, at {source}. Compute it outside of the model and pass "
                "it in, or use tensor operations such as torch.where"
            )
        self._session.decided.append((tensor.clone(), seen.value, self._session.place(source)))
        return bool(seen.value)


def _finish(
    graph_module: fx.GraphModule,
    session: _TraceNotes,
    parameters: dict[str, nn.Parameter],
    buffers: dict[str, torch.Tensor],
    names_of_inputs: Sequence[str],
    inputs: Sequence[torch.Tensor],
    differentiated: Sequence[str],
) -> RawTrace:
    assert session.template is not None
    assert session.boundary is not None
    (returned,) = (n for n in graph_module.graph.nodes if n.op == "output")
    flat = list(returned.args[0])
    outputs, gradients = flat[: len(session.requires_grad)], flat[len(session.requires_grad) :]
    assert session.boundary in graph_module.graph.nodes
    grad_inputs = [n for n, t in zip(names_of_inputs, inputs, strict=True) if t.requires_grad]
    names = [f"parameter {n}" for n in differentiated] + [f"input {n}" for n in grad_inputs]
    return RawTrace(
        module=graph_module,
        parameter_names=tuple(parameters),
        buffer_names=tuple(buffers),
        boundary=session.boundary,
        template=session.template,
        outputs=tuple(outputs),
        requires_grad=session.requires_grad,
        tangents=session.tangent_nodes,
        gradients=dict(zip(names, gradients, strict=True)),
        layers=_layers(session.node_names, session.spans),
        scalar_reads=tuple(session.reads),
        attribute_reads=tuple(session.attribute_reads),
        reassigned=session.reassigned,
        answers=tuple(session.answers),
        forward_reads=session.forward_reads,
        decisions=session.decisions,
        arrivals=tuple(session.arrivals),
        summed=session.summed,
        inner=session.inner,
        odd_sums=tuple(session.odd_sums),
    )


def _layers(names: Sequence[str], spans: Sequence[tuple[int, str]]) -> dict[str, str]:
    """Module path of each node, from the node counts at which a module was entered or left."""
    ends = [*(start for start, _ in spans[1:]), len(names)]
    return {name: path for (start, path), end in zip(spans, ends) for name in names[start:end] if path}


def _data_dependent(session: _TraceNotes, error: BaseException) -> str:
    return (
        f"the shape or value of a result depends on data ({first_line(error)}): module "
        f"{session.where or '(the model itself)'}, {line_of(error)}. Compute it outside of the model and pass it "
        "in, or use operations whose result shapes are fixed, such as torch.where"
    )
