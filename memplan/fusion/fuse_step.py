"""From a captured step to the same step over fused groups. Reads as its stages."""

from __future__ import annotations

from memplan import torch_private as private
from memplan.capture.analysis.traced import Traced
from memplan.fusion.compile_groups import GroupCompiler, NotCompiled
from memplan.fusion.donations import donate
from memplan.fusion.fused_step import fused_step
from memplan.fusion.fusible import fusible_ops
from memplan.fusion.groups import Unit, grouped_units, set_ends, without_dead
from memplan.fusion.rematerialise import rematerialise
from memplan.fusion.step_graph import NotExpandable, StepGraph

_process_compiler = GroupCompiler()


def fuse_step(traced: Traced, compiler: GroupCompiler | None = None, dry: bool = False) -> Traced:
    """The step over fused groups, with equal bits at any budget and in any schedule.

    An op that would be alone in its group, or of which the group can't be compiled, stays as it is.

    - compiler: has the groups that there are already. None: that of this process.
    - dry: nothing is compiled. Groups are taken to write over all that they may, and can't run.

    Raises ValueError where there is no compiler, and where what makes random numbers of seeds can't be compiled.
    """
    compiler = _process_compiler if compiler is None else compiler
    if not dry:
        compiler.check(traced.device)
    extern = set(range(len(traced.graph.ops))) - fusible_ops(traced)
    while True:
        step, units = _units(traced, extern)
        rematerialise(step, units)
        set_ends(step, units)
        donate(step, units)
        try:
            kernels = compiler.kernels(units, dry)
        except NotCompiled as error:
            failed = {op for op in error.ops if not private.keeps_to_seed(traced.kernels[op].target)}
            if not failed:
                raise ValueError("random='counter' needs groups that can't be compiled here; leave it out") from error
            extern |= failed
            continue
        return fused_step(step, units, kernels) if any(kernels) else traced


def _units(traced: Traced, extern: set[int]) -> tuple[StepGraph, list[Unit]]:
    """Groups of more than one op each, and the rest. Ops that are left as they are join `extern`."""
    while True:
        try:
            step = StepGraph(traced, extern)
        except NotExpandable as error:
            extern.add(error.op)
            continue
        units, alone = grouped_units(step)
        if not alone:
            return step, without_dead(step, units)
        extern |= alone
