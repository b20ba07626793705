"""What the data of a node in a trace depends on, and how to compute it with real tensors."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memplan import torch_private as private
from memplan.capture.ops import op_facts
from memplan.capture.ops.layout import storage_key

aten = torch.ops.aten

_COMPARISONS = (aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar)


class Dataflow:
    """What the nodes of a graph depend on. The graph may grow from one question to the next.

    A question costs no more than the nodes that its answer has, however many nodes the graph has.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._latest: fx.Node | None = None
        self._positions: dict[fx.Node, int] = {}
        self._writers: dict[object, list[fx.Node]] = defaultdict(list)  # by storage, in order

    def behind(self, node: fx.Node, among: Collection[fx.Node] | None = None) -> list[fx.Node]:
        """`node` and all earlier nodes that its data depends on, in order, with writes to storages that are read.

        among: the only nodes that are looked at; None: all.
        """
        new = itertools.takewhile(lambda node: node is not self._latest, reversed(self._graph.nodes))
        for later in reversed(list(new)):
            self._positions[later] = len(self._positions)
            for memory in {storage_of(written) for written in written_nodes(later)}:
                self._writers[memory].append(later)
            self._latest = later
        waiting: list[tuple[int, fx.Node]] = []  # a heap, the latest node first
        storages: set[object] = set()
        seen: set[fx.Node] = set()

        def need(needed: fx.Node, reader: int) -> None:
            storage, writers = storage_of(needed), []
            if storage not in storages:
                storages.add(storage)
                writers = [w for w in self._writers.get(storage, ()) if self._positions[w] < reader]
            for each in (needed, *writers):
                if each not in seen and (among is None or each in among):
                    seen.add(each)
                    heapq.heappush(waiting, (-self._positions[each], each))

        need(node, self._positions[node])
        found = []
        while waiting:
            position, latest = heapq.heappop(waiting)
            found.append(latest)
            for argument in latest.all_input_nodes:
                need(argument, -position)
        return found[::-1]


def answer_to_any_draw(closure: Sequence[fx.Node]) -> bool | None:
    """The answer of a comparison with a uniform random number in [0, 1), where it is the same for each number.

    `if torch.rand([]) < p` with p = 0 is how layer dropping is switched off.

    closure: all that the comparison depends on. None where that is more than the random number, and where the answer
    depends on the number.
    """
    if len(closure) != 2 or closure[0].target is not aten.rand.default or closure[1].target not in _COMPARISONS:
        return None
    draw, comparison = closure
    compare: Any = comparison.target
    dtype, limit = draw.meta["val"].dtype, comparison.args[1:]
    if dtype not in (torch.float32, torch.float64):
        return None
    with private.outside_of_tracing():
        least = torch.zeros((), dtype=dtype, device="cpu")
        most = torch.nextafter(*torch.tensor([1, 0], dtype=dtype, device="cpu"))
        answers = {bool(compare(number, *limit)) for number in (least, most)}
    return answers.pop() if len(answers) == 1 else None


def draws(node: fx.Node) -> bool:
    """Whether a node of a trace advances the generator."""
    return op_facts.draws_random_numbers(node.target, node.args, node.kwargs)


def storage_of(node: fx.Node) -> object:
    """A key that is equal for nodes that share memory."""
    value = node.meta.get("val")
    return storage_key(value) if isinstance(value, torch.Tensor) else node


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """Argument nodes that the op writes to."""
    found = list(written_arguments(node.target, node.args, node.kwargs))
    hidden = op_facts.HIDDEN_WRITES.get(node.target)
    if hidden is not None and node.args[hidden[1]]:
        found += [node.args[i] for i in hidden[0]]
    return [n for n in found if isinstance(n, fx.Node)]


def written_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """What a call gives for arguments that the op's schema says it writes to; of lists, what is in them."""
    for position, name in _written_places(target):
        given = args[position] if position < len(args) else kwargs.get(name)
        yield from given if isinstance(given, (list, tuple)) else [given]


@functools.cache
def _written_places(target: Any) -> tuple[tuple[int, str], ...]:
    """(position, name) of each argument that an op's schema says it writes to."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return ()
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    return tuple((i, a.name) for i, a in enumerate(schema.arguments) if written[i])


def computed(
    closure: Sequence[fx.Node],
    wanted: Collection[fx.Node],
    source: Callable[[fx.Node], torch.Tensor],
    known: dict[fx.Node, Any] | None = None,
) -> dict[fx.Node, Any]:
    """What a closure computes on real tensors, of the nodes that are wanted.

    - source: gives the tensor of a placeholder or a constant. Those that the closure writes to are copied first.
    - known: results that are there already, which all others join. With None, each is freed at its last use.
    """
    written = {storage_of(w) for n in closure for w in written_nodes(n)}
    last = {argument: node for node in closure for argument in node.all_input_nodes}
    results: dict[fx.Node, Any] = {} if known is None else known
    with private.outside_of_tracing(), torch.no_grad():
        for node in closure:
            if node in results:
                continue
            if node.op in ("placeholder", "get_attr"):
                real = source(node)
                results[node] = real.clone() if storage_of(node) in written else real
            else:
                args = fx.map_arg(node.args, results.__getitem__)
                kwargs = fx.map_arg(node.kwargs, results.__getitem__)
                results[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            for argument in node.all_input_nodes if known is None else ():
                if last[argument] is node and argument not in wanted:
                    del results[argument]
    return {node: results[node] for node in wanted}
