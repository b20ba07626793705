"""A step for a call that can't be captured, not even with islands: it runs unplanned where that fits the budget."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Sequence

import torch

from memplan.capture.capturable import model_device, refuse_wrappers
from memplan.capture.ops.ways import Never, way_of
from memplan.capture.trace.call import Call, CallReader, Forward, Sample
from memplan.capture.trace.source_lines import first_line
from memplan.costs.optimizer import most_library_bytes
from memplan.errors import BudgetInfeasible, MemplanError, NothingToTrain, Refused, UnsupportedModel
from memplan.logs import log
from memplan.planning.choosing import unplanned_bytes
from memplan.planning.problems import Problems
from memplan.problem.data import Buffers
from memplan.runtime.program.checkpointed import checkpointing, layers_of, noting_writes
from memplan.runtime.program.step import ServingStep, UnplannedStep
from memplan.runtime.trial.unplanned_peak import UnplannedPeak, unplanned_peak
from memplan.units import format_bytes


class UnplannedSteps:
    """Steps of one model that run as they are. The model is on the device with all its parameters."""

    def __init__(self, forward: Forward, problems: Problems) -> None:
        self._forward, self._problems, self._model = forward, problems, problems.model
        self._settings, self._limits, self._placement = problems.settings, problems.limits, problems.placement

    def step(
        self,
        sample: Sample | Call,
        known: Sequence[ServingStep],
        error: UnsupportedModel,
        below_bytes: float = math.inf,
    ) -> UnplannedStep | Refused:
        """A step for a call that can't be captured, once its peak is known to fit the budget.

        - known: steps that there are; the plan of an equal call tells what this one holds unplanned.
        - error: why the call can't be captured; returned, with more text, if it can't run unplanned either.
        - below_bytes: what a plan holds. A step that holds as much is refused.
        """
        if (refusal := self._refusal(error)) is not None:
            return refusal
        device = self._placement.device or model_device(self._model)
        call = sample if isinstance(sample, Call) else CallReader(self._forward).read_sample(sample)
        call = call.detached(device)
        peak_bytes, limit_bytes = unplanned_bytes(call, known), self._limits.budget_bytes
        layers: tuple[str, ...] = ()
        if peak_bytes is None or limit_bytes is None or peak_bytes > limit_bytes:
            measured = self._measured(call, device, error, below_bytes)
            if isinstance(measured, Refused):
                return measured
            peak_bytes, limit_bytes, layers = measured
        within = f"{format_bytes(peak_bytes)} of {format_bytes(limit_bytes)}"
        how = f"with {len(layers)} layers checkpointed by PyTorch, " if layers else ""
        log.warning("calls like this one run unplanned, %sat %s: %s", how, within, str(error).partition("\n")[0])
        return UnplannedStep.of(self._model, self._forward, call, device.type, layers)

    def _refusal(self, error: UnsupportedModel) -> UnsupportedModel | None:
        """The error, with more text, if no step can run unplanned with these settings, or where the model is."""
        settings, way = self._settings, way_of(error)
        never = isinstance(error, NothingToTrain) or isinstance(way, Never) or getattr(way, "compiled", False)
        refuse_wrappers(self._model)
        if never or not any(p.requires_grad for p in self._model.parameters()):
            return error
        options = {
            "loss_fn=": settings.loss_fn is not None,
            "update='backward'": settings.update == "backward",
            "microbatches in flight": settings.in_flight > 1 or settings.surroundings.buffers != Buffers(),
        }
        for option in (option for option, is_set in options.items() if is_set):
            return UnsupportedModel(f"{error}\nWith {option} a step has to be planned, and can't run unplanned")
        if settings.shards is not None:
            return UnsupportedModel(
                f"{error}\nWith sharded parameters a step has to be planned, for what runs unplanned would not gather. "
                "Mend that, or leave the parameters whole (ZeRO stage 2 or less)"
            )
        if self._placement.host:
            return UnsupportedModel(f"{error}. With parameters on the host it can't run unplanned either")
        device = self._placement.device
        if device is not None and any(t.device != device for t in (*self._model.parameters(), *self._model.buffers())):
            return UnsupportedModel(
                f"{error}. Such a step can run unplanned once the model is on the device: call "
                f"model.to({str(device)!r}) before"
            )
        return None

    def _measured(
        self, call: Call, device: torch.device, error: UnsupportedModel, below_bytes: float
    ) -> tuple[int, int, tuple[str, ...]] | Refused:
        """Bytes of a run of the step on the sample, with all else on the device; the budget; layers to checkpoint.

        Layers are checkpointed where the step does not fit the budget without, and has the same bits with it.
        """
        needs, around = self._problems.optimizer(device), self._settings.surroundings
        held_bytes = needs.state_bytes + around.held_bytes + most_library_bytes(device)
        if self._limits.accumulate:
            held_bytes += sum(p.numel() * p.element_size() for p in self._model.parameters() if p.requires_grad)
        most_bytes = below_bytes - 1 - held_bytes

        def measured(forward: Forward) -> tuple[int, UnplannedPeak]:
            found = contextvars.copy_context().run(unplanned_peak, self._model, call, forward, most_bytes)
            after_bytes = found.end_bytes + needs.step_bytes + around.after_bytes
            return held_bytes + max(found.peak_bytes, after_bytes), found

        kinds, written = [layers_of(self._model), layers_of(self._model, 2)], set[str]()
        try:
            plain_bytes, plain = measured(noting_writes(self._model, set().union(*kinds), self._forward, written))
        except Exception as failure:
            if isinstance(failure, Refused):
                return failure.with_traceback(None)
            if isinstance(failure, MemplanError):
                raise
            refusal = UnsupportedModel(
                f"{error}. As it is, a step on the sample fails: {type(failure).__name__}: {first_line(failure)}"
            )
            refusal.__cause__ = failure
            return refusal
        ways: dict[tuple[str, ...], int] = {(): plain_bytes}
        wanted_bytes = self._limits.known_bytes
        for layers in dict.fromkeys(tuple(path for path in kind if path not in written) for kind in kinds):
            if layers and (wanted_bytes is None or min(ways.values()) > wanted_bytes):
                with contextlib.suppress(Exception):  # of layers that can't be checkpointed
                    peak_bytes, found = measured(checkpointing(self._model, layers, self._forward))
                    if found.left == plain.left:
                        ways[layers] = peak_bytes
        least_bytes = min(ways.values())
        if least_bytes >= below_bytes:
            return error
        limit_bytes = self._limits.fix_budget(plain_bytes, plain.resident_bytes + held_bytes, least_bytes)
        fitting = [layers for layers, peak_bytes in ways.items() if peak_bytes <= limit_bytes]
        if not fitting:
            return BudgetInfeasible(
                f"calls like this one can only run unplanned, at {format_bytes(least_bytes)} ({least_bytes} bytes), "
                f"and that does not fit {format_bytes(limit_bytes)}: {error}",
                least_bytes,
            )
        return ways[fitting[0]], limit_bytes, fitting[0]
