"""What CUDA's libraries keep on the device beside what ops return: cuBLAS has a workspace for each thread and stream.

The forward pass runs on the thread that calls the model, the backward pass on autograd's own thread, so there are two.
They come from PyTorch's allocator when a thread first multiplies matrices, and stay: 32 MiB each on a Hopper. PyTorch
2.11 gives cuBLASLt, which multiplies where a bias is added, one of 1 MiB beside it. From PyTorch 2.15 on they are
scratch of each product instead, which measured costs have.
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
    """Whether a step calls cuBLAS, on a CUDA device."""
    kinds = _MULTIPLY if torch.backends.cudnn.enabled else _MULTIPLY | _CONVOLVE
    return any(op.kind in kinds for op in traced.graph.ops)


def workspaces(traced: Traced, measured: bool, capability: tuple[int, int] | None = None) -> tuple[int, ...]:
    """Bytes of each workspace that libraries hold on the device once the step has run.

    - measured: costs have the scratch of ops.
    - capability: of the CUDA device that a step on the CPU stands for.
    """
    if capability is not None:
        threads = _THREADS if torch.__version__ < "2.15" else 1
        return (private.blas_workspace_bytes(capability),) * threads if multiplies_matrices(traced) else ()
    on_cuda = traced.device.type == "cuda"
    if not (on_cuda and multiplies_matrices(traced)) or (measured and not _kept(traced.device)):
        return ()
    return _most_workspaces(traced.device)


def most_library_bytes(device: torch.device) -> int:
    """Bytes that libraries may hold while any step runs."""
    return sum(_most_workspaces(device)) if device.type == "cuda" else 0


def _most_workspaces(device: torch.device) -> tuple[int, ...]:
    if kept := _kept(device) * _THREADS:
        return kept
    with torch.cuda.device(device):
        return (allocated_bytes(private.blas_workspace_bytes(), device),)


@functools.cache
def _kept(device: torch.device) -> tuple[int, ...]:
    """Bytes of the workspaces that a thread keeps: of cuBLAS, then of cuBLASLt where it has its own."""
    with private.outside_of_tracing():
        return tuple(allocated_bytes(size, device) for size in private.kept_by_blas(device) if size)


def make_workspaces(device: torch.device) -> None:
    """Make the workspaces now, on this thread and on autograd's, so that they do not count as growth of a step."""

    def multiply(_: torch.Tensor | None = None) -> None:
        torch.mm(square, square)
        torch.addmm(square[0], square, square)

    with private.outside_of_tracing(), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        square = torch.zeros(8, 8, device=device)
        multiply()
        x = torch.zeros(1, device=device, requires_grad=True)
        x.register_hook(multiply)
        torch.autograd.grad(x.sum(), x)
