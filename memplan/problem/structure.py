"""Whether two graphs are the same step, and where they differ."""

from __future__ import annotations

from dataclasses import fields

from memplan.problem.data import Graph, Op


def structure(graph: Graph) -> tuple[object, ...]:
    """A key that is equal for graphs for which one schedule means the same: equal but for sizes and layouts."""
    ops = tuple((op.kind, op.phase, op.inputs, op.outputs, op.effects, op.random) for op in graph.ops)
    return ops, tuple((v.role, v.held, v.reuses) for v in graph.values)


def first_difference(planned: Graph, captured: Graph) -> str | None:
    """What differs between two graphs, in words; None where they are equal."""
    if planned == captured:
        return None
    for what in ("value", "op"):
        mine, theirs = (getattr(graph, f"{what}s") for graph in (planned, captured))
        for index, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            if a != b:
                names = [f.name for f in fields(a) if f.compare and getattr(a, f.name) != getattr(b, f.name)]
                if names == ["key"] and isinstance(b, Op) and b.fused:
                    return (
                        f"op {index} ({b.name}) is a group that is compiled otherwise here: with another version of "
                        "PyTorch, another number of threads, or for other sizes"
                    )
                shown = ", ".join(
                    f"{n}: {getattr(a, n)!r} in the plan, {getattr(b, n)!r} in the model" for n in names[:3]
                )
                return f"{what} {index} ({b.name}) differs: {shown}"
        if len(mine) != len(theirs):
            return f"the plan has {len(mine)} {what}s, the model's step has {len(theirs)}"
    return "the boundary between forward and backward, or the size of a generator state, differs"
