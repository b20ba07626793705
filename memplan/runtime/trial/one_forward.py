"""Run forward once on the sample: what it reads from tensors, what it leaves in the model, and which ops it runs.

A trace stands for forward where Python goes the same way on stand-ins as on real tensors. It does not if forward asks
what can't be answered for a stand-in: `x is self.known[0]`, `x.__class__`, a weak reference to a parameter. So the ops
of a run are compared with those of the trace: they have to be the same, on the same tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from memplan import torch_private as private
from memplan.capture.analysis.traced import Traced
from memplan.capture.attributes.attributes_kept import AttributesKept, LeftBehind
from memplan.capture.attributes.kept_memory import has_memory, written_by
from memplan.capture.ops import op_facts
from memplan.capture.ops.island_ops import FORWARD, IslandKernel
from memplan.capture.ops.layout import storage_key, tensors_of
from memplan.capture.ops.recorded_graph import graph_behind
from memplan.capture.ops.ways import Refusal, RunsBackward, way_of
from memplan.capture.trace.branches import as_without_modes
from memplan.capture.trace.call import Call, Forward, OutputTemplate
from memplan.capture.trace.forwards import calls_exchanged
from memplan.capture.trace.islands import NO_ISLANDS, Islands
from memplan.runtime.trial.unplanned_peak import bits_of, generators_of, nothing_kept
from memplan.torch_private import pytree

aten = torch.ops.aten

# These compute nothing. Some are in a trace alone, which copies constants, and looks for shapes that depend on data.
_COPIES = (aten.clone.default, aten.lift_fresh_copy.default, aten.nonzero.default)
_READS = (private.READ_SCALAR, aten.item.default)  # the second under inference mode
_NONE = (*_READS, private.READ_DEVICE, FORWARD)  # islands run their own ops


@dataclass(frozen=True, slots=True)
class OneForward:
    """What one run of forward tells.

    - answers: what it read from tensors.
    - left: what it left in the model.
    - caches: the part of `left` that any first run would leave. It depends on shapes, and on buffers that no data
      reach, and not on parameters, inputs or random numbers.
    - written: names of parameters and buffers that it wrote to.
    - output: what it returned. states: of generators then.
    - ops: what it ran outside of islands; None where an op raised an error, which forward caught.
    """

    answers: list[Any]
    left: LeftBehind
    caches: LeftBehind
    written: frozenset[str]
    output: Any
    states: tuple[Any, ...]
    ops: OpsInOrder | None

    def gives_as(self, other: OneForward) -> bool:
        """Whether both runs gave the same bits, states of generators, and graph for backward."""
        one, two = ((bits_of(f.output), f.states, f.ops and f.ops.recorded) for f in (self, other))
        return one == two


def one_forward(
    model: nn.Module,
    run: Callable[..., Any],
    call: Call,
    around: contextlib.AbstractContextManager[object] | None = None,
    islands: Islands = NO_ISLANDS,
) -> OneForward:
    """Run forward once on a call, within the context `around`. Nothing of that run stays.

    islands: calls whose reads from tensors, and whose changes of Python state, are not noted.

    Raises ForwardFails where forward raises.
    """
    with nothing_kept(model, call, run=run) as writes, nothing_saved(), AttributesKept(model, run=run) as attributes:
        inputs = ((f"input {name}", tensor) for name, tensor in zip(call.names, call.tensors, strict=True))
        ops = OpsInOrder((*model.named_parameters(), *model.named_buffers(), *inputs))
        reads = NotedReads([*model.parameters(), *call.tensors], ops)
        buffers = [(name, buffer, buffer._version) for name, buffer in model.named_buffers()]
        standing_in = {storage_key(buffer) for buffer in model.buffers() if has_memory(buffer)}
        kept = {island.called: island.kept for island in islands.calls}

        @contextlib.contextmanager
        def unheard(called: Any) -> Iterator[None]:
            """A context for the call of an island: what it reads, and leaves in Python, is no concern of forward."""
            with private.exchanged(reads, is_paused=True), kept.get(called, contextlib.nullcontext)(model):
                yield

        def run_it(called: Any, module: nn.Module, original: Forward, args: Any, kwargs: Any) -> Any:
            with unheard(called):
                return original(*args, **kwargs)

        def apply(function: Any, args: tuple[Any, ...], original: Forward) -> Any:
            with unheard(function) if function in islands.callables else contextlib.nullcontext():
                return original(*args)

        with (
            around or contextlib.nullcontext(),
            calls_exchanged(model, islands.callables, run_it),
            private.functions_applied_by(apply),
            as_without_modes(),
            reads,
        ):
            try:
                output = run(*call.variadic, **call.arguments)
            except Exception as error:
                if isinstance(way_of(error), RunsBackward):
                    raise
                raise ForwardFails(error) from error
        left = attributes.left()
        caches = left.without(lambda t: t in reads.reached or (has_memory(t) and storage_key(t) in standing_in))
        memory = {storage_key(tensor) for tensor in writes.memory.written}
        written = {n for n, p in model.named_parameters() if has_memory(p) and storage_key(p) in memory}
        written.update(name for name, buffer, version in buffers if buffer._version != version)
        returned = OutputTemplate(output, model).tensors
        # What it wrote to and returns is put back, so that runs can't be compared.
        if reads.of_data or any(has_memory(t) and storage_key(t) in memory for t in returned):
            caches = LeftBehind([], [])
        ops.recorded = graph_behind(returned)
        whole = None if reads.open_ops else ops
        return OneForward(reads.answers, left, caches, frozenset(written), output, generators_of(model, call), whole)


class ForwardFails(Exception):
    """The model's own forward raises this error on this call."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def errors_of_forward() -> Iterator[None]:
    """A context that raises errors of the model's own forward as they were raised there."""
    try:
        yield
    except ForwardFails as failure:
        raise failure.error from failure.error.__cause__


def nothing_saved() -> contextlib.AbstractContextManager[object]:
    """A context in which forward runs under grad mode and saves nothing. No backward may follow.

    What traces save, as higher-order ops make them in forward, takes no memory and is kept.
    """

    def unpacked(packed: torch.Tensor | None) -> torch.Tensor:
        if packed is None:
            raise Refusal("forward runs a backward pass itself", RunsBackward())
        return packed

    return saved_tensors_hooks(lambda tensor: tensor if isinstance(tensor, private.FakeTensor) else None, unpacked)


class NotedReads(private.RealOps):
    """Notes the numbers that are read from tensors, and follows data: that of some tensors, and random numbers.

    - answers: the numbers. of_data: whether some come from tensors that depend on the data.
    - is_paused: reads are not noted.
    - reached: tensors that depend on the data.
    - open_ops: how many ops have begun, and not ended.
    """

    def __init__(self, sources: Sequence[torch.Tensor], ops: OpsInOrder) -> None:
        """ops: notes what runs, too."""
        super().__init__()
        self._ops, self.open_ops = ops, 0
        self.answers: list[Any] = []
        self.of_data = self.is_paused = False
        self.reached = WeakIdKeyDictionary(dict.fromkeys(sources, True))

    def on_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is aten._ctc_loss.Tensor:  # a trace has it so
            longest = self.on_op(private.READ_SCALAR, (self.on_op(aten.max.default, (args[3],), {}),), {})
            return self.on_op(private.ctc_loss, (*args[:4], longest, *args[4:]), kwargs)
        self.open_ops += 1
        result, is_read = self.run_op(func, args, kwargs), func in _READS
        self.open_ops -= 1
        if not self.is_paused:
            self._ops.note(func, args, kwargs, result)
        if is_read and not self.is_paused:
            self.answers.append(result)
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        unseen = isinstance(func, private.HigherOrderOperator)  # it reads numbers, and tensors that it isn't given
        if unseen or any(t in self.reached for t in given) or op_facts.draws_random_numbers(func, args, kwargs):
            self.of_data |= not self.is_paused and (unseen or is_read)
            for tensor in (*tensors_of(result), *written_by(func, args, kwargs)):
                self.reached[tensor] = True
        return result


def is_collective(func: Any) -> bool:
    """Whether an op communicates, or waits for one that does."""
    return getattr(func, "namespace", "") in ("_c10d_functional", "c10d")


class LocalCollectives(private.RealOps):
    """Forward on one rank alone: collectives send nothing, for other ranks do something else meanwhile.

    Their results have the right shapes, with this rank's numbers over and over.

    Raises a Refusal for one that is no functional collective of one tensor.
    """

    def on_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not is_collective(func):
            return self.run_op(func, args, kwargs)
        given = args[0]
        if private.is_wait(func):
            return aten.alias.default(given)
        if func.namespace == "c10d" or func._schema.is_mutable or not isinstance(given, torch.Tensor):
            raise Refusal(f"forward runs the collective {func}, and no other rank would join it now")
        shape, flat = func(given.to("meta"), *args[1:], **kwargs).shape, given.reshape(-1)
        return flat.repeat(-(-shape.numel() // max(1, flat.numel())))[: shape.numel()].view(shape)


class OpsInOrder:
    """The ops of a forward pass that compute something.

    - found: each op with its arguments. A tensor is its shape, its place in its memory, and where that comes from: a
      name, or the op in `found` that made it, and as which of its results. Where that is not known, it is the dtype.
    - recorded: a hash of the autograd graph behind what forward returned.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """named: parameters, buffers and inputs."""
        self.found: list[tuple[Any, ...]] = []
        self.recorded = 0
        self._origins: dict[Any, Any] = {}  # by storage
        for name, tensor in named:
            self._made(tensor, name)

    def note(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> bool:
        """Note an op that has run. False where it is none that computes something."""
        if not isinstance(op, private.OpOverload) or op_facts.is_view(op) or op in _NONE or private.is_wait(op):
            return False
        given = {**dict(zip((a.name for a in op._schema.arguments), args)), **kwargs}
        shown = [self._shown(given.get(a.name, a.default_value)) for a in op._schema.arguments]
        copied = self._origin(args[0]) if op in _COPIES else None
        for index, tensor in enumerate(tensors_of(result)):
            self._made(tensor, copied if op in _COPIES else (len(self.found), index))
        if op not in _COPIES:
            self.found.append((str(op), *shown))
        return op not in _COPIES

    def _made(self, tensor: torch.Tensor, origin: Any) -> None:
        if has_memory(tensor):  # what is written to comes from where it came from
            self._origins.setdefault(private.known_storage(tensor), origin)

    def _origin(self, tensor: torch.Tensor) -> Any:
        return self._origins.setdefault(private.known_storage(tensor), None) if has_memory(tensor) else None

    def _shown(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            place = argument.storage_offset() if has_memory(argument) else 0
            return self._origin(argument) or argument.dtype, place, tuple(argument.shape)
        if isinstance(argument, (list, tuple)):
            return tuple(map(self._shown, argument))
        if isinstance(argument, torch.device):
            return argument.type
        return "" if isinstance(argument, torch.Generator) else repr(argument)


def other_ops_in(step: Traced, ran: OpsInOrder) -> str | None:
    """The first op that is another one in a run of forward than in its trace, in words; None where all are equal."""
    boundary, names = step.graph.boundary, {"input": "input {}", "parameter": "{}", "buffer": "{}"}
    outside = ((names[r.kind].format(r.name), node) for node, r in step.residents.items() if r.kind in names)
    traced = OpsInOrder((name, node.meta["val"]) for name, node in outside)
    layers = {kernel.node: op.layer for kernel, op in zip(step.kernels, step.graph.ops[:boundary])}
    islands = {k.node: k.target.island for k in step.kernels if isinstance(k.target, IslandKernel)}
    if any(torch.Tag.inplace_view in getattr(node.target, "tags", ()) for node in step.fx_graph.nodes):
        return None  # of `squeeze_` and the like, a trace has the last shape alone
    left, places, written = set(layers), list[str](), 0
    for node in step.fx_graph.nodes:
        if not left and len(places) >= len(ran.found):
            break
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        written += len(islands[node].in_place) if node in islands and node.target is FORWARD else 0
        if written and node.target is aten.copy_.default:  # what an island writes to its arguments
            written -= 1
        elif traced.note(node.target, args, kwargs, node.meta.get("val")):
            places.append(layers.get(node, places[-1] if places else ""))
        left.discard(node)
    for one, other, place in zip_longest(ran.found, traced.found, places):
        if one != other:
            ops = [op[0] if op else "nothing" for op in (one, other)]
            what = f"{ops[0]} in the place of {ops[1]}" if ops[0] != ops[1] else f"{ops[0]} with other arguments"
            return f"{what}, in module {place or '(the model itself)'}"
    # Of islands and collectives that run for themselves, the graph is another one.
    has_other = bool(islands) or any(op.is_collective for op in step.graph.ops)
    return None if has_other or ran.recorded == step.recorded else "the same ops with another graph for backward"
