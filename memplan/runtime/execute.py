"""Run a program under autograd: one Function for the whole step, with nothing kept outside its context.

Parameters are not inputs of the Function: an empty anchor tensor connects it to autograd, and each gradient is handed
over in the middle of backward, as soon as it is final. Saved tensors live in a list that backward takes away, so the
version checks that autograd would make on them are made here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from memplan.errors import PlanMismatch
from memplan.graph import private_api as private
from memplan.runtime.lower import Program


class ParameterStore:
    """Parameters and buffers of a model by name, looked up at each use, so `load_state_dict` and `.data` just work."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._homes: dict[str, tuple[dict[str, Any], str]] = {}
        for name in names:
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            home = module._parameters if leaf in module._parameters else module._buffers
            self._homes[name] = (home, leaf)

    def __getitem__(self, name: str) -> torch.Tensor:
        home, leaf = self._homes[name]
        return home[leaf]  # type: ignore[no-any-return]

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        home, leaf = self._homes[name]
        home[leaf] = tensor

    def hand_over(self, names: tuple[str, ...], gradients: tuple[torch.Tensor, ...]) -> None:
        """Put gradients into `.grad` through autograd, so that every kind of hook fires."""
        with torch.enable_grad():
            # A view of the parameter, because autograd copies a gradient that is given for the leaf itself.
            leaves = [
                _same_gradient(self[name]) if 1 in gradient.shape else self[name].view_as(self[name])
                for name, gradient in zip(names, gradients, strict=True)
            ]
        private.run_backward(leaves, gradients)


class _SameGradient(torch.autograd.Function):
    """Hands a gradient on with its strides; a view's backward would tidy up those of dimensions of size 1."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.detach()


def _same_gradient(parameter: torch.Tensor) -> torch.Tensor:
    return _SameGradient.apply(parameter)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, slots=True)
class TangentLayout:
    """What backward was captured for: the gradient that arrives for one output."""

    output: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(output: str, tangent: torch.Tensor) -> TangentLayout:
        return TangentLayout(output, tuple(tangent.shape), tuple(tangent.stride()), tangent.dtype)


@dataclass(frozen=True, slots=True)
class _Watched:
    """A tensor that backward reads, as it was when forward ended."""

    what: str
    tensor: torch.Tensor
    version: int
    address: int

    @staticmethod
    def of(what: str, tensor: torch.Tensor) -> _Watched:
        return _Watched(what, tensor, tensor._version, tensor.data_ptr())

    def check(self) -> None:
        if self.tensor._version != self.version or self.tensor.data_ptr() != self.address:
            raise RuntimeError(
                f"{self.what}, which backward needs, has been modified by an inplace operation between forward and "
                f"backward: it is at version {self.tensor._version}, expected version {self.version}"
            )


@dataclass(slots=True)
class _InFlight:
    """One forward that waits for its backward.

    watched: inputs and outputs. parameters: parameters and buffers by name.
    """

    saved: list[Any]
    watched: list[_Watched]
    parameters: list[_Watched]


class Runner:
    """A program with the model whose parameters it reads."""

    def __init__(
        self,
        program: Program,
        store: ParameterStore,
        backwards: tuple[tuple[dict[int, TangentLayout], fx.GraphModule], ...],
        requires_grad: tuple[bool, ...],
        output_names: tuple[str, ...],
        device: torch.device,
    ) -> None:
        self.program = program
        self.store = store
        self.anchor = torch.empty(0, requires_grad=True, device=device)
        self._backwards = backwards
        self._layouts = backwards[0][0]
        self._requires_grad = requires_grad
        self._output_names = output_names
        self._device_type = device.type

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs of one planned forward, connected to autograd."""
        outputs = _Step.apply(self.anchor, self, *inputs)  # type: ignore[no-untyped-call]
        same = self.program.input_outputs
        return tuple(inputs[same[i]] if i in same else t for i, t in enumerate(outputs))

    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], _InFlight]:
        program = self.program
        with self._without_autocast():
            results = program.forward.forward([self.store, *(inputs[i] for i in program.forward_inputs)])
        outputs = results[: program.output_count]
        saved = results[program.output_count :]
        # A view among the outputs must not look like one, or the caller could not edit it in place.
        outputs = [t if i in program.input_outputs else t.data for i, t in enumerate(outputs)]
        watched = [_Watched.of(f"input {i}", inputs[i]) for i in program.backward_inputs]
        watched += [_Watched.of(f"output {self._output_names[i]}", outputs[i]) for i in program.backward_outputs]
        state = [_Watched.of(name, self.store[name]) for name in program.backward_state]
        return outputs, _InFlight(saved, watched, state)

    def backward(self, state: _InFlight, tangents: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        given = self._checked_tangents(tangents)
        run = self._backward_for(given)
        arguments = [self.store, self.store.hand_over, *given.values(), *state.saved]
        state.saved.clear()
        with self._without_autocast():
            return run.forward(arguments)  # type: ignore[no-any-return]

    def _checked_tangents(self, tangents: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        """The gradients handed in, by output."""
        given = {index: tangent for index, tangent in enumerate(tangents) if tangent is not None}
        for index in given.keys() - self._layouts.keys():
            raise PlanMismatch(
                f"backward reached output {self._output_names[index]}, but the plan starts backward from "
                f"{', '.join(x.output for x in self._layouts.values())} alone. Put the whole loss inside with loss_fn="
            )
        for index in self._layouts.keys() - given.keys():
            raise PlanMismatch(
                f"backward did not reach output {self._layouts[index].output}, but the plan starts backward from it. "
                "Put the loss inside with loss_fn="
            )
        return {index: given[index] for index in self._layouts}

    def _backward_for(self, given: dict[int, torch.Tensor]) -> fx.GraphModule:
        """The backward program for gradients of this layout."""
        layouts = {i: TangentLayout.of(self._layouts[i].output, t) for i, t in given.items()}
        for expected, program in self._backwards:
            if layouts == expected:
                return program
        index = next(i for i in layouts if layouts[i] != self._layouts[i])
        raise PlanMismatch(
            f"the gradient of output {layouts[index].output} arrives with strides {layouts[index].stride} and dtype "
            f"{layouts[index].dtype}, but was planned with strides {self._layouts[index].stride} and "
            f"{self._layouts[index].dtype}; eager would run other kernels on it. Put the loss inside with loss_fn="
        )

    def check_unchanged(self, state: _InFlight) -> None:
        """Raise as autograd does where something that backward reads has been written to since forward."""
        for watched in state.parameters:
            if self.store[watched.what] is not watched.tensor:
                raise RuntimeError(
                    f"memplan: {watched.what} is another tensor than it was in forward; run forward again"
                )
        for watched in (*state.watched, *state.parameters):
            watched.check()

    @property
    def requires_grad(self) -> tuple[bool, ...]:
        return self._requires_grad

    def _without_autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The captured ops are already cast; autocast must not cast them again."""
        if torch.is_autocast_enabled(self._device_type):
            return torch.autocast(self._device_type, enabled=False)
        return contextlib.nullcontext()


class _Step(torch.autograd.Function):
    """One planned training step: forward and backward programs behind one autograd node."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, runner: Runner, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        outputs, state = runner.forward(inputs)
        ctx.runner, ctx.state, ctx.input_count = runner, state, len(inputs)
        # An output that is an input itself would otherwise come back detached from it.
        ctx.mark_non_differentiable(*(o for o, wanted in zip(outputs, runner.requires_grad, strict=True) if not wanted))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        runner, state = ctx.runner, ctx.state
        if torch.is_grad_enabled() or private.backward_keeps_graph():
            raise RuntimeError(
                "memplan: a planned step frees what it saved as backward goes, so retain_graph=True, create_graph=True "
                "and double backward are not supported. Call memplan.remove(model) to train without a plan"
            )
        if state is None:
            raise RuntimeError(
                "memplan: trying to backward through a planned step a second time; what it saved has been freed. "
                "Run the forward again"
            )
        if not private.engine_reaches(ctx.next_functions[0][0]):
            raise RuntimeError(
                "memplan: torch.autograd.grad and backward(inputs=...) are not supported by a planned step, which puts "
                "every gradient into .grad. Call loss.backward(), or memplan.remove(model)"
            )
        runner.check_unchanged(state)
        ctx.state = None
        gradients: list[torch.Tensor | None] = [None] * ctx.input_count
        results = runner.backward(state, tangents)
        for position, gradient in zip(runner.program.input_gradients, results, strict=True):
            gradients[position] = gradient
        return (None, None, *gradients)
