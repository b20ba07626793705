"""Lower bounds on the seconds of a step that copies values to host memory, or gathers sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from memplan.problem.data import Link, Problem, Value
from memplan.solvers.bounds.lower_bound import backward_bytes, needed_after, needed_bytes
from memplan.solvers.bounds.mincut import SavedSet, saved_sets
from memplan.solvers.bounds.moments import reached
from memplan.solvers.orders.flat import Flags, Flat, flatten


def gather_bound_s(problem: Problem) -> float:
    """A lower bound on seconds: every sharded parameter that is read is gathered once, every collective runs once."""
    gather, values = problem.gather, problem.graph.values
    assert gather is not None
    read = {v for op in problem.graph.ops for v in op.inputs if values[v].home == "sharded"}
    return problem.network_s + sum(gather.latency_s + values[v].size_bytes / gather.bytes_per_s for v in read)


def offload_bound_s(problem: Problem, budget_bytes: int, cuts: int = 16) -> float:
    """A lower bound on the seconds of every schedule with copies.

    At any moment, what the backward pass still reads is on the device, is on the host, or is computed later. What is on
    the host by then was copied out before, and has to come back after. So the link's speed times those seconds is room
    beside what the budget leaves. Each minimum cut says how many seconds of recomputation come after the moment at
    least (`_least_extra_s`).

    Where several microbatches are in flight, the moment is that at which all have gone forward and none backward. What
    is left is shared, and so is the time that the link had, so the bound holds for each on the average.
    """
    link, baseline_s = problem.link, problem.baseline_time_s
    assert link is not None
    extra_s = 0.0
    flat = flatten(problem, updates=False)
    for moment in () if flat.lost_late else _moments(flat, baseline_s, link.to_host_bytes_per_s):
        room_bytes = (budget_bytes - moment.fixed_bytes) / problem.in_flight
        for cut in saved_sets(flat, moment.needed, cuts, twice=moment.second_runs):
            extra_s = max(extra_s, _least_extra_s(cut, room_bytes, moment, link))
    return residency_bound_s(replace(problem, budget_bytes=budget_bytes), extra_s)


def residency_bound_s(problem: Problem, extra_s: float = 0.0) -> float:
    """A lower bound on seconds from what lives on the host.

    Every parameter that lives there is fetched (`_least_fetched_bytes`), every gradient of one is sent back, and the
    CPU updates with each: beside the step, from when the first gradient is there, or after it.

    extra_s: recomputation and waiting that no schedule is without.
    """
    link, values = problem.link, problem.graph.values
    found = [problem.baseline_time_s + extra_s]
    sent = sum(v.size_bytes for v in values if _sent(v))
    if link is not None:
        found += [_least_fetched_bytes(problem) / link.to_device_bytes_per_s, sent / link.to_host_bytes_per_s]
    update_s = problem.host_update_s
    if not any(v.updates for v in values if _sent(v)):
        return max(found) + update_s
    # No gradient of a parameter that lives on the host is there before the op that makes the first of them has run.
    graph, time_s = problem.graph, problem.costs.time_s
    deferrable = flatten(problem, updates=False).arrays.deferrable
    made = (i for i, op in enumerate(graph.ops) if any(_sent(values[v]) for v in op.outputs))
    first = next((i for i in made if i >= graph.boundary), graph.boundary)
    forward_s = sum(time_s[i] for i in range(graph.boundary) if not deferrable[i])
    backward_s = sum(time_s[graph.boundary : first + 1]) if first < len(graph.ops) else 0.0
    return max(*found, update_s + (forward_s + backward_s))


def _least_fetched_bytes(problem: Problem) -> int:
    """A lower bound on the bytes that a step fetches of the parameters that live on the host.

    What forward reads is fetched before the boundary, except what has stayed from the step before. What backward reads
    is fetched after it, except what is there at the boundary. Both have to fit beside what is resident.
    """
    graph = problem.graph
    on_host = {i for i, v in enumerate(graph.values) if v.resident and v.home == "host"}
    if not on_host:
        return 0
    room_bytes = 1 << 60 if problem.budget_bytes is None else max(0, problem.budget_bytes - problem.resident_bytes)

    def size_bytes(among: Iterable[int]) -> int:
        return sum(graph.values[v].size_bytes for v in among)

    deferrable = flatten(problem, updates=False).arrays.deferrable
    forward = {v for i, op in enumerate(graph.ops[: graph.boundary]) if not deferrable[i] for v in op.inputs} & on_host
    backward = {v for op in graph.ops[graph.boundary :] for v in op.inputs} & on_host
    everything = {v for op in graph.ops for v in op.inputs} & on_host
    stayed_bytes = min(room_bytes, size_bytes(v for v in everything if graph.values[v].lasting))
    once_bytes = size_bytes(everything) - stayed_bytes
    if problem.in_flight > 1:  # they have that room in turn
        return once_bytes
    before_bytes = size_bytes(forward) - min(stayed_bytes, size_bytes(v for v in forward if graph.values[v].lasting))
    return max(once_bytes, before_bytes + max(0, size_bytes(backward) - room_bytes))


def _sent(value: Value) -> bool:
    return value.role == "gradient" and value.home == "host"


@dataclass(frozen=True, slots=True)
class _OpMoment:
    """An op while it runs for the first time.

    - needed: forward values, made before it, that the backward pass still reads.
    - fixed_bytes: live then besides those, in every schedule.
    - most_before_s: seconds of all ops but those that run after it for certain.
    - most_after_s: seconds of all ops but those that run before it for certain.
    - second_runs: of what is needed, or what makes it, some is overwritten, and is there only where its op has run
      twice.
    """

    needed: frozenset[int]
    fixed_bytes: int
    most_before_s: float
    most_after_s: float
    second_runs: bool


def _least_extra_s(cut: SavedSet, room_bytes: float, moment: _OpMoment, link: Link) -> float:
    """Seconds of recomputation and waiting that the line of a cut leaves nobody without.

    Of E seconds in all let X come before the moment. The cut is about what comes after: E >= X + line - slope * speed *
    (seconds before + X), which is least at X = 0 while a second of copying saves less than one, and else where nothing
    is left to be recomputed. Where ops run twice before the moment, the cut is about these as well, and X may be all
    of E. Copies back have all that comes after the moment, E included.
    """
    slope = cut.line_s_per_byte
    line_s = cut.line_s - slope * room_bytes
    out, back = slope * link.to_host_bytes_per_s, slope * link.to_device_bytes_per_s
    going_s = (line_s - out * moment.most_before_s) / (1 + out if moment.second_runs else max(1.0, out))
    coming_s = (line_s - back * moment.most_after_s) / (1 + back)
    return max(0.0, going_s, coming_s)


def _moments(flat: Flat, baseline_s: float, to_host_bytes_per_s: float) -> Iterator[_OpMoment]:
    """The boundary, where most is held, and where most is beyond what can be on the host.

    The last is looked for in the backward pass and in the forward pass. Where microbatches wait, the boundary is the
    only one.
    """
    a = flat.arrays
    backward_s = np.append(np.cumsum(a.time_s[a.boundary :][::-1])[::-1], 0.0)
    certain_s = float(a.time_s[: a.boundary][~a.deferrable[: a.boundary]].sum())
    fixed = backward_bytes(flat)
    chosen = [(a.boundary, int(fixed[0]))]
    if a.boundary < flat.op_count and not a.others:
        held = fixed[1:] + needed_bytes(flat)
        crowded = held - to_host_bytes_per_s * (baseline_s - backward_s[:-1])
        chosen += [(a.boundary + int(b), int(fixed[1 + b])) for b in {held.argmax(), crowded.argmax()}]
    for first, fixed_bytes in chosen:
        needed, after_s = needed_after(flat, first), float(backward_s[first - a.boundary])
        before_s = certain_s + float(backward_s[0]) - after_s
        second_runs = bool((_reach(flat, needed) & a.overwritten).any())
        yield _OpMoment(needed, fixed_bytes, baseline_s - after_s, baseline_s - before_s, second_runs)
    if not a.others and (forward := _forward_moment(flat, baseline_s, to_host_bytes_per_s)) is not None:
        yield forward


def _forward_moment(flat: Flat, baseline_s: float, to_host_bytes_per_s: float) -> _OpMoment | None:
    """Where most is beyond what can be on the host, were the forward pass to run in the given order."""
    a, ops = flat.arrays, range(flat.arrays.boundary)
    all_needed = needed_after(flat, a.boundary)
    here = np.zeros(a.boundary, dtype=np.int64)
    passing = np.zeros(a.boundary + 1, dtype=np.int64)
    for op in ops:
        passing[op + 1] = passing[op] + sum(int(a.size_bytes[v]) for v in flat.makes[op] if v in all_needed)
        here[op] = a.scratch_bytes[op] + sum(int(a.size_bytes[v]) for v in flat.makes[op] if not a.in_place[v])
        here[op] += sum(int(a.size_bytes[v]) for v in flat.reads[op] if v not in all_needed and not a.held[v])
    copied = to_host_bytes_per_s * (np.cumsum(a.time_s[: a.boundary]) - a.time_s[: a.boundary])
    crowded = np.where(a.deferrable[: a.boundary], -np.inf, passing[:-1] + here - copied)
    if not len(ops) or flat.op_count == a.boundary or np.isneginf(crowded.max()):
        return None
    op = int(crowded.argmax())
    before, stack = set[int](), [op]  # ops that it needs
    while stack:
        makers = {int(a.producer[v]) for v in flat.reads[stack.pop()] if a.producer[v] >= 0} - before
        before |= makers
        stack += makers
    after, made = set[int](), set(flat.makes[op])  # ops that need it
    for later in range(op + 1, a.boundary):
        if made & set(flat.reads[later]):
            after.add(later)
            made |= set(flat.makes[later])
    after_s = float(a.time_s[op] + a.time_s[a.boundary :].sum()) + sum(float(a.time_s[i]) for i in after)
    needed = all_needed & {v for i in before for v in flat.makes[i]} - {int(a.taken[v]) for v in flat.makes[op]}
    reach = _reach(flat, needed)
    held = sum(int(a.size_bytes[v]) for i in before for v in flat.makes[i] if a.held[v])
    operands = sum(int(a.size_bytes[v]) for v in flat.reads[op] if not (reach[v] or a.held[v]))
    new = sum(int(a.size_bytes[v]) for v in flat.makes[op] if not a.in_place[v])
    resident = int(backward_bytes(flat.alone)[0]) - a.tangent_bytes
    resident -= sum(int(a.size_bytes[v]) for i in ops for v in flat.makes[i] if a.held[v])
    fixed_bytes = resident + held + operands + new + int(a.scratch_bytes[op])
    before_s = sum(float(a.time_s[i]) for i in before)
    second_runs = bool((reach & a.overwritten).any())
    return _OpMoment(needed, fixed_bytes, baseline_s - after_s, baseline_s - before_s, second_runs)


def _reach(flat: Flat, needed: frozenset[int]) -> Flags:
    """These values, and what recomputing them may ask for."""
    wanted = np.zeros(len(flat.arrays.size_bytes), dtype=np.bool_)
    wanted[list(needed)] = True
    return reached(flat, wanted, flat.arrays.rerunnable)
