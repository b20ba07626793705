"""From a captured step to the same step over fused groups. Reads as its stages."""

from __future__ import annotations

from collections.abc import Sequence

from memplan import torch_private as private
from memplan.capture.analysis.traced import Traced
from memplan.fusion.compile_groups import GroupCompiler
from memplan.fusion.fused_step import FusedStepWriter
from memplan.fusion.group_program import GroupProgram
from memplan.fusion.groups import Grouper, Unit, donate, set_ends, without_dead
from memplan.fusion.rematerialise import rematerialise
from memplan.fusion.step_graph import StepGraph, is_fusible, place_of_node

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
