"""A step for a call that can't be captured whole: unplanned where that fits the budget, else planned in parts."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from memplan.capture.capture import UnplannableArgument, model_device, refuse_wrappers
from memplan.capture.probe import BackwardWithin
from memplan.capture.trace.call import Call, CallReader, Forward, Sample
from memplan.capture.trace.escapes import EscapedTensors
from memplan.capture.trace.islands import CompiledCode
from memplan.capture.trace.source_lines import first_line
from memplan.costs.libraries import most_library_bytes
from memplan.errors import BudgetInfeasible, MemplanError, NothingToTrain, UnsupportedModel
from memplan.fusion.fuse_step import fuse_step
from memplan.logs import log
from memplan.planning.at_hand import unplanned_bytes
from memplan.planning.kept_fronts import kept_front
from memplan.planning.limits import Limits
from memplan.planning.parts.plan_parts import plan_parts
from memplan.planning.parts.request import BesideParts, PartsRequest
from memplan.planning.placement import Placement
from memplan.planning.settings import Settings
from memplan.problem.data import Buffers, Problem
from memplan.runtime.parts.partial_step import PartialStep
from memplan.runtime.parts.rehearsal import measured_peak
from memplan.runtime.program.step import EagerStep, PlannedStep
from memplan.solvers import Front, solve_front
from memplan.units import format_bytes


class UncapturedSteps:
    """Steps of one model that are not one graph. They run the model, so it is on the device with all its parameters."""

    def __init__(
        self,
        settings: Settings,
        limits: Limits,
        placement: Placement,
        optimizer_needs: Callable[[torch.device], tuple[int, int]],
    ) -> None:
        self._settings, self._limits, self._placement = settings, limits, placement
        self._optimizer_needs = optimizer_needs

    def step(
        self,
        model: nn.Module,
        forward: Forward,
        sample: Sample | Call,
        known: Sequence[PlannedStep],
        error: UnsupportedModel,
        in_group: bool,
        decides: bool,
        unsteady: Collection[str],
    ) -> PlannedStep:
        """A step for a call that can't be captured: unplanned where that is known to fit, else planned in parts.

        - known: steps that there are; the plan of an equal call tells what this one holds unplanned.
        - error: why the call can't be captured; raised where it can't be planned in parts either.
        - in_group: other ranks rely on what the step runs.
        - decides: forward is run on the sample.
        - unsteady: values that no plan may depend on.
        """
        device = self._device(model, error)
        self._refuse(model, error)
        call = sample if isinstance(sample, Call) else CallReader(forward).read_sample(sample)
        call = call.detached(device)
        peak_bytes, budget_bytes = unplanned_bytes(call, known), self._limits.budget_bytes
        if peak_bytes is not None and budget_bytes is not None and peak_bytes <= budget_bytes:
            log.warning(
                "such calls run unplanned, at %s of %s: %s",
                format_bytes(peak_bytes), format_bytes(budget_bytes), error,
            )  # fmt: skip
            return EagerStep.of(model, forward, call, device.type)
        try:
            step = self._partial(model, forward, call, device, error, decides, unsteady)
        except MemplanError:
            raise
        except Exception as failure:
            raise UnsupportedModel(
                f"{error}. As it is, a step on the sample fails: {type(failure).__name__}: {first_line(failure)}"
            ) from failure
        if isinstance(step, PartialStep):
            step.strict = in_group
        return step

    def _refuse(self, model: nn.Module, error: UnsupportedModel) -> None:
        """Raise the error for settings that planning in parts does not serve."""
        settings = self._settings
        refuse_wrappers(model)
        if settings.in_flight > 1 or settings.surroundings.buffers != Buffers():
            raise UnsupportedModel(
                f"{error}. Planning in parts knows neither of several forwards in flight nor of an engine's buffers, "
                "so a stage of a pipeline has to be captured whole"
            ) from error
        if settings.loss_fn is not None or not any(p.requires_grad for p in model.parameters()):
            raise error
        if settings.shards is not None and not settings.shards.takes_gradients:  # parts of it would gather otherwise
            raise error
        if settings.shards is not None:
            raise UnsupportedModel(
                f"{error}\nWith sharded parameters a step has to be captured whole, for what runs unplanned would not "
                "gather. Mend that, or leave the parameters whole (ZeRO stage 2 or less)"
            ) from error

    def _device(self, model: nn.Module, error: UnsupportedModel) -> torch.device:
        """Where the model runs. Raises the error where nothing of it can run there in parts."""
        if isinstance(error, (NothingToTrain, CompiledCode, EscapedTensors, UnplannableArgument)):
            raise error
        if self._settings.update == "backward":
            raise UnsupportedModel(f"{error}. With update='backward' it can't be planned in part either") from error
        if self._placement.host:
            raise UnsupportedModel(f"{error}. With parameters on the host it can't run in part either") from error
        if self._placement.host_budget is not None:
            log.warning("nothing is offloaded in such calls, though there is a host budget")
        device = self._placement.device
        if device is not None and any(t.device != device for t in (*model.parameters(), *model.buffers())):
            raise UnsupportedModel(
                f"{error}. Such a step can be planned in part, without offload, once the model is on the device: call "
                f"model.to({str(device)!r}) before"
            ) from error
        return device or model_device(model)

    def _partial(
        self,
        model: nn.Module,
        forward: Forward,
        call: Call,
        device: torch.device,
        error: UnsupportedModel,
        decides: bool,
        unsteady: Collection[str],
    ) -> PlannedStep:
        """A step of which only parts are planned, or none where forward runs a backward pass itself."""

        def beside(_: torch.device | None) -> BesideParts:
            around = self._settings.surroundings
            state_bytes, update_bytes = self._optimizer_needs(device)
            held_bytes = state_bytes + around.held_bytes + most_library_bytes(device)
            if self._limits.accumulate:
                held_bytes += sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
            return BesideParts(held_bytes, update_bytes + around.after_bytes)

        request = PartsRequest(
            model,
            forward,
            call,
            self._limits.settle,
            reason=str(error),
            costs="measure" if self._settings.costs == "measure" else "estimate",
            solve=self._front,
            decides=decides,
            unsteady=unsteady,
            device=device,
            beside=beside,
            fuse=fuse_step if self._settings.kernels == "fused" else None,
        )
        try:
            planned = contextvars.copy_context().run(plan_parts, request)
        except BackwardWithin:
            self._measure_unplanned(model, forward, call, error, beside(device).held_bytes)
            return EagerStep.of(model, forward, call, device.type)
        rows = planned.plan.units
        again = [row.name for row in rows if row.way != "keep"]
        log.warning(
            "planned in %d parts, because %s. %d of them recompute%s",
            len(rows), str(error).partition("\n")[0], len(again), f": {', '.join(again[:4])} ..." if again else "",
        )  # fmt: skip
        return PartialStep.of(planned.plan, planned.ways, model, forward, call)

    def _measure_unplanned(
        self, model: nn.Module, forward: Forward, call: Call, error: UnsupportedModel, held_bytes: int
    ) -> None:
        """Raise BudgetInfeasible where the step as it is does not fit the budget, by a run of it on the sample.

        held_bytes: on the device beside what the step itself makes.
        """
        run = functools.partial(forward, *call.variadic, **call.arguments)
        peak_bytes = contextvars.copy_context().run(measured_peak, model, call, run) + held_bytes
        limit_bytes = self._limits.settle(peak_bytes, held_bytes, peak_bytes)
        if peak_bytes > limit_bytes:
            raise BudgetInfeasible(
                f"such calls can only run unplanned, at {format_bytes(peak_bytes)} ({peak_bytes} bytes), and that does "
                f"not fit {format_bytes(limit_bytes)}: {error}",
                peak_bytes,
            )
        log.warning(
            "such calls run unplanned, at %s of %s: %s", format_bytes(peak_bytes), format_bytes(limit_bytes), error
        )

    def _front(self, problem: Problem) -> Front:
        """The best schedules of a part."""
        config = self._settings.search
        return kept_front(problem, config, lambda: solve_front(problem, config))
