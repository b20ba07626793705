"""What CUDA's libraries keep on the device beside what ops return: cuBLAS has a workspace for each thread and stream.

The forward pass runs on the thread that calls the model, the backward pass on autograd's own thread, so there are two.
They come from PyTorch's allocator when a thread first multiplies matrices, and stay: 32 MiB each on a Hopper. From
PyTorch 2.15 on they are scratch of each product instead, which measured costs have.
"""

from __future__ import annotations

import functools

import torch

from memplan import torch_private as private
from memplan.capture.analysis.traced import Traced
from memplan.capture.ops.layout import allocated_bytes

_THREADS = 2
_CONVOLVE = frozenset(f"aten.{name}.default" for name in ("convolution", "convolution_backward"))
_MULTIPLY = frozenset(
    f"aten.{name}.default"
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "addr", "dot", "vdot", "_addmm_activation",
        "_scaled_mm", "_int_mm", "_grouped_mm",
    )
)  # fmt: skip


def multiplies_matrices(traced: Traced) -> bool:
    """Whether a step on a CUDA device calls cuBLAS."""
    return traced.device.type == "cuda" and _multiplies(traced)


def _multiplies(traced: Traced) -> bool:
    kinds = _MULTIPLY if torch.backends.cudnn.enabled else _MULTIPLY | _CONVOLVE
    return any(op.kind in kinds for op in traced.graph.ops)


def library_bytes(traced: Traced, measured: bool, capability: tuple[int, int] | None = None) -> int:
    """Bytes that libraries hold on the device once the step has run.

    - measured: costs have the scratch of ops.
    - capability: of the CUDA device that a step on the CPU stands for.
    """
    if capability is not None:
        threads = _THREADS if torch.__version__ < "2.15" else 1
        return threads * private.blas_workspace_bytes(capability) if _multiplies(traced) else 0
    if not multiplies_matrices(traced) or (measured and not _keeps_workspaces(traced.device)):
        return 0
    return most_library_bytes(traced.device)


def most_library_bytes(device: torch.device) -> int:
    """Bytes that libraries may hold while any step runs."""
    if device.type != "cuda":
        return 0
    return (_THREADS if _keeps_workspaces(device) else 1) * workspace_bytes(device)


@functools.cache
def _keeps_workspaces(device: torch.device) -> bool:
    with private.outside_of_tracing():
        return private.blas_keeps_workspaces(device)


def workspace_bytes(device: torch.device) -> int:
    """Bytes of one workspace of cuBLAS."""
    with torch.cuda.device(device):
        return allocated_bytes(private.blas_workspace_bytes(), device)


def make_workspaces(device: torch.device) -> None:
    """Make the workspaces now, on this thread and on autograd's, so that they do not count as growth of a step."""
    with private.outside_of_tracing(), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        square = torch.zeros(8, 8, device=device, requires_grad=True)
        torch.autograd.grad((square @ square).sum(), square)
