"""Sums of gradients that eager makes in place, and so with the strides of the first gradient.

Where several gradients come for one tensor, autograd's engine adds them into the memory of the first, if nothing else
holds that. Under a dispatch mode, as in a trace, it adds out of place. That may give other strides to dimensions of one
element, and later kernels use those to see whether channels come last. The step is then traced again.
"""

from __future__ import annotations

import torch
from torch import fx

from memplan.capture.ops.layout import is_dense, storage_key
from memplan.capture.trace.raw_trace import RawTrace


def is_odd(first: torch.Tensor, second: torch.Tensor, total: torch.Tensor) -> bool:
    """Whether a sum would have other strides if it were made in place."""
    return (
        first.stride() != total.stride()
        and first.shape == second.shape == total.shape
        and first.dtype == second.dtype == total.dtype
        and is_dense(first)
    )


def sums_in_place(raw: RawTrace) -> frozenset[int]:
    """Numbers of the odd sums whose first operand nothing else holds."""
    if not raw.odd_sums:
        return frozenset()
    nodes = list(raw.module.graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    looks: dict[int, list[fx.Node]] = {}
    for node in nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            looks.setdefault(storage_key(node.meta["val"]), []).append(node)

    def is_alone(total: fx.Node, first: fx.Node) -> bool:
        seen_as = looks[storage_key(first.meta["val"])]
        made_here = first.op == "call_function" and seen_as[0] is first
        return made_here and all(
            user is total or position[user] < position[total] for look in seen_as for user in look.users
        )

    return frozenset(number for number, total, first in raw.odd_sums if is_alone(total, first))
