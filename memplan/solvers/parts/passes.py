"""What one unit's schedule holds by itself, as part of a larger step: without parameters, buffers and inputs."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.problem.data import Problem
from memplan.problem.schedule import Boundary, Compute, Drop, DropRng, SaveRng, Schedule
from memplan.problem.simulate import simulate


@dataclass(frozen=True, slots=True)
class Pass:
    """What one unit's schedule holds and takes.

    - own_bytes: what forward makes and leaves for backward, saved generator states included.
    - borrowed: (value, bytes) of arguments and results that backward reads, which others may hold as well.
    - forward_bytes: the most held in forward.
    - backward_bytes: the most that backward adds to what is held when it begins.
    - time_s: seconds of both.
    """

    own_bytes: int
    borrowed: frozenset[tuple[int, int]]
    forward_bytes: int
    backward_bytes: int
    time_s: float

    @property
    def saved_bytes(self) -> int:
        """All that is held from forward to backward."""
        return self.own_bytes + sum(size for _, size in self.borrowed)

    def within(self, other: Pass) -> bool:
        """Whether this one never takes more than another does."""
        return (
            self.saved_bytes <= other.saved_bytes
            and self.forward_bytes <= other.forward_bytes
            and self.backward_bytes <= other.backward_bytes
        )

    def extra_bytes(self, measured: Pass) -> int:
        """Bytes that this pass saves beyond another one that ran when the step was measured.

        They are never less than what this pass adds: that an argument is not saved frees nothing for certain.
        """
        return self.own_bytes - measured.own_bytes + sum(size for _, size in self.borrowed - measured.borrowed)


def pass_of(problem: Problem, schedule: Schedule) -> Pass:
    """What a schedule comes to."""
    values = problem.graph.values
    timeline = simulate(problem, schedule)
    turn = next(i for i, step in enumerate(schedule) if isinstance(step, Boundary))
    live, states = _live_after(problem, schedule[:turn])
    lent = {v for v, value in enumerate(values) if value.role == "input" or (value.held and value.role == "activation")}
    read: set[int] = set()
    for step in schedule[turn + 1 :]:
        if isinstance(step, Compute):
            read.update(problem.graph.ops[step.op].inputs)
    resident, turned = problem.resident_bytes, timeline.live_bytes[turn]
    return Pass(
        own_bytes=sum(values[v].size_bytes for v in live - lent) + states * problem.graph.rng_state_bytes,
        borrowed=frozenset((v, values[v].size_bytes) for v in read & lent),
        forward_bytes=max([0, *(b - resident for b in timeline.peak_bytes_at[:turn])]),
        backward_bytes=max([0, *(b - turned for b in timeline.peak_bytes_at[turn + 1 :])]),
        time_s=timeline.time_s,
    )


def pass_of_twice(problem: Problem, schedule: Schedule) -> Pass:
    """What a schedule comes to of which forward saves nothing, and runs again when backward begins.

    Arguments are held by every way of running a unit that may have to run its forward again.
    """
    once = pass_of(problem, schedule)
    turn = next(i for i, step in enumerate(schedule) if isinstance(step, Boundary))
    forward_s = sum(problem.costs.time_s[step.op] for step in schedule[:turn] if isinstance(step, Compute))
    results = sum(size for v, size in once.borrowed if problem.graph.values[v].role != "input")
    backward_bytes = max(once.forward_bytes, once.own_bytes + results + once.backward_bytes)
    return Pass(0, frozenset(), once.forward_bytes, backward_bytes, once.time_s + forward_s)


def _live_after(problem: Problem, schedule: Schedule) -> tuple[set[int], int]:
    """Values that forward made and that are live at its end, and how many generator states are kept."""
    values, live, states = problem.graph.values, set[int](), 0
    for step in schedule:
        match step:
            case Compute(op):
                made = problem.graph.ops[op].outputs
                live.update(v for v in made if not values[v].resident)
                live.difference_update(taken for v in made if (taken := values[v].reuses) is not None)
            case Drop(value):
                live.discard(value)
            case SaveRng():
                states += 1
            case DropRng():
                states -= 1
            case _:
                pass
    return live, states
