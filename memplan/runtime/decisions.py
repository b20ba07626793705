"""Branches that forward takes by what it computes: a plan has those of one run, and each later run checks them."""

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
