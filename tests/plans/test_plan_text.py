"""The page of text about a plan: short however large the model, and honest about tensors."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch

import memplan
from memplan.capture.ops import op_facts
from memplan.plans.choices import choice_groups, choices_of
from memplan.plans.step_memory import KINDS, joined, planned_memory, step_memory
from memplan.problem.schedule import Compute
from tests.support.small import net_and_sample
from tests.support.zoo import MODELS


@cache
def floor_plan(name: str = "gpt2", **options: object) -> memplan.Plan:
    net, sample = MODELS[name](0)
    return memplan.explore(net, sample, costs="estimate", config="rotor", **options)[0]


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet50"])
def test_a_page_stays_a_page(name: str) -> None:
    lines = floor_plan(name).report().splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 140


def test_layers_that_repeat_are_one_row() -> None:
    text = floor_plan().report()
    assert re.search(r"recompute +transformer\.h\.\*\.mlp\.act: \w+ x\d+  float32\[", text)
    assert not re.search(r"transformer\.h\.\d.*\n.*transformer\.h\.\d", text)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.12.mlp: silu", "layers.*.mlp: silu"), ("0.1.weight", "*.*.weight"),
        ("conv1.bn2: relu", "conv1.bn2: relu"),
        ("gradient of parameter h.3.weight", "gradient of parameter h.*.weight"), ("layers.3: add", "layers.*: add"),
    ],
)  # fmt: skip
def test_numbers_of_layers_are_joined_and_no_others(name: str, expected: str) -> None:
    assert joined(name) == expected


def test_the_peak_is_made_of_what_the_accountant_counts() -> None:
    plan = floor_plan()
    text = plan.report()
    for kind, size_bytes in planned_memory(plan).peak_by_kind().items():
        assert re.search(rf"{re.escape(memplan.format_bytes(size_bytes))} +\d+%  {kind} +{KINDS[kind]}", text)


def test_a_peak_after_backward_is_said_to_be_there() -> None:
    net, sample = net_and_sample()
    optimizer = torch.optim.AdamW(net.parameters())
    plan = memplan.plan(net, sample, 1.0, optimizer=optimizer, costs="estimate")
    problem = replace(plan.problem, update_bytes=1 << 30, budget_bytes=None)
    memory = step_memory(problem, plan.schedule)
    assert memory.peak_moment == len(plan.schedule)
    assert memory.peak_by_kind()["optimizer"] == (1 << 30) + problem.extra_resident_bytes
    assert "optimizer steps" in memory.moment_text(memory.peak_moment)


def test_each_choice_is_what_the_schedule_does() -> None:
    plan = floor_plan()
    memory = planned_memory(plan)
    ran = [step.op for step in plan.schedule if isinstance(step, Compute)]
    choices = choices_of(memory)
    assert {c.decision for c in choices} == {"keep", "recompute"}
    for choice in choices:
        assert plan.problem.graph.values[choice.value].size_bytes == choice.size_bytes
        assert choice.time_s == plan.problem.costs.time_s[choice.op]
        lives = [life for life in memory.lifetimes if life.value == choice.value]
        assert (len(lives) > 1) == (choice.decision == "recompute")
        assert ran.count(choice.op) >= len(lives)
        assert 0 <= choice.share <= 1
    groups = choice_groups(choices)
    assert sorted(id(c) for group in groups for c in group) == sorted(map(id, choices))


def test_what_can_not_run_again_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    net, sample = net_and_sample()
    assert "can't be made again" not in memplan.plan(net, sample, 1.0, costs="estimate").report(), (
        "BatchNorm runs again"
    )
    monkeypatch.setattr(op_facts, "may_give_other_bits", lambda target, *_: target is torch.ops.aten.tanh.default)
    plan = memplan.plan(net, sample, "min", costs="estimate")
    choices = choices_of(planned_memory(plan))
    barred = [c for c in choices if c.barred]
    assert {c.label.split(": ")[-1] for c in barred} == {"tanh"}
    assert {c.decision for c in barred} == {"keep"} and any(c.decision == "recompute" for c in choices)
    line = next(line for line in plan.report().splitlines() if "can't be made again" in line)
    size = memplan.format_bytes(sum(c.size_bytes for c in barred))
    assert line.startswith(f"of these {len(barred)} ({size}) can't be made again: its op writes to")


def test_offload_is_told_with_both_other_ways() -> None:
    net, sample = MODELS["gpt2"](0)
    options = {"host_budget": "1GiB", "link": memplan.Link(1e12, 1e12), "costs": "estimate", "config": "rotor"}
    text = memplan.explore(net, sample, **options)[0].report()
    assert re.search(r"offload +transformer\.h\.\*.*\n +keep: .* of the step, .*; recompute: ", text)
