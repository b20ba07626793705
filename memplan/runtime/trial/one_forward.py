"""Run forward once on the sample: what it reads from tensors, and what it leaves in the model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from memplan import torch_private as private
from memplan.capture.attributes.attributes_kept import AttributesKept, LeftBehind
from memplan.capture.attributes.kept_memory import has_memory, written_by
from memplan.capture.ops import op_facts
from memplan.capture.ops.layout import storage_key, tensors_of
from memplan.capture.ops.recorded_graph import nodes_behind
from memplan.capture.ops.ways import Refusal, RunsBackward, way_of
from memplan.capture.trace.call import Call, Forward
from memplan.capture.trace.forwards import calls_exchanged
from memplan.capture.trace.islands import NO_ISLANDS, Islands
from memplan.capture.trace.raw_trace import Answer
from memplan.capture.trace.source_lines import lines_within, stack_depth
from memplan.runtime.trial.unplanned_peak import bits_of, generators_of, nothing_kept
from memplan.torch_private import pytree


@dataclass(frozen=True, slots=True)
class OneForward:
    """What one run of forward tells.

    - answers: what it read from tensors.
    - left: what it left in the model.
    - caches: the part of `left` that any first run would leave. It depends on shapes, and on buffers that no data
      reach, and not on parameters, inputs or random numbers.
    - written: names of parameters and buffers that it wrote to.
    - outputs: bits of what it returned, states of generators then, and nodes of autograd.
    """

    answers: list[Answer]
    left: LeftBehind
    caches: LeftBehind
    written: frozenset[str]
    outputs: tuple[Any, ...]


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
        reads = NotedReads([*model.parameters(), *call.tensors])
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
        caches = LeftBehind([], []) if reads.of_data else caches
        behind = nodes_behind(get_gradient_edge(t).node for t in tensors_of(output) if t.requires_grad)
        ways = [(node.name(), *(target is None for target, _ in node.next_functions)) for node in behind]
        outputs = (*bits_of(output), *generators_of(model, call), *ways)
        return OneForward(reads.answers, left, caches, frozenset(written), outputs)


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
    """

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.answers: list[Answer] = []
        self.of_data = self.is_paused = False
        self.reached = WeakIdKeyDictionary(dict.fromkeys(sources, True))

    def __enter__(self) -> NotedReads:
        self._depth = stack_depth()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def on_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        result, is_read = self.run_op(func, args, kwargs), func is private.READ_SCALAR
        if is_read and not self.is_paused:
            self.answers.append(Answer(result, lines_within(self._depth)))
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
        known = isinstance(given, torch.Tensor) and func.namespace != "c10d"
        rows = given.shape[0] if known and given.dim() else 1
        match func.__name__.partition(".")[0] if known else "":
            case "wait_tensor" | "_wrap_tensor_autograd":
                return torch.ops.aten.alias.default(given)
            case "all_gather_into_tensor":
                rows *= args[1]
            case "reduce_scatter_tensor":
                rows //= args[2]
            case "all_to_all_single":
                rows = sum(args[1])
            case "all_reduce" | "broadcast":
                pass
            case _:
                raise Refusal(f"forward runs the collective {func}, and no other rank would join it now")
        shape = (rows, *given.shape[1:]) if given.dim() else given.shape
        flat, count = given.reshape(-1), math.prod(shape)
        return flat.repeat(-(-count // max(1, flat.numel())))[:count].view(shape)
