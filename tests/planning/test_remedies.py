"""Refusals that end in a next step: each remedy was worked out, and works."""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import memplan
from memplan.plans.step_memory import planned_memory
from tests.support.island_models import Around, Branching

pytestmark = pytest.mark.full_search  # else nobody looks for remedies

SETTINGS = {"costs": "estimate", "config": "rotor"}
SETTING = re.compile(r"[a-z_]+=")


def language_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=1000, bos_token_id=None, eos_token_id=None)
    )


def tokens(rows: int = 4, length: int = 64) -> dict[str, torch.Tensor]:
    ids = torch.arange(rows * length).reshape(rows, length) % 1000
    return {"input_ids": ids, "labels": ids.clone()}


def refused(model: nn.Module, sample: Any, budget: int | str, **settings: Any) -> memplan.BudgetInfeasible:
    with pytest.raises(memplan.BudgetInfeasible) as caught:
        memplan.plan(model, sample, budget, **{**SETTINGS, **settings})
    return caught.value


def just_below_floor(model: nn.Module, sample: Any, **settings: Any) -> int:
    return memplan.plan(model, sample, "min", **{**SETTINGS, **settings}).peak_bytes - 1


@functools.cache
def refusal_below_the_floor() -> tuple[int, memplan.BudgetInfeasible]:
    """A budget in which the language model does not fit, and what is said of it."""
    model, sample = language_model(), tokens()
    budget = just_below_floor(model, sample)
    return budget, refused(model, sample, budget)


def test_remedies_are_ranked_and_each_fits_as_it_says() -> None:
    model, sample = language_model(), tokens()
    budget, error = refusal_below_the_floor()
    assert [r.overhead for r in error.remedies] == sorted(r.overhead for r in error.remedies)
    tried = 0
    for remedy in error.remedies:
        assert remedy.peak_bytes <= budget and remedy.change in str(error)
        if not SETTING.match(remedy.change):
            continue
        changed = eval(f"dict({remedy.change})", {"memplan": memplan})
        config = {} if "loss_fn" in changed else SETTINGS
        link = {"link": memplan.Link(25e9, 25e9)} if "host_budget" in changed else {}
        plan = memplan.plan(model, sample, budget, **{**SETTINGS, **config, **link, **changed})
        assert plan.peak_bytes <= budget
        tried += 1
    assert tried >= 2
    assert str(error.floor_bytes) in str(error)


@pytest.mark.slow
def test_smaller_calls_fit_as_they_say() -> None:
    model, sample = language_model(), tokens(rows=8)
    budget, _ = refusal_below_the_floor()
    changes = {r.change: r for r in refused(model, sample, budget).remedies}
    batch = next(re.fullmatch(r"batches of (\d+) of 8, accumulate=True", c) for c in changes if "batches" in c)
    length = next(re.fullmatch(r"a length of (\d+) instead of 64", c) for c in changes if "length" in c)
    assert batch and length
    fewer = memplan.plan(model, tokens(int(batch[1])), budget, accumulate=True, **SETTINGS)
    assert fewer.peak_bytes == changes[batch[0]].peak_bytes
    shorter = memplan.plan(model, tokens(8, int(length[1])), budget, **SETTINGS)
    assert shorter.peak_bytes == changes[length[0]].peak_bytes


def test_a_cache_that_is_returned_need_not_be() -> None:
    model, sample = language_model(), tokens()
    budget, refusal = refusal_below_the_floor()
    remedy = next(r for r in refusal.remedies if r.change == "the argument use_cache=False")
    uncached = memplan.plan(model, {**sample, "use_cache": False}, budget, **SETTINGS)
    assert uncached.peak_bytes == remedy.peak_bytes <= budget
    error = refused(model, {**sample, "use_cache": False}, 10_000)
    assert "the argument" not in str(error)


def test_updates_in_backward_where_gradients_are_the_problem() -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    settings = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    budget = just_below_floor(model, torch.ones(1, 256), **settings)
    error = refused(model, torch.ones(1, 256), budget - 100_000, **settings)
    assert 'update="backward"' in [r.change for r in error.remedies]


def test_the_least_says_what_it_is_made_of() -> None:
    model, sample = language_model(), tokens()
    text = str(refused(model, sample, 10_000, on_infeasible="raise"))
    plan = memplan.plan(model, sample, "min", **SETTINGS)
    for kind, size_bytes in planned_memory(plan).peak_by_kind().items():
        assert f"{kind} {memplan.format_bytes(size_bytes)}" in text
    assert re.search(r"where aten\.\S+ of .* runs \((forward|backward)\):\n .* float32\[", text)


@pytest.mark.slow
def test_what_was_tried_in_vain_is_told() -> None:
    model = language_model()
    weights = sum(p.numel() * 4 for p in model.parameters())
    error = refused(model, tokens(1), weights // 2, on_infeasible="advise")
    assert "None of these is enough (least peak): " in str(error) and "loss_fn=" in str(error)
    assert re.search(r"a length of \d+ \([\d.]+ \wiB\)", str(error))


@pytest.mark.parametrize("dynamic", ["auto", "all"])
def test_a_model_that_is_to_be_trained_is_told_as_well(dynamic: str) -> None:
    model, sample = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), torch.ones(64, 64)
    settings: dict[str, Any] = {**SETTINGS, "dynamic": dynamic}
    with pytest.raises(memplan.BudgetInfeasible) as caught:
        memplan.apply(model, sample, just_below_floor(model, sample), **settings)
    assert any("batches of" in remedy.change for remedy in caught.value.remedies)


@pytest.mark.slow
def test_a_step_with_an_island_is_told_which_batch_fits() -> None:
    model, sample = Around(Branching()), torch.randn(512, 32)
    with pytest.raises(memplan.BudgetInfeasible, match="no schedule fits") as caught:
        memplan.apply(model, sample, "1MiB", costs="estimate")
    changes = [re.fullmatch(r"batches of (\d+) of 512, accumulate=True", r.change) for r in caught.value.remedies]
    rows = next(int(change[1]) for change in changes if change)
    memplan.apply(model, sample[:rows], "1MiB", costs="estimate", accumulate=True)
    assert memplan.plan_of(model).peak_bytes <= 1 << 20  # type: ignore[union-attr]


def test_raise_looks_for_nothing() -> None:
    model = language_model()
    error = refused(model, tokens(), 10_000, on_infeasible="raise")
    assert not error.remedies and "fits with" not in str(error)


def test_min_raises_the_budget_to_the_least_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model, sample = language_model(), tokens()
    least = just_below_floor(model, sample) + 1
    memplan.apply(model, sample, 10_000, on_infeasible="min", **SETTINGS)
    plan = memplan.plan_of(model)
    assert isinstance(plan, memplan.Plan) and plan.peak_bytes == plan.problem.budget_bytes == least
    assert "the budget is raised to the least" in caplog.text
    model(**sample).loss.backward()
    model(**tokens(6)).loss.backward()  # a larger one raises it further
    assert memplan.plan_of(model).peak_bytes > least  # type: ignore[union-attr]


def test_min_with_a_host_budget() -> None:
    model, sample = language_model(), tokens()
    settings: Any = {**SETTINGS, "host_budget": "1GiB", "link": memplan.Link(1e9, 1e9)}
    plan = memplan.plan(model, sample, 10_000, on_infeasible="min", **settings)
    assert plan.peak_bytes <= plan.problem.budget_bytes and plan.host_bytes


def test_a_word_that_is_none() -> None:
    with pytest.raises(ValueError, match="on_infeasible must be 'advise', 'raise' or 'min', got 'maybe'"):
        memplan.plan(language_model(), tokens(), "1GiB", on_infeasible="maybe")


@pytest.mark.slow
def test_llama_8b_with_adapters_in_23_gib() -> None:
    """A refusal in one screen, with offload and a chunked loss among the remedies."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072,
    )  # fmt: skip
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks for a name that transformers has given another
        adapters = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(LlamaForCausalLM(config).to(torch.bfloat16), adapters)
        model = model.to(torch.bfloat16).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    ids = torch.zeros(1, 8192, dtype=torch.long)
    sample = {"input_ids": ids, "labels": ids, "use_cache": False}
    card = {"device": "cpu", "costs": memplan.Roofline(100e12, 1e12), "config": None}
    error = refused(model, sample, "23GiB", optimizer=optimizer, **card)
    changes = " ".join(r.change for r in error.remedies)
    assert 'host_budget="' in changes and "loss_fn=memplan.chunked_loss()" in changes
    assert len(str(error).splitlines()) <= 24
