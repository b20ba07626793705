"""From a model and a call to a plan: capture, costs, problem, schedule."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.analysis.traced import Traced
from memplan.capture.attributes.attributes import AttributesKept, SetsAttribute
from memplan.capture.capture import Capture, capture, model_device
from memplan.capture.ops.layout import storage_key
from memplan.capture.ops.real_results import once_more_where_results_differ
from memplan.capture.shards import Shard, Shards
from memplan.capture.trace.call import Call, CallReader, Forward, Sample
from memplan.capture.trace.raw_trace import Answer, Autocast
from memplan.capture.trace.trace import OpenBranch
from memplan.config import Config
from memplan.costs.libraries import library_bytes
from memplan.costs.measure import estimate, measure
from memplan.costs.optimizer import fused_host_update_s_per_byte, host_update_s_per_byte, optimizer_needs, update_needs
from memplan.errors import UnsupportedModel
from memplan.logs import log
from memplan.planning.choosing import infeasible, no_room, plan_of_front, plan_of_residency, plan_with_gathers
from memplan.planning.homes import Movable, movables, with_homes, with_shards
from memplan.planning.progress import ProgressLine
from memplan.planning.residency import all_names, choose_homes, least_peak_bytes, least_resident_bytes
from memplan.planning.update_ops import with_updates
from memplan.plans.plan import Plan
from memplan.problem.budgets import BudgetLike, budget_bytes_of, device_bytes, limit_bytes
from memplan.problem.data import Budget, Buffers, Costs, Link, Problem, Roofline, Surroundings
from memplan.problem.simulate import unplanned
from memplan.runtime.host.fetch import FetchedWhereUsed
from memplan.runtime.host.place import Init
from memplan.runtime.host.transfers import Transfers, measure_link
from memplan.runtime.host.updates import UpdatesInBackward, refuse_update_in_backward
from memplan.runtime.parts.rehearsal import OneForward, one_forward
from memplan.runtime.program.execute import TangentLayout
from memplan.runtime.program.gathers import Gathers
from memplan.runtime.program.lower import Grads
from memplan.solvers import Front, solve_front

LossFunction = Callable[..., Any]
Update = Literal["step", "backward"]
CostSource = Literal["measure", "estimate"] | Roofline

_MUCH = 0.05  # of a step, that could be saved
_HOST_POINTS = 12  # budgets of a curve with copies, each a search of its own


@dataclass
class Planning:
    """Plans of one model's steps under one budget.

    budget_bytes: the budget on the device once the first plan has told what a fraction means; the other is that of
    plans that count gradients of earlier steps, where those are not counted in general. margin: how much more than
    predicted the device has been seen to hold; plans keep that much below the budget where they can. host: names
    of the parameters that live on the host, once the first plan with a host budget has decided that. transfers: the
    copies of all steps, which share host memory. updates: what updates parameters in backward. gathers: of sharded
    parameters, by all steps; all ranks then run the plan that the lowest of their budgets allows. counted: parameters
    that the optimizer knows, by name: a copy of the model has others. decides: where forward branches on what it
    computes, or fills caches, it is run once on the sample, and planned with the branches that it takes and the caches.
    The other fields are arguments of `memplan.apply`.
    """

    budget: BudgetLike | None
    loss_fn: LossFunction | None = None
    optimizer: torch.optim.Optimizer | None = None
    device: torch.device | None = None
    costs: CostSource = "measure"
    accumulate: bool = False
    grads: Grads = "surface"
    config: Config = field(default_factory=Config)
    host_budget: int | str | None = None
    link: Link | None = None
    update: Update = "step"
    in_flight: int = 1
    shards: Shards | None = None
    surroundings: Surroundings = field(default_factory=Surroundings)
    init: Init | None = None
    keep_frozen: bool = False
    budget_bytes: int | None = None
    budget_bytes_with_gradients: int | None = None
    margin: float = 0.0
    host: frozenset[str] | None = None
    transfers: Transfers | None = None
    updates: UpdatesInBackward | None = None
    gathers: Gathers | None = None
    counted: dict[str, nn.Parameter] | None = None
    decides: bool = False

    def __post_init__(self) -> None:
        if self.budget is not None:
            device_bytes(self.budget)  # a bad one is refused before anything runs
        if self.host_budget is None and isinstance(self.budget, Budget):
            self.host_budget = self.budget.host
        if self.host_budget is not None:
            if isinstance(self.host_budget, float):
                raise TypeError(f"host_budget is an int or a str such as '64GiB', got {self.host_budget!r}")
            limit_bytes(self.host_budget, 0)
            if self.surroundings.keeps_parameters:
                self.host = frozenset()
        self._check_flight()
        if self.link is not None:
            _check_link(self.link)
        if self.optimizer is not None and not hasattr(self.optimizer, "param_groups"):
            raise TypeError(f"optimizer is a torch.optim.Optimizer, got {self.optimizer!r}")
        if self.update not in ("step", "backward"):
            raise ValueError(f"update must be 'step' or 'backward', got {self.update!r}")
        if self.update == "backward":
            refuse_update_in_backward(self.optimizer, self.accumulate or self.in_flight > 1, self.grads)
        if self.shards is not None:
            self._check_shards(self.shards)

    def _check_flight(self) -> None:
        if type(self.in_flight) is not int or self.in_flight < 1:
            raise ValueError(f"in_flight is a count of forwards, 1 or more, got {self.in_flight!r}")
        if self.in_flight > 1:  # the first backward's gradients are there while the others run
            self.accumulate = not self.surroundings.takes_gradients
            if self.keep_frozen:
                raise ValueError("keep_frozen= is for one forward in flight; with in_flight= leave it out")

    def _check_shards(self, shards: Shards) -> None:
        if self.grads == "edges":
            raise ValueError(
                'grads="edges" gives all gradients at the end of backward, when sharded parameters are empty. Use '
                'grads="surface" with shards='
            )
        if self.keep_frozen:
            raise ValueError("keep_frozen= is for parameters that live on the host, and sharded ones do not")
        for name, given in (("update='backward'", self.update == "backward"), ("in_flight=", self.in_flight > 1)):
            if given:
                raise ValueError(f"{name} is not for sharded parameters, whose gradients and updates are an engine's")
        self.gathers = Gathers(shards)

    @property
    def places(self) -> bool:
        """Whether the first plan decides where parameters live."""
        return self.host_budget is not None and not self.surroundings.keeps_parameters

    def check_optimizer(self, model: nn.Module) -> None:
        """Say so where the optimizer belongs to another model. Raises ValueError where it is to update this one."""
        parameters = {id(p) for p in model.parameters()}
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        if self.optimizer is None or any(id(p) in parameters for group in groups for p in group["params"]):
            return
        problem = "optimizer= has none of the model's parameters"
        if self.update == "backward":
            raise ValueError(f"{problem}, so update='backward' has nothing to update. Give the one that trains it")
        log.warning("%s; its state is counted, and is not taken to be that of parameters on the host", problem)

    @once_more_where_results_differ
    def plan(self, model: nn.Module, forward: Forward, sample: Sample | Call) -> Plan:
        """A plan, from the best schedule that fits the budget."""
        return self._plan(model, self.capture(model, forward, sample))

    @once_more_where_results_differ
    def explore(self, model: nn.Module, forward: Forward, sample: Sample | Call) -> tuple[Plan, ...]:
        """Plans from the smallest peak to the unplanned step."""
        captured = self.capture(model, forward, sample)
        problem = self.problem(model, captured)
        if self.host_budget is not None:
            return self._explore_with_host(model, captured, problem)
        front = self._front(problem)
        chosen = front.spread(self.config.points)
        return tuple(plan_of_front(problem, front, point, point.peak_bytes) for point in chosen)

    @private.without_saved_tensor_hooks()
    def capture(
        self,
        model: nn.Module,
        forward: Forward,
        sample: Sample | Call,
        tangents: dict[int, TangentLayout] | None = None,
        backward: Autocast | None = None,
        seen: Sequence[Answer] = (),
    ) -> Capture:
        """The captured step. seen: what forward read from tensors on this very call, where an earlier capture tells."""
        trace = functools.partial(
            capture, model, forward, sample, self.loss_fn, self.device, tangents, self.shards, backward
        )
        runs = self.decides and not any(t.is_meta for t in (*model.parameters(), *model.buffers()))

        def traced() -> Capture:
            try:
                return trace(seen=seen or None)
            except OpenBranch:
                if not runs:
                    raise
                return trace(seen=self._one_forward(model, forward, sample).answers)

        try:
            captured = traced()
        except SetsAttribute as error:
            if not runs:
                raise
            captured = self._with_caches(model, self._one_forward(model, forward, sample), traced, error)
        if self.update == "step":
            return captured
        assert self.optimizer is not None
        needs = update_needs(self.optimizer, captured.traced.device)
        if self.updates is not None:  # a later one of their plans
            needs = {p: needs.get(p, 0) for p in self.updates.parameters}
        update_bytes = {name: needs[p] for name, p in model.named_parameters() if p in needs}
        expanded = captured.expanded
        return dataclasses.replace(
            captured,
            traced=with_updates(captured.traced, update_bytes),
            expanded=None if expanded is None else with_updates(expanded, update_bytes),
        )

    def _with_caches(
        self, model: nn.Module, first: OneForward, traced: Callable[[], Capture], refusal: SetsAttribute
    ) -> Capture:
        """The step as it is once a first forward has left its caches. Raises the refusal where it leaves more that each
        run does not set anew."""
        left, caches = first.left, first.caches
        if len(left.contents) > len(caches.contents) or not (caches.values or caches.contents):
            raise refusal
        with AttributesKept(model):
            caches.put()
            captured = traced()
            anew = {(id(captured.key.attributes(owner)), key) for owner, key in captured.traced.template.attributes}
            known = {(id(table), key) for table, key, _ in caches.values}
            if not {(id(table), key) for table, key, _ in left.values} <= anew | known:
                raise refusal
            return dataclasses.replace(captured, left=caches)

    def _one_forward(self, model: nn.Module, forward: Forward, sample: Sample | Call) -> OneForward:
        """Run forward where its parameters are, to see what it does. Raises ForwardFails."""
        run = forward if self.loss_fn is None else functools.partial(self.loss_fn, model)
        call = sample if isinstance(sample, Call) else CallReader(run).read_sample(sample)
        if self.device is None or not self.host:
            with torch.enable_grad():
                return one_forward(model, run, call.detached(None if self.device is None else model_device(model)))
        away = [p for name, p in model.named_parameters() if name in self.host]
        with torch.no_grad():
            return one_forward(model, run, call.detached(self.device), FetchedWhereUsed(away, self.device, model))

    def problem(self, model: nn.Module, captured: Capture, quick: bool = False) -> Problem:
        """The captured step with its costs. The budget, where it is known in bytes, is kept while ops are timed."""
        limit = self.budget_bytes or (None if self.budget is None else device_bytes(self.budget))
        traced = captured.traced
        needs = (0, 0)  # with a host budget it depends on where parameters live, unless they are sharded
        if self.optimizer is not None and (self.host_budget is None or self.shards is not None):
            needs = self._optimizer_needs(traced.device)
        costs = self._costs(model, captured, limit, quick)
        held, later = self._around(traced)
        problem = Problem(
            traced.graph, costs, None, needs[0] + held, self.accumulate, needs[1] + later, in_flight=self.in_flight,
            takes_gradients=self.surroundings.takes_gradients and self.grads == "surface",
            knows_optimizer=self.optimizer is not None,
        )  # fmt: skip
        if self.accumulate and self.grads == "edges":  # gradients are added to earlier ones after backward only
            problem = dataclasses.replace(
                problem, accumulate=False, extra_resident_bytes=problem.resident_bytes - traced.graph.resident_bytes
            )
        return problem

    def _around(self, traced: Traced) -> tuple[int, int]:
        """Bytes that an engine and libraries hold beside the step: throughout, and for a while after it."""
        held, later = _buffer_bytes(self.surroundings.buffers, self.in_flight, traced)
        held += library_bytes(traced)
        return held + self.surroundings.held_bytes, later + self.surroundings.after_bytes

    def _optimizer_needs(self, device: torch.device, without: Sequence[torch.Tensor] = ()) -> tuple[int, int]:
        """Bytes of its state, and what its step allocates after backward."""
        if self.optimizer is None:
            return 0, 0
        state_bytes, step_bytes = optimizer_needs(self.optimizer, device, without)
        return state_bytes, step_bytes if self.update == "step" else 0

    def _costs(self, model: nn.Module, captured: Capture, limit: int | None, quick: bool) -> Costs:
        if isinstance(self.costs, Roofline):
            return estimate(captured.traced, self.costs)
        if self.costs == "estimate":
            return estimate(captured.traced)
        if self.costs != "measure":
            raise ValueError(f"costs must be 'measure' or 'estimate', got {self.costs!r}")
        with AttributesKept(model):
            if captured.left is not None:  # buffers that were none
                captured.left.put()
            tensors = dict([*model.named_parameters(), *model.named_buffers()])
        sharded = self._sharded(model)
        if self.init is None and any(t.is_meta for t in tensors.values()):
            raise ValueError(
                "ops of a model on the meta device can't be timed: say costs=memplan.Roofline(...) for a device of "
                'known speed, or costs="estimate"'
            )
        inputs = captured.call.tensors

        def resident(kind: str, name: str, position: int) -> torch.Tensor | None:
            if name in sharded and kind == "parameter":
                return None
            tensor = inputs[position] if kind == "input" else tensors[name]
            if tensor.is_meta and self.init is not None:
                tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                self.init(name, tensor)
            return private.plain(tensor).to(captured.traced.device)

        away = all_names(self._movables(model, captured.traced))  # an op is timed with those alone that it reads
        timed = with_homes(captured.traced, away, frozenset()) if away else captured.traced
        return measure(timed, resident, limit, progress=sys.stderr.isatty(), quick=quick)

    def _plan(self, model: nn.Module, captured: Capture) -> Plan:
        """The fastest known schedule within the budget."""
        if self.shards is not None:
            return self._plan_with_shards(self._problem_with_shards(model, self._homed(captured, model), self.shards))
        problem = self.problem(model, captured)
        if self.host_budget is not None:
            return self._plan_with_host(model, captured, problem)
        front = self._front(problem)
        limit = self._limit(problem, unplanned(problem).peak_bytes)
        chosen = front.best(int(limit / (1 + self.margin))) or front.floor
        if chosen.peak_bytes > limit:
            raise infeasible(problem, front.floor, limit)
        return plan_of_front(problem, front, chosen, limit)

    def _plan_with_host(self, model: nn.Module, captured: Capture, problem: Problem) -> Plan:
        """The same where values may be offloaded, and parameters may live on the host."""
        parts, problem_of = self._homes(model, captured, problem)
        plain, room_for = problem_of(frozenset()), 1 + self.margin
        limit, host_limit = self._limit(plain, unplanned(plain).peak_bytes), limit_bytes(self.host_budget or 0, 0)
        alone = None if self.host or least_resident_bytes(plain) > limit else self._front(plain)
        free = alone is not None and alone.keep_all.peak_bytes <= int(limit / room_for)
        front = alone if alone is not None and (free or not parts) else self._front(problem_of(all_names(parts)))
        least = least_peak_bytes(all_names(parts), front, problem_of)
        search = functools.partial(choose_homes, parts, front, alone, problem_of, host_limit, self.host)
        chosen = search(int(limit / room_for)) or search(limit)
        if chosen is None:
            raise no_room(plain, least, limit, host_limit)
        if self.keep_frozen:
            staying = search(max(int(limit / room_for), chosen.found.timeline.peak_bytes), stays=True)
            if staying is not None and staying.found.timeline.time_s < chosen.found.timeline.time_s:
                chosen = staying
        if self.host is None:
            self._tell_of_slow_updates(chosen.problem, chosen.found.timeline.time_s)
        self.host = chosen.host
        return plan_of_residency(chosen, (front,) if alone is None else (front, alone), limit, least)

    def _tell_of_slow_updates(self, problem: Problem, time_s: float) -> None:
        """Say so where the CPU takes much longer to update what lives on the host than it has to."""
        slow_s = problem.host_update_s
        if self.optimizer is None or self.costs != "measure" or slow_s <= _MUCH * time_s:
            return
        fused = fused_host_update_s_per_byte(self.optimizer)
        if fused is None:
            return
        fused_s = slow_s * fused / problem.host_update_s_per_byte
        if slow_s - fused_s > _MUCH * time_s:
            log.warning(
                "of a step of %.3g s the CPU takes %.3g s to update parameters that live on the host; with "
                "%s(..., fused=True) it takes %.3g s",
                time_s, slow_s, type(self.optimizer).__name__, fused_s,
            )  # fmt: skip

    def _explore_with_host(self, model: nn.Module, captured: Capture, problem: Problem) -> tuple[Plan, ...]:
        """Plans from the smallest peak that copies reach within the host budget to the unplanned step."""
        parts, problem_of = self._homes(model, captured, problem)
        alone = self._front(problem_of(frozenset()))
        front = self._front(problem_of(all_names(parts))) if parts else alone
        least, most = least_peak_bytes(all_names(parts), front, problem_of), alone.keep_all.peak_bytes
        host_limit = limit_bytes(self.host_budget or 0, 0)
        found: list[Plan] = []
        count = min(self.config.points, _HOST_POINTS)
        for limit in sorted({least + (most - least) * step // count for step in range(count + 1)}):
            chosen = choose_homes(parts, front, alone, problem_of, host_limit, self.host, limit)
            if chosen is not None and (not found or chosen.found.timeline.time_s < found[-1].time_s):
                peak_bytes = chosen.found.timeline.peak_bytes
                found = [plan for plan in found if plan.peak_bytes < peak_bytes]
                found.append(plan_of_residency(chosen, (front, alone), peak_bytes, least))
        return tuple(found)

    def _homes(
        self, model: nn.Module, captured: Capture, problem: Problem
    ) -> tuple[tuple[Movable, ...], Callable[[frozenset[str]], Problem]]:
        """Parameters that may live on the host, and the step's problem where those of these names do."""
        problem = dataclasses.replace(problem, link=self.link or measure_link(captured.traced.device))
        parts = self._movables(model, captured.traced)
        stuck = sorted((self.host or frozenset()) - all_names(parts))
        if stuck:
            raise UnsupportedModel(
                f"parameter {stuck[0]} lives on the host, and this call writes to it or returns it. Apply memplan with "
                "this call as the sample"
            )
        counted = self.counted = self.counted or dict(model.named_parameters())
        lasting = self._lasting(model)

        def on_host(names: frozenset[str]) -> list[torch.Tensor]:
            return [counted[name] for name in names if name in counted]

        def state_bytes(left_out: list[torch.Tensor], device: torch.device) -> tuple[int, int]:
            return self._optimizer_needs(device, left_out)

        update_s = 0.0
        if self.optimizer is not None and not self.accumulate and self.in_flight == 1:  # else steps share one update
            update_s = host_update_s_per_byte(self.optimizer, self.costs == "measure")

        @functools.cache  # the optimizer's step takes a second to run on fakes
        def problem_of(names: frozenset[str]) -> Problem:
            here = state_bytes(on_host(names), captured.traced.device)
            others: list[torch.Tensor] = [p for name, p in counted.items() if name not in names]
            there = state_bytes(others, torch.device("cpu")) if names else (0, 0)
            graph = with_homes(captured.traced, names, lasting).graph
            held, later = self._around(captured.traced)
            if self.accumulate and self.grads == "edges":  # gradients are added to earlier ones after backward only
                held += sum(graph.values[g].size_bytes for g in graph.gradients if graph.values[g].home == "device")
            return dataclasses.replace(
                problem, graph=graph, extra_resident_bytes=here[0] + held, update_bytes=here[1] + later,
                extra_host_bytes=there[0], host_update_s_per_byte=update_s,
            )  # fmt: skip

        return parts, problem_of

    def _movables(self, model: nn.Module, traced: Traced) -> tuple[Movable, ...]:
        """Parameters that may live on the host."""
        if self.host_budget is None or self.surroundings.keeps_parameters:
            return ()
        odd = {name for name, p in model.named_parameters() if not private.is_ordinary(p)}  # packed weights, say
        return tuple(m for m in movables(traced) if odd.isdisjoint(m.names))

    def _problem_with_shards(self, model: nn.Module, captured: Capture, shards: Shards) -> Problem:
        problem = self.problem(model, captured)
        link = None if self.host_budget is None else self.link or measure_link(captured.traced.device)
        return dataclasses.replace(
            problem, gather=shards.speed, accumulate=True, link=link,
            extra_resident_bytes=problem.extra_resident_bytes + shards.resident_bytes,
        )  # fmt: skip

    def _plan_with_shards(self, problem: Problem) -> Plan:
        """The same where sharded parameters are gathered to be read, and values may be offloaded."""
        front = self._front(problem)  # of the step without what is gathered
        gathered_bytes = problem.all_on_device.resident_bytes - problem.resident_bytes
        limit = self._limit(problem, front.keep_all.peak_bytes + gathered_bytes)
        host_limit = 0 if self.host_budget is None else limit_bytes(self.host_budget, 0)
        nowhere = frozenset[str]()  # no parameter moves to the host
        least = least_peak_bytes(nowhere, front, lambda _: problem)
        search = functools.partial(choose_homes, (), front, None, lambda _: problem, host_limit, nowhere)
        chosen = search(int(limit / (1 + self.margin))) or search(limit)
        if chosen is None:
            raise no_room(problem, least, limit, None if self.host_budget is None else host_limit)
        return plan_with_gathers(chosen, front, limit, least)

    def _homed(self, captured: Capture, model: nn.Module) -> Capture:
        """The capture with the parameters where they live."""
        if not self.host and self.shards is None:
            return captured
        sharded, lasting = self._sharded(model), self._lasting(model)

        def homed(traced: Traced) -> Traced:
            return with_homes(traced, self.host or (), lasting) if self.shards is None else with_shards(traced, sharded)

        expanded = captured.expanded
        return dataclasses.replace(
            captured, traced=homed(captured.traced), expanded=None if expanded is None else homed(expanded)
        )

    def _lasting(self, model: nn.Module) -> frozenset[str]:
        """Names of parameters of which copies may stay on the device between steps: nothing trains their memory."""
        if not self.keep_frozen:
            return frozenset()
        parameters = dict(model.named_parameters(remove_duplicate=False))
        trained = {storage_key(p) for p in parameters.values() if p.requires_grad}
        return frozenset(n for n, p in parameters.items() if not p.requires_grad and storage_key(p) not in trained)

    def _sharded(self, model: nn.Module) -> dict[str, Shard]:
        """What is known of sharded parameters, by name."""
        if self.shards is None:
            return {}
        return {n: shard for n, p in model.named_parameters() if (shard := self.shards.shard(p)) is not None}

    def _front(self, problem: Problem) -> Front:
        """The best schedules that the configured search finds, told about on a terminal where that takes long."""
        with ProgressLine(sys.stderr) as line:
            front = solve_front(dataclasses.replace(problem, budget_bytes=self.budget_bytes), self.config, line.show)
        if front.truncated:
            log.warning("the search was stopped before it was done; the best schedule so far is taken")
        return front

    def _limit(self, problem: Problem, unplanned_bytes: int) -> int:
        if self.budget_bytes is None:
            assert self.budget is not None
            self.budget_bytes = budget_bytes_of(self.budget, unplanned_bytes, problem.resident_bytes)
        return self.budget_bytes


def _check_link(link: Link) -> None:
    if not isinstance(link, Link):
        raise TypeError(f"link is a memplan.Link(to_host_bytes_per_s, to_device_bytes_per_s), got {link!r}")
    if min(link.to_host_bytes_per_s, link.to_device_bytes_per_s) <= 0 or link.latency_s < 0:
        raise ValueError(f"a link copies more than 0 bytes a second, and takes no less than 0 s more, got {link!r}")


def _buffer_bytes(buffers: Buffers, in_flight: int, traced: Traced) -> tuple[int, int]:
    """Bytes that an engine's copies of inputs and outputs take beyond what the steps hold by themselves: throughout,
    and once nothing is in flight."""
    values = traced.graph.values
    output_bytes = sum(values[v].size_bytes for v in traced.graph.outputs)
    ends = [g.value for g in traced.gradients if any(name.startswith("input ") for name, _ in g.nodes)]
    of_kind = (
        (buffers.inputs, in_flight, traced.graph.input_bytes),
        (buffers.outputs, in_flight, output_bytes),
        (buffers.output_gradients, 1, sum(values[v].size_bytes for v in traced.graph.tangents)),
        (buffers.input_gradients, 1, sum(values[v].size_bytes for v in ends)),
    )
    held_bytes = sum(max(0, copies - own) * size for copies, own, size in of_kind if copies is not None)
    return held_bytes, buffers.later_outputs * output_bytes
