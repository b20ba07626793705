"""A model whose forward runs a plan. Its class, parameters, `state_dict` keys and output types stay as they are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from memplan.graph.capture import Capture
from memplan.graph.traced import Traced
from memplan.runtime.execute import ParameterStore, Runner, TangentLayout
from memplan.runtime.lower import Program


class PlannedForward:
    """Stands in for `model.forward`: runs the plan in training, and the original in eval mode and under no_grad.

    plan: what `memplan.plan_of` returns. original: the forward that was there before.
    """

    def __init__(
        self,
        model: nn.Module,
        original: Callable[..., Any],
        capture: Capture,
        programs: tuple[Program, ...],
        plan: Any,
    ) -> None:
        self.model, self.original, self.plan = model, original, plan
        self._capture, self._programs = capture, programs
        self._key = capture.key
        self._training = model.training
        self._own_attribute = "forward" in vars(model)
        self._runner = self._make_runner()
        functools.update_wrapper(self, original)

    def _make_runner(self) -> Runner:
        traced = self._capture.traced
        variants = [v for v in (traced, self._capture.expanded) if v is not None]
        return Runner(
            program=self._programs[0],
            store=ParameterStore(
                self.model, [r.name for r in traced.residents.values() if r.kind in ("parameter", "buffer")]
            ),
            backwards=tuple((self._layouts(v), p.backward) for v, p in zip(variants, self._programs)),
            requires_grad=tuple(o.requires_grad for o in traced.outputs),
            output_names=tuple(self._name(i) for i in range(len(traced.outputs))),
            device=traced.device,
        )

    def _layouts(self, traced: Traced) -> dict[int, TangentLayout]:
        return {
            index: TangentLayout.of(self._name(index), traced.tangent_nodes[output.tangent].meta["val"])
            for index, output in enumerate(traced.outputs)
            if output.tangent is not None
        }

    def _name(self, index: int) -> str:
        return self._capture.traced.template.names[index] or "output"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or (self._training and not self.model.training):
            return self.original(*args, **kwargs)
        call = self._capture.reader.read(args, kwargs)
        self._key.check(call)
        traced = self._capture.traced
        outputs = self._runner(call.tensors)
        for name, index in traced.reassigned.items():
            self._runner.store[name] = outputs[index]
        return traced.template.fill(outputs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    @property
    def program(self) -> Program:
        """The two fx GraphModules that run: `program.forward.code` and `program.backward.code` can be read."""
        return self._programs[0]

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """Constants of the trace that the program holds."""
        return self._capture.traced.constants

    def install(self) -> None:
        self._capture.settle(self.model)
        self.model.forward = self

    def uninstall(self) -> None:
        """Put the original forward back."""
        if self._own_attribute:
            self.model.forward = self.original
        else:
            del self.model.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model runs the same plan on its own parameters."""
        model = memo.get(id(self.model))
        if model is None:
            return self
        return _Unbound(self, model)

    def __reduce__(self) -> Any:
        """Pickling a model leaves the plan out: what is loaded is the plain model."""
        return _class_forward, (self.model,)

    def bound_to(self, model: nn.Module) -> PlannedForward:
        """The same plan for a copy of the model."""
        original = MethodType(getattr(self.original, "__func__", type(model).forward), model)
        other = PlannedForward.__new__(PlannedForward)
        other.model, other.original, other.plan = model, original, self.plan
        other._capture, other._programs = self._capture, self._programs
        other._key = self._key.rebound(model)
        other._training, other._own_attribute = self._training, False
        other._runner = other._make_runner()
        functools.update_wrapper(other, original)
        return other


def _class_forward(model: nn.Module) -> Callable[..., Any]:
    return MethodType(type(model).forward, model)


class _Unbound:
    """The forward of a model that is being copied: binds the plan once the copy is complete."""

    def __init__(self, planned: PlannedForward, model: nn.Module) -> None:
        self._planned, self._model = planned, model
        functools.update_wrapper(self, planned.original)

    def bind(self) -> PlannedForward:
        bound = self._planned.bound_to(self._model)
        bound.install()
        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.bind()(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.bind().__deepcopy__(memo)

    def __reduce__(self) -> Any:
        return self.bind().__reduce__()


def planned_forward(model: nn.Module) -> PlannedForward | None:
    """The model's planned forward, None where it has none."""
    forward = vars(model).get("forward")
    if isinstance(forward, _Unbound):
        forward = forward.bind()
    return forward if isinstance(forward, PlannedForward) else None
