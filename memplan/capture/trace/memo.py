"""Writes plain ops to a trace without asking PyTorch: views, and ops that ran before on tensors of equal layout.

A model of many layers runs few distinct ops: 170 of the 2,100 in a GPT-2 of twelve layers are distinct. PyTorch takes
half a millisecond to trace one run of an op, for proxies, fake kernels, and its own cache of their results. What the
first run gave was a node, and tensors of certain layouts in new memory or in that of arguments; that is given again
here. Most of the distinct ops are views, which run on the meta device in microseconds.

What is not that plain is traced by PyTorch each time: tensors whose data is known, results of unknown shape, views in
place, ops that are taken apart on the way. PyTorch's cache is off meanwhile.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memplan import torch_private as private
from memplan.capture.ops import op_facts
from memplan.capture.ops.layout import storage_key

_SETTINGS = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_UNFIT_TAGS = (torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True, slots=True)
class _Result:
    """One tensor that an op gives.

    - argument: the tensor among the arguments that it is (where `same`), or in whose memory it lies; None for one in
      memory of its own.
    - same: whether it is that argument itself.
    - layout: its dtype, offset, shape and strides.
    - own_bytes: size of the memory of its own; 0 where it lies in that of an argument.
    """

    argument: int | None
    same: bool
    layout: tuple[torch.dtype, int, torch.Size, tuple[int, ...]]
    device: torch.device
    own_bytes: int = 0


# What an op gives: list or tuple where there may be several results, and these. None is one that was not asked for.
_Results = tuple[type | None, tuple[_Result | None, ...]]


class _OpCall:
    """An op's arguments: the tensors among them, a key of what they look like, and what to write to the trace.

    fits: the arguments are plain enough to be known again.
    """

    def __init__(self, recording: private.Recording, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._recording = recording
        self.tensors: list[torch.Tensor] = []
        self.varies = False  # an argument depends on sizes that vary
        self.fits = True
        args_look, self.args = self._apart(args)
        self.kwargs, looks = dict[str, Any](), [args_look]
        for name, value in kwargs.items():
            look, written = self._apart(value)
            looks.append((name, look))
            if written is not None:  # an undefined tensor, which is what the argument is by default
                self.kwargs[name] = written
        self.looks = tuple(looks)

    def _apart(self, thing: Any) -> tuple[Any, Any]:
        """(key, what is written) of one argument. 1, 1.0 and True are equal, but kernels tell them apart."""
        kind = type(thing)
        if kind is private.FakeTensor:
            node = self._recording.node(thing)
            if node is None:
                self.fits = False
                return None, None
            self.tensors.append(thing)
            self.varies = self.varies or private.varies(thing)
            return _look(thing), node
        if kind is tuple or kind is list:
            parts = [self._apart(part) for part in thing]
            return (kind, *(look for look, _ in parts)), kind(written for _, written in parts)
        if kind is torch.SymInt:
            self.varies = True
            return (kind, private.key_of_size(thing)), self._recording.number(thing)
        self.fits &= kind in _SETTINGS
        return (kind, thing), thing


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All that a fake kernel sees of a tensor."""
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes())
    if private.varies(tensor):
        sizes = tuple(map(private.key_of_size, sizes))
    return (
        sizes, tensor.dtype,
        tensor.device, tensor.layout, tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.is_inference(),
    )  # fmt: skip


class Memo:
    """What ops gave, by what they were called with. It holds for as long as global switches stay as they are."""

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
        """What `trace()` gives, which runs the op and writes it to the trace. Known results are written without it."""
        if torch.is_inference_mode_enabled():
            return trace()
        try:
            call = _OpCall(recording, args, kwargs)
            if not call.fits:
                return trace()
            if func in op_facts.VIEWS and not call.varies and _is_plain(call.tensors, args[0]):
                return _viewed(recording, func, args, call)
            key = (func, torch.is_grad_enabled(), torch.get_default_dtype(), call.looks)
            met = key in self._known
        except TypeError:  # a size that depends on data can't be a key
            return trace()
        if met:
            known = self._known[key]
            return trace() if known is None else _repeated(recording, func, call, known)
        before = recording.length
        outputs = trace()
        again = _OpCall(recording, args, kwargs)
        same = again.fits and again.looks == call.looks
        self._known[key] = _results(recording, func, call, outputs, before) if same else None
        return outputs


def _is_plain(given: Sequence[torch.Tensor], first: Any) -> bool:
    """Whether the first argument is the only tensor, and its layout all that a view depends on."""
    if len(given) != 1 or given[0] is not first or first.is_inference():
        return False
    return first.layout is torch.strided and not (first.is_complex() or first.is_neg())


def _viewed(recording: private.Recording, func: Any, args: tuple[Any, ...], call: _OpCall) -> Any:
    """The results of a view, and nodes for them in the trace."""
    (tensor,) = call.tensors
    with private.without_modes():
        results = func(private.meta_within(tensor.untyped_storage(), *_layout(tensor)), *args[1:], **call.kwargs)
    node = recording.write(func, call.args, call.kwargs)
    if isinstance(results, torch.Tensor):
        return _bound(recording, node, results, tensor.device)
    outputs = [
        _bound(recording, recording.write(operator.getitem, (node, index), {}), result, tensor.device)
        for index, result in enumerate(results)
    ]
    node.meta["val"] = [n.meta["val"] for n in node.users]
    return outputs


def _bound(
    recording: private.Recording,
    node: fx.Node,
    contents: torch.Tensor,
    device: torch.device,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """A result that `node` stands for from now on: a new tensor, or `output`, which was there before."""
    node.meta["val"] = recording.fake(contents, device)  # what becomes of the result is none of its concern
    if output is None:
        output = recording.fake(contents, device)
    recording.bind(output, node)
    return output


def _repeated(recording: private.Recording, func: Any, call: _OpCall, known: _Results) -> Any:
    """Known results of an op once more, and nodes for them in the trace."""
    node, (kind, results) = recording.write(func, call.args, call.kwargs), known
    outputs, seen = list[Any](), list[Any]()
    for index, result in enumerate(results):
        place = node if kind is None else recording.write(operator.getitem, (node, index), {})
        output = None
        if result is not None:
            home = None if result.argument is None else call.tensors[result.argument]
            with private.without_modes(), recording.unwritten():
                memory = private.meta_memory(result.own_bytes) if home is None else home.untyped_storage()
                contents = private.meta_within(memory, *result.layout)
            output = _bound(recording, place, contents, result.device, home if result.same else None)
        outputs.append(output)
        seen.append(place.meta.get("val"))
    if kind is None:
        return outputs[0]
    node.meta["val"] = kind(seen)
    return kind(outputs)


def _results(recording: private.Recording, func: Any, call: _OpCall, outputs: Any, before: int) -> _Results | None:
    """What an op gave that was just traced; None if that is not plain enough. before: the number of nodes before it."""
    kind = type(outputs) if type(outputs) in (list, tuple) else None
    several = list(outputs) if kind else [outputs]
    results = tuple(None if output is None else _result(recording, output, call.tensors) for output in several)
    made = [storage_key(t) for t, result in zip(several, results, strict=True) if result and result.argument is None]
    nodes = [recording.node(output) for output in several if output is not None]
    if len(nodes) > sum(result is not None for result in results):
        return None
    if not nodes or None in nodes or len(set(made)) < len(made) or any(tag in func.tags for tag in _UNFIT_TAGS):
        return None
    node = nodes[0].args[0] if kind else nodes[0]  # type: ignore[union-attr]
    if not isinstance(node, fx.Node) or (node.target, node.args, node.kwargs) != (func, call.args, call.kwargs):
        return None
    if func.namespace != "aten":
        return None  # of a user's own op nobody knows what its results depend on
    alone = recording.written_since(before) == 1 + (len(several) if kind else 0)
    if not alone or (kind and type(node.meta["val"]) is not kind):
        return None
    return kind, results


def _result(recording: private.Recording, output: Any, given: Sequence[torch.Tensor]) -> _Result | None:
    """One result of an op in terms of the tensors that it was given; None if it is not plain enough."""
    if type(output) is not private.FakeTensor or output.layout is not torch.strided:
        return None
    if output.is_conj() or output.is_neg() or output.is_inference():
        return None
    around = [position for position, tensor in enumerate(given) if storage_key(tensor) == storage_key(output)]
    if len(around) > 1:
        return None  # in whose memory it would lie were they not in one is not known
    same = bool(around) and given[around[0]] is output
    if output.requires_grad and not same:
        return None
    if around:
        return _Result(around[0], same, _layout(output), output.device)
    with private.without_modes(), recording.unwritten():
        own = torch.empty_strided(output.shape, output.stride(), dtype=output.dtype, device="meta").untyped_storage()
        sizes = (output.storage_offset(), own.nbytes(), output.untyped_storage().nbytes())
    offset, own_bytes, held_bytes = map(private.key_of_size, sizes)
    if offset != 0 or own_bytes != held_bytes:
        return None
    return _Result(None, False, _layout(output), output.device, own.nbytes())


def _layout(tensor: torch.Tensor) -> tuple[torch.dtype, int, torch.Size, tuple[int, ...]]:
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()  # type: ignore[return-value]
