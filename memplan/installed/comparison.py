"""Compares a real run of the first step that was planned in full with its prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from memplan.costs.known_costs import doubt
from memplan.logs import log
from memplan.runtime.program.step import PlannedStep
from memplan.runtime.watch.observe import Observer
from memplan.units import format_bytes

_SLOW, _MUCH_S = 2, 0.05  # more than so many times as long as measured, and by so much: costs are wrong


class Comparison:
    """Watches a step when it runs, and logs in one line how that compares with the prediction.

    done: called with the bytes that were measured, and by how much they exceed the prediction (0.01 is 1%). It is not
    called where an optimizer that steps in backward, or an engine's hook, holds memory that no plan knows of.
    """

    def __init__(self, model: nn.Module, step: PlannedStep, done: Callable[[int, float], None]) -> None:
        self._model, self._step, self._done = model, step, done
        hooks = any(p._post_accumulate_grad_hooks for p in model.parameters())
        self._comparable = not hooks and step.runner.store.updates is None
        self._absent_bytes = 0  # of gradients that are not there when the step begins
        self._predicted = step.planned  # of the first step; later ones may have other sizes
        runner = step.runner
        is_host = runner.store.transfers.is_host
        self.observer = runner.watch = Observer(runner.device, self._held, self._compare, is_host)

    def _held(self) -> list[Any]:
        self._predicted = self._step.plan
        parameters = list(self._model.parameters())
        self._absent_bytes = sum(p.nbytes for p in parameters if p.requires_grad and p.grad is None)
        gradients, constants = [p.grad for p in parameters], list(self._step.capture.traced.constants.values())
        return [parameters, gradients, list(self._model.buffers()), constants]

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
        self._done(measured_bytes, measured_bytes / predicted_bytes - 1)
