"""Calls of a planned model that run without a plan: what they hold is measured, told and reported."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import memplan
from memplan.installed.planned_forward import planned_forward
from memplan.runtime.watch.meter import LiveMeter

WORDS = 2048


class Head(nn.Module):
    """A loss over many words in chunks while it trains, and all logits while it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, WORDS, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        if not torch.is_grad_enabled():
            return self.head(hidden)
        return torch.stack([self._loss(h, t) for h, t in zip(hidden.chunk(8), y.chunk(8), strict=True)]).mean()

    def _loss(self, hidden: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(hidden), y)


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 16), torch.randint(WORDS, (size,))


def planned(budget: Any) -> tuple[Head, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Head()
    optimizer = torch.optim.AdamW(model.parameters())
    memplan.apply(model, batch(256), budget, optimizer=optimizer, costs="estimate")
    return model, optimizer


def passes_bytes(model: nn.Module) -> int:
    planned = planned_forward(model)
    assert planned is not None
    return planned.passes.peak_bytes


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "without a plan (evaluation" in r.getMessage()]


def held(model: Head, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> int:
    """What a call under no_grad holds by a meter of its own, with AdamW's state."""
    meter = LiveMeter()
    meter.register([list(model.parameters()), [p.grad for p in model.parameters()], list(optimizer.state.values())])
    meter.register([x, y])
    with torch.no_grad(), meter:
        model(x, y)
    return meter.peak_bytes


def test_a_pass_over_the_budget_is_told_once_with_what_would_fit(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = planned("1.6MiB")
    model(*batch(256)).backward()
    optimizer.step()
    data = batch(256)
    assert "without a plan" not in str(memplan.report(model))
    with torch.no_grad():
        logits = model(*data)
    plan = memplan.plan_of(model)
    assert plan is not None and plan.problem.budget_bytes is not None
    measured = passes_bytes(model)
    assert measured == pytest.approx(held(model, optimizer, *data), abs=64)  # AdamW's counts of steps
    assert measured > plan.problem.budget_bytes
    assert f"{memplan.format_bytes(measured)}  without a plan (evaluation" in str(memplan.report(model))
    (text,) = told(caplog)
    parts = int(text.split("It would fit in ")[1].split()[0])
    for x, y in zip(data[0].chunk(parts), data[1].chunk(parts), strict=True):
        assert held(model, optimizer, x, y) <= plan.problem.budget_bytes
    with torch.no_grad():
        assert torch.equal(model(*data), logits)
        model(*batch(1024))
    assert len(told(caplog)) == 1, "once"


def test_only_larger_passes_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = planned("64MiB")
    meters: list[int] = []
    monkeypatch.setattr("memplan.installed.passes.LiveMeter", lambda: meters.append(1) or LiveMeter())
    model.eval()
    for size, count in ((64, 1), (64, 1), (8, 1), (70, 1), (256, 2), (256, 2)):
        model(*batch(size))
        assert len(meters) == count


@pytest.mark.parametrize("budget", ["64MiB", 0.9])
def test_a_pass_within_the_budget_says_nothing(budget: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = planned(budget)
    caplog.set_level(logging.INFO, "memplan")
    with torch.no_grad():
        model(*batch(256))
    assert not told(caplog), "and a fraction of the step says nothing of the device"
    assert passes_bytes(model) > 0


def test_inputs_that_no_batch_can_make_smaller_are_to_be_shorter(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = planned("1.6MiB")
    x, y = batch(256)
    with torch.no_grad():
        model(x[None], y[None])
    assert told(caplog)[0].endswith("It would fit with shorter inputs")


def test_the_cache_of_generate_counts() -> None:
    """Each call has a longer cache, and is given one token."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=64, n_positions=256)
    model, prompt = GPT2LMHeadModel(config).train(), torch.randint(64, (8, 16))
    memplan.apply(model, {"input_ids": prompt, "labels": prompt}, "64MiB", costs="estimate")
    meter = LiveMeter()
    meter.register([list(model.parameters()), list(model.buffers()), prompt])
    with meter:
        model.eval().generate(prompt, max_new_tokens=200, min_new_tokens=200, do_sample=False, pad_token_id=0)
    assert 0.9 * meter.peak_bytes <= passes_bytes(model) <= meter.peak_bytes


def test_a_teacher_beside_the_model_counts_once_it_is_watched(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = planned("1.6MiB")
    teacher, (x, y) = Head().eval().requires_grad_(False), batch(512)
    with torch.no_grad():
        teacher(x, y)
    assert passes_bytes(model) == 0
    memplan.watch(model, teacher)
    meter = LiveMeter()
    meter.register([list(model.parameters()), list(teacher.parameters()), x, y])
    with torch.no_grad(), meter:
        logits = teacher(x, y)
    plan = memplan.plan_of(model)
    assert plan is not None
    of_adam_bytes = plan.problem.extra_resident_bytes
    assert passes_bytes(model) == meter.peak_bytes + of_adam_bytes > logits.nbytes
    assert len(told(caplog)) == 1
    memplan.remove(model)
    assert not teacher._forward_pre_hooks and not teacher._forward_hooks
    with pytest.raises(ValueError, match="not planned"):
        memplan.watch(model, teacher)


def test_a_report_shows_the_loop() -> None:
    model, optimizer = planned("64MiB")
    for _ in range(2):
        model(*batch(256)).backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = memplan.plan_of(model)
    assert plan is not None
    text = str(memplan.report(model))
    loop, page = text.split("\n\n", 1)
    assert page == plan.report()
    rows = [line.split("  ") for line in loop.splitlines()[1:]]
    assert [row[-1].split(":")[0].split(",")[0] for row in rows] == ["throughout", "in the step", "in optimizer.step()"]
    assert "as measured" in rows[1][-1]
    assert memplan.report(memplan.remove(model)) is None
