"""Steps planned for cards that are not here hold what PyTorch's CUDA build holds there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memplan
from memplan.command_line.cards import card_named
from memplan.problem.reserved import reserved_bytes
from tests.command_line.conftest import SMALL_GPT2, Run

pytest.importorskip("transformers")
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

MIB = 1 << 20
SINCE_2_14 = torch.__version__ >= "2.14"
# Most bytes that `torch.cuda` says were allocated, and reserved as `plan.reserved_bytes` means it, in a plain step of
# PyTorch 2.14.1, CUDA 13.0, transformers 5.23, on tests/cuda_twin. Grouped heads in float32 have plain attention
# before 2.14, which was measured with memory-efficient attention switched off.
MEASURED = {
    ("H100", "dropout", torch.float32): (834726912, 847249408),
    ("H100", "dropout", torch.bfloat16): (554258432, 562036736),
    ("H100", "llama", torch.float32): (684948480, 700448768) if SINCE_2_14 else (978021376, 1015021568),
    ("H100", "llama", torch.bfloat16): (493578752, 520093696),
    ("H100", "padded llama", torch.bfloat16): (522971648, 538968064),
    ("A100-80GB", "dropout", torch.float32): (784657408, 805306368),
    ("A100-80GB", "dropout", torch.bfloat16): (504188928, 520093696),
    ("A100-80GB", "llama", torch.bfloat16): (443509248, 457179136),
    ("A100-80GB", "padded llama", torch.bfloat16): (472902144, 497025024),
}


def step(name: str, dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model without memory, and a batch."""
    with torch.device("meta"):
        if name == "dropout":
            config = GPT2Config(n_layer=4, n_embd=256, n_head=4, n_positions=512, vocab_size=4000, use_cache=False)
            model = GPT2LMHeadModel(config)
        else:
            config = LlamaConfig(
                hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
                num_key_value_heads=2, vocab_size=4000, use_cache=False,
            )  # fmt: skip
            model = LlamaForCausalLM(config)
    ids = torch.zeros(8, 512, dtype=torch.long)
    sample = {"input_ids": ids, "labels": ids.clone()}
    if name.startswith("padded"):
        sample["attention_mask"] = torch.ones(8, 512, dtype=torch.long)
        sample["attention_mask"][:, -5:] = 0
    return model.to(dtype).train(), sample


@pytest.mark.parametrize(("card", "name", "dtype"), MEASURED)
def test_peaks_are_those_of_cuda(card: str, name: str, dtype: torch.dtype) -> None:
    model, sample = step(name, dtype)
    costs = card_named(card).roofline(single=dtype == torch.float32)
    plan = memplan.plan(model, sample, "1TiB", device="cpu", costs=costs, config="noremat")
    allocated, reserved = MEASURED[card, name, dtype]
    assert abs(plan.baseline_peak_bytes - allocated) < 0.001 * allocated
    assert reserved_bytes(plan.problem, plan.schedule, True) == pytest.approx(reserved, rel=0.001)


def test_an_optimizer_takes_what_it_takes_on_a_gpu() -> None:
    """There it steps all parameters at once, with copies of them."""
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    assert optimizer.defaults["foreach"] is None
    found = {
        capability: memplan.plan(
            model, torch.zeros(1, 256), "1GiB", device="cpu", costs=memplan.Roofline(capability=capability),
            optimizer=optimizer, config="noremat",
        ).problem.update_bytes
        for capability in (None, (9, 0))
    }  # fmt: skip
    assert found[9, 0] >= 2 * found[None] > 0


def test_what_would_be_reserved(run: Run) -> None:
    told = run("plan", *SMALL_GPT2)
    assert "\nreserved " in told.out and "by PyTorch's allocator" in told.out
    counted = run("plan", *SMALL_GPT2, "--json").facts
    assert counted["reserved_bytes"] >= counted["peak_bytes"]


def test_cards_that_are_no_cuda_devices() -> None:
    assert card_named("MI300X").roofline(single=True).capability is None
    assert card_named("H200").roofline(single=True).capability == (9, 0)
    assert not card_named("T4").has_bfloat16 and card_named("L4").has_bfloat16
