"""Steps planned on the CPU for a CUDA device have its attention and its dropout, and save what these save."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import memplan
from memplan.problem.data import Value

SINCE_2_14 = torch.__version__ >= "2.14"
H100, RTX_4090, A100, T4, V100 = (9, 0), (8, 9), (8, 0), (7, 5), (7, 0)
BFLOAT16, HALF, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
LENGTH = 40


class Attention(nn.Module):
    """Attention of `heads` queries over `groups` keys and values, with a mask if `mask` gives one."""

    def __init__(self, heads: int = 4, groups: int = 4, width: int = 8, mask: str = "", **options: object) -> None:
        super().__init__()
        self.project = nn.Linear(16, (heads + 2 * groups) * width)
        self.heads, self.groups, self.mask, self.options = heads, groups, mask, options

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).unflatten(2, (self.heads + 2 * self.groups, -1)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.groups, self.groups], 1)
        mask = None
        if self.mask:
            mask = torch.ones(x.shape[0], 1, LENGTH, LENGTH, device=x.device, dtype=torch.bool)
        if self.mask == "added":
            mask = mask.to(x.dtype)
        return F.scaled_dot_product_attention(q, k, v, mask, **self.options).sum()


def planned(model: nn.Module, capability: tuple[int, int] | None, dtype: torch.dtype = FLOAT32) -> memplan.Plan:
    sample = torch.zeros(2, LENGTH, 16, dtype=dtype)
    return memplan.plan(model.to(dtype), sample, "1GiB", device="cpu", costs=memplan.Roofline(capability=capability))


def kinds(plan: memplan.Plan) -> list[str]:
    """Ops of attention and dropout in forward, without what each of their names has."""
    names = [
        op.kind.removeprefix("aten._scaled_dot_product_") for op in plan.problem.graph.ops if op.phase == "forward"
    ]
    return [n.split("_attention")[0] for n in names if "_attention" in n or "softmax" in n or "dropout" in n]


CUDNN, FLASH, EFFICIENT, MATH = ["cudnn"], ["flash"], ["efficient"], ["aten._safe_softmax.default"]


@pytest.mark.parametrize(
    ("capability", "dtype", "model", "expected"),
    [
        (H100, BFLOAT16, lambda: Attention(is_causal=True), CUDNN),
        (H100, BFLOAT16, lambda: Attention(mask="bool"), CUDNN),
        (H100, HALF, lambda: Attention(groups=2, enable_gqa=True), CUDNN),
        (H100, BFLOAT16, lambda: Attention(dropout_p=0.1), FLASH),
        (H100, BFLOAT16, lambda: Attention(dropout_p=0.25), CUDNN),
        (H100, BFLOAT16, lambda: Attention(width=12), FLASH),
        (H100, FLOAT32, lambda: Attention(dropout_p=0.1), EFFICIENT),
        (A100, BFLOAT16, lambda: Attention(is_causal=True), FLASH),
        (RTX_4090, BFLOAT16, lambda: Attention(is_causal=True), FLASH),
        (RTX_4090, BFLOAT16, lambda: Attention(mask="bool"), EFFICIENT),
        (RTX_4090, BFLOAT16, lambda: Attention(mask="added"), EFFICIENT),
        (A100, BFLOAT16, lambda: Attention(width=200), FLASH),
        (RTX_4090, BFLOAT16, lambda: Attention(width=200), EFFICIENT),
        (RTX_4090, FLOAT32, lambda: Attention(groups=2, enable_gqa=True), EFFICIENT if SINCE_2_14 else MATH),
        (A100, FLOAT32, lambda: Attention(width=6), MATH),
        (T4, HALF, lambda: Attention(), EFFICIENT),
        (T4, BFLOAT16, lambda: Attention(), MATH),
        (V100, FLOAT32, lambda: Attention(width=6), EFFICIENT),
    ],
)
def test_the_kernel_that_the_card_takes(
    capability: tuple[int, int], dtype: torch.dtype, model: Callable[[], nn.Module], expected: list[str]
) -> None:
    assert kinds(planned(model(), capability, dtype)) == expected


def saved(plan: memplan.Plan, kind: str) -> list[Value]:
    graph = plan.problem.graph
    (op,) = (op for op in graph.ops if op.kind == kind and op.phase == "forward")
    return [graph.values[v] for v in op.outputs]


def test_what_is_saved_for_backward() -> None:
    """Sizes of logsumexp and of states of generators are those of CUDA's kernels, in blocks of 512 bytes."""
    efficient = planned(Attention(), RTX_4090)
    sizes = [v.size_bytes for v in saved(efficient, "aten._scaled_dot_product_efficient_attention.default")]
    rows = 64  # in multiples of 32
    assert sizes == [2 * 4 * LENGTH * 8 * 4, 2 * 4 * rows * 4, 512, 512]
    flash = planned(Attention(), RTX_4090, BFLOAT16)
    sizes = [v.size_bytes for v in saved(flash, "aten._scaled_dot_product_flash_attention.default")]
    assert sizes[:2] == [2 * 4 * LENGTH * 8 * 2, -(-2 * 4 * LENGTH * 4 // 512) * 512]
    assert flash.problem.graph.rng_state_bytes == 0
    assert all(v.size_bytes % 512 == 0 for v in flash.problem.graph.values)


def test_without_a_card_it_is_the_cpus() -> None:
    model = nn.Sequential(nn.Dropout(0.5), Attention())
    assert kinds(planned(model, None)) == ["flash"]
    assert planned(model, None).problem.requests is None
    assert any(op.kind.startswith("aten.bernoulli_") for op in planned(model, None).problem.graph.ops)


class Dropping(nn.Module):
    def __init__(self, p: float, train: bool) -> None:
        super().__init__()
        self.weight, self.p, self.training_ = nn.Parameter(torch.ones(16)), p, train

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.weight, self.p, self.training_).exp().sum()


@pytest.mark.parametrize(("p", "train", "masks"), [(0.5, True, 1), (0.0, True, 0), (1.0, True, 0), (0.5, False, 0)])
def test_dropout_keeps_a_mask_of_bytes(p: float, train: bool, masks: int) -> None:
    plan = planned(Dropping(p, train), H100)
    assert kinds(plan) == ["aten.native_dropout.default"] * masks
    if masks:
        assert saved(plan, "aten.native_dropout.default")[1].size_bytes == 1536  # 2 x 40 x 16 bytes, in blocks of 512


def test_dropout_within_plain_attention() -> None:
    """PyTorch's C++ calls it."""
    found = kinds(planned(Attention(width=6, dropout_p=0.5), A100))
    assert found == [*MATH, "aten.native_dropout.default"]


def test_the_dtype_is_that_of_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert kinds(planned(Attention(), A100)) == FLASH


def test_kernels_that_are_switched_off() -> None:
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert kinds(planned(Attention(), H100, BFLOAT16)) == EFFICIENT
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(memplan.UnsupportedModel, match="no kernel of attention that sdpa_kernel allows"),
    ):
        planned(Attention(), H100, FLOAT32)


def test_a_step_for_a_card_does_not_run() -> None:
    with pytest.raises(ValueError, match="plans the kernels of a device that is not here"):
        memplan.apply(Attention(), torch.zeros(2, LENGTH, 16), "1GiB", costs=memplan.Roofline(capability=H100))
