"""How a call goes on where its step can't: out of memory, ops gave other results, gradients arrive elsewhere.

Real runs of the first step that was planned in full are compared with its prediction.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Mapping
from typing import Any, Literal

import torch

from memplan import torch_private as private
from memplan.capture.ops.sizes import Varying, all_sizes
from memplan.capture.ops.ways import MakeNoIsland, OtherResults, way_of
from memplan.capture.trace.call import Call
from memplan.capture.trace.raw_trace import Autocast
from memplan.costs.known_costs import doubt
from memplan.errors import PlanMismatch, Refused, or_raise
from memplan.installed.choice import StepChoice
from memplan.logs import log
from memplan.runtime.program.check import OtherBranch
from memplan.runtime.program.execute import Gradients
from memplan.runtime.program.in_flight import InFlight
from memplan.runtime.program.step import PlannedStep, ServingStep
from memplan.runtime.program.tangents import Tangents, layouts_of
from memplan.runtime.watch.meter import Observer
from memplan.units import format_bytes

_LEAST = 0.001  # a margin that matters
_SLOW, _MUCH_S = 2, 0.05  # more than so many times as long as measured, and by so much: costs are wrong


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
        if any(island.varies for island in self._step.capture.traced.islands):
            self._step.runner.watch = self._observer((1 << self._compared) >> 2)
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


_LEAST_REDUCTION = 0.05  # by how much less a step is planned at least after an out-of-memory error

OnOutOfMemory = Literal["raise", "replan"]


class Recovery:
    """Looks after the steps of one model while they run. choice: has these steps, and makes new ones."""

    def __init__(self, choice: StepChoice, on_oom: OnOutOfMemory) -> None:
        self._choice, self.on_oom = choice, on_oom
        self._comparison: Comparison | None = None  # of the first step with its prediction
        self._found: Mapping[str, Any] = {}  # what ops gave in the latest first run that was given up

    @property
    def grown_bytes(self) -> int | None:
        """The most that the first step held beyond what was there before it. None until that step is over."""
        return None if self._comparison is None else self._comparison.observer.grown_bytes

    def attend(self, step: PlannedStep) -> None:
        """Look after a step from now on. Comparisons with predictions begin with the first that was planned in full."""
        step.runner.rescue = functools.partial(self._rescue, step)
        step.runner.before_backward = functools.partial(self._choice.tell_of_backward, step)
        step.runner.keeps_buffers = self.on_oom == "replan"
        varies = any(island.varies for island in step.capture.traced.islands)
        if not step.provisional and (self._comparison is None or varies):
            comparison = Comparison(self._choice, step, self._comparison is None)
            self._comparison = self._comparison or comparison

    def _rescue(self, step: PlannedStep, state: InFlight, tangents: Tangents, problem: Exception) -> Gradients:
        """Gradients of a forward whose backward failed, or can't begin.

        The same plan runs backward, if it serves these gradients after all. Else forward runs again, and then backward:
        by the same plan once memory is freed, or by another one.

        problem: a PlanMismatch if gradients arrive as they were not planned to.
        """
        call, again = step.capture.call.filled(state.start.inputs), False
        while True:
            with step.key.autocast.context(), torch.enable_grad():
                changed = step.key.mismatch(call)
                if isinstance(problem, PlanMismatch) and self._is_same(step, call, tangents, state.autocast):
                    return step.runner.backward(state, tangents)
                why = step.runner.keeps_from_repeating(state) if changed is None else f"since then {changed}"
                repeats = why is None
                again = not again and self.free_memory(problem, repeats)
                if again:
                    other = step
                elif not isinstance(problem, PlanMismatch):
                    self.prepare_replan(problem, step, repeats)
                    other = or_raise(self._planned_for(step, call, tangents, state.autocast, Varying()))
                elif not repeats or self._choice.on_mismatch == "raise":
                    why = f"Forward can't run again for it, because {why}"
                    why = "on_mismatch is 'raise'" if self._choice.on_mismatch == "raise" else why
                    raise PlanMismatch(f"{problem}. {why}")
                else:
                    other = self._for_tangents(step, call, tangents, state.autocast, problem)
            self._choice.in_place_of(step, other)
            if other.forward_ops(call) != step.forward_ops(call):
                raise problem
            state.spend()
            other.runner.retained |= step.runner.retained
            try:
                return other.runner.repeat(state, tangents, other.numbers(call))
            except Exception as error:
                if not isinstance(way_of(error), OtherResults) and not private.is_out_of_memory(error):
                    raise
                step, problem = other, error.with_traceback(None)

    def _is_same(self, step: PlannedStep, call: Call, tangents: Tangents, backward: Autocast | None) -> bool:
        """Whether a step serves a backward under this autocast as well, though it was planned for one without."""
        if backward is None or not step.runner.takes(tangents, None, step.numbers(call)):
            return False
        with self._choice.planning():
            same = self._choice.planner.is_same(step, call, layouts_of(tangents), backward)
        if same:
            step.runner.backwards.autocasts.add(backward)
        return same

    def _for_tangents(
        self, step: PlannedStep, call: Call, tangents: Tangents, backward: Autocast | None, problem: Exception
    ) -> PlannedStep:
        for other in self._choice.known.planned():
            serves = other.mismatch(call) is None and other.runner.takes(tangents, backward, other.numbers(call))
            if serves and other.forward_ops(call) == step.forward_ops(call):
                return other
        log.info("planning, because %s", problem)
        may_vary = all_sizes(call.tensors) if self._choice.takes_any_size else Varying()
        planned = self._planned_for(step, call, tangents, backward, may_vary)
        if isinstance(planned, Refused):
            raise PlanMismatch(f"{problem}. A plan for that fails, because {planned}") from planned
        return planned

    def _planned_for(
        self, step: PlannedStep, call: Call, tangents: Tangents, backward: Autocast | None, may_vary: Varying
    ) -> PlannedStep | Refused:
        """A new step for gradients of such layouts, under this autocast, with the forward of one that has run.

        The caller refuses one with another forward, which comes where no plan has that one.
        may_vary: sizes that may vary from call to call. Now that the step is captured once more, it is for all of them.
        """
        choice, layouts, seen = self._choice, layouts_of(tangents), step.capture.answers
        known = step.key.varying(call) if step.sized is not None and choice.takes_any_size else Varying()
        for varying in dict.fromkeys((known or may_vary, Varying())):
            with choice.planning():
                other = choice.planner.step_for(call, layouts, backward, seen, choice.known.all, varying)
            if isinstance(way_of(other), OtherResults) and varying:
                continue  # what ops give at other sizes nobody knows
            if isinstance(other, Refused):
                return other
            if other.forward_ops(call) == step.forward_ops(call):
                break
        assert isinstance(other, PlannedStep)
        choice.add(other)
        return other

    def free_memory(self, problem: Exception, repeats: bool) -> bool:
        """Free memory that nothing holds, if a step that ran out of memory may run once more as it is. Gives whether.

        repeats: the step can run once more. With other ranks it may not, for it may have collectives in it.
        """
        wanted = self.on_oom == "replan" and repeats and self._choice.trains_alone
        if not wanted or not private.is_out_of_memory(problem):
            return False
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        log.info("out of memory; the step runs once more, with all free memory in one piece")
        return True

    def prepare_replan(self, problem: Exception, step: ServingStep, repeats: bool) -> None:
        """Get ready to plan again after an error of a step. Raises the error where planning again does not help.

        It helps after running out of memory, after ops gave other results than were traced, and where forward takes
        another branch. repeats: the step can run once more.
        """
        if isinstance(problem, OtherBranch) and not self._choice.is_fixed:
            self._choice.known.declined.append((step, str(problem)))
            return
        if private.is_out_of_memory(problem):
            self._after_out_of_memory(step, problem, repeats)
            return
        way = way_of(problem)
        # Another run would leave a trace in Python.
        once = isinstance(step, PlannedStep) and any(island.once for island in step.capture.traced.islands)
        if isinstance(way, MakeNoIsland) and repeats and not self._choice.is_fixed and not once:
            log.warning("planning again, because %s", problem)
            self._choice.planner.capturing.make_no_island_of(way.called, str(problem))
            self._choice.known.forget()
            return
        sized = isinstance(step, PlannedStep) and step.sized is not None
        fixed = self._choice.is_fixed and not (sized and self._choice.agreement is not None)
        if fixed or not isinstance(way, OtherResults):
            raise problem
        if not repeats:
            if sized and self._choice.trains_alone:  # the next such call gets its own plan
                self._choice.plan_each_size()
                self._choice.known.forget()
            raise problem
        if sized:  # in a group, the ranks have agreed on its order of gradients, which a plan of this size has too
            self._choice.plan_each_size()
        elif way.found == self._found:  # the new trace has not heeded it
            raise problem
        self._found = way.found
        log.warning("planning again, because in its first run %s", str(problem).partition("\n")[0])
        self._choice.known.forget()
        if not self._choice.planner.limits.is_in_bytes:  # but relative to a step, whose sizes were wrong
            self._choice.planner.limits.reset(None)

    def _after_out_of_memory(self, step: ServingStep, problem: Exception, repeats: bool) -> None:
        """Plan with a larger margin from now on, or raise the error with advice.

        It is raised where planning again is not wanted or does not help. repeats: the step can run once more.
        """
        plan = step.plan
        told = "" if plan is None else f" at a predicted peak of {format_bytes(plan.peak_bytes)}"
        advice = (
            "Other processes or pieces between blocks may take the rest: lower the budget, set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True" + ", or plan with on_oom='replan'" * (self.on_oom == "raise")
        )
        if self.on_oom == "replan" and not repeats:
            advice = "The step can't run again, because what it reads has been written to since. Lower the budget"
        if self.on_oom == "raise" or plan is None or not repeats:
            raise torch.OutOfMemoryError(f"{problem}\nmemplan: out of memory{told}. {advice}") from problem
        if plan.peak_bytes <= plan.floor_bytes:
            raise torch.OutOfMemoryError(f"{problem}\nmemplan: out of memory{told}, the least. {advice}") from problem
        limits = self._choice.planner.limits
        limit_bytes = limits.budget_bytes or plan.peak_bytes
        pieces_bytes = private.unallocated_bytes(problem)
        less_bytes = min(plan.peak_bytes / (1 + max(_LEAST_REDUCTION, limits.margin)), plan.peak_bytes - pieces_bytes)
        limits.set_margin(max(limits.margin, limit_bytes / max(plan.floor_bytes, less_bytes) - 1))
        log.warning("out of memory%s; planning again with a margin of %.0f%%", told, 100 * limits.margin)
        self._choice.known.forget()
