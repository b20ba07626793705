"""What a plan promises: a problem, the schedule chosen for it, and what `simulate` says of that schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from memplan.problem.data import Problem
from memplan.problem.packing import host_bytes_beside, place_host_copies
from memplan.problem.reserved import reserved_bytes, steering_of
from memplan.problem.schedule import Boundary, Compute, Offload, Schedule, Stay, Timeline
from memplan.problem.simulate import unplanned
from memplan.problem.steering import Steering
from memplan.units import format_bytes

Exactness = Literal["eager", "program"]
Random = Literal["eager", "counter"]
_WORTH_TELLING = 0.02  # of what is reserved, that the allocator's other setting saves
_SEEDS = "prims.inductor_seeds.default"


@dataclass(frozen=True)
class PlanFigures:
    """What one training step will do, hold and cost.

    - problem: the captured step with its costs; its `budget_bytes` is the budget asked for.
    - schedule: what the step runs, in order.
    - timeline: what `simulate` says of `schedule`.
    - solver: which method found the schedule.
    - lower_bound_s: no schedule within the budget that runs backward ops in the traced order takes less.
    - floor_bytes: the smallest budget that could have been met.
    - floor_time_s: predicted seconds of a step at that budget, where `knows_floor_time` is true.
    - truncated: the search for the schedule was stopped before it was done.
    - unchecked: names of what the model's code may read and whose changes are not seen before a call. Files of plans do
      not have them.
    - margin: a fraction of the peak that is kept free below the budget, because such steps have held more than was
      predicted or run out of memory. Files of plans do not have it.
    """

    problem: Problem
    schedule: Schedule
    timeline: Timeline
    solver: str
    lower_bound_s: float
    floor_bytes: int
    floor_time_s: float
    truncated: bool = False
    unchecked: tuple[str, ...] = ()
    islands: tuple[str, ...] = ()
    margin: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """Most bytes held at any moment of the step: everything that the budget counts, kernel scratch included."""
        return self.timeline.peak_bytes

    @cached_property
    def reserved_bytes(self) -> int:
        """Most bytes that PyTorch's CUDA allocator reserves in a training loop of such steps: what a GPU runs out of.

        They are `peak_bytes`, what rounding adds, and holes between blocks that nothing fits, few of them where the
        step has an arena. They are for the allocator's setting with which the plan was made. On a device without such
        an allocator they are `peak_bytes`.
        """
        requests = self.problem.requests
        if requests is None:
            return self.peak_bytes
        return reserved_bytes(self.problem, self.schedule, requests.expandable, self.steering)

    @cached_property
    def steering(self) -> Steering | None:
        """How the step is led through an arena, where each block has its place; None where the step has none.

        It has one on CUDA where it reserves less memory for that.
        """
        requests = self.problem.requests
        return None if requests is None else steering_of(self.problem, self.schedule, requests.expandable)

    @cached_property
    def better_setting(self) -> str:
        """What is reserved with the allocator's other setting, in words; empty unless that is at least 2% less."""
        requests, enough_bytes = self.problem.requests, int((1 - _WORTH_TELLING) * self.reserved_bytes)
        if requests is None or self.peak_bytes > enough_bytes:
            return ""
        other, problem = not requests.expandable, replace(self.problem, requests=replace(requests, before=()))
        steering = steering_of(problem, self.schedule, other)  # of a process that begins with it
        other_bytes = reserved_bytes(problem, self.schedule, other, steering)
        text = f"{format_bytes(other_bytes)} with PYTORCH_ALLOC_CONF=expandable_segments:{other}"
        return text * (other_bytes <= enough_bytes)

    @property
    def reserved_text(self) -> str:
        """What PyTorch's CUDA allocator reserves, in words."""
        text = f"{format_bytes(self.reserved_bytes)} by PyTorch's allocator"
        if self.problem.requests is not None:
            text += f" with expandable_segments:{self.problem.requests.expandable}"
        if self.steering is not None:
            text += f", {format_bytes(self.steering.arena_bytes)} of it in an arena"
        return f"{text}; {self.better_setting}" if self.better_setting else text

    @property
    def knows_floor_time(self) -> bool:
        """Whether there is a schedule for the smallest budget; with copies and gathers only its peak is known."""
        return self.problem.link is None and self.problem.gather is None

    @property
    def exact(self) -> Exactness:
        """Whose bits a step has: "eager" is plain PyTorch; "program" is this step's ops, some of them compiled groups.

        Either way they are the same at any budget, and in any process with the same versions and device.
        """
        return "program" if any(op.fused for op in self.problem.graph.ops) else "eager"

    @property
    def random(self) -> Random:
        """Whose masks of dropout a step has: "eager" is plain PyTorch's; "counter" those that its fused groups make."""
        return "counter" if any(op.kind == _SEEDS for op in self.problem.graph.ops) else "eager"

    @property
    def live_peak_bytes(self) -> int:
        """`peak_bytes` without kernel scratch and saved generator states."""
        return self.timeline.live_peak_bytes

    @property
    def activation_peak_bytes(self) -> int:
        """`peak_bytes` less parameters, buffers, inputs and declared optimizer state."""
        return self.peak_bytes - self.problem.resident_bytes

    @cached_property
    def forward_peak_bytes(self) -> int:
        """Peak of the forward pass."""
        return max(self.timeline.peak_bytes_at[: self.schedule.index(Boundary())], default=0)

    @cached_property
    def baseline_peak_bytes(self) -> int:
        """Peak of the unplanned step."""
        return unplanned(self.problem).peak_bytes

    @property
    def waiting_bytes(self) -> int:
        """What each forward that waits for its backward holds on the device: saved values, inputs and outputs."""
        return self.timeline.waiting_bytes

    @property
    def time_s(self) -> float:
        """Predicted seconds of a step."""
        return self.timeline.time_s

    @property
    def baseline_time_s(self) -> float:
        """Predicted seconds of the unplanned step, which waits for each collective at once."""
        return self.problem.baseline_time_s

    @property
    def overhead(self) -> float:
        """Predicted extra time over a step that recomputes and moves nothing: 0.1 is 10% more."""
        return self.time_s / self.baseline_time_s - 1 if self.baseline_time_s else 0.0

    @property
    def gap(self) -> float:
        """How far the plan may be from the fastest schedule in the budget: time / lower bound - 1."""
        return self.time_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0

    @property
    def overhead_gap(self) -> float | None:
        """`gap` of the extra time alone: extra time / least extra time - 1.

        That is (time - lower bound) / (lower bound - baseline time). None where the lower bound is no more than the
        baseline time.
        """
        least_s = self.lower_bound_s - self.baseline_time_s
        return (self.time_s - self.lower_bound_s) / least_s if least_s > 0 else None

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that the step copies to host memory, gradients of parameters that live there included."""
        values = self.problem.graph.values
        return sum(values[step.value].size_bytes for step in self.schedule if isinstance(step, Offload))

    @property
    def staying_bytes(self) -> int:
        """Bytes of copies of frozen parameters that stay on the device from one step to the next."""
        values = self.problem.graph.values
        return sum(values[step.value].size_bytes for step in self.schedule if isinstance(step, Stay))

    @property
    def host_bytes(self) -> int:
        """Host memory that the step needs, with pinned blocks rounded up to powers of two, as they are allocated.

        It is the memory for offloaded values, and for parameters that live on the host with their gradients and the
        declared optimizer's state.
        """
        slab = place_host_copies(self.problem.graph, self.schedule)
        return slab.pinned_bytes * self.problem.in_flight + host_bytes_beside(self.problem)

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Ops that run more than once. An op that runs three times is listed twice."""
        ran = [step.op for step in self.schedule if isinstance(step, Compute)]
        first = {op: place for place, op in reversed([*enumerate(ran)])}
        return tuple(op for place, op in enumerate(ran) if place != first[op])
