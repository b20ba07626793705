"""The edges of an autograd graph: which nodes give a gradient to a tensor, and in which order.

Of the nodes that are ready, autograd's engine always runs the one that was made last. Every node was made after those
that it hands its gradients to. So a backward pass runs nodes in the reverse of the order in which they were made, and
gradients for one tensor are added in that order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

Edge = tuple[Any, int]  # a node of the autograd graph, and which of its gradients


class Edges:
    """The graph behind some tensors. It keeps the graph's nodes alive.

    - functions: nodes of autograd functions that are written in Python.
    - leaves: the nodes in which gradients end: one for each leaf that requires grad.
    """

    def __init__(self, starts: Iterable[torch.Tensor], since: int = 0) -> None:
        """since: leave out nodes that are older than that, see `next_node`."""
        self._into: dict[Edge, list[Edge]] = {}
        nodes = list(nodes_behind((get_gradient_edge(t).node for t in starts if t.requires_grad), since))
        for node in nodes:
            for index, (target, number) in enumerate(node.next_functions):
                if target is not None:
                    self._into.setdefault((target, number), []).append((node, index))
        self.functions: list[Any] = [node for node in nodes if hasattr(type(node), "_forward_cls")]
        self.leaves = {node for node in nodes if not node.next_functions}

    def to(self, tensor: torch.Tensor) -> list[Edge]:
        """(node, which of its gradients) for each gradient that is added up for `tensor`, in that order."""
        target = get_gradient_edge(tensor)
        return self.into(target.node, target.output_nr)

    def into(self, node: Any, number: int) -> list[Edge]:
        """(node, which of its gradients) for the tensor that is result `number` of `node`."""
        return sorted(self._into.get((node, number), []), key=lambda edge: (-edge[0]._sequence_nr(), edge[1]))

    def uses(self, tensor: torch.Tensor, starts: Iterable[Any]) -> int:
        """How many gradients are added up for `tensor`, which may be among the starts."""
        return len(self.to(tensor)) + any(start is tensor for start in starts)

    def divert(self, edge: GradientEdge) -> list[torch.Tensor]:
        """A list that takes all gradients for a tensor as they come; autograd adds them up no more."""
        found: list[torch.Tensor] = []
        by_node: dict[Any, list[int]] = {}
        for node, index in self.into(edge.node, edge.output_nr):
            by_node.setdefault(node, []).append(index)

        def hook(results: tuple[Any, ...], given: tuple[Any, ...], indices: Sequence[int]) -> tuple[Any, ...]:
            found.extend(results[index] for index in indices if results[index] is not None)
            return tuple(None if index in indices else result for index, result in enumerate(results))

        for node, indices in by_node.items():
            node.register_hook(functools.partial(hook, indices=indices))
        return found


def next_node() -> int:
    """The number of the node that autograd makes next on this thread. Nodes of leaves have a higher number than any."""
    with torch.enable_grad():
        return 1 + int(get_gradient_edge(torch.empty(0, requires_grad=True).view(-1)).node._sequence_nr())


def nodes_behind(starts: Iterable[Any], since: int = 0) -> Iterator[Any]:
    """The nodes of an autograd graph from some nodes on, each once. since: but for older ones, see `next_node`."""
    pending = [node for node in dict.fromkeys(starts) if node._sequence_nr() >= since]
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        for target, _ in node.next_functions:
            if target is not None and target not in seen and target._sequence_nr() >= since:
                seen.add(target)
                pending.append(target)
