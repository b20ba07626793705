"""What forward read from the data of its inputs, computed again before each call.

These are numbers ("is the mask all ones?") and shapes of results (how many elements does the mask select?).
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from memplan import torch_private as private
from memplan.capture.analysis.traced import Resident, Traced
from memplan.capture.ops.dataflow import storage_of, written_nodes
from memplan.capture.ops.sizes import FROM_DATA, Dimension, Expression, Varying, number_read, put, symbols_in
from memplan.capture.trace.call import Call
from memplan.capture.trace.raw_trace import Guard, line_of_place
from memplan.errors import UnsupportedModel

_FEW = 8  # numbers that are read one by one on a CPU, which takes less time than to gather them


class OtherRead(NamedTuple):
    """What forward would read from the data of a call, other than from that of the captured one.

    - line: the line that reads it.
    - why: what differs, in words.
    - of_shape: the shape of a result differs, and no number.
    """

    line: str
    why: str
    of_shape: bool


class Guards:
    """One small fx program for all that forward read from data, and what it was at capture."""

    def __init__(self, traced: Traced) -> None:
        self._guards = traced.guards
        self._sources: list[Resident] = []
        self._symbols = () if traced.sizes is None else traced.sizes.sources
        self._device_types = {"cpu", traced.device.type}
        self._program = self._compile(traced) if traced.guards else None

    def _compile(self, traced: Traced) -> fx.GraphModule:
        needed = {node for guard in traced.guards for node in guard.nodes}
        written = {storage_of(w) for n in needed for w in written_nodes(n)}
        graph, made, root = fx.Graph(), dict[str, fx.Node](), nn.Module()  # made: by the name in the trace
        varying = {} if traced.sizes is None else traced.sizes.nodes
        shared = Counter(storage_of(n) for n in needed if n.op == "placeholder")
        if any(shared[memory] > 1 for memory in written):  # the program copies each for itself
            raise UnsupportedModel(
                "forward writes to an argument or a buffer that shares memory with another one, and then reads numbers "
                "or shapes from them. Pass copies"
            )
        found: dict[fx.Node, fx.Node] = {}  # in the program, by the node that a guard reads
        numbers: dict[Expression, fx.Node] = {}
        symbols = enumerate(self._symbols)
        of_inputs = {i: graph.placeholder(f"size_{i}") for i, s in symbols if isinstance(s, Dimension)}

        def size(symbol: int) -> fx.Node:
            source = self._symbols[symbol]
            if isinstance(source, Dimension):
                return of_inputs[symbol]
            read = found[self._guards[source.read].node]
            if source.index is None:
                return graph.call_method("item", (read,))
            return graph.call_function(operator.getitem, (read, source.index))

        def number(expression: Expression) -> fx.Node:
            """An expression, of sizes among which are some of earlier results."""
            if expression not in numbers:
                evaluate, own = private.evaluator([expression.text]), symbols_in(expression)

                def value(*sizes: int) -> Any:
                    return evaluate(dict(zip(own, sizes, strict=True)))[0]

                numbers[expression] = graph.call_function(value, tuple(map(size, own)))
            return numbers[expression]

        guarded = {guard.node: isinstance(guard.value, tuple) for guard in traced.guards}
        for node in traced.guards[0].node.graph.nodes:
            if node not in needed:
                continue
            if node.op == "placeholder":
                made[node.name] = graph.placeholder(node.name)
                if storage_of(node) in written:  # so that the caller's tensor stays as it is
                    made[node.name] = graph.call_function(torch.ops.aten.clone.default, (made[node.name],))
                self._sources.append(traced.residents[node])
            elif node.op == "get_attr":
                root.register_buffer(str(node.target), traced.constants[str(node.target)], persistent=False)
                made[node.name] = graph.get_attr(str(node.target))
            else:
                given = put(varying.get(node.name, (node.args, node.kwargs)), number)
                args, kwargs = fx.map_arg(given, lambda n: n if n.graph is graph else made[n.name])
                made[node.name] = graph.create_node(node.op, node.target, args, kwargs)
            if node in guarded:  # now: later ops may write to it. Nor are large results kept
                read = "size" if guarded[node] else "clone"
                found[node] = graph.call_method(read, (made[node.name],))
        graph.output([found[guard.node] for guard in traced.guards])
        return fx.GraphModule(root, graph, class_name="Guards")

    @property
    def lines(self) -> list[str]:
        """The lines that read numbers."""
        return [line_of_place(guard.where) for guard in self._guards]

    @property
    def of_shapes(self) -> bool:
        """Whether shapes of results depend on data."""
        return any(isinstance(guard.value, tuple) for guard in self._guards)

    def reads(self, call: Call, buffer: Callable[[str], torch.Tensor]) -> tuple[Any, ...] | OtherRead:
        """The numbers and shapes that forward would read in a call. They are worked out once for each call."""
        if self not in call.reads:
            call.reads[self] = self._read(call, buffer)
        return call.reads[self]  # type: ignore[no-any-return]

    def _read(self, call: Call, buffer: Callable[[str], torch.Tensor]) -> tuple[Any, ...] | OtherRead:
        if self._program is None:
            return ()
        inputs = call.tensors
        try:
            sources = [inputs[s.position] if s.kind == "input" else buffer(s.name) for s in self._sources]
            sizes = [s.of(inputs) for s in self._symbols if isinstance(s, Dimension)]
            with torch.no_grad(), contextlib.ExitStack() as stack:
                for device_type in self._device_types:  # casts are ops of the program
                    if torch.is_autocast_enabled(device_type):
                        stack.enter_context(torch.autocast(device_type, enabled=False))
                found = self._program.forward(*sizes, *sources)
        except Exception as error:  # of an op for the sizes of the sample, or a buffer is gone
            where = self._guards[0].where
            why = f"forward reads other data: {type(error).__name__} ({where})"
            return OtherRead(line_of_place(where), why, self.of_shapes)
        pairs = list(zip(self._guards, found, strict=True))
        numbers = iter(_numbers([t for guard, t in pairs if not isinstance(guard.value, tuple)]))
        return tuple(tuple(t) if isinstance(guard.value, tuple) else next(numbers) for guard, t in pairs)

    def varying(self, call: Call, buffer: Callable[[str], torch.Tensor]) -> Varying:
        """In which shapes and integers a call differs from the captured one; empty if it differs in another number."""
        found, varying = self.reads(call, buffer), set[Dimension]()
        if isinstance(found, OtherRead):
            return frozenset({FROM_DATA} if found.of_shape else ())
        for place, guard, value in self._differing(found):
            if isinstance(guard.value, tuple):
                varying.add(FROM_DATA)
            elif type(value) is int:
                varying.add(number_read(place))
            else:
                return frozenset()
        return frozenset(varying)

    def changed(self, call: Call, buffer: Callable[[str], torch.Tensor]) -> OtherRead | None:
        """A number, or a shape, that forward would now read another of; None where nothing differs."""
        found = self.reads(call, buffer)
        if isinstance(found, OtherRead):
            return found
        for _, guard, value in self._differing(found):
            why = f"forward reads {value!r} from the data, planned for {guard.value!r} ({guard.where})"
            of_shape = isinstance(guard.value, tuple)
            if of_shape:
                why = f"a result has the shape {value}, planned for {guard.value} ({guard.where})"
            return OtherRead(line_of_place(guard.where), why, of_shape)
        return None

    def _differing(self, found: Sequence[Any]) -> Iterator[tuple[int, Guard, Any]]:
        """(place, guard, value) of what is not as it was captured. None stands for any number, or any size."""
        for place, (guard, value) in enumerate(zip(self._guards, found, strict=True)):
            then = guard.value
            if isinstance(then, tuple):
                same = len(value) == len(then) and all(m in (None, n) for n, m in zip(value, then, strict=True))
            else:
                same = then is None or repr(value) == repr(then)  # 0.0 is equal to -0.0
            if not same:
                yield place, guard, value


def _numbers(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The numbers in tensors of one element each, which are read from a device at once, for each dtype."""
    if len(tensors) <= _FEW and all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.item() for tensor in tensors]
    kinds, found = [(tensor.dtype, tensor.device) for tensor in tensors], dict[int, Any]()
    for kind in set(kinds):
        alike = [position for position, other in enumerate(kinds) if other == kind]
        numbers = torch.cat([tensors[position].reshape(1) for position in alike]).tolist()
        found.update(zip(alike, numbers, strict=True))
    return [found[position] for position in range(len(tensors))]
