"""Results that real kernels give, where PyTorch's fake kernels give others.

Many are known beforehand, most of all for CPUs (`corrected_outputs`). Others show when ops are run to be timed, or in
the first run of a program. They are noted for the rest of the process (`with_noted_results`), and the step is traced
and planned once more.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import fx

from memplan import torch_private as private
from memplan.capture.ops.layout import dense_stride, iterated_layout, storage_key
from memplan.capture.ops.op_facts import argument_of
from memplan.capture.ops.ways import OtherResults, Refusal, way_of
from memplan.errors import BudgetInfeasible, Refused
from memplan.torch_private import OpOverload, pytree

aten = torch.ops.aten

# Normalisation ops whose fake kernels give the statistics the input's dtype, where the real ones keep float32 weights'
# dtype: op -> indices of weight, bias and running statistics.
_STATISTICS: dict[Any, tuple[int, ...]] = {
    aten.native_layer_norm.default: (2, 3),
    aten.native_batch_norm.default: (1, 2, 3, 4),
    aten.native_group_norm.default: (1, 2),
}


def _contiguous(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, device="meta")


def _channels_as(like: torch.Tensor, padding: Sequence[int] = ()) -> torch.Tensor:
    """Channels last where `like` has them last. padding: on both sides of dimensions, the last dimension first."""
    shape = list(like.shape)
    for i in range(len(padding) // 2):
        shape[-1 - i] += padding[2 * i] + padding[2 * i + 1]
    return torch.empty(shape, device="meta", memory_format=private.suggest_memory_format(like))


def _elementwise(*operands: Any) -> torch.Tensor:
    """The layout from a kernel that goes through its operands element by element. The first operand decides first."""
    return torch.empty_strided(*iterated_layout(operands), device="meta")


# Ops whose fake kernels lay results out in other strides than the real CPU kernels do, where arguments are not
# contiguous: op -> what lies as the real results of that shape do, made of the arguments on the meta device.
_LAYOUTS: dict[Any, Callable[..., torch.Tensor]] = {
    aten.native_layer_norm.default: lambda x, *_: _contiguous(x),
    aten.native_layer_norm_backward.default: lambda grad, x, *_: _contiguous(x),
    aten.native_batch_norm.default: lambda x, *_: _channels_as(x),
    aten.native_batch_norm_backward.default: lambda grad, x, *_: _channels_as(x),
    aten._log_softmax_backward_data.default: lambda grad, *_: _contiguous(grad),
    aten.mse_loss_backward.default: lambda grad, x, *_: _contiguous(x),
    aten.smooth_l1_loss_backward.default: lambda grad, x, *_: _contiguous(x),
    aten.huber_loss_backward.default: lambda grad, x, *_: _contiguous(x),
    aten.roll.default: lambda x, *_: _channels_as(x),
    aten.reflection_pad2d.default: _channels_as,
    aten.replication_pad2d.default: _channels_as,
    aten.reflection_pad2d_backward.default: lambda grad, x, *_: _channels_as(x),
    aten.replication_pad2d_backward.default: lambda grad, x, *_: _channels_as(x),
    aten.elu_backward.default: lambda grad, alpha, scale, input_scale, is_result, x: _elementwise(grad, x),
    aten.softplus_backward.default: lambda grad, x, *_: _elementwise(grad, x),
    aten.hardswish_backward.default: _elementwise,
    aten.hardsigmoid_backward.default: _elementwise,
    aten.gelu_backward.default: _elementwise,
    aten.silu_backward.default: _elementwise,
    aten.mish_backward.default: _elementwise,
    aten.tanh_backward.default: _elementwise,
    aten.xlogy.Tensor: _elementwise,
    aten.rrelu_with_noise.default: lambda x, *_: _contiguous(x),
    aten.rrelu_with_noise_backward.default: lambda grad, x, noise, *_: _elementwise(noise, grad),
    aten.log_sigmoid_forward.default: lambda x: _contiguous(x),
    aten.log_sigmoid_backward.default: lambda grad, *_: torch.empty_like(grad),
}

# Ops whose kernels, on any device, go through their operands element by element, where the fake ones give dimensions of
# one element, or broadcast ones, other strides: op -> which arguments are the operands, in the order of their say.
_ITERATED: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys([aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor], (0, 1)),
    **dict.fromkeys(
        [
            aten.neg.default, aten.abs.default, aten.reciprocal.default, aten.sqrt.default, aten.rsqrt.default,
            aten.exp.default, aten.log.default, aten.erf.default, aten.sin.default, aten.cos.default,
            aten.relu.default, aten.sigmoid.default, aten.tanh.default, aten.silu.default, aten.gelu.default,
            aten.hardswish.default, aten.hardsigmoid.default, aten.leaky_relu.default,
        ],
        (0,),
    ),
    aten.sigmoid_backward.default: (0, 1),
    aten.threshold_backward.default: (1, 0),
    aten.leaky_relu_backward.default: (1, 0),
}  # fmt: skip

# Ops whose real CPU kernels shrink a result that they made larger, and keep its memory: op -> number of elements that
# the memory holds, from the arguments. Fake kernels make the small result.
_ELEMENTS: dict[Any, Callable[..., int]] = {
    aten.mse_loss.default: lambda x, y, *_: math.prod(torch.broadcast_shapes(x.shape, y.shape)),
    aten.smooth_l1_loss.default: lambda x, y, *_: math.prod(torch.broadcast_shapes(x.shape, y.shape)),
    aten.binary_cross_entropy.default: lambda x, *_: x.numel(),
    aten.soft_margin_loss.default: lambda x, *_: x.numel(),
    aten.col2im.default: lambda x, *_: x.numel(),
}

# Ops whose real CUDA kernels give small results on the host, from where backward reads them: op -> which results.
_ON_HOST: dict[Any, tuple[int, ...]] = {aten._scaled_dot_product_efficient_attention.default: (2, 3)}


def corrected_outputs(func: Any, args: tuple[Any, ...], outputs: Any) -> Any:
    """The outputs of a fake op, with the dtypes, strides, bytes and devices that the real kernel gives them.

    - On any device: strides of the ops in `_ITERATED`. A gradient of batch norm's input that was not asked for is None.
    - On a CPU: strides of the ops in `_LAYOUTS`, and bytes of those in `_ELEMENTS`. Over a low-precision input with
      float32 parameters, dtypes of the statistics of batch, layer and group norm, and of the gradient of group norm's
      input. An embedding bag in bfloat16 that sums as in float32 leaves out which bag each index is of.
    - On CUDA, which fake kernels are made for: devices of the ops in `_ON_HOST`, and the size of the memory that
      cuDNN's batch norm saves for its backward. cuDNN's attention leaves out what only its backward reads, if there is
      none.
    """
    if not args or not isinstance(args[0], torch.Tensor) or args[0].device.type not in ("cpu", "cuda"):
        return outputs
    if func is aten.native_batch_norm_backward.default and not args[9][0] and outputs[0] is not None:
        private.leave_out(outputs[0])
        outputs = (None, *outputs[1:])
    if func in _ITERATED:
        return _with_stride(outputs, iterated_layout([args[i] for i in _ITERATED[func]])[1])
    if args[0].device.type == "cuda":
        host = _ON_HOST.get(func, ())
        if host:
            return tuple(private.with_layout(t, device="cpu") if i in host else t for i, t in enumerate(outputs))
        if func is aten.cudnn_batch_norm.default and args[5]:
            elements = private.batch_norm_reserve_elements(args[0])
            return (*outputs[:3], private.with_layout(outputs[3], size=(elements,), stride=(1,)))
        if func is aten._scaled_dot_product_cudnn_attention.default and not args[4] and outputs[1] is not None:
            private.leave_out(outputs[1])
            return (outputs[0], None, *outputs[2:])
        return outputs
    if func in _ELEMENTS:
        elements = _ELEMENTS[func](*args)
        return private.with_layout(outputs, elements=elements) if elements > outputs.numel() else outputs
    if func is aten._embedding_bag.default:
        weight = args[0]
        names = ("mode", "per_sample_weights", "padding_idx")
        mode, scale, padding = (argument_of(func, name, args, {}) for name in names)
        in_rows = weight.dtype is torch.bfloat16 and weight.stride(1) == 1 and (scale is None or scale.stride(0) == 1)
        # It sums bfloat16 by the kernel of which the fake one thinks that float32 alone has it.
        if in_rows and mode == 0 and padding < 0:
            return (outputs[0], private.with_layout(outputs[1], size=(0,), stride=(1,)), *outputs[2:])
    return _with_strides(func, args, _with_dtypes(func, args, outputs))


def _with_dtypes(func: Any, args: tuple[Any, ...], outputs: Any) -> Any:
    if func is aten.native_group_norm_backward.default:
        first = outputs[0]
        wrong = first is not None and first.dtype != args[1].dtype
        return (private.with_layout(first, dtype=args[1].dtype), *outputs[1:]) if wrong else outputs
    parameters = _STATISTICS.get(func)
    if parameters is None:
        return outputs
    dtypes = {args[i].dtype for i in parameters if i < len(args) and isinstance(args[i], torch.Tensor)}
    if dtypes != {torch.float32} or args[0].dtype == torch.float32:
        return outputs
    return (outputs[0], *(private.with_layout(t, dtype=torch.float32) for t in outputs[1:]))


def _with_strides(func: Any, args: tuple[Any, ...], outputs: Any) -> Any:
    rule = _LAYOUTS.get(func)
    if rule is None or all(a.stride() == dense_stride(a.shape) for a in args if isinstance(a, torch.Tensor)):
        return outputs
    # All are in float32, because fake arithmetic in lower precisions gets layouts wrong too.
    meta = functools.partial(torch.empty_strided, device="meta")
    with private.without_modes():
        layout = rule(*(meta(a.shape, a.stride()) if isinstance(a, torch.Tensor) else a for a in args))

    def fixed(result: Any) -> Any:
        return _with_stride(result, layout.stride()) if result is not None and result.shape == layout.shape else result

    return tuple(map(fixed, outputs)) if isinstance(outputs, (list, tuple)) else fixed(outputs)


def _with_stride(result: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    return result if result.stride() == stride else private.with_layout(result, stride=stride)


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
