"""Results that real kernels were found to give, where PyTorch's fake kernels give others.

`real_outputs` knows many of them beforehand, most of all for CPUs. Others show when ops are run to be timed, or in the
first run of a program. They are noted for the rest of the process, and the step is traced and planned once more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import fx

from memplan import torch_private as private
from memplan.capture.ops.layout import storage_key
from memplan.capture.ops.ways import OtherResults, Refusal, way_of
from memplan.errors import BudgetInfeasible, Refused
from memplan.torch_private import OpOverload, pytree

_P = ParamSpec("_P")
_T = TypeVar("_T")


class ResultFacts(NamedTuple):
    """All of a result that a plan depends on. storage: equal for results of one op that share memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    size_bytes: int
    storage: int
    device_type: str


Facts = tuple[ResultFacts | None, ...]  # None for what is no tensor

_NOTED: dict[str, Facts] = {}  # by signature of the call
_UNSTEADY: set[str] = set()  # keys of ops that gave other bits in a second run


def facts_of(result: Any) -> Facts:
    """Facts of each result of an op, fake or real."""
    results: Sequence[Any] = result if isinstance(result, (list, tuple)) else [result]
    storages = [storage_key(t) if isinstance(t, torch.Tensor) else None for t in results]
    return tuple(
        ResultFacts(
            t.dtype, tuple(t.shape), tuple(t.stride()), t.untyped_storage().nbytes(), storages.index(key), t.device.type
        )
        if isinstance(t, torch.Tensor)
        else None
        for t, key in zip(results, storages, strict=True)
    )


def note_results(found: Mapping[str, Facts], unsteady: Collection[str] = ()) -> None:
    """Let traces have these results from now on, by signature of the call.

    unsteady: keys of ops that gave other bits in a second run, and run once from now on.
    """
    _NOTED.update(found)
    _UNSTEADY.update(unsteady)


def is_unsteady(key: str) -> bool:
    """Whether an op with this key was found to give other bits in a second run."""
    return key in _UNSTEADY


def op_kind(target: Any) -> str:
    """The name of an aten overload ("aten.mm.default"), or of one of memplan's own functions."""
    return str(target) if isinstance(target, OpOverload) else f"memplan.{target.__name__}"


def signature(target: Any, args: Any, kwargs: Any, results: Any = None) -> str:
    """A short hash, equal for calls of one kernel with equal shapes, strides, dtypes, devices and settings.

    results: the traced ones, which may have been found to be others since, or to lie in larger memory.
    """

    def shown(argument: Any) -> Any:
        t = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
        if isinstance(t, torch.Tensor):
            return f"{t.dtype}{tuple(t.shape)}{tuple(t.stride())}{t.device.type}"
        if isinstance(argument, fx.Node):
            return argument.name
        if isinstance(argument, torch.device):  # ranks with equal steps have devices of other numbers
            return argument.type
        if isinstance(argument, (list, tuple)):
            return [shown(a) for a in argument]
        return repr(argument)

    text = f"{op_kind(target)}|{[shown(a) for a in args]}|{sorted((k, str(shown(v))) for k, v in kwargs.items())}"
    if results is not None:
        given = [n.meta.get("val") if isinstance(n, fx.Node) else n for n in pytree.tree_leaves((args, kwargs))]
        own = {storage_key(t) for t in pytree.tree_leaves(given) if _has_memory(t)}
        new = [t for t in pytree.tree_leaves(results) if _has_memory(t) and storage_key(t) not in own]
        text += f"|{shown(results)}|{[str(t.untyped_storage().nbytes()) for t in new]}"
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _has_memory(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor) and thing.layout is torch.strided and thing.device.type != "meta"


def call_of(node: fx.Node) -> str:
    """The signature of the call that a node of a trace is."""
    return _call(node.target, node.args, node.kwargs)


def _call(target: Any, args: Any, kwargs: Mapping[str, Any]) -> str:
    """The signature of a call, however it is spelt: with or without defaults, by position or by name."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return signature(target, args, kwargs)
    given = {**dict(zip((a.name for a in schema.arguments), args)), **kwargs}
    return signature(target, [given.get(a.name, a.default_value) for a in schema.arguments], {})


def can_be_noted(traced: Facts, real: Facts) -> bool:
    """Whether a trace could have the real results: they have the traced shapes, each in memory of its own, or are None.

    A result that is None in the trace is not read. If the real kernel gives one, it is freed at once, as scratch is.
    """
    return len(traced) == len(real) and all(
        a is None or b is None or (a.shape == b.shape and a.storage == b.storage == place)
        for place, (a, b) in enumerate(zip(traced, real, strict=True))
    )


def with_noted_results(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> Any:
    """The outputs of a fake op, as the real kernel was found to give them."""
    noted = _NOTED.get(_call(func, args, kwargs)) if _NOTED else None
    if noted is None:
        return outputs
    several = isinstance(outputs, (list, tuple))
    found = [_as_noted(t, facts) for t, facts in zip(outputs if several else [outputs], noted, strict=True)]
    return type(outputs)(found) if several else found[0]


def _as_noted(tensor: Any, facts: ResultFacts | None) -> Any:
    if not isinstance(tensor, torch.Tensor) or (facts and facts_of(tensor)[0] == facts._replace(storage=0)):
        return tensor  # None, or a number
    if facts is None:
        private.leave_out(tensor)
        return None
    elements = facts.size_bytes // facts.dtype.itemsize
    device = facts.device_type if facts.device_type != tensor.device.type else None
    return private.with_layout(tensor, dtype=facts.dtype, stride=facts.stride, elements=elements, device=device)


def or_refusal(plan: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | Refused:
    """What a function that traces and plans returns, or what is raised while ops are timed in it.

    These are BudgetInfeasible for an op without room, and a Refusal with `OtherResults`.
    """
    try:
        return plan(*args, **kwargs)
    except (BudgetInfeasible, Refusal) as error:
        if isinstance(error, Refusal) and not isinstance(error.way, OtherResults):
            raise
        return error.with_traceback(None)  # or its frames would keep the capture


def once_more_where_results_differ(plan: Callable[_P, _T]) -> Callable[_P, _T | Refused]:
    """Wrap a function that traces and plans, to do so again as long as it finds other results of ops on the way.

    It returns what `or_refusal` does: a Refusal with `OtherResults` if it finds nothing new.
    """

    @wraps(plan)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T | Refused:
        noted = OtherResults()
        while True:
            found = or_refusal(plan, *args, **kwargs)
            way = way_of(found)
            if not isinstance(way, OtherResults) or way == noted:
                return found
            noted = way
            note_results(noted.found, noted.unsteady)

    return call
