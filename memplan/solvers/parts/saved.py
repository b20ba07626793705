"""Schedules of one unit of a larger step by what they save from forward to backward, not by their own peak.

What units save adds up over a step, and their peaks do not. So the turn from forward to backward is given an op with
more scratch than anything else holds: the peak is there then, and a front of peaks is one of saved bytes.
"""

from __future__ import annotations

import dataclasses

from memplan.config import Config
from memplan.problem.data import Op, Problem
from memplan.solvers.chain.baselines import keep_all
from memplan.solvers.front.front import Candidate, Front, candidate, solve_front
from memplan.solvers.orders.flat import flatten
from memplan.solvers.orders.sketch import sketch_of


def solve_saved(problem: Problem, config: Config | None = None) -> Front:
    """The front of saved bytes against seconds: no point has both fewer of the one and less of the other."""
    turn = problem.graph.boundary
    front = solve_front(_with_turn(problem), config)

    def without_turn(found: Candidate) -> Candidate:
        order = tuple(op - 1 if op > turn else op for op in found.order if op != turn)
        return candidate(problem, found.solver, order)

    points = tuple(without_turn(point) for point in front.points)
    return Front(points, without_turn(front.keep_all), front.bound, front.truncated)


def _with_turn(problem: Problem) -> Problem:
    """The problem with an op at the start of backward beside which no other peak matters."""
    graph, costs, turn = problem.graph, problem.costs, problem.graph.boundary
    flat = flatten(problem)
    vast_bytes = 4 * sketch_of(flat, "keep all", keep_all(flat)).peak_bytes
    op = Op("turn", "memplan.turn", "backward", (), (), recomputable=False)
    return dataclasses.replace(
        problem,
        graph=dataclasses.replace(graph, ops=(*graph.ops[:turn], op, *graph.ops[turn:])),
        costs=dataclasses.replace(
            costs,
            time_s=(*costs.time_s[:turn], 0.0, *costs.time_s[turn:]),
            scratch_bytes=(*costs.scratch_bytes[:turn], vast_bytes, *costs.scratch_bytes[turn:]),
        ),
    )
