"""Kinds of tensors: subclasses, sharded and fake ones. Fake kernels that differ from the real ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import _meta_registrations
from torch._ops import OpOverload as OpOverload
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import _foreach_supported_types as _STEPPED_AT_ONCE
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from memplan.torch_private.exchanged import exchanged

pytree = _pytree
nn_functions = torch._C._nn  # compiled functions of torch.nn.functional


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of torch.func's own (vmap, grad), for which ops take other paths in eager too."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_allocated(tensor: torch.Tensor) -> bool:
    """Whether an allocator gave a tensor its storage. That of the zeros of forward mode is nowhere, as on "meta"."""
    strided = tensor.layout is torch.strided and not is_transformed(tensor)
    return strided and not (tensor.is_meta or tensor._is_zerotensor())


_ORDINARY = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
_ORDINARY_OR_NONE = {*_ORDINARY, type(None)}
_ORDINARY_FUNCTIONS = (torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of no subclass but PyTorch's own for parameters and buffers."""
    return type(tensor) in _ORDINARY


def are_ordinary(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether all of these are ordinary tensors, or None."""
    return _ORDINARY_OR_NONE.issuperset(map(type, tensors))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A detached tensor in the same memory. It is of no subclass, except of those that ops see (fake tensors)."""
    with torch._C.DisableTorchFunctionSubclass():
        detached = tensor.detach()
        if type(detached).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
            return detached
        return detached.as_subclass(torch.Tensor)


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A quick check that tensors have the classes, dtypes, devices, sizes, strides and `requires_grad` of these.

    They must be strided. Under another autocast it also says no to what is alike, and always where this PyTorch has no
    such check.
    """
    guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    if guards is None:
        return lambda *now: False
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore[no-any-return]


def changes_ops(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class may change what ops on it do."""
    kind: Any = type(tensor)
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    return function not in _ORDINARY_FUNCTIONS or kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def is_held_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether other tensors than this one hold its memory. Autograd copies such a gradient for `.grad`."""
    users, alone = (torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in (tensor, torch.empty(0)))
    return bool(users > alone)


def is_same_generator(one: torch.Generator, other: torch.Generator) -> bool:
    """Whether both stand for one generator. An op that runs in several dispatch modes is handed a new stand-in."""
    return bool(one._cdata == other._cdata)  # type: ignore[attr-defined]


def known_storage(tensor: torch.Tensor) -> StorageWeakRef:
    """A weak reference to a tensor's storage. While it exists, its `cdata` is the `_cdata` of no other storage.

    A storage whose memory is freed and allocated again (`fully_shard`, between forward and backward) is still the same.
    """
    return StorageWeakRef(tensor.untyped_storage())


_OF_EVERY_FAKE = frozenset(vars(FakeTensorMode().from_tensor(torch.empty(0))))


def attributes_set_on(tensor: torch.Tensor) -> list[str]:
    """Names of attributes that Python code has set on a tensor, real or fake. Of other subclasses that is not known.

    Dynamo notes in some of its own which sizes of a tensor vary. These are not among them.
    """
    known = isinstance(tensor, FakeTensor) or is_ordinary(tensor)
    names = sorted(vars(tensor).keys() - _OF_EVERY_FAKE) if known else []
    return [name for name in names if not name.startswith("_dynamo_")]


def _grouped_products_of_any_dtype() -> contextlib.AbstractContextManager[None]:
    """Let the fake kernel of grouped matrix products (experts) take what the real one takes.

    PyTorch's fake kernel refuses all dtypes but bfloat16, and pads rows to 16 bytes only in builds with CUDA. The real
    kernel always does.
    """
    original = getattr(_meta_registrations, "_meta_grouped_mm_common", None)

    def fake(mat_a: torch.Tensor, mat_b: torch.Tensor, **options: Any) -> Any:
        if options["scale_a"] is not None:
            return original(mat_a, mat_b, **options)  # type: ignore[misc]
        dtype, offsets = options["out_dtype"] or mat_a.dtype, options["offs"]
        rows, columns = mat_a.shape[-2], mat_b.shape[-1]
        padded = -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize
        if mat_a.dim() != mat_b.dim():
            return mat_a.new_empty_strided((rows, columns), (padded, 1), dtype=dtype)
        # Groups are slices of rows, or of the dimension that is summed over.
        groups = mat_a.shape[0] if mat_a.dim() == 3 or offsets is None else offsets.shape[0]
        return mat_a.new_empty_strided((groups, rows, columns), (rows * padded, padded, 1), dtype=dtype)

    return exchanged(_meta_registrations, **({} if original is None else {"_meta_grouped_mm_common": fake}))


_OPS = torch.library.Library("memplan", "DEF")
_OPS.define("sum_of_weights(Tensor weight, Tensor target, int ignore_index) -> Tensor")

# The sum of the weights of all targets that are not ignored. It is one op in a trace, because what it holds in between
# has a shape that depends on data.
sum_of_weights = torch.ops.memplan.sum_of_weights.default


def _sum_of_weights(weight: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """The sum, with as much scratch as where no target is ignored."""
    indices, weights = target.new_empty(target.numel()), weight.new_empty(target.numel())
    chosen = torch.masked_select(target, target != ignore_index, out=indices[:0])
    return torch.gather(weight, 0, chosen, out=weights[:0]).sum()


_OPS.define(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int longest, "
    "int blank=0, bool zero_infinity=False) -> (Tensor, Tensor)"
)

# What `aten._ctc_loss` gives: a loss per sequence, and what its backward reads. PyTorch's op has no fake kernel:
# the shape of the latter depends on the longest target. longest: its length.
ctc_loss = torch.ops.memplan.ctc_loss.default


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, given: torch.Tensor, wanted: torch.Tensor, _: int, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.aten._ctc_loss.Tensor(log_probs, targets, given, wanted, *rest)  # type: ignore[no-any-return]


def _ctc_shapes(
    log_probs: torch.Tensor, targets: torch.Tensor, given: torch.Tensor, wanted: torch.Tensor, longest: int, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    steps, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1)


for _key in ("CPU", "CUDA"):
    _OPS.impl("sum_of_weights", _sum_of_weights, _key)
    _OPS.impl("ctc_loss", _ctc_loss, _key)

_OPS.impl("sum_of_weights", lambda weight, target, ignore_index: weight.new_empty(()), "Meta")
_OPS.impl("ctc_loss", _ctc_shapes, "Meta")


def batch_norm_reserve_elements(x: torch.Tensor) -> int:
    """Bytes that cuDNN's batch norm saves for its backward."""
    with _disable_current_modes():
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return torch._C._get_cudnn_batch_norm_reserve_space_size(like, True)  # type: ignore[attr-defined, no-any-return]


def has_symbolic_shape(outputs: Any) -> bool:
    """Whether the size of a fake result depends on data, and not only on sizes."""
    tensors = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return any(depends_on_data(size) for t in tensors if isinstance(t, torch.Tensor) for size in t.shape)


def depends_on_data(size: Any) -> bool:
    """Whether a size of a fake result depends on data."""
    return isinstance(size, torch.SymInt) and not size.node.has_hint()


def has_shape_of_data(op: Any) -> bool:
    """Whether the shapes of an op's results may depend on the data that it is given."""
    return op is ctc_loss or torch.Tag.dynamic_output_shape in getattr(op, "tags", ())


@contextlib.contextmanager
def stepped_as_real(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """A context in which optimizers step fake parameters as they would step these real ones.

    On a GPU they step all at once, which takes copies of them. They do so by default only with tensors of types that
    they know.
    """
    added = FakeTensor not in _STEPPED_AT_ONCE and all(type(p) in _STEPPED_AT_ONCE for p in parameters)
    if added:
        _STEPPED_AT_ONCE.append(FakeTensor)
    try:
        yield
    finally:
        if added:
            _STEPPED_AT_ONCE.remove(FakeTensor)
