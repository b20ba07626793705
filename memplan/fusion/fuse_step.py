"""From a captured step to the same step over fused groups. Reads as its stages.

Backward groups make again what forward's pointwise ops make, where they then read fewer bytes. That is independent of
the budget, and so are the bits: what a group reads is chosen once, by a minimum cut over the pointwise ops behind it. A
value that would exist only to be saved weighs twice, for it is written too; one that backward reads anyway weighs an
eighth; what is there before the step weighs nothing. What has been overwritten by the time that a group runs can't be
read at all.

Each distinct group is compiled once for all layers, steps and processes, and tried. Compilers crash and hang, and take
a second a group. So groups that no process has compiled before are compiled by others (`workers`), in parallel, which
leave the code in Inductor's cache on disk. A record beside it says what the compiled group writes over what. This
process then loads the code.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

import networkx as nx
import torch
from torch import fx

from memplan import torch_private as private
from memplan.capture.analysis.traced import Kernel, Made, Traced
from memplan.capture.ops.layout import device_bytes_of, tensor_text
from memplan.fusion.group_program import GroupProgram, compile_elsewhere, read_record, write_record
from memplan.fusion.groups import FusedGroup, Grouper, Unit, donate, phase_of_unit, set_ends, without_dead
from memplan.fusion.step_graph import StepGraph, base_of, bases_read, is_fusible, node_bytes, node_kind, place_of_node
from memplan.logs import log
from memplan.problem.data import FUSED, Effect, Graph, Op, Value

aten, prims = torch.ops.aten, torch.ops.prims

_CHEAP = frozenset({prims.convert_element_type.default, aten.clone.default})  # beside what is tagged as pointwise
_NEVER = frozenset({aten.embedding.default, aten.index.Tensor, aten.gather.default, aten.cat.default})
_SMALL = 8  # values of less than this part of the group's largest are saved


class FusedKernel:
    """A compiled group, as a function of tensors. One of a dry run has no code."""

    __name__ = "fused"

    def __init__(self, key: str, call: private.CompiledCall | None) -> None:
        self.key, self._call = key, call

    def __call__(self, *tensors: torch.Tensor) -> Any:
        assert self._call is not None, "a group of a dry run"
        return self._call([*tensors])


class GroupCompiler:
    """Compiled groups by key. Keys tell all that the code depends on, so that all steps of a process may share them."""

    def __init__(self) -> None:
        self._kernels: dict[str, tuple[FusedKernel, dict[int, int]]] = {}
        self._failed: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._kernels)

    def kernels(self, units: Sequence[Unit], dry: bool = False) -> list[FusedKernel | None] | frozenset[int]:
        """The kernel of each unit that is a group. Sets their `over` to what is really written over what.

        Where groups can't be compiled, or do not give what they should: the ops of the trace that these are made of.

        dry: nothing is compiled, and groups are taken to write over all that they may.
        """
        programs = {unit: GroupProgram.of(unit) for unit in units if isinstance(unit, FusedGroup)}
        keys = {group: program.key for group, program in programs.items()}
        if dry:
            return [FusedKernel(keys[unit], None) if isinstance(unit, FusedGroup) else None for unit in units]
        known = self._kernels.keys() | self._failed.keys()
        missing = {keys[group]: program for group, program in programs.items() if keys[group] not in known}
        self._failed |= compile_elsewhere({key: p for key, p in missing.items() if read_record(key) is None})
        for key, program in missing.items():
            if key not in self._failed:
                try:
                    # Quick where a record and the code are on disk.
                    call, over = program.writing(read_record(key)).compiled()
                    write_record(key, over)
                    self._kernels[key] = FusedKernel(key, call), over
                except Exception as error:
                    self._failed[key] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        failed = [group for group, key in keys.items() if key in self._failed]
        if failed:
            log.warning(
                "%d groups of ops can't be compiled and run as they are: %s",
                len(failed), self._failed[keys[failed[0]]],
            )  # fmt: skip
            return frozenset(place_of_node(node).op for group in failed for node in group.nodes)
        for group, key in keys.items():
            group.over = self._kernels[key][1]
        return [self._kernels[keys[unit]][0] if isinstance(unit, FusedGroup) else None for unit in units]


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


def rematerialise(step: StepGraph, units: Sequence[Unit]) -> None:
    """Put copies of forward's pointwise nodes into backward groups."""
    groups = [unit for unit in units if not isinstance(unit, int)]
    externs = [step.externs[unit] for unit in units if isinstance(unit, int)]
    read_anyway = {b for n in externs if place_of_node(n).phase == "backward" for b in bases_read(n)}
    made_anyway = Counter(b for n in externs for b in set(bases_read(n)))
    made_anyway.update(b for g in groups if g.phase == "forward" for b in g.read())
    forward = {n for g in groups if g.phase == "forward" for n in g.nodes}
    order = {node: position for position, node in enumerate(step.nodes.nodes)}
    overwritten: set[fx.Node] = set()
    for group in units:
        if isinstance(group, int):
            overwritten.update(step.overwrites[step.externs[group]])
        elif group.phase == "backward":
            made_again, saved = _cut(group, forward, made_anyway, read_anyway, overwritten)
            group.nodes = sorted(made_again, key=order.__getitem__) + group.nodes
            read_anyway |= saved


def _cut(
    group: FusedGroup,
    forward: Set[fx.Node],
    made_anyway: Counter[fx.Node],
    read_anyway: Set[fx.Node],
    overwritten: Set[fx.Node],
) -> tuple[list[fx.Node], set[fx.Node]]:
    """What one backward group makes again, and which values of forward it then reads."""
    largest = max((node_bytes(n) for n in group.nodes), default=0)

    def weight(node: fx.Node) -> float:
        if node in overwritten:
            return math.inf
        if node_kind(node) == "source":
            return 0
        only_to_be_saved = node_kind(node) == "computed" and not made_anyway[node]
        size = node_bytes(node) * (2 if only_to_be_saved else 1)
        return max(1, size // (8 if node in read_anyway else 1))

    def can_make(node: fx.Node) -> bool:
        if node not in forward or node.target in _NEVER or not isinstance(node.meta["val"], torch.Tensor):
            return False
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _CHEAP
        return pointwise and node_bytes(node) * _SMALL >= largest

    network, seen = nx.DiGraph(), dict[fx.Node, None]()
    stack = reads = [b for b in group.read() if b in forward]
    if not reads:
        return [], set()
    network.add_edges_from(((base, "out"), "sink") for base in reads)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen[node] = None
        network.add_edge((node, "in"), (node, "out"), capacity=weight(node))
        if can_make(node):
            bases = [base_of(a) for a in node.all_input_nodes]
            network.add_edges_from(((base, "out"), (node, "in")) for base in bases)
            stack += bases
        else:
            network.add_edge("source", (node, "in"))
    _, (_, near_sink) = nx.minimum_cut(network, "source", "sink")
    made_again = [n for n in seen if (n, "in") in near_sink]
    return made_again, {n for n in seen if (n, "in") not in near_sink and (n, "out") in near_sink}
