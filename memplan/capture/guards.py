"""What forward read from the data of its inputs, computed again before each call.

These are numbers ("is the mask all ones?") and shapes of results (how many elements does the mask select?).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from memplan import torch_private as private
from memplan.capture.analysis.traced import Resident, Traced
from memplan.capture.ops.dataflow import storage_of, written_nodes
from memplan.capture.ops.sizes import expressions_in, put
from memplan.capture.trace.raw_trace import line_of_place

_FEW = 8  # numbers that are read one by one on a CPU, which takes less time than to gather them


class Guards:
    """One small fx program for all numbers that forward read, and their values at capture."""

    def __init__(self, traced: Traced) -> None:
        self._guards = traced.guards
        self._sources: list[Resident] = []
        self._sizes = traced.sizes
        self._program = self._compile(traced) if traced.guards else None

    def _compile(self, traced: Traced) -> fx.GraphModule:
        needed = {node for guard in traced.guards for node in guard.nodes}
        written = {storage_of(w) for n in needed if n.op == "call_function" for w in written_nodes(n)}
        graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
        varying = {} if traced.sizes is None else traced.sizes.nodes
        expressions = list(dict.fromkeys(expressions_in([varying[n.name] for n in needed if n.name in varying])))
        self._evaluate = private.evaluator([expression.text for expression in expressions])
        sizes = {expression: graph.placeholder(f"size_{i}") for i, expression in enumerate(expressions)}
        by_name = {n.name: n for n in needed}
        root = nn.Module()
        for node in traced.guards[0].node.graph.nodes:
            if node not in needed:
                continue
            if node.op == "placeholder":
                made[node] = graph.placeholder(node.name)
                self._sources.append(traced.residents[node])
            elif node.op == "get_attr":
                root.register_buffer(str(node.target), traced.constants[str(node.target)], persistent=False)
                made[node] = graph.get_attr(str(node.target))
            else:
                made[node] = graph.node_copy(node, made.__getitem__)
                if node.name in varying:
                    call = put((varying[node.name].args, varying[node.name].kwargs), sizes.__getitem__)
                    made[node].args, made[node].kwargs = fx.map_arg(
                        call, lambda n: n if n.graph is graph else made[by_name[n.name]]
                    )
        for node in [n for n in made if n.op == "placeholder" and storage_of(n) in written]:
            self._copy_first(graph, made[node])
        graph.output([made[guard.node] for guard in traced.guards])
        return fx.GraphModule(root, graph, class_name="Guards")

    @staticmethod
    def _copy_first(graph: fx.Graph, placeholder: fx.Node) -> None:
        """Let the program copy an input that it writes to, so that the caller's tensor stays as it is."""
        first = next(n for n in graph.nodes if n.op != "placeholder")
        with graph.inserting_before(first):
            copied = graph.call_function(torch.ops.aten.clone.default, (placeholder,))
        placeholder.replace_all_uses_with(copied, lambda user: user is not copied)

    @property
    def lines(self) -> list[str]:
        """The lines that read numbers."""
        return [line_of_place(guard.where) for guard in self._guards]

    def changed(
        self, inputs: tuple[torch.Tensor, ...], buffer: Callable[[str], torch.Tensor]
    ) -> tuple[str, str] | None:
        """(the line that reads it, what it says in words) of a number that forward would now read another of.

        None where nothing differs.
        """
        if self._program is None:
            return None
        sources = [inputs[s.position] if s.kind == "input" else buffer(s.name) for s in self._sources]
        sizes = () if self._sizes is None else self._evaluate(self._sizes.numbers(inputs))
        try:
            with torch.no_grad():
                found = self._program.forward(*sizes, *sources)
        except Exception as error:  # of an op for the sizes of the sample: a result before it has another shape now
            where = self._guards[0].where
            return line_of_place(where), f"forward reads other data: {type(error).__name__} ({where})"
        pairs = list(zip(self._guards, found, strict=True))
        numbers = iter(_numbers([t for guard, t in pairs if not isinstance(guard.value, torch.Size)]))
        for guard, tensor in pairs:
            is_shape = isinstance(guard.value, torch.Size)
            value = tensor.shape if is_shape else next(numbers)
            if value != guard.value:
                what = ("a result has the shape {}", "{}") if is_shape else ("forward reads {!r} from the data", "{!r}")
                said = [text.format(tuple(v) if is_shape else v) for text, v in zip(what, (value, guard.value))]
                return line_of_place(guard.where), f"{said[0]}, planned for {said[1]} ({guard.where})"
        return None


def _numbers(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The numbers in tensors of one element each, which are read from a device at once, for each dtype."""
    if len(tensors) <= _FEW and all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.item() for tensor in tensors]
    alike: dict[object, list[int]] = defaultdict(list)
    for position, tensor in enumerate(tensors):
        alike[tensor.dtype, tensor.device].append(position)
    found: list[Any] = [None] * len(tensors)
    for positions in alike.values():
        numbers = torch.cat([tensors[position].reshape(1) for position in positions]).tolist()
        for position, number in zip(positions, numbers, strict=True):
            found[position] = number
    return found
