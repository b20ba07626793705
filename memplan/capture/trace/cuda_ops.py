"""The ops that a CUDA device would run in a trace on the CPU's fakes: attention and dropout.

They are traced by name, with their backward; nothing runs, so they need no kernel on the CPU. Which attention it is
say the functions `can_use_*` of sdp_utils.cpp, in PyTorch's builds with CUDA 13. `tests/cuda_twin` compares with
PyTorch's own choice.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from memplan import torch_private as private
from memplan.errors import UnsupportedModel

aten = torch.ops.aten

Capability = tuple[int, int]  # compute capability of a CUDA device, as (9, 0) of an H100
AttentionKernel = Literal["cudnn", "flash", "efficient", "math"]

_HALF = (torch.float16, torch.bfloat16)
_SINCE_2_14 = torch.__version__ >= "2.14"
_CAPABILITY: ContextVar[Capability] = ContextVar("_CAPABILITY")


@contextlib.contextmanager
def as_on_cuda(capability: Capability | None) -> Iterator[None]:
    """A context in which this thread traces the attention and the dropout of such a CUDA device. None: the CPU's."""
    if capability is None:
        yield
        return
    token = _CAPABILITY.set(capability)
    try:
        with _EXCHANGED_OPS.active():
            yield
    finally:
        _CAPABILITY.reset(token)


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0 or not x.numel():
        return x
    if p == 1:
        return x.mul(x.new_zeros(()))
    return aten.native_dropout.default(x, p, train)[0]  # type: ignore[no-any-return]


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What `scaled_dot_product_attention` in attention.cpp runs on a CUDA device."""
    device_type = q.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        casts = (torch.float32, *_HALF)
        q, k, v = (t.to(dtype) if t.dtype in casts else t for t in (q, k, v))
        mask = mask.to(dtype) if mask is not None and mask.dtype in casts else mask
    with torch.autocast(device_type, enabled=False):
        call = AttentionCall(q, k, v, mask, dropout_p, is_causal, enable_gqa)
        kernel = call.kernel(_CAPABILITY.get())
        if mask is not None and mask.dtype == torch.bool:
            least = -65504.0 if kernel == "cudnn" else -math.inf
            mask = torch.where(mask, 0.0, torch.scalar_tensor(least, dtype=q.dtype, device=q.device))
        if kernel == "math":
            result = aten._scaled_dot_product_attention_math.default(
                q, k, v, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )[0]
        elif kernel == "flash":
            padded = (F.pad(t, (0, -t.shape[-1] % 8)) if t.shape[-1] % 8 else t for t in (q, k, v))
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            found = aten._scaled_dot_product_flash_attention.default(*padded, dropout_p, is_causal, scale=scale)[0]
            result = found if found.shape[-1] == q.shape[-1] else found[..., : q.shape[-1]]
        else:
            if kernel == "efficient" and mask is not None:
                if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
                    # Rows have to begin at multiples of eight elements.
                    mask = F.pad(mask, (0, 8 - mask.shape[-1] % 8))[..., : mask.shape[-1]]
                mask = mask.expand(*q.shape[:3], k.shape[2])
            op = getattr(aten, f"_scaled_dot_product_{kernel}_attention").default
            result = op(q, k, v, mask, call.is_differentiated, dropout_p, is_causal, scale=scale)[0]
    return result  # type: ignore[no-any-return]


_EXCHANGED_OPS = private.InPlaceOf(
    {aten.dropout.default: _dropout, aten.scaled_dot_product_attention.default: _attention}, inner=True
)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What PyTorch looks at to choose a kernel of attention: the arguments of `scaled_dot_product_attention`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool

    @property
    def is_differentiated(self) -> bool:
        """Whether there is a backward."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.q, self.k, self.v))

    def kernel(self, capability: Capability) -> AttentionKernel:
        """The kernel that PyTorch takes on such a device. Raises UnsupportedModel where all that would do are off."""
        settings, fused = torch.backends.cuda, self._suits_fused_kernels()
        cudnn = fused and settings.cudnn_sdp_enabled() and self._suits_cudnn(capability)
        if cudnn and capability[0] in (9, 10):
            return "cudnn"
        if fused and settings.flash_sdp_enabled() and self._suits_flash(capability):
            return "flash"
        if fused and settings.mem_efficient_sdp_enabled() and self._suits_efficient(capability):
            return "efficient"
        if settings.math_sdp_enabled():
            return "math"
        if cudnn:
            return "cudnn"
        raise UnsupportedModel(
            f"no kernel of attention that sdpa_kernel allows takes queries of {self.q.dtype} and shape "
            f"{tuple(self.q.shape)} on a device of compute capability {capability}. Allow SDPBackend.MATH too"
        )

    def _suits_fused_kernels(self) -> bool:
        q, k, v = self.q, self.k, self.v
        if not q.dim() == k.dim() == v.dim() == 4 or not q.dtype == k.dtype == v.dtype:
            return False
        heads = q.shape[1], k.shape[1], v.shape[1]
        grouped = self.enable_gqa and heads[1] == heads[2] and heads[0] % heads[1] == 0
        grouped |= _SINCE_2_14 and heads[1] == heads[2] == 1
        strided = all(t.stride(-1) == 1 for t in (q, k, v)) or q.shape[-1] == 1
        return (
            q.shape[0] == k.shape[0] == v.shape[0]
            and (grouped or len(set(heads)) == 1)
            and min(q.shape[2], k.shape[2]) > 0
            and strided
            and (self.mask is None or self.mask.stride(-1) == 1)
        )

    def _suits_cudnn(self, capability: Capability) -> bool:
        q, k, mask = self.q, self.k, self.mask
        if not (8, 0) <= capability <= (12, 1) or q.dtype not in _HALF:
            return False
        if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
            return False
        if mask is not None:
            sizes = (q.shape[2], k.shape[2]) if mask.dim() == 2 else (*q.shape[:3], k.shape[2])
            if mask.requires_grad or len(sizes) != mask.dim():
                return False
            if any(have not in (1, wanted) for have, wanted in zip(mask.shape, sizes, strict=True)):
                return False
        widths = q.shape[3], self.v.shape[3]
        wide = capability[0] in (9, 10) and (
            widths == (192, 128)
            or (_SINCE_2_14 and (max(widths) <= 256 if not self.is_differentiated else widths == (256, 256)))
        )
        return (
            (max(widths) <= 128 or wide)
            and not any(width % 8 for width in widths)
            and (16 * self.dropout_p).is_integer()
            and k.shape[2] != 1
            and (not self.dropout_p or q.shape[2] != 1)
        )

    def _suits_flash(self, capability: Capability) -> bool:
        q, k, width = self.q, self.k, self.q.shape[3]
        small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
        if small and self.is_differentiated and not (width <= 192 or (not self.dropout_p and width > 224)):
            return False
        return (
            (8, 0) <= capability <= (12, 1)
            and q.dtype in _HALF
            and self.mask is None
            and width == k.shape[3] == self.v.shape[3] <= 256
            and (not self.is_causal or q.shape[2] == k.shape[2])
        )

    def _suits_efficient(self, capability: Capability) -> bool:
        q, half = self.q, self.q.dtype in _HALF
        alignment = 8 if half else 4 if capability[0] >= 8 else 1
        dtypes = (torch.float32, *_HALF) if capability[0] >= 8 else (torch.float32, torch.float16)
        return (
            (5, 0) <= capability <= (12, 1)
            and q.dtype in dtypes
            and all(t.stride(-1) == 1 for t in (q, self.k, self.v))
            and q.shape[3] == self.k.shape[3]
            and not any(t.shape[3] % alignment for t in (q, self.v))
            and (_SINCE_2_14 or q.shape[1] == self.k.shape[1])
        )
