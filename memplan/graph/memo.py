"""Ops that were traced before on tensors that looked the same: written down once more without asking PyTorch.

A model of many layers runs few distinct ops, 170 of the 2,100 in a GPT-2 of twelve, and PyTorch takes half a
millisecond to trace a run of one: proxies, fake kernels, its own cache of what those give. What the first run gave, a
node and tensors of certain layouts in new memory or in that of arguments, is given here again. What is not that plain
goes the long way each time: tensors whose data is known, results of unknown shape, views in place, ops that are taken
apart on the way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memplan.graph import private_api as private
from memplan.graph.layout import storage_key

_SETTINGS = frozenset(
    (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_UNFIT_TAGS = (torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class _Unfit(Exception):
    """An op that is not plain enough."""


@dataclass(frozen=True, slots=True)
class _Result:
    """One tensor that an op gives.

    argument: which of the tensors that the op is given this one is (where `same`), or in whose memory it lies; None for
    one that fills memory of its own.
    """

    argument: int | None
    same: bool
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    def in_memory(self, given: Sequence[torch.Tensor]) -> torch.Tensor:
        """Such a tensor on the meta device."""
        if self.argument is None:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        storage = given[self.argument].untyped_storage()
        return torch.empty(0, dtype=self.dtype, device="meta").set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class _Results:
    """What an op gives. kind: list or tuple where there may be several; None among them was not asked for."""

    kind: type | None
    results: tuple[_Result | None, ...]


class _Call:
    """An op's arguments: the tensors among them, what all look like, and how they are written to the trace."""

    def __init__(self, recording: private.Recording, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises _Unfit."""
        self._recording = recording
        self.tensors: list[torch.Tensor] = []
        args_look, self.args = self._apart(args)
        self.kwargs, looks = {}, [args_look]
        for name, value in kwargs.items():
            look, self.kwargs[name] = self._apart(value)
            looks.append((name, look))
        self.looks = tuple(looks)

    def _apart(self, thing: Any) -> tuple[Any, Any]:
        """(look, what is written) of one argument. 1, 1.0 and True are equal, and not the same to a kernel."""
        kind = type(thing)
        if kind is private.FakeTensor:
            node = self._recording.node(thing)
            if node is None:
                raise _Unfit
            self.tensors.append(thing)
            return _look(thing), node
        if kind is tuple or kind is list:
            parts = [self._apart(part) for part in thing]
            return (kind, *(look for look, _ in parts)), kind(written for _, written in parts)
        if kind not in _SETTINGS:
            raise _Unfit
        return (kind, thing), thing


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All that a fake kernel sees of a tensor."""
    return (
        tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes(), tensor.dtype,
        tensor.device, tensor.layout, tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.is_inference(),
    )  # fmt: skip


class Memo:
    """What ops gave, by what they were called with. Good for as long as global switches stay as they are."""

    def __init__(self) -> None:
        self._known: dict[Any, _Results | None] = {}

    def run(
        self,
        recording: private.Recording,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        trace: Callable[[], Any],
    ) -> Any:
        """What `trace()` gives, which runs the op and writes it to the trace, to the same effect."""
        try:
            call = _Call(recording, args, kwargs)
            key = (func, torch.is_grad_enabled(), torch.get_default_dtype(), call.looks)
            met = key in self._known
        except (_Unfit, TypeError):  # a size that depends on data can't be a key
            return trace()
        if met:
            known = self._known[key]
            return trace() if known is None else _repeated(recording, func, call, known)
        before = recording.length
        outputs = trace()
        try:
            if _Call(recording, args, kwargs).looks != call.looks:
                raise _Unfit
            self._known[key] = _results(recording, func, call.tensors, outputs, before)
        except _Unfit:
            self._known[key] = None
        return outputs


def _repeated(recording: private.Recording, func: Any, call: _Call, known: _Results) -> Any:
    """The results of an op once more, and nodes for them in the trace."""
    node = recording.write(func, call.args, call.kwargs)
    outputs, seen = list[Any](), list[Any]()
    for index, result in enumerate(known.results):
        place = node if known.kind is None else recording.write(operator.getitem, (node, index), {})
        if result is None:
            outputs.append(None)
            seen.append(None)
            continue
        with recording.without_modes():
            memory = result.in_memory(call.tensors)
        same = result.argument is not None and result.same
        output = call.tensors[result.argument] if same else recording.fake(memory, result.device)  # type: ignore[index]
        place.meta["val"] = recording.fake(memory, result.device)  # what happens to the output later is none of its
        recording.bind(output, place)
        outputs.append(output)
        seen.append(place.meta["val"])
    if known.kind is None:
        return outputs[0]
    node.meta["val"] = known.kind(seen)
    return known.kind(outputs)


def _results(
    recording: private.Recording, func: Any, given: Sequence[torch.Tensor], outputs: Any, before: int
) -> _Results:
    """What an op gave that was traced just now, where there were `before` nodes. Raises _Unfit."""
    kind = type(outputs) if type(outputs) in (list, tuple) else None
    several = list(outputs) if kind else [outputs]
    results = tuple(None if output is None else _result(recording, output, given) for output in several)
    made = [storage_key(t) for t, result in zip(several, results, strict=True) if result and result.argument is None]
    nodes = [recording.node(output) for output in several if output is not None]
    if not nodes or None in nodes or len(set(made)) < len(made) or any(tag in func.tags for tag in _UNFIT_TAGS):
        raise _Unfit
    node = nodes[0].args[0] if kind else nodes[0]  # type: ignore[union-attr]
    added = recording.length - before
    if not isinstance(node, fx.Node) or node.target is not func or added != 1 + (len(several) if kind else 0):
        raise _Unfit
    if kind and type(node.meta["val"]) is not kind:
        raise _Unfit
    return _Results(kind, results)


def _result(recording: private.Recording, output: Any, given: Sequence[torch.Tensor]) -> _Result:
    """One result of an op in terms of the tensors that it was given. Raises _Unfit."""
    if type(output) is not private.FakeTensor or output.layout is not torch.strided:
        raise _Unfit
    if output.requires_grad or output.is_conj() or output.is_neg() or output.is_inference():
        raise _Unfit
    layout = (output.shape, output.stride(), output.storage_offset(), output.dtype, output.device)
    storage = storage_key(output)
    same = [position for position, tensor in enumerate(given) if tensor is output]
    around = [position for position, tensor in enumerate(given) if storage_key(tensor) == storage]
    if len(around) > 1:
        raise _Unfit  # in whose memory it would lie were they not in one is not known
    if around:
        return _Result(around[0], bool(same), *layout)
    result = _Result(None, False, *layout)
    with recording.without_modes():
        own_bytes = result.in_memory(given).untyped_storage().nbytes()
    if output.storage_offset() or own_bytes != output.untyped_storage().nbytes():
        raise _Unfit
    return result
