"""The batch and the length that suit a budget: compared with plans at every size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import memplan
from memplan.planning.remedies import largest_that_fits

SETTINGS: dict[str, Any] = {"costs": "estimate", "config": "rotor"}


def network() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)])


def rows(count: int) -> torch.Tensor:
    return torch.zeros(count, 64)


def plan_at(count: int, budget: int, **settings: Any) -> memplan.Plan | None:
    try:
        return memplan.plan(network(), rows(count), budget, **{"on_infeasible": "raise", **SETTINGS, **settings})
    except memplan.BudgetInfeasible:
        return None


def test_no_divisor_of_the_effective_batch_is_faster() -> None:
    budget = memplan.plan(network(), rows(400), "min", **SETTINGS).peak_bytes
    choice = memplan.largest_batch(network(), rows, budget, effective_batch=800, **SETTINGS)
    assert choice.size * choice.accumulation == 800 and choice.plan.peak_bytes <= budget
    plans = {n: plan_at(n, budget, accumulate=n < 800) for n in range(1, 801) if 800 % n == 0}
    speeds = {n: n / plan.time_s for n, plan in plans.items() if plan is not None}
    assert speeds[choice.size] >= max(speeds.values()) * 0.99
    assert f"{choice.size}, {choice.accumulation} times for each step" in str(choice) and "<- taken" in str(choice)


def test_a_whole_batch_may_fit_where_smaller_ones_that_add_up_gradients_do_not() -> None:
    weights = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    whole, adds_up = (
        memplan.plan(weights, torch.zeros(4, 300), "min", accumulate=a, **SETTINGS).peak_bytes for a in (False, True)
    )
    assert whole < adds_up
    with pytest.raises(memplan.BudgetInfeasible):
        memplan.plan(weights, torch.zeros(2, 300), whole, accumulate=True, on_infeasible="raise", **SETTINGS)
    choice = memplan.largest_batch(weights, lambda rows: torch.zeros(rows, 300), whole, effective_batch=4, **SETTINGS)
    assert (choice.size, choice.accumulation) == (4, 1)


def test_the_budget_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = memplan.plan(network(), rows(400), "min", **SETTINGS).peak_bytes
    monkeypatch.setenv("MEMPLAN_BUDGET", str(budget))
    assert memplan.longest_sequence(network(), rows, **SETTINGS).plan.problem.budget_bytes == budget


def test_without_an_effective_batch_nothing_is_accumulated() -> None:
    budget = memplan.plan(network(), rows(400), "min", **SETTINGS).peak_bytes
    choice = memplan.largest_batch(network(), rows, budget, **SETTINGS)
    assert choice.accumulation == 1 and not choice.plan.problem.accumulate
    larger = max(choice.tried)
    assert plan_at(larger, budget) is not None and plan_at(int(larger * 1.2) + 1, budget) is None


def test_the_longest_sequence_fits_and_one_a_little_longer_does_not() -> None:
    budget = memplan.plan(network(), rows(400), "min", **SETTINGS).peak_bytes
    choice = memplan.longest_sequence(network(), rows, budget, **SETTINGS)
    assert choice.size == max(choice.tried) and plan_at(int(choice.size * 1.2) + 1, budget) is None


def test_the_most_is_not_passed() -> None:
    assert memplan.longest_sequence(network(), rows, "1GiB", most=37, **SETTINGS).size in range(32, 38)


@pytest.mark.parametrize(("fixed", "slope", "bend"), [(1000, 7, 0), (10, 1, 0.5), (0, 1000, 0), (5000, 0, 0.03)])
def test_few_tries_find_the_largest_size(fixed: float, slope: float, bend: float) -> None:
    tries = 0

    def floor(size: int) -> int:
        return int(fixed + slope * size + bend * size * size)

    class FoundPlan:
        def __init__(self, size: int) -> None:
            self.floor_bytes = floor(size)

    def plan_at(size: int) -> Any:
        nonlocal tries
        tries += 1
        if floor(size) > 100_000:
            return memplan.BudgetInfeasible("", floor(size))
        return FoundPlan(size)

    found = largest_that_fits(plan_at, 100_000, 1 << 20)
    assert found is not None and tries <= 8
    assert floor(found[0]) <= 100_000 < floor(int(found[0] * 1.3) + 1)


def test_nothing_fits() -> None:
    with pytest.raises(memplan.BudgetInfeasible):
        memplan.largest_batch(network(), rows, 1000, **SETTINGS)
    with pytest.raises(memplan.BudgetInfeasible):
        memplan.longest_sequence(network(), rows, 1000, **SETTINGS)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"give the budget in bytes, for example '16GiB': 0\.5 is another"):
        memplan.largest_batch(network(), rows, 0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="effective_batch is a number of rows, 1 or more, got 0"):
        memplan.largest_batch(network(), rows, "1GiB", 0)
    with pytest.raises(ValueError, match=r"make_sample\(2\) has no tensor with a size of 2"):
        memplan.largest_batch(network(), lambda _: rows(1), "1GiB", **SETTINGS)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    return transformers.LlamaForCausalLM(config).train()


def test_tokens_of_a_micro_batch() -> None:
    """A row of packed texts, as padding-free collators make it; and rows of which a quarter is padding."""

    def packed(tokens: int) -> dict[str, torch.Tensor]:
        ids = torch.ones(1, tokens, dtype=torch.long)
        return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(tokens)[None] % 16}

    def padded(rows: int) -> dict[str, torch.Tensor]:
        ids = torch.ones(rows, 32, dtype=torch.long)
        return {"input_ids": ids, "labels": ids, "attention_mask": (torch.arange(32) < 24).expand(rows, 32).long()}

    net = llama()
    longest = memplan.longest_sequence(net, packed, "1MiB", most=512, **SETTINGS)
    assert longest.tokens == longest.size > 64
    batch = memplan.largest_batch(net, padded, "1MiB", effective_batch=8, **SETTINGS)
    assert batch.tokens == 24 * batch.size
    assert f"{batch.size}, {batch.tokens} tokens a micro-batch" in str(batch)
    assert memplan.largest_batch(network(), rows, "1MiB", effective_batch=8, **SETTINGS).tokens is None
