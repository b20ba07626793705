"""Compares a real run of the first step that was planned in full with its prediction."""

from __future__ import annotations

from typing import Any

from memplan.costs.known_costs import doubt
from memplan.installed.choice import StepChoice
from memplan.logs import log
from memplan.runtime.program.step import PlannedStep
from memplan.runtime.watch.observe import Observer
from memplan.units import format_bytes

_SLOW, _MUCH_S = 2, 0.05  # more than so many times as long as measured, and by so much: costs are wrong


class Comparison:
    """Watches a step when it runs, logs in one line how that compares with the prediction, and keeps a margin.

    If the step holds more than predicted, later plans keep that much free. A margin that was not needed is halved.
    Nothing is compared where an optimizer that steps in backward, or an engine's hook, holds memory that no plan knows
    of.
    """

    def __init__(self, choice: StepChoice, step: PlannedStep) -> None:
        self._choice, self._step = choice, step
        hooks = any(p._post_accumulate_grad_hooks for p in choice.model.parameters())
        self._comparable = not hooks and step.runner.store.updates is None
        self._absent_bytes = 0  # of gradients that are not there when the step begins
        self._predicted = step.planned  # of the first step; later ones may have other sizes
        runner = step.runner
        is_host = runner.store.transfers.is_host
        self.observer = runner.watch = Observer(runner.device, self._held, self._compare, is_host)

    def _held(self) -> list[Any]:
        self._predicted = self._step.plan
        model = self._choice.model
        parameters = list(model.parameters())
        self._absent_bytes = sum(p.nbytes for p in parameters if p.requires_grad and p.grad is None)
        gradients, constants = [p.grad for p in parameters], list(self._step.capture.traced.constants.values())
        return [parameters, gradients, list(model.buffers()), constants]

    def _compare(self, grown_bytes: int, time_s: float) -> None:
        if not self._comparable:
            return
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
        costs_say_s = plan.problem.costs.source != "estimated" and plan.time_s
        if costs_say_s > _SLOW * time_s and costs_say_s > time_s + _MUCH_S:
            doubt(self._step.capture.traced)
            log.warning(
                "the step takes %.3g s, predicted %.3g s: the machine was busy when ops were timed, and the plan may "
                "recompute the wrong ones. The next plan times them again; 'python -m memplan clear-costs' forgets all",
                time_s, plan.time_s,
            )  # fmt: skip
        limits, problem = self._choice.planner.limits, plan.problem
        if not self._choice.alone or problem.costs.source == "estimated":
            return
        margin = min(0.25, measured_bytes / predicted_bytes - 1)
        if margin > max(0.001, limits.margin):
            log.warning("%.1f%% more than predicted; plans keep that much free from now on", 100 * margin)
            limits.learn(self._step.runner.device, margin)
            if problem.budget_bytes is not None and measured_bytes > problem.budget_bytes:
                self._choice.known.forget()
        elif margin < limits.learnt / 2:
            limits.learn(self._step.runner.device, limits.learnt / 2)
