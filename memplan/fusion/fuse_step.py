"""From a captured step to the same step over fused groups. Reads as its stages."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

import torch
from torch import fx

from memplan import torch_private as private
from memplan.capture.analysis.traced import Kernel, Made, Traced
from memplan.capture.ops.layout import device_bytes_of, tensor_text
from memplan.fusion.compile_groups import FusedKernel, GroupCompiler
from memplan.fusion.group_program import GroupProgram
from memplan.fusion.groups import FusedGroup, Grouper, Unit, donate, phase_of_unit, set_ends, without_dead
from memplan.fusion.rematerialise import rematerialise
from memplan.fusion.step_graph import StepGraph, is_fusible, place_of_node
from memplan.problem.data import FUSED, Effect, Graph, Op, Value

_process_compiler = GroupCompiler()


def fuse_step(traced: Traced, compiler: GroupCompiler | None = None, dry: bool = False) -> Traced:
    """The step over fused groups, with equal bits at any budget and in any schedule.

    An op stays as it is where it would be alone in its group and write over nothing, and where its group can't be
    compiled.

    - compiler: has the groups that there are already. None: that of this process.
    - dry: nothing is compiled. Groups are taken to write over all that they may, and can't run.

    Raises ValueError where there is no compiler, and where what makes random numbers of seeds can't be compiled.
    """
    compiler = _process_compiler if compiler is None else compiler
    missing = "" if dry else private.missing_compiler(traced.device)
    if missing:
        raise ValueError(f'kernels="fused" needs {missing}. Or say kernels="eager"')
    extern = {index for index in range(len(traced.graph.ops)) if not is_fusible(traced, index)}
    while True:
        step = StepGraph(traced, extern)
        units = without_dead(step, Grouper(step).units())
        rematerialise(step, units)
        set_ends(step, units)
        donate(step, units)
        if alone := _alone(units):
            extern |= alone
            continue
        kernels = compiler.kernels(units, dry)
        if isinstance(kernels, frozenset):
            failed = {op for op in kernels if not private.keeps_to_seed(traced.kernels[op].target)}
            if not failed:
                raise ValueError("random='counter' needs groups that can't be compiled here; leave it out")
            extern |= failed
            continue
        return FusedStepWriter(step, units, kernels).traced() if any(kernels) else traced


def _alone(units: Sequence[Unit]) -> set[int]:
    """Ops that make up a group by themselves, are in no other, and could run as they are without more memory."""
    groups = [unit for unit in units if not isinstance(unit, int)]
    ops_of = [{place_of_node(n).op for n in g.nodes if place_of_node(n).phase == g.phase} for g in groups]
    joined = {op for ops in ops_of if len(ops) > 1 for op in ops}
    left = set[int]()
    for group, ops in zip(groups, ops_of, strict=True):
        seeded = any(private.keeps_to_seed(node.target) for node in group.nodes)
        if len(ops) == 1 and not seeded and not (group.over and GroupProgram.of(group).is_pointwise()):
            left |= ops
    return left - joined


class FusedStepWriter:
    """Writes a step over groups as an ordinary `Traced`: a group is an op with a kernel, and nothing else changes."""

    def __init__(self, step: StepGraph, units: Sequence[Unit], kernels: Sequence[FusedKernel | None]) -> None:
        """kernels: of each unit that is a group."""
        self._step, self._old = step, step.traced
        self._units = sorted(zip(units, kernels, strict=True), key=lambda u: phase_of_unit(step, u[0]) == "backward")
        self._number: dict[int | fx.Node, int] = {}  # old value, or node that stands for none -> new value
        self._values: list[Value] = []
        self._roots: dict[int, tuple[fx.Node, ...]] = {}
        self._names = fx.Graph()  # of nodes that name new values
        self._fakes = private.FakeTensorMode()

    def traced(self) -> Traced:
        old, number = self._old, self._numbered
        for index, value in enumerate(old.graph.values):
            if value.reuses is None and (value.resident or value.role == "tangent"):
                number(index)
        written = [
            self._extern(unit) if isinstance(unit, int) else self._fused(unit, kernel, position)
            for position, (unit, kernel) in enumerate(self._units)
        ]
        ops, kernels = zip(*written)
        boundary = sum(op.phase == "forward" for op in ops)
        outputs = tuple(
            dataclasses.replace(o, value=number(o.value), tangent=None if o.tangent is None else number(o.tangent))
            for o in old.outputs
        )
        return dataclasses.replace(
            old,
            graph=Graph(tuple(self._values), tuple(ops), boundary, old.graph.rng_state_bytes),
            kernels=tuple(kernels),
            roots=self._roots,
            outputs=outputs,
            gradients=tuple(dataclasses.replace(g, value=number(g.value)) for g in old.gradients),
            tangent_nodes={number(value): node for value, node in old.tangent_nodes.items()},
        )

    def _new(self, key: int | fx.Node, value: Value, roots: tuple[fx.Node, ...]) -> int:
        self._number[key] = len(self._values)
        self._values.append(value)
        self._roots[self._number[key]] = roots
        return self._number[key]

    def _numbered(self, value: int) -> int:
        """The new number of a value of the trace."""
        if value in self._number:
            return self._number[value]
        facts = self._old.graph.values[value]
        reuses = None if facts.reuses is None else self._numbered(facts.reuses)
        return self._new(value, dataclasses.replace(facts, reuses=reuses), self._old.roots[value])

    def _read(self, node: fx.Node) -> tuple[int, fx.Node]:
        """The value that a node stands for, and the node by which kernels know it."""
        if node in self._step.home:
            value, root = self._step.home[node]
            return self._numbered(value), root
        return self._number[node], self._roots[self._number[node]][0]

    def _made(self, node: fx.Node, reuses: int | None) -> tuple[int, fx.Node]:
        """The value that a group makes, and the node by which it is known from then on."""
        if node in self._step.home:
            value, root = self._step.home[node]
            facts = dataclasses.replace(self._old.graph.values[value], reuses=reuses)
            return self._new(value, facts, (root,)), root
        name = self._names.create_node("call_function", operator.getitem, (), name=f"inner_{len(self._values)}")
        name.meta["val"] = self._like(node.meta["val"])
        size_bytes = device_bytes_of(name.meta["val"], self._old.device)
        tensor = tensor_text(name.meta["val"])
        return self._new(node, Value(name.name, size_bytes, reuses=reuses, tensor=tensor), (name,)), name

    def _extern(self, index: int) -> tuple[Op, Kernel]:
        op, kernel, number = self._old.graph.ops[index], self._old.kernels[index], self._numbered
        return (
            dataclasses.replace(
                op,
                inputs=tuple(map(number, op.inputs)),
                outputs=tuple(map(number, op.outputs)),
                effects=tuple(Effect(number(e.old), number(e.new)) for e in op.effects),
            ),
            dataclasses.replace(
                kernel,
                reads={node: number(value) for node, value in kernel.reads.items()},
                made=tuple(dataclasses.replace(m, value=number(m.value)) for m in kernel.made),
            ),
        )

    def _fused(self, group: FusedGroup, kernel: FusedKernel | None, position: int) -> tuple[Op, Kernel]:
        assert kernel is not None
        reads = [self._read(node) for node in group.inputs]
        made = [
            self._made(node, reads[group.over[o]][0] if o in group.over else None)
            for o, node in enumerate(group.outputs)
        ]
        layers = [self._old.graph.ops[place_of_node(node).op].layer for node in group.nodes]
        kinds = dict.fromkeys(str(n.target).split(".")[1] for n in group.nodes if n.target is not operator.getitem)
        arguments = tuple(node for _, node in reads)
        node = self._names.create_node("call_function", kernel, arguments, name=f"fused_{position}")
        node.meta["val"] = tuple(self._like(output.meta["val"]) for output in group.outputs)
        op = Op(
            name=f"fused_{position}",
            kind=f"{FUSED}({'+'.join(kinds)})",
            phase=group.phase,
            inputs=tuple(dict.fromkeys(value for value, _ in reads)),
            outputs=tuple(value for value, _ in made),
            layer=next((layer for layer in layers if layer), ""),
            key=f"fused {kernel.key}",
        )
        return op, Kernel(
            node=node,
            target=kernel,
            args=arguments,
            kwargs={},
            reads={node: value for value, node in reads},
            made=tuple(Made(root, index, value) for index, (value, root) in enumerate(made)),
            repeat_args=arguments,
        )

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._fakes:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
