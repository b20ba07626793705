"""Branches that forward takes by what it computes: a plan has those of one run, and each later run checks them.

Which way forward goes is found by running it once on the sample, of which nothing stays (`rehearsal.one_forward`), for
a trace has no numbers. What that run read is matched with what the trace asks by the calls that lead to each read: by
the source line alone, answers were taken for those to other questions. What inputs alone decide is worked out again.

The check stands where the boolean is computed, as in eager, and not at the end of forward, for an op on the wrong way
may stop a GPU (an index out of range). A run that goes another way starts over with another plan: the generator and
buffers that forward writes to are put back; forwards that write to their arguments are not planned so.
"""

from __future__ import annotations

import torch

from memplan.errors import PlanMismatch


class OtherBranch(PlanMismatch):
    """Forward takes another branch than the one that was planned."""


def decide(computed: torch.Tensor, planned: bool, where: str) -> None:
    """Go on if a boolean that forward branches on has the planned value. Waits for the device, as eager does.

    Raises OtherBranch.
    """
    if bool(computed) is not planned:
        raise OtherBranch(
            f"forward branches on a computed value that is {not planned}, planned for {planned} ({where})"
        )
