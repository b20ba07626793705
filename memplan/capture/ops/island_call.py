"""What a call that can't be traced is, what runs of it have shown, and what follows for other sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.ops.layout import Layout, Place, Source
from memplan.capture.ops.sizes import Evaluation, Expression, Numbers, Size, expressions_in
from memplan.torch_private import pytree

_HIGHEST_POWER = 3
_ROUNDED = 64  # the part of scratch that rounding may add
SCRATCH_MARGIN_BYTES = 512  # by which scratch may grow more than in proportion


@dataclass(frozen=True, slots=True)
class ForwardFacts:
    """What one run of a call gave.

    - outputs: where each output lies; of what is no tensor, the thing itself.
    - spec: how outputs are nested.
    - differentiable: by output.
    - saved: where each tensor lies that its graph saves.
    - results: layouts of what the forward op makes. The first `made` of them hold outputs.
    - uses: by input, how many gradients it gets.
    """

    outputs: tuple[Any, ...]
    spec: pytree.TreeSpec
    differentiable: tuple[bool, ...]
    saved: tuple[Place, ...]
    results: tuple[Layout, ...]
    made: int
    uses: tuple[int, ...]

    @property
    def returned(self) -> tuple[Any, ...]:
        """All but what is saved, and how often inputs are read."""
        return self.outputs, self.spec, self.differentiable, self.results[: self.made]

    @property
    def kept(self) -> tuple[Source, ...]:
        """Inputs and results that backward reads, each once."""
        return tuple(dict.fromkeys(place.source for place in self.saved))


@dataclass(frozen=True, slots=True)
class BackwardFacts:
    """What one run of the backward of a call gave.

    - given: which outputs it was given gradients of.
    - gradients: where the gradient of each use of each input that needs one lies; None: there is none.
    - results: layouts of what the backward op makes.
    """

    given: tuple[bool, ...]
    gradients: tuple[tuple[Place | None, ...], ...]
    results: tuple[Layout, ...]


def with_numbers(things: Any, number: Callable[[Any], Any]) -> Any:
    """Facts and layouts with another number in the place of each size, stride and offset."""
    if isinstance(things, Layout):
        return things._replace(shape=tuple(map(number, things.shape)), stride=tuple(map(number, things.stride)))
    if isinstance(things, Place):
        layout = with_numbers(things.layout, number)
        return things._replace(layout=layout, offset_bytes=number(things.offset_bytes))
    if isinstance(things, (ForwardFacts, BackwardFacts)):
        fields = {f.name: with_numbers(getattr(things, f.name), number) for f in dataclasses.fields(things)}
        return dataclasses.replace(things, **fields)
    return tuple(with_numbers(t, number) for t in things) if type(things) is tuple else things


def numbers_in(things: Any) -> list[Any]:
    """The sizes, strides and offsets in facts and layouts, in order."""
    found = list[Any]()
    with_numbers(things, found.append)
    return found


class Seen(NamedTuple):
    """What runs of an island at some sizes have shown.

    - numbers: sizes and strides of what it was given, then those of its arguments that are integers.
    - facts: of forward and of backward.
    - held_bytes: what its arguments and results take, each.
    - scratch_bytes: what forward and backward hold beyond that.
    """

    numbers: Numbers
    facts: tuple[ForwardFacts, BackwardFacts | None]
    held_bytes: tuple[int, ...]
    scratch_bytes: tuple[int, int]


class SizeRules:
    """The facts of an island as functions of its numbers, learnt from runs at several sizes.

    A size of a result is taken to be a product of up to three numbers and a factor, else a straight line in one number,
    in this order. Each call compares what the island gives with that.
    """

    def __init__(self, function: str, seen: Sequence[Seen], numbers: Sequence[Any]) -> None:
        """Learn from runs. numbers: those of a trace. Raises FixedSize if runs do not tell how facts go with these."""
        refused = f"{function} runs as it is, and"
        columns = list(zip(*(s.numbers for s in seen), strict=True))
        pairs = zip(columns, numbers, strict=True)
        if any(private.is_symbolic(number) and len(set(column)) == 1 for column, number in pairs):
            raise private.FixedSize(f"{refused} it has not run at enough sizes yet")
        for small, large in itertools.permutations(seen, 2):
            growth = max(1, *(n / max(m, 1) for n, m in zip(large.held_bytes, small.held_bytes, strict=True)))
            scratch = [(n, m * growth) for n, m in zip(large.scratch_bytes, small.scratch_bytes, strict=True)]
            # The margin is for rounding; of little scratch it would hide squares.
            if any(n > most + min(SCRATCH_MARGIN_BYTES, most / _ROUNDED) for n, most in scratch):
                raise private.FixedSize(f"{refused} it needs memory that grows faster than what it is given and gives")
        rules = [_rule(row, columns) for row in zip(*(numbers_in(s.facts) for s in seen), strict=True)]
        found = iter([rule for rule in rules if rule is not None])
        if None in rules:
            raise private.FixedSize(f"{refused} sizes of what it gives follow no rule")
        self._facts = with_numbers(seen[0].facts, lambda _: next(found))
        self._evaluation = Evaluation(expressions_in(numbers_in(self._facts)))

    def at(self, numbers: Sequence[Any]) -> tuple[ForwardFacts, BackwardFacts | None]:
        """The facts at these numbers, which may be symbols."""
        return with_numbers(self._facts, self._evaluation.at(tuple(numbers)))  # type: ignore[no-any-return]


def _rule(values: Sequence[int], columns: Sequence[Sequence[int]]) -> Size | None:
    """A number as a function of others; None if none was found.

    - values: what it was in each run.
    - columns: what each of the others was in each run. That of place i is s[i].
    """
    if len(set(values)) == 1:
        return values[0]
    varying: dict[tuple[int, ...], str] = {}
    for place, column in enumerate(columns):
        if len(set(column)) > 1:
            varying.setdefault(tuple(column), f"s[{place}]")
    for power in range(1, _HIGHEST_POWER + 1):
        for factors in itertools.combinations_with_replacement(varying, power):
            products = [math.prod(numbers) for numbers in zip(*factors, strict=True)]
            ratio = values[0] // products[0] if products[0] else 0
            if ratio and all(ratio * product == value for product, value in zip(products, values, strict=True)):
                return Expression(" * ".join([str(ratio), *(varying[factor] for factor in factors)]))
    for column, name in varying.items():
        other = next(i for i, n in enumerate(column) if n != column[0])
        slope = Fraction(values[other] - values[0], column[other] - column[0])
        start = slope.denominator * values[0] - slope.numerator * column[0]
        line = [slope.numerator * n + start for n in column]
        if slope and line == [slope.denominator * value for value in values]:
            return Expression(f"({slope.numerator} * {name} + {start}) // {slope.denominator}")
    return None


class IslandCost(NamedTuple):
    """What one run of an op takes. scratch_bytes: held at its peak beyond its results."""

    time_s: float
    scratch_bytes: int

    def with_margin(self) -> IslandCost:
        """The cost at other sizes, at which scratch may grow more than in proportion."""
        return self._replace(scratch_bytes=self.scratch_bytes + SCRATCH_MARGIN_BYTES)


_NOTHING = IslandCost(0.0, 0)


@dataclass(eq=False)
class IslandCall:
    """One call that can't be traced: what it is, what its runs have shown, and that at other sizes.

    - name: no other call of the step has it.
    - called: what is called: an autograd function, the path of a module, the class of modules that forward makes, or a
      named function.
    - function: its name. title: it and the line that calls it, for messages.
    - static: arguments that are no tensors; in the place of a tensor, which of the tensors it is.
    - module: path of the module that is called, or whose method is; None for anything else.
    - call: takes that module, the static arguments and the tensors, and gives what was returned.
    - named: takes the model, and gives the Python attributes that each of the tensors has.
    - owners: by tensor, the name of the parameter that it is.
    - buffers: positions of tensors to which the call may write.
    - inputs, needs: layouts of the tensors, and which of them get gradients.
    - around, around_backward: make the contexts in which it and its backward run. backward_mode: names the latter.
    - modes: autocast and grad mode of the call. Another call in other modes needs an island of its own.
    - attributes: of a module, which must not have changed where it runs again in a step.
    - device: of the plan.
    - forward_facts, backward_facts: what runs of it gave, and have to give again.
    - random: it draws from PyTorch's generators.
    - repeats: it may run again in a step, and gives the same bits then.
    - once: it leaves, or reads, Python state. alike: once that is put back, another run gives the same bits.
    - kept: takes the model, and makes a context that puts Python state back.
    - writes: positions of tensors to which it writes.
    - own: positions of its module's buffers that nothing else of the step reads. Any run may write to these.
    - in_place: (position of an argument, which output) where it writes to an argument, and returns that. The op gives a
      tensor of its own, which the trace copies to the argument.
    - loose: which arguments get gradients, and how often it reads them, may differ from run to run.
    - varies: what it saves differs from run to run. room: the buffer for that; None where it is not known to.
    - looked_at: its facts are known.
    - forward_cost, backward_cost: what a run took.
    - known: what runs at other sizes have shown.
    - rules: its facts at other sizes; None for an island of one size. open: static arguments that vary with sizes.
    - at_numbers: of its sizes, which the rules were asked about; None if it was looked at with these sizes.
    """

    name: str
    called: Any
    function: str
    title: str
    static: tuple[Any, ...]
    module: str | None
    call: Callable[..., Any]
    named: Callable[[nn.Module], Sequence[Mapping[str, Any]]]
    owners: tuple[str | None, ...]
    buffers: frozenset[int]
    inputs: tuple[Layout, ...]
    needs: tuple[bool, ...]
    device: torch.device
    around: Callable[[], AbstractContextManager[Any]]
    modes: Any
    attributes: Callable[[nn.Module], Any] = type
    around_backward: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    backward_mode: str = ""
    forward_facts: ForwardFacts | None = None
    backward_facts: BackwardFacts | None = None
    random: bool = False
    repeats: bool = True
    once: bool = False
    alike: bool = True
    kept: Callable[[nn.Module], Any] = contextlib.nullcontext  # `StateKept` of runtime/program
    writes: frozenset[int] = frozenset()
    own: frozenset[int] = frozenset()
    in_place: tuple[tuple[int, int], ...] = ()
    loose: bool = False
    varies: bool = False
    room: Layout | None = None
    looked_at: bool = False
    forward_cost: IslandCost = _NOTHING
    backward_cost: IslandCost = _NOTHING
    known: tuple[Seen, ...] = ()
    rules: SizeRules | None = None
    open: tuple[int, ...] = ()
    at_numbers: Numbers | None = None
    like: Any = None  # attributes of a module that forward makes
    shared: frozenset[int] = frozenset()  # inputs that others give gradients to as well
    _latest: Any = None  # the island of the latest call, of an island with rules
    _told: list[str] = field(default_factory=list)
    _entered: Any = None  # the node at which the graph of the latest run begins
    _seen: weakref.WeakKeyDictionary[nn.Module, Any] = field(default_factory=weakref.WeakKeyDictionary)

    @property
    def further_uses(self) -> list[int]:
        """Positions of inputs, once for each gradient that they get beyond the first."""
        assert self.forward_facts is not None
        uses = () if self.room is not None else self.forward_facts.uses
        return [position for position, count in enumerate(uses) for _ in range(1, count)]

    @property
    def inputs_by_gradient(self) -> dict[int | None, int]:
        """Which input each result of the backward op is a gradient of."""
        needed = [position for position, needs in enumerate(self.needs) if needs]
        gradients = () if self.backward_facts is None else self.backward_facts.gradients
        places = ((position, p) for position, of_one in zip(needed, gradients) for p in of_one if p is not None)
        return {p.source[1]: position for position, p in places if p.source[0] == "result of backward"}

    @property
    def integers(self) -> tuple[int, ...]:
        """Which of the static arguments are integers."""
        return tuple(place for place, thing in enumerate(self.static) if type(thing) is int)

    @property
    def seen(self) -> Seen:
        """What its runs have shown."""
        assert self.forward_facts is not None
        layouts = (*self.inputs, *self.forward_facts.results)
        layouts += () if self.backward_facts is None else self.backward_facts.results
        return Seen(
            (*numbers_in(self.inputs), *(self.static[place] for place in self.integers)),
            (self.forward_facts, self.backward_facts),
            tuple(layout.nbytes for layout in layouts),
            (self.forward_cost.scratch_bytes, self.backward_cost.scratch_bytes),
        )

    def numbers(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> tuple[Any, ...]:
        """The numbers of a call, as in `Seen`. sizes: static arguments that vary."""
        given = dict(zip(self.open, sizes, strict=True))
        static = (given.get(place, self.static[place]) for place in self.integers)
        return (*numbers_in(tuple(map(Layout.of, tensors))), *static)
