"""Which step serves a call of a planned model: a known one, or a new one, alone or with other ranks."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from memplan.capture.ops.sizes import Varying
from memplan.capture.trace.call import Call, CallReader, Sample
from memplan.errors import BudgetInfeasible, NothingToTrain, PlanMismatch, Refused
from memplan.installed.beside import HeldGradients, SharedBackward, Voice, news_of_flight, news_of_outputs
from memplan.logs import log
from memplan.planning.limits import Limits
from memplan.planning.planner import Planner
from memplan.plans.plan import Plan
from memplan.runtime.program.step import PlannedStep, ServingStep, UnplannedStep, step_or_raise
from memplan.runtime.ranks.agreement import Agreement, Share
from memplan.runtime.trial.one_forward import errors_of_forward
from memplan.units import format_bytes

_MOST_KINDS = 64  # of calls for which a model keeps steps; those that were not used for longest go first
_MOST_KEPT_BYTES = 1 << 30  # that all steps of a model take on the host; the same ones go

Mismatches = dict[int, str | None]  # by kind of step: what keeps it from serving one call


class KnownSteps:
    """The steps of one model, one or more for each kind of call, the last one used first.

    - limits: with the budget. held: gradients of earlier steps.
    - declined: steps that the present call has left by another branch, and where.
    """

    def __init__(self, limits: Limits, held: HeldGradients) -> None:
        self.all: list[ServingStep] = []
        self.declined: list[tuple[ServingStep, str]] = []
        self._limits, self._held = limits, held

    @property
    def kinds(self) -> int:
        """How many captures the steps are of."""
        return len({step.kind for step in self.all})

    def planned(self) -> Iterator[PlannedStep]:
        """The steps that have a plan, the last one used first."""
        return (step for step in self.all if isinstance(step, PlannedStep))

    def serving(self, call: Call) -> Iterator[ServingStep]:
        """Steps that serve a call, the most suitable first.

        Steps with a plan come first: their keys check the data on which forward branches, while unplanned steps serve
        any data. Steps that leave room for gradients that are not there come last.
        """
        latest: dict[int, int] = {}  # steps of one capture, by which of all was used last
        for place, step in enumerate(self.all):
            latest.setdefault(step.kind, place)

        def rank(step: ServingStep) -> tuple[bool, bool, int, float]:
            overhead = 0.0 if step.sized is None else step.sized.planned.overhead
            counts_more = not self._held.extra_bytes and self._held.are_counted_by(step)
            return not isinstance(step, PlannedStep), counts_more, latest[step.kind], overhead

        mismatches: Mismatches = {}
        steps = sorted(self.all, key=rank)
        return (step for step in steps if not step.provisional and self.mismatch(step, call, mismatches) is None)

    def mismatch(self, step: ServingStep, call: Call, mismatches: Mismatches) -> str | None:
        """What keeps a step from serving a call, in words, as far as that is known before the step runs."""
        if (why := self._other_kind(step, call, mismatches)) is not None:
            return why
        limit_bytes, peak_bytes = self._limits.budget_bytes, step.peak_bytes(call)
        if isinstance(step, PlannedStep) and step.sized is not None and peak_bytes is not None:
            if limit_bytes is not None and peak_bytes > limit_bytes:
                return f"a call of this size peaks at {format_bytes(peak_bytes)}, beyond {format_bytes(limit_bytes)}"
            if step.sized.outgrows_host(step.numbers(call)):
                return "its copies on the host have room for smaller calls only"
        return self._held.beyond(step, peak_bytes, limit_bytes)

    def _other_kind(self, step: ServingStep, call: Call, mismatches: Mismatches) -> str | None:
        """Why a call is not of the kind that a step is for. mismatches: so far, of all that share a key."""
        if step.kind not in mismatches:
            declined = (why for other, why in self.declined if other.kind == step.kind)
            mismatches[step.kind] = next(declined, None) or step.mismatch(call)
        return mismatches[step.kind]

    def of_same_kind(self, call: Call, mismatches: Mismatches) -> Iterator[PlannedStep]:
        """Steps for calls of any size that serve this call, if there is room."""
        sized = (step for step in self.planned() if step.sized is not None)
        return (step for step in sized if self._other_kind(step, call, mismatches) is None)

    def of_other_size(self, call: Call) -> tuple[PlannedStep | None, Varying]:
        """A step for such a call of another size, and the sizes that vary; None and none where there is none."""
        found = ((step, step.key.varying(call)) for step in self.planned())
        return next(((step, varying) for step, varying in found if varying), (None, Varying()))

    def use(self, step: ServingStep) -> ServingStep:
        """Note that a step is used now."""
        if self.all[0] is not step:
            self.all[:] = [step, *(other for other in self.all if other is not step)]
        return step

    def add(self, step: ServingStep) -> None:
        """Add a step and its `others`, as the ones that were used last. The oldest steps may go for them."""
        self.all[:0] = [step, *step.others]
        kept, kept_bytes = set[int](), 0
        for known in self.all:
            if known.kind not in kept:
                kept_bytes += known.kept_bytes
                if kept and (kept_bytes > _MOST_KEPT_BYTES or len(kept) == _MOST_KINDS):
                    break
                kept.add(known.kind)
        self.keep(lambda known: known.kind in kept)

    def keep(self, wanted: Callable[[ServingStep], bool]) -> None:
        """Let all other steps go."""
        self.all[:] = [step for step in self.all if wanted(step)]

    def let_go(self) -> None:
        """Free copies that stay on the device between steps, because something else runs next and may need the room."""
        for step in self.planned():
            step.runner.store.transfers.standing.free()

    def forget(self) -> None:
        """Drop all steps, because they are out of date."""
        self.let_go()
        self.all.clear()


OnMismatch = Literal["replan", "raise"]

_MANY_KINDS = 12  # as many are worth a warning
_MOST_VALUES = 4  # plans that differ by one value alone: a number that forward reads, or an attribute
_MOST_RANGES = 16  # plans that differ by the range of one size that follows from data: 0, 1, 2 to 8, ...
_AGAIN = (
    "a further backward through a planned forward (retain_graph=True) keeps no more memory, but runs forward again. "
    "Add losses up and call backward once if that time matters"
)
_MOST_BRANCHES = 4  # plans for calls that differ by the branches that forward takes; more run unplanned


class StepChoice:
    """The steps of one model, and which of them serves a call.

    - known: the steps that there are.
    - voice: says what changes.
    - agreement: with the other ranks that train the model; None where it trains on this one alone.
    - sharded: parameters are, so that all ranks run one schedule.
    - trains_alone: no other ranks rely on this one's plans.
    - takes_any_size: one plan may serve calls of many sizes, else each size is planned by itself.
    - aside: gives a context in which the model's own forward is in place.
    - attend: called with every new step before it is used.
    """

    def __init__(
        self,
        planner: Planner,
        on_mismatch: OnMismatch,
        agreement: Agreement | None,
        aside: Callable[[], contextlib.AbstractContextManager[object]],
        attend: Callable[[ServingStep], None],
    ) -> None:
        self.model, self.planner, self.reader = planner.model, planner, CallReader(planner.capturing.run)
        self.agreement, self.sharded = agreement, planner.settings.shards is not None
        self.on_mismatch: OnMismatch = on_mismatch if agreement or not self.sharded else "raise"
        self._held = HeldGradients(self.model, ())
        self.known = KnownSteps(planner.limits, self._held)
        self.voice = Voice(planner.settings.surroundings)
        self._aside, self._attend = aside, attend
        self.takes_any_size, self.trains_alone = planner.settings.takes_any_size, planner.capturing.trains_alone
        self._host: frozenset[str] | None = None  # parameters that live there as far as the steps know
        self._shared = SharedBackward()
        self._moved: Counter[str] = Counter()  # values that have changed between two calls, and how often

    @property
    def is_fixed(self) -> bool:
        """Whether plans never change, because the user says so or other ranks rely on them."""
        return self.on_mismatch == "raise" or not self.trains_alone

    def plan_each_size(self) -> None:
        """Plan calls of each size by themselves from now on."""
        self.takes_any_size = False

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """A context for the time in which this rank runs the model by itself to plan it."""
        with self._aside(), self.planner.tracing():
            yield

    def begin(self, call: Call) -> ServingStep:
        # Gradients of an earlier step are there in loops that zero them between forward and backward, or add them up.
        self._held.look("gradients" not in self.voice.said and self.planner.limits.may_hold_gradients)
        if self.is_fixed:
            if (why := self._why_no_room()) is not None:
                self._tell_of_gradients(why)
            self._held.extra_bytes = 0
        if self.agreement is None:
            step = self._known_step(call) or step_or_raise(self._plan_call(call))
        else:
            step = self._agreed(call, self.agreement, lambda share: step_or_raise(self._plan_call(call, share)))
        if self.planner.settings.in_flight == 1 and isinstance(step, PlannedStep):
            limit_bytes = self.planner.limits.budget_bytes
            self.voice.warn(news_of_flight(step, step.peak_bytes(call), self.known.all, limit_bytes))
            if "outputs" not in self.voice.said:
                room_bytes, is_in_bytes = self.planner.settings.surroundings.held_bytes, self.planner.limits.is_in_bytes
                self.voice.warn(news_of_outputs(step, call, self.known.all, room_bytes, is_in_bytes))
        return step

    def another(self, call: Call, before: ServingStep) -> ServingStep:
        """The step that goes on with this call in the place of `before`."""
        return self.in_place_of(before, self._known_step(call) or step_or_raise(self._plan_call(call)))

    def _agreed(self, call: Call, agreement: Agreement, plan: Callable[[Share], ServingStep]) -> ServingStep:
        """The step that this rank runs, or prepares while other ranks do. plan: makes one where there is none."""

        def planned(share: Share) -> ServingStep:
            step = self._known_step(call)
            if not isinstance(step, PlannedStep):
                return step or plan(share)
            with self.planning():  # in its place, a step with the schedule that other ranks plan now
                other = self.planner.join(step, self.known.all, share)
            whole = (s for s in self.known.serving(call) if isinstance(s, PlannedStep))
            return next((s for s in whole if s.plan.schedule == other.plan.schedule), None) or self.add(other)

        step = agreement.step(lambda: self._known_step(call), planned, lambda: list(self.known.serving(call)))
        assert step is not None
        return self.known.use(step) if any(step is known for known in self.known.all) else step

    def _known_step(self, call: Call) -> ServingStep | None:
        """The step that serves a call, if need be once the model has what a first forward leaves; or None."""
        step = self._serving(call)
        at_first = self.known.planned() if step is None else [step]
        if any(isinstance(s, PlannedStep) and s.capture.settle(call) for s in at_first):
            return self._serving(call)
        return step

    def _serving(self, call: Call) -> ServingStep | None:
        """The step that serves a call, or None. Where several do, for batches of other ranks, it is the fastest."""
        serving = self.known.serving(call)
        if not self.sharded:
            step = next(serving, None)
        else:  # of those that run unplanned nothing is known
            step = min(serving, key=lambda step: 0.0 if step.plan is None else step.plan.time_s, default=None)
        return None if step is None else self.known.use(step)

    def _plan_call(self, call: Call, share: Share | None = None) -> ServingStep | Refused:
        """A new step, or why there is none. With gradients of earlier steps there, its plan counts them if one can.

        share: exchanges plans with the other ranks of a group. Raises PlanMismatch if plans may not change.
        """
        if self._held.extra_bytes:
            why = self._why_no_room()
            with self.planner.limits.counting_held_gradients():  # plans that don't count them are no starting point
                step = self._planned_anew(call, (), None, {}, "gradients of an earlier step are there")
            if not isinstance(step, BudgetInfeasible):
                if not isinstance(step, Refused):
                    self._held.are_counted_from_now_by(step, self.known.all)
                    self.voice.warn({} if why is None else {"planned with gradients": f"planned again, because {why}"})
                return step
            self._tell_of_gradients(why or str(step))
            if (known_step := self._known_step(call)) is not None:
                return known_step
        mismatches: Mismatches = {}
        known: Sequence[ServingStep] = ()
        reasons = [self.known.mismatch(step, call, mismatches) for step in self.known.all]
        if None in reasons:  # a provisional step serves the call
            again = {id(step) for step, why in zip(self.known.all, reasons, strict=True) if why is None}
            self.known.keep(lambda step: id(step) not in again)
            reason = "such a call came again, and gets a plan of its own"
        elif reasons and self.on_mismatch == "raise":
            raise PlanMismatch(
                f"this call does not match the plan: {reasons[0]}. Plan it with "
                "memplan.apply on such a sample, or call memplan.remove(model)"
            )
        else:
            known, reason = self.known.all, str(reasons[0]) if reasons else "this is the first call"
        return self._planned_anew(call, known, share, mismatches, reason)

    def _planned_anew(
        self, call: Call, known: Sequence[ServingStep], share: Share | None, mismatches: Mismatches, reason: str
    ) -> ServingStep | Refused:
        """A new step, which is taken in, or why there is none. reason: why it is planned."""
        log.info("planning, because %s", reason)
        unsteady = self._look_for_unsteady(call) if known and not self.is_fixed else None
        if any(isinstance(s, PlannedStep) and s.key.arguments.differ_in_passing(call) for s in known):
            now = ", ".join(call.paths)
            why = "Forward takes *args or **kwargs, so it may tell these apart; pass them alike, in the sample too"
            text = f"planned again, because arguments are passed in another way, now as {now}. {why}"
            self.voice.warn({"passing": text})
        if self.known.kinds == _MANY_KINDS:
            log.warning(
                "the %dth plan for this model; the latest because %s. Each is made once and kept, but takes "
                "a while. Pass numbers that change with the batch as tensors",
                _MANY_KINDS + 1, reason,
            )  # fmt: skip
        began_s = time.monotonic()

        def plan() -> ServingStep | Refused:
            return self._in_few_ways(lambda: self._new_step(call, known, share, mismatches))

        with self.planning():
            step = plan() if unsteady is None else self._without(unsteady, plan)
            if isinstance(step, NothingToTrain) and not self.sharded:
                log.info("calls like this one run unplanned, because %s", step)
                step = UnplannedStep.of(self.model, self.planner.forward, call, call.device_type)
            if isinstance(step, BudgetInfeasible) and (longest := self._longest(call, mismatches)) is not None:
                return step.saying(f". {longest}")
            if isinstance(step, PlannedStep):
                step.capture.left.put_for_good()
            return step if isinstance(step, Refused) else self.add(step, time.monotonic() - began_s)

    def _look_for_unsteady(self, call: Call) -> str | None:
        """Count by which value alone a call differs from the step that ran last.

        Gives a value that has made several plans, so that no plan should depend on it any more.
        """
        last = next(self.known.planned(), None)
        value = None if last is None else last.key.other_value(call)
        if value is None or value in self.planner.capturing.unsteady:
            return None
        self._moved[value] += 1
        is_size = any(value in step.key.lines_of_sizes for step in self.known.planned())
        return value if self._moved[value] == (_MOST_RANGES if is_size else _MOST_VALUES) else None

    def _without(self, unsteady: str, plan: Callable[[], ServingStep | Refused]) -> ServingStep | Refused:
        """A new step that does not depend on an unsteady value, or if there is none, a step that does."""
        self.planner.capturing.depend_on(unsteady, False)
        step = plan()
        if isinstance(step, Refused):
            log.info("each value of %s gets a plan, because %s", unsteady, step)
            self.planner.capturing.depend_on(unsteady, True)
            return plan()
        self.known.keep(lambda known: not isinstance(known, PlannedStep) or not known.key.depends_on({unsteady}))
        log.warning(
            "a value has changed in each of %d plans, so what reads it runs unplanned: %s",
            self._moved[unsteady], unsteady,
        )  # fmt: skip
        return step

    def _in_few_ways(self, plan: Callable[[], ServingStep | Refused]) -> ServingStep | Refused:
        """A new step. Once a call has taken too many branches, the step serves all of them, if it can."""
        capturing, declined = self.planner.capturing, self.known.declined
        if len(declined) < _MOST_BRANCHES or not capturing.decides or not self.voice.is_first("ways"):
            return plan()
        capturing.decide(False)
        step = plan()
        if isinstance(step, Refused):
            log.info("each branch gets a plan of its own, because %s", step)
            capturing.decide(True)
            return plan()
        self.known.keep(lambda known: all(known is not other for other, _ in declined))
        log.warning(
            "forward has taken %d branches for calls like this one, so what branches runs unplanned: %s",
            _MOST_BRANCHES, declined[-1][1],
        )  # fmt: skip
        return step

    def _new_step(
        self, call: Call, known: Sequence[ServingStep], share: Share | None, mismatches: Mismatches
    ) -> ServingStep | Refused:
        """A new step for a call. If it can, it serves calls of other sizes too."""
        same = next(self.known.of_same_kind(call, mismatches), None)
        if same is not None:
            return self.planner.resized(same, call)
        like, varying = self.known.of_other_size(call) if self.takes_any_size else (None, Varying())
        return self.planner.step(call, known, share, like, varying)

    def _longest(self, call: Call, mismatches: Mismatches) -> str | None:
        """A sentence that says which size of such a call fits the budget; None where that is not known."""
        limit_bytes, found = self.planner.limits.budget_bytes, None
        for step in () if limit_bytes is None else self.known.of_same_kind(call, mismatches):
            assert step.sized is not None and limit_bytes is not None
            longest = step.sized.longest_within(step.numbers(call), limit_bytes)
            found = max((n for n in (found, longest) if n is not None), default=None)
            sizes = step.capture.traced.sizes
        if found is None or sizes is None:
            return None
        shapes = [shape for shape, _ in sizes.layouts(found)]
        varying = [f"{n} of {s}" for n, t, s in zip(call.names, call.tensors, shapes, strict=True) if t.shape != s]
        return f"Of calls of other sizes, the longest that fits has {', '.join(varying)}"

    def in_place_of(self, before: ServingStep, after: ServingStep) -> ServingStep:
        """`after`, which this rank alone runs in the place of `before`, on which the ranks had agreed.

        Raises PlanMismatch where other ranks would notice.
        """
        if self.agreement is not None:
            self.agreement.keep(before, after)
        return after

    def add(self, step: ServingStep, took_s: float = 0.0) -> ServingStep:
        """Take in a new step, as the one that was used last. took_s: seconds of planning it."""
        host = self.planner.placement.host
        if self._host is not None and host != self._host:
            self.known.forget()  # they were made for parameters that have moved since
        self._host = host
        self._held.belong_to(self.model, host or ())
        self.known.add(step)
        for new in (step, *step.others):
            self._attend(new)
        if step.plan is not None and not step.provisional:
            self.voice.show_plan(step.plan, took_s)
        return step

    def prepare(self, sample: Sample) -> Plan | None:
        """Plan calls like the sample in full, together with the other ranks that train the model. Returns the plan."""
        if self.sharded and self.agreement is None:
            raise ValueError("the parameters are sharded: plan on one rank, and give the plan to all with plan=")
        call = self.reader.read_sample(sample)
        self.known.keep(lambda step: not step.provisional or step.mismatch(call) is not None)

        def planned(share: Share | None = None) -> ServingStep:
            with self.planning():
                return self.add(step_or_raise(self._new_step(call, (), share, {})))

        if self.agreement is None:
            with errors_of_forward():
                step = self._serving(call) or planned()
        else:
            step = self._agreed(call, self.agreement, planned)
        return step.plan_for(call) if isinstance(step, PlannedStep) else step.plan

    def _why_no_room(self) -> str | None:
        """Why gradients of an earlier step do not fit beside one of the plans; None where they do."""
        if not self._held.extra_bytes:
            return None
        limit_bytes = self.planner.limits.budget_bytes
        peaks = ((step, None if step.plan is None else step.plan.peak_bytes) for step in self.known.all)
        return next((why for s, peak in peaks if (why := self._held.beyond(s, peak, limit_bytes)) is not None), None)

    def _tell_of_gradients(self, why: str) -> None:
        """Warn that no plan counts the gradients, and go on with the plans that there are."""
        self.voice.warn({"gradients": why})
        self._held.extra_bytes = 0

    def tell_of_backward(self, step: PlannedStep, again: bool) -> None:
        """Warn once of what a further backward (`again`) through a forward costs, or of sums unlike eager's."""
        if again:
            self.voice.warn({"again": _AGAIN})
        self.voice.warn(self._shared.news(step, self._held.parameters if self._held.exist or again else ()))
