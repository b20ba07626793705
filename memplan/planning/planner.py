"""From a call to a step that can run: captured, given a plan, lowered. Or a step that runs as it is."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence

from torch import nn

from memplan.capture.analysis.sized import at_sizes
from memplan.capture.analysis.traced import Traced
from memplan.capture.capture import Capture
from memplan.capture.ops.layout import Layout
from memplan.capture.ops.real_results import note_results, once_more_where_results_differ, or_refusal
from memplan.capture.ops.sizes import Varying
from memplan.capture.ops.ways import OtherResults, way_of
from memplan.capture.trace.call import Call, Forward, Sample
from memplan.capture.trace.raw_trace import Autocast
from memplan.capture.trace.stand_ins import without_collections
from memplan.costs.optimizer import make_workspaces, multiplies_matrices
from memplan.errors import BudgetInfeasible, PlanMismatch, Refused, UnsupportedModel, or_raise
from memplan.logs import log
from memplan.planning.capturing import Capturing
from memplan.planning.choosing import WithoutSearch
from memplan.planning.group_plans import GroupPlans
from memplan.planning.limits import Limits
from memplan.planning.placement import Placement
from memplan.planning.plan_search import PlanSearch
from memplan.planning.problems import Problems
from memplan.planning.remedies import Remedies
from memplan.planning.settings import Settings
from memplan.planning.unplanned_steps import UnplannedSteps
from memplan.plans.plan import Plan, first_difference, structure
from memplan.problem.data import Problem, Surroundings
from memplan.problem.simulate import simulate
from memplan.runtime.program.checkpointed import layers_of
from memplan.runtime.program.execute import Runner
from memplan.runtime.program.lower import lower
from memplan.runtime.program.program import Grads, Program
from memplan.runtime.program.step import PlannedStep, ServingStep, step_or_raise
from memplan.runtime.ranks.agreement import Share

_Captured = Capture | UnsupportedModel
_CaptureAgain = Callable[..., _Captured]
_Found = tuple[Plan, Capture] | Refused


class Planner:
    """Steps of one model, for each kind of call, with a plan each.

    Each subject has one owner, which alone changes it once `apply` has set it up: `limits` has the budget, `placement`
    knows where parameters live, `capturing` when forward is run on the sample. grouped: other ranks plan the same.

    A refusal is returned in place of a plan or a step. `join`, and `step` with a `share`, raise it, because errors of
    one rank are raised on all. `problem`, `adopt` and `is_same`, which no other step could replace, raise it too.
    Where ops are timed in it, `adopt` returns an op without room, and other results than were traced.
    """

    def __init__(self, model: nn.Module, forward: Forward, settings: Settings, grouped: bool = False) -> None:
        self.model, self.forward, self.settings = model, forward, settings
        self.limits = Limits(model, settings)
        self.placement = Placement(model, settings)
        self.capturing = Capturing(model, forward, settings, self.placement, grouped)
        self._problems = Problems(model, settings, self.limits, self.placement)
        self._plans = PlanSearch(self._problems)
        self._without_search = WithoutSearch(self._problems)
        self._group = GroupPlans(self._problems, self._plans, self._without_search)
        self._unplanned = UnplannedSteps(forward, self._problems)
        self._given: Plan | None = None  # by the user, with a schedule that serves other sizes too

    def check_optimizer(self) -> None:
        """Warn where the optimizer has none of the model's parameters. With update="backward", raise ValueError."""
        optimizer, parameters = self.settings.optimizer, {id(p) for p in self.model.parameters()}
        groups = [] if optimizer is None else optimizer.param_groups
        if optimizer is None or any(id(p) in parameters for group in groups for p in group["params"]):
            return
        problem = "optimizer= has none of the model's parameters"
        if self.settings.update == "backward":
            raise ValueError(f"{problem}, so update='backward' has nothing to update. Give the one that trains it")
        if self.settings.surroundings == Surroundings():  # an engine's optimizer has copies of its own
            log.warning("%s; its state is counted, and is not taken to be that of parameters on the host", problem)

    def problem(self, sample: Sample | Call) -> Problem:
        """The captured step with its costs, for work on solvers."""
        return self._problems.problem(or_raise(self.capturing.capture(sample)))

    def plan(self, sample: Sample | Call) -> Plan | Refused:
        """A plan, from the best schedule that fits the budget."""
        found = self._plan(sample)
        return self._with_advice(found, sample) if isinstance(found, Refused) else self._saying_more(*found)

    @once_more_where_results_differ
    def _plan(self, sample: Sample | Call) -> _Found:
        capture = functools.partial(self._dry_capture, sample)
        return self._fitting_plan(sample, capture(), capture)

    @once_more_where_results_differ
    def explore(self, sample: Sample | Call) -> tuple[Plan, ...] | Refused:
        """Plans along the curve of peak against time, from the smallest peak to the unplanned step."""
        captured = self._dry_capture(sample)
        if isinstance(captured, UnsupportedModel):
            return captured
        curve = self._plans.curve(captured)
        return curve if isinstance(curve, Refused) else tuple(self._saying_more(plan, captured) for plan in curve)

    def _dry_capture(self, sample: Sample | Call) -> _Captured:
        """A captured step that may never run. Where its costs are only estimated no kernels are compiled either."""
        return self.capturing.capture(sample, dry=self.settings.costs != "measure")

    def _fitting_plan(self, sample: Sample | Call, captured: _Captured, capture: _CaptureAgain) -> _Found:
        """The plan of a captured step. Where no plan fits the budget, islands are captured with layers checkpointed."""
        while isinstance(captured, Capture):
            if not self.settings.wants_least or not self.capturing.checkpoint_islands(sample):
                plan = self._plans.plan(captured)
                if not isinstance(plan, BudgetInfeasible) or not self.capturing.checkpoint_islands(sample):
                    return plan if isinstance(plan, Refused) else (plan, captured)
            captured = capture()
        return captured

    def step(
        self,
        sample: Sample | Call,
        known: Sequence[ServingStep] = (),
        share: Share | None = None,
        like: PlannedStep | None = None,
        varying: Varying = frozenset(),
    ) -> ServingStep | Refused:
        """A step that serves calls like this one.

        - known: steps of other calls. With them a new call gets a plan that needs no search, provisionally.
        - share: exchanges plans with the other ranks of a group. Each rank plans steps for many sizes on its own; with
          sharded parameters there are none.
        - like: a step for such a call of another size: backward starts from the same outputs.
        - varying: sizes that vary from call to call. The step then serves all of them, if it can be captured so.
        """
        if share is not None and self.settings.shards is not None:
            varying = Varying()  # the gradients of all schedules of a capture arrive in one order
        elif not known and not varying:
            varying = self.capturing.declared(self.capturing.call_of(sample))
        found: ServingStep | Refused | None = None
        if varying:
            found = or_refusal(self._step, sample, known, None, like, varying)
            if isinstance(way := way_of(found), OtherResults):
                log.info("each size gets a plan of its own, because %s", found)
                note_results(way.found, way.unsteady)  # what ops give at other sizes nobody knows
                found = None
        if share is not None:  # others would not go along with a second try, and would wait for advice
            return step_or_raise(found or self._step(sample, known, share))
        found = found or once_more_where_results_differ(self._step)(sample, known, None)
        if isinstance(found, UnsupportedModel) and isinstance(way_of(found), OtherResults):
            found = self._unplanned.step(sample, known, found)
        return self._with_advice(found, sample) if isinstance(found, Refused) and not known else found

    def _with_advice(self, refusal: Refused, sample: Sample | Call) -> Refused:
        """The refusal of a first plan. If nothing fits the budget, remedies are planned, and it says which would."""
        limit_bytes = self.limits.budget_bytes
        if not isinstance(refusal, BudgetInfeasible) or limit_bytes is None or self.settings.on_infeasible != "advise":
            return refusal
        call = self.capturing.call_of(sample)

        def plan_with(settings: Settings, call: Call | Sample) -> Plan | Refused:
            other = Planner(self.model, self.forward, settings, grouped=self.capturing.grouped)
            other.limits.set_margin(self.limits.margin)
            other.placement.network = self.placement.network
            return other.plan(call)

        return Remedies(self.settings, self.model, call, refusal, limit_bytes, plan_with).error()

    @once_more_where_results_differ
    def resized(self, step: PlannedStep, call: Call) -> PlannedStep | Refused:
        """Another step for calls of any size, from a search at the size of this one."""
        traced = at_sizes(step.capture.traced, step.numbers(call))
        return self._sized_step(dataclasses.replace(step.capture, traced=traced, call=call))

    def _sized_step(self, captured: Capture) -> PlannedStep | Refused:
        """A step for calls of any size, with others beside it that suit longer and shorter calls."""
        given = () if self._given is None else self._without_search.at_other_sizes(captured, self._given)
        plans = given or self._plans.ladder(captured)
        if isinstance(plans, Refused):
            return plans
        later = tuple(self._unlowered(captured, plan) for plan in plans[1:])
        return dataclasses.replace(self._lowered(captured, plans[0]), others=later)

    def _step(
        self,
        sample: Sample | Call,
        known: Sequence[ServingStep],
        share: Share | None,
        like: PlannedStep | None = None,
        varying: Varying = frozenset(),
    ) -> ServingStep | Refused:
        """One try of `step`. Raises a Refusal with `OtherResults` if the trace is wrong about results of ops.

        A call that can't be captured runs unplanned. Another gets a plan that needs no search, if there is one, else
        with a `share` the plan of all ranks, and without it plans from a search, or none around its islands.
        """
        arrived, backward = (None, None) if like is None else (like.tangents, like.capture.options.backward)
        capture = functools.partial(self.capturing.capture, sample, backward=backward, varying=varying, like=arrived)
        with without_collections():
            captured = capture()
            if isinstance(captured, UnsupportedModel):
                return self._unplanned.step(sample, known, captured)
            found = self._quick_step(captured, known, share)
        collective = next((op for op in captured.traced.graph.ops if op.is_collective), None)
        if collective is not None and share is None and self.capturing.trains_alone:
            return UnsupportedModel(  # other ranks may run collectives in another order
                f"{collective.layer or 'the model'} runs the collective {collective.kind}, and each rank would plan "
                "when by itself. Pass the ranks that run it together as group=, then all of them run one plan"
            )
        if found is not None:
            return found
        if share is None:
            step = self._searched_step(sample, captured, capture)
            return self._or_unplanned(step, sample, known, captured.islands) if captured.islands else step
        return self._lowered(captured, *self._shared_plan(captured, known, share))

    def _searched_step(self, sample: Sample | Call, captured: Capture, capture: _CaptureAgain) -> PlannedStep | Refused:
        """The step of a capture, with plans from a search. capture: captures it once more."""
        of_one_size: _Captured = captured
        if captured.traced.sizes is not None:
            step = self._sized_step(self.capturing.at_largest(captured))
            if not isinstance(step, BudgetInfeasible) or not captured.islands:
                return step
            capture = functools.partial(capture, varying=Varying())
            of_one_size = capture()  # it has other ways to fit
        found = self._fitting_plan(sample, of_one_size, capture)
        return found if isinstance(found, Refused) else self._lowered(found[1], found[0])

    def _or_unplanned(
        self, step: PlannedStep | Refused, sample: Sample | Call, known: Sequence[ServingStep], reasons: Sequence[str]
    ) -> ServingStep | Refused:
        """The step of a capture with islands, or an unplanned one where no plan fits.

        With the budget "min" the step runs unplanned if that takes less. It may, if the layers that run differ from
        step to step: an island around them then saves at one time what all of them save. The budget is then one byte
        less than such a plan needs.
        """
        unplanned = functools.partial(self._unplanned.step, sample, known, UnsupportedModel("; ".join(reasons)))
        if isinstance(step, BudgetInfeasible):
            other = unplanned()
            return step if isinstance(other, Refused) else other  # the refusal says what a plan would need
        if isinstance(step, Refused) or not self.settings.wants_least or step.capture.traced.sizes is not None:
            return step
        islands = step.capture.traced.islands
        if not any(i.varies and i.module and layers_of(self.model.get_submodule(i.module)) for i in islands):
            return step
        limit_bytes = self.limits.budget_bytes
        self.limits.reset(step.plan.peak_bytes - 1)
        other = unplanned(below_bytes=step.plan.peak_bytes)
        if isinstance(other, Refused):
            self.limits.reset(limit_bytes)
            return step
        return other

    def _quick_step(self, captured: Capture, known: Sequence[ServingStep], share: Share | None) -> PlannedStep | None:
        """A step by the plan of an equal one, or else provisionally by a simple one."""
        if captured.traced.sizes is not None or (share is not None and self.settings.shards is not None):
            return None
        equal = self._equal_step(captured, known)  # where what changed is of no concern to the step
        if equal is not None or share is not None or not known:
            return equal
        plan = self._without_search.hurried(captured, known)
        return None if plan is None else self._lowered(captured, plan, plan.overhead > 0)

    def _equal_step(self, captured: Capture, known: Sequence[ServingStep]) -> PlannedStep | None:
        """The captured step with the plan of one that is equal."""
        found = self._without_search.of_equal_step(captured, known)
        return None if found is None else self._lowered(captured, *found)

    def _shared_plan(self, captured: Capture, known: Sequence[ServingStep], share: Share) -> tuple[Plan, bool]:
        """A plan that other ranks run too, and whether it is provisional."""
        if self.settings.shards is not None:
            problem = lambda: self._problems.with_shards(self.placement.homed(captured))  # noqa: E731
            return self._group.for_all(captured, known, share, problem), False

        def soon() -> tuple[Plan | Refused, bool]:
            plan = self._without_search.hurried(captured, known) if known else None
            return plan or self._plans.plan(captured), plan is not None and plan.overhead > 0

        return self._group.shared(captured, bool(known), share, soon)

    def join(self, step: PlannedStep, known: Sequence[ServingStep], share: Share) -> PlannedStep:
        """A step in the place of a known one, with the schedule that other ranks plan now."""
        return self._lowered(step.capture, self._group.for_all(step.capture, known, share, lambda: step.plan.problem))

    @once_more_where_results_differ
    def step_for(
        self,
        call: Call,
        tangents: dict[int, Layout] | None,
        backward: Autocast | None,
        seen: Sequence[object],
        known: Sequence[ServingStep],
        varying: Varying = frozenset(),
    ) -> PlannedStep | Refused:
        """A step for gradients that arrive at these outputs, in these layouts, and under this autocast.

        - tangents: outputs at which gradients arrive, with their layouts.
        - backward: the autocast that backward runs under.
        - seen: what forward read from tensors on this call.
        - known: steps of other calls.
        - varying: sizes that vary from call to call.
        """
        capture = functools.partial(self.capturing.capture, call, tangents, backward, seen, varying=varying)
        captured = capture()
        if isinstance(captured, UnsupportedModel):
            return captured
        may_be_known = captured.traced.sizes is None and self.settings.shards is None
        same = self._equal_step(captured, known) if may_be_known else None
        return same or self._searched_step(call, captured, capture)

    def is_same(self, step: PlannedStep, call: Call, tangents: dict[int, Layout], backward: Autocast) -> bool:
        """Whether the ops of a step stay the same where backward runs under this autocast."""
        captured = or_raise(self.capturing.capture(call, tangents, backward, step.capture.answers))
        same = first_difference(step.plan.problem.graph, captured.traced.graph) is None
        return same and step.key.heed(captured.key)

    @once_more_where_results_differ
    def adopt(self, sample: Sample, plan: Plan) -> PlannedStep:
        """A step that runs a given plan, at the sizes of the sample.

        Raises PlanMismatch where the plan is for another step, or peaks beyond its budget at these sizes.
        """
        if self.settings.shards is None:
            self.placement.decide(frozenset())
        self._group.take_over(plan)
        captured = or_raise(self.capturing.capture(sample))
        if not self.settings.keep_frozen and any(v.lasting for v in plan.problem.graph.values):
            raise PlanMismatch(
                "the plan was made with keep_frozen=True. Say so here too, if nothing writes to frozen parameters "
                "through .data, or make a plan without it"
            )
        difference = first_difference(plan.problem.graph, captured.traced.graph)
        if difference is not None and self.capturing.checkpoint_islands(sample):
            captured = or_raise(self.capturing.capture(sample))
            difference = first_difference(plan.problem.graph, captured.traced.graph)
        if self.settings.takes_any_size and self.placement.host_budget is None:
            self._given = plan
            if difference is not None:
                plans = self._without_search.at_other_sizes(captured, plan)
                plan, difference = (plans[0], None) if plans else (plan, difference)
        if difference is not None:
            if plan.problem.costs.source != "estimated":  # the plan may know of results that nobody has seen here yet
                with contextlib.suppress(ValueError):  # ops of a model on the meta device can't run
                    self._problems.costs(captured, quick=True)
            advice = "Make a plan for this one"
            if plan.exact == "program" and plan.problem.costs.source == "estimated":
                advice += ' with costs="measure": a dry run takes fused groups to write over all that they may'
            raise PlanMismatch(f"the plan was made for another training step: {difference}. {advice}")
        step = self._lowered(captured, plan)
        step.runner.check_first_runs()  # where its ops were timed, other kernels may have run
        return step

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """A context for the time in which this rank runs the model to plan it: sharded parameters are not gathered."""
        shards = self.settings.shards
        return contextlib.nullcontext() if shards is None else shards.tracing()

    def _lowered(self, captured: Capture, plan: Plan, provisional: bool = False) -> PlannedStep:
        """The plan lowered to programs, with the parameters moved to where the plan has them."""
        step = self._unlowered(captured, plan, provisional)
        _ = step.runner.programs  # which are made now
        return step

    def _unlowered(self, captured: Capture, plan: Plan, provisional: bool = False) -> PlannedStep:
        """The planned step, with programs that are made when it first runs."""
        captured = self.placement.homed(captured)  # the plan may have decided homes
        plan = self._saying_more(plan, captured)
        self.placement.move(captured)
        if captured.traced.device.type == "cuda" and multiplies_matrices(captured.traced):
            make_workspaces(captured.traced.device)
        grads, sized = self.settings.grads, self._problems.sized(captured, plan)
        captured = dataclasses.replace(captured, call=captured.call.without_tensors())  # or the batch would stay alive
        programs = functools.partial(_programs, captured.traced, captured.expanded, plan, grads)
        trained = tuple(n for n, p in self.model.named_parameters() if p.requires_grad)
        store = self.placement.store(captured.traced)
        runner = Runner(captured, programs, plan, store, trained if grads == "edges" else ())
        if plan.problem.costs.source != "measured":  # some ops have not run here
            runner.check_first_runs()
        return PlannedStep(plan, captured, runner, provisional, sized)

    def _saying_more(self, plan: Plan, captured: Capture) -> Plan:
        """The plan, which says what is not checked, what margin it keeps and which calls run as they are."""
        unchecked, margin, islands = captured.key.unchecked, self.limits.margin, captured.islands
        if (plan.unchecked, plan.margin, plan.islands) == (unchecked, margin, islands):
            return plan  # one that was given stays that
        return dataclasses.replace(plan, unchecked=unchecked, margin=margin, islands=islands)


def _programs(traced: Traced, expanded: Traced | None, plan: Plan, grads: Grads) -> tuple[Program, ...]:
    """The plan as a program, and a second one for `out.sum().backward()` where the schedule fits that too."""
    program = lower(plan.schedule, traced, grads, steering=plan.steering)
    if expanded is None or structure(expanded.graph) != structure(traced.graph):
        return (program,)
    problem = dataclasses.replace(plan.problem, graph=expanded.graph)
    if simulate(problem, plan.schedule).peak_bytes > max(plan.peak_bytes, problem.budget_bytes or 0):
        return (program,)
    other = lower(plan.schedule, expanded, grads, steering=plan.steering)
    return (program, other) if other.forward.code == program.forward.code else (program,)
