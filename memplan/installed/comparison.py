"""Compares real runs of the first step that was planned in full with its prediction."""

from __future__ import annotations

from typing import Any

from memplan import torch_private as private
from memplan.capture.ops.island_ops import IslandKernel
from memplan.costs.known_costs import doubt
from memplan.installed.choice import StepChoice
from memplan.logs import log
from memplan.runtime.program.step import PlannedStep
from memplan.runtime.watch.meter import Observer
from memplan.units import format_bytes

_LEAST = 0.001  # a margin that matters
_SLOW, _MUCH_S = 2, 0.05  # more than so many times as long as measured, and by so much: costs are wrong


def has_varying_islands(step: PlannedStep) -> bool:
    """Whether a call that could not be traced saves more or less from step to step."""
    return any(isinstance(k.target, IslandKernel) and k.target.island.varies for k in step.capture.traced.kernels)


class Comparison:
    """Watches a step when it runs, logs in one line how that compares with the prediction, and keeps a margin.

    If the step holds more than predicted, later plans keep that much free. A margin that was not needed is halved.
    Nothing is compared where an optimizer that steps in backward, or an engine's hook, holds memory that no plan knows
    of. A step whose islands vary is compared again, ever more seldom; then it may give a warning, and no plan changes.
    """

    def __init__(self, choice: StepChoice, step: PlannedStep, is_first: bool) -> None:
        """is_first: no step of the model was compared before."""
        self._choice, self._step, self._is_first = choice, step, is_first
        hooks = any(p._post_accumulate_grad_hooks for p in choice.model.parameters())
        self._comparable = not hooks and step.runner.store.updates is None
        self._absent_bytes = 0  # of gradients that are not there when the step begins
        self._predicted = step.planned  # of the first step; later ones may have other sizes
        self._compared = 0  # times
        self.observer = step.runner.watch = self._observer(0)

    def _observer(self, after_steps: int) -> Observer:
        runner = self._step.runner
        return Observer(runner.device, self._held, self._compare, runner.store.transfers.is_host, after_steps)

    def _held(self) -> list[Any]:
        self._predicted = self._step.plan
        model = self._choice.model
        parameters = list(model.parameters())
        self._absent_bytes = sum(private.part_here(p).nbytes for p in parameters if p.requires_grad and p.grad is None)
        gradients, constants = [p.grad for p in parameters], list(self._step.capture.traced.constants.values())
        return [parameters, gradients, list(model.buffers()), constants]

    def _compare(self, grown_bytes: int, time_s: float) -> None:
        if not self._comparable:
            return
        watched, is_first, self._is_first = self._step.runner.watch, self._is_first, False
        if has_varying_islands(self._step):
            self._step.runner.watch = self._observer(1 << self._compared >> 2)
        self._compared += 1
        if not is_first and (watched is None or watched.forwards > 1):
            return  # another forward may have been there when this one began
        plan, first = self._step.plan, self._predicted
        on_cuda = self._step.runner.device.type == "cuda"
        predicted_bytes = first.peak_bytes if on_cuda else first.live_peak_bytes
        if first.steering is not None and not self._step.runner.store.arena.astray:
            predicted_bytes += first.steering.plugged_bytes
        measured_bytes = first.problem.resident_bytes + grown_bytes
        if plan.problem.accumulate:  # which counts gradients of earlier micro-batches as resident
            measured_bytes -= self._absent_bytes
        log.info(
            "the step peaks at %s%s, predicted %s; it takes %.3g s, predicted %.3g s",
            format_bytes(measured_bytes), "" if on_cuda else " without kernel scratch", format_bytes(predicted_bytes),
            time_s, plan.time_s,
        )  # fmt: skip
        costs_say_s = is_first and plan.problem.costs.source != "estimated" and plan.time_s
        if costs_say_s > _SLOW * time_s and costs_say_s > time_s + _MUCH_S:
            doubt(self._step.capture.traced)
            log.warning(
                "the step takes %.3g s, predicted %.3g s: the machine was busy when ops were timed, and the plan may "
                "recompute the wrong ones. The next plan times them again; 'python -m memplan clear-costs' forgets all",
                time_s, plan.time_s,
            )  # fmt: skip
        limits, problem = self._choice.planner.limits, plan.problem
        if problem.costs.source == "estimated":
            return
        margin = min(0.25, measured_bytes / predicted_bytes - 1)
        if not is_first or self._choice.sharded:
            if margin > max(_LEAST, limits.margin):
                text = f"{100 * margin:.1f}% more than predicted; plans keep no margin for that, so lower the budget"
                self._choice.voice.warn({"more than predicted": text})
        elif margin > max(_LEAST, limits.margin):
            log.warning("%.1f%% more than predicted; plans keep that much free from now on", 100 * margin)
            limits.learn(self._step.runner.device, margin)
            if problem.budget_bytes is not None and measured_bytes > problem.budget_bytes:
                self._choice.known.forget()
        elif margin < limits.learnt / 2:
            limits.learn(self._step.runner.device, limits.learnt / 2)
