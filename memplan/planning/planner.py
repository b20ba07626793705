"""From a call to a step that can run: a plan of its own, one that another rank made, or a part of one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplan.capture.capture import Capture, model_device, refuse_wrappers
from memplan.capture.ops.real_results import once_more_where_results_differ
from memplan.capture.trace.call import Call, CallReader, Forward, Sample
from memplan.capture.trace.collector import without_collections
from memplan.capture.trace.raw_trace import Answer, Autocast
from memplan.capture.trace.trace import CompiledCode
from memplan.costs.libraries import make_workspaces, most_library_bytes, multiplies_matrices
from memplan.costs.margin import remember_margin
from memplan.costs.measure import device_name
from memplan.costs.optimizer import optimizer_needs
from memplan.errors import IllegalSchedule, MemplanError, NothingToTrain, PlanMismatch, UnsupportedModel
from memplan.logs import log
from memplan.planning.parts.partial import PartialStep, plan_partially
from memplan.planning.planning import Planning
from memplan.plans.plan import Plan, plan_from_bytes, plan_to_bytes
from memplan.plans.uneven import kind_of, sizes_of, translated, widest
from memplan.problem.budgets import budget_bytes_of, device_bytes, limit_bytes
from memplan.problem.data import Buffers, Graph, Problem
from memplan.problem.schedule import order_of
from memplan.problem.simulate import simulate
from memplan.problem.structure import first_difference, same_structure
from memplan.runtime.host.place import materialise, place
from memplan.runtime.host.updates import UpdatesInBackward
from memplan.runtime.program.execute import TangentLayout
from memplan.runtime.program.lower import Grads, Program, lower
from memplan.runtime.program.step import EagerStep, PlannedStep, WholeStep
from memplan.runtime.ranks.agreement import Share
from memplan.solvers import candidate, textbook
from memplan.solvers.bounds.offload_bound import gather_bound_s
from memplan.units import format_bytes


@dataclass
class Planner(Planning):
    """Steps of one model, one for each kind of call, with a plan each."""

    def step(
        self,
        model: nn.Module,
        forward: Forward,
        sample: Sample | Call,
        known: Sequence[PlannedStep] = (),
        share: Share | None = None,
    ) -> PlannedStep:
        """A step that serves such calls.

        known: steps of other calls. With them a call that is new gets what can be had without a search, provisionally.
        share: where ranks of a group get plans from one another.
        """
        if share is not None:  # others would not go along with a second try
            return self._step(model, forward, sample, known, share)
        return once_more_where_results_differ(self._step)(model, forward, sample, known, None)

    def _step(
        self,
        model: nn.Module,
        forward: Forward,
        sample: Sample | Call,
        known: Sequence[PlannedStep],
        share: Share | None,
    ) -> PlannedStep:
        """One try. Raises OtherResults where the trace turns out to be wrong about what ops give."""
        refusal: UnsupportedModel | None = None
        with without_collections():
            try:
                captured = self.capture(model, forward, sample)
            except UnsupportedModel as error:
                refusal = error
            else:
                found = self._unsearched(model, captured, known, share is not None)
        if refusal is not None:
            return self._uncaptured(model, forward, sample, known, refusal, share is not None)
        if found is not None:
            return found
        if share is None:
            return self._whole(model, captured, self._plan(model, captured))
        return self._whole(model, captured, *self._shared(model, captured, known, share))

    def _unsearched(
        self, model: nn.Module, captured: Capture, known: Sequence[PlannedStep], in_group: bool
    ) -> WholeStep | None:
        """A step whose plan is at hand, or what can be had without a search."""
        in_one_order = in_group and self.gathers is not None  # others may have another schedule at hand
        same = None if in_one_order else self._equal_step(model, captured, known)
        if same is not None:  # what changed is of no concern to the step
            return same
        plan = self._hurried(model, captured, known) if known and not in_group else None
        return None if plan is None else self._whole(model, captured, plan, plan.overhead > 0)

    def _equal_step(self, model: nn.Module, captured: Capture, known: Sequence[PlannedStep]) -> WholeStep | None:
        """The captured step with the plan of one whose ops, values and sizes are the same, be the arguments called
        otherwise."""
        graph = self._homed(captured, model).traced.graph
        for step in known:
            if isinstance(step, WholeStep) and _unnamed(step.plan.problem.graph) == _unnamed(graph):
                problem = dataclasses.replace(step.plan.problem, graph=graph)
                return self._whole(model, captured, dataclasses.replace(step.plan, problem=problem), step.provisional)
        return None

    def join(self, model: nn.Module, step: WholeStep, known: Sequence[PlannedStep], share: Share) -> WholeStep:
        """A step in the place of one that is at hand, with the schedule that ranks which plan now have as well."""
        return self._whole(model, step.capture, self._for_all(model, step.capture, known, share, step.plan.problem))

    def _soon(self, model: nn.Module, captured: Capture, known: Sequence[PlannedStep]) -> tuple[Plan, bool]:
        """A plan, and whether it is provisional."""
        plan = self._hurried(model, captured, known) if known else None
        return plan or self._plan(model, captured), plan is not None and plan.overhead > 0

    def _shared(
        self, model: nn.Module, captured: Capture, known: Sequence[PlannedStep], share: Share
    ) -> tuple[Plan, bool]:
        """The same, from the rank of the group that plans for those with this very step, device and settings."""
        if self.gathers is not None:
            return self._for_all(model, captured, known, share), False
        own: list[tuple[Plan, bool]] = []

        def make(figures: Sequence[Any]) -> bytes:
            own.append(self._soon(model, captured, known))
            plan, provisional = own[0]
            return bytes([provisional]) + plan_to_bytes(plan)

        limit = self._known_limit()
        facts = (*self._facts(captured), sorted(self.host or ()), self.margin, bool(known), limit or self.budget)
        made = share(_digest(facts), limit or 0, make).own
        plan, provisional = own[0] if own else (plan_from_bytes(made[1:]), bool(made[0]))
        self._take_over(plan)  # whoever made it, or later plans would depend on that
        return plan, provisional

    def _for_all(
        self,
        model: nn.Module,
        captured: Capture,
        known: Sequence[PlannedStep],
        share: Share,
        problem: Problem | None = None,
    ) -> Plan:
        """A plan with the schedule that all ranks have, for all must gather in one order.

        It fits the lowest budget of those whose steps differ by sizes alone. Where there are others, they take the
        schedule of those whose steps are the largest. problem: of the step, where it is known.
        """
        assert self.shards is not None
        shards, captured = self.shards, self._homed(captured, model)
        uneven = False

        @functools.cache
        def own() -> Problem:
            return problem or self._problem_with_shards(model, captured, shards)

        def figures() -> Any:
            nonlocal uneven
            uneven = True
            return sizes_of(own())

        def make(of_all: Sequence[Any]) -> bytes:
            most = widest(own(), of_all) if of_all else own()
            if of_all:
                log.info("batches of %d ranks differ in size; one schedule serves them", len(of_all))
            return plan_to_bytes(self._in_known_order(most, known) or self._plan_with_shards(most))

        kind = (kind_of(captured.traced.graph), self.accumulate, self.grads, self.config, self.host_budget)
        exact = _digest((*self._facts(captured), shards.resident_bytes))
        known_limit = self._known_limit()
        made = share(_digest(kind), known_limit or 0, make, exact, figures)
        plan = plan_from_bytes(made.own)
        largest = max(map(plan_from_bytes, made.others), key=_need, default=plan)
        if _need(largest) > _need(plan):
            self.budget_bytes = known_limit
            self._take_over(largest)
            if (found := self._with_schedule(own(), largest, self.budget_bytes or 0)) is not None:
                return found
            log.warning("this rank's batch takes other ops, and can't run in the order of other ranks'")
        self._take_over(plan)
        if not uneven:
            return plan
        found = self._with_schedule(own(), plan, self.budget_bytes or 0)
        if found is None:  # no step peaks above the widest, but copies lie on the host in another way
            raise MemplanError("what the schedule for all ranks offloads does not fit the host budget. Raise it")
        return found

    def _known_limit(self) -> int | None:
        """The budget in bytes, where that is known before there is a plan."""
        return self.budget_bytes or (None if self.budget is None else device_bytes(self.budget))

    def _facts(self, captured: Capture) -> tuple[object, ...]:
        """What a plan depends on, beside the budget."""
        device = captured.traced.device
        needs = None if self.optimizer is None else optimizer_needs(self.optimizer, device)
        return (
            captured.traced.graph, device_name(device), needs, self.accumulate, self.grads, self.costs, self.config,
            self.host_budget, self.link, self.update, self.in_flight, self.surroundings, self.keep_frozen,
        )  # fmt: skip

    def _take_over(self, plan: Plan) -> None:
        """Settle what the first plan decides for the later ones, from a plan that was made elsewhere."""
        if plan.problem.link is not None:
            if self.shards is None:
                self.host = frozenset(v.name for v in plan.problem.graph.values if v.fetched)
            self.link = self.link or plan.problem.link
            if self.host_budget is None:  # plans for other calls may copy as much
                self.host_budget = plan.host_bytes
        self.budget_bytes = self.budget_bytes or plan.problem.budget_bytes

    @once_more_where_results_differ
    def step_for(
        self,
        model: nn.Module,
        forward: Forward,
        call: Call,
        tangents: dict[int, TangentLayout] | None,
        backward: Autocast | None,
        seen: Sequence[Answer],
        known: Sequence[PlannedStep],
    ) -> WholeStep:
        """A step for gradients that arrive at these outputs, in these layouts, and under this autocast.

        seen: what forward read from tensors on this call. known: steps of other calls."""
        captured = self.capture(model, forward, call, tangents, backward, seen)
        same = None if self.gathers is not None else self._equal_step(model, captured, known)
        return same or self._whole(model, captured, self._plan(model, captured))

    def is_same(
        self,
        step: WholeStep,
        model: nn.Module,
        forward: Forward,
        call: Call,
        tangents: dict[int, TangentLayout],
        backward: Autocast,
    ) -> bool:
        """Whether a step has the same ops where backward runs under this autocast."""
        seen = step.capture.answers
        captured = self._homed(self.capture(model, forward, call, tangents, backward, seen), model)
        same = first_difference(step.plan.problem.graph, captured.traced.graph) is None
        return same and step.key.heed(captured.key)

    @once_more_where_results_differ
    def adopt(self, model: nn.Module, forward: Forward, sample: Sample, plan: Plan) -> WholeStep:
        """A step that runs a given plan. Raises PlanMismatch where that is for another step."""
        if self.shards is None:
            self.host = frozenset()
        self._take_over(plan)
        captured = self._homed(self.capture(model, forward, sample), model)
        if not self.keep_frozen and any(v.lasting for v in plan.problem.graph.values):
            raise PlanMismatch(
                "the plan was made with keep_frozen=True. Say so here too, if nothing writes to frozen parameters "
                "through .data, or make a plan without it"
            )
        difference = first_difference(plan.problem.graph, captured.traced.graph)
        if difference is not None:
            if plan.problem.costs.source == "measured":  # the plan may know of results that nobody has seen here yet
                with contextlib.suppress(ValueError):  # ops of a model on the meta device can't run
                    self._costs(model, captured, None, quick=True)
            raise PlanMismatch(f"the plan was made for another training step: {difference}. Make a plan for this one")
        step = self._whole(model, captured, plan)
        step.runner.check_first_runs()  # where its ops were timed, other kernels may have run
        return step

    def instead(self, model: nn.Module, forward: Forward, call: Call) -> Sequence[PlannedStep]:
        """Steps that can be had at once for a call that a step at hand serves, where other ranks can't run that one."""
        return ()

    def looking(self) -> contextlib.AbstractContextManager[None]:
        """To be held while this rank looks at the model by itself: nothing gathers sharded parameters for as long."""
        return contextlib.nullcontext() if self.shards is None else self.shards.tracing()

    def for_copy(self) -> Planner:
        """Plans for a copy of the model. What updates the original in backward knows nothing of its parameters."""
        if self.update == "step":
            return self
        return dataclasses.replace(self, update="step", optimizer=None, updates=None)

    @property
    def may_hold_gradients(self) -> bool:
        """Whether gradients that are there when forward begins are some that plans do not count, and could."""
        theirs = self.shards is not None or self.surroundings.takes_gradients
        return not (self.accumulate or theirs or self.update == "backward")

    @contextlib.contextmanager
    def counting_held_gradients(self) -> Iterator[None]:
        """Plans that are made in here count gradients of earlier steps. A fraction is one of what is held unplanned
        with them."""
        limits = (self.budget_bytes, self.budget_bytes_with_gradients)
        known = self.budget is None or device_bytes(self.budget) is not None
        self.accumulate, self.budget_bytes = True, limits[0] if known else limits[1]
        try:
            yield
        finally:
            if not known:
                self.budget_bytes_with_gradients, self.budget_bytes = self.budget_bytes, limits[0]
            self.accumulate = False

    def learn(self, device: torch.device, margin: float) -> None:
        """Keep this much of the budget free from now on."""
        self.margin = margin
        remember_margin(device, margin)

    def _whole(self, model: nn.Module, captured: Capture, plan: Plan, provisional: bool = False) -> WholeStep:
        captured = self._homed(captured, model)
        if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            if self.init is None:
                raise UnsupportedModel(
                    "the model is on the meta device; give init=, a function of each name and tensor that fills it, or "
                    "materialise the model first"
                )
            materialise(model, self.init, self.host or (), captured.traced.device, self.optimizer)
            self.counted = None
            captured.key.moved()
        if self.update == "backward" and self.updates is None:
            assert self.optimizer is not None
            self.updates = UpdatesInBackward(model, self.optimizer)
        if self.host is not None:
            self.device = captured.traced.device
            place(model, self.host, self.device, self.optimizer)
            captured.key.moved()
        if multiplies_matrices(captured.traced):
            make_workspaces(captured.traced.device)
        step = WholeStep.of(model, captured, _programs(captured, plan, self.grads), plan, provisional, self.gathers)
        if self.updates is not None:
            step.runner.store.updates = self.updates
            self.updates.host = {p for name, p in model.named_parameters() if name in (self.host or ())}
            self.updates.reads_done = (self.transfers or step.runner.store.transfers).reads_done
        if plan.problem.link is not None:
            self.transfers = step.runner.store.transfers = self.transfers or step.runner.store.transfers
        return step

    # -- what there is no time for, or no capture -------------------------------------------------------------------

    def _hurried(self, model: nn.Module, captured: Capture, known: Sequence[PlannedStep]) -> Plan | None:
        """The fastest in the budget of: no plan at all, the schedules of other calls, the textbook's. No search."""
        if self.budget_bytes is None or self.host_budget is not None or self.shards is not None:
            return None
        problem = self.problem(model, captured, quick=True)
        found = list(textbook(problem))
        for step in known:
            if isinstance(step, WholeStep) and same_structure(step.plan.problem.graph, problem.graph):
                found.append(candidate(problem, step.plan.solver, order_of(step.plan.schedule)))
        limit = int(self.budget_bytes / (1 + self.margin))
        fitting = [c for c in found if c.peak_bytes <= limit]
        if not fitting:
            return None
        best, floor = min(fitting, key=lambda c: c.time_s), min(found, key=lambda c: c.peak_bytes)
        problem = dataclasses.replace(problem, budget_bytes=self.budget_bytes)
        return Plan(
            problem, best.schedule, best.timeline, best.solver, problem.baseline_time_s, floor.peak_bytes, floor.time_s
        )

    def _in_known_order(self, problem: Problem, known: Sequence[PlannedStep]) -> Plan | None:
        """The fastest schedule of other steps that serves this one and fits.

        All ranks gather in the order of the steps that they have, and it takes no search.
        """
        limit = self.budget_bytes
        if limit is None:
            return None
        plans = {step.plan.schedule: step.plan for step in known if isinstance(step, WholeStep)}
        most_bytes = int(limit / (1 + self.margin))
        fitting = [self._with_schedule(problem, plan, limit, most_bytes) for plan in plans.values()]
        return min((plan for plan in fitting if plan is not None), key=lambda plan: plan.time_s, default=None)

    def _with_schedule(self, problem: Problem, plan: Plan, limit: int, most_bytes: int | None = None) -> Plan | None:
        """The schedule of a plan for another step, where it serves that within the limit, and peaks at `most_bytes`."""
        graph, planned = problem.graph, plan.problem.graph
        problem = dataclasses.replace(problem, budget_bytes=limit, link=plan.problem.link)
        alike = kind_of(graph) == kind_of(planned)
        schedule = plan.schedule if alike else translated(plan.schedule, planned, graph)
        if schedule is None:
            return None
        try:
            timeline = simulate(problem, schedule)
        except IllegalSchedule:
            return None
        if timeline.peak_bytes > (limit if most_bytes is None else most_bytes):
            return None
        bound_s = min(gather_bound_s(problem), timeline.time_s)
        found = Plan(problem, schedule, timeline, plan.solver, bound_s, timeline.peak_bytes, timeline.time_s)
        fits = self.host_budget is None or found.host_bytes <= limit_bytes(self.host_budget, 0)
        return found if fits else None

    def _uncaptured(
        self,
        model: nn.Module,
        forward: Forward,
        sample: Sample | Call,
        known: Sequence[PlannedStep],
        error: UnsupportedModel,
        in_group: bool,
    ) -> PlannedStep:
        """A step for what can't be captured: unplanned where that fits the budget, else planned in part.

        in_group: other ranks rely on what the step runs.
        """
        if isinstance(error, (NothingToTrain, CompiledCode)):
            raise error
        if self.update == "backward":
            raise UnsupportedModel(f"{error}. With update='backward' it can't be planned in part either") from error
        if self.host:
            raise UnsupportedModel(f"{error}. With parameters on the host it can't run in part either") from error
        if self.host_budget is not None:
            log.warning("nothing is offloaded in such calls, though there is a host budget")
        device = self._device_in_part(model, error)
        refuse_wrappers(model)
        if self.in_flight > 1 or self.surroundings.buffers != Buffers():
            raise UnsupportedModel(
                f"{error}. Planning in parts knows neither of several forwards in flight nor of an engine's buffers, "
                "so a stage of a pipeline has to be captured whole"
            ) from error
        if self.loss_fn is not None or not any(p.requires_grad for p in model.parameters()):
            raise error
        if self.shards is not None:
            raise UnsupportedModel(
                f"{error}\nWith sharded parameters a step has to be captured whole, for what runs unplanned would not "
                "gather. Mend that, leave the parameters whole (ZeRO stage 2 or less), or plan blocks: with DeepSpeed "
                "give attach() a sample, with FSDP call apply_blocks"
            ) from error
        call = sample if isinstance(sample, Call) else CallReader(forward).read_sample(sample)
        call = call.detached(device)
        peak_bytes = self._unplanned_bytes(call, known)
        if peak_bytes is not None and self.budget_bytes is not None and peak_bytes <= self.budget_bytes:
            log.warning(
                "such calls run unplanned, at %s of %s: %s",
                format_bytes(peak_bytes), format_bytes(self.budget_bytes), error,
            )  # fmt: skip
            return EagerStep.of(model, forward, call, device.type)
        step = self._partial(model, forward, call, device, error)
        step.strict = in_group
        return step

    def _device_in_part(self, model: nn.Module, error: UnsupportedModel) -> torch.device:
        """Where the model runs, for it has to run to be planned in part."""
        if self.device is not None and any(t.device != self.device for t in (*model.parameters(), *model.buffers())):
            raise UnsupportedModel(
                f"{error}. Such a step can be planned in part, without offload, once the model is on the device: call "
                f"model.to({str(self.device)!r}) before"
            ) from error
        return self.device or model_device(model)

    def _partial(
        self, model: nn.Module, forward: Forward, call: Call, device: torch.device, error: UnsupportedModel
    ) -> PartialStep:
        """A step of which only parts are planned."""
        state_bytes, update_bytes = self._optimizer_needs(device)
        held_bytes = state_bytes + self.surroundings.held_bytes + most_library_bytes(device)
        if self.accumulate:
            held_bytes += sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)

        def limit(unplanned_bytes: int, resident_bytes: int) -> int:
            if self.budget_bytes is None:
                assert self.budget is not None
                self.budget_bytes = budget_bytes_of(self.budget, unplanned_bytes, resident_bytes)
            return self.budget_bytes

        try:
            step = plan_partially(
                model,
                forward,
                call,
                limit,
                reason=str(error),
                costs="measure" if self.costs == "measure" else "estimate",
                extra_resident_bytes=held_bytes,
                update_bytes=update_bytes + self.surroundings.after_bytes,
                config=self.config,
                decides=self.decides,
            )
        except MemplanError:
            raise
        except Exception as failure:  # the model itself fails on the sample
            raise error from failure
        rows = step.plan.units
        again = [row.name for row in rows if row.way != "keep"]
        log.warning(
            "planned in %d parts, because %s. %d of them recompute%s",
            len(rows), str(error).partition("\n")[0], len(again), f": {', '.join(again[:4])} ..." if again else "",
        )  # fmt: skip
        return step

    def _unplanned_bytes(self, call: Call, known: Sequence[PlannedStep]) -> int | None:
        """What such a call holds unplanned, as far as the plan of an equal one tells."""
        for step in known:
            if isinstance(step, WholeStep) and step.key.mismatch(call, hooks=False) is None:
                return int(step.plan.baseline_peak_bytes)
        return None


def _unnamed(graph: Graph) -> Graph:
    """The graph without the names of inputs, which are those of arguments."""
    values = (dataclasses.replace(v, name="") if v.role == "input" else v for v in graph.values)
    return dataclasses.replace(graph, values=tuple(values))


def _need(plan: Plan) -> tuple[int, str]:
    """How large a step is, and something that tells equally large ones apart."""
    return plan.baseline_peak_bytes, _digest(kind_of(plan.problem.graph))


def _digest(facts: object) -> str:
    """The same text for equal facts."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _programs(captured: Capture, plan: Plan, grads: Grads) -> tuple[Program, ...]:
    """The plan as a program, and once more for `out.sum().backward()` where the same schedule serves it."""
    program = lower(plan.schedule, captured.traced, grads)
    if captured.expanded is None or not same_structure(captured.expanded.graph, captured.traced.graph):
        return (program,)
    problem = dataclasses.replace(plan.problem, graph=captured.expanded.graph)
    other = lower(plan.schedule, captured.expanded, grads)
    fits = simulate(problem, plan.schedule).peak_bytes <= max(plan.peak_bytes, problem.budget_bytes or 0)
    return (program, other) if fits and other.forward.code == program.forward.code else (program,)
