"""From a finished draft to frozen data, without ops that nothing needs, and with values numbered anew."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from memplan.capture.analysis.draft import Draft, DraftOp
from memplan.capture.analysis.traced import Gradient, Guard, Kernel, Made, OutputTensor, Traced
from memplan.capture.ops.dataflow import Dataflow
from memplan.capture.ops.island_ops import IslandKernel
from memplan.capture.ops.layout import generator_state_bytes, tensor_text
from memplan.capture.ops.real_results import is_unsteady
from memplan.capture.ops.signature import op_kind, signature
from memplan.capture.trace.raw_trace import RawTrace
from memplan.problem.data import Effect, Graph, Op, Value

Renumbering = dict[int, int]  # index of a value in the draft -> its index in the graph


def drop_dead_ops(draft: Draft, outputs: Sequence[OutputTensor]) -> None:
    """Leave out ops whose results nothing reads.

    Those that draw random numbers, write to what outlives the step, or run the user's Python stay.
    """
    needed = {o.value for o in outputs} | {g.value for g in draft.gradients}
    kept = []
    for op in reversed(draft.ops):
        lasting = op.random or op.effects or not op.recomputable or isinstance(op.target, IslandKernel)
        if lasting or any(v in needed for v in op.outputs):
            kept.append(op)
            needed.update(op.reads.values())
            needed.update(r for v in op.outputs if (r := draft.values[v].reuses) is not None)
    draft.ops = kept[::-1]


def freeze(draft: Draft, raw: RawTrace, outputs: Sequence[OutputTensor]) -> Traced:
    """The captured step, with those values that are used, in the order of the trace."""
    dataflow = Dataflow(raw.module.graph)
    guards = tuple(Guard(tuple(dataflow.behind(r.node)), r.node, r.value, r.where) for r in raw.scalar_reads)
    used = sorted(_used_values(draft, outputs, guards))
    number = {old: new for new, old in enumerate(used)}
    roots = {number[v]: tuple(dict.fromkeys(draft.values[v].roots)) for v in used}
    rooted = {node for nodes in roots.values() for node in nodes}
    parameters = _parameters(draft, used)
    graph = Graph(
        values=tuple(
            Value(
                value.name,
                value.size_bytes,
                value.role,
                value.held,
                reuses=None if value.reuses is None else number[value.reuses],
                tensor=tensor_in(value.roots),
                parameters=tuple(sorted({number[v] for v in parameters.get(old, ())})),
            )
            for old in used
            for value in [draft.values[old]]
        ),
        ops=tuple(_op(draft, op, number) for op in draft.ops),
        boundary=sum(op.phase == "forward" for op in draft.ops),
        rng_state_bytes=generator_state_bytes(draft.device),
    )
    return Traced(
        graph=graph,
        kernels=tuple(_kernel(op, number) for op in draft.ops),
        roots=roots,
        parents=draft.parents,
        residents=draft.residents,
        outputs=tuple(
            OutputTensor(o.node, number[o.value], o.requires_grad, None if o.tangent is None else number[o.tangent])
            for o in outputs
        ),
        template=raw.template,
        gradients=tuple(Gradient(number[g.value], g.nodes) for g in draft.gradients),
        tangent_nodes={number[v]: raw.tangents[i] for i, v in draft.tangent_values.items()},
        constants={
            r.name: draft.constants[r.name] for n, r in draft.residents.items() if r.kind == "constant" and n in rooted
        },
        guards=guards,
        reassigned=raw.reassigned,
        decisions=raw.decisions,
        summed=raw.summed,
        specs=raw.specs,
        inner=raw.inner,
        device=draft.device,
    )


def _used_values(draft: Draft, outputs: Sequence[OutputTensor], guards: Sequence[Guard]) -> set[int]:
    """Values that ops, outputs, gradients, tangents and guards name, residents, and all older versions of these."""
    used = {o.value for o in outputs} | {g.value for g in draft.gradients} | set(draft.tangent_values.values())
    for op in draft.ops:
        used.update(op.outputs, op.reads.values(), *op.effects)
    used.update(draft.present(n) for guard in guards for n in guard.nodes if n.op == "get_attr")
    resident = {i for i, v in enumerate(draft.values) if v.role in ("parameter", "buffer", "input")}
    used |= {i for i in resident if draft.values[i].reuses is None}
    for value in list(used):
        while (older := draft.values[value].reuses) is not None:
            used.add(older)
            value = older
    return used


def _parameters(draft: Draft, used: Sequence[int]) -> dict[int, list[int]]:
    """By gradient, the values that hold its parameters. They may be several: parameters may share memory, and ops may
    write to it.
    """
    memory: dict[str, list[int]] = defaultdict(list)
    for index in used:
        for node in draft.values[index].roots:
            source = draft.residents.get(node)
            if source is not None and source.kind == "parameter":
                memory[source.name].append(index)
    return {g.value: [v for name in g.parameters for v in memory[name]] for g in draft.gradients}


def tensor_in(roots: Sequence[fx.Node]) -> str:
    """Dtype and shape of what is stored in a value's memory by the node that made it, the first that holds it."""
    return tensor_text(roots[0].meta["val"]) if roots else ""


def _op(draft: Draft, op: DraftOp, number: Renumbering) -> Op:
    taken = [r for v in op.outputs if (r := draft.values[v].reuses) is not None]
    first_only = {effect.old for effect in op.effects}
    key = signature(op.target, op.args, op.kwargs, op.node.meta.get("val"))
    reads = dict.fromkeys(v for v in [*op.reads.values(), *taken] if v not in first_only)
    return Op(
        name=op.node.name,
        kind=op_kind(op.target),
        phase=op.phase,
        inputs=tuple(number[v] for v in reads),
        outputs=tuple(number[v] for v in op.outputs),
        effects=tuple(Effect(number[e.old], number[e.new]) for e in op.effects),
        random=op.random,
        recomputable=op.recomputable and not is_unsteady(key),
        layer=op.layer,
        key=key,
    )


def _kernel(op: DraftOp, number: Renumbering) -> Kernel:
    reads = {n: number[v] for n, v in op.reads.items()}
    made = tuple(Made(m.node, m.index, number[m.value]) for m in op.made)
    repeat_args = op.args if op.repeat_args is None else op.repeat_args
    return Kernel(op.node, op.target, op.args, op.kwargs, reads, made, repeat_args)
