"""Facts about the autograd engine that have no public functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import _engine_run_backward, get_gradient_edge


def run_backward(tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """`torch.autograd.backward` without its checks of shapes, which take as long as the rest."""
    _engine_run_backward(
        tuple(tensors), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


_SEEN = "memplan has seen this node"


class _Ends(torch.autograd.Function):
    """A node from which those that accumulate gradients of leaves can be seen."""

    @staticmethod
    def forward(ctx: Any, *leaves: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, device="cpu")


def without_accumulators(leaves: Sequence[torch.Tensor]) -> list[bool]:
    """For each leaf, whether nobody holds the node that accumulates its gradient, so that no hook can be on it.

    A leaf gets a new such node each time that somebody asks for it, unless somebody still holds the one before (as
    DistributedDataParallel does, and everybody whose hook is to be called).
    """

    with torch.enable_grad():
        ends: Any = _Ends.apply(*leaves)  # type: ignore[no-untyped-call]
        for node, _ in ends.grad_fn.next_functions:
            if node is not None:
                node.metadata[_SEEN] = True
        del ends, node
        ends = _Ends.apply(*leaves)  # type: ignore[no-untyped-call]
    return [node is not None and node.metadata.pop(_SEEN, None) is None for node, _ in ends.grad_fn.next_functions]


def engine_reaches(node: Any) -> bool:
    """Whether the backward pass in progress will run this autograd node: autograd.grad for other inputs does not."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # it is a leaf that autograd.grad was asked for
        return True


def backward_in_progress() -> int:
    """The number of the backward pass in progress, which no other pass has; -1 outside of any."""
    return int(torch._C._current_graph_task_id())


def also_arrives_otherwise(parameter: torch.Tensor) -> bool:
    """Whether the backward pass in progress also hands a gradient to this parameter by autograd itself."""
    return parameter.requires_grad and engine_reaches(get_gradient_edge(parameter).node)


def backward_keeps_graph() -> bool:
    """Whether the backward pass in progress was asked to keep the graph (`retain_graph`, `create_graph`)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def versions_kept(tensors: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """A context whose writes to these tensors autograd does not see. In the end they must hold what they held."""
    return _unsafe_preserve_version_counter(tuple(tensors))
