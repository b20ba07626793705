"""What a planned forward returns, and checks of what its caller did with that before backward.

Outputs are results of one autograd node, which knows nothing of how they depend on each other within the plan. Where
other outputs derive from one, autograd sees only the part of its gradient that comes from outside. Where two lie in the
same memory, a differentiable edit of one does not become part of the other's history. Both are noticed in backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memplan import torch_private as private
from memplan.capture.analysis.traced import Traced
from memplan.capture.trace.stand_ins import only_waits

_NEVER = -1  # the number of no backward pass


@dataclass(frozen=True, slots=True)
class Outputs:
    """The tensors that a planned forward returns.

    - names, requires_grad: of each.
    - inner: outputs from which others derive, by position; True where one of these others is a start of backward.
    - shared: groups of differentiable outputs that lie in the same memory.
    - specs: of DTensors, by position: of the tensor, and of its gradient.
    - own: those that the step makes and the caller alone holds, by position; one for each memory.
    """

    names: tuple[str, ...]
    requires_grad: tuple[bool, ...]
    inner: Mapping[int, bool]
    shared: tuple[tuple[int, ...], ...]
    specs: Mapping[int, tuple[Any, Any]]
    own: tuple[int, ...]

    @staticmethod
    def of(traced: Traced) -> Outputs:
        graph, template = traced.graph, traced.template
        # What the model keeps, in buffers or attributes, it lets go as the next call begins.
        kept = range(len(traced.outputs)) if template.attributes else traced.reassigned.values()
        own = {v for v in graph.outputs if graph.values[v].size_bytes} - {traced.outputs[i].value for i in kept}
        positions = {o.value: i for i, o in enumerate(traced.outputs[: template.returned]) if o.value in own}
        by_value: dict[int, list[int]] = {}
        for index, output in enumerate(traced.outputs):
            if output.requires_grad:
                by_value.setdefault(output.value, []).append(index)
        return Outputs(
            names=tuple(traced.template.names[i] or "output" for i in range(len(traced.outputs))),
            requires_grad=tuple(o.requires_grad for o in traced.outputs),
            inner=traced.inner,
            shared=tuple(tuple(group) for group in by_value.values() if len(group) > 1),
            specs=template.specs,
            own=tuple(positions.values()),
        )

    def as_dtensors(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """These tensors, with DTensors in the place of parts of them."""
        if not self.specs:
            return tuple(tensors)
        specs = [self.specs.get(index) for index in range(len(tensors))]
        known = zip(tensors, specs, self.names, strict=True)
        return tuple(t if spec is None else private.as_returned(t, *spec, name) for t, spec, name in known)

    def returned(self, tensors: Sequence[torch.Tensor]) -> Callable[[Outputs, Collection[int]], None]:
        """A check for backward of these tensors, which are returned now.

        It takes the outputs of the plan that runs backward, which may be another. It raises RuntimeError where
        gradients that arrive for some of them are not all that eager's would be. It keeps only their memory alive,
        which the plan holds until backward ends anyway.
        """
        number, names = [_NEVER], self.names
        onlookers = {i: _Onlookers(names[i], tensors[i], number) for i in self.inner if tensors[i].grad_fn is not None}
        groups = [_SharedOutputs([names[i] for i in group], {i: tensors[i] for i in group}) for group in self.shared]

        def check(outputs: Outputs, reached: Collection[int]) -> None:
            for index, asks in onlookers.items():
                if outputs.inner.get(index):
                    asks.check()
            for shared in groups:
                shared.check(reached)

        return check


class _Onlookers:
    """Hooks and the like that ask for the gradient of an output.

    looked_at: shared by all outputs of a forward: the number of the backward pass that was found to run the planned
    one.
    """

    def __init__(self, name: str, output: torch.Tensor, looked_at: list[int]) -> None:
        self._name, self._output, self._looked_at = name, weakref.ref(output), looked_at
        self._hooks = output.register_hook(self._begin).hooks_dict_ref

    def _begin(self, gradient: torch.Tensor | None) -> None:
        """Runs before all other hooks, which could not handle a gradient that is None."""
        if self._looked_at[0] != private.backward_in_progress():
            output = self._output()
            node = None if output is None else output.grad_fn
            if node is not None and not any(private.engine_reaches(n) for n, _ in node.next_functions if n):
                raise self._refusal("torch.autograd.grad")
            self._looked_at[0] = private.backward_in_progress()
        if gradient is None:
            self.check()

    def check(self) -> None:
        """Raise RuntimeError where something asks for the gradient."""
        output, hooks = self._output(), self._hooks() or {}
        if output is not None and output.retains_grad:
            raise self._refusal("retain_grad()")
        if len(hooks) > 1 and not all(only_waits(hook) for hook in hooks.values()):
            raise self._refusal("a hook")

    def _refusal(self, who: str) -> RuntimeError:
        return RuntimeError(
            f"memplan: {who} asks for the gradient of output {self._name}, from which the model computes other outputs "
            "inside of the plan, so autograd sees only the part that comes from outside. Compute those outside of the "
            "model, or call memplan.remove(model) to train without a plan"
        )


class _SharedOutputs:
    """Outputs in the same memory, which share one version counter."""

    def __init__(self, names: Sequence[str], outputs: Mapping[int, torch.Tensor]) -> None:
        first = next(iter(outputs.values()))
        self._names, self._memory, self._version = names, first.detach(), first._version
        self._outputs = {i: weakref.ref(output) for i, output in outputs.items()}
        self._node = id(first.grad_fn)  # which lives until its backward is over

    def check(self, reached: Collection[int]) -> None:
        """Raise RuntimeError where an edit of one may change the gradient of another."""
        wanted = self._outputs.keys() & reached
        if self._memory._version == self._version or not wanted:
            return
        outputs = {i: ref() for i, ref in self._outputs.items()}
        # Of one that is gone nobody can say.
        edited = {i for i, output in outputs.items() if output is None or id(output.grad_fn) != self._node}
        if len(edited) > 1 or (edited and wanted != edited):
            raise RuntimeError(
                f"memplan: one of the outputs {', '.join(self._names)}, which share memory, has been modified by an "
                "inplace operation between forward and backward, so what others of them hold depends on it, which a "
                "planned step can't follow. Use an operation that is not in place, or return a copy (.clone())"
            )
