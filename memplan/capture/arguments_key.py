"""The part of a key that is about the call: shapes, dtypes, which tensors are one, values that are no tensors."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memplan.capture.attributes.tables import is_plain
from memplan.capture.guards import OtherRead
from memplan.capture.ops.layout import storage_key, strided_parts
from memplan.capture.ops.sizes import DataSize, Numbers, Sizes, Varying, varying_between
from memplan.capture.trace.call import Call


def _stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor; empty where it is sparse."""
    return tensor.stride() if tensor.layout is torch.strided else ()


def _lazy(tensor: torch.Tensor) -> tuple[bool, bool]:
    return tensor.is_conj(), tensor.is_neg()


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor. Of a nested one, sizes that differ by row are -1, and its rows count in powers of two."""
    if not tensor.is_nested:
        return tensor.shape
    rows = tensor.values().shape[0] if tensor.layout is torch.jagged else tensor.numel()
    sizes = (tensor.size(i) if tensor.layout is torch.jagged else -1 for i in range(tensor.dim()))
    return (*(n if isinstance(n, int) else -1 for n in sizes), 1 << (rows - 1).bit_length())


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    layout: torch.layout
    sharded: bool = False  # of no certain shape
    lazy: tuple[bool, bool] = (False, False)  # its memory is read as its conjugate, as its negative

    @staticmethod
    def of(tensor: torch.Tensor, sharded: bool = False) -> _Tensor:
        return _Tensor(
            _shape(tensor), _stride(tensor), tensor.dtype, tensor.device, tensor.requires_grad, tensor.layout, sharded,
            _lazy(tensor),
        )  # fmt: skip

    def __str__(self) -> str:
        conjugate, negative = self.lazy
        more = ", requires grad" * self.requires_grad + ", conjugate" * conjugate + ", negative" * negative
        return f"{self.dtype} {tuple(self.shape)} with strides {self.stride} on {self.device}{more}"


class ArgumentsKey:
    """The arguments of a call, except the data in its tensors, to be compared with those of later calls."""

    def __init__(self, call: Call, device_type: str | None, traced: bool = True) -> None:
        """Note the arguments of a call.

        device_type: where all tensors of later calls will be; None: each where it is in this call. traced: the call was
        traced, so values of objects among its arguments matter too.
        """
        self._call = call.without_tensors()
        self._traced = traced
        self._others = tuple(
            leaf if isinstance(leaf, torch.Tensor) or traced or is_plain(leaf) else type(leaf)
            for leaf in self._call.leaves
        )
        if not traced:
            self._call = dataclasses.replace(self._call, arguments={}, variadic=(), leaves=())
        self._device_type = device_type
        self._tensors = tuple(_Tensor.of(t) for t in call.tensors)
        self._aliases = _aliases(call.tensors)
        self._sizes: Sizes | None = None

    def generalise(self, sizes: Sizes, numbers: Callable[[Call], Numbers | OtherRead]) -> None:
        """Let other calls pass whose sizes keep the conditions of the step. numbers: gives the sizes of a call."""
        self._sizes, self._numbers = sizes, numbers

    def varying(self, call: Call) -> Varying:
        """The sizes in which a call differs from this one; empty where it differs in something else, or in nothing."""
        if self.unlike(call) is not None:
            return frozenset()
        sources = () if self._sizes is None else self._sizes.sources
        known = {s.varies if isinstance(s, DataSize) else s for s in sources}
        shapes = [expected.shape for expected in self._tensors]
        return varying_between(shapes, [t.shape for t in call.tensors]) | {d for d in known if not d.is_stride}

    def unlike(self, call: Call) -> str | None:
        """What differs but for sizes, in words; None where nothing does."""
        if call.spec != self._call.spec or call.paths != self._call.paths:
            given, planned = (", ".join(one.paths) or "none" for one in (call, self._call))
            return f"arguments are {given}, planned for {planned}"
        for path, now, then in zip(call.paths, call.leaves, self._others, strict=True):
            if not self._traced and type(now) is then:
                continue
            if isinstance(now, torch.Tensor) != isinstance(then, torch.Tensor):
                return f"argument {path} is a {type(now).__name__}, planned for a {type(then).__name__}"
            if not isinstance(now, torch.Tensor) and not _same(now, then):
                return f"argument {path} is {now!r}, planned for {then!r}"
        for name, tensor, expected in zip(call.names, call.tensors, self._tensors, strict=True):
            alike = (
                len(_shape(tensor)) == len(expected.shape)
                and tensor.dtype == expected.dtype
                and tensor.device.type == (self._device_type or expected.device.type)
                and tensor.requires_grad == expected.requires_grad
                and tensor.layout is expected.layout
                and _lazy(tensor) == expected.lazy
            )
            if not alike:
                return f"argument {name} is {_Tensor.of(tensor)}, planned for {expected}"
        return None

    def mismatch(self, call: Call) -> str | None:
        """What differs, in words; None where nothing does."""
        unlike = self.unlike(call)
        if unlike is not None:
            return unlike
        tensors = call.tensors
        layouts: Sequence[tuple[Sequence[int], Sequence[int]]] = [(t.shape, t.stride) for t in self._tensors]
        if self._sizes is not None:
            numbers = self._numbers(call)
            if isinstance(numbers, OtherRead):
                return numbers.why
            broken = self._sizes.mismatch(numbers)
            if broken is not None:
                return broken
            layouts = self._sizes.layouts(numbers)
        for name, tensor, expected, (shape, stride) in zip(call.names, tensors, self._tensors, layouts, strict=True):
            if _shape(tensor) != shape or _stride(tensor) != stride:
                return f"argument {name} is {_Tensor.of(tensor)}, planned for {expected}"
        if _aliases(tensors) != self._aliases:
            return "other arguments share memory than in the sample"
        return None

    def differ_in_passing(self, call: Call) -> bool:
        """Whether the call has the same tensors and values, by other names or positions."""
        if call.spec == self._call.spec and call.paths == self._call.paths:
            return False
        theirs = [leaf for leaf in self._others if not isinstance(leaf, torch.Tensor)]
        mine = [leaf for _, leaf in call.others]
        tensors = Counter(map(_Tensor.of, call.tensors)), Counter(self._tensors)
        return tensors[0] == tensors[1] and sorted(map(repr, mine)) == sorted(map(repr, theirs))


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    try:
        return a is b or (repr(a) == repr(b) if type(a) is float else bool(a == b))  # 0.0 is equal to -0.0
    except Exception:  # an argument of a type that can't be compared is not the same
        return False


def _aliases(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, int, int], ...]:
    """For each tensor the first that is this one, the first that shares its storage, and its offset from that one.

    Where they all lie in a larger storage does not matter: batches may be slices of one tensor.
    """
    first: dict[int, int] = {}
    same: dict[int, int] = {}
    ones = [same.setdefault(id(t), i) for i, t in enumerate(tensors)]
    tensors = [strided_parts(t)[-1] for t in tensors]
    groups = [first.setdefault(storage_key(t), i) for i, t in enumerate(tensors)]
    offsets = [int(t.storage_offset() - tensors[i].storage_offset()) for i, t in zip(groups, tensors)]
    return tuple(zip(ones, groups, offsets, strict=True))
