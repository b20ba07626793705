"""Where parameters live between steps, which are updated in backward, what runs once: written into a captured step.

Every parameter that lives on the host has to be fetched for the forward and for the backward pass, and its gradient
sent back. In return, the memory of the parameter, its gradient and its optimizer state is free on the device all the
time. So a few shares of the parameters are tried, from none to all of them, then shares around the best one, and the
fastest step is taken. A share is spread evenly over the step, so that its copies can overlap with compute.

The best schedule without any copies is the first to beat, so a host budget never makes a step slower. Where copies of
frozen parameters may stay on the device between steps, the best schedule without that is the next to beat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from memplan.capture.analysis.traced import Traced
from memplan.capture.ops.layout import allocated_bytes
from memplan.capture.shards import Shard
from memplan.errors import UnsupportedModel
from memplan.problem.data import Graph, Problem, Value
from memplan.problem.packing import host_bytes_beside
from memplan.solvers import Front
from memplan.solvers.bounds.offload_bound import residency_bound_s
from memplan.solvers.offload.fit_copies import Offloaded, least_bytes, solve_offload


@dataclass(frozen=True, slots=True)
class Movable:
    """A parameter that may live on the host, or several that have their gradients in one value, and move together.

    - values, gradient: their indices in the graph; gradient is None where there is none.
    - names: those that the model knows them by; of one parameter, first the one by which the step looks it up.
    - used: the step reads it.
    """

    values: tuple[int, ...]
    names: tuple[str, ...]
    gradient: int | None
    size_bytes: int
    used: bool = True


def movables(traced: Traced, together: Collection[str] = ()) -> tuple[Movable, ...]:
    """Parameters that may live on the host, in the order of their first use; then those that the step does not use.

    The step must only read them, and their gradients must belong to nothing else. They must have memory of their own:
    parameters that share it, or are parts of something larger, stay together.

    together: names of parameters that move together, so that their gradients may share memory.
    """
    graph = traced.graph
    taken = {v.reuses for v in graph.values if v.reuses is not None}
    outputs = {o.value for o in traced.outputs}
    gradient_of: dict[str, int] = {}
    shared: set[int] = set()
    for gradient in traced.gradients:
        parameters = gradient.parameters
        gradient_of |= dict.fromkeys(parameters, gradient.value)
        if len(parameters) < len(gradient.nodes) or (len(parameters) > 1 and not set(parameters) <= set(together)):
            shared.add(gradient.value)
    found: dict[int, Movable] = {}  # by gradient, or by value where there is none
    used = dict.fromkeys(v for op in graph.ops for v in op.inputs)
    for v in dict.fromkeys((*used, *range(len(graph.values)))):
        value = graph.values[v]
        roots = [node for node in traced.roots.get(v, ()) if node in traced.residents]
        names = tuple(traced.residents[node].name for node in roots)
        gradients = {gradient_of[n] for n in names if n in gradient_of}
        if value.role != "parameter" or not names or v in taken | outputs or value.reuses is not None:
            continue
        tensors = [node.meta["val"] for node in roots]
        whole = all(t.storage_offset() == 0 and t.untyped_storage().nbytes() == t.nbytes for t in tensors)
        if len(names) > 1 or not whole or gradients & (shared | outputs):
            continue
        movable = Movable((v,), names, next(iter(gradients), None), value.size_bytes, v in used)
        key = v if movable.gradient is None else movable.gradient
        if (one := found.get(key)) is not None:
            movable = Movable(
                one.values + movable.values, one.names + movable.names, one.gradient,
                one.size_bytes + movable.size_bytes, one.used or movable.used,
            )  # fmt: skip
        found[key] = movable
    named = {name for movable in found.values() for name in movable.names}
    stuck = {gradient for name, gradient in gradient_of.items() if name not in named}
    return tuple(movable for movable in found.values() if movable.gradient not in stuck)


def all_names(movables: Sequence[Movable]) -> frozenset[str]:
    """All names of all parameters that can live on the host."""
    return frozenset(name for movable in movables for name in movable.names)


def with_homes(traced: Traced, host: Collection[str], lasting: Collection[str] = ()) -> Traced:
    """The step with the movable parameters of these names, and their gradients, on the host.

    lasting: names of parameters to which nothing writes between steps.
    """
    return dataclasses.replace(traced, graph=graph_with_homes(traced.graph, movables(traced, host), host, lasting))


def graph_with_homes(graph: Graph, parts: Iterable[Movable], host: Collection[str], lasting: Collection[str]) -> Graph:
    """The graph with those of the movable parameters that have one of these names, and their gradients, on the host."""
    values: list[Value] = list(graph.values)
    for movable in parts:
        if not any(name in host for name in movable.names):
            continue
        lasts = movable.gradient is None and all(name in lasting for name in movable.names)
        for value in movable.values:
            values[value] = dataclasses.replace(values[value], home="host", lasting=lasts)
        if movable.gradient is not None:
            gradient = values[movable.gradient]
            values[movable.gradient] = dataclasses.replace(gradient, home="host", held=False, update_bytes=0)
    return dataclasses.replace(graph, values=tuple(values))


def with_shards(traced: Traced, sharded: Mapping[str, Shard]) -> Traced:
    """The step with the parameters of these names gathered, and their gradients sharded.

    Raises UnsupportedModel where such a parameter is written to or returned, which would outlive what was gathered.
    """
    values: list[Value] = list(traced.graph.values)
    taken = {v.reuses for v in values if v.reuses is not None}
    outputs = {output.value for output in traced.outputs}
    for node, resident in traced.residents.items():
        shard = sharded.get(resident.name) if resident.kind == "parameter" else None
        if shard is None or shard.stays:
            continue
        value = next(v for v, roots in traced.roots.items() if node in roots and values[v].reuses is None)
        if value in taken | outputs:
            raise UnsupportedModel(
                f"forward writes to parameter {resident.name}, or returns it, and it is sharded: what was gathered is "
                "freed. Return a copy, and write to buffers only"
            )
        size_bytes = allocated_bytes(shard.gathered_bytes, traced.device)
        values[value] = dataclasses.replace(values[value], home="sharded", size_bytes=size_bytes)
    for gradient in traced.gradients:
        if len(gradient.parameters) == len(gradient.nodes) and all(name in sharded for name in gradient.parameters):
            values[gradient.value] = dataclasses.replace(values[gradient.value], home="sharded")
    return dataclasses.replace(traced, graph=dataclasses.replace(traced.graph, values=tuple(values)))


def with_updates(traced: Traced, update_bytes: Mapping[str, int]) -> Traced:
    """The step with parameters of these names updated as soon as their gradients are handed over.

    update_bytes: by name, what the update allocates for a while on the device.
    """
    values: list[Value] = list(traced.graph.values)
    for gradient in traced.gradients:
        names = [name for name in gradient.parameters if name in update_bytes]
        if names:
            values[gradient.value] = dataclasses.replace(
                values[gradient.value],
                held=len(names) < len(gradient.nodes),  # somebody else keeps it
                updates=True,
                update_bytes=max(update_bytes[name] for name in names),
            )
    return dataclasses.replace(traced, graph=dataclasses.replace(traced.graph, values=tuple(values)))


def with_others_in_flight(traced: Traced) -> Traced:
    """The step for several forwards in flight: what reads state that forward has written to does so once, in forward.

    The next forward writes to it again before backward runs.
    """
    graph = traced.graph
    written = {i for i, value in enumerate(graph.values) if value.resident and value.reuses is not None}
    once = [dataclasses.replace(op, recomputable=op.recomputable and written.isdisjoint(op.inputs)) for op in graph.ops]
    return dataclasses.replace(traced, graph=dataclasses.replace(graph, ops=tuple(once)))


_UNUSED = 1e-9  # a share that has none of the parameters which the step uses
_SHARES = (0.0, _UNUSED, 0.125, 0.25, 0.5, 0.75, 1.0)
_ROUNDS = 5  # of shares halfway to the next ones, around the best
_ORDERS = 24
_WORTH = 1e-3  # of a step: for less, no further parameters move to the host

ProblemOf = Callable[[frozenset[str]], Problem]  # the step's problem where these parameters live on the host


@dataclass(frozen=True, slots=True)
class Residency:
    """A choice of the parameters that live on the host, with a schedule.

    - host: names of the parameters that live there.
    - problem: the step with those homes.
    - found: the schedule and its timeline.
    """

    host: frozenset[str]
    problem: Problem
    found: Offloaded

    @property
    def is_fastest(self) -> bool:
        """Whether no step can be faster: it takes no longer than without a plan."""
        return self.found.timeline.time_s <= self.problem.baseline_time_s


def spread_share(movables: Sequence[Movable], share: float) -> frozenset[str]:
    """Names of parameters with about this share of the bytes, spread evenly over the order of first use.

    Parameters that the step does not use come first, all of them, because fetching them costs the step nothing.
    """
    chosen = [name for movable in movables if share and not movable.used for name in movable.names]
    owed_bytes = 0.0
    for movable in movables:
        if not movable.used:
            continue
        owed_bytes += share * movable.size_bytes
        if owed_bytes >= movable.size_bytes * (1 - 1e-9):
            owed_bytes -= movable.size_bytes
            chosen += movable.names
    return frozenset(chosen)


def choose_homes(
    movables: Sequence[Movable],
    front: Front,
    on_device: Front | None,
    problem_of: ProblemOf,
    host_budget_bytes: int,
    fixed: frozenset[str] | None,
    budget_bytes: int,
    *,
    stays: bool = False,
) -> Residency | None:
    """The fastest step that keeps both budgets; None where there is none.

    - movables: parameters that may live on the host.
    - front: of the step without its movable parameters.
    - on_device: of the step with all of them on the device, as it is planned without a host budget; None where that is
      known to be too large.
    - problem_of: gives the step's problem where parameters of these names live on the host.
    - host_budget_bytes, budget_bytes: the budgets on the host and on the device.
    - fixed: parameters that live on the host because of another call; more go there only where nothing fits without.
    - stays: copies of lasting parameters may stay on the device between steps.
    """
    best: Residency | None = None
    seen = set[frozenset[str]]()
    if on_device and (kept := on_device.best(budget_bytes)) is not None:  # the fastest step that only recomputes
        problem = dataclasses.replace(problem_of(frozenset()), budget_bytes=budget_bytes)
        best = Residency(frozenset(), problem, Offloaded(kept.solver, kept.schedule, kept.timeline))

    def is_faster(host: frozenset[str]) -> bool:
        """Look for a schedule with these parameters on the host. Whether it is the fastest so far."""
        nonlocal best
        before = best
        if host in seen or (best is not None and best.is_fastest):
            return False
        seen.add(host)
        problem = dataclasses.replace(problem_of(host), budget_bytes=budget_bytes)
        room_bytes = host_budget_bytes - host_bytes_beside(problem)
        under_s = float("inf") if best is None else best.found.timeline.time_s * (1 - _WORTH)
        if room_bytes < 0 or residency_bound_s(problem) >= under_s:
            return False
        for tried in (front,) if host or on_device is None or on_device is front else (on_device, front):
            found = solve_offload(problem, tried.points, budget_bytes, room_bytes, under_s, stays)
            if found is not None:
                best = Residency(host, problem, found)
                under_s = found.timeline.time_s * (1 - _WORTH)
        return best is not before

    if fixed is not None:
        for share in _SHARES:  # first none but those
            if best is None or not share:
                is_faster(fixed | spread_share(movables, share))
        return best
    chosen = 0.0
    for share in _SHARES:
        chosen = share if is_faster(spread_share(movables, share)) else chosen
    known = set(_SHARES)
    for _ in range(_ROUNDS if chosen else 0):  # what lives there is slow to update, so a little less may be best
        below, above = max(s for s in known if s < chosen), min((s for s in known if s > chosen), default=chosen)
        for share in sorted({(below + chosen) / 2, (chosen + above) / 2} - known):
            known.add(share)
            chosen = share if is_faster(spread_share(movables, share)) else chosen
    return best


def least_resident_bytes(problem: Problem) -> int:
    """The bytes that any schedule without copies holds at its end: what is resident, and every gradient."""
    values = problem.graph.values
    held = sum(v.size_bytes for v in values if v.role == "gradient" and v.held and v.reuses is None)
    return problem.resident_bytes + (0 if problem.frees_gradients else held)


def least_peak_bytes(host: frozenset[str], front: Front, problem_of: ProblemOf) -> int:
    """The smallest budget on the device that copies can reach with these parameters on the host.

    front: has the orders of ops that are tried.
    """
    return least_bytes(problem_of(host), *(c.order for c in front.spread(_ORDERS)))
