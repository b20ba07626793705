"""What the CPU takes to update parameters that live on the host, by PyTorch's default kernels and by fused ones.

    python -m benchmarks.host_updates

Nanoseconds for each number of a parameter of 4096 x 4096, the best of five updates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD with momentum": lambda ps, **options: torch.optim.SGD(ps, lr=1e-3, momentum=0.9, **options),
}


def update_ns(make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, **options: Any) -> float:
    parameter = torch.nn.Parameter(torch.zeros(4096, 4096, dtype=dtype))
    optimizer = make([parameter], **options)
    best_s = float("inf")
    for _ in range(6):  # the first makes the state
        parameter.grad = torch.ones_like(parameter)
        start_s = time.perf_counter()
        optimizer.step()
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s / parameter.numel() * 1e9


def main() -> None:
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    for name, make in OPTIMIZERS.items():
        for dtype in (torch.bfloat16, torch.float32):
            default, fused = update_ns(make, dtype), update_ns(make, dtype, fused=True)
            print(f"{name}, {str(dtype)[6:]}: {default:.2f} ns by default, {fused:.2f} ns fused")


if __name__ == "__main__":
    main()
