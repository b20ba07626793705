"""From a call to a step that can run: captured, given a plan, lowered. Or a step that runs as it is."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from memplan.capture.analysis.sized import at_sizes
from memplan.capture.capture import Capture
from memplan.capture.collector import without_collections
from memplan.capture.ops.island_ops import IslandKernel
from memplan.capture.ops.real_results import note_results, once_more_where_results_differ
from memplan.capture.ops.sizes import DataSize, Dimension, Varying, all_sizes
from memplan.capture.ops.ways import OtherResults, Refusal
from memplan.capture.trace.call import Call, Forward, Sample
from memplan.capture.trace.raw_trace import Answer, Autocast
from memplan.costs.libraries import make_workspaces, multiplies_matrices
from memplan.errors import BudgetInfeasible, PlanMismatch, UnsupportedModel
from memplan.logs import log
from memplan.planning.capturing import Capturing
from memplan.planning.group_plans import GroupPlans
from memplan.planning.limits import Limits
from memplan.planning.placement import Placement
from memplan.planning.plan_search import PlanSearch
from memplan.planning.problems import Problems
from memplan.planning.remedies import Remedies
from memplan.planning.settings import Settings
from memplan.planning.unplanned_steps import UnplannedSteps
from memplan.planning.without_search import WithoutSearch
from memplan.plans.plan import Plan
from memplan.problem.data import Problem, Surroundings
from memplan.problem.simulate import simulate
from memplan.problem.structure import first_difference, same_structure
from memplan.runtime.program.checkpointed import layers_of
from memplan.runtime.program.lower import lower
from memplan.runtime.program.program import Grads, Program
from memplan.runtime.program.step import PlannedStep, ServingStep
from memplan.runtime.program.tangents import TangentLayout
from memplan.runtime.ranks.agreement import Share


class Planner:
    """Steps of one model, one for each kind of call, with a plan each.

    Each subject has one owner, and only that changes it: `limits` has the budget, `placement` knows where parameters
    live, `capturing` knows when forward is run on the sample. decides, looks: see `Capturing`.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        settings: Settings,
        *,
        decides: bool = False,
        looks: bool = True,
    ) -> None:
        self.model, self.forward, self.settings = model, forward, settings
        self.limits = Limits(model, settings)
        self.placement = Placement(model, settings)
        self.capturing = Capturing(model, forward, settings, self.placement, decides, looks)
        self._problems = Problems(model, settings, self.limits, self.placement)
        self._plans = PlanSearch(settings, self.limits, self.placement, self._problems)
        self._without_search = WithoutSearch(self.limits, self.placement, self._problems)
        self._group = GroupPlans(settings, self.limits, self.placement, self._plans, self._without_search)
        self._unplanned = UnplannedSteps(
            model, forward, settings, self.limits, self.placement, self._problems.optimizer_needs
        )
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

    # -- plans ------------------------------------------------------------------------------------------------------

    def problem(self, sample: Sample | Call) -> Problem:
        """The captured step with its costs, for work on solvers."""
        return self._problems.problem(self.capturing.capture(sample))

    @once_more_where_results_differ
    def plan(self, sample: Sample | Call) -> Plan:
        """A plan, from the best schedule that fits the budget."""
        with self._advice(sample):
            look = functools.partial(self._to_look_at, sample)
            captured, plan = self._planned(sample, look(), look)
            return self._saying_more(plan, captured)

    @once_more_where_results_differ
    def explore(self, sample: Sample | Call) -> tuple[Plan, ...]:
        """Plans along the curve of peak against time, from the smallest peak to the unplanned step."""
        return self._plans.curve(self._to_look_at(sample))

    def _to_look_at(self, sample: Sample | Call) -> Capture:
        """A captured step. Where its costs are only estimated nothing is compiled either."""
        return self.capturing.capture(sample, dry=self.settings.costs != "measure")

    def _planned(self, sample: Sample | Call, captured: Capture, again: Callable[[], Capture]) -> tuple[Capture, Plan]:
        """A captured step and its plan. Where no plan fits the budget, islands are captured with layers checkpointed.

        again: captures the step once more. Raises BudgetInfeasible.
        """
        spare = functools.partial(self.capturing.spare, sample)
        if captured.islands and self.settings.budget == "min" and spare():
            captured = again()
        try:
            return captured, self._plans.plan(captured)
        except BudgetInfeasible:
            if not captured.islands or not spare():
                raise
        captured = again()
        return captured, self._plans.plan(captured)

    # -- steps ------------------------------------------------------------------------------------------------------

    def step(
        self,
        sample: Sample | Call,
        known: Sequence[ServingStep] = (),
        share: Share | None = None,
        like: PlannedStep | None = None,
        varying: Varying = frozenset(),
    ) -> ServingStep:
        """A step that serves calls like this one.

        - known: steps of other calls. With them a new call gets a plan that needs no search, provisionally.
        - share: exchanges plans with the other ranks of a group. A step for many sizes needs none, unless parameters
          are sharded.
        - like: a step for such a call of another size: backward starts from the same outputs.
        - varying: sizes that vary from call to call. The step then serves all of them, if it can be captured so.
        """
        together = share is not None and self.settings.shards is not None
        if not known and not varying and not together:
            varying = self._declared(self.capturing.call_of(sample))
        alone = not known and share is None  # other ranks would wait for advice
        with self._advice(sample) if alone else contextlib.nullcontext():
            if varying and not together:  # the gradients of all schedules of a capture arrive in one order
                try:
                    return self._step(sample, known, None, like, varying)
                except Refusal as error:
                    if not isinstance(error.way, OtherResults):
                        raise
                    log.info("such calls are planned for each size, because %s", error)
                    note_results(error.way.found, error.way.unsteady)  # what ops give at other sizes nobody knows
            if share is not None:  # others would not go along with a second try
                return self._step(sample, known, share)
            try:
                return once_more_where_results_differ(self._step)(sample, known, None)
            except Refusal as error:
                if not isinstance(error.way, OtherResults):
                    raise
                refusal = error.with_traceback(None)  # or its frames would keep the capture
            return self._unplanned.step(sample, known, refusal)

    @contextlib.contextmanager
    def _advice(self, sample: Sample | Call) -> Iterator[None]:
        """A context for a first plan. Where nothing fits the budget, the error says what would make it fit."""
        try:
            yield
        except BudgetInfeasible as error:
            limit_bytes = self.limits.budget_bytes
            if self.settings.on_infeasible != "advise" or limit_bytes is None:
                raise
            call = self.capturing.call_of(sample)

            def plan_with(settings: Settings, call: Call | Sample) -> Plan:
                other = Planner(
                    self.model, self.forward, settings, decides=self.capturing.decides, looks=self.capturing.looks
                )
                other.limits.keep_free(self.limits.margin)
                return other.plan(call)

            raise Remedies(self.settings, self.model, call, error, limit_bytes, plan_with).error() from None

    def _declared(self, call: Call) -> Varying:
        """The sizes of a call of which the user says that they vary. Raises ValueError where there are none such."""
        dynamic = self.settings.dynamic
        if dynamic == "all":
            return all_sizes(call.tensors)
        found = set()
        for name, ranges in dynamic.items() if isinstance(dynamic, Mapping) else ():
            for index in ranges:
                position = call.names.index(name) if name in call.names else -1
                if position < 0 or not -call.tensors[position].dim() <= index < call.tensors[position].dim():
                    raise ValueError(
                        f"dynamic= names dimension {index} of {name!r}; tensors are {', '.join(call.names)}"
                    )
                found.add(Dimension(position, index % call.tensors[position].dim()))
        return frozenset(found)

    def _at_largest(self, captured: Capture) -> Capture:
        """The captured step at the largest sizes of which the user says that they occur."""
        dynamic, traced = self.settings.dynamic, captured.traced
        if not isinstance(dynamic, Mapping) or traced.sizes is None:
            return captured
        names, most = captured.call.names, []
        for source, here in zip(traced.sizes.sources, traced.sizes.here, strict=True):
            if isinstance(source, DataSize) or source.is_stride:  # nobody says how large they get
                return captured
            ranges = dynamic.get(names[source.tensor], {})
            dims = captured.call.tensors[source.tensor].dim()
            bounds = {index % dims: high for index, (_, high) in ranges.items()}
            most.append(bounds.get(source.index, here))
        numbers = tuple(most)
        broken = traced.sizes.mismatch(numbers)
        if broken is not None:
            log.warning("dynamic= is planned for the sample's sizes first, because %s", broken)
            return captured
        pairs = zip(captured.call.tensors, traced.sizes.layouts(numbers), strict=True)
        tensors = [
            t.new_zeros(()).expand(shape).contiguous().requires_grad_(t.requires_grad) for t, (shape, _) in pairs
        ]
        return dataclasses.replace(captured, traced=at_sizes(traced, numbers), call=captured.call.filled(tensors))

    def resized(self, step: PlannedStep, call: Call) -> PlannedStep:
        """Another step for calls of any size, from a search at the size of this one."""
        traced = at_sizes(step.capture.traced, step.numbers(call))
        return self._sized(dataclasses.replace(step.capture, traced=traced, call=call))

    def _sized(self, captured: Capture) -> PlannedStep:
        """A step for calls of any size, with others beside it that suit longer and shorter calls."""
        plans: tuple[Plan, ...] = ()
        if self._given is not None:
            plans = self._without_search.at_other_sizes(self._problems.problem(captured), self._given)
        first, *others = [self._whole(captured, p) for p in plans or self._plans.ladder(captured)]
        return dataclasses.replace(first, others=tuple(others))

    def _step(
        self,
        sample: Sample | Call,
        known: Sequence[ServingStep],
        share: Share | None,
        like: PlannedStep | None = None,
        varying: Varying = frozenset(),
    ) -> ServingStep:
        """One try of `step`. Raises a Refusal with `OtherResults` if the trace is wrong about results of ops."""
        refusal: UnsupportedModel | None = None
        with without_collections():
            try:
                arrived, backward = (None, None) if like is None else (like.tangents, like.capture.backward)
                capture = functools.partial(
                    self.capturing.capture, sample, backward=backward, varying=varying, like=arrived
                )
                captured = capture()
            except UnsupportedModel as error:
                refusal = error
            else:
                sized = captured.traced.sizes is not None
                found = None if sized else self._unsearched(captured, known, share is not None)
        if refusal is not None:
            return self._unplanned.step(sample, known, refusal)
        if share is None and self.capturing.looks:
            _refuse_collectives(captured)
        if found is not None:
            return found
        if sized and captured.islands and share is None:
            try:
                return self._sized(self._at_largest(captured))
            except BudgetInfeasible:  # a step of this size alone has other ways to fit
                capture = functools.partial(capture, varying=Varying())
                captured = capture()
        elif sized:
            return self._sized(self._at_largest(captured))
        if share is None and captured.islands:
            return self._with_islands(sample, known, captured, capture)
        if share is None:
            return self._whole(captured, self._plans.plan(captured))
        if self.settings.shards is not None:
            return self._whole(captured, self._for_all(captured, known, share))
        soon = functools.partial(self._soon, captured, known)
        return self._whole(captured, *self._group.shared(captured, bool(known), share, soon))

    def _with_islands(
        self,
        sample: Sample | Call,
        known: Sequence[ServingStep],
        captured: Capture,
        capture: Callable[[], Capture],
    ) -> ServingStep:
        """A step of a capture with islands. It runs unplanned where no plan fits.

        capture: captures it once more. With the budget "min" the step runs unplanned if that takes less. It may, if the
        layers that run differ from step to step: an island around them then saves at one time what all of them save.
        """
        refusal = UnsupportedModel("; ".join(captured.islands))
        unplanned = functools.partial(self._unplanned.step, sample, known, refusal)
        try:
            captured, plan = self._planned(sample, captured, capture)
        except BudgetInfeasible:
            with contextlib.suppress(UnsupportedModel, BudgetInfeasible):
                return unplanned()
            raise
        calls = (k.target.island for k in captured.traced.kernels if isinstance(k.target, IslandKernel))
        branching = [i for i in calls if i.varies and i.module and layers_of(self.model.get_submodule(i.module))]
        if branching and self.settings.budget == "min":
            limit_bytes = self.limits.budget_bytes
            try:
                self.limits.reset(plan.peak_bytes - 1)
                return unplanned()
            except (UnsupportedModel, BudgetInfeasible):
                self.limits.reset(limit_bytes)
        return self._whole(captured, plan)

    def _unsearched(self, captured: Capture, known: Sequence[ServingStep], in_group: bool) -> PlannedStep | None:
        """A step whose plan needs no search; None where there is none."""
        in_one_order = in_group and self.settings.shards is not None  # other ranks may know another schedule
        same = None if in_one_order else self._equal_step(captured, known)
        if same is not None:  # what changed is of no concern to the step
            return same
        plan = self._without_search.hurried(captured, known) if known and not in_group else None
        return None if plan is None else self._whole(captured, plan, plan.overhead > 0)

    def _equal_step(self, captured: Capture, known: Sequence[ServingStep]) -> PlannedStep | None:
        """The captured step with the plan of one that is equal."""
        found = self._without_search.equal_step(self.placement.homed(captured), known)
        return None if found is None else self._whole(captured, found[1], found[0].provisional)

    def _soon(self, captured: Capture, known: Sequence[ServingStep]) -> tuple[Plan, bool]:
        """A plan, and whether it is provisional."""
        plan = self._without_search.hurried(captured, known) if known else None
        return plan or self._plans.plan(captured), plan is not None and plan.overhead > 0

    def join(self, step: PlannedStep, known: Sequence[ServingStep], share: Share) -> PlannedStep:
        """A step in the place of a known one, with the schedule that other ranks plan now."""
        homed = self.placement.homed(step.capture)
        plan = self._group.for_all(homed, known, share, lambda: step.plan.problem)
        return self._whole(step.capture, plan)

    def _for_all(self, captured: Capture, known: Sequence[ServingStep], share: Share) -> Plan:
        """A plan with the schedule that all ranks run."""
        homed = self.placement.homed(captured)
        return self._group.for_all(homed, known, share, lambda: self._problems.with_shards(homed))

    @once_more_where_results_differ
    def step_for(
        self,
        call: Call,
        tangents: dict[int, TangentLayout] | None,
        backward: Autocast | None,
        seen: Sequence[Answer],
        known: Sequence[ServingStep],
        varying: Varying = frozenset(),
    ) -> PlannedStep:
        """A step for gradients that arrive at these outputs, in these layouts, and under this autocast.

        - tangents: outputs at which gradients arrive, with their layouts.
        - backward: the autocast that backward runs under.
        - seen: what forward read from tensors on this call.
        - known: steps of other calls.
        - varying: sizes that vary from call to call.
        """
        capture = functools.partial(self.capturing.capture, call, tangents, backward, seen, varying=varying)
        captured = capture()
        if captured.traced.sizes is not None:
            return self._sized(captured)
        same = None if self.settings.shards is not None else self._equal_step(captured, known)
        return same or self._whole(*self._planned(call, captured, capture))

    def is_same(
        self,
        step: PlannedStep,
        call: Call,
        tangents: dict[int, TangentLayout],
        backward: Autocast,
    ) -> bool:
        """Whether the ops of a step stay the same where backward runs under this autocast."""
        seen = step.capture.answers
        captured = self.capturing.capture(call, tangents, backward, seen)
        captured = self.placement.homed(captured)
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
        captured = self.placement.homed(self.capturing.capture(sample))
        if not self.settings.keep_frozen and any(v.lasting for v in plan.problem.graph.values):
            raise PlanMismatch(
                "the plan was made with keep_frozen=True. Say so here too, if nothing writes to frozen parameters "
                "through .data, or make a plan without it"
            )
        difference = first_difference(plan.problem.graph, captured.traced.graph)
        if difference is not None and captured.islands and self.capturing.spare(sample):
            captured = self.placement.homed(self.capturing.capture(sample))
            difference = first_difference(plan.problem.graph, captured.traced.graph)
        if self.settings.takes_any_size and self.placement.host_budget is None:
            self._given = plan
            if difference is not None:
                plans = self._without_search.at_other_sizes(self._problems.problem(captured), plan)
                plan, difference = (plans[0], None) if plans else (plan, difference)
        if difference is not None:
            if plan.problem.costs.source != "estimated":  # the plan may know of results that nobody has seen here yet
                with contextlib.suppress(ValueError):  # ops of a model on the meta device can't run
                    self._problems.costs(captured, quick=True)
            advice = "Make a plan for this one"
            if plan.exact == "program" and plan.problem.costs.source == "estimated":
                advice += ' with costs="measure": a dry run takes fused groups to write over all that they may'
            raise PlanMismatch(f"the plan was made for another training step: {difference}. {advice}")
        step = self._whole(captured, plan)
        step.runner.check_first_runs()  # where its ops were timed, other kernels may have run
        return step

    def looking(self) -> contextlib.AbstractContextManager[None]:
        """A context for the time in which this rank runs the model to plan it: sharded parameters are not gathered."""
        shards = self.settings.shards
        return contextlib.nullcontext() if shards is None else shards.tracing()

    def _whole(self, captured: Capture, plan: Plan, provisional: bool = False) -> PlannedStep:
        """The plan lowered to programs, with the parameters moved to where the plan has them."""
        captured = self.placement.homed(captured)
        plan = self._saying_more(plan, captured)
        self.placement.move(captured)
        if multiplies_matrices(captured.traced):
            make_workspaces(captured.traced.device)
        programs = _programs(captured, plan, self.settings.grads)
        sized = self._problems.sized(captured, plan)
        step = PlannedStep.of(self.model, captured, programs, plan, provisional, self.placement.gathers, sized)
        self.placement.serve(step)
        return step

    def _saying_more(self, plan: Plan, captured: Capture) -> Plan:
        """The plan, which says what is not checked, what margin it keeps and which calls run as they are."""
        unchecked, margin, islands = captured.key.unchecked, self.limits.margin, captured.islands
        if (plan.unchecked, plan.margin, plan.islands) == (unchecked, margin, islands):
            return plan  # one that was given stays that
        return dataclasses.replace(plan, unchecked=unchecked, margin=margin, islands=islands)


def _refuse_collectives(captured: Capture) -> None:
    """Refuse collectives in a step that this rank plans alone: other ranks may run them in another order."""
    for op in captured.traced.graph.ops:
        if op.is_collective:
            raise UnsupportedModel(
                f"{op.layer or 'the model'} runs the collective {op.kind}, and each rank would plan when by itself. "
                "Pass the ranks that run it together as group=, then all of them run one plan"
            )


def _programs(captured: Capture, plan: Plan, grads: Grads) -> tuple[Program, ...]:
    """The plan as a program, and a second one for `out.sum().backward()` where the schedule fits that too."""
    program = lower(plan.schedule, captured.traced, grads, steering=plan.steering)
    if captured.expanded is None or not same_structure(captured.expanded.graph, captured.traced.graph):
        return (program,)
    problem = dataclasses.replace(plan.problem, graph=captured.expanded.graph)
    other = lower(plan.schedule, captured.expanded, grads, steering=plan.steering)
    fits = simulate(problem, plan.schedule).peak_bytes <= max(plan.peak_bytes, problem.budget_bytes or 0)
    return (program, other) if fits and other.forward.code == program.forward.code else (program,)
