"""Where PyTorch's C++ takes another path under a dispatch mode, and the path that eager takes.

Some composite ops and some formulas of backward ask `isTensorSubclassLike`, which is true of every tensor in a trace.
Mostly it decides between writing in place and not, to the same bits. Where it decides what is computed, or how a result
lies in memory, eager's path goes into the trace here. Where eager's path depends on data, the model is refused.

Those that ask are the callers of `c10::impl::dispatch_mode_enabled` in libtorch_cpu (all of 2.13.0's, by disassembly).
Those that are not in here give the same bits:

- out-of-place variants: index, gather, take, trace, cummax, topk and other selections, clamp, atan2, matrix_exp,
  embedding_bag, isclose, quantile, ranking losses, attention's mask,
- `view` for `_reshape_alias`,
- max_pool1d with indices that were not asked for,
- checks of values that are left out: quantile, linalg.eig,
- what runs for gradients of gradients or forward mode only.

`tests/capture/test_branches.py` compares.

Planned ops run without autocast, because its casts are in the trace. Three kernels call other ops, which autocast casts
for in eager and never in a trace: they are refused under it. They were found by running every kernel of PyTorch's own
op database with autocast inside and without.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memplan import torch_private as private
from memplan.capture.ops.ways import Refusal
from memplan.capture.trace.source_lines import caller_line
from memplan.errors import UnsupportedModel

aten = torch.ops.aten

_MEAN = 1  # the reduction of a loss

Tensors = tuple[torch.Tensor | None, ...]
# (what the node saved, its results, the gradients it was given) -> eager's results, None where they are the same, or
# why a plan can't give them
Formula = Callable[[Sequence[Any], Tensors, Tensors], Tensors | str | None]


@dataclass(frozen=True, slots=True)
class _Differentiated:
    """Runs an op, and lets its backward give what eager's formula gives.

    - op: what runs.
    - node: the beginning of the name of its node in the autograd graph.
    - saved: names of what that node saves, as far as the formula needs it.
    - formula: replaces the results of the node.
    """

    op: Any
    node: str
    saved: tuple[str, ...]
    formula: Formula

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = self.op(*args, **kwargs)
        node: Any = result.grad_fn
        if node is None or private.is_transformed(result):  # within torch.func eager takes the way of traces
            return result
        if not node.name().startswith(self.node):
            raise UnsupportedModel(
                f"{self.op} writes to a view, at {caller_line()}; how gradients pass it can't be seen. Write the "
                "result to a tensor of its own"
            )
        try:
            saved = [getattr(node, f"_saved_{name}") for name in self.saved]
        except Refusal:  # forward runs without backward, and saves nothing
            return result
        # A hook that knew its node would keep it alive.
        saved = [t.detach() if name == "result" else t for name, t in zip(self.saved, saved)]
        formula, place = self.formula, caller_line()

        def hook(results: Tensors, given: Tensors) -> Tensors | None:
            found = formula(saved, results, given)
            if isinstance(found, str):
                raise UnsupportedModel(f"{found}. It is run at {place}")
            return found

        node.register_hook(hook)
        return result


def as_without_modes() -> contextlib.AbstractContextManager[None]:
    """A context in which this thread runs and differentiates ops as it would without dispatch modes.

    Raises UnsupportedModel from a forward or a backward pass where eager's path depends on data.
    """
    return _EXCHANGED_OPS.active()


def _without_autocast(op: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run a kernel that multiplies matrices by other ops. Raises where autocast has no rule for it but for those."""
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type) and not private.autocast_knows(op._schema.name[6:], device_type):
        raise UnsupportedModel(
            f"{op} multiplies matrices inside, which autocast casts in eager and can't in a planned step, at "
            f'{caller_line()}. Run it under torch.autocast("{device_type}", enabled=False)'
        )
    return op(x, *args, **kwargs)  # type: ignore[no-any-return]


def _upsampled(op: Any, x: torch.Tensor, size: Sequence[int] | None, *options: Any) -> torch.Tensor:
    """Upsample. PyTorch's C++ would turn sizes that vary into numbers, to multiply them by factors."""
    *before, factors = options
    whole = size is not None or all(factor == int(factor) for factor in factors)
    if not private.varies(x) or not whole:
        return op.vec(x, size, *options)  # type: ignore[no-any-return]
    if size is None:
        size = [n * int(factor) for n, factor in zip(x.shape[2:], factors, strict=True)]
    scales = [None] * (x.dim() - 2) if factors is None else factors
    return op.default(x, size, *before, *scales)  # type: ignore[no-any-return]


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply, and expand a batch of a single matrix as eager does where that does not require grad."""
    if a.dim() == b.dim() == 3 and a.shape[0] != b.shape[0]:
        single = a if a.shape[0] == 1 else b
        if not (single.requires_grad or private.is_transformed(single)):
            return aten.matmul.default(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)  # type: ignore[no-any-return]
    return aten.matmul.default(a, b)  # type: ignore[no-any-return]


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if bias is not None and bias.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise UnsupportedModel(
            f"a linear layer has a weight of {weight.dtype} and a bias of {bias.dtype}, at {caller_line()}: it gives "
            "another dtype in a trace than in eager. Let both have the same"
        )
    return aten.linear.default(x, weight, bias)  # type: ignore[no-any-return]


def _one_hot(x: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """One-hot rows, with eager's check of classes, which is left out of a trace."""
    if num_classes == -1 and x.numel() and not private.is_transformed(x):
        num_classes = int(x.max().item()) + 1
    if num_classes > 0 and not private.is_transformed(x):
        aten._assert_async.msg((x >= 0).all(), "Class values must be non-negative.")
        aten._assert_async.msg((x < num_classes).all(), "Class values must be smaller than num_classes.")
        return (x.unsqueeze(-1) == torch.arange(num_classes, dtype=x.dtype, device=x.device)).to(torch.int64)
    return aten.one_hot.default(x, num_classes)  # type: ignore[no-any-return]


def _cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """The loss. With weights, eager divides the mean of a smoothed loss by the sum of those weights that it selects.

    Weights that require grad are refused by the ops that this runs, as in eager.
    """
    smoothed = label_smoothing > 0 and reduction == _MEAN and x.shape != target.shape
    if weight is None or not smoothed or private.is_transformed(weight):
        return aten.cross_entropy_loss.default(  # type: ignore[no-any-return]
            x, target, weight, reduction, ignore_index, label_smoothing
        )
    x, weight = _in_the_dtype_of_autocast("cross_entropy_loss", x, weight)
    # What `cross_entropy_loss_label_smoothing` in LossNLL.cpp runs, op by op, on tensors of ordinary layouts.
    with torch.autocast(x.device.type, enabled=False):
        class_dim = 0 if x.dim() == 1 else 1
        logs = aten.log_softmax.int(x, class_dim, x.dtype)
        loss = aten.nll_loss_nd.default(logs, target, weight, _MEAN, ignore_index)
        by_class = weight.view([-1 if i == class_dim else 1 for i in range(x.dim())])
        smooth = -(logs * by_class).sum(class_dim)
        smooth = smooth.masked_fill_(target == ignore_index, 0.0)
        mean = smooth.sum() / private.sum_of_weights(weight, target, ignore_index)
        result: torch.Tensor = (1 - label_smoothing) * loss + mean * (label_smoothing / x.shape[class_dim])
        return result


def _values_alone(op: Any, alone: Callable[..., Any], a: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Eigenvalues or singular values. Where they are differentiated, eager also computes the vectors, by another op."""
    if (torch.is_grad_enabled() and a.requires_grad) or private.is_transformed(a):
        return op(a, *args, **kwargs)
    (a,) = _in_the_dtype_of_autocast(op._schema.name.removeprefix("aten::"), a)
    return alone(a, *args, **kwargs)


def _in_the_dtype_of_autocast(op: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """An op's arguments as autocast hands them over, where it has a float32 rule for the op."""
    device_type = tensors[0].device.type
    if not (torch.is_autocast_enabled(device_type) and private.autocast_knows(op, device_type)):
        return tensors
    return tuple(t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in tensors)


def _masked_fill(op: Any, x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not (torch.is_grad_enabled() and value.requires_grad):
        return op(x, mask, value)  # type: ignore[no-any-return]
    return _Differentiated(op, "MaskedFill", (), _filled)(x, mask, value)


def _evenly_distributed(saved: Sequence[Any], results: Tensors, given: Tensors) -> Tensors | None:
    """The backward of max, min and median of all elements: zeros, filled in where elements are the result.

    A mask times the gradient has other signs of zero, and another layout. On CUDA eager does that too.
    """
    x, value = saved
    (grad,) = given
    if grad is None or results[0] is None or grad.device.type != "cpu":
        return None
    mask = (x == value).logical_or_(x.isnan().logical_and_(value.isnan()))
    return (grad.new_zeros(x.shape, dtype=x.dtype).masked_fill_(mask, grad / mask.sum()),)


def _laid_out(saved: Sequence[Any], results: Tensors, given: Tensors) -> Tensors:
    """Lay gradients of Householder products out as the arguments are, and not row by row."""
    pairs = [(t, None if t is None else torch.empty_like(like)) for like, t in zip(saved, results)]
    found = [t if to is None or t is None or to.stride() == t.stride() else to.copy_(t) for t, to in pairs]
    return (*found, *results[len(saved) :])


def _bce_with_logits(saved: Sequence[Any], results: Tensors, given: Tensors) -> Tensors | str | None:
    """Compute in place, so that the logits keep their dtype for targets of any dtype."""
    x, target, weight, pos_weight, reduction = saved
    (grad,) = given
    dtypes = {t.dtype for t in (x, target, weight, pos_weight, grad) if t is not None}
    if grad is None or results[0] is None or len(dtypes) == 1:
        return None
    if results[1] is not None:
        return (
            "binary_cross_entropy_with_logits of several dtypes with targets that require grad can't be planned: let "
            "all its arguments have one dtype"
        )
    if pos_weight is None:
        found = x.sigmoid().sub_(target)
    else:
        positive = pos_weight.mul(target)
        found = positive.add(1).sub_(target).mul_(x.sigmoid()).sub_(positive)
    found = found.mul_(grad)
    if weight is not None:
        found = found.mul_(weight)
    if reduction == _MEAN:
        found = found.div_(x.numel())
    return (found.to(results[0].dtype), None)


def _product(saved: Sequence[Any], results: Tensors, given: Tensors) -> str | None:
    (x,) = saved
    return _PRODUCT if x.dim() else None


def _cumulative_product(saved: Sequence[Any], results: Tensors, given: Tensors) -> str | None:
    x, dim = saved
    dim = dim if dim < x.dim() else dim - 2**64  # a negative one is shown as if it had no sign
    return _PRODUCT if x.numel() > 1 and x.shape[dim] > 1 else None


_PRODUCT = (
    "the backward of prod and cumprod computes other things where an element is zero, which is for data to say. Put it "
    "into a module of its own or outside of the model: what is around it can be planned"
)


def _filled(saved: Sequence[Any], results: Tensors, given: Tensors) -> str | None:
    if results[1] is None:
        return None
    return (
        "the gradient of a value that masked_fill fills in is summed in an order that depends on the mask's data. Use "
        "torch.where(mask, value, x)"
    )


_WITHOUT_AUTOCAST = (aten._trilinear.default, aten.affine_grid_generator.default, aten.linalg_pinv.atol_rtol_tensor)
_UPSAMPLED = (
    aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d, aten._upsample_nearest_exact1d,
    aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d, aten.upsample_linear1d, aten.upsample_bilinear2d,
    aten.upsample_bicubic2d, aten.upsample_trilinear3d,
)  # fmt: skip
_VALUES_ALONE: dict[Any, Callable[..., Any]] = {
    aten.linalg_eigvals.default: aten._linalg_eigvals.default,
    aten.linalg_eigvalsh.default: lambda a, UPLO="L": aten._linalg_eigh.default(a, UPLO, False)[0],
    aten.linalg_svdvals.default: lambda a, driver=None: aten._linalg_svd.default(a, False, False, driver=driver)[1],
}
_DIFFERENTIATED = (
    _Differentiated(aten.max.default, "Max", ("self", "result"), _evenly_distributed),
    _Differentiated(aten.min.default, "Min", ("self", "result"), _evenly_distributed),
    _Differentiated(aten.median.default, "Median", ("self", "result"), _evenly_distributed),
    _Differentiated(aten.nanmedian.default, "Nanmedian", ("self", "result"), _evenly_distributed),
    _Differentiated(aten.prod.default, "Prod", ("self",), _product),
    _Differentiated(aten.prod.dim_int, "Prod", ("self",), _product),
    _Differentiated(aten.cumprod.default, "Cumprod", ("self", "dim"), _cumulative_product),
    _Differentiated(aten.cumprod_.default, "Cumprod", ("self", "dim"), _cumulative_product),
    _Differentiated(aten.linalg_householder_product.default, "LinalgHouseholderProduct", ("input", "tau"), _laid_out),
    _Differentiated(aten.ormqr.default, "Ormqr", ("self", "input2"), _laid_out),
    _Differentiated(
        aten.binary_cross_entropy_with_logits.default,
        "BinaryCrossEntropyWithLogits",
        ("self", "target", "weight", "pos_weight", "reduction"),
        _bce_with_logits,
    ),
)
_EXCHANGED_OPS = private.InPlaceOf(
    {
        aten.matmul.default: _matmul,
        aten.linear.default: _linear,
        aten.one_hot.default: _one_hot,
        aten.cross_entropy_loss.default: _cross_entropy,
        aten.masked_fill.Tensor: functools.partial(_masked_fill, aten.masked_fill.Tensor),
        aten.masked_fill_.Tensor: functools.partial(_masked_fill, aten.masked_fill_.Tensor),
        **{op: functools.partial(_values_alone, op, alone) for op, alone in _VALUES_ALONE.items()},
        **{op.vec: functools.partial(_upsampled, op) for op in _UPSAMPLED},
        **{op: functools.partial(_without_autocast, op) for op in _WITHOUT_AUTOCAST},
        **{one.op: one for one in _DIFFERENTIATED},
    }
)
