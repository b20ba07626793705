"""What tracing a step starts from, what it notes, and what it gives: autocast in, a raw trace out."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from memplan import torch_private as private
from memplan.capture.attributes.code_facts import NamedOn
from memplan.capture.attributes.named_functions import functions_called
from memplan.capture.ops.island import Island
from memplan.capture.ops.sizes import SymbolicInputs
from memplan.capture.ops.ways import Refusal
from memplan.capture.trace.call import OutputTemplate
from memplan.capture.trace.generators import noting_draws, python_generators
from memplan.capture.trace.source_lines import caller_line, calls_in_forward
from memplan.errors import UnsupportedModel

OTHER_READS = "forward reads other values from tensors in a trace than when it runs"


@dataclass(frozen=True, slots=True)
class Autocast:
    """The autocast state of one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool

    @staticmethod
    def ambient(device_type: str) -> Autocast:
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        return Autocast(device_type, enabled, dtype, torch.is_autocast_cache_enabled())

    @staticmethod
    def of_backward(device_type: str) -> Autocast | None:
        """The autocast under which backward runs, asked in the middle of it; None where autocast is off.

        It is off where backward is called after the context of forward.
        """
        return Autocast.ambient(device_type) if torch.is_autocast_enabled(device_type) else None

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled)


def modes_at(device_type: str) -> tuple[Autocast, bool]:
    """The modes at this moment that decide what a call computes: autocast, and whether grad mode is on."""
    return Autocast.ambient(device_type), torch.is_grad_enabled()


@contextlib.contextmanager
def in_modes(autocast: Autocast, grad_mode: bool) -> Iterator[None]:
    """A context that has these modes."""
    with torch.set_grad_enabled(grad_mode), autocast.context():
        yield


def line_of_place(where: str) -> str:
    """The source line of a place in forward: "block.0 at net.py:3: x = ..." and "at net.py:3: x = ..." have one."""
    return where.partition("at ")[2]


@dataclass(frozen=True, slots=True)
class Guard:
    """A number that forward read from the data of its inputs, or the shape of a result that depends on it.

    - node: what was read.
    - value: the number or shape that was read; None for a number or a size that may vary.
    - where: the place in forward, in words.
    - nodes: these compute it again; known once the trace is over.
    """

    node: fx.Node
    value: Any
    where: str
    nodes: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """A boolean that forward computed, from parameters too, and branched on.

    - output: the output that holds it.
    - value: what it was.
    - where: the place in forward, in words.
    """

    output: int
    value: bool
    where: str


@dataclass(frozen=True, slots=True)
class AttributeRead:
    """A number that forward read from a tensor attribute (neither parameter nor buffer) of a module."""

    module: str
    key: str
    value: Any
    where: str


@dataclass(slots=True, kw_only=True)
class StepNotes:
    """What is noted while a step is traced, and stays with the step.

    - reassigned: buffers that forward puts other tensors into, with the position of the output that holds the new one.
    - decisions: branches that the trace has taken from an earlier run. What each depends on is an output, too.
    - summed: parameters whose gradients autograd adds up from several uses.
    - inner: outputs from which others derive, by position; True where one of these others is a start of backward. The
      gradient that is handed in for such an output is not all of it.
    - specs: of gradients that are DTensors, by parameter: which ranks have which parts of them.
    - recorded: a hash of the autograd graph behind what forward returns.
    """

    reassigned: dict[str, int] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    summed: tuple[str, ...] = ()
    inner: dict[int, bool] = field(default_factory=dict)
    specs: dict[str, Any] = field(default_factory=dict)
    recorded: int = 0


@dataclass(slots=True, kw_only=True)
class Noted(StepNotes):
    """What is noted while a step is traced, and what its trace has of that.

    - requires_grad: of the outputs.
    - tangents: nodes that stand for the gradients handed in, by output.
    - scalar_reads, attribute_reads: numbers that forward read.
    - tensor_reads: attributes of parameters, buffers and inputs that it read: see `StandIns`.
    - answers, forward_reads: what was read from tensors; the first `forward_reads` of these were read by forward.
    - arrivals: parameters in the order in which autograd hands over their gradients.
    - odd_sums: (number of an addition in backward, its node, that of its first operand) where its strides would be
      others if it were made in place.
    - checkpointed: nodes that a checkpoint of forward would run twice, and whether it draws the same numbers again.
    """

    requires_grad: tuple[bool, ...] = ()
    tangents: dict[int, fx.Node] = field(default_factory=dict)
    scalar_reads: list[Guard] = field(default_factory=list)
    attribute_reads: list[AttributeRead] = field(default_factory=list)
    tensor_reads: dict[tuple[str, str], Any] = field(default_factory=dict)
    answers: list[Any] = field(default_factory=list)
    forward_reads: int = 0
    arrivals: list[str] = field(default_factory=list)
    odd_sums: list[tuple[int, fx.Node, fx.Node]] = field(default_factory=list)
    checkpointed: dict[fx.Node, bool] = field(default_factory=dict)


@dataclass(slots=True)
class RawTrace(Noted):
    """The traced step. Placeholders are parameters, buffers and input tensors, in this order.

    - boundary: the last node of the forward pass.
    - gradients: one node (or None) per parameter that requires grad, then per input that requires grad.
    - layers: module path of each forward node.
    - symbolic: symbols in the place of sizes that vary; None where none do.
    - fixed: (symbol, place) where PyTorch came to depend on the value of one.
    - islands: calls that are ops of their own, by the name that these ops have for it.
    - handed: names that lines of forward only hand on to islands.
    """

    module: fx.GraphModule
    parameter_names: tuple[str, ...]
    buffer_names: tuple[str, ...]
    boundary: fx.Node
    template: OutputTemplate
    outputs: tuple[fx.Node, ...]
    gradients: dict[str, fx.Node | None]
    layers: dict[str, str]
    symbolic: SymbolicInputs | None = None
    fixed: tuple[tuple[str, str], ...] = ()
    islands: Mapping[str, Island] = field(default_factory=dict)
    handed: frozenset[NamedOn] = frozenset()


@dataclass
class TraceNotes(Noted):
    """What the traced function notes while it runs.

    - names: paths of modules.
    - sources: placeholder name -> the real tensor that a scalar read may look at.
    - running, spans: modules whose calls are not over, and where in the graph each was entered or left.
    - seen: booleans that forward read from tensors in a run.
    - decided: booleans whose values were taken from `seen`, with these values and where forward branches on them.
    - in_place: see `TraceRequest`.
    - additions: how many there were in backward.
    - renamed: names of nodes by the ones that they had while they were traced, where these are others.
    - fixed_at: by symbol, where PyTorch came to depend on its value.
    - checkpoints: those whose functions are running: the count of nodes at their begin, and whether they draw again.
    - python_state: of Python's generators when a module last began or ended. drew: the calls in which they moved.

    `RawTrace` has a copy of what is in `Noted`.
    """

    names: dict[nn.Module, str]
    sources: dict[str, torch.Tensor] = field(default_factory=dict)
    spans: list[tuple[int, str]] = field(default_factory=list)
    boundary: fx.Node | None = None
    template: OutputTemplate | None = None
    node_names: tuple[str, ...] = ()
    seen: Iterator[bool] | None = None
    decided: list[tuple[torch.Tensor, bool, str]] = field(default_factory=list)
    in_place: frozenset[int] = frozenset()
    additions: int = 0
    renamed: dict[str, str] = field(default_factory=dict)
    fixed_at: dict[str, str] = field(default_factory=dict)
    checkpoints: list[tuple[int, bool]] = field(default_factory=list)
    running: list[nn.Module] = field(default_factory=list)
    python_state: Any = None
    drew: tuple[Any, ...] = ()

    def around(self, error: BaseException | None = None) -> tuple[Any, ...]:
        """The calls that are running, or were where an error was raised, the innermost first.

        They are functions in the innermost module, and modules: paths, or classes of those that the model has not. The
        model itself is not among them.
        """
        functions = functions_called(calls_in_forward(error), self.names) if self.template is None else ()
        keys = (self.names.get(module, type(module)) for module in reversed(self.running))
        return tuple(dict.fromkeys((*functions, *(key for key in keys if key))))

    def _look_for_draws(self) -> None:
        """Note in which calls numbers were drawn from Python's generators."""
        state = python_generators()
        if self.python_state not in (None, state):
            self.drew = self.drew or self.around()
        self.python_state = state

    def fixed(self, symbol: str, number: int) -> None:
        """Note that PyTorch turns a symbol into a number, here."""
        self.fixed_at.setdefault(symbol, f"{number} in module {self.module}, at {caller_line()}")

    def end_forward(self, template: OutputTemplate) -> None:
        """Note the state of the trace when forward has returned."""
        nodes = private.tracer_graph().nodes
        self.forward_reads = len(self.answers)
        if self.seen is not None and next(self.seen, None) is not None:
            raise UnsupportedModel(OTHER_READS)
        self.decisions = tuple(
            Decision(template.add(tensor, f"branch at {where}"), value, where) for tensor, value, where in self.decided
        )
        self.template = template
        self.requires_grad = tuple(t.requires_grad for t in template.tensors)
        self.boundary = next(n for n in reversed(nodes) if not private.is_symbolic(n.meta.get("val")))
        self.node_names = tuple(n.name for n in nodes)
        self.running.clear()

    @contextlib.contextmanager
    def noting_arrivals(self, leaves: Mapping[str, torch.Tensor]) -> Iterator[Callable[[str, Any], None]]:
        """A context that notes the order in which autograd hands over gradients.

        Gives a check of a leaf's gradient, by name: it raises a Refusal if the gradient was written to since it
        arrived, for `.grad` would have a copy of what was there before. The hooks are removed, because they would keep
        the trace for ever.
        """
        versions = dict[str, int]()

        def arrived(gradient: torch.Tensor | None, name: str) -> None:
            self.arrivals.append(name)
            if gradient is not None:
                versions[name] = gradient._version

        def check(name: str, gradient: torch.Tensor | None) -> None:
            if gradient is not None and gradient._version != versions.get(name, gradient._version):
                raise Refusal(
                    f"backward writes to the gradient of {name} after autograd has handed that over; let it write to a "
                    "copy (grad.clone())"
                )

        with contextlib.ExitStack() as stack:
            for name, leaf in leaves.items():
                stack.enter_context(leaf.register_hook(functools.partial(arrived, name=name)))
            yield check

    def next_seen(self, tensor: torch.Tensor) -> bool | None:
        """What was read here before; None where that is not known. Raises UnsupportedModel where nothing was read."""
        if self.seen is None or tensor.dtype is not torch.bool or self.template is not None:
            return None
        answer = next(self.seen, None)
        if answer is None:
            raise UnsupportedModel(f"{OTHER_READS}, at {caller_line()}")
        return answer

    @property
    def where(self) -> str:
        return next((self.names[module] for module in reversed(self.running) if module in self.names), "")

    @property
    def module(self) -> str:
        """The module that is running, in words."""
        return self.where or "(the model itself)"

    def place(self, line: str) -> str:
        """The running module and a source line, in words."""
        return f"{self.where} at {line}" if self.where else f"at {line}"

    def noting_checkpoints(self) -> contextlib.AbstractContextManager[None]:
        """A context in which checkpoints of forward do nothing, and the nodes in them are noted."""

        def enter(draws_again: bool) -> None:
            self.checkpoints.append((len(private.tracer_graph().nodes), draws_again))

        def leave() -> None:
            start, draws_again = self.checkpoints.pop()
            for node in list(private.tracer_graph().nodes)[start:]:
                self.checkpointed[node] = draws_again and self.checkpointed.get(node, True)

        return private.without_checkpoints(enter, leave)

    @contextlib.contextmanager
    def noting_modules(self) -> Iterator[None]:
        """A context that notes which module runs while each node is recorded. Other threads run theirs unnoted."""
        thread = threading.get_ident()

        def note(module: nn.Module, begins: bool) -> None:
            if threading.get_ident() != thread:
                return
            self._look_for_draws()
            if begins:
                self.running.append(module)
            while not begins and self.running and self.running.pop() is not module:
                pass
            if module in self.names:
                self.spans.append((len(private.tracer_graph().nodes), self.where))

        module, self.python_state = nn.modules.module, python_generators()
        with (
            noting_draws(self._look_for_draws),
            module.register_module_forward_pre_hook(lambda module, *_: note(module, True)),
            module.register_module_forward_hook(lambda module, *_: note(module, False)),
        ):
            yield

    def layers(self) -> dict[str, str]:
        """Module path of each forward node, from the node counts at which a module was entered or left."""
        ends = [*(start for start, _ in self.spans[1:]), len(self.node_names)]
        return {
            self.renamed.get(name, name): path
            for (start, path), end in zip(self.spans, ends) if path
            for name in self.node_names[start:end] if not self.renamed or name in self.renamed
        }  # fmt: skip
