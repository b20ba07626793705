"""Branches that forward takes by what it computes: a plan has those of one run, and each later run checks them.

A trace has no numbers, so forward is run once on the sample to see which way it goes (`rehearsal.one_forward`); nothing
of that run stays. Its answers are matched with the questions of the trace by the calls that lead to each read. Branches
that depend on inputs alone are computed again before each call instead (`guards`).

The check stands where the boolean is computed, as in eager, and not at the end of forward, because an op on the wrong
branch may stop a GPU (an index out of range). A run that takes another branch starts over with another plan: the
generator and the buffers that forward writes to are put back. Forwards that write to their arguments are not planned in
this way.
"""

from __future__ import annotations

import torch

from memplan.errors import PlanMismatch


class OtherBranch(PlanMismatch):
    """Forward takes another branch than the one that was planned."""


def decide(computed: torch.Tensor, planned: bool, where: str) -> None:
    """Go on if a boolean that forward branches on has the planned value, else raise OtherBranch.

    Waits for the device, as eager does.
    """
    if bool(computed) is not planned:
        raise OtherBranch(
            f"forward branches on a computed value that is {not planned}, planned for {planned} ({where})"
        )
