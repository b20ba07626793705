"""Training loops on a CUDA device, to hold `Plan.reserved_bytes` to what the allocator reserves.

    python -m tests.support.reserved_loops FOLDER      # on a machine with a CUDA device

writes the plan of each loop, and what was reserved in it. Each runs in a process of its own.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memplan
from memplan.plans.plan import plan_to_bytes

FOLDER = Path(__file__).with_name("loops")
_STEPS = 10


class UNet(nn.Module):
    """Convolutions at four resolutions, with what each level of the way down hands to the way up."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        widths = [width << level for level in range(4)]
        self.down = nn.ModuleList(map(self._double, [3, *widths[:-1]], widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.join = nn.ModuleList(self._double(2 * w, w) for w in reversed(widths[:-1]))

    def _double(self, there: int, here: int) -> nn.Module:
        def one(width: int) -> list[nn.Module]:
            return [nn.Conv2d(width, here, 3, padding=1, bias=False), nn.BatchNorm2d(here), nn.ReLU(inplace=True)]

        return nn.Sequential(*one(there), *one(here))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        handed: list[torch.Tensor] = []
        for level, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if level else x)
            handed.append(x)
        handed.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat((handed.pop(), up(x)), 1))
        return x.square().mean()


class _Encoder(nn.Module):
    """Layers of attention and a head over a vocabulary."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(width, 8000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)).logsumexp(-1).mean()


LOOPS: dict[str, tuple[type[nn.Module], tuple[int, ...], float | str]] = {
    "unet_most": (UNet, (8, 3, 128, 128), 0.6),
    "unet_min": (UNet, (8, 3, 128, 128), "min"),
    "encoder_most": (_Encoder, (8, 256, 256), 0.8),
    "encoder_min": (_Encoder, (8, 256, 256), "min"),
}


def run_in_a_process(name: str, expandable: bool, folder: Path) -> Path:
    """Run a loop in a process of its own. Gives the file of its plan."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    path = folder / f"{name}_{'expandable' if expandable else 'default'}.plan"
    command = [sys.executable, "-m", "tests.support.reserved_loops", str(path), name]
    subprocess.run(command, check=True, env=environment)
    return path


def _run(path: Path, name: str) -> None:
    kind, shape, budget = LOOPS[name]
    net = kind().cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, fused=True)
    batch = torch.rand(shape, device="cuda")
    memplan.apply(net, batch, budget, optimizer=optimizer, arena=False)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(_STEPS):
        batch = torch.rand(shape, device="cuda")
        loss = net(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    plan = memplan.plan_of(net)
    assert plan is not None and plan.problem.requests is not None
    path.write_bytes(gzip.compress(plan_to_bytes(plan), mtime=0))
    figures: dict[str, Any] = {
        "torch": str(torch.__version__),
        "expandable": plan.problem.requests.expandable,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }
    path.with_suffix(".json").write_text(json.dumps(figures))


def _main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        _run(Path(arguments[0]), arguments[1])
        return
    for name in LOOPS:
        for expandable in (False, True):
            run_in_a_process(name, expandable, Path(arguments[0]))


if __name__ == "__main__":
    _main(sys.argv[1:])
