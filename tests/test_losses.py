"""The chunked loss: that of the model but for rounding, and planned to the same bits as unplanned."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

import memplan

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 200, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=200, bos_token_id=None, eos_token_id=None)
    )


def gemma2() -> nn.Module:  # caps its logits
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def opt() -> nn.Module:  # its head calls a part of its base model
    sizes = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "intermediate_size")}
    return OPTForCausalLM(OPTConfig(**sizes, ffn_dim=64, word_embed_proj_dim=32, dropout=0.0))


def adapters() -> nn.Module:
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks for a name that transformers has given another
        return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))


def batch(length: int = 50) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 200, (2, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :10] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("build", [gpt2, gemma2, llama, opt, adapters])
def test_it_is_the_loss_of_the_model(build: Any) -> None:
    torch.manual_seed(0)
    model, loss_fn = build().double().eval(), memplan.chunked_loss(16)
    whole = model(**batch()).loss
    expected = gradients(model, whole)
    chunked = loss_fn(model, **batch())
    found = gradients(model, chunked.loss)
    assert torch.allclose(chunked.loss, whole, rtol=1e-6)  # transformers computes it in float32
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-7) for name in expected)


def test_it_counts_the_items_that_it_is_told() -> None:
    model, inputs = llama(), {**batch(), "num_items_in_batch": torch.tensor(300)}
    assert torch.allclose(memplan.chunked_loss(16)(model, **inputs).loss, model(**inputs).loss, rtol=1e-5)


@pytest.mark.parametrize("budget", ["min", 0.8])
def test_planned_it_has_its_own_bits_at_a_lower_floor(budget: float | str) -> None:
    torch.manual_seed(0)
    model, loss_fn = llama(), memplan.chunked_loss(8)
    expected = loss_fn(model, **batch()).loss
    grads = gradients(model, expected)
    floor = memplan.plan(model, batch(), "min").peak_bytes
    memplan.apply(model, batch(), budget, loss_fn=loss_fn)
    found = model(**batch()).loss
    assert torch.equal(found, expected)
    assert all(torch.equal(g, grads[name]) for name, g in gradients(model, found).items())
    assert budget != "min" or memplan.plan_of(model).peak_bytes < floor  # type: ignore[union-attr]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="chunk_tokens is a number of tokens, 1 or more, got 0"):
        memplan.chunked_loss(0)
    with pytest.raises(ValueError, match="needs labels="):
        memplan.chunked_loss()(llama(), input_ids=batch()["input_ids"])
    with pytest.raises(ValueError, match="takes no logits_to_keep="):
        memplan.chunked_loss()(llama(), **batch(), logits_to_keep=1)
    hooked = llama()
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks on its forward would run at other times"):
        memplan.chunked_loss()(hooked, **batch())
    replaced = llama()
    replaced.forward = lambda **inputs: None
    with pytest.raises(ValueError, match="something has replaced its forward, which would be left out"):
        memplan.chunked_loss()(replaced, **batch())
    with pytest.raises(ValueError, match=r"a decoder with a head on top, got Linear\. Write a loss_fn"):
        memplan.chunked_loss()(nn.Linear(2, 2), labels=torch.zeros(1, 2, dtype=torch.long))


def test_virtual_tokens_would_be_left_out() -> None:
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks for a name that transformers has given another
        model = peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="without the virtual tokens"):
        memplan.chunked_loss()(model, **batch())


class Weighted:
    """A loss function that is an object, with a weight that may change, and a count."""

    def __init__(self) -> None:
        self.weight, self.count = 1.0, 0

    def __call__(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return model(x).pow(2).sum() * self.weight


def test_objects_as_loss_functions() -> None:
    torch.manual_seed(0)
    net, x, loss = nn.Linear(8, 8), torch.randn(4, 8), Weighted()
    planned = copy.deepcopy(net)
    memplan.apply(planned, x, "1GiB", loss_fn=loss, costs="estimate")
    for weight in (1.0, 2.0, 3.0):
        before, loss.weight = loss.count, weight
        assert torch.equal(planned(x), net(x).pow(2).sum() * weight)
        assert loss.count == before + 1
