"""Lower bounds on the seconds of a step that copies values to host memory, or gathers sharded parameters."""

from __future__ import annotations

from memplan.problem import Problem
from memplan.solvers.bound import backward_bytes, needed_after, needed_bytes
from memplan.solvers.flat import Flat, flatten
from memplan.solvers.mincut import saved_sets


def gather_bound_s(problem: Problem) -> float:
    """No schedule takes less: every sharded parameter that an op reads is gathered once at least."""
    gather, values = problem.gather, problem.graph.values
    assert gather is not None
    read = {v for op in problem.graph.ops for v in op.inputs if values[v].home == "sharded"}
    return sum(gather.latency_s + values[v].size_bytes / gather.bytes_per_s for v in read)


def offload_bound_s(problem: Problem, budget_bytes: int, cuts: int = 16) -> float:
    """No schedule with copies takes less.

    At any moment of the backward pass, what the rest of it reads is on the device, is on the host, or is computed
    later. What is on the host by then was copied out before: so a step of T seconds has at most (T - seconds of what
    comes after) times the link's speed more room than the budget leaves beside what nothing can free, and each minimum
    cut is a line that limits T from below. The same holds for copying back. Every parameter that lives on the host is
    fetched once at least, every gradient of one sent back, and the CPU updates with each: beside the step, or after it.
    """
    link = problem.link
    assert link is not None
    graph, values, time_s = problem.graph, problem.graph.values, problem.costs.time_s
    read = {v for op in graph.ops for v in op.inputs}
    fetched = sum(values[v].size_bytes for v in read if values[v].resident and values[v].home == "host")
    sent = sum(v.size_bytes for v in values if v.role == "gradient" and v.home == "host")
    update_s = sent * problem.host_update_s_per_byte
    beside = any(v.updates for v in values if v.role == "gradient" and v.home == "host")
    baseline_s = problem.baseline_time_s
    found = [baseline_s, fetched / link.to_device_bytes_per_s, sent / link.to_host_bytes_per_s]
    flat = flatten(problem, updates=False)
    forward_s = sum(t for t, late in zip(time_s, flat.arrays.deferrable) if not late)
    forward_s -= sum(time_s[graph.boundary :])  # no op of the backward pass is deferrable
    for first, fixed_bytes in _moments(flat):
        after_s = sum(time_s[first:])
        before_s = forward_s + sum(time_s[graph.boundary : first])
        for cut in saved_sets(flat, needed_after(flat, first), cuts):
            slope = cut.line_s_per_byte
            beyond_s = cut.line_s - slope * (budget_bytes - fixed_bytes)
            for speed, other_s in ((link.to_host_bytes_per_s, after_s), (link.to_device_bytes_per_s, before_s)):
                found.append((baseline_s + beyond_s + slope * speed * other_s) / (1 + slope * speed))
    return max(*found, update_s) if beside else max(found) + update_s


def _moments(flat: Flat) -> list[tuple[int, int]]:
    """(backward op, bytes that nothing can free then): the boundary, and where most is held."""
    boundary = flat.arrays.boundary
    fixed = backward_bytes(flat)
    if boundary == flat.op_count:
        return [(boundary, int(fixed[0]))]
    fullest = int((fixed[1:] + needed_bytes(flat)).argmax())
    return [(boundary, int(fixed[0])), (boundary + fullest, int(fixed[1 + fullest]))]
