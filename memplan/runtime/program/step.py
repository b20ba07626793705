"""A planned training step of a whole model, ready to run: its key, its programs and the model that they read.

It may have a plan for every size. A schedule's bytes at any moment are a sum of sizes of values. The accountant replays
it once with sizes that are powers of a large base, so that the digits of its figures say how many values of each kind
are held. For the sizes of a call, the most of these sums is the peak that the accountant would find in a replay with
those sizes.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from memplan.capture.analysis.sized import at_sizes
from memplan.capture.arguments_key import ArgumentsKey
from memplan.capture.capture import Capture
from memplan.capture.guards import OtherRead
from memplan.capture.key import ModesKey, StepKey
from memplan.capture.ops.layout import Layout
from memplan.capture.ops.sizes import Numbers, Size, Sizes
from memplan.capture.trace.call import Call
from memplan.errors import MemplanError, Refused
from memplan.plans.plan import Plan
from memplan.problem.data import Link, Problem
from memplan.problem.schedule import Offload, Schedule, Stay
from memplan.problem.simulate import simulate
from memplan.runtime.program.checkpointed import checkpointing
from memplan.runtime.program.collectives import GRADIENT, Collectives
from memplan.runtime.program.execute import Runner

_CONSTANT_BITS = 64  # of bytes that do not vary, and again of kernel scratch
_COUNT_BITS = 24  # of a number of values
_CONSTANT_MASK, _COUNT_MASK = (1 << _CONSTANT_BITS) - 1, (1 << _COUNT_BITS) - 1
_AT_ONCE = 24  # kinds of values in one replay, so that figures are no more than floats can hold


class SizedPlan:
    """One schedule, for all sizes of the step that it was found for.

    - planned: the plan that it was found as.
    - numbers: of the sizes that it ran for last.
    """

    def __init__(self, planned: Plan, sizes: Sizes, problem_at: Callable[[Numbers, float], Problem]) -> None:
        """problem_at: gives the problem of the step at other sizes, with kernel scratch so many times as large."""
        self.planned, self.numbers = planned, sizes.here
        self._sizes, self._problem_at = sizes, problem_at
        self._offloads = any(isinstance(step, Offload) for step in planned.schedule)
        values: list[Size] = []
        for value, size in zip(planned.problem.graph.values, sizes.values, strict=True):
            values.append(size if value.reuses is None else values[value.reuses])  # whose size may be written otherwise
        self._kinds = tuple(dict.fromkeys(size for size in values if not isinstance(size, int)))
        self._planned_bytes = self._bytes_of_kinds(sizes.here)
        self._held = _held(planned.problem, planned.schedule, values, self._kinds)
        self._peaks = {sizes.here: planned.peak_bytes}
        self._plans = {sizes.here: planned}

    def peak_bytes(self, numbers: Numbers) -> int:
        """The peak at these sizes. Kernel scratch is that of the planned sizes, and grows with sizes beyond them."""
        if numbers not in self._peaks:
            kinds = self._bytes_of_kinds(numbers)
            constant, scratch, counts = self._held
            moments = constant + np.ceil(scratch * self._growth(numbers)).astype(np.int64) + counts @ kinds
            self._peaks[numbers] = int(moments.max())
        return self._peaks[numbers]

    def outgrows_host(self, numbers: Numbers) -> bool:
        """Whether copies on the host, whose places are those of the planned sizes, would not fit there."""
        return self._offloads and bool((self._bytes_of_kinds(numbers) > self._planned_bytes).any())

    def at(self, numbers: Numbers) -> Plan:
        """The plan at these sizes. The latest one is kept."""
        if numbers not in self._plans:
            problem = self._problem_at(numbers, self._growth(numbers))
            if problem.requests is not None:  # the arena is for the planned sizes
                problem = dataclasses.replace(problem, requests=dataclasses.replace(problem.requests, arena=False))
            timeline = simulate(problem, self.planned.schedule)
            self._plans = {
                self._sizes.here: self.planned,
                numbers: dataclasses.replace(
                    self.planned, problem=problem, timeline=timeline, lower_bound_s=problem.baseline_time_s,
                    floor_bytes=timeline.peak_bytes, floor_time_s=timeline.time_s,
                ),
            }  # fmt: skip
        return self._plans[numbers]

    def longest_within(self, numbers: Numbers, limit_bytes: int) -> Numbers | None:
        """The sizes of the largest call within a budget that is like one which is beyond it, but smaller.

        What is larger in that one than in the planned call is made smaller, all at the same rate. None where no such
        call fits.
        """
        grown = [n > planned for n, planned in zip(numbers, self._sizes.here, strict=True)]
        grown = grown if any(grown) else [True] * len(grown)
        most = max(n for n, is_grown in zip(numbers, grown, strict=True) if is_grown)

        def shrunk(size: int) -> Numbers:
            return tuple(n * size // most if is_grown else n for n, is_grown in zip(numbers, grown, strict=True))

        fits = bisect.bisect_left(range(1, most), True, key=lambda size: self.peak_bytes(shrunk(size)) > limit_bytes)
        return shrunk(fits) if fits else None

    def _growth(self, numbers: Numbers) -> float:
        """The largest growth of a value over its planned size; at least 1."""
        return float(np.max(self._bytes_of_kinds(numbers) / np.maximum(self._planned_bytes, 1), initial=1.0))

    def _bytes_of_kinds(self, numbers: Numbers) -> Any:
        return np.array(self._sizes.bytes_of(self._kinds, numbers), dtype=np.int64)


def _held(problem: Problem, schedule: Schedule, sizes: Sequence[Size], kinds: Sequence[Size]) -> tuple[Any, Any, Any]:
    """(constant bytes, scratch bytes, number of values of each kind) that are held at each moment of a schedule."""
    columns: list[Any] = []
    constant = scratch = np.zeros(0, dtype=np.int64)
    graph, costs = problem.graph, problem.costs
    apart_bytes = tuple(n << _CONSTANT_BITS for n in costs.scratch_bytes)
    for first in range(0, max(1, len(kinds)), _AT_ONCE):
        some = kinds[first : first + _AT_ONCE]
        # What the accountant finds where sizes are powers of a base for these kinds, and 0 for others that vary.
        unit = {kind: 1 << (2 * _CONSTANT_BITS + place * _COUNT_BITS) for place, kind in enumerate(some)}
        values = tuple(
            dataclasses.replace(v, size_bytes=size if isinstance(size, int) else unit.get(size, 0))
            for v, size in zip(graph.values, sizes, strict=True)
        )
        probe = dataclasses.replace(
            problem,
            graph=dataclasses.replace(graph, values=values),
            costs=dataclasses.replace(costs, scratch_bytes=apart_bytes),
            link=None if problem.link is None else Link(1e300, 1e300),
        )
        timeline = simulate(probe, schedule)
        at_end = timeline.live_bytes[-1] - (problem.in_flight - 1) * timeline.waiting_bytes
        after = [problem.update_bytes]
        if any(isinstance(step, Stay) for step in schedule):  # as in `Problem.bytes_after`
            after.append(probe.graph.input_bytes)
        moments = [probe.resident_bytes, *timeline.peak_bytes_at, *(at_end + more for more in after if more)]
        if not first:
            constant = np.array([m & _CONSTANT_MASK for m in moments], dtype=np.int64)
            scratch = np.array([m >> _CONSTANT_BITS & _CONSTANT_MASK for m in moments], dtype=np.int64)
        for place in range(len(some)):
            shift = 2 * _CONSTANT_BITS + place * _COUNT_BITS
            columns.append([m >> shift & _COUNT_MASK for m in moments])
    counts = np.array(columns, dtype=np.int64).T.reshape(len(constant), len(kinds))
    rows = np.unique(np.column_stack([constant, scratch, counts]), axis=0)
    return rows[:, 0], rows[:, 1], rows[:, 2:]


_BYTES_A_NODE = 4500  # of host memory that a step takes for each node of its trace, measured on a GPT-2
_UNPLANNED = Collectives.of([f"{GRADIENT}of an unplanned step, in autograd's order"])


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One plan of a model for one kind of call.

    - planned: the plan, at the sizes that it was searched for.
    - capture: without the tensors of the batch that it was captured with.
    - provisional: found in a hurry; planned in full when such a call comes again.
    - sized: the plan at other sizes, where the step serves those too.
    - others: steps with other schedules of the same capture, for longer and shorter calls.
    """

    planned: Plan
    capture: Capture
    runner: Runner
    provisional: bool = False
    sized: SizedPlan | None = None
    others: tuple[PlannedStep, ...] = ()

    @property
    def key(self) -> StepKey:
        """Tells which calls the step serves."""
        return self.capture.key

    @property
    def collectives(self) -> Collectives:
        return self.runner.collectives

    @property
    def plan(self) -> Plan:
        """The plan, at the sizes of the call that it ran for last."""
        return self.planned if self.sized is None else self.sized.at(self.sized.numbers)

    def plan_for(self, call: Call) -> Plan:
        """The plan, at the sizes of a call that the step serves."""
        return self.planned if self.sized is None else self.sized.at(self.numbers(call))

    @property
    def tangents(self) -> Mapping[int, Layout] | None:
        """The gradients with which backward starts, by output, as far as one has run; None where none has."""
        return self.runner.arrived or self.capture.options.tangents

    @property
    def kind(self) -> int:
        """A number that is the same for all steps of one capture."""
        return id(self.key.arguments)

    @property
    def kept_bytes(self) -> int:
        """About how much host memory the step takes."""
        traced = self.capture.traced
        return len(traced.fx_graph.nodes) * _BYTES_A_NODE + sum(c.nbytes for c in traced.constants.values())

    def numbers(self, call: Call) -> Numbers:
        """The values of what varies from call to call."""
        numbers = self.key.numbers(call)
        assert not isinstance(numbers, OtherRead)
        return numbers

    def peak_bytes(self, call: Call) -> int:
        return self.planned.peak_bytes if self.sized is None else self.sized.peak_bytes(self.numbers(call))

    def forward_ops(self, call: Call) -> tuple[str, ...]:
        """A signature of the forward pass of a call that the step serves."""
        traced = self.capture.traced
        return (traced if self.sized is None else at_sizes(traced, self.numbers(call))).forward_ops

    def mismatch(self, call: Call) -> str | None:
        """What keeps this step from serving a call, in words."""
        for owner, key, _ in self.capture.counters:
            if type(self.key.attributes(owner).get(key)) is not int:
                return f"{owner}.{key} is no number any more"
        return self.key.mismatch(call)

    def run(self, call: Call) -> Any:
        """What the model's forward would return."""
        traced, numbers = self.capture.traced, self.numbers(call)
        if self.sized is not None:
            self.sized.numbers = numbers
        attributes = [(self.key.attributes(owner), key) for owner, key in traced.template.attributes]
        for table, key in attributes:  # eager lets go of what they hold at some time in forward
            if key in table:
                table[key] = None
        for position in self.capture.options.requiring:
            call.tensors[position].requires_grad_()
        counters = [(self.key.attributes(owner), key, added) for owner, key, added in self.capture.counters]
        for table, key, added in counters:
            table[key] += added
        try:
            outputs = self.runner(call.tensors, numbers)
        except BaseException:  # forward may run again
            for table, key, added in counters:
                table[key] -= added
            raise
        for name, index in traced.reassigned.items():
            self.runner.store[name] = outputs[index]
        for (table, key), value in zip(attributes, traced.template.fill_attributes(outputs, numbers), strict=True):
            table[key] = value
        return traced.template.fill(outputs, numbers)


@dataclass(frozen=True, slots=True)
class UnplannedStep:
    """A step that runs the model's own forward, for calls that can't be captured and fit the budget as they are.

    checkpointed: paths of layers that PyTorch checkpoints in it.
    """

    forward: Callable[..., Any]
    arguments: ArgumentsKey
    modes: ModesKey
    checkpointed: tuple[str, ...] = ()
    plan: None = None
    provisional: bool = False
    sized: None = None
    others: tuple[PlannedStep, ...] = ()
    kept_bytes: int = 0
    collectives: Collectives = _UNPLANNED

    @staticmethod
    def of(
        model: nn.Module, forward: Callable[..., Any], call: Call, device_type: str, checkpointed: tuple[str, ...] = ()
    ) -> UnplannedStep:
        forward, arguments = checkpointing(model, checkpointed, forward), ArgumentsKey(call, None, traced=False)
        return UnplannedStep(forward, arguments, ModesKey(model, device_type), checkpointed)

    def mismatch(self, call: Call) -> str | None:
        return self.arguments.mismatch(call) or self.modes.mismatch()

    @property
    def kind(self) -> int:
        return id(self)

    def peak_bytes(self, call: Call) -> None:
        """Nobody knows it."""

    def run(self, call: Call) -> Any:
        return self.forward(*call.variadic, **call.arguments)


ServingStep = PlannedStep | UnplannedStep  # serves one kind of call of a model


def step_or_raise(found: ServingStep | Refused) -> ServingStep:
    """`or_raise` for either kind of step."""
    if isinstance(found, MemplanError):
        raise found
    return found
