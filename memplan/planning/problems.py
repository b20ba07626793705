"""From a captured step to a problem: what its ops cost, and what else is on the device."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.analysis.sized import at_sizes
from memplan.capture.analysis.traced import Traced
from memplan.capture.attributes.attributes_kept import AttributesKept
from memplan.capture.capture import Capture
from memplan.capture.ops.layout import storage_key
from memplan.capture.ops.sizes import Numbers
from memplan.costs.known_costs import estimate
from memplan.costs.measure import measure
from memplan.costs.optimizer import OptimizerMemory, host_update_s_per_byte, optimizer_memory, workspaces
from memplan.errors import UnsupportedModel
from memplan.planning.homes import Movable, all_names, graph_with_homes, with_homes
from memplan.planning.limits import Limits
from memplan.planning.placement import Placement
from memplan.planning.settings import Settings
from memplan.plans.plan import Plan
from memplan.problem.caching_allocator import Segment
from memplan.problem.data import Costs, Problem, Requests
from memplan.problem.reserved import GRADIENT, STATE, holder_of, state_of
from memplan.runtime.program.step import SizedPlan


class Problems:
    """Makes the problems of one model's steps, from what the owners of each subject know."""

    def __init__(self, model: nn.Module, settings: Settings, limits: Limits, placement: Placement) -> None:
        self.model, self.settings, self.limits, self.placement = model, settings, limits, placement
        self._before: tuple[Segment, ...] | None = None  # as in `Requests`

    def problem(self, captured: Capture, quick: bool = False) -> Problem:
        """The captured step with its costs. Timing ops keeps within the budget, where that is known in bytes.

        quick: as for `costs`.
        """
        settings, traced = self.settings, captured.traced
        needs = OptimizerMemory()  # with a host budget it depends on where parameters live, unless that is decided
        if self.placement.host_budget is None or settings.shards is not None:
            needs = self.optimizer(self._device(traced), self._named(self.placement.host or ()))
        surface = settings.grads == "surface"
        problem = Problem(
            traced.graph, self.costs(captured, quick), accumulate=self.limits.accumulate and surface,
            in_flight=settings.in_flight, takes_gradients=settings.surroundings.takes_gradients and surface,
            knows_optimizer=settings.optimizer is not None,
        )  # fmt: skip
        return self._with_needs(problem, captured, needs)

    def _with_needs(self, problem: Problem, captured: Capture, needs: OptimizerMemory) -> Problem:
        """The problem with what an optimizer, an engine and libraries hold beside its graph."""
        traced = captured.traced
        values, settings, in_flight = traced.graph.values, self.settings, self.settings.in_flight
        around = settings.surroundings
        output_bytes = sum(values[v].size_bytes for v in traced.graph.outputs)
        ends = [g.value for g in traced.gradients if any(name.startswith("input ") for name, _ in g.nodes)]
        # Copies of inputs and outputs that an engine has, and those that the steps hold by themselves.
        of_kind = (
            (around.buffers.inputs, in_flight, traced.graph.input_bytes),
            (around.buffers.outputs, in_flight, output_bytes),
            (around.buffers.output_gradients, 1, sum(values[v].size_bytes for v in traced.graph.tangents)),
            (around.buffers.input_gradients, 1, sum(values[v].size_bytes for v in ends)),
        )
        held_bytes = sum(max(0, copies - own) * size for copies, own, size in of_kind if copies is not None)
        held_bytes += sum(self._workspaces(traced)) + around.held_bytes + needs.state_bytes
        later_bytes = around.buffers.later_outputs * output_bytes + around.after_bytes  # once nothing is in flight
        values = problem.graph.values
        held_bytes += self._beyond_views(traced.device)
        held_bytes += 0 if settings.shards is None else settings.shards.resident_bytes
        if self.limits.keeps_written:
            taken = {value.reuses for value in values}
            held_bytes += in_flight * sum(
                v.size_bytes for i, v in enumerate(values) if i in taken and v.role == "buffer" and v.reuses is None
            )
        if self.limits.accumulate and settings.grads == "edges":  # added to earlier ones after backward only
            held_bytes += sum(values[g].size_bytes for g in problem.graph.gradients if values[g].home == "device")
        return dataclasses.replace(
            problem, extra_resident_bytes=held_bytes, update_bytes=needs.step_bytes + later_bytes,
            requests=self._requests(captured, needs),
        )  # fmt: skip

    def _beyond_views(self, device: torch.device) -> int:
        """Bytes of the memory in which parameters and buffers lie, beyond the last that one of them shows."""
        ends: dict[int, int] = {}
        sizes: dict[int, int] = {}
        for tensor in (*self.model.parameters(), *self.model.buffers()) if self.settings.shards is None else ():
            if tensor.device.type != device.type or tensor.layout is not torch.strided:
                continue
            key, strides = storage_key(tensor), zip(tensor.shape, tensor.stride(), strict=True)
            last = int(tensor.storage_offset()) + sum((size - 1) * stride for size, stride in strides)
            ends[key] = max(ends.get(key, 0), (last + 1) * tensor.element_size() if tensor.numel() else 0)
            sizes[key] = tensor.untyped_storage().nbytes()
        return sum(max(0, size - ends[key]) for key, size in sizes.items())

    def with_shards(self, captured: Capture) -> Problem:
        """The problem of a step that gathers sharded parameters."""
        shards, problem = self.settings.shards, self.problem(captured)
        assert shards is not None
        offloads = self.placement.host_budget is not None
        return dataclasses.replace(
            problem, gather=shards.speed, accumulate=problem.accumulate or captured.traced.graph.gathers,
            link=self.placement.link(captured.traced.device) if offloads else None,
            extra_host_bytes=self._host_state_bytes(self.placement.host or frozenset()),
            host_update_s_per_byte=self._update_s_per_byte() if self.placement.host else 0.0,
        )  # fmt: skip

    def _host_state_bytes(self, names: frozenset[str]) -> int:
        """Bytes of the optimizer's state for parameters of these names, which are on the host."""
        if not names:
            return 0
        return self.optimizer(torch.device("cpu"), self._named(self.placement.counted().keys() - names)).state_bytes

    def _update_s_per_byte(self) -> float:
        """Seconds to update parameters on the host, for each byte of gradients."""
        settings = self.settings
        if settings.optimizer is None or self.limits.accumulate or settings.in_flight > 1:  # steps share one update
            return 0.0
        return host_update_s_per_byte(settings.optimizer, settings.costs == "measure")

    def _named(self, names: Collection[str]) -> list[nn.Parameter]:
        """Parameters of these names, of those that the optimizer knows."""
        return [p for name, p in self.placement.counted().items() if name in names] if names else []

    def by_homes(
        self, captured: Capture, problem: Problem
    ) -> tuple[tuple[Movable, ...], Callable[[frozenset[str]], Problem]] | UnsupportedModel:
        """Parameters that may live on the host, and a function from names of those that do to the step's problem.

        Returns the refusal if a parameter that lives there can't for this step.
        """
        placement = self.placement
        problem = dataclasses.replace(
            problem, link=placement.link(captured.traced.device), host_update_s_per_byte=self._update_s_per_byte()
        )
        parts = placement.movable(captured.traced)
        stuck = sorted((placement.host or frozenset()) - all_names(parts))
        if stuck:
            return UnsupportedModel(
                f"parameter {stuck[0]} lives on the host, and this call writes to it, returns it, shares it or has it "
                "under another name. Apply memplan with this call as the sample"
            )
        lasting = placement.lasting()
        own = self.problem(captured) if self.settings.shards is not None else problem
        more_bytes = problem.extra_resident_bytes - own.extra_resident_bytes  # on another rank, if it has larger parts

        @functools.cache  # the optimizer's step takes a second to run on fakes
        def problem_of(names: frozenset[str]) -> Problem:
            graph, on_host = graph_with_homes(problem.graph, parts, names, lasting), self._host_state_bytes(names)
            here = self.optimizer(self._device(captured.traced), self._named(names))
            of_homes = dataclasses.replace(problem, graph=graph, extra_host_bytes=on_host)
            of_homes = self._with_needs(of_homes, captured, here)
            return dataclasses.replace(of_homes, extra_resident_bytes=of_homes.extra_resident_bytes + more_bytes)

        return parts, problem_of

    def optimizer(self, device: torch.device, without: Sequence[torch.Tensor] = ()) -> OptimizerMemory:
        """What the optimizer takes on a device. without: parameters that are not counted."""
        if self.settings.optimizer is None:
            return OptimizerMemory()
        try:
            found = optimizer_memory(self.settings.optimizer, device, without)
        except UnsupportedModel:
            if device.type == "cpu" or self.settings.capability is None:
                raise
            found = optimizer_memory(self.settings.optimizer, torch.device("cpu"), without)  # some fused ones run
        if self.settings.update == "step":
            return found
        return found._replace(step_bytes=0, requests=tuple(Requests(update=found.requests).state.items()))

    def sized(self, captured: Capture, plan: Plan) -> SizedPlan | None:
        """A plan of a captured step at all its sizes; None where it has but one.

        Seconds of an op go with the bytes of its operands and results.
        """
        traced, planned = captured.traced, plan.problem
        if traced.sizes is None:
            return None

        def problem_at(numbers: Numbers, growth: float) -> Problem:
            found = at_sizes(traced, numbers).graph
            values = tuple(
                dataclasses.replace(v, size_bytes=other.size_bytes, tensor=other.tensor)
                for v, other in zip(planned.graph.values, found.values, strict=True)
            )
            graph = dataclasses.replace(planned.graph, values=values, ops=found.ops)
            ratios = [graph.op_bytes(i) / max(1, planned.graph.op_bytes(i)) for i in range(len(graph.ops))]
            costs = Costs(
                tuple(t * ratio for t, ratio in zip(planned.costs.time_s, ratios, strict=True)),
                tuple(math.ceil(n * growth) for n in planned.costs.scratch_bytes),
                planned.costs.source,
            )
            return dataclasses.replace(planned, graph=graph, costs=costs, budget_bytes=self.limits.budget_bytes)

        return SizedPlan(plan, traced.sizes, problem_at)

    def costs(self, captured: Capture, quick: bool) -> Costs:
        """Costs of the ops of a captured step.

        quick: costs that are not known yet are estimated, or measured only once.
        """
        init, source, network = self.settings.init, self.settings.costs, self.placement.network
        if source != "measure":
            return estimate(captured.traced, None if source == "estimate" else source, network)
        with AttributesKept(self.model):
            captured.left.put()  # buffers that were none
            tensors = dict([*self.model.named_parameters(), *self.model.named_buffers()])
        sharded = self.placement.sharded()
        if init is None and any(t.is_meta for t in tensors.values()):
            raise ValueError(
                "ops of a model on the meta device can't be timed: say costs=memplan.Roofline(...) for a device of "
                'known speed, or costs="estimate"'
            )
        inputs = captured.call.tensors

        def resident(kind: str, name: str, position: int) -> torch.Tensor | None:
            if name in sharded and kind == "parameter":
                return None
            tensor = inputs[position] if kind == "input" else tensors[name]
            if tensor.is_meta and init is not None:
                tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
                init(name, tensor)
            return private.plain(private.part_here(tensor)).to(captured.traced.device)

        away = all_names(self.placement.movable(captured.traced))  # an op is timed with those that it reads
        timed = with_homes(captured.traced, away, frozenset()) if away else captured.traced
        return measure(timed, resident, self.limits.known_bytes, quick=quick, network=network)

    def _device(self, traced: Traced) -> torch.device:
        """The device that a step is planned for, which may be a CUDA device that is not here."""
        return traced.device if self.settings.capability is None else torch.device("cuda")

    def _workspaces(self, traced: Traced) -> tuple[int, ...]:
        """Bytes of each workspace that libraries hold beside the step."""
        return workspaces(traced, self.settings.costs == "measure", self.settings.capability)

    def _requests(self, captured: Capture, optimizer: OptimizerMemory) -> Requests | None:
        """What PyTorch's CUDA allocator is asked for beside values; None where another one serves the step."""
        traced, on_paper = captured.traced, self.settings.capability is not None
        if not on_paper and (traced.device.type != "cuda" or not private.pytorch_allocates()):
            return None
        expandable = on_paper or private.segments_expand()
        if self._before is None:  # steps leave holes that they use again
            self._before = () if on_paper else self._segments(captured)
        return Requests(expandable, self._workspaces(traced), optimizer.requests, self.settings.arena, self._before)

    def _segments(self, captured: Capture) -> tuple[Segment, ...]:
        """What the process has reserved on the device, and which values hold it. A block of several has no name."""
        traced, inputs, optimizer = captured.traced, captured.call.tensors, self.settings.optimizer
        values, residents = traced.graph.values, traced.residents
        tensors = dict([*self.model.named_parameters(), *self.model.named_buffers(), *traced.constants.items()])
        found = [
            (inputs[source.position] if source.kind == "input" else tensors.get(source.name), holder_of(values[v]))
            for v, nodes in traced.roots.items()
            for source in (residents[node] for node in nodes if node in residents and values[v].reuses is None)
        ]
        names = {id(tensor): state_of(name) for tensor, name in found}
        found += [(parameter.grad, GRADIENT) for parameter in self.model.parameters()]
        for parameter, state in () if optimizer is None else optimizer.state.items():
            parts = [one for one in state.values() if isinstance(one, torch.Tensor)]
            found += [(part, names.get(id(parameter), STATE)) for part in parts]
        dense = [(tensor, name) for tensor, name in found if tensor is not None and tensor.layout is torch.strided]
        holders = {private.part_here(tensor).data_ptr(): name for tensor, name in dense}
        return tuple(Segment(*one) for one in private.reserved_before(traced.device, holders))
