"""Where PyTorch's C++ takes another path as soon as a dispatch mode looks on, and the path that eager takes.

Some composite ops and some formulas of backward ask `isTensorSubclassLike`, which is true of every tensor in a trace.
Mostly it decides between writing in place and not, to the same bits. Where it decides what is computed, or how a result
lies in memory, eager's way goes into the trace here; and where eager's way depends on data, the model is refused.

Those that ask are the callers of `c10::impl::dispatch_mode_enabled` in libtorch_cpu (all of 2.13.0's, by disassembly).
The ones that are not in here give the same bits: out-of-place variants (index, gather, take, trace, cummax, topk and
other selections, clamp, atan2, matrix_exp, embedding_bag, isclose, quantile, ranking losses, attention's mask), `view`
for `_reshape_alias`, max_pool1d with indices that nobody asked for, checks of values that are left out (quantile,
linalg.eig), and what runs for gradients of gradients or forward mode only. `tests/test_branches.py` compares.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memplan.errors import UnsupportedModel
from memplan.graph import private_api as private
from memplan.graph.source_lines import caller_line

aten = torch.ops.aten

Tensors = tuple[torch.Tensor | None, ...]
Formula = Callable[[Any, Tensors, Tensors], Tensors | None]  # (node, its results, what it was given) -> eager's results

_MEAN = 1  # the reduction of a loss
_PLACE = "memplan: line of forward"


_hooks: list[list[Any]] = []  # that formulas of backward have, of each trace in progress


@contextlib.contextmanager
def as_without_modes() -> Iterator[None]:
    """Let this thread run, and differentiate, what it does without dispatch modes.

    UnsupportedModel comes out of a forward or a backward pass in there where eager's way depends on data.
    """
    _hooks.append([])
    try:
        with _exchanged_ops().active():
            yield
    finally:
        for hook in _hooks.pop():  # one that knows its node keeps that alive
            hook.remove()


# -- composite ops ---------------------------------------------------------------------------------------------------


@functools.cache
def _exchanged_ops() -> private.InPlaceOf:
    return private.InPlaceOf(
        {
            "matmul": _matmul,
            "linear": _linear,
            "cross_entropy_loss": _cross_entropy,
            "linalg_eigvals": _eigvals,
            "linalg_eigvalsh": _eigvalsh,
            "linalg_svdvals": _svdvals,
            "max": functools.partial(_differentiated, aten.max.default, "Max", _evenly_distributed),
            "min": functools.partial(_differentiated, aten.min.default, "Min", _evenly_distributed),
            "median": functools.partial(_differentiated, aten.median.default, "Median", _evenly_distributed),
            "nanmedian": functools.partial(_differentiated, aten.nanmedian.default, "Nanmedian", _evenly_distributed),
            "prod": functools.partial(_differentiated, aten.prod.default, "Prod", _product),
            "prod.dim_int": functools.partial(_differentiated, aten.prod.dim_int, "Prod", _product),
            "cumprod": functools.partial(_differentiated, aten.cumprod.default, "Cumprod", _cumulative_product),
            "cumprod_": functools.partial(_differentiated, aten.cumprod_.default, "Cumprod", _cumulative_product),
            "masked_fill.Tensor": functools.partial(_masked_fill, aten.masked_fill.Tensor),
            "masked_fill_.Tensor": functools.partial(_masked_fill, aten.masked_fill_.Tensor),
            "linalg_householder_product": functools.partial(
                _differentiated,
                aten.linalg_householder_product.default,
                "LinalgHouseholderProduct",
                _in_the_layout_of("_saved_input", "_saved_tau"),
            ),
            "ormqr": functools.partial(
                _differentiated, aten.ormqr.default, "Ormqr", _in_the_layout_of("_saved_self", "_saved_input2")
            ),
            "binary_cross_entropy_with_logits": functools.partial(
                _differentiated,
                aten.binary_cross_entropy_with_logits.default,
                "BinaryCrossEntropyWithLogits",
                _bce_with_logits,
            ),
        }
    )


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of a batch and a single matrix in a batch of its own, which eager expands where it does not require grad."""
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


def _cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """The mean of a smoothed loss with weights, which eager divides by the sum of the weights that it selects.

    Weights that require grad are refused by what it runs, in eager too.
    """
    smoothed = label_smoothing > 0 and reduction == _MEAN and x.shape != target.shape
    if weight is None or not smoothed or private.is_transformed(weight):
        return aten.cross_entropy_loss.default(  # type: ignore[no-any-return]
            x, target, weight, reduction, ignore_index, label_smoothing
        )
    x, weight = _in_the_dtype_of_autocast("cross_entropy_loss", x, weight)
    with torch.autocast(x.device.type, enabled=False):
        return _smoothed_mean(x, target, weight, ignore_index, label_smoothing)


def _smoothed_mean(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, ignore_index: int, label_smoothing: float
) -> torch.Tensor:
    """Op by op what `cross_entropy_loss_label_smoothing` in LossNLL.cpp runs, on tensors of ordinary layouts."""
    class_dim = 0 if x.dim() == 1 else 1
    logs = aten.log_softmax.int(x, class_dim, x.dtype)
    loss = aten.nll_loss_nd.default(logs, target, weight, _MEAN, ignore_index)
    by_class = weight.view([-1 if i == class_dim else 1 for i in range(x.dim())])
    smooth = -(logs * by_class).sum(class_dim)
    smooth = smooth.masked_fill_(target == ignore_index, 0.0)
    mean = smooth.sum() / private.sum_of_weights(weight, target, ignore_index)
    result: torch.Tensor = (1 - label_smoothing) * loss + mean * (label_smoothing / x.shape[class_dim])
    return result


def _eigvals(a: torch.Tensor) -> torch.Tensor:
    if _differentiable(a):
        return aten.linalg_eigvals.default(a)  # type: ignore[no-any-return]
    (a,) = _in_the_dtype_of_autocast("linalg_eigvals", a)
    return aten._linalg_eigvals.default(a)  # type: ignore[no-any-return]


def _eigvalsh(a: torch.Tensor, UPLO: str = "L") -> torch.Tensor:
    if _differentiable(a):
        return aten.linalg_eigvalsh.default(a, UPLO)  # type: ignore[no-any-return]
    (a,) = _in_the_dtype_of_autocast("linalg_eigvalsh", a)
    return aten._linalg_eigh.default(a, UPLO, False)[0]  # type: ignore[no-any-return]


def _svdvals(a: torch.Tensor, *, driver: str | None = None) -> torch.Tensor:
    if _differentiable(a):
        return aten.linalg_svdvals.default(a, driver=driver)  # type: ignore[no-any-return]
    (a,) = _in_the_dtype_of_autocast("linalg_svdvals", a)
    return aten._linalg_svd.default(a, False, False, driver=driver)[1]  # type: ignore[no-any-return]


def _differentiable(tensor: torch.Tensor) -> bool:
    """Whether eager computes vectors beside the values, with another algorithm."""
    return (torch.is_grad_enabled() and tensor.requires_grad) or private.is_transformed(tensor)


def _in_the_dtype_of_autocast(op: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """An op's arguments as autocast hands them to it, where it knows it as one for float32."""
    device_type = tensors[0].device.type
    if not (torch.is_autocast_enabled(device_type) and private.autocast_knows(op, device_type)):
        return tensors
    return tuple(t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in tensors)


def _masked_fill(op: Any, x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not (torch.is_grad_enabled() and value.requires_grad):
        return op(x, mask, value)  # type: ignore[no-any-return]
    return _differentiated(op, "MaskedFill", _filled, x, mask, value)


def _differentiated(op: Any, name: str, formula: Formula, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run an op whose backward has a formula of its own in here. name: that its node in the autograd graph begins with.

    Within torch.func's transforms eager takes the way of traces.
    """
    result: torch.Tensor = op(*args, **kwargs)
    node: Any = result.grad_fn
    if node is None or private.is_transformed(result):
        return result
    if not node.name().startswith(name):
        raise UnsupportedModel(
            f"{op} writes to a view, at {caller_line()}; how gradients pass it can't be seen. Write the result to a "
            "tensor of its own"
        )
    node.metadata[_PLACE] = caller_line()
    _hooks[-1].append(node.register_hook(functools.partial(formula, node)))
    return result


# -- formulas of backward --------------------------------------------------------------------------------------------


def _evenly_distributed(node: Any, results: Tensors, given: Tensors) -> Tensors | None:
    """Of max, min and median of all elements: zeros, with the elements that are the result filled in.

    A mask times the gradient has other signs of zero, and another layout. On CUDA that is eager's way too.
    """
    (grad,) = given
    if grad is None or results[0] is None or grad.device.type != "cpu":
        return None
    x, value = node._saved_self, node._saved_result
    mask = (x == value).logical_or_(x.isnan().logical_and_(value.isnan()))
    return (grad.new_zeros(x.shape, dtype=x.dtype).masked_fill_(mask, grad / mask.sum()),)


def _in_the_layout_of(*names: str) -> Formula:
    """Results laid out as what the node saved under these names, one by one."""

    def formula(node: Any, results: Tensors, given: Tensors) -> Tensors:
        found = [None if t is None else _laid_out(t, getattr(node, name)) for t, name in zip(results, names)]
        return (*found, *results[len(names) :])

    return formula


def _laid_out(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(like)
    return tensor if made.stride() == tensor.stride() else made.copy_(tensor)


def _bce_with_logits(node: Any, results: Tensors, given: Tensors) -> Tensors | None:
    """In place, so that the dtype of the logits stays, whatever the targets' is."""
    (grad,) = given
    x, target, weight, pos_weight = (
        getattr(node, f"_saved_{name}") for name in ("self", "target", "weight", "pos_weight")
    )
    dtypes = {t.dtype for t in (x, target, weight, pos_weight, grad) if t is not None}
    if grad is None or results[0] is None or len(dtypes) == 1:
        return None
    if results[1] is not None:
        raise UnsupportedModel(
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
    if node._saved_reduction == _MEAN:
        found = found.div_(x.numel())
    return (found.to(results[0].dtype), None)


def _refused(reason: str) -> Formula:
    def formula(node: Any, results: Tensors, given: Tensors) -> None:
        raise UnsupportedModel(f"{reason}. It is run at {node.metadata.get(_PLACE, 'a line that is not known')}")

    return formula


def _product(node: Any, results: Tensors, given: Tensors) -> None:
    if node._saved_self.dim():
        _refused(_PRODUCT)(node, results, given)


def _cumulative_product(node: Any, results: Tensors, given: Tensors) -> None:
    x, dim = node._saved_self, node._saved_dim
    dim = dim if dim < x.dim() else dim - 2**64  # a negative one is shown as if it had no sign
    if x.numel() > 1 and x.shape[dim] > 1:
        _refused(_PRODUCT)(node, results, given)


def _filled(node: Any, results: Tensors, given: Tensors) -> None:
    if results[1] is not None:
        _refused(
            "the gradient of a value that masked_fill fills in is summed in an order that depends on the mask's data. "
            "Use torch.where(mask, value, x)"
        )(node, results, given)


_PRODUCT = (
    "the backward of prod and cumprod computes other things where an element is zero, which is for data to say. Put it "
    "into a module of its own or outside of the model: what is around it can be planned"
)
