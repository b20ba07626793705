"""A step while it is analysed, and how it becomes frozen data.

Its values and ops may still change. Then those that nothing needs are left out, and values are numbered anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import fx

from memplan.capture.analysis.traced import Gradient, Kernel, Made, OutputTensor, Resident, Traced
from memplan.capture.ops.dataflow import Dataflow
from memplan.capture.ops.island_ops import IslandKernel
from memplan.capture.ops.layout import device_bytes_of, generator_state_bytes, storage_key, tensor_text
from memplan.capture.ops.real_results import is_unsteady, op_kind, signature
from memplan.capture.trace.raw_trace import Guard, RawTrace, StepNotes
from memplan.errors import UnsupportedModel
from memplan.problem.data import Effect, Graph, Op, Phase, Role, Value


@dataclass(eq=False, slots=True)
class DraftStorage:
    """One allocation in the trace.

    - value: the index of its present version.
    - roots: the nodes that hold its memory.
    """

    value: int
    roots: list[fx.Node]


@dataclass(slots=True)
class DraftValue:
    """A `memplan.problem.data.Value` that is being built. roots: the nodes that hold its memory."""

    name: str
    size_bytes: int
    role: Role
    reuses: int | None = None
    held: bool = False
    roots: list[fx.Node] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class DraftOp:
    """An `Op` of the problem and its `Kernel`, while they are built.

    repeat_args: None where a recompute takes `args`.
    """

    node: fx.Node
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    phase: Phase
    reads: dict[fx.Node, int]
    made: list[Made]
    outputs: list[int]
    effects: list[Effect]
    random: bool
    recomputable: bool
    layer: str
    repeat_args: tuple[Any, ...] | None = None


@dataclass(slots=True)
class Draft:
    """A step that is being built. Values are named by their index in `values`.

    - storages: by storage key.
    - parents, residents, constants, gradients: as in `Traced`.
    - tangent_values: by output.
    """

    device: torch.device
    values: list[DraftValue] = field(default_factory=list)
    ops: list[DraftOp] = field(default_factory=list)
    storages: dict[int, DraftStorage] = field(default_factory=dict)
    parents: dict[fx.Node, fx.Node] = field(default_factory=dict)
    residents: dict[fx.Node, Resident] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    tangent_values: dict[int, int] = field(default_factory=dict)
    gradients: list[Gradient] = field(default_factory=list)

    def storage(self, node: fx.Node) -> DraftStorage:
        """The storage behind `node`."""
        return self.storages[storage_key(node.meta["val"])]

    def present(self, node: fx.Node) -> int:
        """The value that the storage behind `node` holds now."""
        return self.storage(node).value

    def new_storage(self, node: fx.Node | None, tensor: torch.Tensor, role: Role, name: str) -> int:
        """Enter a new allocation. Gives its value. Raises UnsupportedModel for a sparse tensor."""
        if tensor.layout is not torch.strided:
            raise UnsupportedModel(
                f"{name} has layout {tensor.layout}; only strided tensors can be planned. Sparse gradients: set "
                "sparse=False"
            )
        size = device_bytes_of(tensor, self.device)
        index = len(self.values)
        roots = [node] if node is not None else []
        self.values.append(DraftValue(name, size, role, roots=roots))
        self.storages[storage_key(tensor)] = DraftStorage(index, list(roots))
        return index

    def add_root(self, node: fx.Node) -> None:
        """Note that `node` holds its storage's memory."""
        storage = self.storage(node)
        storage.roots.append(node)
        self.values[storage.value].roots.append(node)


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
    guards = tuple(replace(read, nodes=tuple(dataflow.behind(read.node))) for read in raw.scalar_reads)
    _note_own(draft, guards)
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
        kernels=tuple(
            Kernel(
                op.node,
                op.target,
                op.args,
                op.kwargs,
                reads={n: number[v] for n, v in op.reads.items()},
                made=tuple(Made(m.node, m.index, number[m.value]) for m in op.made),
                repeat_args=op.args if op.repeat_args is None else op.repeat_args,
            )
            for op in draft.ops
        ),
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
        device=draft.device,
        **{one.name: getattr(raw, one.name) for one in fields(StepNotes)},
    )


def _note_own(draft: Draft, guards: Sequence[Guard]) -> None:
    """Note which buffers of islands nothing else of the step reads."""
    readers = defaultdict[int, set[int]](set)  # by storage
    pairs: list[Any] = [(guard, node) for guard in guards for node in guard.nodes if node.op == "get_attr"]
    pairs += [(getattr(op.target, "island", op), node) for op in draft.ops for node in op.reads]
    for reader, node in pairs:
        readers[id(draft.storage(node))].add(id(reader))
    for op in draft.ops:
        if isinstance(op.target, IslandKernel) and op.target.forward:
            island, tensors = op.target.island, op.args[0]
            island.own = frozenset(i for i in island.buffers if len(readers[id(draft.storage(tensors[i]))]) == 1)


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


def _op(draft: Draft, op: DraftOp, number: dict[int, int]) -> Op:
    """The op. number: index of a value in the draft -> its index in the graph."""
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
