"""What CUDA's libraries keep on the device beside what ops return: cuBLAS has a workspace for each thread and stream.

The forward pass runs on the thread that calls the model, the backward pass on autograd's own thread, so there are two.
They come from PyTorch's allocator when a thread first multiplies matrices, and stay: 32 MiB each on a Hopper.
"""

from __future__ import annotations

import torch

from memplan import torch_private as private
from memplan.capture.analysis.traced import Traced
from memplan.capture.ops.layout import allocated_bytes

_THREADS = 2
_MULTIPLY = frozenset(
    f"aten.{name}.default"
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "addr", "dot", "vdot", "_addmm_activation",
        "_scaled_mm", "_int_mm",
    )
)  # fmt: skip


def multiplies_matrices(traced: Traced) -> bool:
    """Whether a step on a CUDA device calls cuBLAS."""
    return traced.device.type == "cuda" and any(op.kind in _MULTIPLY for op in traced.graph.ops)


def library_bytes(traced: Traced) -> int:
    """Bytes that libraries hold on the device once the step has run."""
    return most_library_bytes(traced.device) if multiplies_matrices(traced) else 0


def most_library_bytes(device: torch.device) -> int:
    """Bytes that libraries may hold once any step has run."""
    return _THREADS * workspace_bytes(device) if device.type == "cuda" else 0


def workspace_bytes(device: torch.device) -> int:
    """Bytes of one workspace of cuBLAS."""
    with torch.cuda.device(device):
        return allocated_bytes(private.blas_workspace_bytes(), device)


def make_workspaces(device: torch.device) -> None:
    """Make the workspaces now, on this thread and on autograd's, so that they do not count as growth of a step."""
    with private.outside_of_tracing(), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        square = torch.zeros(8, 8, device=device, requires_grad=True)
        torch.autograd.grad((square @ square).sum(), square)
