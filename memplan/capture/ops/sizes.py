"""Sizes that vary from call to call: which, what the trace took them to be, and the numbers of one call.

A step that is traced with symbols in the place of such sizes serves every call for which the trace's conditions hold.
Wherever the step has a number that depends on them it has an `Expression`. `Sizes` computes those from a call.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx

from memplan import torch_private as private
from memplan.capture.ops.layout import dense_stride, storage_key

Numbers = tuple[int, ...]  # the value of each symbol in one call


@dataclass(frozen=True, slots=True)
class Expression:
    """A number that depends on sizes of the inputs. text: Python for it, in terms of the symbols s[0], s[1], ..."""

    text: str


Size = int | Expression


@dataclass(frozen=True, slots=True)
class Dimension:
    """A size of an input, or a stride. tensor: the input's position."""

    tensor: int
    index: int
    is_stride: bool = False

    def of(self, tensors: Sequence[torch.Tensor]) -> int:
        tensor = tensors[self.tensor]
        return tensor.stride(self.index) if self.is_stride else tensor.shape[self.index]


# (args, kwargs) of a node or a kernel, with expressions in the place of numbers
CallSizes = tuple[tuple[Any, ...], dict[str, Any]]
Varying = frozenset[Dimension]  # what varies from call to call
FROM_DATA = Dimension(-1, 0)  # among what varies: the shapes that follow from the data of inputs


def number_read(read: int) -> Dimension:
    """Among what varies: a number that forward reads from the data of inputs, by its place among all that it reads."""
    return Dimension(-1, 1 + read)


def without_numbers(varying: Varying) -> Varying:
    """What varies but for numbers that forward reads."""
    return frozenset(d for d in varying if d.tensor >= 0 or d == FROM_DATA)


@dataclass(frozen=True, slots=True)
class DataSize:
    """A number that follows from the data of inputs: of what forward read, as the guards compute it before a call.

    - read: which of the guards' reads.
    - index: the dimension of a result; None for a number that forward reads.
    """

    read: int
    index: int | None

    def of(self, reads: Sequence[Any]) -> int:
        return reads[self.read] if self.index is None else reads[self.read][self.index]  # type: ignore[no-any-return]

    @property
    def varies(self) -> Dimension:
        """How it is named among what varies."""
        return number_read(self.read) if self.index is None else FROM_DATA


def varying_between(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> Varying:
    """The sizes in which two lists of shapes differ."""
    pairs = enumerate(zip(some, others, strict=True))
    return frozenset(
        Dimension(place, i) for place, shapes in pairs for i, (n, m) in enumerate(zip(*shapes, strict=True)) if n != m
    )


def all_sizes(tensors: Sequence[torch.Tensor]) -> Varying:
    """Every size of some tensors."""
    return frozenset(Dimension(position, i) for position, t in enumerate(tensors) for i in range(t.dim()))


class SymbolicInputs:
    """Fakes of a call's tensors with symbols for what varies.

    - tensors: the fakes.
    - symbols: those of the trace.
    - sources: where each symbol is found in a call.
    """

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        varying: Varying,
        device: torch.device | None,
        fixed: Callable[[str, int], None],
    ) -> None:
        """Make fakes of inputs.

        - device: where they will be; None: where they are.
        - fixed: called with a symbol and its number where PyTorch comes to depend on the number.
        """
        self._device = device
        self.symbols = private.Symbols(fixed)
        self.sources: list[Dimension | DataSize] = []
        self._varying = varying
        self.tensors: list[torch.Tensor] = []
        for position, tensor in enumerate(inputs):
            if not any(d.tensor == position for d in varying):
                here = tensor if device is None or tensor.device.type == device.type else tensor.to(device)
                self.tensors.append(self.symbols.fixed_fake(here, here.device))
            else:
                same = self._given_before(tensor, inputs[:position])
                self.tensors.append(self._fake(position, tensor, varying) if same is None else same.detach())

    def _given_before(self, tensor: torch.Tensor, earlier: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The fake of this very tensor, where it is given twice. Raises FixedSize where tensors overlap otherwise."""
        for fake, other in zip(self.tensors, earlier):
            if storage_key(other) == storage_key(tensor):
                layouts = [(t.storage_offset(), t.shape, t.stride(), t.dtype) for t in (other, tensor)]
                if layouts[0] != layouts[1] or not private.varies(fake):
                    raise private.FixedSize("inputs whose sizes vary lie in the same memory")
                return fake
        return None

    def _fake(self, position: int, tensor: torch.Tensor, varying: Varying) -> torch.Tensor:
        dimensions = [Dimension(position, i) for i in range(tensor.dim())]
        shape = [self._symbol(d, n) if d in varying else n for d, n in zip(dimensions, tensor.shape, strict=True)]
        stride: Sequence[Any] = dense_stride(shape)
        if tensor.stride() != dense_stride(tensor.shape):
            stride = [self._symbol(Dimension(position, i, True), n) for i, n in enumerate(tensor.stride())]
        return self.symbols.fake(shape, stride, tensor.dtype, self._device or tensor.device)

    def number(self, read: int, value: Any) -> Any:
        """A number that forward reads from data; a symbol if it varies. read: its place among forward's reads."""
        if number_read(read) not in self._varying or type(value) is not int:
            return value
        return self._symbol(DataSize(read, None), value)

    def shaped(self, read: int, real: torch.Tensor, fake: torch.Tensor) -> tuple[list[Any], list[Any]]:
        """Shape and strides of a result whose shape depends on data; symbols for its sizes, if they vary.

        - read: its place among forward's reads.
        - real: the result for this call. Its strides must be those of its memory without gaps.
        """
        if FROM_DATA not in self._varying:
            return list(real.shape), list(real.stride())
        pairs = enumerate(zip(real.shape, fake.shape, strict=True))
        shape = [self._symbol(DataSize(read, i), n) if private.depends_on_data(m) else m for i, (n, m) in pairs]
        if not real.numel():  # then none of its sizes that depend on data is a symbol
            return shape, list(real.stride())
        stride, following = [1] * real.dim(), 1
        for i in sorted(range(real.dim()), key=lambda i: (real.stride(i), -i)):
            if real.shape[i] != 1 and real.stride(i) != private.number_here(following):
                raise private.FixedSize("strides of a result whose shape depends on data")
            stride[i], following = following, following * shape[i]
        return shape, stride

    def returned(self, number: Any) -> Any:
        """A number that forward returns, as an expression. Raises FixedSize where it is no integer."""
        if isinstance(number, torch.SymBool):
            return bool(number)
        if not isinstance(number, torch.SymInt):
            raise private.FixedSize("forward returns a number that it computes from sizes")
        return expression_of(number, self.symbols)

    def _symbol(self, source: Dimension | DataSize, value: int) -> Any:
        made = self.symbols.new(value)
        if private.is_symbolic(made):
            self.sources.append(source)
        return made


def expression_of(number: Any, symbols: private.Symbols) -> Size:
    """A size as a number, or as an expression."""
    text = symbols.text(number)
    return Expression(text) if isinstance(text, str) else text


def with_expressions(graph: fx.Graph, symbols: private.Symbols) -> dict[str, str]:
    """Put expressions in the place of the nodes of a trace that compute numbers from sizes.

    Other nodes get the names that they would have without those. Gives the new names by the old ones.
    """
    numbers: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if private.is_symbolic(value):
            text = private.text_of_node(node, symbols)
            numbers[node] = int(text) if text.lstrip("-").isdigit() else Expression(text)
    for node in graph.nodes:
        if node not in numbers and any(argument in numbers for argument in node.all_input_nodes):
            node.args = fx.map_arg(node.args, lambda n: numbers.get(n, n))
            node.kwargs = fx.map_arg(node.kwargs, lambda n: numbers.get(n, n))
    for node in reversed(list(graph.nodes)):
        if node in numbers:
            graph.erase_node(node)
    return private.named_anew(graph)


def expressions_in(things: Any) -> list[Expression]:
    """All expressions among nested arguments, and in the fields of dataclasses among those."""
    found = list[Expression]()
    put(things, found.append)
    return found


def symbols_in(expression: Expression) -> tuple[int, ...]:
    """The symbols on which an expression depends."""
    return tuple(sorted({int(symbol) for symbol in re.findall(r"s\[(\d+)\]", expression.text)}))


def put(things: Any, value: Callable[[Expression], Any]) -> Any:
    """Nested arguments with something in the place of each expression, in the fields of dataclasses too."""
    if isinstance(things, Expression):
        return value(things)
    if isinstance(things, (list, tuple)):
        return type(things)(put(thing, value) for thing in things)
    if isinstance(things, Mapping):
        return {name: put(thing, value) for name, thing in things.items()}
    if dataclasses.is_dataclass(things) and not isinstance(things, type):
        fields = {field.name: put(getattr(things, field.name), value) for field in dataclasses.fields(things)}
        return dataclasses.replace(things, **fields)
    return things


class Evaluation:
    """Values of expressions for the numbers of one call."""

    def __init__(self, expressions: Iterable[Expression]) -> None:
        self._expressions = tuple(dict.fromkeys(expressions))
        self._place = {expression: place for place, expression in enumerate(self._expressions)}
        self._evaluate = private.evaluator([expression.text for expression in self._expressions])

    def at(self, numbers: Numbers) -> Callable[[Any], Any]:
        """A function that gives the number for an expression, and every other thing back."""
        values, place = self._evaluate(numbers), self._place
        return lambda thing: values[place[thing]] if isinstance(thing, Expression) else thing


@dataclass(frozen=True, slots=True)
class TensorSizes:
    """The layout of one result of a node. memory: equal for tensors that share memory."""

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    offset: Size
    memory: int
    memory_bytes: Size

    @staticmethod
    def of(tensor: torch.Tensor, symbols: private.Symbols) -> TensorSizes:
        """The layout of a fake tensor with symbols."""
        size = partial(expression_of, symbols=symbols)
        return TensorSizes(
            tuple(map(size, tensor.shape)), tuple(map(size, tensor.stride())), size(tensor.storage_offset()),
            storage_key(tensor), size(tensor.untyped_storage().nbytes()),
        )  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """How a step goes on for other sizes than those of the call that it was captured with.

    - sources: where each symbol is found among a call's tensors, or among what forward reads from their data.
    - here: the numbers that the step beside it has.
    - fixed: places where PyTorch came to depend on the number behind a symbol.
    - conditions: what must hold of the numbers, as Python text, each where those before it do.
    - inputs: the layout of each tensor of a call.
    - values: the size of each value of the graph, in bytes.
    - nodes, results: arguments and results of those nodes of the trace that vary, by the nodes' names.
    - kernels: arguments of those kernels that vary, by the op's index.
    """

    sources: tuple[Dimension | DataSize, ...]
    here: Numbers
    fixed: tuple[str, ...]
    conditions: tuple[str, ...]
    inputs: tuple[TensorSizes, ...]
    values: tuple[Size, ...]
    nodes: Mapping[str, CallSizes]
    results: Mapping[str, tuple[TensorSizes | None, ...]]
    kernels: Mapping[int, CallSizes]

    def numbers(self, tensors: Sequence[torch.Tensor], reads: Sequence[Any] = ()) -> Numbers:
        """The value of each symbol in a call. reads: what forward reads from the data of the call's inputs."""
        return tuple(s.of(tensors if isinstance(s, Dimension) else reads) for s in self.sources)

    @property
    def from_data(self) -> bool:
        """Whether some of the sizes follow from data."""
        return any(isinstance(source, DataSize) for source in self.sources)

    def is_fixed(self, symbol: int) -> bool:
        """Whether the step serves one value of a symbol alone."""
        here = self.here[symbol]
        return {f"s[{symbol}] >= {here}", f"s[{symbol}] <= {here}"} <= {*self.conditions}

    def broken(self, numbers: Numbers) -> Expression | None:
        """The first condition that does not hold; None where all do."""
        if self._all_hold(numbers)[0]:
            return None
        return Expression(next(c for c in self.conditions if not private.evaluator([c])(numbers)[0]))

    def mismatch(self, numbers: Numbers) -> str | None:
        """The first condition that does not hold, in words; None where all do."""
        broken = self.broken(numbers)
        given = ", ".join(f"s[{i}]={n}" for i, n in enumerate(numbers))
        return None if broken is None else f"sizes {given} break the condition {broken.text} of the plan"

    def layouts(self, numbers: Numbers) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Shape and stride that each input has at these numbers."""
        value = self._input_values.at(numbers)
        return tuple((tuple(map(value, t.shape)), tuple(map(value, t.stride))) for t in self.inputs)

    def bytes_of(self, values: Sequence[Size], numbers: Numbers) -> tuple[int, ...]:
        """The sizes of some values of the graph at these numbers."""
        return tuple(map(self._bytes.at(numbers), values))

    @cached_property
    def _all_hold(self) -> Callable[[Sequence[int]], tuple[Any, ...]]:
        return private.evaluator([" and ".join(f"({condition})" for condition in self.conditions)])

    @cached_property
    def _input_values(self) -> Evaluation:
        return Evaluation(expressions_in([(t.shape, t.stride) for t in self.inputs]))

    @cached_property
    def _bytes(self) -> Evaluation:
        return Evaluation(expressions_in(self.values))
