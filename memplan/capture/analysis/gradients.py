"""How gradients reach parameters: autograd hands them over, copies some, sums in place; some come by islands alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memplan.capture.analysis.draft import Draft, DraftOp
from memplan.capture.analysis.traced import Gradient, Made, Traced
from memplan.capture.ops.island_ops import IslandKernel
from memplan.capture.ops.layout import gradient_layout, lies_as_leaf, overlap, same_layout, storage_key, tensors_of
from memplan.capture.trace.raw_trace import RawTrace

aten = torch.ops.aten

Named = tuple[str, fx.Node]  # ("parameter transformer.wte.weight", node of its gradient)
Route = tuple[str, int] | None  # an island and which of its inputs a gradient is of; None: no island
_PAST_ISLANDS: frozenset[Route] = frozenset({None})


def gradient_copy(gradient: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """The copy that AccumulateGrad makes of a gradient that it can't take over, in this layout."""
    return gradient.new_empty_strided(size, stride).copy_(gradient)


def take_gradients(draft: Draft, raw: RawTrace) -> None:
    """Mark gradients, and add copies of those that AccumulateGrad could not take over as they are."""
    by_value: dict[int, list[Named]] = {}
    for name, node in raw.gradients.items():
        if node is not None:
            by_value.setdefault(draft.present(node), []).append((name, node))
    ops = tuple(draft.ops)  # without the copies that are put between them here
    made = {value: position for position, op in reversed(list(enumerate(ops))) for value in op.outputs}
    last_read = {value: position for position, op in enumerate(ops) for value in op.reads.values()}
    for value, nodes in by_value.items():
        by_backward = value in made and ops[made[value]].phase == "backward"
        # Those in memory that nothing else reads become `.grad` without a copy.
        foreign = draft.values[value].role != "activation" or draft.values[value].held
        read_later = by_backward and last_read.get(value, -1) > made[value]
        kept = list[Named]()
        if by_backward and not (read_later or foreign or overlap([n.meta["val"] for _, n in nodes])):
            kept = [(name, n) for name, n in nodes if lies_as_leaf(n.meta["val"], _leaf(draft, name))]
        for name, node in nodes:
            if (name, node) not in kept:
                _copy(draft, raw.module.graph, name, node, value)
        if kept:
            draft.values[value].role, draft.values[value].held = "gradient", True
            draft.gradients.append(Gradient(value, tuple(kept)))
            draft.values[value].name = "gradient of " + ", ".join(name for name, _ in kept)


def _leaf(draft: Draft, name: str) -> torch.Tensor:
    """The fake parameter or input that a gradient belongs to."""
    kind, _, leaf = name.partition(" ")
    node = next(n for n, r in draft.residents.items() if r.kind == kind and r.name == leaf)
    return node.meta["val"]  # type: ignore[no-any-return]


def _copy(draft: Draft, graph: fx.Graph, name: str, node: fx.Node, value: int) -> None:
    """Add the op that copies a gradient, right after the op that makes the gradient."""
    gradient, leaf = node.meta["val"], _leaf(draft, name)
    size, stride = gradient_layout(gradient, leaf)
    if name.startswith("input ") and lies_as_leaf(gradient, leaf):
        stride = tuple(gradient.stride())  # what comes before an input sees those of dimensions of size 1 too
    fake = torch.empty_strided(size, stride, dtype=node.meta["val"].dtype, device="meta")
    with graph.inserting_before(next(n for n in graph.nodes if n.op == "output")):
        copy = graph.call_function(gradient_copy, (node, size, stride))
    copy.meta["val"] = fake
    position = max((i for i, op in enumerate(draft.ops) if value in op.outputs), default=-1)
    position = max(position, sum(op.phase == "forward" for op in draft.ops) - 1) + 1
    made = draft.new_storage(copy, fake, "gradient", f"gradient of {name}")
    draft.values[made].held = True
    op = DraftOp(
        node=copy, target=gradient_copy, args=(node, size, stride), kwargs={}, phase="backward", reads={node: value},
        made=[Made(copy, None, made)], outputs=[made], effects=[], random=False, recomputable=True,
        layer=name.partition(" ")[2].rpartition(".")[0],
    )  # fmt: skip
    draft.ops.insert(position, op)
    draft.gradients.append(Gradient(made, ((name, copy),)))


def add_in_place(draft: Draft) -> None:
    """Add into the first operand where nothing reads that afterwards.

    Eager does so where autograd's engine sums gradients, attention adds its mask, or a linear layer its bias. Only
    under a dispatch mode, as in a trace, are these sums out of place. Other sums are out of place in eager, which frees
    the operand sooner. In forward, the sum must be the only reader: another reader could run once more on an operand
    that is kept. What the user's Python has seen stays as it is, for an array or a list may hold that memory.
    """
    last_read = {value: position for position, op in enumerate(draft.ops) for value in op.reads.values()}
    readers = Counter(value for op in draft.ops for value in set(op.reads.values()))
    made_by = {v: op for op in draft.ops for v in op.outputs}
    nodes = [node for op in draft.ops if isinstance(op.target, IslandKernel) for node in (*op.reads, op.node)]
    seen = {storage_key(tensor) for node in nodes for tensor in tensors_of(node.meta["val"])}
    for position, op in enumerate(draft.ops):
        if op.target is not aten.add.Tensor or op.kwargs:
            continue
        first, second = op.args
        if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
            continue
        old, new = op.reads[first], op.outputs[0]
        producer = made_by.get(old)
        free = (
            producer is not None
            and producer.phase == op.phase
            and draft.values[old].role == "activation"
            and not draft.values[old].held
            and last_read[old] == position
            and storage_key(first.meta["val"]) not in seen
            and (op.phase == "backward" or readers[old] == 1)
            and old != op.reads[second]
            and same_layout(first.meta["val"], op.node.meta["val"])
        )
        if free:
            op.target = aten.add_.Tensor
            draft.values[new].reuses = old


def order_gradients(draft: Draft, arrivals: Sequence[str]) -> None:
    """Make gradients in the order in which autograd hands over those of parameters, where ops can change places.

    A bias, whose gradient is computed last, is handed over before the weight beside it. Buckets of gradients are filled
    in that order, and where three ranks or more sum them the bits depend on the place in a bucket.

    Two gradients of one op (of a convolution) arrive in reverse order where the one that autograd takes first is copied
    for its layout, because the copy is made after both.
    """
    ranks = {f"parameter {name}": rank for rank, name in enumerate(arrivals)}
    ranks_of = {g.value: [ranks[name] for name, _ in g.nodes if name in ranks] for g in draft.gradients}
    seen: list[tuple[int, DraftOp]] = []
    for op in tuple(draft.ops):
        found = [rank for value in op.outputs for rank in ranks_of.get(value, ())]
        if not found:
            continue
        index = next((i for i, (rank, _) in enumerate(seen) if rank > max(found)), len(seen))
        if index < len(seen) and not _moved_before(draft.ops, op, seen[index][1], draft):
            index = len(seen)
        seen.insert(index, (max(found), op))


def _moved_before(ops: list[DraftOp], op: DraftOp, other: DraftOp, draft: Draft) -> bool:
    """Move an op, with those that it needs, before an earlier one. Whether that was possible."""
    first, last = ops.index(other), ops.index(op)
    moved, needed = [op], set(op.reads.values())
    for between in reversed(ops[first:last]):
        if not needed.isdisjoint(between.outputs):
            moved.insert(0, between)
            needed.update(between.reads.values())
    for each in moved:
        in_place = any(draft.values[v].reuses is not None for v in each.outputs)
        if each is other or each.random or each.effects or in_place or each.phase == "forward":
            return False
    ops[first : last + 1] = [*moved, *(each for each in ops[first : last + 1] if each not in moved)]
    return True


def routes_of_gradients(traced: Traced) -> Mapping[Any, frozenset[Route]]:
    """The routes by which gradients come to parameters, by name, inputs, by position, and islands, by (name,).

        y = layer(y + encoder(x)) if torch.rand(()) < 0.5 else y        # LayerDrop, in an island

    Only those to which all routes lead through islands are in it. In a step without the layer, eager has no gradient
    for the encoder, and an optimizer leaves its weights alone. A plan has backward ops for them all the same.
    """
    graph, found = traced.graph, dict[Any, frozenset[Route]]()
    backward = list(zip(graph.ops, traced.kernels, strict=True))[graph.boundary :]
    made = {value for op, _ in backward for value in op.outputs}
    routes = dict.fromkeys(graph.tangents, _PAST_ISLANDS)  # by value, of what is computed from gradients
    for op, kernel in backward:
        through = frozenset[Route]().union(*(routes[v] for v in op.inputs if v in routes))
        if (op.kind.startswith("aten.add") or op.fused) and not routes.keys() >= made.intersection(op.inputs):
            through = _PAST_ISLANDS  # a gradient that is a constant is added
        routes |= dict.fromkeys(op.outputs if through else (), through)
        if isinstance(kernel.target, IslandKernel):
            island = kernel.target.island
            found[(island.name,)] = through
            inputs = island.inputs_by_gradient
            routes |= {m.value: frozenset({(island.name, inputs[m.index])}) for m in kernel.made if m.index in inputs}
    positions = {r.name: r.position for r in traced.residents.values() if r.kind == "input"}
    for gradient in traced.gradients:
        for title, _ in gradient.nodes:
            kind, _, name = title.partition(" ")
            found[name if kind == "parameter" else positions[name]] = routes.get(gradient.value, _PAST_ISLANDS)
    return {key: through for key, through in found.items() if through and None not in through}
