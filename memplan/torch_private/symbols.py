"""Sizes that vary from call to call: symbols of a `ShapeEnv` in the place of numbers, and Python text for what they do.

A trace over such sizes serves all numbers for which the conditions hold that it depended on: the guards of the
`ShapeEnv`. Text, for sizes and for guards, is in terms of `s[0]`, `s[1]` and so on.
"""

from __future__ import annotations

import builtins
import functools
import gc
import math
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._functorch import config
from torch._subclasses import fake_impls
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.graph import _Namespace
from torch.utils._sympy import functions
from torch.utils._sympy.printers import PythonPrinter

from memplan.errors import UnsupportedModel
from memplan.torch_private.exchanged import exchanged
from memplan.torch_private.tensors import FakeTensor, FakeTensorMode, suggest_memory_format

aten = torch.ops.aten

_MOST = 2**40  # elements of a dimension
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class FixedSize(UnsupportedModel):
    """Something can't be done for sizes that vary."""


class SymbolEnv(ShapeEnv):
    """A `ShapeEnv` that says at once where a symbol becomes a number: `fixed(symbol, number)` is called there.

    PyTorch keeps environments in caches. The method of a trace is held weakly, or the trace and its model would stay.
    """

    fixed: weakref.WeakMethod[Callable[[str, int], None]]

    def _set_replacement(self, a: sympy.Symbol, tgt: sympy.Expr, msg: str) -> None:
        super()._set_replacement(a, tgt, msg)
        if self.replacements.get(a) is not None and not self.replacements[a].free_symbols:
            if (fixed := self.fixed()) is not None:
                fixed(str(a), int(self.replacements[a]))


class Symbols:
    """The symbols of one trace. Sizes of 0 and 1 get none: PyTorch's kernels look at those in their own ways.

    - mode: the fake mode of the trace.
    - values: what they are in the trace.
    """

    def __init__(self, fixed: Callable[[str, int], None]) -> None:
        """fixed: a method that is called with a symbol and its number where PyTorch comes to depend on the number."""
        self._env = SymbolEnv()
        self._env.fixed = weakref.WeakMethod(fixed)
        self._symbols: list[sympy.Symbol] = []
        self.values: list[int] = []
        self._text: dict[Any, str] = {}
        with config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):  # code that asks for an address is refused
            self.mode = FakeTensorMode(allow_fallback_kernels=True, allow_non_fake_inputs=True, shape_env=self._env)

    def new(self, value: int) -> int | torch.SymInt:
        """A symbol that has this value in the trace; the value itself where it is 0 or 1."""
        if value < 2:
            return value
        source = ConstantSource(f"memplan_size_{len(self._symbols)}")
        symbol = self._env.create_symbol(value, source, DimDynamic.DYNAMIC)
        # Eager leaves out a slice that takes all. A trace does so where it knows that the end is not within the tensor.
        self._env.constrain_symbol_range(symbol, 2, _MOST)
        self._symbols.append(symbol)
        self.values.append(value)
        return self._env.create_symintnode(symbol, hint=value, source=source)

    def fake(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, on: torch.device) -> torch.Tensor:
        """A fake tensor of this layout on a device. Sizes and strides may be symbols."""
        with self.mode:
            return torch.empty_strided(shape, stride, dtype=dtype, device=on)

    def fixed_fake(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A fake, on a device, of a tensor whose sizes do not vary.

        Those of tensors that are there already share memory as the tensors do.
        """
        if tensor.device.type != device.type:
            return self.fake(tensor.shape, tensor.stride(), tensor.dtype, device)
        return self.mode.from_tensor(tensor.detach(), static_shapes=True)

    @property
    def fixed(self) -> list[int]:
        """The symbols, by their places, of which the trace depends on the value."""
        return [i for i, symbol in enumerate(self._symbols) if self._env.replace(symbol).is_number]

    def text(self, size: int | torch.SymInt) -> str | int:
        """A size as text; a number where it does not vary."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = self._env.replace(size.node._expr)
        if expression.is_number:
            return int(expression)
        if expression not in self._text:
            self._text[expression] = self._printed(expression)
        return self._text[expression]

    def _printed(self, expression: sympy.Basic) -> str:
        """An expression as text.

        Raises FixedSize for arithmetic with fractions that SymPy may round otherwise than Python: it folds constants,
        and reorders. A division, or a constant with few binary digits, is exact enough if it is alone.
        """
        parts = [part for part in sympy.preorder_traversal(expression) if isinstance(part, sympy.Expr)]
        fractions = [part for part in parts if not part.is_integer]
        inexact = [part for part in fractions if isinstance(part, (sympy.Function, sympy.Pow))]
        inexact = [part for part in inexact if not isinstance(part, functions.ToFloat)]
        sums = any(isinstance(part, (sympy.Add, sympy.Mul)) for part in fractions)
        odd = any(isinstance(part, sympy.Float) and not _has_few_digits(part) for part in parts)
        if odd or len(inexact) > 1 or (inexact and sums):
            raise FixedSize(f"arithmetic with fractions that may be rounded in another order: {expression}")
        names = {symbol: sympy.Symbol(f"s[{i}]", integer=True) for i, symbol in enumerate(self._symbols)}
        return str(PythonPrinter().doprint(expression.xreplace(names)))

    def conditions(self) -> tuple[str, ...]:
        """All that has to hold of the symbols so that the trace is what it would be with them as numbers.

        A condition is to be asked only where those before it hold: it may divide by what they say is not 0.
        """
        if any(self._env.deferred_runtime_asserts.values()):
            raise FixedSize("a condition on sizes is left to the time when the step runs")
        found = []
        for index, symbol in enumerate(self._symbols):
            bounds = self._env.var_to_range[symbol]
            found.append(f"s[{index}] >= {int(bounds.lower)}")
            if isinstance(bounds.upper, sympy.Integer):
                found.append(f"s[{index}] <= {int(bounds.upper)}")
        found += [self._printed(guard.expr) for guard in self._env.guards]
        return tuple(dict.fromkeys(found))


def _has_few_digits(number: sympy.Float) -> bool:
    numerator, denominator = float(number).as_integer_ratio()
    return abs(numerator) < 1 << 20 and denominator <= 1 << 10


def meta_memory(size_bytes: int) -> torch.UntypedStorage:
    """Memory of a size, on the meta device."""
    with torch._C._DisableTorchDispatch():
        return torch.empty(size_bytes, dtype=torch.uint8, device="meta").untyped_storage()


def meta_within(
    memory: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A tensor of this layout in memory on the meta device, which is known to be large enough.

    Where sizes are symbols, `set_` takes twenty times as long: it compares them with the memory's.
    """
    empty = torch.empty(0, dtype=dtype, device="meta").set_(memory, 0, (0,), (1,))
    with torch._C._AutoDispatchBelowADInplaceOrView():  # so that it is no view of `empty`
        return empty.as_strided(shape, stride, offset)


def fake_like(
    tensor: torch.Tensor, memory: torch.UntypedStorage, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A fake tensor with another layout, in memory on the meta device."""
    with torch._C._DisableTorchDispatch():
        laid = meta_within(memory, tensor.dtype, offset, shape, stride)
    like = FakeTensor(_NUMBERS, laid, tensor.device) if isinstance(tensor, FakeTensor) else laid
    torch._C._set_neg(like, tensor.is_neg())
    torch._C._set_conj(like, tensor.is_conj())
    return like


_NUMBERS = FakeTensorMode(allow_fallback_kernels=True, allow_non_fake_inputs=True)


def is_symbolic(thing: Any) -> bool:
    """Whether it is a number that depends on symbols."""
    return isinstance(thing, _SYMBOLIC)


def number_here(thing: Any) -> Any:
    """The number that a symbolic size has in its trace, which then does not depend on it. Other things as they are."""
    return thing.node.hint if isinstance(thing, torch.SymInt) else thing


def key_of_size(size: Any) -> Any:
    """A key of a size, equal for those that are equal for all values of the symbols."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def varies(tensor: torch.Tensor) -> bool:
    """Whether a size, a stride or the memory of a fake tensor depends on symbols."""
    return bool(tensor._has_symbolic_sizes_strides) or is_symbolic(tensor.untyped_storage().nbytes())


def evaluator(texts: Sequence[str]) -> Callable[[Sequence[int] | Mapping[int, int]], tuple[Any, ...]]:
    """A function from the values of symbols to those of several texts."""
    code = f"lambda s: ({''.join(f'{text}, ' for text in texts)})"
    known = {"math": math, "abs": abs, "max": max, "min": min, "torch": torch}
    return eval(code, known)  # type: ignore[no-any-return]


_ARITHMETIC: dict[Any, str] = {
    operator.mul: "({} * {})", operator.add: "({} + {})", operator.sub: "({} - {})", operator.truediv: "({} / {})",
    operator.floordiv: "({} // {})", operator.mod: "({} % {})", operator.pow: "({} ** {})", operator.neg: "(-{})",
    torch.sym_float: "float({})", torch.sym_int: "int({})", torch.sym_max: "max({}, {})", torch.sym_min: "min({}, {})",
}  # fmt: skip


def text_of_node(node: fx.Node, symbols: Symbols) -> str:
    """A number of a trace as text: sizes by their value, other numbers by the arithmetic that made them, in its order.

    Raises FixedSize where that is not known.
    """
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return str(symbols.text(value))
    parts = [text_of_node(a, symbols) if isinstance(a, fx.Node) else repr(a) for a in node.args]
    if node.target not in _ARITHMETIC or node.kwargs or _ARITHMETIC[node.target].count("{}") != len(parts):
        raise FixedSize(f"{node.target} computes a {type(value).__name__} of a size that varies")
    return _ARITHMETIC[node.target].format(*parts)


def named_anew(graph: fx.Graph) -> dict[str, str]:
    """Name the calls of a trace as they would be named had no others been among them. Gives new names by old ones."""
    space, names = _Namespace(), dict[str, str]()
    for node in graph.nodes:
        base = node.name.rpartition("_") if node.op == "call_function" else None
        names[node.name] = space.create_name(base[0] if base and base[2].isdigit() else node.name, None)
    for node in graph.nodes:
        node.name = names[node.name]
    return names


_ONE_AT_A_TIME = threading.RLock()  # for what is put in the place of others here serves the whole process
_MOST_TURNS = 64  # of a loop over a size; one of more turns depends on the number


@contextmanager
def sizes_left_open() -> Iterator[None]:
    """A context in which fake kernels, `range` and `len` leave sizes symbols, which are ints to `isinstance`.

    SymPy remembers what is a number: it asks that half a million times in the trace of a Llama of 32 layers, a third of
    the seconds.
    """
    known = fake_impls.op_implementations_dict
    with _ONE_AT_A_TIME:
        kernels = {op: known[op] for op in _OPEN if op in known}
        is_number = property(functools.lru_cache(1 << 16)(sympy.Expr.is_number.fget))
        known.update(_OPEN)
        for kind, plain in _PLAIN.items():
            _own_attributes(kind)["__class__"] = property(functools.partial(_class_of_symbol, plain))
            kind.__doc__ = kind.__doc__  # lets Python forget what it has looked up
        try:
            with exchanged(builtins, range=_Range, len=_length), exchanged(sympy.Expr, is_number=is_number):
                yield
        finally:
            for kind in _PLAIN:
                del _own_attributes(kind)["__class__"]
                kind.__doc__ = kind.__doc__
            known.update(kernels)
            for op in _OPEN.keys() - kernels.keys():
                del known[op]


def _own_attributes(kind: type) -> dict[str, Any]:
    """The attributes of a class, to be written to: `setattr` would change the class of the class."""
    (attributes,) = (found for found in gc.get_referents(vars(kind)) if type(found) is dict)
    return attributes


_PLAIN: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_KNOW_SYMBOLS = frozenset({"torch", "sympy", "memplan"})


def _class_of_symbol(plain: type, symbol: Any) -> type:
    """What `isinstance` takes a symbol for: itself where PyTorch asks, and a plain number, as in eager, elsewhere."""
    frame = sys._getframe(1)
    if frame.f_globals.get("__name__") == "abc" and frame.f_back is not None:  # isinstance(size, numbers.Integral)
        frame = frame.f_back
    asks = str(frame.f_globals.get("__name__")).partition(".")[0]
    return type(symbol) if asks in _KNOW_SYMBOLS else plain


_RANGE, _LEN = range, len  # names of builtins mean what stands in for them, during a trace


class _RangeType(type):
    """The type of what stands in for `range`: all that asks for its kind sees the class itself."""

    def __call__(cls, *bounds: Any) -> Any:
        if not any(isinstance(bound, torch.SymInt) for bound in bounds):
            return _RANGE(*bounds)
        start, stop, step = (0, *bounds, 1) if _LEN(bounds) == 1 else (*bounds, 1)[:3]
        if isinstance(step, torch.SymInt) or step <= 0:
            return _RANGE(*bounds)
        turns: list[Any] = []
        turn = start
        while turn < stop:
            if _LEN(turns) == _MOST_TURNS:
                return _RANGE(*bounds)
            turns.append(turn)
            turn = turn + step
        return _Turns(turns)

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, (_RANGE, _Turns))

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, (_RANGE, _Turns))


class _Range(metaclass=_RangeType):
    """A `range` whose bounds may be symbols: the trace then depends on the number of its turns, not on the bounds."""


class _Turns(Sequence[Any]):
    """What such a range goes through. Neither a list nor a tuple, for code looks at what it is given."""

    def __init__(self, turns: Sequence[Any]) -> None:
        self._turns = turns

    def __len__(self) -> int:
        return _LEN(self._turns)

    def __getitem__(self, index: Any) -> Any:
        found = self._turns[index]
        return _Turns(found) if isinstance(index, slice) else found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (_RANGE, _Turns)) and list(self._turns) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self._turns))


def _length(thing: Any, /) -> Any:
    """A `len` of which that of a tensor may be a symbol."""
    symbolic = isinstance(thing, FakeTensor) and thing._has_symbolic_sizes_strides and thing.dim()
    return thing.shape[0] if symbolic else _LEN(thing)


def _padded(mode: FakeTensorMode, func: Any, x: torch.Tensor, pad: Sequence[int], value: Any = 0) -> torch.Tensor:
    """The result of constant_pad_nd, as PadNd.cpp makes it."""
    sizes = list(x.shape)
    for i in range(len(pad) // 2):
        sizes[-1 - i] = sizes[-1 - i] + pad[2 * i] + pad[2 * i + 1]
    with mode:
        if all(p <= 0 for p in pad):
            for i in range(len(pad) // 2):
                x = x.narrow(-1 - i, -pad[2 * i], sizes[-1 - i])
            return x.clone()
        return torch.empty(sizes, dtype=x.dtype, device=x.device, memory_format=suggest_memory_format(x))


def _product(mode: FakeTensorMode, func: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **_: Any) -> Any:
    """The result of baddbmm, of which PyTorch's fake kernel can't expand a tensor of fixed size."""
    with mode:
        return x.new_empty((a.shape[0], a.shape[1], b.shape[2]))


_KEEP_FORMAT = (aten.upsample_bilinear2d_backward.default, aten.upsample_trilinear3d_backward.default)


def _small_again(mode: FakeTensorMode, func: Any, grad: torch.Tensor, size: Any, shape: Any, *_: Any) -> torch.Tensor:
    """The gradient of an upsampled image; of the upsampled one's memory format, or contiguous."""
    memory_format = suggest_memory_format(grad) if func in _KEEP_FORMAT else torch.contiguous_format
    with mode:
        return torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=memory_format)


_OPEN: dict[Any, Callable[..., Any]] = {
    aten.constant_pad_nd.default: _padded,
    aten.baddbmm.default: _product,
    **dict.fromkeys(_KEEP_FORMAT, _small_again),
    aten.upsample_linear1d_backward.default: _small_again,
    aten.upsample_nearest1d_backward.default: _small_again,
    aten.upsample_nearest3d_backward.default: _small_again,
    aten.upsample_bicubic2d_backward.default: _small_again,
    aten._upsample_bicubic2d_aa_backward.default: _small_again,
}
