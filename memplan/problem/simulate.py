"""The accountant: replays a schedule, refuses an illegal one, and says what it holds at every step and its seconds.

Nobody else says what a schedule peaks at. Every solver's answer passes through here, and every measured step is
compared with it: on a CPU the two agree to the byte.

What is counted, in the order in which the runtime does it:

- A run of an op holds its inputs, then its outputs and its scratch. What the schedule drops goes after the run.
- An output that is still live when its op runs again is made a second time and thrown away after the run.
- An op that writes in place takes over the memory of the value that it overwrites.
- Replaying a random op holds one more generator state while it runs.
- Microbatches that wait hold what the running one holds at the boundary. That is beside it in every step, for in the
  forward pass as in the backward pass all but one of those in flight wait.
- The optimizer's step comes last, where one was declared, when nothing waits. Where parameters are updated with their
  gradients as those are handed over, each update has its own moment.
- What stays on the device between steps is there from the first moment to the last, and while the optimizer steps and
  the next batch arrives.

Copies to and from host memory run beside the ops, one after the other in each direction, and so do collectives:
gathers of sharded parameters, and ops that only start one. A copy begins when it is issued, or when its direction is
free. Only what a wait makes sure of is legal: what is being fetched can't be read, what is being copied out can't be
overwritten or freed, and host memory can't be freed under a copy. Until its wait, a collective holds its inputs as
they are, and its outputs can't be read. No collective is under way when forward ends.

Parameters that live on the host are updated by the CPU. Where that happens in backward it has a lane of its own: one
update after the other, each from when its gradient is there, and the step ends when the last is done. Elsewhere all of
it comes after the step, in the time of `optimizer.step()`. What a device takes to update its own parameters is left
out.

Nothing of the next step begins before this one ends, so every step of a loop takes this long. Where frozen parameters
stay on the device, a loop is periodic: what is there when a step begins is there when it ends. The first step takes
longer than the others, by the time that fetching those parameters takes. Of microbatches in flight that copy, `lanes`
says what each takes on the average.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from memplan.errors import IllegalSchedule
from memplan.problem import schedule as steps
from memplan.problem.data import Op, Problem, Value
from memplan.problem.lanes import CopyDirection, direction_of, seconds_in_flight
from memplan.problem.schedule import BOUNDARY, Schedule, Timeline, schedule_of

_T = TypeVar("_T")
_What = Literal["value", "second", "passed", "scratch", "state", "update"]


class Change(NamedTuple):
    """A block of memory that comes or goes.

    - what: of a value; a second one, which an op that runs again makes of a value that is there; one that passes to a
      value from that which it overwrites; scratch of an op; a generator's state, for an op; of a gradient's update.
    - owner: the value, the op or the gradient, by index.
    - size_bytes: how much more there is for it: below 0 where it goes, 0 where it passes.
    """

    what: _What
    owner: int
    size_bytes: int


def simulate(problem: Problem, schedule: Schedule) -> Timeline:
    """Replay `schedule` and account for it. Raises IllegalSchedule with the index of the first bad step."""
    return replayed(problem, schedule)[0]


def replayed(problem: Problem, schedule: Schedule) -> tuple[Timeline, list[list[Change]]]:
    """What `simulate` gives, and how each step changes what is on the device. Raises IllegalSchedule."""
    machine = _Machine(problem)
    for step in schedule:
        machine.run(step)
    machine.finish()
    return machine.timeline(*seconds_in_flight(problem, schedule)), machine.changes


def unplanned(problem: Problem) -> Timeline:
    """What the step comes to when it runs without a plan: every op once, everything on the device."""
    return simulate(*unplanned_step(problem))


def unplanned_step(problem: Problem) -> tuple[Problem, Schedule]:
    """The step as it runs without a plan, and its schedule."""
    problem = problem.all_on_device
    graph = problem.graph
    order = [*range(graph.boundary), BOUNDARY, *range(graph.boundary, len(graph.ops))]
    return problem, schedule_of(graph, order)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy or a collective that runs.

    - direction: "out" to the host, "in" to the device, or "network" from all ranks.
    - op: the collective; None of a copy.
    - second: its output was there before, so that a second one is thrown away when it is done.
    """

    direction: CopyDirection
    op: Op | None = None
    second: bool = False


class _Machine:
    """The state of a replay: which values are live, and how many bytes that makes."""

    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        self.problem, self.graph = problem, graph
        self.live = [v.resident and v.home == "device" and v.reuses is None for v in graph.values]
        self.elsewhere = [v.fetched for v in graph.values]  # on the host, or sharded
        self.copying: dict[int, _Copy] = {}
        self.sent = Counter[int]()  # collectives under way that read each value
        self.overwritten = [False] * len(graph.values)
        self.runs = [0] * len(graph.ops)
        self.saved_rng: set[int] = set()
        self.surfaced: set[int] = set()
        self.changed: set[int] = set()  # parameters that hooks or updates may have written to
        self.staying: set[int] = set()
        self.next_random = 0
        self.random_ops = [i for i, op in enumerate(graph.ops) if op.random]
        self.in_backward = False
        self.held_bytes = self.live_bytes = problem.resident_bytes  # the second is without scratch and states
        self.live_peak, self.host_bytes, self.most_bytes = self.live_bytes, 0, 0  # the last is of one step
        self.changes: list[list[Change]] = []
        self.after, self.during, self.host_after = list[int](), list[int](), list[int]()
        self.saved_bytes = self.saved_rng_bytes = self.saved_host_bytes = 0  # by one microbatch that waits

    def _illegal(self, reason: str) -> IllegalSchedule:
        return IllegalSchedule(len(self.after), reason)

    def _indexed(self, index: int, among: tuple[_T, ...], what: str) -> _T:
        if not 0 <= index < len(among):
            raise self._illegal(f"there is no {what} {index}")
        return among[index]

    def _change(self, what: _What, index: int, size_bytes: int) -> None:
        self.changes[-1].append(Change(what, index, size_bytes))
        self.held_bytes += size_bytes
        self.most_bytes = max(self.most_bytes, self.held_bytes)
        if what in ("value", "second", "update") or (what == "scratch" and self.graph.ops[index].is_island):
            self.live_bytes += size_bytes
            self.live_peak = max(self.live_peak, self.live_bytes)

    def run(self, step: steps.Step) -> None:
        self.changes.append([])
        self.most_bytes = self.held_bytes
        match step:
            case steps.Boundary():
                self._cross_boundary()
            case steps.SurfaceGrads(values):
                self._surface(values)
            case steps.Compute(index) | steps.SaveRng(index) | steps.DropRng(index):
                _OF_OPS[type(step)](self, index, self._indexed(index, self.graph.ops, "op"))
            case _:
                _OF_VALUES[type(step)](self, step.value, self._indexed(step.value, self.graph.values, "value"))
        self.host_after.append(self.host_bytes)
        self.after.append(self.held_bytes)
        self.during.append(self.most_bytes)

    def _compute(self, index: int, op: Op) -> None:
        values, live = self.graph.values, self.live
        first = self.runs[index] == 0
        if first:
            self._check_first_run(op, index)
        elif not op.recomputable:
            raise self._illegal(f"{op.name} writes to what outlives the step, or may give other bits, and runs once")
        elif op.random and index not in self.saved_rng:
            raise self._illegal(f"{op.name} is random and no generator state was kept for running it again")
        for v in op.inputs:
            if not live[v]:
                raise self._illegal(self._missing(op, v))
            if v in self.changed:
                raise self._illegal(f"{op.name} reads {values[v].name}, whose gradient has been handed over")
            if v in self.copying and self.copying[v].direction != "out":
                raise self._illegal(f"{op.name} reads {values[v].name}, which is still being fetched")
        thrown: list[tuple[_What, int]] = []  # when the op has run
        for v in op.outputs:
            value = values[v]
            if v in self.copying:
                raise self._illegal(f"{op.name} makes {value.name} anew, which is being copied")
            taken, again = value.reuses, live[v]
            if taken is None:
                self._change("second" if again else "value", v, value.size_bytes)
                thrown += [("second", v)] * again
            else:
                self._take_over(op, taken)
                if again and not value.resident:
                    thrown.append(("value", taken))  # in which a second copy has been written
                elif not value.resident:
                    self._change("passed", v, 0)
            live[v] = True
        if first:
            for effect in op.effects:
                self._take_over(op, effect.old)
                live[effect.new] = True
        self.runs[index] += 1
        scratch_bytes = self.problem.costs.scratch_bytes[index]
        state_bytes = 0 if first or not op.random else self.graph.rng_state_bytes
        for sign in (1, -1):
            self._change("scratch", index, sign * scratch_bytes)
            self._change("state", index, sign * state_bytes)
        if op.is_asynchronous:
            second = ("second", op.outputs[0])  # which is written until the wait
            self.copying[op.outputs[0]] = _Copy("network", op, second in thrown)
            self.sent.update(op.inputs)
            thrown = [one for one in thrown if one != second]
        for what, v in thrown:
            self._change(what, v, -values[v].size_bytes)

    def _check_first_run(self, op: Op, index: int) -> None:
        if op.phase == "backward" and not self.in_backward:
            raise self._illegal(f"{op.name} belongs to the backward pass and runs before the boundary")
        if op.stays and op.phase == "forward" and self.in_backward:
            raise self._illegal(f"{op.name} acts beyond its results and must run in the forward pass")
        if op.random:
            if self.random_ops[self.next_random] != index:
                raise self._illegal(f"{op.name} would draw random numbers out of turn")
            self.next_random += 1

    def _take_over(self, op: Op, value: int) -> None:
        held = self.graph.values[value]
        if not self.live[value]:
            raise self._illegal(self._missing(op, value))
        if value in self.copying or self.sent[value]:
            raise self._illegal(f"{op.name} would overwrite {held.name}, which is being copied")
        if held.held:
            raise self._illegal(f"{op.name} would overwrite {held.name}, which the caller holds")
        self.live[value] = False
        if held.resident:
            self.overwritten[value] = True

    def _missing(self, op: Op, value: int) -> str:
        name = self.graph.values[value].name
        if self.overwritten[value]:
            return f"{op.name} reads {name}, which has been overwritten"
        return f"{op.name} reads {name}, which is not live"

    def _drop(self, index: int, value: Value) -> None:
        if (value.resident and not value.fetched) or value.held or value.role == "tangent":
            raise self._illegal(f"{value.name} is held from outside and can't be dropped")
        if not self.live[index]:
            raise self._illegal(f"{value.name} is dropped but not live")
        if index in self.copying or self.sent.get(index):
            raise self._illegal(f"{value.name} is dropped while it is being copied")
        self.live[index] = False
        self._change("value", index, -value.size_bytes)

    def _save_rng(self, index: int, op: Op) -> None:
        if not op.random or self.runs[index] or index in self.saved_rng:
            raise self._illegal(f"{op.name}: only a random op that has not run yet needs a generator state, and one")
        if self.random_ops[self.next_random] != index:
            raise self._illegal(f"{op.name} is not the next random op, so this is not its generator state")
        self.saved_rng.add(index)
        self._change("state", index, self.graph.rng_state_bytes)

    def _drop_rng(self, index: int, op: Op) -> None:
        if index not in self.saved_rng:
            raise self._illegal(f"no generator state is kept for {op.name}")
        self.saved_rng.remove(index)
        self._change("state", index, -self.graph.rng_state_bytes)

    def _cross_boundary(self) -> None:
        if self.in_backward:
            raise self._illegal("the boundary is crossed twice")
        if any(copy.op is not None for copy in self.copying.values()):
            raise self._illegal("a collective is still under way at the boundary")
        for v in self.graph.outputs:
            if not self.live[v]:
                raise self._illegal(f"output {self.graph.values[v].name} is not there at the boundary")
            if v in self.copying:
                raise self._illegal(f"output {self.graph.values[v].name} is being copied at the boundary")
        self.in_backward = True
        self.saved_bytes = self.live_bytes - self.problem.resident_bytes + self.graph.input_bytes
        self.saved_rng_bytes, self.saved_host_bytes = self.held_bytes - self.live_bytes, self.host_bytes
        for v in self.graph.tangents:
            self.live[v] = True
            self._change("value", v, self.graph.values[v].size_bytes)

    def _surface(self, values: tuple[int, ...]) -> None:
        for index in values:
            value = self._indexed(index, self.graph.values, "value")
            if value.role != "gradient" or index in self.surfaced:
                raise self._illegal(f"{value.name} is not a gradient, or was handed over before")
            self.surfaced.add(index)
            for parameter in value.parameters:  # the update, or a hook, may write to them from now on
                if parameter in self.copying or self.sent[parameter]:
                    name = self.graph.values[parameter].name
                    raise self._illegal(f"the gradient of {name} is handed over while {name} is being copied")
                self.changed.add(parameter)
            if value.updates:
                self._change("update", index, value.update_bytes)
                self._change("update", index, -value.update_bytes)
            if value.home == "host":
                if not self.elsewhere[index] or index in self.copying:
                    raise self._illegal(f"gradient {value.name} is handed over before it is on the host")
                continue
            if not self.live[index] or index in self.copying:
                raise self._illegal(f"gradient {value.name} is handed over but not live, or still being reduced")
            if self.problem.frees_gradients:
                self._change("value", index, -value.size_bytes)

    def _stay(self, index: int, value: Value) -> None:
        if not value.lasting or value.home != "host" or self.problem.in_flight > 1:
            raise self._illegal(f"{value.name} can't stay on the device between steps")
        if self.live[index] or any(self.runs):
            raise self._illegal(f"{value.name} is there already, or the step has begun without it")
        self.staying.add(index)
        self.live[index] = True
        self._change("value", index, value.size_bytes)

    def _offload(self, index: int, value: Value) -> None:
        if not self.live[index] or self.elsewhere[index] or index in self.copying:
            raise self._illegal(f"{value.name} can't be offloaded: it is not live, is on the host, or is being copied")
        if value.resident:
            raise self._illegal(f"{value.name} is resident on the device and is not offloaded")
        self.elsewhere[index] = True
        self.host_bytes += value.size_bytes
        self._begin(index, "out")

    def _prefetch(self, index: int, value: Value) -> None:
        if self.live[index] or not self.elsewhere[index] or index in self.copying:
            raise self._illegal(f"{value.name} can't be fetched: it is live, or is being copied, or has no other home")
        if index in self.changed:
            raise self._illegal(f"{value.name} can't be fetched: its gradient has been handed over")
        self.live[index] = True
        self._change("value", index, value.size_bytes)
        self._begin(index, direction_of(self.problem, index))

    def _begin(self, index: int, direction: CopyDirection) -> None:
        if direction == "network" and self.problem.gather is None:
            raise self._illegal("the problem does not say how fast sharded parameters are gathered")
        if direction != "network" and self.problem.link is None:
            raise self._illegal("the problem has no link to host memory")
        self.copying[index] = _Copy(direction)

    def _wait(self, index: int, value: Value) -> None:
        if index not in self.copying:
            raise self._illegal(f"{value.name} is waited for, but is not being copied")
        copy = self.copying.pop(index)
        self.sent.subtract(() if copy.op is None else copy.op.inputs)
        if copy.second:
            self._change("second", index, -value.size_bytes)

    def _drop_host(self, index: int, value: Value) -> None:
        if not self.elsewhere[index] or index in self.copying:
            raise self._illegal(f"the host copy of {value.name} can't be freed: there is none, or it is being copied")
        if value.home != "device":
            raise self._illegal(f"{value.name} does not live on the device and can't be freed elsewhere")
        self.elsewhere[index] = False
        self.host_bytes -= value.size_bytes

    def finish(self) -> None:
        if not self.in_backward:
            raise self._illegal("the boundary is never crossed")
        for index, op in enumerate(self.graph.ops):
            if not self.runs[index]:
                raise self._illegal(f"{op.name} never runs")
        for index in self.graph.gradients:
            if index not in self.surfaced:
                raise self._illegal(f"gradient {self.graph.values[index].name} is never handed over")
        if self.saved_rng:
            raise self._illegal(f"the generator state of {self.graph.ops[min(self.saved_rng)].name} is never freed")
        for index, value in enumerate(self.graph.values):
            outlives = value.resident and not value.fetched
            if index in self.staying and not self.live[index]:
                raise self._illegal(f"{value.name} is to stay, and is not there for the next step")
            outlives |= index in self.staying
            if self.live[index] and not (outlives or value.held or value.role == "tangent"):
                raise self._illegal(f"{value.name} is never freed")
            if self.elsewhere[index] and value.home != "host" and not value.fetched:
                raise self._illegal(f"the host copy of {value.name} is never freed")
            if index in self.copying:
                raise self._illegal(f"the copy of {value.name} is never waited for")

    def timeline(self, time_s: float, stall_s: float) -> Timeline:
        """What the steps come to beside the microbatches that wait. None waits while the optimizer steps."""
        others = self.problem.in_flight - 1
        waiting = others * (self.saved_bytes + self.saved_rng_bytes)
        waiting_on_host = others * self.saved_host_bytes
        after_bytes = self.problem.bytes_after(bool(self.staying))
        later = self.live_bytes + after_bytes if after_bytes else 0
        during = tuple(size_bytes + waiting for size_bytes in self.during)
        peak = max([self.problem.resident_bytes, *during, later])
        return Timeline(
            live_bytes=tuple(size_bytes + waiting for size_bytes in self.after),
            peak_bytes_at=during,
            peak_bytes=peak,
            live_peak_bytes=max(self.live_peak + others * self.saved_bytes, later),
            peak_step=during.index(peak) if peak in during else 0,
            time_s=time_s,
            host_bytes=tuple(size_bytes + waiting_on_host for size_bytes in self.host_after),
            host_peak_bytes=max(self.host_after, default=0) + waiting_on_host,
            stall_s=stall_s,
            waiting_bytes=self.saved_bytes + self.saved_rng_bytes,
        )


_OF_OPS = {steps.Compute: _Machine._compute, steps.SaveRng: _Machine._save_rng, steps.DropRng: _Machine._drop_rng}
_OF_VALUES = {
    steps.Drop: _Machine._drop, steps.Stay: _Machine._stay, steps.Offload: _Machine._offload,
    steps.Prefetch: _Machine._prefetch, steps.Wait: _Machine._wait, steps.DropHost: _Machine._drop_host,
}  # fmt: skip
