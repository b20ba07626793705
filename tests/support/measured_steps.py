"""Programs that call `memplan.apply`, under other budgets than theirs, with each planned step measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

import memplan
from memplan.installed.choice import StepChoice
from memplan.installed.recovery import Recovery
from memplan.runtime.program.step import PlannedStep
from memplan.runtime.watch.meter import LiveMeter


@dataclass
class Applied:
    """One call of `memplan.apply`: budget, plans that ran, and what each of their steps held, without scratch.

    A step holds its outputs until the next one begins, whether or not the loop does, and the gradients that arrive.
    """

    budget: Any
    plans: list[memplan.Plan] = field(default_factory=list)
    measured_bytes: list[int] = field(default_factory=list)

    @property
    def half_way(self) -> int:
        """Half way between the floor and the unplanned peak of the plan that ran and needs most."""
        most = max(self.plans, key=lambda plan: plan.floor_bytes)
        return (most.floor_bytes + most.baseline_peak_bytes) // 2

    @property
    def over(self) -> list[str]:
        """Steps that held more than predicted, in words."""
        runs = zip(self.plans, self.measured_bytes, strict=True)
        return [f"{held} of {plan.live_peak_bytes} bytes" for plan, held in runs if held > plan.live_peak_bytes]


class _EachStep:
    """Stands in for the runner's own observer, which sees one step: measures all of them."""

    finished = False

    def __init__(self, choice: StepChoice, step: PlannedStep, applied: Applied) -> None:
        self._model, self._limits, self._step, self._applied = choice.model, choice.planner.limits, step, applied
        self._meter: LiveMeter | None = None
        self._begun = self._waiting = self._absent_bytes = self._before_bytes = 0
        self._outputs = list[torch.Tensor]()
        runner = step.runner
        self._own_forward, self._own_backward = runner.forward, runner._backward
        runner.forward, runner._backward = self._forward, self._backward  # type: ignore[method-assign]

    def _forward(self, *args: Any) -> Any:
        if not self._waiting:
            self._outputs = []
        found = self._own_forward(*args)
        self._outputs += [output.detach() for output in found[0]]
        return found

    def _backward(self, state: Any, tangents: Any, run: Any) -> Any:
        if self._meter is not None:
            self._meter.register(tangents)
        return self._own_backward(state, tangents, run)

    @contextlib.contextmanager
    def forward(self, inputs: object) -> Iterator[None]:
        if self._meter is None:
            parameters = list(self._model.parameters())
            gradients = [p.grad for p in parameters]
            constants = list(self._step.capture.traced.constants.values())
            self._meter = LiveMeter(self._step.runner.store.transfers.is_host)
            self._begun = self._waiting = 0
            self._meter.register([inputs, parameters, gradients, list(self._model.buffers()), constants])
            self._before_bytes = self._meter.live_bytes
            self._absent_bytes = sum(p.nbytes for p in parameters if p.requires_grad and p.grad is None)
        self._meter.register(inputs)
        self._begun += 1
        self._waiting += 1
        with self._meter:
            yield

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        if self._meter is None:  # forward was another plan's, which does not serve this backward
            yield
            return
        with self._meter:
            yield
        plan, grown_bytes = self._step.plan, self._meter.peak_bytes - self._before_bytes
        further = self._limits.accumulate and self._waiting < self._begun  # gradients of the first backward are there
        absent_bytes = self._absent_bytes if plan.problem.accumulate or further else 0  # counted as resident
        self._applied.plans.append(plan)
        self._applied.measured_bytes.append(plan.problem.resident_bytes + grown_bytes - absent_bytes)
        self._waiting -= 1
        if not self._waiting:
            self._meter = None


@contextlib.contextmanager
def measured_steps(budgets: list[Any] | None = None) -> Iterator[list[Applied]]:
    """A context whose value lists the calls of `memplan.apply` in it. budgets: what they take in place of their own.

    A budget of None leaves a call its own. With "min", later kinds of calls raise the budget to what they need.
    """
    own_apply, own_attend, calls = memplan.apply, Recovery.attend, list[Applied]()
    latest: dict[int, Applied] = {}

    def apply(model: Any, sample: Any = None, budget: Any = None, **keywords: Any) -> Any:
        given = None if budgets is None else budgets[len(calls)]
        if given == "min":
            keywords["on_infeasible"] = "min"
        latest[id(model)] = applied = Applied(budget if given is None else given)
        calls.append(applied)
        return own_apply(model, sample, applied.budget, **keywords)

    def attend(recovery: Recovery, step: PlannedStep) -> None:
        own_attend(recovery, step)
        choice = recovery._choice
        step.runner.watch = _EachStep(choice, step, latest[id(choice.model)])  # type: ignore[assignment]

    with mock.patch.object(memplan, "apply", apply), mock.patch.object(Recovery, "attend", attend):
        yield calls
