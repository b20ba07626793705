"""Where parameters live between steps, which are updated in backward, what runs once: written into a captured step."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from memplan.capture.analysis.traced import Traced
from memplan.capture.ops.layout import allocated_bytes
from memplan.capture.shards import Shard
from memplan.errors import UnsupportedModel
from memplan.problem.data import Graph, Value


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
