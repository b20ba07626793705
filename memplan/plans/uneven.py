"""Steps of ranks whose batches differ, and what it takes to run one schedule on all of them.

Most often they differ by sizes alone. A schedule means the same for steps of equal structure, and what it holds at each
moment is a sum of sizes. So it peaks no higher than for a step in which every value is as large as the largest of all
ranks. Steps that run a few other ops (a model leaves its mask out where nothing is padded) get the schedule with their
own ops put in, so that all ranks gather in one order.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from memplan.plans.plan import structure
from memplan.problem import schedule as steps
from memplan.problem.data import Costs, Graph, Problem
from memplan.problem.schedule import BOUNDARY, Schedule, order_of, schedule_of


def kind_of(graph: Graph) -> tuple[object, ...]:
    """A key that is equal for steps that differ by sizes alone, and read equal parameters from equal homes."""
    return structure(graph), tuple((v.name, v.home) for v in graph.values)


def sizes_of(problem: Problem) -> dict[str, Any]:
    """The figures of a step that `widest` needs, in a form that JSON can hold."""
    return {
        "sizes_bytes": [v.size_bytes for v in problem.graph.values],
        "rng_state_bytes": problem.graph.rng_state_bytes,
        "times_s": problem.costs.time_s,
        "scratch_bytes": problem.costs.scratch_bytes,
        "extra_resident_bytes": problem.extra_resident_bytes,
        "update_bytes": problem.update_bytes,
    }


def widest(problem: Problem, figures: Sequence[dict[str, Any]]) -> Problem:
    """The step with the largest of each size, and the longest of each time, among steps of its kind.

    figures: `sizes_of` each of them.
    """

    def most(key: str) -> Any:
        return max(of_rank[key] for of_rank in figures)

    def each(key: str) -> tuple[Any, ...]:
        return tuple(map(max, zip(*(of_rank[key] for of_rank in figures), strict=True)))

    values = tuple(
        dataclasses.replace(value, size_bytes=size_bytes)
        for value, size_bytes in zip(problem.graph.values, each("sizes_bytes"), strict=True)
    )
    return dataclasses.replace(
        problem,
        graph=dataclasses.replace(problem.graph, values=values, rng_state_bytes=most("rng_state_bytes")),
        costs=Costs(each("times_s"), each("scratch_bytes"), problem.costs.source),
        extra_resident_bytes=most("extra_resident_bytes"),
        update_bytes=most("update_bytes"),
    )


def translated(schedule: Schedule, planned: Graph, graph: Graph) -> Schedule | None:
    """The schedule of the step `planned`, for another step of the model, which may run a few other ops.

    Ops that both steps have run in the planned order and as often. An op that only this step has runs once, where it
    runs without a plan. Parameters are gathered and freed in the planned order and between the same ops. `simulate`
    judges whether the result is legal. None where the schedule copies to the host, or where the steps do not read the
    same sharded parameters.
    """
    own_values = {v.name: i for i, v in enumerate(graph.values) if v.resident and v.home == "sharded"}
    names = {i: v.name for i, v in enumerate(planned.values) if v.resident and v.home == "sharded"}
    if set(names.values()) != set(own_values) or any(isinstance(step, steps.Offload) for step in schedule):
        return None
    counterparts = dict(zip(_marks(planned), range(len(planned.ops)), strict=True))
    own_of = {counterparts[mark]: op for op, mark in enumerate(_marks(graph)) if mark in counterparts}
    left = dict.fromkeys(sorted(set(range(len(graph.ops))) - set(own_of.values())))
    order: list[int] = []  # this step's ops in the planned order
    places: list[int] = []  # where each position of the planned order lies in it, and the end

    def run_before(end: int) -> None:
        """Run the ops that only this step has and that come before this op."""
        for op in [op for op in left if op < end]:
            del left[op]
            order.append(op)

    for op in order_of(schedule):
        places.append(len(order))
        if op == BOUNDARY:
            run_before(graph.boundary)
            order.append(BOUNDARY)
        elif op in own_of:
            run_before(own_of[op])
            order.append(own_of[op])
    run_before(len(graph.ops))
    places.append(len(order))
    moves: dict[int, list[steps.Step]] = defaultdict(list)  # by the position in the order before which they are
    position = 0
    for step in schedule:
        if isinstance(step, (steps.Compute, steps.Boundary)):
            position += 1
        elif isinstance(step, (steps.Prefetch, steps.Wait, steps.Drop)) and step.value in names:
            moves[places[position]].append(type(step)(own_values[names[step.value]]))
    found: list[steps.Step] = []
    position = 0
    for step in schedule_of(graph, order):
        if isinstance(step, (steps.Compute, steps.Boundary)):
            found += moves[position]
            position += 1
        found.append(step)
    return (*found, *moves[position])


def _marks(graph: Graph) -> Iterator[Hashable]:
    """A key for each op, which is equal in another trace of the model.

    It is the op's kind, its place in the model, and its number among ops of that kind there.
    """
    seen: Counter[Hashable] = Counter()
    for op in graph.ops:
        mark = op.phase, op.layer, op.kind
        seen[mark] += 1
        yield *mark, seen[mark]
