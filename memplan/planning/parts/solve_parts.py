"""The front of every captured part: what its ops cost, and its schedules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from memplan.capture.capture import Capture
from memplan.capture.ops.real_results import Facts, OtherResults
from memplan.costs.measure import estimate, measure
from memplan.errors import UnsupportedModel
from memplan.planning.parts.capture_parts import capture_unit
from memplan.planning.parts.part import Part
from memplan.planning.parts.request import PartsRequest
from memplan.problem.data import Costs, Problem
from memplan.problem.structure import same_structure
from memplan.solvers import Front


def solve_units(request: PartsRequest, units: Sequence[Part]) -> None:
    """Find the front of every captured unit; equal units are solved once."""
    known: list[tuple[Problem, Front]] = []
    for unit in units:
        if unit.captured is None:
            continue
        try:
            costs = _costs(unit, request.costs)
        except UnsupportedModel as error:  # an op does not do what its trace says
            unit.give_up(str(error))
            continue
        problem = Problem(unit.captured.traced.graph, costs)
        found = next((front for other, front in known if _equal(other, problem)), None)
        if found is None:
            found = request.solve(problem)
            known.append((problem, found))
        unit.problem, unit.front = problem, found
        unit.captured = dataclasses.replace(unit.captured, call=unit.captured.call.without_tensors())


def _equal(a: Problem, b: Problem) -> bool:
    """Whether two problems have one front."""
    sizes = [[v.size_bytes for v in problem.graph.values] for problem in (a, b)]
    return a.costs == b.costs and sizes[0] == sizes[1] and same_structure(a.graph, b.graph)


def _costs(unit: Part, source: str) -> Costs:
    """Costs of a unit's ops. It is captured once more where ops are found to give other results than were traced."""
    found: Mapping[str, Facts] = {}
    while unit.captured is not None:
        try:
            return _costs_as_captured(unit, unit.captured, source)
        except OtherResults as error:
            if error.found == found:
                raise
            found = error.found
            error.note()
            capture_unit(unit, unit.shares)
    raise UnsupportedModel(unit.site.reason)


def _costs_as_captured(unit: Part, captured: Capture, source: str) -> Costs:
    if source == "estimate":
        return estimate(captured.traced)
    tensors = dict([*unit.module.named_parameters(), *unit.module.named_buffers()])
    inputs = captured.call.tensors
    inputs = (*inputs, *(inputs[position] for position in unit.further))

    def resident(kind: str, name: str, position: int) -> torch.Tensor | None:
        return inputs[position] if kind == "input" else tensors[name]

    return measure(captured.traced, resident)
