"""Checks that a program makes while it runs: results are as traced, and branches as planned.

In a first run of a program, every result is compared with the traced one. Where ops are measured, that makes the same
comparison. This is for programs whose ops were not run here before. A fake kernel that is wrong about strides would
otherwise lead to other kernels further on, and so to other bits.

A plan has the branches that forward took in one run, and each later run checks them. A trace has no numbers, so forward
is run once on the sample to see which way it goes (`trial.one_forward`); nothing of that run stays. Its answers are
matched with the questions of the trace by the calls that lead to each read. Branches that depend on inputs alone are
computed again before each call instead (`guards`).

The check stands where the boolean is computed, as in eager, and not at the end of forward, because an op on the wrong
branch may stop a GPU (an index out of range). A run that takes another branch starts over with another plan: the
generator and the buffers that forward writes to are put back. Forwards that write to their arguments are not planned in
this way.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from memplan import torch_private as private
from memplan.capture.ops.layout import strides_that_matter
from memplan.capture.ops.real_results import Facts, call_of, can_be_noted, facts_of, note_results
from memplan.capture.ops.ways import OtherResults, Refusal
from memplan.errors import PlanMismatch
from memplan.problem.schedule import Offload, Prefetch, SaveRng, Schedule, Stay
from memplan.runtime.program.parameters import ParameterStore

TRACED = "traced"  # under this name a node's metadata has the node of the trace whose op it runs


def run_checked(program: fx.GraphModule, arguments: list[Any]) -> Any:
    """Run a boxed program op by op, comparing each result with the traced one.

    Raises a Refusal if a result is another than was traced, with `OtherResults` if it can be traced.
    """
    return _Checked(program).boxed_run(arguments)


class _Checked(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if TRACED in n.meta:
            traced = n.meta[TRACED]
            expected = _looks(facts_of(traced.meta.get("val")), traced)
            found = [look if known else None for look, known in zip(_looks(facts_of(result), traced), expected)]
            if found != expected:
                message = (
                    f"{n.name} ({n.target}) gives {found} (dtype, shape, strides), where the trace has {expected}: "
                    "PyTorch's fake kernel for it is wrong, and the plan is too"
                )
                if not can_be_noted(facts_of(traced.meta.get("val")), facts_of(result)):
                    raise Refusal(message)
                noted = {call_of(traced): facts_of(result)}
                note_results(noted)
                raise Refusal(f"{message}. Plan again; what it gives is noted", OtherResults(noted))
        return result if n.users or n.op == "output" else None  # the interpreter would hold it to the end


def as_traced(result: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int | None, ...]) -> None:
    """Compare a result with the traced one, at the sizes of this run. A stride of None does not count.

    Raises a Refusal with `OtherResults` if it is another: a fake kernel is wrong about sizes that the step was not
    captured with.
    """
    found = result.stride()
    alike = result.dtype == dtype and result.shape == shape
    if alike and (found == stride or all(s is None or s == n for s, n in zip(stride, found, strict=True))):
        return
    raise Refusal(
        f"an op gives {(result.dtype, tuple(result.shape), found)} (dtype, shape, strides), where the trace has "
        f"{(dtype, shape, stride)}: PyTorch's fake kernel for it is wrong about this size",
        OtherResults(),
    )


def _looks(facts: Facts, traced: fx.Node) -> list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]] | None]:
    """Properties of each result on which the kernels of later ops may depend.

    Strides of dimensions of one element count only where an op reads the result.
    """
    return [
        None
        if t is None
        else (t.dtype, t.shape, t.stride if is_read(traced, place) else strides_that_matter(t.shape, t.stride))
        for place, t in enumerate(facts)
    ]


def is_read(node: fx.Node, place: int) -> bool:
    """Whether an op of the trace reads this one of the node's results."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return any(user.op != "output" for user in node.users)
    return any(
        user.op != "output" for one in node.users if one.target is operator.getitem and one.args[1] == place
        for user in one.users
    )  # fmt: skip


class OtherBranch(PlanMismatch):
    """Forward takes another branch than the one that was planned."""


def decide(computed: torch.Tensor, planned: bool, where: str) -> None:
    """Go on if a boolean that forward branches on has the planned value, else raise OtherBranch.

    Waits for the device, as eager does.
    """
    if bool(computed) is planned:
        return
    raise OtherBranch(f"forward branches on a computed value that is {not planned}, planned for {planned} ({where})")


def refuse_capture(schedule: Schedule, store: ParameterStore, device: torch.device) -> None:
    """Raise RuntimeError where a CUDA graph is captured that can't take a step, or would replay something else.

    A caller may capture planned steps (`torch.cuda.graph`), as any of PyTorch's work. The graph has the step's kernels,
    recomputes included, in memory of its own, where the plan's peak holds. A replay runs no Python: no check of the
    key, no hook.
    """
    if not private.is_captured(device):
        return
    kinds = {type(step) for step in schedule}
    if store.gathers is not None:
        what = "gathers sharded parameters"
    elif store.updates is not None:
        what = "updates parameters while backward runs"
    elif kinds & {Offload, Prefetch, Stay}:
        what = "copies to and from host memory that other steps use, too"
    elif SaveRng in kinds:
        what = "runs random ops again, for which PyTorch puts back no generator meanwhile"
    else:
        return
    raise RuntimeError(
        f"memplan: a CUDA graph can't take this step, which {what}. Capture a step without that (a larger budget, no "
        "dropout), or train without a graph"
    )
