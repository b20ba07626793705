"""Steps of several ranks that differ by sizes alone, for their batches do: one schedule that fits all of them.

A schedule means the same for steps of equal structure. What it holds at each moment is a sum of sizes, so it peaks
nowhere higher than for a step that is, value by value, as large as the largest of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from memplan.plans import structure
from memplan.problem import Graph, Problem


def kind_of(graph: Graph) -> tuple[object, ...]:
    """Equal for steps that differ by sizes alone, and read the same parameters from the same homes."""
    return structure(graph), tuple((v.name, v.home) for v in graph.values)


def figures_of(problem: Problem) -> dict[str, Any]:
    """What `widest` has to know of a step, as anything that JSON can hold."""
    return {
        "sizes_bytes": [v.size_bytes for v in problem.graph.values],
        "rng_state_bytes": problem.graph.rng_state_bytes,
        "times_s": problem.costs.time_s,
        "scratch_bytes": problem.costs.scratch_bytes,
        "extra_resident_bytes": problem.extra_resident_bytes,
        "update_bytes": problem.update_bytes,
    }


def widest(problem: Problem, figures: Sequence[dict[str, Any]]) -> Problem:
    """The step with the largest of each size, and the longest of each time, that steps of its kind have."""

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
        costs=dataclasses.replace(problem.costs, time_s=each("times_s"), scratch_bytes=each("scratch_bytes")),
        extra_resident_bytes=most("extra_resident_bytes"),
        update_bytes=most("update_bytes"),
    )
