"""Slow, obvious answers that the solvers are held against. Nothing here shares code with what it judges."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache

from memplan.problem.data import Problem
from memplan.problem.schedule import BOUNDARY, SURFACE_BATCH
from memplan.solvers.chain.rotor import ChainTable


def recount(problem: Problem, order: Sequence[int]) -> tuple[int, float]:
    """(peak bytes, seconds) of an order, by drawing every instance of every value as an interval of positions.

    A non-resident instance stands from the position that makes it to its last read before the op runs again; a held
    one to the end, and its repetitions for one position; one that is overwritten until the overwriter has run, which
    brings memory of its own only in so far as it outlasts that.
    """
    graph = problem.graph
    bytes_at = [problem.resident_bytes] * (len(order) + 1)  # one more position: the optimizer's step
    boundary = order.index(BOUNDARY)
    tangents = sum(v.size_bytes for v in graph.values if v.role == "tangent")
    for p in range(boundary, len(order) + 1):
        bytes_at[p] += tangents
    bytes_at[-1] += problem.update_bytes
    for v, value in enumerate(graph.values):
        if value.resident or value.role == "tangent":
            continue
        made = [p for p, op in enumerate(order) if op != BOUNDARY and v in graph.ops[op].outputs]
        for k, p in enumerate(made):
            _draw(problem, order, v, p, made[k + 1] if k + 1 < len(made) else len(order), k == 0, bytes_at)
    _draw_generators(problem, order, bytes_at)
    for p, op in enumerate(order):
        if op != BOUNDARY:
            bytes_at[p] += problem.costs.scratch_bytes[op]
    inputs = sum(v.size_bytes for v in graph.values if v.role == "input")
    one_that_waits = bytes_at[boundary] - tangents - problem.resident_bytes + inputs
    for p in range(len(order)):
        bytes_at[p] += (problem.in_flight - 1) * one_that_waits
    time_s = sum(problem.costs.time_s[op] for op in order if op != BOUNDARY)
    return max([problem.resident_bytes, *bytes_at]), time_s


def _draw(problem: Problem, order: Sequence[int], v: int, start: int, end: int, first: bool, at: list[int]) -> None:
    graph = problem.graph
    value = graph.values[v]
    reads = [p for p in range(start + 1, end) if order[p] != BOUNDARY and v in graph.ops[order[p]].inputs]
    killer = next(
        (p for p in range(start + 1, end) if order[p] != BOUNDARY
         and any(graph.values[o].reuses == v for o in graph.ops[order[p]].outputs)), None,
    )  # fmt: skip
    stop = killer - 1 if killer is not None else max([start, *reads])
    if value.held:
        stop = len(order) if first else start
        if problem.frees_gradients and value.role == "gradient":
            stop = _handed_over(problem, order, start)
    begin = start
    taken = value.reuses
    if taken is not None and (graph.values[taken].resident or graph.values[taken].role == "tangent"):
        begin = start + 1  # the memory was there: only its end shows, as bytes given back
        for p in range(stop + 1, len(order) + 1):
            if killer is None and graph.values[taken].role == "tangent" and not value.held:
                at[p] -= value.size_bytes
        return
    for p in range(begin, stop + 1):
        at[p] += value.size_bytes


def _handed_over(problem: Problem, order: Sequence[int], start: int) -> int:
    pending = 0
    for p, op in enumerate(order):
        if op != BOUNDARY:
            pending += sum(problem.graph.values[v].role == "gradient" for v in problem.graph.ops[op].outputs)
        if pending >= SURFACE_BATCH:
            if p >= start:
                return p
            pending = 0
    return len(order) - 1


def _draw_generators(problem: Problem, order: Sequence[int], at: list[int]) -> None:
    for op in set(order) - {BOUNDARY}:
        runs = [p for p, other in enumerate(order) if other == op]
        if problem.graph.ops[op].random and len(runs) > 1:
            for p in range(runs[0], runs[-1] + 1):
                at[p] += problem.graph.rng_state_bytes
            for p in runs[1:]:
                at[p] += problem.graph.rng_state_bytes


def chain_optimum(table: ChainTable, slots: int) -> float:
    """Least seconds of recomputation of a chain, by trying every move."""
    count = len(table.option_count)
    last = count - 1

    def outside(i: int, j: int) -> int:
        return int(table.outside_first[i] if j == last else table.outside_again[j])

    @cache
    def best(i: int, j: int, m: int) -> float:
        found = math.inf
        for k in range(int(table.option_count[i])):
            cost = float(table.cost_first[i, k] if j == last else table.cost_again[i, k])
            saved = int(table.saved[i, k])
            if m < max(int(table.forward_peak[i, k]) + outside(i, j), int(table.backward_peak[i, k]), saved):
                continue
            found = min(found, cost + (best(i + 1, j, m - saved) if i < j else 0.0))
        for c in range(i + 1, j + 1):
            kept = int(table.width[i, c - 1])
            peaks = [
                int(table.leaf_peak[x]) + outside(x, j) + (int(table.width[i, x - 1]) if x > i else 0)
                for x in range(i, c)
            ]
            if m < max([kept, *peaks]):
                continue
            cost = 0.0 if j == last else float(sum(table.leaf_again[i:c]))
            found = min(found, cost + best(c, j, m - kept) + best(i, c - 1, m))
        return found

    return best(0, last, slots)


def all_orders(problem: Problem, most_repeats: int) -> Iterator[tuple[int, ...]]:
    """Orders with every op once in turn, the boundary, and at most `most_repeats` repeated forward ops anywhere."""
    graph = problem.graph
    once = (*range(graph.boundary), BOUNDARY, *range(graph.boundary, len(graph.ops)))

    def grow(order: tuple[int, ...], start: int, left: int) -> Iterator[tuple[int, ...]]:
        yield order
        if left == 0:
            return
        for p in range(start, len(order)):
            for op in range(graph.boundary):
                if op not in order[:p] or not graph.ops[op].recomputable:
                    continue
                yield from grow((*order[:p], op, *order[p:]), p + 1, left - 1)

    yield from grow(once, 0, most_repeats)
