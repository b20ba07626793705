"""Trace one eager training step on fake tensors: the aten ops of the forward and of `torch.autograd.grad`, in order.

The graph has what eager runs. AOTAutograd's joint graph does not: it traces the backward under autocast, rewrites
dropout, casts a shared weight once per use and sums tied gradients in another order. In a trace there are dispatch
modes, which make PyTorch's C++ take other paths in places. `branches` has eager's paths traced, or refuses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import fx, nn

from memplan import torch_private as private
from memplan.capture.attributes.attribute_reads import AttributeReads
from memplan.capture.attributes.attributes_kept import SetValue
from memplan.capture.attributes.kept_memory import KeptMemory, results_forgotten
from memplan.capture.attributes.named_state import backward_depends_on
from memplan.capture.ops.dataflow import Dataflow, draws, storage_of
from memplan.capture.ops.island_ops import as_ops
from memplan.capture.ops.layout import Layout, dense_stride, storage_key, strided_parts
from memplan.capture.ops.recorded_graph import Edges, graph_behind
from memplan.capture.ops.sizes import SymbolicInputs, Varying, with_expressions
from memplan.capture.ops.ways import MakeIslands, Never, Refusal, way_of
from memplan.capture.trace.branches import as_without_modes
from memplan.capture.trace.call import Call, OutputTemplate, differentiated_outputs
from memplan.capture.trace.cuda_ops import Capability, as_on_cuda
from memplan.capture.trace.forwards import in_place_of_state
from memplan.capture.trace.generators import generator_kept, seeding_itself
from memplan.capture.trace.islands import NO_ISLANDS, Islands, IslandsTraced, refusal_of
from memplan.capture.trace.memo import Memo
from memplan.capture.trace.op_watch import OpWatch
from memplan.capture.trace.raw_trace import Autocast, Noted, RawTrace, TraceNotes
from memplan.capture.trace.source_lines import first_line, line_of
from memplan.capture.trace.stand_ins import MadeTensors, StandIns
from memplan.errors import UnsupportedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """What a trace depends on besides the model and the call, and is the same in all traces of a capture.

    - tangents: the outputs that backward starts from, and the layout of the gradient that arrives for each. With None,
      backward starts from the loss where there is one, else from every output that requires grad.
    - backward: the autocast under which backward runs; None: without autocast.
    - seen: what forward read from tensors when it ran on this call, in order. The step then has the branches that
      forward took, and the plan checks them.
    - varying: sizes of the call's tensors for which the trace has symbols. Parameters must be on the device then. The
      step serves all calls for which what it depends on holds, as its `Sizes` say.
    - counted: masks of dropout are functions of a seed, which fused groups compute.
    - islands: calls that are ops of their own, because they can't be traced, as a run of forward has shown them.
    - capability: of a CUDA device whose attention and dropout are traced, though on the CPU. Such a step can't run.
      None: those of the device are.
    """

    tangents: Mapping[int, Layout] | None = None
    backward: Autocast | None = None
    seen: Sequence[Any] | None = None
    varying: Varying = frozenset()
    counted: bool = False
    islands: Islands = NO_ISLANDS
    capability: Capability | None = None


@dataclass(frozen=True, slots=True)
class TraceRequest(TraceOptions):
    """A step to trace: `run(*args, **kwargs)` with the arguments of a call, and its backward.

    - autocast: under which forward runs.
    - device: the device of the plan.
    - expanded: the gradients handed in are one number expanded to the output's shape, as `out.sum().backward()` gives.
    - shapes: of parameters that are empty between uses, by name.
    - memo: that of other traces under the same switches.
    - moves_inputs: the call's tensors may be elsewhere, and stand for tensors on the device.
    - memory: keeps what forward writes to of tensors that are neither parameters, buffers nor inputs, and puts it back
      when the caller says so.
    - in_place: numbers of additions in backward that eager makes in place, as an earlier trace tells.
    - reads: notes the attributes that the step reads.
    - left: gives the attributes that forward has set, once it is over; tensors in them are outputs.
    - made: notes the tensors of the trace. None of them may outlive it.
    """

    model: nn.Module
    call: Call
    run: Callable[..., Any]
    autocast: Autocast
    device: torch.device
    expanded: bool = False
    shapes: Mapping[str, torch.Size] = field(default_factory=dict)
    memo: Memo = field(default_factory=Memo)
    moves_inputs: bool = True
    memory: KeptMemory = field(default_factory=KeptMemory)
    in_place: frozenset[int] = frozenset()
    reads: AttributeReads = field(default_factory=lambda: AttributeReads([]))
    left: Callable[[], Sequence[SetValue]] = tuple
    made: MadeTensors = field(default_factory=MadeTensors)


def trace_step(request: TraceRequest) -> RawTrace:
    """The traced step. Nothing of the model, the sample or the generator changes.

    Raises UnsupportedModel, with the module and the source line, where the step can't be traced exactly. It is a
    `Refusal` if another request may help.
    """
    with request.reads.listening():
        return _StepTrace(request).made()


class _StepTrace:
    """One trace, while it is made. It holds no tensor of the trace itself."""

    def __init__(self, request: TraceRequest) -> None:
        model, call = request.model, request.call
        self._request = request
        self._parameters, self._buffers = dict(model.named_parameters()), dict(model.named_buffers())
        named = (*self._parameters.items(), *self._buffers.items(), *zip(call.names, call.tensors, strict=True))
        for name, tensor in named:
            if len(strided_parts(tensor)) > 1:
                raise UnsupportedModel(f"{name} is a sparse tensor, which ops on can't be traced")
        self._inputs = call.tensors
        self._differentiated = [name for name, p in self._parameters.items() if p.requires_grad]
        names = {module: name for name, module in model.named_modules()}
        self._notes = TraceNotes(names, in_place=request.in_place)
        self._islands = IslandsTraced(request.islands, self._notes.around)
        if request.seen is not None:
            self._notes.seen = (answer for answer in request.seen if isinstance(answer, bool))

    def made(self) -> RawTrace:
        request, device = self._request, self._request.device
        # Parameters, buffers and inputs as the trace has them, on the device of the plan.
        state = [private.plain(private.part_here(t)) for t in (*self._parameters.values(), *self._buffers.values())]
        for index, name in enumerate(self._parameters):
            if name in request.shapes:
                state[index] = torch.empty(request.shapes[name], dtype=state[index].dtype, device="meta")
        moved_to = device if request.moves_inputs else None
        symbolic = SymbolicInputs(self._inputs, request.varying, moved_to, self._notes.fixed)
        symbols, count = symbolic.symbols, len(self._parameters)
        state = [symbols.fixed_fake(t, device) for t in state]

        def watched(*args: Any) -> Any:
            with private.higher_order_ops_refused(watch.refuse_higher_order), watch:
                return self._step(*args)

        with contextlib.ExitStack() as stack:
            stack.enter_context(private.TRACING)
            stack.enter_context(torch.autocast(device.type, enabled=False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(private.not_tracing_for_transformers())
            stack.enter_context(generator_kept(device, lambda: self._notes.drew))
            stack.enter_context(self._notes.noting_modules())
            stack.enter_context(self._notes.noting_checkpoints())
            stack.enter_context(as_without_modes())
            stack.enter_context(as_on_cuda(request.capability))
            remembered = stack.enter_context(results_forgotten(request.model))
            self._islands.here = stack.enter_context(as_ops())
            stack.enter_context(private.functions_applied_by(self._islands.apply))
            stack.enter_context(self._islands.calls(request.model))
            watch = OpWatch(self._notes, request.memo, request.memory, request.made, symbolic, request.counted)
            refused = stack.enter_context(private.made_errors(UnsupportedModel, *private.DATA_DEPENDENT_ERRORS))
            try:
                given = state[:count], state[count:], symbolic.tensors
                graph_module = private.trace_with_fakes(watched, given, symbols, varies=bool(request.varying))
                if refused:  # and forward has caught it
                    raise refused[0]
                kept, dataflow = set(map(storage_key, remembered())), Dataflow(graph_module.graph)
                results = (node for node in graph_module.graph.nodes if kept and storage_of(node) in kept)
                if any(draws(node) for result in results for node in dataflow.behind(result)):
                    raise Refusal(
                        "a function that remembers its results (functools.cache) draws random numbers. A planned step "
                        "would draw anew each time; call the function once before memplan.apply",
                        Never(),
                    )
                if request.varying:
                    self._notes.renamed = with_expressions(graph_module.graph, symbols)
            except MemoryError:
                raise
            except Exception as error:
                refused.clear()
                self._notes.template = None  # an object in it may hold a graph of autograd, which holds these notes
                is_refusal = isinstance(error, UnsupportedModel) and not isinstance(error, private.FixedSize)
                raise self._in_words(error) from error.__cause__ if is_refusal else error
        return self._raw(graph_module, symbolic)

    def _in_words(self, error: Exception) -> Exception:
        """The refusal of a step for an error from its trace."""
        module, around = self._notes.module, self._notes.around(error)
        if isinstance(error, private.FixedSize):
            return UnsupportedModel(f"{error}, in module {module}, at {line_of(error)}")
        if private.is_call_of_compiled_code(error):
            return Refusal(
                f"forward calls a function that went through torch.compile: module {module}, "
                f"{line_of(error)}. A plan is made of the ops that eager PyTorch runs; leave torch.compile out",
                MakeIslands([around], compiled=True),
            )
        message = (
            f"the training step can't be traced: {type(error).__name__}: {first_line(error)}\n"
            f"  in module {module}, {line_of(error)}"
        )
        if isinstance(error, UnsupportedModel):
            message = str(error)
        elif isinstance(error, private.DATA_DEPENDENT_ERRORS):
            message = (
                f"the shape or value of a result depends on data ({first_line(error)}): module {module}, "
                f"{line_of(error)}. Compute it outside of the model and pass it in, or use operations whose result "
                "shapes are fixed, such as torch.where"
            )
        refusal = refusal_of(error, message, self._islands, around)
        return error if isinstance(error, UnsupportedModel) and (way_of(error) or not refusal.way) else refusal

    def _step(
        self, params: Sequence[torch.Tensor], bufs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Outputs, and gradients of parameters and inputs."""
        nodes = [n for n in private.tracer_graph().nodes if n.op == "placeholder"][len(params) :]
        real_ones = (*self._buffers.values(), *self._inputs)
        self._notes.sources = {node.name: tensor for node, tensor in zip(nodes, real_ones, strict=True)}
        self._request.made.note([*bufs, *tensors])
        leaves: dict[str, torch.Tensor] = {}
        for (name, parameter), stand_in in zip(self._parameters.items(), params, strict=True):
            leaf = stand_in.detach().requires_grad_() if parameter.requires_grad else stand_in.detach()
            leaves[name] = private.with_spec(leaf, private.spec_of(parameter))
            if not private.is_ordinary(parameter) and not private.is_sharded(parameter):  # packed weights carry scales
                vars(leaves[name]).update({k: v for k, v in vars(parameter).items() if k not in vars(leaves[name])})
        once: dict[int, torch.Tensor] = {}  # forward sees whether two arguments are one
        given = [
            once.setdefault(id(real), t.detach().requires_grad_() if real.requires_grad else t)
            for t, real in zip(tensors, self._inputs, strict=True)
        ]
        call, state = self._request.call, {**leaves, **dict(zip(self._buffers, bufs, strict=True))}
        filled = call.filled(given)
        arguments = filled.variadic, filled.arguments
        parts = {name: private.part_here(tensor) for name, tensor in state.items()}
        real = {**self._parameters, **self._buffers}
        real |= {f"argument {name}": tensor for name, tensor in zip(call.names, call.tensors, strict=True)}
        stand_ins = StandIns(parts, dict(zip(call.names, given, strict=True)), arguments, real)
        with (
            private.seeding_refused(seeding_itself),
            private.numbers_read_by_ops(),
            stand_ins.watching(),
            stand_ins.taken_for_real(),
            in_place_of_state(self._request.model, state),
        ):
            template = self._forward(*arguments)
            stand_ins.check("forward")
            self._notes.end_forward(template)
            gradients = self._gradients(template, leaves, given)
            specs = {n: private.spec_of(g) for n, g in zip(self._differentiated, gradients) if g is not None}
            self._notes.specs = {name: spec for name, spec in specs.items() if spec is not None}
            gradients = [None if g is None else private.part_here(g) for g in gradients]
            stand_ins.check("backward")
            self._islands.check()
            self._notes.tensor_reads = stand_ins.reads
            return [private.part_here(tensor) for tensor in template.tensors], gradients

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OutputTemplate:
        """Run forward. Raises UnsupportedModel where it does something that a planned step would not do."""
        request, notes = self._request, self._notes
        buffers, leaves = dict(request.model.named_buffers()), dict(request.model.named_parameters())
        with request.autocast.context():
            output = request.run(*args, **kwargs)
        for name, leaf in request.model.named_parameters():
            if leaf is not leaves.get(name, leaf):
                raise UnsupportedModel(f"forward exchanges the parameter {name}; a planned step would not")
        template = OutputTemplate(output, request.model)
        notes.recorded = graph_behind(template.tensors)
        for found in request.left():
            template.add_attribute(*found)
        if template.out_of_reach:
            raise UnsupportedModel(
                f"forward returns {', '.join(template.out_of_reach)} with tensors in it, which a planned step "
                "would return again and again. Return the tensors"
            )
        template.specs = {i: (s, None) for i, t in enumerate(template.tensors) if (s := private.spec_of(t)) is not None}
        if template.specs and request.varying:
            raise UnsupportedModel("forward returns a DTensor, whose size nobody knows in other calls")
        for name, tensor in request.model.named_buffers():
            if name in buffers and tensor is not buffers[name]:
                notes.reassigned[name] = template.add(tensor, f"buffer {name}")
        for name, tensor in zip(template.names, template.tensors, strict=True):
            attributes = private.attributes_set_on(tensor)
            if attributes:
                raise UnsupportedModel(
                    f"forward sets the attribute {attributes[0]} of {name.strip() or 'its output'}, a tensor that it "
                    "returns or leaves behind; a planned step would not"
                )
        return template

    def _gradients(
        self, template: OutputTemplate, leaves: Mapping[str, torch.Tensor], given: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Run backward: gradients of parameters and of inputs."""
        request, notes = self._request, self._notes
        chosen, tangents = self._tangents(template)
        starts = [template.tensors[i] for i in chosen]
        own = {name: leaves[name] for name in self._differentiated}
        wanted = [*own.values(), *(t for t in given if t.requires_grad)]
        edges = Edges(starts)
        self._islands.look_at(edges)
        notes.summed = tuple(name for name, leaf in own.items() if len(edges.to(leaf)) > 1)
        derived = {i: t for i, t in enumerate(template.tensors) if t.grad_fn is not None}
        of_all = Edges(derived.values())
        notes.inner = {i: bool(edges.to(tensor)) for i, tensor in derived.items() if of_all.to(tensor)}
        if (inner := next((i for i in notes.inner if i in template.specs), None)) is not None:
            raise UnsupportedModel(
                f"forward returns the DTensor {template.names[inner].strip()}, and computes another output from it. "
                "Return to_local() or full_tensor() of it, or put the loss inside with loss_fn="
            )
        depend = {type(node)._forward_cls: state for node in edges.functions if (state := backward_depends_on(node))}
        for function, state in depend.items():  # in a plan it is that of the trace
            raise Refusal(
                f"the backward of the autograd function {function.__name__} depends on {state}, which may change "
                "between forward and backward; a planned step would not notice. Pass it to the function as an argument",
                MakeIslands([self._islands.applied.get(f, (f,)) for f in depend]),
            )
        autocast = request.backward.context() if request.backward else contextlib.nullcontext()
        with notes.noting_arrivals(own) as check, autocast:
            found = torch.autograd.grad(starts, wanted, tangents, allow_unused=True)
        first = {id(t): i for i, t in reversed([*enumerate(wanted)])}  # an argument that comes twice has one gradient
        gradients = [g if first[id(t)] == i else None for i, (t, g) in enumerate(zip(wanted, found, strict=True))]
        for name, gradient in zip(own, gradients):
            check(name, gradient)
        return gradients

    def _tangents(self, template: OutputTemplate) -> tuple[list[int], list[torch.Tensor]]:
        """The outputs that backward starts from, and a stand-in for the gradient that is handed in for each."""
        arriving, requires_grad = self._request.tangents, self._notes.requires_grad
        if arriving is None:
            chosen = differentiated_outputs(template, requires_grad)
        else:
            chosen = sorted(arriving)
            if not all(i < len(requires_grad) and requires_grad[i] for i in chosen):
                raise UnsupportedModel("backward starts from an output that does not require grad")
        tangents = []
        for index in chosen:
            output, spec = template.tensors[index].detach(), None
            if index in template.specs:
                output = torch.empty_like(output)  # of a sum over ranks: ranks have all of its gradient
                spec, output = private.spec_of(output), private.part_here(output)
                template.specs[index] = template.specs[index][0], spec
            if arriving is not None:
                layout = arriving[index]
                shape, stride = layout.shape, layout.stride
                if self._request.varying:  # the layout may be that in a call of another size
                    shape = output.shape
                    if any(stride) and stride != dense_stride(layout.shape):
                        raise UnsupportedModel(
                            f"a gradient arrives with strides {stride}, of which nobody knows how they vary"
                        )
                    stride = dense_stride(shape) if any(stride) else stride
                tangents.append(output.new_empty_strided(shape, stride, dtype=layout.dtype))
            elif self._request.expanded:
                tangents.append(output.new_empty_strided(output.shape, [0] * output.dim()))
            else:
                tangents.append(torch.empty_like(output))
            node = private.tracer_node(tangents[-1])
            assert node is not None
            self._notes.tangents[index], tangents[-1] = node, private.with_spec(tangents[-1], spec)
        return chosen, tangents

    def _raw(self, graph_module: fx.GraphModule, symbolic: SymbolicInputs) -> RawTrace:
        notes, names = self._notes, self._request.call.names
        assert notes.template is not None
        assert notes.boundary is not None
        (returned,) = (n for n in graph_module.graph.nodes if n.op == "output")
        flat = list(returned.args[0])
        outputs, gradients = flat[: len(notes.requires_grad)], flat[len(notes.requires_grad) :]
        assert notes.boundary in graph_module.graph.nodes
        notes.template.let_go(symbolic.returned)
        notes.sources.clear()  # islands among the outputs may lead to these notes
        grad_inputs = [n for n, t in zip(names, self._inputs, strict=True) if t.requires_grad]
        wanted = [*(f"parameter {n}" for n in self._differentiated), *(f"input {n}" for n in grad_inputs)]
        return RawTrace(
            module=graph_module,
            parameter_names=tuple(self._parameters),
            buffer_names=tuple(self._buffers),
            boundary=notes.boundary,
            template=notes.template,
            outputs=tuple(outputs),
            gradients=dict(zip(wanted, gradients, strict=True)),
            layers=notes.layers(),
            symbolic=symbolic if self._request.varying else None,
            fixed=tuple(notes.fixed_at.items()),
            islands=self._islands.used,
            handed=frozenset(self._islands.handed),
            **{one.name: getattr(notes, one.name) for one in fields(Noted)},
        )
