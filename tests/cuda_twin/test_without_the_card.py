"""Plans made on the CPU for a card have the ops that PyTorch runs there."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memplan
from memplan.capture.trace.cuda_ops import AttentionCall
from memplan.problem.reserved import reserved_bytes
from tests.cuda_twin import twin
from tests.cuda_twin.table import LOOPS, in_process

pytestmark = [pytest.mark.twin, pytest.mark.skipif(twin.missing() is not None, reason=str(twin.missing()))]

NAMES = ("math", "flash", "efficient", "cudnn")  # in the order of `torch.nn.attention.SDPBackend`
MASKS = {"": None, "2": (0, 0, 1, 1), "4": (1, 0, 1, 1), "heads": (0, 1, 0, 1), "3": (None, 1, 1, 1)}


def drawn(draw: random.Random) -> AttentionCall:
    """A call of attention: heads that are grouped or not, odd lengths and widths, masks, layouts."""
    batch, (heads, groups) = draw.choice([1, 2]), draw.choice([(4, 4), (4, 4), (4, 2), (4, 1), (1, 1)])
    length = draw.choice([1, 16, 17, 64])
    keys = draw.choice([length, length, 1, 32, 33])
    width = draw.choice([1, 4, 6, 8, 12, 20, 64, 96, 128, 160, 192, 200, 256, 264])
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
    requires_grad = draw.random() < 0.8

    def tensor(heads: int, length: int, width: int) -> Tensor:
        if draw.random() < 0.8:
            made = torch.empty(batch, length, heads, width, device="cuda", dtype=dtype).transpose(1, 2)
        else:
            made = torch.empty(batch, heads, width, length, device="cuda", dtype=dtype).transpose(2, 3)
        return made.requires_grad_(requires_grad)

    shape = MASKS[draw.choice(["", "", *MASKS])]
    mask = None
    if shape is not None:
        sizes = [n if whole else 1 for n, whole in zip((batch, heads, length, keys), shape) if whole is not None]
        sizes = sizes[2:] if shape == MASKS["2"] else sizes
        mask = torch.empty(sizes, device="cuda", dtype=draw.choice([dtype, torch.bool]))
        mask.requires_grad_(mask.dtype == dtype and draw.random() < 0.2)
    values = tensor(groups, keys, draw.choice([width, width, 64, 128]))
    return AttentionCall(
        tensor(heads, length, width), tensor(groups, keys, width), values, mask, draw.choice([0.0, 0.0, 0.1, 0.25]),
        mask is None and draw.random() < 0.5, draw.random() < 0.6,
    )  # fmt: skip


def chosen(call: AttentionCall) -> str:
    return NAMES[
        torch._fused_sdp_choice(
            call.q, call.k, call.v, call.mask, call.dropout_p, call.is_causal, enable_gqa=call.enable_gqa
        )
    ]


def test_the_choice_is_pytorchs() -> None:
    draw, seen = random.Random(0), set()
    for _ in range(3000):
        call = drawn(draw)
        expected = chosen(call)
        seen.add(expected)
        assert call.kernel(torch.cuda.get_device_capability()) == expected, call
    assert {"math", "flash", "efficient"} <= seen


@pytest.mark.parametrize("architecture", [80, 86, 89])
def test_the_choice_on_other_cards(architecture: int) -> None:
    code = f"from {__name__} import test_the_choice_is_pytorchs as t; t()"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"TWIN_SM": str(architecture)},
    )


class Attention(nn.Module):
    """Attention with dropout and a mask, for which a sample says which rows are padded."""

    def __init__(self, dropout_p: float, padded: bool, heads: int = 4) -> None:
        super().__init__()
        self.project, self.back = nn.Linear(128, 384), nn.Linear(128, 128)
        self.dropout_p, self.padded, self.heads = dropout_p, padded, heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(2, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
        mask = (x[:, None, None, :, 0] == 0) if self.padded else None
        found = F.scaled_dot_product_attention(q, k, v, mask, self.dropout_p, is_causal=mask is None)
        return F.dropout(self.back(found.transpose(1, 2).flatten(2)), 0.1).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dropout_p", "padded", "heads"), [(0.0, False, 4), (0.1, True, 4), (0.0, True, 64)])
def test_plans_with_and_without_the_card_have_the_same_ops(
    dtype: torch.dtype, dropout_p: float, padded: bool, heads: int
) -> None:
    model, sample = Attention(dropout_p, padded, heads).to(dtype), torch.zeros(4, 509, 128, dtype=dtype)
    costs = memplan.Roofline(500e12, 2.4e12, capability=torch.cuda.get_device_capability())
    here = memplan.plan(model, sample, "min", device="cpu", costs=costs)
    there = memplan.plan(model.cuda(), sample.cuda(), "min", costs=memplan.Roofline(500e12, 2.4e12))
    assert [op.kind for op in here.problem.graph.ops] == [op.kind for op in there.problem.graph.ops]
    assert here.baseline_peak_bytes == pytest.approx(there.baseline_peak_bytes, rel=0.001)
    assert here.peak_bytes == pytest.approx(there.peak_bytes, rel=0.001)
    assert here.reserved_bytes == pytest.approx(reserved_bytes(there.problem, there.schedule, True), rel=0.001)


LLAMA = (
    "num_hidden_layers=4", "hidden_size=4096", "intermediate_size=14336", "num_attention_heads=32",
    "num_key_value_heads=8", "vocab_size=128256",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "budget", "config"), [("llama", "min", LLAMA), ("gpt2", "min", ()), ("gpt2", "0.7", ())]
)
def test_the_command_says_what_the_card_reserves(
    name: str, budget: str, config: tuple[str, ...], tmp_path: Path
) -> None:
    sets = [word for field in config for word in ("--set", field)]
    words = ["plan", name, *sets, "--batch", "8", "--length", "512", "--gpu", "H100", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "memplan", *words, "--budget", budget if budget == "min" else f"{float(budget):.0%}"],
        check=True, capture_output=True, text=True, env=os.environ | {"MEMPLAN_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    here, there = (
        json.loads(done.stdout),
        in_process([name, budget, LOOPS[0], "yes"], str(tmp_path), "expandable_segments"),
    )
    assert here["peak_bytes"] == pytest.approx(there["predicted"], rel=0.02)
    assert here["reserved_bytes"] == pytest.approx(there["reserved"], rel=0.02)
