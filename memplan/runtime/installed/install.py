"""A model whose forward runs plans. Its class, parameters, `state_dict` keys and output types stay as they are."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, Literal, Protocol

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.ops.real_results import OtherResults
from memplan.capture.trace.call import Call, CallReader, Sample
from memplan.capture.trace.raw_trace import Answer, Autocast
from memplan.errors import BudgetInfeasible, MemplanError, NothingToTrain, PlanMismatch
from memplan.logs import log
from memplan.runtime.host.fetch import FetchedWhereUsed
from memplan.runtime.host.updates import UpdatesInBackward
from memplan.runtime.installed.beside import HeldGradients, SharedBackward, news_of_flight
from memplan.runtime.installed.comparison import Comparison
from memplan.runtime.installed.unused import UnusedPlan
from memplan.runtime.parts.rehearsal import ForwardFails, errors_of_forward
from memplan.runtime.program.decisions import OtherBranch
from memplan.runtime.program.execute import Gradients, InFlight, OtherTangents, TangentLayout
from memplan.runtime.program.lower import Program
from memplan.runtime.program.step import EagerStep, PlannedStep, WholeStep
from memplan.runtime.ranks.agreement import Agreement, Share
from memplan.units import format_bytes

OnMismatch = Literal["replan", "raise"]
OnOutOfMemory = Literal["raise", "replan"]

_MOST_STEPS = 64  # that a model keeps; the one that was not used for longest goes first
_MANY_STEPS = 12  # as many plans for one model are worth a warning
_MOST_BRANCHES = 4  # plans for calls that differ by the branches that forward takes; more are for plans in parts


class StepSource(Protocol):
    """What makes steps for calls that no step serves."""

    budget_bytes: int | None
    in_flight: int
    margin: float
    host: frozenset[str] | None
    device: torch.device | None
    updates: UpdatesInBackward | None
    decides: bool

    @property
    def places(self) -> bool: ...
    @property
    def may_hold_gradients(self) -> bool: ...
    def counting_held_gradients(self) -> contextlib.AbstractContextManager[None]: ...
    def step(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        sample: Sample | Call,
        known: Sequence[PlannedStep] = (),
        share: Share | None = None,
    ) -> PlannedStep: ...
    def join(self, model: nn.Module, step: WholeStep, known: Sequence[PlannedStep], share: Share) -> WholeStep: ...
    def step_for(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        call: Call,
        tangents: dict[int, TangentLayout] | None,
        backward: Autocast | None,
        seen: Sequence[Answer],
        known: Sequence[PlannedStep],
    ) -> WholeStep: ...
    def is_same(
        self,
        step: WholeStep,
        model: nn.Module,
        forward: Callable[..., Any],
        call: Call,
        tangents: dict[int, TangentLayout],
        backward: Autocast,
    ) -> bool: ...
    def instead(self, model: nn.Module, forward: Callable[..., Any], call: Call) -> Sequence[PlannedStep]: ...
    def looking(self) -> contextlib.AbstractContextManager[None]: ...
    def learn(self, device: torch.device, margin: float) -> None: ...
    def for_copy(self) -> StepSource: ...


class PlannedForward:
    """Stands in for `model.forward`: runs plans in training, the original in eval mode, under no_grad and for tracers.

    original: the forward that was there before. reader: takes calls apart. steps: plans by kind of call, that first
    which was used last. agreement: with the other ranks that train the model; None where it trains on this one alone.
    alone: plans may change without asking other ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        original: Callable[..., Any],
        planner: StepSource,
        reader: CallReader,
        on_mismatch: OnMismatch = "replan",
        on_oom: OnOutOfMemory = "raise",
        agreement: Agreement | None = None,
        alone: bool = True,
    ) -> None:
        self.model, self.original = model, original
        self.steps: list[PlannedStep] = []
        self.reader, self._planner, self._agreement = reader, planner, agreement
        self._on_mismatch, self._on_oom = on_mismatch if alone or agreement else "raise", on_oom
        self._alone = alone
        self._training = model.training
        self._own_attribute = "forward" in vars(model)
        self._aside = False  # the model's own forward is wanted
        self._told: set[str] = set()  # of what there has been a warning
        self._comparison: Comparison | None = None  # of the first step with its prediction
        self._host: frozenset[str] | None = None  # parameters that live there as far as the steps know
        self._held = HeldGradients(model, ())
        self._unused = UnusedPlan(model)
        self._unfit: str | None = None  # why plans of the model that this is a copy of do not serve it
        self._found: Mapping[str, Any] = {}  # what ops gave in the latest first run that was given up
        self._shared = SharedBackward()
        self._declined: list[tuple[PlannedStep, str]] = []  # steps that this call has left by another branch, and where
        self.undo: list[Callable[[], None]] = []  # what else there is to take off with the plan
        functools.update_wrapper(self, original)

    @property
    def plan(self) -> Any:
        """The plan that ran last, or will run first; None before there is one."""
        return self.steps[0].plan if self.steps else None

    @property
    def grown_bytes(self) -> int | None:
        """The most that the first step held beyond what was there before it; None before it is over."""
        return None if self._comparison is None else self._comparison.grown_bytes

    @private.uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_aside():
            self._let_go()
            with contextlib.nullcontext() if self._aside else self.fetching():
                return self.original(*args, **kwargs)
        call = self.reader.read(args, kwargs)
        with contextlib.suppress(ForwardFails):
            try:
                return self._run_planned(call)
            finally:
                self._declined.clear()
        with self.stepping_aside(), self.fetching():
            return self.original(*args, **kwargs)  # raises its error, having written what it then has

    def _run_planned(self, call: Call) -> Any:
        self._unused.end()
        self._look_for_gradients()
        step = self._step_for(call)
        self._tell_of_flight(step)
        while True:
            try:
                return self._run(step, call)
            except Exception as error:
                if not (private.is_out_of_memory(error) or isinstance(error, (OtherResults, OtherBranch))):
                    raise
                problem = error.with_traceback(None)  # or its frames would keep tensors alive
            repeats = isinstance(step, WholeStep) and not step.runner.written.for_good
            self._after(problem, step, repeats)
            step = self._in_place_of(step, self._at_hand(call) or self._planned(call))

    def _is_aside(self) -> bool:
        """Whether this call is for the model's own forward."""
        evaluates = self._training and not self.model.training and not self._planner.host  # gradients go to the host
        if self._aside or not torch.is_grad_enabled() or evaluates:
            return True
        if not private.someone_traces():
            return False
        self._tell({"tracers": "the model runs unplanned under torch.func, forward-mode differentiation and tracers"})
        return True

    def _run(self, step: PlannedStep, call: Call) -> Any:
        if isinstance(step, WholeStep):
            return step.run(call)
        with self.stepping_aside(), self.fetching():
            return step.run(call)

    def _let_go(self) -> None:
        """Free what stays on the device between steps: something else runs in between, which may need the room."""
        for step in self.steps:
            if isinstance(step, WholeStep):
                step.runner.store.transfers.standing.free()

    def _forget_steps(self) -> None:
        self._let_go()
        self.steps.clear()

    def fetching(self) -> contextlib.AbstractContextManager[object]:
        """Where the model's own forward finds parameters that live on the host, and parts of it do."""
        host, device = self._planner.host, self._planner.device
        away: list[torch.Tensor] = []
        if host is None and device is not None and self._planner.places:  # there is no plan yet
            everything = (*self.model.parameters(), *self.model.buffers())
            away = [t for t in everything if t.device.type != device.type]
        elif host:
            away = [p for name, p in self.model.named_parameters() if name in host]
        return FetchedWhereUsed(away, device, self.model) if away and device is not None else contextlib.nullcontext()

    # -- which step -------------------------------------------------------------------------------------------------

    def _step_for(self, call: Call) -> PlannedStep:
        if self._agreement is None:
            return self._at_hand(call) or self._planned(call)
        return self._agreed(call, self._agreement, lambda share: self._planned(call, share))

    def _agreed(self, call: Call, agreement: Agreement, plan: Callable[[Share], PlannedStep]) -> PlannedStep:
        """The step that this rank runs, or prepares, while others do. plan: makes one where there is none."""

        def planned(share: Share) -> PlannedStep:
            step = self._at_hand(call)
            return plan(share) if step is None else self._joined(call, step, share)

        def others() -> list[PlannedStep]:
            return [*self._serving(call), *self._planner.instead(self.model, self.original, call)]

        step = agreement.step(lambda: self._at_hand(call), planned, others)
        assert step is not None
        return self._use(step) if any(step is known for known in self.steps) else step

    def _at_hand(self, call: Call) -> PlannedStep | None:
        """The step that serves a call; where several do, for batches of other ranks, the fastest."""
        serving = self._serving(call)
        step = next(serving, None) if self._alone else min(serving, key=lambda s: s.plan.time_s, default=None)
        return None if step is None else self._use(step)

    def _serving(self, call: Call) -> Iterator[PlannedStep]:
        """Whole plans first: they know of the data that decides what runs, and others serve it whatever it is. Last
        those that count gradients, where there are none."""

        def rank(step: PlannedStep) -> tuple[bool, bool]:
            return not isinstance(step, WholeStep), not self._held.extra_bytes and self._held.are_counted_by(step)

        steps = sorted(self.steps, key=rank)
        return (step for step in steps if not step.provisional and self._mismatch(step, call) is None)

    def _mismatch(self, step: PlannedStep, call: Call) -> str | None:
        """What keeps a step from serving a call, in words, as far as that is known before it runs."""
        declined = next((why for other, why in self._declined if other is step), None)
        return declined or step.mismatch(call) or self._held.beyond(step, self._planner.budget_bytes)

    def _use(self, step: PlannedStep) -> PlannedStep:
        if self.steps[0] is not step:
            self.steps[:] = [step, *(other for other in self.steps if other is not step)]
        return step

    def _joined(self, call: Call, step: PlannedStep, share: Share) -> PlannedStep:
        """A step with the schedule of ranks that plan now, in the place of one that is at hand."""
        if not isinstance(step, WholeStep):
            return step
        with self._planning():
            other = self._planner.join(self.model, step, self.steps, share)
        same = (s for s in self._serving(call) if s.plan.schedule == other.plan.schedule)
        return next(same, None) or self.add(other)

    def _planned(self, call: Call, share: Share | None = None, counting: bool = False) -> PlannedStep:
        """A new step. share: where ranks of a group have plans from one another. counting: gradients of earlier steps,
        as the planner is to do already."""
        if self._held.extra_bytes and not counting:
            return self._planned_with_gradients(call)
        reasons = [] if counting else [self._mismatch(step, call) for step in self.steps]
        known: Sequence[PlannedStep]
        if counting:  # plans that do not are none to begin with
            known, reason = [], "gradients of an earlier step are there"
        elif None in reasons:
            self.steps[:] = [step for step, why in zip(self.steps, reasons, strict=True) if why is not None]
            known, reason = [], "such a call came again, and gets a plan of its own"
        elif (reasons or self._unfit) and self._on_mismatch == "raise":
            raise PlanMismatch(
                f"this call does not match the plan: {reasons[0] if reasons else self._unfit}. Plan it with "
                "memplan.apply on such a sample, or call memplan.remove(model)"
            )
        else:
            known, reason = self.steps, f"{reasons[0] if reasons else self._unfit or 'this is the first call'}"
        log.info("planning, because %s", reason)
        self._tell_of_passing(call, known)
        if len(self.steps) == _MANY_STEPS:
            log.warning(
                "the %dth plan for this model; the latest because %s. Each is made once and kept, but takes "
                "a while. Pad batches to few lengths, and pass numbers that change with the batch as tensors",
                len(self.steps) + 1, reason,
            )  # fmt: skip
        with self._planning():
            try:
                step = self._planner.step(self.model, self.original, call, known, share)
            except NothingToTrain as error:
                if not self._alone:
                    raise
                log.info("such calls run unplanned, because %s", error)
                step = EagerStep.of(self.model, self.original, call, call.device_type)
            return self.add(step)

    def _in_place_of(self, before: PlannedStep, after: PlannedStep) -> PlannedStep:
        """A step that this rank alone runs in the place of the one that ranks had agreed on."""
        if self._agreement is not None:
            self._agreement.keep(before, after)
        return after

    def add(self, step: PlannedStep) -> PlannedStep:
        """Take a step in, as the one that was used last."""
        step.settle(self.model)
        if vars(self.model).get("forward") is self:
            self.install()  # the first plan says what else that takes
        if self._host is not None and self._planner.host != self._host:
            self._forget_steps()  # they were made for parameters that have moved since
        self._host = self._planner.host
        self._held.belong_to(self.model, self._host or ())
        self.steps.insert(0, step)
        del self.steps[_MOST_STEPS:]
        if isinstance(step, WholeStep):
            step.runner.rescue = functools.partial(self._rescue, step)
            step.runner.before_backward = functools.partial(self._tell_of_shared_backward, step)
            step.runner.keeps_buffers = self._on_oom == "replan"
            if self._comparison is None and not step.provisional:
                self._comparison = Comparison(self.model, step, functools.partial(self._compared, step))
        return step

    def prepare(self, sample: Sample) -> Any:
        """Plan such calls in full now, together with the other ranks that train the model. Gives the plan."""
        if not self._alone and self._agreement is None:
            raise ValueError("the parameters are sharded: plan on one rank, and give the plan to all with plan=")
        call = self.reader.read_sample(sample)
        self.steps[:] = [s for s in self.steps if not s.provisional or s.mismatch(call) is not None]

        def planned(share: Share | None = None) -> PlannedStep:
            with self._planning():
                return self.add(self._planner.step(self.model, self.original, call, share=share))

        if self._agreement is None:
            with errors_of_forward():
                return (self._at_hand(call) or planned()).plan
        return self._agreed(call, self._agreement, planned).plan

    def floor_of_fewer_outputs(self, sample: Sample) -> int | None:
        """The smallest budget for such a call where backward has started from fewer outputs than were planned for;
        None where it has not."""
        call = self.reader.read_sample(sample)
        plans = [s.plan for s in self.steps if isinstance(s, WholeStep) and s.mismatch(call) is None]
        counts = [len(plan.problem.graph.tangents) for plan in plans]
        fewer = (plan.floor_bytes for plan, count in zip(plans, counts, strict=True) if count < max(counts))
        return min(fewer, default=None)

    def _look_for_gradients(self) -> None:
        """Note what gradients of an earlier step are there, as in loops that zero them between forward and backward, or
        add up those of several batches."""
        uncounted = "gradients" not in self._told and self._planner.may_hold_gradients
        self._held.look(uncounted)
        if self._on_mismatch == "raise" or self._agreement is not None or not self._alone:  # plans stay as they are
            why = self._why_no_room()
            self._held.extra_bytes = 0
            if why is not None:
                self._tell_of_gradients(why)

    def _why_no_room(self) -> str | None:
        """That gradients of an earlier step do not fit beside one of the plans, in words."""
        limit_bytes = self._planner.budget_bytes
        return next((why for step in self.steps if (why := self._held.beyond(step, limit_bytes)) is not None), None)

    def _planned_with_gradients(self, call: Call) -> PlannedStep:
        """A new step whose plan counts them; where there is none, one that does not."""
        why = self._why_no_room()
        try:
            with self._planner.counting_held_gradients():
                step = self._planned(call, counting=True)
        except BudgetInfeasible as error:
            self._tell_of_gradients(why or str(error))
            return self._at_hand(call) or self._planned(call)
        self._held.are_counted_from_now_by(step, self.steps)
        if why is not None:
            self._tell({"planned with gradients": f"planned again, because {why}"})
        return step

    def _tell_of_gradients(self, why: str) -> None:
        """No plan counts them; those that there are go on."""
        self._tell({"gradients": why})
        self._held.extra_bytes = 0

    def _tell_of_passing(self, call: Call, known: Sequence[PlannedStep]) -> None:
        """Say once where all that is new is that arguments are passed by name instead of by position, or so."""
        if any(isinstance(s, WholeStep) and s.key.arguments.differ_in_passing(call) for s in known):
            now = ", ".join(call.paths)
            why = "Forward takes *args or **kwargs, so it may tell these apart; pass them alike, in the sample too"
            self._tell({"passing": f"planned again, because arguments are passed in another way, now as {now}. {why}"})

    def _tell_of_flight(self, step: PlannedStep) -> None:
        """Say once what is to be known of forwards that wait for their backward while this one begins."""
        if self._planner.in_flight > 1 or not isinstance(step, WholeStep):
            return
        self._tell(news_of_flight(step, self.steps, self._planner.budget_bytes))

    def _tell_of_shared_backward(self, step: WholeStep) -> None:
        """Say once where one backward through more than this forward adds gradients up otherwise than eager does."""
        self._tell(self._shared.news(step, self._held.parameters if self._held.exist else ()))

    def _tell(self, news: Mapping[str, str]) -> None:
        """Each subject once."""
        for subject, text in news.items():
            if subject not in self._told:
                self._told.add(subject)
                log.warning("%s", text)

    # -- when a step can't do what it was planned for ---------------------------------------------------------------

    def _rescue(
        self, step: WholeStep, state: InFlight, tangents: dict[int, torch.Tensor], problem: Exception
    ) -> Gradients:
        """Gradients of a forward whose own plan can't give them: another plan runs forward again, then backward."""
        call = step.capture.call.filled(state.start.inputs)
        with step.key.autocast.context(), torch.enable_grad():
            changed = step.key.mismatch(call)
            if isinstance(problem, OtherTangents) and self._is_same(step, call, tangents, state.autocast):
                return step.runner.backward(state, tangents)
            repeats = changed is None and step.runner.repeats(state)
            if not isinstance(problem, OtherTangents):
                self._after(problem, step, repeats)
                other = self._planned_for(step, call, tangents, state.autocast)
            elif not repeats or self._on_mismatch == "raise":
                raise OtherTangents(f"{problem}. {self._why_not_again(step, changed)}")
            else:
                other = self._for_tangents(step, call, tangents, state.autocast, problem)
        self._in_place_of(step, other)
        if other.capture.traced.forward_ops != step.capture.traced.forward_ops:
            raise problem
        state.saved.clear()
        try:
            return other.runner.repeat(state, tangents)
        except OtherResults as error:  # a first run too
            problem = error.with_traceback(None)
        return self._rescue(other, state, tangents, problem)

    def _is_same(
        self, step: WholeStep, call: Call, tangents: dict[int, torch.Tensor], backward: Autocast | None
    ) -> bool:
        """Whether a step serves a backward under this autocast as well, though it was planned for one without."""
        if backward is None or not step.runner.takes(tangents, None):
            return False
        with self._planning():
            same = self._planner.is_same(step, self.model, self.original, call, _layouts(tangents), backward)
        if same:
            step.runner.autocasts.add(backward)
        return same

    def _why_not_again(self, step: WholeStep, changed: str | None) -> str:
        if self._on_mismatch == "raise":
            return "on_mismatch is 'raise'"
        if changed is not None:
            return f"Forward can't run again for it, because since then {changed}"
        if step.runner.written.matters:
            return "Forward can't run again for it, because it writes to what it reads; on_oom='replan' keeps buffers"
        return "Forward can't run again for it, because what it read has been written to since"

    def _for_tangents(
        self,
        step: WholeStep,
        call: Call,
        tangents: dict[int, torch.Tensor],
        backward: Autocast | None,
        problem: Exception,
    ) -> WholeStep:
        for other in self.steps:
            if not isinstance(other, WholeStep) or not other.runner.takes(tangents, backward):
                continue
            if other.mismatch(call) is None and other.capture.traced.forward_ops == step.capture.traced.forward_ops:
                return other
        log.info("planning, because %s", problem)
        try:
            other = self._planned_for(step, call, tangents, backward)
        except MemplanError as error:
            raise OtherTangents(f"{problem}. A plan for that fails, because {error}") from error
        planned_bytes, needed_bytes = step.plan.floor_bytes, other.plan.floor_bytes
        if needed_bytes < planned_bytes:
            log.info(
                "such steps can do with %s (%d bytes), those that were planned with %s (%d bytes); loss_fn= "
                "has them planned for the loss alone",
                format_bytes(needed_bytes), needed_bytes, format_bytes(planned_bytes), planned_bytes,
            )  # fmt: skip
        return other

    def _planned_for(
        self, step: WholeStep, call: Call, tangents: dict[int, torch.Tensor], backward: Autocast | None
    ) -> WholeStep:
        """A new step for gradients of such layouts, under this autocast, with the forward of one that has run."""
        layouts, seen = _layouts(tangents), step.capture.answers
        with self._planning():
            other = self._planner.step_for(self.model, self.original, call, layouts, backward, seen, self.steps)
        self.add(other)
        return other

    def _after(self, problem: Exception, step: PlannedStep, repeats: bool) -> None:
        """Get ready to plan again: after running out of memory, for what ops were found to give, or for another branch.
        Raises what can't be mended. repeats: the step can run once more."""
        fixed = self._on_mismatch == "raise" or self._agreement is not None or not self._alone
        if isinstance(problem, OtherBranch) and not fixed:
            self._decline(step, str(problem))
            return
        if private.is_out_of_memory(problem):
            self._after_out_of_memory(step, problem, repeats)
            return
        if fixed or not repeats or not isinstance(problem, OtherResults) or problem.found == self._found:
            raise problem  # the last where the new trace has not heeded it
        self._found = problem.found
        log.warning("planning again, because in its first run %s", str(problem).partition("\n")[0])
        self._forget_steps()

    def _decline(self, step: PlannedStep, why: str) -> None:
        """This call goes another way than the step; calls that go too many are planned in parts from now on."""
        self._declined.append((step, why))
        if self._planner.decides and len(self._declined) >= _MOST_BRANCHES:
            self._planner.decides = False
            self.steps[:] = [known for known in self.steps if all(known is not other for other, _ in self._declined)]
            log.warning("such calls have taken %d ways, and are planned in parts: %s", _MOST_BRANCHES, why)

    def _after_out_of_memory(self, step: PlannedStep, problem: Exception, repeats: bool) -> None:
        """Plan with a larger margin from now on, or say what could be done. Raises what can't be mended.

        repeats: the step can run once more.
        """
        plan = step.plan
        told = "" if plan is None else f" at a predicted peak of {format_bytes(plan.peak_bytes)}"
        advice = (
            "Other processes or fragmentation may take the rest: lower the budget, set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or plan with on_oom='replan'"
        )
        if self._on_oom == "replan" and not repeats:
            advice = (
                "The step can't run again, for it, or somebody since, has written to what it reads. Lower the budget"
            )
        if self._on_oom == "raise" or plan is None or not repeats:
            raise torch.OutOfMemoryError(f"{problem}\nmemplan: out of memory{told}. {advice}") from problem
        margin = max(0.05, 2 * self._planner.margin)
        if margin > 1:
            raise torch.OutOfMemoryError(f"{problem}\nmemplan: out of memory{told}, at the largest margin") from problem
        log.warning("out of memory%s; planning again with a margin of %.0f%%", told, 100 * margin)
        device = step.runner.device if isinstance(step, WholeStep) else next(self.model.parameters()).device
        self._planner.learn(device, margin)
        self._forget_steps()

    def _compared(self, step: WholeStep, measured_bytes: int, excess: float) -> None:
        """A step was measured: where it held more than predicted, plans keep a margin from now on."""
        margin, problem = min(0.25, excess), step.plan.problem
        if self._alone and margin > max(0.001, self._planner.margin) and problem.costs.source == "measured":
            log.warning("%.1f%% more than predicted; plans keep that much free from now on", 100 * margin)
            self._planner.learn(step.runner.device, margin)
            if measured_bytes > problem.budget_bytes:
                self._forget_steps()

    # -- in and out of the model ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stepping_aside(self) -> Iterator[Callable[..., Any]]:
        """The model's own forward is in place for as long."""
        before, self._aside = self._aside, True
        self._let_go()
        try:
            yield self.original
        finally:
            self._aside = before

    @contextlib.contextmanager
    def _planning(self) -> Iterator[None]:
        """The same while the planner looks at the model."""
        with self.stepping_aside(), self._planner.looking():
            yield

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    @property
    def program(self) -> Program:
        """The two fx GraphModules that run: `program.forward.code` and `program.backward.code` can be read."""
        step = self.steps[0]
        assert isinstance(step, WholeStep)
        return step.programs[0]

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """Constants of the trace that the program holds."""
        step = self.steps[0]
        assert isinstance(step, WholeStep)
        return step.capture.traced.constants

    def install(self) -> None:
        if vars(self.model).get("forward") is not self:
            self._unused.watch()
        self.model.forward = self
        if self._planner.updates is not None:
            self._planner.updates.install()

    def uninstall(self) -> None:
        """Put the original forward back."""
        self._let_go()
        self._unused.end()
        if self._planner.updates is not None:
            self._planner.updates.remove()
        if self._own_attribute:
            self.model.forward = self.original
        else:
            del self.model.forward

    def warn_of_host(self) -> None:
        """Say that the model's own forward does not find its parameters on the device any more."""
        device = self._planner.device
        if self._planner.host and device is not None and device.type != "cpu":
            log.warning(
                "%d parameters live on the host; call model.to(%r) before the model runs without a plan",
                len(self._planner.host), str(device),
            )  # fmt: skip

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model runs the same plans on its own parameters."""
        model = memo.get(id(self.model))
        if model is None:
            return self
        return _Unbound(self, model, copy.deepcopy(self.original, memo))

    def __reduce__(self) -> Any:
        """Pickling a model leaves the plan out: what is loaded is the plain model."""
        return _class_forward, (self.model,)

    def bound_to(self, model: nn.Module, original: Callable[..., Any]) -> PlannedForward:
        """The same plans for a copy of the model, which has this forward of its own.

        Those that do not serve it, because its modules were changed before it was first used, are left out.
        """
        planner = self._planner.for_copy()
        other = PlannedForward(
            model, original, planner, self.reader, self._on_mismatch, self._on_oom, self._agreement, self._alone
        )
        other._training, other._own_attribute = self._training, self._own_attribute
        for step in reversed(self.steps) if planner is self._planner else ():
            try:
                other.add(step.bound_to(model, original))
            except PlanMismatch as error:
                other._unfit = str(error)
        return other


def _layouts(tangents: dict[int, torch.Tensor]) -> dict[int, TangentLayout]:
    return {i: TangentLayout.of(f"{i}", t) for i, t in tangents.items()}


def _class_forward(model: nn.Module) -> Callable[..., Any]:
    return MethodType(type(model).forward, model)


class _Unbound:
    """The forward of a model that is being copied: binds the plan once the copy is complete."""

    def __init__(self, planned: PlannedForward, model: nn.Module, original: Callable[..., Any]) -> None:
        self._planned, self._model, self._original = planned, model, original
        functools.update_wrapper(self, planned.original)

    def bind(self) -> PlannedForward:
        bound = self._planned.bound_to(self._model, self._original)
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
