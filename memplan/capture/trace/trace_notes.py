"""What is noted while a step is traced."""

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
from memplan.capture.attributes.named_functions import functions_called
from memplan.capture.ops.ways import Refusal
from memplan.capture.trace.call import OutputTemplate
from memplan.capture.trace.generators import noting_draws, python_generators
from memplan.capture.trace.raw_trace import Answer, Decision, Noted
from memplan.capture.trace.source_lines import caller_line, calls_in_forward
from memplan.errors import UnsupportedModel

OTHER_READS = "forward reads other values from tensors in a trace than when it runs"


@dataclass(slots=True)
class TraceNotes(Noted):
    """What the traced function notes while it runs.

    - names: paths of modules.
    - sources: placeholder name -> the real tensor that a scalar read may look at.
    - stack, spans: modules that run, and where in the graph each was entered or left.
    - seen: booleans that forward read from tensors in a run.
    - decided: booleans whose values were taken from `seen`, with these values and where forward branches on them.
    - in_place: see `sums`.
    - additions: how many there were in backward.
    - renamed: names of nodes by the ones that they had while they were traced, where these are others.
    - fixed_at: by symbol, where PyTorch came to depend on its value.
    - checkpoints: those whose functions are running: the count of nodes at their begin, and whether they draw again.
    - running: modules whose calls are not over.
    - python_state: of Python's generators when a module last began or ended. drew: the calls in which they moved.

    `RawTrace` has a copy of what is in `Noted`.
    """

    names: dict[nn.Module, str]
    sources: dict[str, torch.Tensor] = field(default_factory=dict)
    stack: list[str] = field(default_factory=list)
    spans: list[tuple[int, str]] = field(default_factory=list)
    boundary: fx.Node | None = None
    template: OutputTemplate | None = None
    node_names: tuple[str, ...] = ()
    seen: Iterator[Answer] | None = None
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
        self.stack.clear()

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

    def next_seen(self, tensor: torch.Tensor, place: tuple[tuple[str, int], ...]) -> Answer | None:
        """What was read here before; None where that is not known.

        Raises UnsupportedModel where nothing was read here.
        """
        if self.seen is None or tensor.dtype is not torch.bool or self.template is not None:
            return None
        answer = next(self.seen, None)
        if answer is None or answer.place != place:
            raise UnsupportedModel(f"{OTHER_READS}, at {caller_line()}")
        return answer

    @property
    def where(self) -> str:
        return self.stack[-1] if self.stack else ""

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

        def enter(module: nn.Module, args: Any) -> None:
            if threading.get_ident() != thread:
                return
            self._look_for_draws()
            self.running.append(module)
            if module in self.names:
                self.stack.append(self.names[module])
                self.spans.append((len(private.tracer_graph().nodes), self.where))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() != thread:
                return
            self._look_for_draws()
            while self.running and self.running.pop() is not module:
                pass
            if module in self.names and self.stack:
                self.stack.pop()
                self.spans.append((len(private.tracer_graph().nodes), self.where))

        module, self.python_state = nn.modules.module, python_generators()
        with (
            noting_draws(self._look_for_draws),
            module.register_module_forward_pre_hook(enter),
            module.register_module_forward_hook(leave),
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
